"""The command wrapper: spelling of options, list options, exit statuses, error and hint lines."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.shell_completion import ShellComplete

from specdec import __version__
from specdec.build import cli as build_cli
from specdec.command import entry
from specdec.command.help import (
    EXAMPLES,
    GENERAL,
    LAST_OPTIONS,
    PAGES,
    find_pages,
    list_method_options,
    list_sections,
    name_option,
)
from specdec.command.signals import make_handler
from specdec.command.stages import (
    STAGES,
    group,
    load_command,
    print_error,
    stage_command,
)
from specdec.convert import cli as convert_cli
from specdec.doctor import cli as doctor_cli
from specdec.errors import UsageError
from specdec.export import cli as export_cli
from specdec.generate import cli as generate_cli
from specdec.match import cli as match_cli
from specdec.measure import cli as measure_cli
from specdec.methods import METHODS
from specdec.options import get_flags
from tests.conftest import ROOT, read_error_lines, run_cli
from tests.core.toy import ToySettings, do_action
from tests.engines import run_cli_here


def run_toy(*args: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """The toy as a process, for what only a process shows."""
    return subprocess.run(
        [sys.executable, "-m", "tests.core.toy", *args], cwd=ROOT, stdout=stdout,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
        timeout=60, check=False,
    )  # fmt: skip


def run_toy_here(*args: str) -> subprocess.CompletedProcess[str]:
    return run_cli_here(*args, command=stage_command("run", ToySettings)(do_action))


def parse(*args: str) -> ToySettings:
    """Parse a command line in this process."""
    seen: list[ToySettings] = []
    command = stage_command("run", ToySettings)(seen.append)
    command.main(list(args), standalone_mode=False)
    return seen[0]


@pytest.mark.parametrize("name", ["--max-output-len", "--max_output_len", "--max_output-len"])
@pytest.mark.parametrize("form", ["{} 7", "{}=7"])
@pytest.mark.parametrize("value", ["explicit_draft_tokens", "explicit-draft-tokens"])
def test_dashes_and_underscores_alike(name: str, form: str, value: str) -> None:
    settings = parse(*form.format(name).split(), "--speculative_decoding_mode", value)
    assert settings.max_output_len == 7
    assert settings.speculative_decoding_mode == "explicit_draft_tokens"


@pytest.mark.parametrize(
    ("args", "texts"),
    [
        (["--input-text", "a"], ["a"]),
        (["--input-text", "a b", "c"], ["a b", "c"]),
        (["--input_text", "a", "--max-output-len", "5", "--input-text", "b"], ["a", "b"]),
        (["--input_text=x y"], ["x y"]),
        (["--input-text=x=1", "y"], ["x=1", "y"]),
        (["--input-text", "x_1", "-1", "- item", ""], ["x_1", "-1", "- item", ""]),
        (["--input-text=--not-an-option"], ["--not-an-option"]),
        (["--use-logits", "--input-text", "a", "--no-greedy"], ["a"]),
        (["--input-text", "a", "--"], ["a"]),
        ([], []),
    ],
)
def test_list_options_take_several_words(args: list[str], texts: list[str]) -> None:
    assert parse(*args).input_text == texts


@pytest.mark.parametrize(
    "args", [["--input-text"], ["--input-text", "--use-logits"], ["--input_text", "--"]]
)
def test_list_option_without_a_word_is_refused(args: list[str]) -> None:
    done = run_toy_here(*args)
    assert done.returncode == 2
    assert "requires an argument" in read_error_lines(done.stderr)[0]


def test_switches() -> None:
    assert parse() == ToySettings()
    settings = parse("--no_greedy", "--use_logits", "--context-fmha", "disable")
    assert (settings.greedy, settings.use_logits, settings.context_fmha) == (False, True, False)
    assert parse("--greedy", "--random-seed", "-3").random_seed == -3


def test_untyped_flags_do_not_hide_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("run: {use_logits: true, greedy: false, input_text: [a], random_seed: 4}\n")
    settings = parse("--config", str(recipe), "--random-seed", "5")
    assert settings == ToySettings(use_logits=True, greedy=False, input_text=["a"], random_seed=5)


@pytest.mark.parametrize(
    ("args", "status", "error"),
    [
        (["--action", "fail"], 1, "3 heads do not split"),
        (["--action", "usage"], 2, "wrong"),
        (["--action", "missing-file"], 1, "No such file or directory: /nonexistent/file"),
        (["--action", "interrupt"], 130, "interrupted"),
        (["--action", "interrupt-with-remedy"], 130, "interrupted"),
        (["--action", "terminate"], 143, "ended by SIGTERM"),
        (["--action", "eof"], 1, "unexpected EOFError"),
        (["--action", "bug"], 1, "unexpected ZeroDivisionError"),
        (["--action", "memory"], 1, "out of memory"),
        (["--action", "torch-memory"], 1, "out of memory"),
        (["--max-outptu-len", "3"], 2, "no such option --max-outptu-len (did you mean --max-out"),
        (["--max-output-len", "x"], 2, "'x' is not a valid integer"),
        (["--max-output-len", "0"], 2, "--max-output-len: expected at least 1, got 0"),
        (["--context-fmha", "maybe"], 2, "--context-fmha: expected enable or disable, got 'maybe'"),
        (["--speculative-decoding-mode", "draft_tokens_extrenal"], 2,
         "is not one of explicit_draft_tokens, draft_tokens_external (did you mean draft_tok"),
        (["stray"], 2, "stray"),
        (["--", "--input-text", "a"], 2, "--input-text"),
        (["--config", "/nonexistent.yaml"], 2, "recipe /nonexistent.yaml does not exist"),
        (["--config", ""], 2, "--config: expected a path, got ''"),
        (["--max-output-len"], 2, "requires an argument"),
    ],
)  # fmt: skip
def test_failures_end_in_error_and_hint(args: list[str], status: int, error: str) -> None:
    done = run_toy_here(*args)
    assert done.returncode == status, done.stderr
    fact, hint = read_error_lines(done.stderr)
    assert error in fact
    assert hint
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(("action", "status"), [("fail", 1), ("usage", 2), ("bug", 1)])
def test_debug_adds_the_traceback_above(action: str, status: int) -> None:
    done = run_toy_here("--action", action, "--debug")
    assert done.returncode == status
    assert "Traceback (most recent call last)" in done.stderr
    read_error_lines(done.stderr)


def test_stdout_carries_the_product_alone() -> None:
    done = run_toy("--input-text", "a", "b")
    assert done.returncode == 0
    assert json.loads(done.stdout)["input_text"] == ["a", "b"]
    assert done.stderr == "working\n"


def test_a_current_folder_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path's error named no file, and oneMKL ended the process."""
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    done = run_toy_here("--input-text", "a")
    assert (done.returncode, done.stdout) == (1, "")
    assert read_error_lines(done.stderr)[0] == "the current folder was removed"


