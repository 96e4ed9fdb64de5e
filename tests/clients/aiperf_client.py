"""AIPerf: a short profile of streamed and of whole chats with synthetic prompts."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

from common import MODEL, URL, run

os.environ.pop("HF_HUB_OFFLINE", None)  # with it, AIPerf 0.13 takes a folder for a hub's id


def measure(kind, *flags):
    output = pathlib.Path(tempfile.mkdtemp())
    command = [
        str(pathlib.Path(sys.executable).parent / "aiperf"), "profile", "--model", MODEL,
        "--url", URL, "--endpoint-type", kind, "--tokenizer", os.environ["CLIENT_TOKENIZER"],
        "--request-count", "6", "--concurrency", "2", "--synthetic-input-tokens-mean", "24",
        "--output-tokens-mean", "12", "--ui", "none", "--artifact-dir", str(output), *flags,
    ]  # fmt: skip
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    found = list(output.rglob("profile_export_aiperf.json"))
    assert found, (said.stdout + said.stderr)[-1500:]
    report = json.loads(found[0].read_text())
    assert report["request_count"]["avg"] == 6, report["request_count"]
    assert not report.get("error_summary"), report["error_summary"]


run(
    plain=lambda: measure("chat"),
    streamed=lambda: measure("chat", "--streaming"),
    completions=lambda: measure("completions", "--streaming"),
)
