"""The click wrapper of every command: options from settings, errors as two lines, exit statuses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from specdec import __version__, logs
from specdec.errors import SpecDecError, UsageError, suggest
from specdec.settings import Flag, get_flags, resolve_settings

CONTEXT = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "max_content_width": 110,
}


class StageCommand(click.Command):
    """A command whose list options take several words: `--input-text "a" "b"`."""

    list_options: frozenset[str] = frozenset()
    section: str = ""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._repeat_list_options(args))

    def _repeat_list_options(self, args: list[str]) -> list[str]:
        expanded: list[str] = []
        current = ""
        for arg in args:
            name, equals, _ = arg.partition("=")
            if arg.startswith("--") and len(arg) > 2:
                is_list = name.replace("_", "-") in self.list_options
                current = name if is_list else ""
                if not is_list or equals:
                    expanded.append(arg)
            elif current:
                expanded += [current, arg]
            else:
                expanded.append(arg)
        return expanded


def _build_option(name: str, flag: Flag, default: Any) -> click.Option:
    declaration = "--" + name.replace("_", "-")
    text = flag.help
    shown = default not in (None, [], False)
    options: dict[str, Any] = {"default": None, "hidden": flag.hidden, "metavar": flag.metavar}
    if flag.kind == "flag":
        del options["metavar"]
        options["is_flag"] = True
        if default is True:
            declaration += "/--no-" + name.replace("_", "-")
            text += "  [default: on]"
    elif flag.kind == "enable":
        options["type"] = click.Choice(["enable", "disable"])
        text += f"  [default: {'enable' if default else 'disable'}]" if default is not None else ""
    elif flag.choices:
        options["type"] = click.Choice(flag.choices)
        text += f"  [default: {default}]" if shown else ""
    else:
        if flag.kind == "list":
            options["multiple"] = True
            options["metavar"] = flag.metavar or "TEXT..."
        else:
            options["type"] = {"int": int, "float": float}.get(flag.kind, str)
            options["metavar"] = flag.metavar or {"path": "PATH"}.get(flag.kind)
        text += f"  [default: {default}]" if shown else ""
    return click.Option([declaration], help=text, **options)


def stage_command(
    name: str, settings_class: type, *, section: str | None = None
) -> Callable[[Callable[[Any], None]], StageCommand]:
    """Decorate `work(settings)` into a click command with one option per settings field."""

    def decorate(work: Callable[[Any], None]) -> StageCommand:
        flags = get_flags(settings_class)

        def callback(config: str | None, debug: bool, **values: Any) -> None:
            ctx = click.get_current_context()
            typed = {
                key: value
                for key, value in values.items()
                if ctx.get_parameter_source(key) is ParameterSource.COMMANDLINE
            }
            logs.set_up(debug=debug)
            from pathlib import Path

            recipe = Path(config) if config else None
            work(resolve_settings(settings_class, section or name, typed, recipe))

        params: list[click.Parameter] = [
            _build_option(key, flag, default) for key, (flag, default) in flags.items()
        ]
        params.append(
            click.Option(
                ["--config"], metavar="FILE", help=f"YAML recipe; its `{section or name}:` section."
            )
        )
        params.append(
            click.Option(["--debug"], is_flag=True, help="Show tracebacks and debug messages.")
        )
        params.append(
            click.Option(
                ["--version"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_print_version,
                help="Print the version and exit.",
            )
        )
        command = StageCommand(
            f"specdec-{name}",
            params=params,
            callback=callback,
            help=work.__doc__,
            context_settings=dict(CONTEXT),
        )
        command.section = section or name
        command.list_options = frozenset(
            "--" + key.replace("_", "-") for key, (flag, _) in flags.items() if flag.kind == "list"
        )
        return command

    return decorate


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        click.echo(f"specdec {__version__}")
        ctx.exit()


def run_command(command: click.Command, args: list[str] | None = None) -> None:
    """Run a command as a process's main function and exit with its status."""
    arguments = sys.argv[1:] if args is None else args
    debug = "--debug" in arguments
    try:
        status = command.main(arguments, standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as exit_:
        status = exit_.exit_code
    except click.NoSuchOption as error:
        known = list(error.possibilities or [])
        print_error(f"no such option {error.option_name}{_suggest_first(known)}", _HELP_HINT)
        status = 2
    except click.ClickException as error:
        print_error(error.format_message().replace("\n", " "), _HELP_HINT)
        status = 2
    except SpecDecError as error:
        if debug:
            raise
        print_error(error.message, error.hint)
        status = 2 if isinstance(error, UsageError) else 1
    except (KeyboardInterrupt, click.Abort):
        print_error("interrupted", "nothing half-written was left behind; run it again")
        status = 130
    except BrokenPipeError:
        sys.stderr.close()
        status = 1
    except MemoryError:
        if debug:
            raise
        print_error("out of memory", "use a smaller batch, or a machine with more memory")
        status = 1
    except OSError as error:
        if debug or error.filename is None and error.errno is None:
            raise
        print_error(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "), _OS_HINT)
        status = 1
    sys.exit(status if isinstance(status, int) else 0)


_HELP_HINT = "--help lists the options"
_OS_HINT = "check the path, its permissions and the free space; nothing half-written was left"


def _suggest_first(known: list[str]) -> str:
    return f" (did you mean {known[0]}?)" if known else ""


def print_error(message: str, hint: str) -> None:
    """Print the two last lines of a failed command on stderr."""
    click.echo(f"error: {' '.join(message.split())}", err=True)
    click.echo(f"hint: {' '.join(hint.split())}", err=True)


STAGES = {
    "convert": ("specdec.convert.cli", "Hugging Face base and drafter -> checkpoint folder"),
    "build": ("specdec.build.cli", "checkpoint folder -> engine folder"),
    "run": ("specdec.run.cli", "engine folder -> text, tokens, statistics"),
    "train": ("specdec.train.cli", "data and base -> drafter folder"),
}


class StageGroup(click.Group):
    """`specdec STAGE`: imports a stage only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(STAGES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in STAGES:
            return None
        import importlib

        command: click.Command = importlib.import_module(STAGES[cmd_name][0]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None:
            raise click.UsageError(
                f"no such command {args[0]!r}{suggest(args[0], list(STAGES))};"
                f" the commands are {', '.join(STAGES)}"
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in STAGES.items()])


group = StageGroup(
    "specdec",
    help="Speculative decoding from a Hugging Face checkpoint to a running engine.",
    context_settings=dict(CONTEXT),
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_version,
            help="Print the version and exit.",
        )
    ],
)


def main() -> None:
    """Entry point of `specdec`."""
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    run_command(group)
