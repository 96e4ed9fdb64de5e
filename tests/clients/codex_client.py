"""Codex CLI over /v1/responses: a turn that writes a file, runs it and reads what it printed."""

import os
import subprocess
import tempfile
from pathlib import Path

from common import MODEL, URL, run
from scripted import Script, find_results, serve_script, write_call

CODEX = Path(os.environ["CLIENT_HOME"]) / "node_modules" / ".bin" / "codex"
ANSWER = "It prints 42."


def work(*turns):
    """Run a turn of Codex in a folder; return its script, what it said, and the folder's file."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as home:
        script = Script(URL, turns)
        with serve_script(script) as url:
            provider = f'{{name="specdec", base_url="{url}/v1", wire_api="responses"}}'
            settings = ("model_provider='specdec'", f"model_providers.specdec={provider}")
            flags = [flag for setting in settings for flag in ("-c", setting)]
            done = subprocess.run(
                [CODEX, "exec", "--skip-git-repo-check", "-C", folder, "-m", MODEL, *flags,
                 "--dangerously-bypass-approvals-and-sandbox", "Write hello.py."],
                env={**os.environ, "CODEX_HOME": home, "HOME": home}, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, check=False, timeout=300,
            )  # fmt: skip
        assert done.returncode == 0, done.stderr[-300:]
        assert set(script.statuses) == {200}, script.answers[-1][-300:]
        assert len(script.bodies) == len(turns), script.statuses
        files = {path.name: path.read_text() for path in Path(folder).iterdir()}
        return script, done.stdout, files


def turn():
    script, said, files = work(
        lambda _: write_call("exec_command", cmd="echo 'print(6 * 7)' > hello.py"),
        lambda _: write_call("exec_command", cmd="python3 hello.py"),
        lambda _: ANSWER,
    )
    assert ANSWER in said, said
    assert files == {"hello.py": "print(6 * 7)\n"}, files
    results = find_results(script.bodies[-1])
    assert "42" in results[-1], results


def namespace():
    """A function of a namespace is called as one, and unknown kinds of tools are listed."""
    script, said, _ = work(
        lambda _: write_call("close_agent", target="nobody"),
        lambda _: ANSWER,
    )
    assert ANSWER in said, said
    (result,) = find_results(script.bodies[-1])
    assert "unsupported call" not in result, result
    assert '"namespace":"multi_agent_v1"' in script.answers[0].replace('": "', '":"')
    kinds = [tool["type"] for tool in script.bodies[0]["tools"]]
    assert f"tools.{kinds.index('web_search')}.type" in script.answers[0]


def plain():
    script, said, files = work(lambda _: ANSWER)
    assert ANSWER in said, said
    assert not files


run(plain=plain, turn=turn, namespace=namespace)
