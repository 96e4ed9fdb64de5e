"""Settings of specdec-run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specdec.settings import setting

EAGLE_OPTIONS = (
    "eagle_choices", "eagle_use_dynamic_tree", "eagle_dynamic_tree_max_top_k", "eagle_tree_tokens",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """One field is one flag and one recipe key."""

    engine_dir: Path | None = setting(kind="path", help="Folder written by specdec-build.")
    tokenizer_dir: str | None = setting(
        help="Folder or hub id of the tokenizer; usually the Hugging Face base model's.",
        metavar="DIR",
    )
    input_text: list[str] = setting([], kind="list", help="One or several prompts.")
    input_file: Path | None = setting(
        kind="path",
        help="Prompts: .txt, one a line, .jsonl, one request object a line, or - for stdin.",
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
    streaming: bool = setting(False, kind="flag", help="Print text as it becomes certain.")
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
    medusa_choices: str | None = setting(
        metavar="JSON", help="Medusa: the tree as a list of paths of ranks, [[0],[0,0],[1]]."
    )
    eagle_choices: str | None = setting(
        metavar="JSON", help="EAGLE: a static tree as a list of paths of ranks, [[0],[0,0],[1]]."
    )
    eagle_use_dynamic_tree: bool = setting(
        False, kind="flag", help="EAGLE: grow each tree where the drafter is sure, as EAGLE-2."
    )
    eagle_dynamic_tree_max_top_k: int | None = setting(
        kind="int", minimum=1, metavar="K",
        help="EAGLE: nodes of a level that a dynamic tree goes on from, and tokens from each.",
    )  # fmt: skip
    eagle_tree_tokens: int | None = setting(
        kind="int", minimum=1, metavar="N", help="EAGLE: draft tokens of a dynamic tree."
    )
    lookahead_config: str | None = setting(
        metavar="[W,N,G]",
        help="Lookahead: columns of the window, tokens of an n-gram, n-grams verified a step; the"
        " largest [n,n,n] that the engine has room for if not given.",
    )
    prompt_lookup_config: str | None = setting(
        metavar="[LEN,SIZE,[TARGET]]",
        help="Prompt lookup: tokens drafted a step, longest n-gram looked up and the engine's"
        " devices, as TensorRT-LLM takes them: [10,2,[0]].",
    )
    prompt_lookup_num_tokens: int | None = setting(
        kind="int", minimum=1, metavar="N", help="Prompt lookup: most tokens drafted a step."
    )
    max_matching_ngram_size: int | None = setting(
        kind="int", minimum=1, metavar="M",
        help="Prompt lookup: longest end of the text that is looked up.  [default: 4]",
    )  # fmt: skip
    draft_engine_dir: Path | None = setting(
        kind="path", metavar="DRAFT", help="Draft-target: the draft model's plain engine."
    )
    draft_tokenizer_dir: str | None = setting(
        metavar="DIR", help="Draft-target: compare this tokenizer with --tokenizer-dir's."
    )
    draft_target_model_config: str | None = setting(
        metavar="[LEN,[DRAFT],[TARGET],LOGITS]",
        help="Draft-target: draft length, both models' devices and whether to use logits, as"
        " TensorRT-LLM takes them: [4,[0],[1],True].",
    )
    draft_len: str | None = setting(
        metavar="N|auto",
        help="Draft-target: tokens drafted a step; auto, the default, follows measured acceptance"
        " and cost. With other methods, auto drafts only while that pays.",
    )
    draft_devices: str | None = setting(
        metavar="N[,N...]", help="Draft-target: devices of the draft model."
    )
    target_devices: str | None = setting(
        metavar="N[,N...]", help="Draft-target: devices of the target."
    )
    use_logits: bool = setting(
        False, kind="flag",
        help="Draft-target: accept sampled tokens by the ratio of probabilities.",
    )  # fmt: skip
    kv_cache_enable_block_reuse: bool = setting(
        False, kind="flag", help="Take prefixes that prompts share from the cache."
    )
    kv_cache_free_gpu_memory_fraction: float | None = setting(
        kind="float", metavar="F",
        help="TensorRT-LLM only: part of the free GPU memory that each KV cache takes, 0.9 if not"
        " given.",
    )  # fmt: skip
    output_generation_logits: bool = setting(
        False, kind="flag",
        help="Write the logits that each token was chosen by beside --output-file.",
    )  # fmt: skip
    use_py_session: bool = setting(False, kind="flag", hidden=True, help="Refused.")
    num_beams: int = setting(1, kind="int", minimum=1, hidden=True, help="Refused beyond 1.")
    device: str = setting("auto", choices=("auto", "cpu", "cuda"), help="Where to run.")
    output_file: Path | None = setting(
        kind="path", help="Also write what stdout shows into this file."
    )
    run_profiling: bool = setting(
        False, kind="flag", help="Log the time of draft, verify and the rest of a step."
    )
    verify_hashes: bool = setting(
        False, kind="flag", help="Compare every byte of the engine with its manifest first."
    )
    dry_run: bool = setting(False, kind="flag", help="Check engine and prompts; generate nothing.")
    json: bool = setting(False, kind="flag", help="Print one JSON object on stdout.")

    @property
    def writes_logits(self) -> bool:
        """Whether tokens' logits go into a file; a draft-target run may merely compare them."""
        return self.output_generation_logits and self.output_file is not None
