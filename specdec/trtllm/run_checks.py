"""What a TensorRT-LLM engine cannot do, found before it is loaded.

Its runtime refuses some of it after minutes, and silently bends or ignores the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specdec import logs
from specdec.decode.devices import check_count
from specdec.decode.requests import Request, find_problems
from specdec.errors import Problems, UsageError
from specdec.methods import METHODS, list_starters
from specdec.methods.chain import ChainDraft
from specdec.methods.draft_target import DraftOptions
from specdec.methods.prompt_lookup import LookupOptions
from specdec.methods.redrafter import ReDrafterDraft
from specdec.options import list_given, name_flag
from specdec.trtllm.defects import list_defects
from specdec.trtllm.engine_folder import EXTERNAL, EngineFolder
from specdec.trtllm.environment import compare_environments, read_environment

logger = logs.get_logger(__name__)


class RuntimeSettings(Protocol):
    """What is read here of the settings of specdec-run, or of a server."""

    @property
    def device(self) -> str: ...

    @property
    def no_speculation(self) -> bool: ...

    @property
    def kv_cache_enable_block_reuse(self) -> bool: ...

    @property
    def kv_cache_free_gpu_memory_fraction(self) -> float | None: ...


MAX_TOP_K = 1024  # the sampling kernels' own limit, to which they cut a larger one
# Drafted by its runtime, or by our loop around it.
KNOWN_METHODS = (
    "redrafter", "medusa", "eagle", "draft_target", "prompt_lookup", "lookahead",
)  # fmt: skip
REDRAFTER, MEDUSA, EAGLE = (METHODS[name].mode for name in ("redrafter", "medusa", "eagle"))


def check_acceptance(acceptance: str) -> None:
    """Raise UsageError for a rule of acceptance that is not TensorRT-LLM's."""
    if acceptance == "typical":
        raise UsageError(
            "--acceptance typical is for engines of torch; TensorRT-LLM's accept by its own rules",
            "leave it out",
        )


def check_requests(
    requests: Sequence[Request], folder: EngineFolder, draft: EngineFolder | None
) -> None:
    """Raise SpecDecError that lists every request that the engines cannot do."""
    longest = folder.max_total_len
    if draft is not None:
        # The draft engine is given all but the last token, and writes a draft behind it.
        longest = min(longest, draft.max_seq_len - folder.max_draft_len)
    problems = Problems()
    for request in requests:
        problems += find_problems(
            request,
            max_input_len=folder.max_input_len,
            max_seq_len=longest,
            vocab_size=folder.vocab_size,
        )
        if folder.mode == EXTERNAL:
            problems += find_growth_problems(request, folder, draft)
        elif len(request.input_ids) > folder.max_num_tokens:
            problems.add(
                f"prompt {request.index} has {len(request.input_ids)} tokens, which are one"
                f" pass; the engine's max_num_tokens is {folder.max_num_tokens}",
                "shorten it, or build with a larger --max-num-tokens",
            )
        problems += find_sampling_problems(request, folder)
    problems.raise_all()


def check_devices(
    folder: EngineFolder,
    draft: EngineFolder | None,
    options: DraftOptions | None,
    lookup: LookupOptions | None,
) -> None:
    """Raise SpecDecError for a list of devices that does not fit its engine's ranks."""
    if options is not None and options.target_devices is not None:
        check_count("target", options.target_devices, folder.world_size)
    if options is not None and options.draft_devices is not None and draft is not None:
        check_count("draft", options.draft_devices, draft.world_size)
    if lookup is not None and lookup.target_devices is not None:
        check_count("target", lookup.target_devices, folder.world_size)


def find_growth_problems(
    request: Request, folder: EngineFolder, draft: EngineFolder | None
) -> Problems:
    """The text that is given back to the engine, draft included, is its prompt of each step."""
    total = len(request.input_ids) + request.max_output_len
    problems = Problems()
    pairs = [("target", folder)] + ([("draft", draft)] if draft else [])
    for what, engine in pairs:
        limit = min(engine.max_input_len, engine.max_num_tokens)
        if total > limit:
            problems.add(
                f"prompt {request.index} grows to {total} tokens, which are fed back at"
                f" every step; the {what} engine's max_input_len is {engine.max_input_len}"
                f" and its max_num_tokens {engine.max_num_tokens}",
                "lower --max-output-len, or build with a larger --max-input-len and"
                " --max-num-tokens",
            )
    return problems


