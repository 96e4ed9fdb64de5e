"""`make clients`: clients that others wrote, each in an environment of its own, against a server.

Converts, builds and serves examples/pycode with its draft model and the chat template beside this
file, installs each client with pip where that has not been done, and runs its script. Prints the
table of docs/serve.md; ends with status 1 where a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PYCODE = ROOT / "examples" / "pycode"
MODEL = "pycode"
LIMIT = 600.0  # seconds that one client may take


class Client(NamedTuple):
    """A client: its distribution, its script, and what else pip installs. torch: if it needs it.

    is_agent: a program of npm that works on files, whose model is held to a text (scripted.py).
    """

    name: str
    script: str
    more: tuple[str, ...] = ()
    needs_torch: bool = False
    is_agent: bool = False


CLIENTS = (
    Client("openai", "openai_client"),
    Client("openai-agents", "openai_agents_client"),
    Client("anthropic", "anthropic_client", ("anthropic", "pydantic")),
    Client("ollama", "ollama_client"),
    Client("litellm", "litellm_client"),
    Client("langchain-openai", "langchain_openai_client"),
    Client("llama-index-llms-openai-like", "llama_index_client"),
    Client("instructor", "instructor_client"),
    Client("pydantic-ai-slim", "pydantic_ai_client", ("pydantic-ai-slim[openai]",)),
    Client("llm", "llm_client"),
    Client("lm-eval", "lm_eval_client", ("lm-eval[api,hf]",), needs_torch=True),
    Client("guidellm", "guidellm_client", needs_torch=True),
    Client("aiperf", "aiperf_client", needs_torch=True),
    Client("@openai/codex", "codex_client", is_agent=True),
    Client("opencode-ai", "opencode_client", is_agent=True),
)


def main() -> int:
    """Run the clients; return an exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[1])
    parser.add_argument("--only", nargs="*", help="names of clients", metavar="NAME")
    parser.add_argument("--folder", type=Path, default=ROOT / ".clients", help="of environments")
    parser.add_argument("--torch-index", default="", help="where torch's build for CPUs is")
    given = parser.parse_args()
    clients = [client for client in CLIENTS if not given.only or client.name in given.only]
    folder: Path = given.folder.resolve()
    folder.mkdir(exist_ok=True)
    for client in clients:
        install(client, folder, given.torch_index)
    make_engines(folder)
    rows, failures = [], []
    with contextlib.ExitStack() as stack:
        urls = {
            is_agent: stack.enter_context(serve(folder, is_agent))
            for is_agent in {client.is_agent for client in clients}
        }
        for client in clients:
            version, told = run(client, folder, urls[client.is_agent])
            works = [name for name, result in told.items() if result == "yes"]
            failures += [f"{client.name}: {k}: {v}" for k, v in told.items() if v != "yes"]
            rows.append(f"| {client.name} | {version} | {', '.join(works)} |")
            print(rows[-1], file=sys.stderr, flush=True)
    print(
        f"{datetime.date.today().isoformat()}\n\n| client | version | works |\n| --- | --- | --- |"
    )
    print("\n".join(rows))
    print("\n".join(failures), file=sys.stderr)
    return int(bool(failures))


