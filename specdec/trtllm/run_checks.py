"""Checks of what a TensorRT-LLM engine cannot do, before it is loaded.

Its runtime refuses some of it after minutes, and silently bends or ignores the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.decode.drafters.devices import check_count
from specdec.decode.requests import Request, find_problems
from specdec.decode.sampling import GREEDY
from specdec.decode.settings import DecodeSettings
from specdec.errors import Problems, UsageError
from specdec.methods import METHODS, list_starters
from specdec.methods.chain import ChainDraft
from specdec.methods.draft_target import DraftOptions
from specdec.methods.prompt_lookup import LookupOptions
from specdec.methods.redrafter import ReDrafterDraft
from specdec.options import list_given, name_flag
from specdec.system import logs
from specdec.text.prompts import SHAPING
from specdec.trtllm.engine_folder import EXTERNAL, EngineFolder
from specdec.trtllm.environment import compare_environments, read_environment
from specdec.trtllm.lacks import list_defects

logger = logs.get_logger(__name__)

MAX_TOP_K = 1024  # the sampling kernels' own limit, to which they cut a larger one
# Drafted by its runtime, or by our loop around it.
KNOWN_METHODS = ("redrafter", "medusa", "eagle", "draft_target", "prompt_lookup", "lookahead")
REDRAFTER, MEDUSA, EAGLE = (METHODS[name].mode for name in ("redrafter", "medusa", "eagle"))


def check_requests(
    requests: Sequence[Request], folder: EngineFolder, draft: EngineFolder | None
) -> None:
    """Raise SpecDecError that lists every request that the engines cannot do."""
    max_length = folder.max_total_len
    if draft is not None:
        # The draft engine is given all but the last token, and writes a draft after it.
        max_length = min(max_length, draft.max_seq_len - folder.max_draft_len)
    problems = Problems()
    for request in requests:
        problems += find_problems(
            request, max_input_len=folder.max_input_len, max_seq_len=max_length,
            vocab_size=folder.vocab_size,
        )  # fmt: skip
        if folder.mode == EXTERNAL:
            problems += find_growth_problems(request, folder, draft)
        elif len(request.input_ids) > folder.max_num_tokens:
            problems.add(
                f"{request.name} has {len(request.input_ids)} tokens, which are one"
                f" pass; the engine's max_num_tokens is {folder.max_num_tokens}",
                "shorten it, or build with a larger --max-num-tokens",
            )
        problems += find_sampling_problems(request, folder)
    problems.raise_all()


def check_devices(
    folder: EngineFolder, draft: EngineFolder | None, options: DraftOptions | None,
    lookup: LookupOptions | None,
) -> None:  # fmt: skip
    """Raise SpecDecError for a list of devices that does not fit its engine's ranks."""
    for role, devices, engine in (
        ("target", options.target_devices if options else None, folder),
        ("draft", options.draft_devices if options else None, draft),
        ("target", lookup.target_devices if lookup else None, folder),
    ):
        if devices is not None and engine is not None:
            check_count(role, devices, engine.world_size)


def find_growth_problems(
    request: Request, folder: EngineFolder, draft: EngineFolder | None
) -> Problems:
    """Check lengths: each step's prompt is the whole text so far, its draft included."""
    total = len(request.input_ids) + request.max_output_len
    return Problems.from_table(*(
        (total > min(engine.max_input_len, engine.max_num_tokens),
         f"{request.name} grows to {total} tokens, which are fed back at every step; the"
         f" {role} engine's max_input_len is {engine.max_input_len} and its max_num_tokens"
         f" {engine.max_num_tokens}",
         "lower --max-output-len, or build with a larger --max-input-len and --max-num-tokens")
        for role, engine in (("target", folder), ("draft", draft)) if engine is not None
    ))  # fmt: skip


def find_engine_problems(
    settings: DecodeSettings, options: DraftOptions | None, folder: EngineFolder,
    draft: EngineFolder | None, *, has_lookup: bool,
) -> Problems:  # fmt: skip
    """List what the two engines and the flags have against one another."""
    problems = find_flag_problems(settings, folder)
    for engine in [folder, *([draft] if draft else [])]:
        problems += find_build_problems(engine)
    is_external = folder.mode == EXTERNAL
    reusing = [folder] if is_external or settings.kv_cache_enable_block_reuse else []
    why = "external drafts need" if is_external else "was asked for"
    problems += Problems.from_table(
        (is_external and not (settings.no_speculation or draft or has_lookup),
         f"{folder.folder} was built for external drafts, and nothing drafts",
         f"give {', '.join(list_starters(EXTERNAL, KNOWN_METHODS))}, or --no-speculation to decode"
         " without"),
        *((not engine.has_paged_context_fmha or engine.kv_cache_type != "PAGED",
           f"{engine.folder} cannot reuse blocks of its KV cache, which {why}:"
           f" use_paged_context_fmha is {str(engine.has_paged_context_fmha).lower()},"
           f" kv_cache_type {engine.kv_cache_type}",
           "build it with --use-paged-context-fmha enable and --kv-cache-type paged")
          for engine in [*reusing, *([draft] if draft else [])]),
    )  # fmt: skip
    if draft is not None and options is not None:
        problems += find_pair_problems(options, folder, draft)
    return problems


