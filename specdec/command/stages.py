"""Wrapper of every command in click: options from settings, errors as two lines, exit statuses."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from specdec import __version__, errors
from specdec.command import help
from specdec.command.settings import (
    OPTION_HINT,
    SECTIONS,
    resolve_settings,
    suggest_option,
    takes_unknown_options,
)
from specdec.command.signals import HungUp, Terminated, raise_at_sigint, take_ending_signals
from specdec.command.stdout import STDOUT, STDOUT_HINT, name_stdout
from specdec.errors import SpecDecError, UsageError, cut_middle, make_printable, suggest
from specdec.methods import METHODS
from specdec.options import Flag, get_flags, name_flag
from specdec.system import logs
from specdec.system.threads import calm_threads

ALL_FLAG = "--all"  # prints the help of all options, with --help or without
CONTEXT: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "max_content_width": 110,
}


class StageCommand(click.Command):
    """Command whose list options take several words: `--input-text "a" "b"`.

    A subcommand as the first word takes all further words.
    """

    settings_class: type
    work: Callable[[Any], None]  # function of settings of that class
    # Function that predicts the work's results and errors, for specdec generate; see the stages.
    foresee: Callable[..., Any]
    open_matcher: Callable[[str], Any]  # of specdec-convert, for specdec match
    list_options: frozenset[str] = frozenset()
    subcommands: Mapping[str, click.Command] = {}

    @property
    def stage(self) -> str:
        """Name of the command after `specdec`."""
        return str(self.name).removeprefix("specdec-")

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_help_text(ctx, formatter)
        help.write_examples(self.stage, formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        help.write_options(self.stage, ctx, formatter, is_long=ALL_FLAG in ctx.meta)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None,
        **context_options: Any,
    ) -> click.Context:  # fmt: skip
        if args and args[0] in self.subcommands:
            subcommand = self.subcommands[args[0]]
            return subcommand.make_context(
                f"{info_name} {args[0]}", args[1:], parent, **context_options
            )
        return super().make_context(info_name, args, parent, **context_options)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that the context was made for."""
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = args[: args.index("--")] if "--" in args else args
        if ALL_FLAG in options and not ctx.resilient_parsing:
            ctx.meta[ALL_FLAG] = True
            args = ["--help"]
        return super().parse_args(ctx, self._repeat_list_options(ctx, args))

    def _repeat_list_options(self, ctx: click.Context, args: list[str]) -> list[str]:
        expanded: list[str] = []
        current = ""  # the list option that takes the next words, empty for none
        is_waiting = False  # whether that option still lacks its first word
        for i, arg in enumerate([*args, "--"]):
            is_option = arg.startswith("--") or arg == "-h"
            if is_option and is_waiting and not ctx.resilient_parsing:
                raise click.BadOptionUsage(current, f"Option '{current}' requires an argument.")
            if arg == "--":  # the end of all options
                return expanded + args[i:]
            if is_option:
                name, equals, _ = arg.partition("=")
                is_list = name.replace("_", "-") in self.list_options
                current, is_waiting = (name, not equals) if is_list else ("", False)
                if not is_waiting:
                    expanded.append(arg)
            else:
                expanded += [current, arg] if current else [arg]
                is_waiting = False
        raise AssertionError("the loop ends at --")


def _describe_default(flag: Flag, default: Any) -> str:
    """Return an option's default as its help shows it; an empty text for none."""
    if flag.kind == "enable" and not flag.is_switch:
        default_text = "enable" if default else "disable"
        return "" if default is None else f"  [default: {default_text}]"
    if default is None or default is False or default == []:
        return ""
    return f"  [default: {'on' if flag.kind == 'flag' else default}]"