def find_engine_problems(
    settings: RuntimeSettings,
    options: DraftOptions | None,
    folder: EngineFolder,
    draft: EngineFolder | None,
    *,
    has_lookup: bool,
) -> Problems:
    """List what the two engines and the flags have against one another."""
    problems = find_flag_problems(settings, folder)
    for engine in [folder, *([draft] if draft else [])]:
        problems += find_build_problems(engine)
    is_external = folder.mode == EXTERNAL
    if is_external and not (settings.no_speculation or draft or has_lookup):
        problems.add(
            f"{folder.folder} was built for external drafts, and nothing drafts",
            f"give {', '.join(list_starters(EXTERNAL, KNOWN_METHODS))}, or --no-speculation to"
            " decode without",
        )
    reusing = [folder] if is_external or settings.kv_cache_enable_block_reuse else []
    for engine in [*reusing, *([draft] if draft else [])]:
        if not engine.has_paged_context_fmha or engine.kv_cache_type != "PAGED":
            problems.add(
                f"{engine.folder} cannot reuse blocks of its KV cache, which"
                f" {'external drafts need' if is_external else 'was asked for'}:"
                f" use_paged_context_fmha is {str(engine.has_paged_context_fmha).lower()},"
                f" kv_cache_type {engine.kv_cache_type}",
                "build it with --use-paged-context-fmha enable and --kv-cache-type paged",
            )
    if draft is None or options is None:
        return problems
    if not is_external:
        problems.add(
            f"the target's engine was built with speculative_decoding_mode {folder.mode}",
            f"build it from a plain checkpoint with --speculative-decoding-mode {EXTERNAL}"
            " --max-draft-len N",
        )
    elif options.draft_len is not None and options.draft_len > folder.max_draft_len:
        problems.add(
            f"the draft length is {options.draft_len}, the target's engine was built with"
            f" max_draft_len {folder.max_draft_len}",
            f"draft {folder.max_draft_len} or fewer, or build with --max-draft-len"
            f" {options.draft_len}",
        )
    if draft.mode is not None:
        problems.add(
            f"the draft engine was built with speculative_decoding_mode {draft.mode}",
            "give a plain engine as --draft-engine-dir",
        )
    if options.use_logits:
        problems += find_logits_problems(folder, draft)
    return problems


def find_build_problems(engine: EngineFolder) -> Problems:
    """List what trtllm-build alone has let pass, and the runtime does not."""
    problems = Problems()
    if engine.lacking:
        problems.add(
            f"{engine.folder} was built with {', '.join(engine.lacking)}: it has no in-flight"
            " batching, without which only the Python session runs it",
            "build it again without these settings",
        )
    if engine.mode is not None and engine.max_beam_width != 1:
        problems.add(
            f"{engine.folder} was built with max_beam_width {engine.max_beam_width}, and the"
            " runtime takes no beams of the output together with drafts",
            "build it again with --max-beam-width 1",
        )
    if engine.mode is not None and engine.built_draft_len != engine.max_draft_len:
        problems.add(
            f"{engine.folder} was built for drafts of {engine.built_draft_len} tokens, and its"
            f" {engine.mode} makes {engine.max_draft_len}",
            "build it again with specdec-build, or without --max-draft-len",
        )
    return problems


def find_flag_problems(settings: RuntimeSettings, folder: EngineFolder) -> Problems:
    """List the flags that an engine of this mode ignores or cannot honour."""
    problems = Problems()
    if settings.no_speculation and folder.mode not in (None, EXTERNAL):
        problems.add(
            f"--no-speculation: a TensorRT-LLM engine of mode {folder.mode} always speculates",
            "build a plain engine from the base model's checkpoint for the comparison",
        )
    return problems


def find_logits_problems(folder: EngineFolder, draft: EngineFolder) -> Problems:
    """List what keeps two engines from comparing their logits."""
    problems = Problems()
    lacking = [str(e.folder) for e in (folder, draft) if not e.gathers_generation_logits]
    if lacking:
        problems.add(
            f"--use-logits: {' and '.join(lacking)} built without generation logits",
            "build both engines with --gather-generation-logits",
        )
    for name in ("vocab_size", "logits_dtype"):
        ours, theirs = getattr(folder, name), getattr(draft, name)
        if ours != theirs:
            problems.add(
                f"--use-logits: the target's {name} is {ours}, the draft engine's {theirs}",
                "leave --use-logits out, or convert both models in the same way",
            )
    return problems