def find_pair_problems(
    options: DraftOptions, folder: EngineFolder, draft: EngineFolder
) -> Problems:
    """List what keeps an engine from drafting for another, as they were built."""
    is_external, length = folder.mode == EXTERNAL, options.draft_len or 0
    problems = Problems.from_table(
        (not is_external,
         f"the target's engine was built with speculative_decoding_mode {folder.mode}",
         f"build it from a plain checkpoint with --speculative-decoding-mode {EXTERNAL}"
         " --max-draft-len N"),
        (is_external and length > folder.max_draft_len,
         f"the draft length is {length}, the target's engine was built with max_draft_len"
         f" {folder.max_draft_len}",
         f"draft {folder.max_draft_len} or fewer, or build with --max-draft-len {length}"),
        (draft.mode is not None,
         f"the draft engine was built with speculative_decoding_mode {draft.mode}",
         "give a plain engine as --draft-engine-dir"),
    )  # fmt: skip
    if options.use_logits:
        problems += find_logits_problems(folder, draft)
    return problems


def find_build_problems(engine: EngineFolder) -> Problems:
    """List what trtllm-build by itself has let pass, and the runtime does not."""
    drafts = engine.mode is not None
    return Problems.from_table(
        (engine.lacking,
         f"{engine.folder} was built with {', '.join(engine.lacking)}: it has no in-flight"
         " batching, without which only the Python session runs it",
         "build it again without these settings"),
        (drafts and engine.max_beam_width != 1,
         f"{engine.folder} was built with max_beam_width {engine.max_beam_width}, and the runtime"
         " takes no beams of the output together with drafts",
         "build it again with --max-beam-width 1"),
        (drafts and engine.built_draft_len != engine.max_draft_len,
         f"{engine.folder} was built for drafts of {engine.built_draft_len} tokens, and its"
         f" {engine.mode} makes {engine.max_draft_len}",
         "build it again with specdec-build, or without --max-draft-len"),
    )  # fmt: skip


def find_flag_problems(settings: DecodeSettings, folder: EngineFolder) -> Problems:
    """List the flags that an engine of this mode ignores or cannot honour."""
    return Problems.from_table(
        (settings.no_speculation and folder.mode not in (None, EXTERNAL),
         f"--no-speculation: a TensorRT-LLM engine of mode {folder.mode} always speculates",
         "build a plain engine from the base model's checkpoint for the comparison"),
    )  # fmt: skip


def find_logits_problems(folder: EngineFolder, draft: EngineFolder) -> Problems:
    """List what keeps two engines from comparing their logits."""
    folders = [str(e.folder) for e in (folder, draft) if not e.gathers_generation_logits]
    return Problems.from_table(
        (folders, f"--use-logits: {' and '.join(folders)} built without generation logits",
         "build both engines with --gather-generation-logits"),
        *((target_value != draft_value,
           f"--use-logits: the target's {name} is {target_value}, the draft engine's {draft_value}",
           "leave --use-logits out, or convert both models in the same way")
          for name, target_value, draft_value in (
              ("vocab_size", folder.vocab_size, draft.vocab_size),
              ("logits_dtype", folder.logits_dtype, draft.logits_dtype),
          )),
    )  # fmt: skip


def check_settings(settings: DecodeSettings, fraction: float | None) -> None:
    """Raise UsageError for flags that have no meaning with any TensorRT-LLM engine.

    fraction: of the GPU's free memory that a KV cache takes.
    """
    if settings.device == "cpu":
        raise UsageError(
            "--device cpu: a TensorRT-LLM engine runs on the GPU it was built for",
            "leave it out, or build the checkpoint with --backend torch",
        )
    torch_options = {
        method.name: method.options["draft"] for method in METHODS.values()
        if method.name not in KNOWN_METHODS
    }  # fmt: skip
    torch_options |= {
        "several methods together": ChainDraft,
        "ReDrafter's dynamic trees": ReDrafterDraft,
    }
    for name, options in torch_options.items():
        if option_names := list_given(settings, options):
            raise UsageError(
                f"{name_flag(option_names[0])} is for engines of torch: nothing drafts by {name}"
                " for TensorRT-LLM",
                "leave it out, or build the checkpoint with --backend torch",
            )
    if fraction is not None and not 0 < fraction <= 1:
        raise UsageError(
            f"--kv-cache-free-gpu-memory-fraction is {fraction:g}",
            "give a number above 0 and at most 1",
        )


