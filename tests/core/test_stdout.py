"""Standard output belongs to the command, whatever a library writes to descriptor 1."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT

CODE = """
import os, subprocess, sys
from specdec.command.stdout import claim_stdout, find_stdout
print("before")
claim_stdout()
claim_stdout()
print("ours")
os.write(1, b"from C++, ")
subprocess.run(["echo", "from a child"])
subprocess.run(["echo", "from ours"], stdout=find_stdout())
import atexit
atexit.register(os.write, 1, b"at exit, ")
"""


def run_code(redirection: str = "") -> subprocess.CompletedProcess[str]:
    command = f'exec "$0" -u -c "$1" {redirection}'
    return subprocess.run(
        ["sh", "-c", command, sys.executable, CODE], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_only_sys_stdout_writes_to_standard_output() -> None:
    done = run_code()
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["before", "ours", "from ours", ""]
    assert done.stderr == "from C++, from a child\nat exit, "


@pytest.mark.parametrize(
    ("redirection", "stdout"),
    [("2>&-", ["before", "ours", "from ours", ""]), (">&-", [""]), ("<&-", None)],
)
def test_closed_streams_change_nothing_else(redirection: str, stdout: list[str] | None) -> None:
    done = run_code(redirection)
    assert done.stdout.split("\n") == (stdout or ["before", "ours", "from ours", ""])


def test_the_null_device_in_the_place_of_stdout_keeps_its_descriptor() -> None:
    """It closed descriptor 1, which a file got that was opened next."""
    code = (
        "import os, sys\n"
        "from specdec.command.entry import open_streams\n"
        "from specdec.command.stdout import claim_stdout, name_stdout\n"
        "open_streams()\n"
        "name_stdout()\n"
        "claim_stdout()\n"
        "print(os.open(os.devnull, os.O_WRONLY), file=sys.stderr)\n"
    )
    line = f'exec "{sys.executable}" -c "$0" >&-'
    done = subprocess.run(["sh", "-c", line, code], capture_output=True, text=True, cwd=ROOT)
    assert int(done.stderr) > 2


def test_a_stdout_that_is_no_descriptor_stays(capsys: pytest.CaptureFixture[str]) -> None:
    from specdec.command.stdout import claim_stdout, find_stdout

    claim_stdout()
    print("still here")
    assert capsys.readouterr().out == "still here\n"
    assert find_stdout() is None