def check_settings(settings: RuntimeSettings) -> None:
    """Raise UsageError for flags that have no meaning with any TensorRT-LLM engine."""
    if settings.device == "cpu":
        raise UsageError(
            "--device cpu: a TensorRT-LLM engine runs on the GPU it was built for",
            "leave it out, or build the checkpoint with --backend torch",
        )
    others = {
        method.name: method.options["draft"]
        for method in METHODS.values()
        if method.name not in KNOWN_METHODS
    }
    others |= {"several methods together": ChainDraft, "ReDrafter's dynamic trees": ReDrafterDraft}
    for name, options in others.items():
        if given := list_given(settings, options):
            raise UsageError(
                f"{name_flag(given[0])} is for engines of torch: nothing drafts by {name}"
                " for TensorRT-LLM",
                "leave it out, or build the checkpoint with --backend torch",
            )
    fraction = settings.kv_cache_free_gpu_memory_fraction
    if fraction is not None and not 0 < fraction <= 1:
        raise UsageError(
            f"--kv-cache-free-gpu-memory-fraction is {fraction:g}",
            "give a number above 0 and at most 1",
        )


def find_sampling_problems(request: Request, folder: EngineFolder) -> Problems:
    """List what an engine would silently do otherwise than the request says."""
    params, where = request.sampling, f"prompt {request.index}"
    problems = Problems()
    if folder.mode == REDRAFTER:
        is_greedy_engine = bool(folder.pretrained.get("redrafter_greedy_search", True))
        if is_greedy_engine and not params.is_greedy:
            problems.add(
                f"{where} samples with temperature {params.temperature:g}, but"
                " this engine always decodes greedily",
                "leave the temperature out, or convert with --redrafter-no-greedy-search",
                "temperature",
            )
        elif not is_greedy_engine and params.is_greedy:
            problems.add(
                f"{where} decodes greedily, but this engine always samples: it"
                " was converted with --redrafter-no-greedy-search",
                "give --temperature, or convert without that flag",
                "temperature",
            )
        elif not is_greedy_engine and (params.top_k or params.top_p < 1):
            problems.add(
                f"{where} has top_k {params.top_k} and top_p {params.top_p:g};"
                " TensorRT-LLM's ReDrafter knows neither",
                "leave them out",
                "top_k",
            )
    elif folder.mode == MEDUSA and not params.is_greedy and params.temperature != 1:
        problems.add(
            f"{where} has temperature {params.temperature:g}, TensorRT-LLM's Medusa only 1",
            "decode greedily, or with --temperature 1",
            "temperature",
        )
    elif folder.mode == EAGLE and not params.is_greedy:
        problems.add(
            f"{where} samples with temperature {params.temperature:g}, and TensorRT-LLM's EAGLE"
            " decodes greedily unless it accepts typical tokens, which changes the text",
            "leave the temperature out",
            "temperature",
        )
    if not params.is_greedy and params.top_k > MAX_TOP_K:
        problems.add(
            f"{where} has top_k {params.top_k}, which TensorRT-LLM cuts to {MAX_TOP_K}",
            f"give {MAX_TOP_K} or less",
            "top_k",
        )
    return problems


def check_machine(folder: EngineFolder, draft: EngineFolder | None, *, must_run: bool) -> None:
    """Compare where engines were built with this machine; raise for what will not load here.

    What is known of the release's own defects is a warning.
    """
    present = read_environment()
    stops = Problems()
    for engine in (folder, draft):
        if engine is None:
            continue
        for defect in list_defects(engine.version, engine.mode, engine.pretrained):
            logger.warning("%s", defect)
        for difference in compare_environments(
            engine.environment, present, num_ranks=engine.world_size
        ):
            if difference.stops and must_run:
                stops.add(difference.fact, difference.remedy)
            else:
                logger.warning("%s: %s", difference.fact, difference.remedy)
    if present.tensorrt_llm is None:
        del stops[1:]  # without it nothing else matters, and it is told first
    stops.raise_all()
