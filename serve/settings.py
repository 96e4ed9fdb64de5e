"""Settings of specdec-serve."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specdec.decode.settings import DecodeSettings
from specdec.methods import list_options
from specdec.options import add_options, like, option_group
from specdec.text.call_formats import AUTO, NO_FORMAT, REASONING_FORMATS, TOOL_FORMATS

MODELS = option_group("Models")
ADDRESS = option_group("Address")
ENGINE = option_group("Engine")
LOAD = option_group("Load")
MACHINE = option_group("Machine", rare=True)
DEFAULT_SESSION_GB = 20.0


@add_options(*list_options("draft"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Options of specdec-serve: each field is a flag and a recipe key."""

    model_dir: str | None = MODELS(
        folder="model", metavar="BASE",
        help="The model: a Hugging Face folder, a Hub id, or a GGUF file. Its engine is made, or"
        " taken from the cache of specdec generate.",
    )  # fmt: skip
    drafter_model_dir: str | None = MODELS(
        metavar="DRAFTER", help="A trained drafter for the model, of any method, or a small model."
    )
    draft_model_dir: str | None = MODELS(
        folder="model", metavar="SMALL", rare=True, help="A small model that drafts for it."
    )
    quantization: str | None = MODELS(
        choices=("int8", "int4"), rare=True, help="Store the model's layers as int8 or int4."
    )
    engine_dir: Path = ENGINE(
        folder="engine", metavar="DIR",
        help="Folder written by specdec-build, in the place of a model.",
    )  # fmt: skip
    tokenizer_dir: str | None = like(DecodeSettings, "tokenizer_dir", group="Engine")
    chat_template: str | None = like(DecodeSettings, "chat_template")
    allow_special_tokens: bool = like(DecodeSettings, "allow_special_tokens")
    no_speculation: bool = like(DecodeSettings, "no_speculation")
    device: str = like(DecodeSettings, "device")
    host: str = ADDRESS("127.0.0.1", help="Address to listen on.")
    port: int = ADDRESS(
        8000, minimum=0, maximum=65535, help="Port to listen on; 0 takes a free one."
    )
    served_model_name: str | None = ENGINE(
        metavar="NAME",
        help="The name by which clients call the model; if not given, that of the model or of the"
        " engine folder.",
    )
    tool_call_parser: str = ENGINE(
        AUTO,
        choices=(AUTO, NO_FORMAT, *TOOL_FORMATS),
        help="How the model writes tool calls; auto finds it by its chat template.",
    )
    reasoning_parser: str = ENGINE(
        AUTO,
        choices=(AUTO, NO_FORMAT, *REASONING_FORMATS),
        help="How the model marks its reasoning; auto goes by its chat template.",
    )
    api_key_file: Path | None = ADDRESS(
        help="File that holds the key clients must send; if not given, SPECDEC_API_KEY."
    )
    allow_anonymous: bool = ADDRESS(
        False, help="Listen on other addresses than loopback without a key."
    )
    cors_origin: list[str] = ADDRESS(
        [], metavar="ORIGIN...",
        help="Origins of other sites whose pages may call the server, such as"
        " http://localhost:3000; * are all, and needs a key or --allow-anonymous.",
    )  # fmt: skip
    max_batch_size: int | None = LOAD(
        minimum=1, help="Requests decoded at once; the engine's own if not given."
    )
    max_seq_len: int | None = LOAD(
        minimum=2, help="Tokens of a prompt and its output; the engine's own if not given."
    )
    max_queue: int = LOAD(
        256, minimum=0, rare=True, help="Requests that may wait; beyond, clients get 429."
    )
    prompt_chunk: int | None = LOAD(
        minimum=1,
        help="Tokens of new prompts that are read in a step of running requests; if not given, as"
        " many as leave it at most six times as long as without them, by what steps take here.",
    )  # fmt: skip
    session_dir: Path | None = LOAD(
        metavar="DIR",
        help="Keep the keys and values of prompts and outputs in DIR, for the time after a restart."
        " No two servers may use it at once.",
    )  # fmt: skip
    max_session_gb: float | None = LOAD(
        minimum=0.001, maximum=10**6, metavar="N",
        help="GiB that --session-dir may take; what was not used for longest is removed.  [default:"
        f" {DEFAULT_SESSION_GB:g}]",
    )  # fmt: skip
    request_timeout: float = LOAD(
        600.0, minimum=0.001, maximum=10**6, metavar="S", help="Seconds that a request may take."
    )
    max_body_mb: float = MACHINE(
        4.0, minimum=0.001, maximum=10**6, metavar="MB", help="Size of the largest request."
    )
    metrics_prefix: str = MACHINE(
        "specdec", choices=("specdec", "vllm"), help="The beginning of the names of metrics."
    )
