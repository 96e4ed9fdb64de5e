"""guidellm: a short benchmark of chats and of completions with its synthetic prompts."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

from common import MODEL, URL, run


def measure(kind):
    output = pathlib.Path(tempfile.mkdtemp()) / "report.json"
    command = [
        str(pathlib.Path(sys.executable).parent / "guidellm"), "run", "--backend",
        f"kind=openai_http,target={URL},model={MODEL},request_format={kind}", "--tokenizer",
        f"kind=huggingface_auto,model={os.environ['CLIENT_TOKENIZER']}", "--data",
        "kind=synthetic_text,prompt_tokens=24,output_tokens=12", "--profile",
        "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6", "--output",
        f"kind=json,path={output}", "--disable-console-interactive",
    ]  # fmt: skip
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert output.is_file(), (said.stdout + said.stderr)[-1500:]
    (benchmark,) = json.loads(output.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (6, 0), totals


run(
    plain=lambda: measure("/v1/completions"),
    chat=lambda: measure("/v1/chat/completions"),
    responses=lambda: measure("/v1/responses"),
)