def test_closed_pipe_is_silent() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = run_toy("--action", "long", stdout=write_end)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "working\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("action", ["print", "long"])
def test_full_disk_on_stdout_is_an_error(
    action: str, unbuffered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hint said that nothing was left, though a command's files may be whole."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with open("/dev/full", "w") as full:
        done = run_toy("--action", action, stdout=full.fileno())
    assert done.returncode == 1
    error, hint = read_error_lines(done.stderr)
    assert error == "No space left on device: standard output"
    assert hint.endswith("output files are whole or absent")


def test_help_lists_options_and_defaults() -> None:
    done = run_toy_here("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for text in ("--input-text TEXT...", "--greedy / --no-greedy", "[default: 0]", "--config FILE"):
        assert text in done.stdout


def test_specdec_lists_its_stages() -> None:
    for args in ([], ["--help"]):
        done = run_cli(*args)
        assert done.returncode == 0, done.stderr
        for stage in ("convert", "build", "run", "train"):
            assert f"\n  {stage} " in done.stdout
    assert run_cli("--version").stdout.startswith("specdec ")


def test_names_out_of_files_do_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("größe\x1b[2J\ud800 is\nlong", "no\ttabs")
    shown = capsys.readouterr().err
    assert shown == "error: größe\\x1b[2J\\ud800 is long\nhint: no tabs\n"


def read_help(*args: str) -> str:
    done = run_cli_here(*args)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def get_stage(stage: str) -> click.Command:
    name, *subcommands = stage.split()
    command: click.Command = load_command(name)
    for word in subcommands:
        command = load_command(name).subcommands[word]
    return command


@pytest.mark.parametrize("stage", [*STAGES, "train data", "train ngrams"])
def test_every_option_has_its_place(stage: str) -> None:
    """In a group, or on a method's page; 25 are explained at most before --all."""
    command = get_stage(stage)
    short, long = (list_sections(command, is_long=is_long) for is_long in (False, True))
    assert sum(map(len, short.values())) <= 25
    shown = [name_option(option) for options in long.values() for option in options]
    assert len(set(shown)) == len(shown)
    visible = {
        name_option(param) for param in command.params
        if isinstance(param, click.Option) and not param.hidden
    }  # fmt: skip
    assert visible - set(shown) <= set(list_method_options())
    assert {name_option(option) for option in long[GENERAL]} <= set(LAST_OPTIONS)
    assert (ROOT / "docs" / f"{PAGES.get(stage, stage)}.md").is_file()


@pytest.mark.parametrize("stage", [*STAGES, "train data", "train ngrams"])
def test_examples_give_options_that_exist(stage: str) -> None:
    for example in EXAMPLES[stage]:
        words = shlex.split(example, comments=True)
        words = words[1:] if words[0] == "specdec" else words[0].split("-")[1:] + words[1:]
        name, *rest = words
        command = load_command(name)
        command.make_context(name, rest, resilient_parsing=True)
        assert {word for word in rest if word.startswith("--")} <= {
            opt for each in (command, *command.subcommands.values())
            for param in each.get_params(click.Context(each)) for opt in param.opts
        }  # fmt: skip


def test_help_is_short_and_the_long_form_explains_everything() -> None:
    short, long = read_help("run", "--help"), read_help("run", "--all")
    assert long == read_help("help", "run") == read_help("run", "--help", "--all")
    for text in (short, long):
        assert text.index("\nExample") < text.index("\n  --engine-dir ")
        assert text.rstrip().splitlines()[-1].endswith("The page: specdec docs run")
        assert "specdec help METHOD, with one of redrafter, medusa, " in " ".join(text.split())
        assert "--eagle-tree-tokens" not in text
    assert len(set(re.findall(r"\n  (?:-\w, )?(--[\w-]+)", short))) <= 25
    assert "All options: specdec run --all." in short
    assert "--kv-cache-free-gpu-memory-fraction" not in short
    assert "\n  --kv-cache-free-gpu-memory-fraction " in long
    assert run_cli_here("run", "--", "--all").returncode == 2


@pytest.mark.parametrize("name", METHODS)
def test_help_of_a_method(name: str) -> None:
    done = run_cli_here("help", name.replace("_", "-"))
    assert (done.returncode, done.stderr) == (0, "")
    assert METHODS[name].title in done.stdout
    for kind in METHODS[name].options.values():
        for option, (flag, _) in get_flags(kind).items():
            assert flag.hidden or f"\n  --{option.replace('_', '-')} " in done.stdout
    assert "Options of specdec " in done.stdout
    assert done.stdout.rstrip().rsplit(" ", 1)[-1] in find_pages()


def test_pages_are_printed() -> None:
    """By the names that `--help` ends with, as files are called, or by the last part alone."""
    pages = find_pages()
    listed = run_cli_here("docs").stdout
    assert len(listed.splitlines()) == len(pages)
    assert "methods/eagle  " in listed
    assert "# specdec-run" in run_cli_here("docs", "run").stdout
    eagle = pages["methods/eagle"].read_text()
    for name in ("methods/eagle", "eagle", "docs/methods/eagle.md", "eagle#trees"):
        assert run_cli_here("docs", name).stdout == eagle
    done = run_cli_here("docs", "vreify")
    assert done.returncode == 1 + 1
    assert "no page 'vreify' (did you mean verify?)" in done.stderr


@pytest.mark.parametrize(
    ("words", "fact", "hint"),
    [
        (["run", "ENGINE", "hi"], "ENGINE hi: no option stands before it", "specdec-run --engine-"),
        (["convert", "BASE"], "BASE: no option stands before it", "specdec-convert --model-dir"),
        (["build", "CKPT"], "CKPT: no option stands before it", "specdec-build --checkpoint-dir"),
        (["convert", "--quantization", "int8"], "another command makes it", "specdec-build --quan"),
        (["build", "--quantization", "fp8"], "another command makes it", "specdec-convert --quan"),
        (["generate", "--quantization", "nvfp4", "hi"], "another command makes it", "nvfp4: specd"),
    ],
)
def test_what_was_meant_is_told(words: list[str], fact: str, hint: str) -> None:
    done = run_cli_here(*words)
    assert done.returncode == 2
    told = read_error_lines(done.stderr)
    assert fact in told[0]
    assert hint in told[1]


def test_a_recipe_is_named_by_commands_that_take_one() -> None:
    for stage, place in (("match", ""), ("diagnose", ""), ("bench", " or in a --config recipe")):
        hint = read_error_lines(run_cli_here(stage).stderr)[1]
        assert hint == f"give it on the command line{place}"


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["train", "--lr", "1e-5"], "--learning-rate"), (["train", "--mode", "eagle"], "--method"),
        (["train", "--model", "m"], "--model-dir"), (["train", "--train_bs", "4"], "--batch-size"),
        (["train", "data", "--data_path", "x"], "--input"),
        (["train", "data", "--output_path", "x"], "--output"),
        (["train", "data", "--max_token", "5"], "--max-tokens"),
    ],
)  # fmt: skip
def test_modelopt_s_options_lead_to_ours(words: list[str], meant: str) -> None:
    done = run_cli_here(*words)
    assert done.returncode == 2
    fact, hint = read_error_lines(done.stderr)
    assert f"(did you mean {meant}?)" in fact
    assert "`specdec docs flags` has what replaces TensorRT-LLM's and ModelOpt's" in hint


