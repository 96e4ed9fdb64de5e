"""Parameters that clients of other servers send, by what they mean here: one table.

A parameter is another name of ours, or without effect on the text and listed in an answer's
`specdec.ignored`, or taken with the values alone that ask for nothing: any other would change the
text, and is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Foreign(NamedTuple):
    """Parameter of other servers.

    clients: who sends it. example: a value; of a parameter with values, one that is refused.
    field: our name of it, None where we have none. values: those that change nothing, None where no
    value does. refines: our parameters that it refines: beside them only `values` are taken.
    """

    name: str
    clients: str
    example: Any
    field: str | None = None
    values: Sequence[Any] | None = None
    refines: Sequence[str] = ()

    @property
    def is_ignored(self) -> bool:
        """True where no value can change the text."""
        return self.field is None and self.values is None


OPENAI, VLLM, SGLANG, LLAMA_CPP = "OpenAI", "vLLM", "SGLang", "llama.cpp"
OLLAMA, OPEN_WEBUI, LM_STUDIO, OPENROUTER = "Ollama", "open-webui", "LM Studio", "OpenRouter"
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
NEUTRAL: Mapping[str, float] = {name: float(name == PENALTIES[0]) for name in PENALTIES}
ROWS = (
    # Other names of our parameters.
    Foreign("repeat_penalty", f"{LLAMA_CPP}, {OLLAMA}, {LM_STUDIO}, {OPEN_WEBUI}", 1.1,
            "repetition_penalty"),
    Foreign("n_predict", LLAMA_CPP, 5, "max_tokens"),
    Foreign("num_predict", f"{OLLAMA}, {OPEN_WEBUI}", 5, "max_tokens"),
    Foreign("max_new_tokens", SGLANG, 5, "max_tokens"),
    Foreign("min_new_tokens", SGLANG, 2, "min_tokens"),
    Foreign("no_stop_trim", SGLANG, True, "include_stop_str_in_output"),
    Foreign("regex", SGLANG, "a+", "guided_regex"),
    Foreign("think", f"{OLLAMA}, {OPEN_WEBUI}", False, "enable_thinking"),
    # Without effect on the text.
    *(Foreign(name, OPENAI, example) for name, example in (
        ("store", True), ("metadata", {"a": "b"}), ("service_tier", "auto"), ("user", "u"),
        ("safety_identifier", "u"), ("prompt_cache_key", "k"), ("prompt_cache_retention", "24h"),
        ("prompt_cache_options", {}), ("verbosity", "low"), ("prediction", {"type": "content"}),
        ("client_metadata", {"a": "b"}),
    )),
    *(Foreign(name, VLLM, example) for name, example in (
        ("request_id", "r"), ("cache_salt", "s"), ("priority", 1),
    )),
    *(Foreign(name, LLAMA_CPP, example) for name, example in (
        ("cache_prompt", True), ("id_slot", 0), ("n_keep", 4), ("n_discard", 4),
        ("n_cache_reuse", 256), ("timings_per_token", True), ("return_progress", True),
        ("mirostat_tau", 5.0), ("mirostat_eta", 0.1), ("dynatemp_exponent", 1.0),
        ("xtc_threshold", 0.1), ("dry_base", 1.75), ("dry_allowed_length", 2),
        ("dry_penalty_last_n", -1), ("dry_sequence_breakers", ["\n"]), ("min_keep", 1),
        ("speculative.n_max", 8), ("speculative.n_min", 0), ("speculative.p_min", 0.5),
    )),
    *(Foreign(name, f"{OLLAMA}, {OPEN_WEBUI}", example) for name, example in (
        ("keep_alive", "5m"), ("num_ctx", 4096), ("num_keep", 4), ("num_batch", 512),
        ("num_gpu", 1), ("num_thread", 8), ("main_gpu", 0), ("numa", False), ("low_vram", False),
        ("f16_kv", True), ("logits_all", False), ("vocab_only", False), ("use_mmap", True),
        ("truncate", True), ("shift", True), ("use_mlock", False), ("embedding_only", False),
    )),
    *(Foreign(name, OPEN_WEBUI, example) for name, example in (
        ("chat_id", "c"), ("session_id", "s"),
    )),
    *(Foreign(name, LM_STUDIO, example) for name, example in (
        ("ttl", 300), ("draft_model", "small"),
    )),
    *(Foreign(name, OPENROUTER, example) for name, example in (
        ("provider", {"sort": "price"}), ("models", ["a", "b"]), ("route", "fallback"),
        ("usage", {"include": True}), ("trace", {"id": "t"}),
    )),
    *(Foreign(name, SGLANG, example) for name, example in (
        ("stream_reasoning", True), ("rid", "r"), ("data_parallel_rank", 0),
    )),
    # Values that ask for nothing; any other would change the text.
    *(Foreign(name, OPENAI, example, values=values) for name, example, values in (
        ("audio", {"voice": "a"}, ()), ("web_search_options", {}, ()), ("functions", [{}], ([],)),
        ("function_call", "auto", ("none",)), ("tools", [{}], ([],)),
        ("tool_choice", "auto", ("none",)), ("parallel_tool_calls", 1, (True, False)),
        ("modalities", ["audio"], (["text"],)), ("suffix", "x", ("",)), ("echo", True, (False,)),
    )),
    *(Foreign(name, VLLM, example, values=values) for name, example, values in (
        ("chat_template", "{{ 1 }}", ()), ("mm_processor_kwargs", {"a": 1}, ({},)),
        ("kv_transfer_params", {"a": 1}, ({},)), ("vllm_xargs", {"a": 1}, ({},)),
        ("documents", [{}], ([],)), ("logits_processors", ["x"], ([],)),
        ("length_penalty", 2.0, (1, 1.0)), ("use_beam_search", True, (False,)),
        ("early_stopping", True, (False,)), ("return_tokens_as_token_ids", True, (False,)),
        ("thinking_token_budget", 100, (-1,)),
    )),
    *(Foreign(name, LLAMA_CPP, example, values=values) for name, example, values in (
        ("typical_p", 0.5, (1, 1.0)), ("mirostat", 2, (0, 0.0)), ("xtc_probability", 0.5, (0, 0.0)),
        ("dry_multiplier", 0.8, (0, 0.0)), ("dynatemp_range", 0.5, (0, 0.0)),
        ("top_n_sigma", 1.0, (-1, -1.0, 0, 0.0)), ("n_probs", 5, (0,)), ("n_indent", 2, (0,)),
        ("t_max_predict_ms", 100, (0, -1)), ("lora", [{"id": 0}], ([],)),
        ("image_data", [{}], ([],)), ("return_tokens", True, (False,)),
        ("post_sampling_probs", True, (False,)), ("reasoning_format", "none", ("auto", "deepseek")),
        ("reasoning_budget", 0, (-1,)), ("thinking_budget_tokens", 100, (-1,)),
    )),
    *(Foreign(name, f"{LM_STUDIO}, {OPEN_WEBUI}", example, values=values)
      for name, example, values in (
        ("mirostat_mode", 1, (0,)), ("tfs_z", 0.5, (1, 1.0)),
    )),
    *(Foreign(name, OPENROUTER, example, values=values) for name, example, values in (
        ("top_a", 0.5, (0, 0.0)), ("transforms", ["middle-out"], ([],)), ("plugins", [{}], ([],)),
    )),
    *(Foreign(name, SGLANG, example, values=values) for name, example, values in (
        ("separate_reasoning", False, (True,)), ("ebnf", "x", ()), ("lora_path", "x", ()),
        ("session_params", {"id": 1}, ({},)), ("custom_logit_processor", "x", ()),
        ("return_hidden_states", True, (False,)),
    )),
    # Without effect unless there is a penalty, which counts all tokens here.
    Foreign("repeat_last_n", f"{OLLAMA}, {OPEN_WEBUI}", 64, values=(-1,), refines=PENALTIES),
    Foreign("penalty_last_n", LLAMA_CPP, 64, values=(-1,), refines=PENALTIES),
    Foreign("penalize_newline", OLLAMA, False, values=(True,), refines=PENALTIES),
)  # fmt: skip
FOREIGN: Mapping[str, Foreign] = {row.name: row for row in ROWS}
IGNORED = tuple(row.name for row in ROWS if row.is_ignored)