# Operations on logits that only our own loop has, by the fields of a prompt.
SHAPED = {name: name for name in (*SHAPING, "bad_words", "min_tokens")} | {
    "allowed_ids": "allowed_token_ids"
}  # fmt: skip


def find_sampling_problems(request: Request, folder: EngineFolder) -> Problems:
    """List what an engine would silently do otherwise than the request says."""
    params, label = request.sampling, request.name
    shaping = [name for name in SHAPED if getattr(params, name) != getattr(GREEDY, name)]
    heat, samples = f"temperature {params.temperature:g}", not params.is_greedy
    unoffered = ", which is not offered with an engine of TensorRT-LLM"
    remedy = "leave it out, or use an engine of the torch backend"
    problems = find_redrafter_problems(request, folder) if folder.mode == REDRAFTER else Problems()
    problems += Problems.from_table(
        (folder.mode == MEDUSA and samples and params.temperature != 1,
         f"{label} has {heat}, TensorRT-LLM's Medusa only 1",
         "decode greedily, or with --temperature 1", "temperature"),
        (folder.mode == EAGLE and samples,
         f"{label} samples with {heat}, and TensorRT-LLM's EAGLE decodes greedily unless it"
         " accepts typical tokens, which changes the text", "leave the temperature out",
         "temperature"),
        (shaping, f"{label} asks for a penalty, a bias, min_p or bans{unoffered}", remedy,
         SHAPED[shaping[0]] if shaping else ""),
        (request.num_logprobs is not None, f"{label} asks for log-probabilities{unoffered}", remedy,
         "logprobs"),
        (not request.allows_drafts and folder.mode is not None,
         f"{label} asks for decoding without drafts{unoffered}", remedy, "speculation"),
        (request.draft_method is not None or request.max_draft_tokens is not None,
         f"{label} chooses how it is drafted for{unoffered}", remedy, "speculation"),
        (request.grammar is not None, f"{label} asks for structured output{unoffered}", remedy,
         "grammar"),
        (samples and params.top_k > MAX_TOP_K,
         f"{label} has top_k {params.top_k}, which TensorRT-LLM cuts to {MAX_TOP_K}",
         f"give {MAX_TOP_K} or less", "top_k"),
    )  # fmt: skip
    return problems


def find_redrafter_problems(request: Request, folder: EngineFolder) -> Problems:
    """List what a ReDrafter engine, converted for greedy decoding or for samples, cannot do."""
    params, label = request.sampling, request.name
    if folder.pretrained.get("redrafter_greedy_search", True):
        return Problems.from_table(
            (not params.is_greedy,
             f"{label} samples with temperature {params.temperature:g}, but this engine always"
             " decodes greedily",
             "leave the temperature out, or convert with --redrafter-no-greedy-search",
             "temperature"),
        )  # fmt: skip
    return Problems.from_table(
        (params.is_greedy,
         f"{label} decodes greedily, but this engine always samples: it was converted with"
         " --redrafter-no-greedy-search", "give --temperature, or convert without that flag",
         "temperature"),
        (not params.is_greedy and (params.top_k or params.top_p < 1),
         f"{label} has top_k {params.top_k} and top_p {params.top_p:g}; TensorRT-LLM's ReDrafter"
         " knows neither", "leave them out", "top_k"),
    )  # fmt: skip


def check_machine(folder: EngineFolder, draft: EngineFolder | None, *, must_run: bool) -> None:
    """Compare where engines were built with this machine; raise for what will not load here.

    What is known of the release's own defects is a warning.
    """
    environment = read_environment()
    stops = Problems()
    for engine in filter(None, (folder, draft)):
        for defect in list_defects(engine.version, engine.mode, engine.pretrained):
            logger.warning("%s", defect)
        ranks = engine.world_size
        stopping, warnings = compare_environments(engine.environment, environment, num_ranks=ranks)
        stops += stopping if must_run else []
        for difference in warnings if must_run else [*stopping, *warnings]:
            logger.warning("%s: %s", *difference)
    if environment.tensorrt_llm is None:
        del stops[1:]  # without it nothing else matters, and it is told first
    stops.raise_all()