def install(client: Client, folder: Path, torch_index: str) -> None:
    """Make a client's environment, with its newest version, where there is none."""
    home = folder / client.name
    if (home / ".ready").is_file():
        return
    print(f"installing {client.name}", file=sys.stderr, flush=True)
    if client.is_agent:
        npm = ("npm", "install", "--silent", "--no-audit", "--prefix", home, client.name)
        subprocess.run(npm, check=True)
        (home / ".ready").touch()
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
    python, wanted = home / "bin" / "python", list(client.more or (client.name,))
    if client.needs_torch:
        import torch

        pin = f"torch=={torch.__version__.partition('+')[0]}"
        script = ROOT / ".ci" / "install_torch.py"
        subprocess.run([python, script, torch_index, pin], check=True)
        wanted += [pin, "transformers"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
    (home / ".ready").touch()


def call_specdec(*arguments: object) -> None:
    command = [sys.executable, "-m", "specdec", *map(str, arguments)]
    subprocess.run(command, check=True, cwd=ROOT)


def make_engines(folder: Path) -> None:
    """Convert and build the target and its draft model, and a tiny model, as a user would."""
    if (folder / "engines" / "agent").is_dir():
        return
    shutil.rmtree(folder / "engines", ignore_errors=True)
    parts = folder / "engines.part"
    shutil.rmtree(parts, ignore_errors=True)
    tiny = parts / "tiny"
    script = HERE / "agent_model.py"
    subprocess.run([sys.executable, script, tiny, PYCODE / "target"], check=True)
    room = ("--max-seq-len", 65536, "--max-batch-size", 2)
    flags = ("--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 8)
    models = (("target", PYCODE / "target", flags), ("draft", PYCODE / "draft", ()))
    for name, model, more in (*models, ("agent", tiny, room)):
        checkpoint = parts / f"{name}-checkpoint"
        source = ("--model-dir", model, "--dtype", "float32")
        call_specdec("convert", *source, "--output-dir", checkpoint)
        own = ("--checkpoint-dir", checkpoint, "--tokenizer-dir", model)
        call_specdec("build", *own, "--output-dir", parts / name, *more)
    parts.rename(folder / "engines")


@contextlib.contextmanager
def serve(folder: Path, is_agent: bool) -> Iterator[str]:
    """A server of pycode or, for agents, of the tiny model; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    engines, url = folder / "engines", f"http://127.0.0.1:{port}"
    flags = ("--chat-template", HERE / "template.jinja", "--served-model-name", MODEL)
    model: Sequence[object] = (
        "--engine-dir",
        engines / "target",
        "--draft-engine-dir",
        engines / "draft",
    )
    if is_agent:
        model = ("--engine-dir", engines / "agent")
    command: Sequence[object] = (
        sys.executable, "-m", "specdec", "serve", *model, "--port", port, *flags,
    )  # fmt: skip
    with subprocess.Popen([str(part) for part in command], cwd=ROOT) as process:
        try:
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health"):
                    break
                if process.poll() is not None:
                    raise SystemExit("the server did not start")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()


def find_version(client: Client, home: Path) -> tuple[Path, str]:
    """The Python that runs a client's script, and the client's version."""
    if client.is_agent:
        package = json.loads((home / "node_modules" / client.name / "package.json").read_text())
        return Path(sys.executable), str(package["version"])
    python = home / "bin" / "python"
    ask = f"from importlib.metadata import version; print(version({client.name!r}))"
    told = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    return python, told.stdout.strip()


def run(client: Client, folder: Path, url: str) -> tuple[str, dict[str, str]]:
    """Run a client's script; return its version, and by check "yes" or what was said."""
    home = folder / client.name
    python, version = find_version(client, home)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OPENAI_API_KEY")}
    environment |= {
        "CLIENT_URL": url, "CLIENT_MODEL": MODEL, "CLIENT_TARGET": str(PYCODE / "target"),
        "CLIENT_TOKENIZER": str(PYCODE / "target"), "CLIENT_HOME": str(home),
        "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1",
    }  # fmt: skip
    process = subprocess.Popen(
        [python, HERE / f"{client.script}.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        stdout, stderr = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return version, {"script": f"took more than {LIMIT:g} seconds"}
    finally:
        with contextlib.suppress(ProcessLookupError):  # what the script started goes with it
            os.killpg(process.pid, signal.SIGKILL)
    lines = [line for line in stdout.splitlines() if line.startswith('{"plain"')]
    if lines:
        return version, json.loads(lines[-1])
    return version, {"script": f"status {process.returncode}: {stderr[-500:]}"}


if __name__ == "__main__":
    sys.exit(main())