def test_help_of_subcommands_and_of_nothing() -> None:
    assert "--base-url" in read_help("help", "train", "data")
    assert read_help("help") == read_help("--help")
    for words, fact in (
        (["help", "rnu"], "did you mean run?"), (["help", "run", "x"], "no subcommand 'x'"),
        (["covnert"], "no such command 'covnert' (did you mean convert?)"),
    ):  # fmt: skip
        done = run_cli_here(*words)
        assert done.returncode == 2
        assert fact in read_error_lines(done.stderr)[0]


def test_version() -> None:
    for line in ("-V", "--version", "run -V", "generate --version"):
        assert read_help(*line.split()) == f"specdec {__version__}\n"


@pytest.mark.parametrize(
    ("words", "incomplete", "expected"),
    [
        ([], "di", ["diagnose"]),
        (["run"], "--draft-l", ["--draft-len"]),
        (["run", "--input-text"], "", []),
        (["run", "--device"], "c", ["cpu", "cuda"]),
        (["build", "--use-paged-context-fmha"], "d", ["disable"]),
        (["help"], "di", ["diagnose"]),
        (["help"], "red", ["redrafter"]),
        (["train", "data"], "--dataset", ["--dataset-split"]),
    ],
)
def test_completion(words: list[str], incomplete: str, expected: list[str]) -> None:
    complete = ShellComplete(group, {}, "specdec", "_SPECDEC_COMPLETE")
    found = [item.value for item in complete.get_completions(words, incomplete)]
    assert found == expected
    (item,) = complete.get_completions(["run", "--engine-dir"], "ou")
    assert (item.value, item.type) == ("ou", "file"), "paths are the shell's"


