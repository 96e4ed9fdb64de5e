"""opencode over chats: a turn that writes a file, runs it and reads what it printed."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from common import MODEL, URL, run
from scripted import Script, find_results, serve_script, write_call

OPENCODE = Path(os.environ["CLIENT_HOME"]) / "node_modules" / ".bin" / "opencode"
ANSWER = "It prints 42."


def work(*turns):
    """Run a turn of opencode in a folder; return its script, what it said, and its file."""
    with tempfile.TemporaryDirectory() as parent:
        folder, home = Path(parent) / "work", Path(parent) / "home"
        folder.mkdir()
        script = Script(URL, [lambda body, turn=turn: turn(folder) for turn in turns])
        with serve_script(script) as url:
            model = {"name": MODEL, "limit": {"context": 65536, "output": 2048}}
            provider = {
                "npm": "@ai-sdk/openai-compatible", "name": "specdec", "models": {MODEL: model},
                "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
            }  # fmt: skip
            config = {"provider": {"specdec": provider}, "autoupdate": False, "share": "disabled"}
            (folder / "opencode.json").write_text(json.dumps(config))
            folders = {f"XDG_{kind}_HOME": str(home / kind.lower())
                       for kind in ("CONFIG", "DATA", "CACHE", "STATE")}  # fmt: skip
            done = subprocess.run(
                [OPENCODE, "run", "--model", f"specdec/{MODEL}", "Write hello.py."],
                env={**os.environ, "HOME": str(home), "PWD": str(folder), **folders,
                     "OPENCODE_DISABLE_MODELS_FETCH": "1"},
                cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
                timeout=300,
            )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr)[-300:]
        assert set(script.statuses) == {200}, script.answers[-1][-300:]
        assert len(script.bodies) == len(turns), script.statuses
        path = folder / "hello.py"
        return script, done.stdout, path.read_text() if path.is_file() else None


def plain():
    _, said, text = work(lambda _: ANSWER)
    assert ANSWER in said, said
    assert text is None


def turn():
    script, said, text = work(
        lambda folder: write_call(
            "write", filePath=str(folder / "hello.py"), content="print(6 * 7)\n"
        ),
        lambda _: write_call("bash", command="python3 hello.py", description="Runs it"),
        lambda _: ANSWER,
    )
    assert ANSWER in said, said
    assert text == "print(6 * 7)\n", text
    results = find_results(script.bodies[-1])
    assert "42" in results[-1], results


run(plain=plain, turn=turn)
