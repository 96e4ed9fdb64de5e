"""Settings of `specdec-train data`: a field here is a flag, a recipe key and its help text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specdec.command.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What `specdec-train data` takes."""

    input: str = setting(
        required=True,
        help="Conversations or prompts: FILE.jsonl, FILE.json, FILE.txt (a prompt a line), or the"
        " Hub id of a dataset.",
        metavar="FILE|DATASET",
    )
    output: Path = setting(
        required=True, metavar="FILE.jsonl", help="The data with the target's own answers."
    )
    base_url: str | None = setting(
        help="An OpenAI-compatible server of the target, such as http://127.0.0.1:8000/v1; a key"
        " is taken from OPENAI_API_KEY.",
        metavar="URL",
    )
    model: str | None = setting(help="The target's name at the server.", metavar="NAME")
    engine_dir: Path | None = setting(help="The target's engine, in place of a server.")
    tokenizer_dir: str | None = setting(
        help="With --engine-dir: folder or Hub id of the tokenizer.", metavar="DIR"
    )
    device: str = setting(
        "auto", choices=("auto", "cpu", "cuda"), help="With --engine-dir: device to run on."
    )
    completion: bool = setting(
        False, help="Continue each prompt as plain text; otherwise it is a user's turn in a chat."
    )
    max_tokens: int = setting(2048, minimum=1, help="Most tokens in an answer.")
    temperature: float = setting(0.0, minimum=0, help="Sampling temperature; 0 decodes greedily.")
    top_p: float = setting(
        1.0, help="Sample from the most likely tokens whose probabilities sum to this."
    )
    seed: int | None = setting(
        minimum=0, maximum=2**63 - 1,
        help="Seed of the first row; each row after it has the next one.",
    )  # fmt: skip
    system_prompt: str | None = setting(
        help="System message for conversations that have none.", metavar="TEXT"
    )
    max_rows: int | None = setting(
        minimum=1, metavar="N", help="Take the first N rows of the input."
    )
    dataset_split: str = setting("train", help="Split of a Hub dataset.", metavar="NAME")
    concurrency: int = setting(
        16, minimum=1, maximum=4096, help="Requests to the server at the same time."
    )
    timeout: float = setting(
        600.0, minimum=0.1, maximum=10**6, metavar="SECONDS",
        help="Longest wait for an answer from the server.",
    )  # fmt: skip
    max_retries: int = setting(
        6, minimum=0, metavar="N", help="How often a failed request is repeated."
    )
    drop_truncated: bool = setting(False, help="Treat answers that --max-tokens cut as failed.")
    allow_failures: bool = setting(
        False, help="Write the output even if some rows failed, without those."
    )
    resume: bool = setting(
        False, help="Continue an interrupted run; rows that failed are tried again."
    )
    force: bool = setting(False, help="Replace the output, or start again.")
    json: bool = setting(False, help="Print one JSON object on stdout.")