def _build_parameter(name: str, flag: Flag, default: Any) -> click.Parameter:
    if flag.is_argument:
        return click.Argument([name], nargs=-1, metavar=f"[{flag.metavar or 'TEXT'}]...")
    options: dict[str, Any] = {"default": None, "hidden": flag.hidden}
    declaration = name_flag(name)
    if flag.kind == "flag" or flag.is_switch:
        options["is_flag"] = True
        if flag.is_switch or default is True:
            declaration += "/--no-" + name.replace("_", "-")
    elif flag.kind == "enable":
        options["metavar"] = "[enable|disable]"
    elif flag.choices:
        # Checked with the recipe's values, not by click: one message, one rule for underscores.
        options["metavar"] = f"[{'|'.join(flag.choices)}]"
    else:
        names = {"path": "PATH", "int": "N", "float": "X", "list": "TEXT..."}
        options["metavar"] = flag.metavar or names.get(flag.kind)
        if flag.kind == "list":
            options["multiple"] = True
        else:
            options["type"] = {"int": int, "float": float}.get(flag.kind, str)
    text = flag.help + _describe_default(flag, default)

    def complete(_: object, __: object, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        if flag.kind == "path":
            return [CompletionItem(incomplete, type="file")]
        choices = ("enable", "disable") if flag.kind == "enable" else flag.choices
        return [CompletionItem(choice) for choice in choices if choice.startswith(incomplete)]

    return click.Option([declaration], help=text, shell_complete=complete, **options)


def stage_command(
    name: str, settings_class: type, *, section: str | None = None
) -> Callable[[Callable[[Any], None]], StageCommand]:
    """Decorate `work(settings)` into a click command with one option per settings field."""

    def decorate(work: Callable[[Any], None]) -> StageCommand:
        flags = get_flags(settings_class)

        def callback(debug: bool, config: str | None = None, **values: Any) -> None:
            ctx = click.get_current_context()
            # A list option without words has the value ().
            typed = {
                key: value for key, value in values.items() if value != ()
                and ctx.get_parameter_source(key) is ParameterSource.COMMANDLINE
            }  # fmt: skip
            logs.set_up(debug=debug)
            if config == "":
                raise UsageError("--config: expected a path, got ''", "give --config a path")
            recipe = None if config is None else Path(config)
            settings: Any = resolve_settings(
                settings_class, section or name, typed, recipe, _group_unknown_words(ctx)
            )
            _check_folders(settings, flags)
            work(settings)

        params: list[click.Parameter] = [
            _build_parameter(key, flag, default) for key, (flag, default) in flags.items()
        ]
        if (section or name) in SECTIONS:
            text = f"YAML recipe; its `{section or name}:` section."
            params.append(click.Option(["--config"], metavar="FILE", help=text))
        text = "Show tracebacks and debug messages."
        params += [click.Option(["--debug"], is_flag=True, help=text), _make_version_option()]
        passes_on = takes_unknown_options(settings_class)
        command = StageCommand(
            f"specdec-{name}", params=params, callback=callback, help=work.__doc__,
            context_settings=CONTEXT
            | {"ignore_unknown_options": passes_on, "allow_extra_args": passes_on},
        )  # fmt: skip
        command.settings_class, command.work = settings_class, work
        command.list_options = frozenset(
            name_flag(key) for key, (flag, _) in flags.items()
            if flag.kind == "list" and not flag.is_argument
        )  # fmt: skip
        return command

    return decorate


def show_report(
    report: dict[str, Any], settings: Any,
    format_report: Callable[[dict[str, Any]], str] | None = None, error: SpecDecError | None = None,
) -> None:  # fmt: skip
    """Print a report, as text or as JSON by the settings; then raise its error, if any.

    format_report: None where the log has printed the whole report.
    """
    if settings.json:
        click.echo(json.dumps(report))
    elif format_report is not None:
        click.echo(format_report(report))
    if error is not None:
        raise error


def _check_folders(settings: Any, flags: Mapping[str, tuple[Flag, Any]]) -> None:
    """Raise SpecDecError for a wrong folder, before the stage imports torch."""
    from specdec.files.folders import MODEL, expect_folder, is_hub_id  # imports numpy

    for key, (flag, _) in flags.items():
        path = getattr(settings, key)
        is_on_hub = flag.folder == MODEL and path is not None and is_hub_id(path)
        if flag.folder is not None and path is not None and not is_on_hub:
            expect_folder(path, flag.folder, name_flag(key))


def _group_unknown_words(ctx: click.Context) -> dict[str, list[str]]:
    """Group the words that click found no option for, by the unknown options' names."""
    grouped: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in ctx.args:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            current = [value] if equals else []
            grouped[name.replace("-", "_")] = current
        elif word.startswith("-") and not word[1:2].isdigit():
            raise click.NoSuchOption(word, ctx=ctx)
        elif current is None:
            raise click.UsageError(f"{_EXTRA_WORD} ({word})", ctx=ctx)
        else:
            current.append(word)
    return grouped


def _make_version_option() -> click.Option:
    def show(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if value:
            click.echo(f"specdec {__version__}")
            ctx.exit()

    return click.Option(
        ["-V", "--version"], is_flag=True, is_eager=True, expose_value=False, callback=show,
        help="Print the version and exit.",
    )  # fmt: skip


def run_command(command: click.Command, args: list[str] | None = None) -> None:
    """Run a command as a process's main function and exit with its status."""
    arguments = sys.argv[1:] if args is None else args
    calm_threads()
    name_stdout()
    try:
        raise_at_sigint()
        # A launcher's process may wait for others, where Python's handlers do not run.
        with contextlib.nullcontext() if _is_launched() else take_ending_signals():
            _check_current_folder()
            status = command.main(arguments, standalone_mode=False)
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has gone
        status = 1
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the one place that reports
        status = _report_failure(error, with_traceback="--debug" in arguments)
    _close_stdout()
    sys.exit(status if isinstance(status, int) else 0)


def _check_current_folder() -> None:
    try:  # without one, torch ends the process and a path's error names nothing
        os.getcwd()
    except FileNotFoundError:
        raise SpecDecError("the current folder was removed", "go to one that is there") from None


def _report_failure(error: BaseException, *, with_traceback: bool) -> int:
    """Print the error that ended a command; return the exit status."""
    if isinstance(error, click.Abort) and isinstance(error.__cause__, EOFError):
        error = error.__cause__  # click takes any EOFError for the end of its own input
    if with_traceback:
        traceback.print_exception(error)
    status, message, hint = _explain_error(error)
    if status == 2 and _is_launched() and logs.get_launched_rank():
        # Rank 0 prints this error too, and its launcher would cut it short when this one ends.
        time.sleep(1)
    else:
        print_error(message, hint, len(getattr(error, "problems", [0])))
    return status


def _is_launched() -> bool:
    """Return whether a launcher such as torchrun started this process."""
    try:
        return logs.get_launched_rank() is not None
    except SpecDecError:
        return False


def _close_stdout() -> None:
    """Drop the output that a full or closed stdout did not take, which Python would report."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _explain_error(error: BaseException) -> tuple[int, str, str]:
    """Return the exit status, the fact and the remedy for the error that ended a command."""
    if isinstance(error, SpecDecError):
        return (2 if isinstance(error, UsageError) else 1), error.message, error.hint
    if isinstance(error, click.ClickException):
        return 2, *_explain_usage(error)
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return _explain_interrupt(error)
    if isinstance(error, MemoryError) or _is_out_of_memory(error):
        return 1, "out of memory", "use a smaller batch, or a machine with more memory"
    if isinstance(error, OSError) and error.errno is not None:
        path = f": {error.filename}" if error.filename is not None else ""
        hint = STDOUT_HINT if error.filename == STDOUT else _OS_HINT
        return 1, f"{error.strerror or error}{path}", hint
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return (
        1,
        f"unexpected {type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}: {error}",
        "this is a fault in specdec; run it again with --debug and report the traceback",
    )


def _explain_usage(error: click.ClickException) -> tuple[str, str]:
    """Return the fact and the remedy for a command line that click refuses."""
    if isinstance(error, click.NoSuchOption):
        params = error.ctx.command.params if error.ctx is not None else ()
        known_options = [option for param in params for option in param.opts]
        nearest = suggest_option(error.option_name, known_options)
        return f"no such option {error.option_name}{nearest}", OPTION_HINT
    if isinstance(error, click.UsageError) and error.message.startswith(_EXTRA_WORD):
        words = error.message.partition("(")[2].removesuffix(")")
        name = getattr(error.ctx and error.ctx.command, "stage", "")
        example = f", as in: {help.EXAMPLES[name][0]}" if name in help.EXAMPLES else ""
        return f"{words}: no option stands before it", f"name what each word is{example}"
    return error.format_message(), _HELP_HINT


def _explain_interrupt(error: BaseException) -> tuple[int, str, str]:
    """Return the exit status, the fact and the remedy for Ctrl-C, SIGTERM or SIGHUP."""
    chain = [error]  # click's Abort has the interrupt as its cause
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    hint = next(filter(None, map(str, chain)), _AGAIN_HINT)  # an interrupt's text is a hint
    for kind, status, name in ((Terminated, 143, "SIGTERM"), (HungUp, 129, "SIGHUP")):
        if any(isinstance(link, kind) for link in chain):
            return status, f"ended by {name}", hint
    return 130, "interrupted", hint


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is torch's for memory, which is no MemoryError."""
    says_so = "can't allocate memory" in str(error) or type(error).__name__ == "OutOfMemoryError"
    return isinstance(error, RuntimeError) and says_so


_AGAIN_HINT = "nothing half-written was left behind; run it again"
MAX_LINE = 1000  # most characters of an error or hint, for each problem that it lists
MAX_WORD = 300  # most characters of a word: names out of files may be of any length
MAX_LISTED = 4  # most problems that count for MAX_LINE
_HELP_HINT = "--help lists the options"
_EXTRA_WORD = "Got unexpected extra argument"  # beginning of click's message
_OS_HINT = "check the path, its permissions and the free space; nothing half-written was left"


def print_error(message: str, hint: str, num_problems: int = 1) -> None:
    """Print the two last lines of a failed command on stderr."""
    for label, text in (("error", message), ("hint", hint)):
        words = " ".join(cut_middle(word, MAX_WORD) for word in text.split())
        line = cut_middle(words, MAX_LINE * min(num_problems, MAX_LISTED))
        click.echo(f"{label}: {make_printable(line)}", err=True)


def _end_hanging(error: SpecDecError, status: int, clean_up: Callable[[], None]) -> None:
    print_error(error.message, error.hint)
    clean_up()
    os._exit(status)


errors.on_hang = _end_hanging
STAGES = {
    "generate": ("specdec.generate.cli", "model (folder, Hub id or GGUF file) -> text"),
    "convert": ("specdec.convert.cli", "model and drafter -> checkpoint folder"),
    "build": ("specdec.build.cli", "checkpoint folder -> engine folder"),
    "run": ("specdec.run.cli", "engine folder -> text, tokens, statistics"),
    "serve": (
        "specdec.serve.cli",
        "model or engine -> server with the APIs of OpenAI, Anthropic and Ollama",
    ),
    "train": ("specdec.train.cli", "data and target -> drafter folder"),
    "verify": ("specdec.verify.cli", "checkpoint or engine -> proof that it is what it claims"),
    "bench": ("specdec.measure.cli", "speed and acceptance, speculation on and off"),
    "diagnose": (
        "specdec.measure.cli:diagnose",
        "engine and prompts -> why it is not faster",
    ),
    "match": ("specdec.match.cli", "which drafters fit a model, by headers alone, and why not"),
    "recipe": ("specdec.recipe.cli", "recipe -> jobs for Slurm, SkyPilot or Kubernetes"),
    "export": ("specdec.export.cli", "checkpoint or drafter -> folder for another runtime"),
    "audit": ("specdec.audit.cli", "a running server -> is it lossless, does it speculate"),
    "doctor": ("specdec.doctor.cli", "what is installed, what this machine can build and run"),
}


# Retired command -> the hint that names its successor.
RETIRED = {
    "tune": "`specdec bench --sweep OPTION=a,b,c` measures values of an option; the default"
    " chooses by itself how much to draft",
}


def load_command(name: str) -> StageCommand:
    """Import a stage's command, which no other command imports."""
    import importlib

    module, _, attribute = STAGES[name][0].partition(":")
    command: StageCommand = getattr(importlib.import_module(module), attribute or "command")
    return command


class StageGroup(click.Group):
    """Group of the commands `specdec STAGE`, which imports a stage only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*STAGES, "docs", "help"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in ("help", "docs"):
            return help_command if cmd_name == "help" else docs_command
        return load_command(cmd_name) if cmd_name in STAGES else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] in RETIRED:
            raise click.UsageError(f"specdec {args[0]} is gone: {RETIRED[args[0]]}")
        if args and self.get_command(ctx, args[0]) is None:
            raise click.UsageError(
                f"no such command {args[0]!r}{suggest(args[0], list(STAGES))};"
                f" the commands are {', '.join(STAGES)}"
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([
                *((name, text) for name, (_, text) in STAGES.items()),
                ("help CMD", "all options of a command, explained"),
                ("help METHOD", f"those of a drafting method: {', '.join(METHODS)}"),
                ("docs [PAGE]", "a page of the documentation, or their list"),
            ])  # fmt: skip


def _complete_stage(_: object, __: object, incomplete: str) -> list[str]:
    return [name for name in (*STAGES, *METHODS) if name.startswith(incomplete)]


@click.command("help", context_settings=dict(CONTEXT))
@click.argument("words", nargs=-1, metavar="[CMD|METHOD]", shell_complete=_complete_stage)
@click.pass_context
def help_command(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Explain all options of a command or of a drafting method: `specdec help run`."""
    parent = ctx.find_root()
    if not words:
        click.echo(parent.get_help())
        return
    if (method := METHODS.get(words[0].replace("-", "_"))) and not words[1:]:
        formatter = parent.make_formatter()
        help.write_method(method, {name: load_command(name) for name in STAGES}, formatter)
        click.echo(formatter.getvalue().rstrip("\n"))
        return
    name, command, _ = group.resolve_command(parent, list(words))
    assert name is not None
    assert isinstance(command, StageCommand)
    for word in words[1:]:
        if word not in command.subcommands:
            raise click.UsageError(f"specdec {name} has no subcommand {word!r}")
        name, command = f"{name} {word}", command.subcommands[word]
        assert isinstance(command, StageCommand)
    help_context = click.Context(command, parent=parent, info_name=name)
    help_context.meta[ALL_FLAG] = True
    click.echo(command.get_help(help_context))


@click.command("docs", context_settings=dict(CONTEXT))
@click.argument("page", required=False, shell_complete=lambda _ctx, _param, prefix: [
    name for name in help.find_pages() if name.startswith(prefix)
])  # fmt: skip
def docs_command(page: str | None) -> None:
    """Print a page of the documentation, such as `specdec docs run`, or list the pages."""
    pages = help.find_pages()
    if page is None:
        width = max(map(len, pages))
        for name, path in pages.items():
            title = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
            click.echo(f"{name:<{width}}  {title}")
        return
    page_name = page.partition("#")[0].removeprefix("docs/").removesuffix(".md")
    matches = [name for name in pages if page_name in (name, name.rpartition("/")[2])]
    if not matches:
        raise UsageError(
            f"there is no page {page!r}{suggest(page_name, list(pages))}",
            "`specdec docs` lists the pages",
        )
    click.echo(pages[matches[0]].read_text(encoding="utf-8"), nl=False)


group = StageGroup(
    "specdec",
    help="Speculative decoding from a Hugging Face checkpoint to a running engine.",
    context_settings=dict(CONTEXT),
    params=[_make_version_option()],
)
