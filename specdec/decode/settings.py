"""Settings of decoding: flags of specdec-run, and options of `Engine.load`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specdec.methods import list_options
from specdec.options import add_options, option_group

ENGINE_PROMPTS = option_group("Engine and prompts")
CHATS = option_group("Chats", rare=True)
TEXT = option_group("Text")
DRAFTING = option_group("Drafting")
MACHINE = option_group("Machine", rare=True)


@add_options(*list_options("draft"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """Settings of an engine, of its drafter, and of the sampling of requests without their own.

    One field is one flag and one recipe key.
    """

    engine_dir: Path = ENGINE_PROMPTS(
        required=True, folder="engine", help="Folder written by specdec-build."
    )
    tokenizer_dir: str | None = ENGINE_PROMPTS(
        help="Folder or Hub id of the tokenizer, usually the Hugging Face base model's; if not"
        " given, the one that the engine was built with.",
        metavar="DIR",
    )
    apply_chat_template: bool | None = ENGINE_PROMPTS(
        is_switch=True,
        help="Put each text into the tokenizer's chat template, as a user's turn; not done if not"
        " given.",
    )  # fmt: skip
    chat_template: str | None = CHATS(
        metavar="FILE|NAME",
        help="Chat template in place of the tokenizer's: a file of Jinja, one of chatml, plain and"
        " raw, or one of several that the tokenizer has.",
    )  # fmt: skip
    allow_special_tokens: bool = CHATS(
        False,
        help="Let names of special tokens in messages be these tokens; otherwise they are text.",
    )  # fmt: skip
    max_output_len: int = TEXT(100, minimum=1, help="Most new tokens for each prompt.")
    temperature: str | None = TEXT(
        metavar="T[,T...]",
        help="Sampling temperature, one for all prompts or one each; 0 decodes greedily. If"
        " not given: 1 with --top-k or --top-p, otherwise 0.",
    )
    top_k: int = TEXT(0, minimum=0, help="Sample from the K most likely tokens; 0 takes all.")
    top_p: float = TEXT(
        1.0, help="Sample from the most likely tokens whose probabilities sum to this."
    )
    random_seed: int = TEXT(
        0, minimum=0, help="Seed for sampling, for every prompt without one of its own."
    )
    stop_words: list[str] = TEXT([], help="Texts that end the output; they are cut off.")
    end_id: int | None = TEXT(
        minimum=-1,
        help="Token that ends the output, -1 for none; if not given, that of the generation config"
        " or tokenizer.",
    )  # fmt: skip
    no_speculation: bool = DRAFTING(
        False,
        help="Run the same engine without drafts, one token a step. Otherwise its drafter,"
        " suffixes of the text and n-grams draft while that is faster.",
    )
    kv_cache_enable_block_reuse: bool = MACHINE(
        False, help="Compute a beginning that several prompts share only once."
    )
    device: str = MACHINE("auto", choices=("auto", "cpu", "cuda"), help="Device to run on.")