# Sends us a signal when the first of our larger modules is imported.
SIGNALLED = """
import os, signal, sys
class Sender:
    def find_spec(self, name, *_):
        if name == "specdec.command.stages":
            os.kill(os.getpid(), signal.{name})
sys.meta_path.insert(0, Sender())
from specdec.command import entry
sys.argv[1:] = ["--version"]
entry.{stage}()
"""


HUNG_UP = """
import os, signal
from specdec.command.signals import HungUp, take_ending_signals
signal.signal(signal.SIGHUP, signal.{handler})
try:
    with take_ending_signals():
        try:
            os.kill(os.getpid(), signal.SIGHUP)
        finally:
            os.kill(os.getpid(), signal.SIGHUP)
            print("cleaned up")
    print("not ended")
except HungUp:
    print("ended")
assert signal.getsignal(signal.SIGHUP) is signal.{handler}
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGHUP")
@pytest.mark.parametrize(("handler", "end"), [("SIG_DFL", "ended"), ("SIG_IGN", "not ended")])
def test_a_closed_terminal_ends_the_work_once(handler: str, end: str) -> None:
    """Shell and kernel both send it: the second stops no cleaning up. `nohup` ignores both."""
    code = HUNG_UP.format(handler=handler)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines() == ["cleaned up", end]
    assert done.returncode == 0
    assert not done.stderr


@pytest.mark.parametrize("stage", ["main", "run"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_while_python_imports_leaves_no_traceback(name: str, stage: str) -> None:
    code = SIGNALLED.format(name=name, stage=stage)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == -getattr(signal, name)
    assert not done.stderr
    assert not done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell")
@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_closed_streams_are_the_null_device(closed: str, tmp_path: Path) -> None:
    told = tmp_path / "told"
    code = (
        "import os, sys\n"
        "from specdec.command import entry\n"
        "sys.argv[1:] = ['--version']\n"
        "try:\n"
        "    entry.main()\n"
        "finally:\n"
        "    print(sys.stdin.read(), end='')\n"
        f"    file = open({str(told)!r}, 'w')\n"
        "    file.write(str(file.fileno()))\n"
    )
    line = f'exec "{sys.executable}" -c "$0" {closed}'
    done = subprocess.run(
        ["sh", "-c", line, code], capture_output=True, text=True, cwd=ROOT, input=""
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert done.stdout == ("" if ">&-" in closed else f"specdec {__version__}\n")
    assert int(told.read_text()) > 2


def test_imports_are_seldom_searched_for_garbage() -> None:
    code = (
        "import gc, sys\n"
        "from specdec.command import entry\n"
        "sys.argv[1:] = ['--version']\n"
        "try:\n"
        "    entry.main()\n"
        "finally:\n"
        "    print(gc.get_threshold()[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["specdec", __version__, str(entry.NEW_OBJECTS)], done.stderr


def test_an_interrupt_that_python_ignores_comes_again() -> None:
    """A command went on after Ctrl-C, with a traceback of an ignored exception."""
    code = (
        "import os, signal, time\n"
        "from specdec.command.signals import raise_at_sigint\n"
        "class Interrupted:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(1)\n"
        "class Faulty:\n"
        "    def __del__(self):\n"
        "        raise ValueError('told as ever')\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "raise_at_sigint()\n"
        "Faulty()\n"
        "try:\n"
        "    Interrupted()\n"
        "    time.sleep(20)\n"
        "    print('not ended')\n"
        "except KeyboardInterrupt:\n"
        "    print('ended')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "ended\n"
    assert "ValueError: told as ever" in done.stderr
    assert "KeyboardInterrupt" not in done.stderr


def test_an_ignored_sigint_stays_ignored() -> None:
    code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    code += SIGNALLED.format(name="SIGINT", stage="main")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"specdec {__version__}\n"


def test_a_wrong_folder_is_told_before_torch_is_imported() -> None:
    lines = [
        "run --engine-dir /nowhere --input-text a",
        "serve --engine-dir /nowhere",
        "bench --engine-dir /nowhere",
        "diagnose --engine-dir /nowhere",
        "verify --engine-dir /nowhere --model-dir /nowhere",
        "verify --checkpoint-dir /nowhere",
        "train --model-dir /nowhere --data README.md --output-dir /nowhere",
        "audit --base-url http://127.0.0.1:9/v1 --model m --reference-engine /nowhere",
        "convert --model-dir /nowhere --output-dir /nowhere/out",
        "build --checkpoint-dir /nowhere --output-dir /nowhere/out",
    ]
    code = (
        "import sys\n"
        "from specdec.command.stages import group, run_command\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        f"for line in {lines}:\n"
        "    try:\n"
        "        run_command(group, line.split())\n"
        "    except SystemExit as end:\n"
        "        print(end.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["1"] * len(lines), done.stderr
    errors = done.stderr.splitlines()[::2]
    assert len(errors) == len(lines)
    for error in errors:
        assert "/nowhere does not exist" in error


def test_ctrl_c_waits_until_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception within that import made its C++ abort the process."""
    spec = SimpleNamespace(_initializing=True)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__spec__=spec))
    before = signal.signal(signal.SIGINT, make_handler(KeyboardInterrupt))
    alarm = signal.getsignal(signal.SIGALRM)
    try:
        signal.raise_signal(signal.SIGINT)
        spec._initializing = False
        with pytest.raises(KeyboardInterrupt):
            time.sleep(10)
        spec._initializing = True  # for good, as on a disk that hangs
        with pytest.raises(KeyboardInterrupt):
            list(map(signal.raise_signal, [signal.SIGINT] * 50))
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0, "it is raised once"
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGALRM, alarm)


