"""What says how an engine decodes: flags of specdec-run, and options of `Engine.load`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specdec.methods import list_options
from specdec.settings import add_options, setting


@add_options(*list_options("draft"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """Which engine, who drafts for it, and how requests are sampled that do not say it themselves.

    One field is one flag and one recipe key.
    """

    engine_dir: Path | None = setting(kind="path", help="Folder written by specdec-build.")
    tokenizer_dir: str | None = setting(
        help="Folder or hub id of the tokenizer, usually the Hugging Face base model's. If not"
        " given: the one that the engine was built with.",
        metavar="DIR",
    )
    apply_chat_template: bool = setting(
        False, kind="flag", help="Put each prompt as a user's turn into the tokenizer's template."
    )
    max_output_len: int = setting(100, kind="int", minimum=1, help="Most new tokens a request.")
    temperature: str | None = setting(
        metavar="T[,T...]",
        help="Sampling temperature, one for all prompts or one each; 0 decodes greedily. If not"
        " given: 1 with --top-k or --top-p, else 0.",
    )
    top_k: int = setting(
        0, kind="int", minimum=0, help="Sample from the K likeliest tokens; 0 takes all."
    )
    top_p: float = setting(
        1.0, kind="float", help="Sample from the likeliest tokens that sum to this probability."
    )
    random_seed: int = setting(
        0, kind="int", minimum=0, help="Seed of every request that has none of its own."
    )
    stop_words: list[str] = setting(
        [], kind="list", help="Texts that end a request; they are cut off."
    )
    end_id: int | None = setting(
        kind="int", minimum=0,
        help="Token that ends a request; the tokenizer's or generation config's if not given.",
    )  # fmt: skip
    no_speculation: bool = setting(
        False, kind="flag", help="Same target and engine, one token a step."
    )
    acceptance: str = setting(
        "exact", choices=("exact", "typical"),
        help="Of drafts in sampled text. exact keeps the target's distribution; typical takes any"
        " token that is likely enough, which is faster and lossy.",
    )  # fmt: skip
    typical_epsilon: float | None = setting(
        kind="float", metavar="P",
        help="Typical acceptance: accept a token above this probability, or above  [default: 0.09]",
    )  # fmt: skip
    typical_delta: float | None = setting(
        kind="float", metavar="D",
        help="Typical acceptance: D * exp(-entropy), whichever is less.  [default: 0.3]",
    )  # fmt: skip
    kv_cache_enable_block_reuse: bool = setting(
        False, kind="flag", help="Take prefixes that prompts share from the cache."
    )
    device: str = setting("auto", choices=("auto", "cpu", "cuda"), help="Where to run.")
