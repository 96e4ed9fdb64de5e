"""Settings of `specdec-train data`: a field here is a flag, a recipe key and its help text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specdec.decode.settings import DecodeSettings
from specdec.options import like, option_group, setting

DATA = option_group("Data")
SERVER_TARGET = option_group("A server of the target")
ENGINE = option_group("Or its engine")
SHARDS = option_group("Several hosts", rare=True)
ANSWERS = option_group("Answers")
FAILURES = option_group("Failures")
SERVER_FAILURES = option_group("Failures", rare=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Settings of `specdec-train data`."""

    input: str = DATA(
        required=True,
        help="Conversations or prompts: FILE.jsonl, FILE.json, FILE.txt (a prompt a line), or the"
        " Hub id of a dataset.",
        metavar="FILE|DATASET",
    )
    output: Path = DATA(
        required=True, metavar="FILE.jsonl", help="The data with the target's own answers."
    )
    base_url: list[str] = SERVER_TARGET(
        [],
        help="An OpenAI-compatible server of the target, such as http://127.0.0.1:8000/v1, or"
        " several, which share the rows; a key is taken from OPENAI_API_KEY.",
        metavar="URL...",
    )
    model: str | None = SERVER_TARGET(help="The target's name at the server.", metavar="NAME")
    engine_dir: Path | None = ENGINE(help="The target's engine, instead of a server.")
    tokenizer_dir: str | None = ENGINE(
        help="With --engine-dir: folder or Hub id of the tokenizer, where the engine holds none.",
        metavar="DIR",
    )
    device: str = like(
        DecodeSettings, "device", "With --engine-dir: device to run on.", group="Or its engine"
    )
    completion: bool = DATA(
        False, help="Continue each prompt as plain text; otherwise it is a user's turn in a chat."
    )
    max_tokens: int = ANSWERS(2048, minimum=1, help="Most tokens in an answer.")
    temperature: float = ANSWERS(0.0, minimum=0, help="Sampling temperature; 0 decodes greedily.")
    top_p: float = ANSWERS(
        1.0, help="Sample from the most likely tokens whose probabilities sum to this."
    )
    seed: int | None = ANSWERS(
        minimum=0, maximum=2**63 - 1,
        help="Seed of the first row; each row after it has the next one.",
    )  # fmt: skip
    system_prompt: str | None = DATA(
        help="System message for conversations that have none.", metavar="TEXT"
    )
    max_rows: int | None = DATA(minimum=1, metavar="N", help="Take the first N rows of the input.")
    dataset_split: str = DATA("train", help="Split of a Hub dataset.", metavar="NAME")
    concurrency: int = SERVER_TARGET(
        16, minimum=1, maximum=4096, help="Requests to each server at the same time."
    )
    timeout: float = SERVER_FAILURES(
        600.0, minimum=0.1, maximum=10**6, metavar="SECONDS",
        help="Longest wait for an answer from the server.",
    )  # fmt: skip
    max_retries: int = SERVER_FAILURES(
        6, minimum=0, metavar="N", help="How often a failed request is repeated."
    )
    shard: str | None = SHARDS(
        help="Answer part I, from 0, of N parts of the rows, into FILE.I-of-N.jsonl.",
        metavar="I/N",
    )
    merge: list[str] = SHARDS(
        [], help="Put the files of all shards together, instead of answering.", metavar="FILE..."
    )
    drop_truncated: bool = FAILURES(False, help="Treat answers that --max-tokens cut as failed.")
    allow_failures: bool = FAILURES(
        False, help="Write the output even if some rows failed, without those."
    )
    resume: bool = FAILURES(
        False, help="Continue an interrupted run; rows that failed are tried again."
    )
    force: bool = setting(False, help="Replace the output, or start again.")
    json: bool = setting(False, help="Print one JSON object on stdout.")