@pytest.mark.parametrize(
    ("command", "words", "fact"),
    [
        (build_cli.command, [], "--checkpoint-dir"),
        (convert_cli.command, [], "--output-dir"),
        (doctor_cli.command, ["--clear-cache", "--engine-dir", "e"], "--clear-cache does nothing"),
        (export_cli.command, [], "--to, --output-dir"),
        (generate_cli.command, ["--clear-cache", "--model-dir", "m"], "--clear-cache does nothing"),
        (generate_cli.command, ["--model-dir", "m"], "no prompt was given"),
        (match_cli.command, [], "--model-dir"),
        (measure_cli.command, [], "--engine-dir"),
        (measure_cli.diagnose, [], "--engine-dir"),
    ],
)  # fmt: skip
def test_what_a_command_lacks_is_told_by_itself(
    command: click.Command, words: list[str], fact: str
) -> None:
    with pytest.raises(UsageError, match=fact):
        command.main(words, standalone_mode=False)


def test_a_plan_of_a_build_in_words() -> None:
    report = {"backend": "torch", "commands": [{"shell": "trtllm-build --x"}], "notes": ["a"]}
    assert build_cli.format_plan(report) == "backend: torch\ncommand: trtllm-build --x"


def test_the_module_is_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()
    monkeypatch.setattr(entry, "main", lambda: calls.append("main"))
    monkeypatch.delitem(sys.modules, "specdec.__main__", raising=False)
    import specdec.__main__

    assert calls == ["main"]
    assert specdec.__main__.__doc__ == "`python -m specdec`."
