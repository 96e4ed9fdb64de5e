"""Engine folder and prompts to outputs and statistics."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.command.settings import need, require
from specdec.errors import UsageError, count
from specdec.files.backends import BACKENDS, find_backend
from specdec.files.manifest import check_hashes
from specdec.files.staging import check_output_file, list_local, place_file
from specdec.methods import CHAIN_MEMBERS, LONE_MEMBERS, METHODS
from specdec.methods.budget import read_budget
from specdec.methods.chain import read_chain
from specdec.methods.draft_target import read_options as read_draft_options
from specdec.options import Contradiction, refuse_contradictions
from specdec.system import logs

from .settings import RunSettings

if TYPE_CHECKING:
    from specdec.decode.drafters.calibration import AcceptanceCounts
    from specdec.decode.requests import ActiveRequest, Request

    from .backends.base import EngineCore, OpenedEngine, RequestRunner

logger = logs.get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class RunInputs:
    """Prompts of a run as requests, and the tokenizer that they were made by.

    settings: the run's, with the folder of the tokenizer, which the engine may hold.
    """

    settings: RunSettings
    requests: list[Request]
    num_prompts: int
    tokenizer: Any


def run_engine(
    settings: RunSettings, write: Callable[[str], None] | None = None
) -> dict[str, Any] | None:
    """Generate for every prompt; return the object that `--json` prints.

    `write` takes what is to be shown as it becomes certain, with `--streaming`. After Ctrl-C, the
    object holds what was done, and the key `interrupted`. None where an engine's ranks are other
    processes, the first of which has written everything, or is doing so.
    """
    check_settings(settings)
    backend = find_backend(settings.engine_dir).load("run")
    if not settings.dry_run and backend.follow_ranks(settings):
        return None
    draft_options = read_draft_options(settings)
    if settings.verify_hashes:
        check_hashes(settings.engine_dir)
        if draft_options is not None:
            check_hashes(draft_options.engine_dir)
    inputs = read_inputs(settings)
    settings = inputs.settings
    engine: OpenedEngine = backend.open_engine(settings, draft_options, inputs.tokenizer)
    about = engine.core.describe()
    check_opened(engine.core, about["method"], inputs)
    if settings.dry_run:
        longest_prompt = max(len(request.input_ids) for request in inputs.requests)
        sizes = {"num_prompts": inputs.num_prompts, "longest": longest_prompt}
        return {"dry_run": True, **about, **sizes}
    engine.load(inputs.requests)
    logger.info("generating for %s", count(inputs.num_prompts, "prompt"))
    return generate_report(engine, about, inputs, write)


def read_inputs(settings: RunSettings) -> RunInputs:
    """Read the prompts and the tokenizer of a run; raise SpecDecError for what is wrong there."""
    from specdec.decode.prompt_requests import make_requests
    from specdec.text.encoding import check_template_use, use_template
    from specdec.text.prompts import list_prompts
    from specdec.text.tokenizer import lack_tokenizer, load_engine_tokenizer

    prompts = list_prompts(settings.input_text, settings.input_file, json=settings.json)
    folder, tokenizer = load_engine_tokenizer(settings.engine_dir, settings.tokenizer_dir)
    settings = dataclasses.replace(settings, tokenizer_dir=folder)
    tokenizer = use_template(tokenizer, settings.chat_template)
    check_template_use(settings, prompts, tokenizer, by_default=False)
    requests = make_requests(prompts, settings, tokenizer, repeats=not settings.streaming)
    if settings.streaming and tokenizer is None:
        raise lack_tokenizer("--streaming needs")
    return RunInputs(settings, requests, len(prompts), tokenizer)


def check_opened(core: EngineCore, method: str, inputs: RunInputs) -> None:
    """Raise SpecDecError for options and prompts that an opened engine cannot follow."""
    settings = inputs.settings
    if settings.show_drafts:
        check_shows_drafts(
            method=method, runtime=name_runtime(core), tells_origins=core.tells_origins,
            has_tokenizer=inputs.tokenizer is not None, is_json=settings.json,
        )  # fmt: skip
    if settings.acceptance_output is not None:
        check_counts_drafts(core, method)
    core.check_requests(inputs.requests)


def generate_report(
    engine: OpenedEngine, about: dict[str, Any], inputs: RunInputs,
    write: Callable[[str], None] | None,
) -> dict[str, Any]:  # fmt: skip
    """Generate for all requests, write the files that are asked for, and return the report."""
    from specdec.decode.drafters.calibration import AcceptanceCounts
    from specdec.decode.requests import choose_best

    settings, requests = inputs.settings, inputs.requests
    start = time.perf_counter()
    counts = AcceptanceCounts() if settings.acceptance_output is not None else None
    results, is_interrupted = generate(
        engine.runner, requests, settings, write, counts, inputs.tokenizer
    )
    seconds = time.perf_counter() - start
    best_results = choose_best(results)
    report: dict[str, Any] = {
        "outputs": [describe_result(r, inputs.tokenizer, settings) for r in best_results],
        "stats": {**about, **describe_stats(engine.core, results, seconds, settings)},
    }
    if settings.writes_logits:
        write_logits(settings, best_results, report)
    if counts is not None and settings.acceptance_output is not None and not is_interrupted:
        write_acceptance(settings.acceptance_output, counts, requests, about)
    if is_interrupted:
        report["interrupted"] = True
    return report


def check_counts_drafts(core: EngineCore, method: str) -> None:
    """Raise UsageError where an engine without drafts has --acceptance-output."""
    if method == "plain":
        raise UsageError("--acceptance-output: nothing drafts in a plain engine", "leave it out")
    if not core.counts_drafts:
        raise UsageError(
            f"--acceptance-output: {name_runtime(core)} does not tell how sure its drafter is",
            "leave it out, or build the engine with --backend torch",
        )


def write_acceptance(
    path: Path, counts: AcceptanceCounts, requests: Sequence[Request], about: dict[str, Any]
) -> None:
    """Write the acceptance counts of a run, with the hash of its prompts."""
    prompts = json.dumps([request.input_ids for request in requests])
    record = counts.make_record(
        num_prompts=len(requests), prompts_sha256=hashlib.sha256(prompts.encode()).hexdigest(),
        max_output_len=max(request.max_output_len for request in requests),
        is_greedy=all(request.sampling.is_greedy for request in requests),
        method=about["method"], dtype=about["dtype"],
    )  # fmt: skip
    if record is None:
        logger.warning(
            "%s is not written: nothing was drafted for these prompts; give --draft-budget fixed,"
            " and longer outputs with --max-output-len", path,
        )  # fmt: skip
        return
    record.write(path)


def name_runtime(core: EngineCore) -> str:
    """Return the name of what runs an engine, for a message."""
    return BACKENDS[core.describe()["backend"]].title


def check_settings(settings: RunSettings) -> None:
    """Raise UsageError for flags that are missing, contradict one another, or have no effect."""
    require(settings)
    outputs = [settings.output_file, settings.acceptance_output]
    if settings.writes_logits and settings.output_file is not None:
        outputs.append(name_logits(settings.output_file))
    for path in outputs:
        if path is not None:
            check_output_file(path, force=settings.force, inputs=list_local(settings.input_file))
    settings.refuse_contradictions()
    for method in METHODS.values():  # raises errors of options before anything is loaded
        method.read(settings)
    read_chain(settings, CHAIN_MEMBERS, LONE_MEMBERS)
    read_budget(settings)
    if settings.output_generation_logits and not settings.writes_logits:
        draft_options = read_draft_options(settings)
        if draft_options is None or not draft_options.use_logits:
            raise UsageError(
                "--output-generation-logits needs a place to write them", "give --output-file"
            )
        logger.info("logits decide what is accepted, and are not written: give --output-file")


# Contradictions of --show-drafts, between the parameters of `check_shows_drafts`.
SHOWS_NOTHING: tuple[Contradiction, ...] = (
    (lambda s: s.method == "plain",
     "--show-drafts has no effect with an engine that runs plain", "leave it out"),
    (lambda s: not s.tells_origins,
     "--show-drafts: {runtime} does not report which tokens {method} drafted",
     "leave it out, or build the engine with --backend torch"),
    (lambda s: not s.has_tokenizer and not s.is_json,
     "--show-drafts needs a tokenizer, and the engine holds none",
     "give the base model's folder as --tokenizer-dir, or add --json"),
)  # fmt: skip


def check_shows_drafts(
    *, method: str, runtime: str, tells_origins: bool, has_tokenizer: bool, is_json: bool
) -> None:
    """Raise UsageError where an engine's tokens have no known origin for --show-drafts."""
    run = types.SimpleNamespace(
        method=method, runtime=runtime, tells_origins=tells_origins, has_tokenizer=has_tokenizer,
        is_json=is_json,
    )  # fmt: skip
    refuse_contradictions(run, SHOWS_NOTHING)


def generate(
    engine: RequestRunner,
    requests: Sequence[Request],
    settings: RunSettings,
    write: Callable[[str], None] | None,
    counts: AcceptanceCounts | None = None,
    tokenizer: Any = None,
) -> tuple[list[ActiveRequest], bool]:
    """Return the results, and whether Ctrl-C came before they were complete."""
    from specdec.decode.loop import Interrupted

    from .streaming import JsonPrinter, StreamPrinter

    loop_options: dict[str, Any] = {
        "keep_logits": settings.writes_logits, "keep_rejected": settings.show_drafts,
        "counts": counts,
    }  # fmt: skip
    try:
        if settings.streaming and write is not None:
            printer = (
                JsonPrinter(write) if settings.json else StreamPrinter(write, requests, tokenizer)
            )
            try:
                options = {"follow_text": True, "on_progress": printer.show}
                return engine.run(requests, **options, **loop_options), False
            except Interrupted:
                printer.close()
                raise
        with logs.track("prompts", total=len(requests)) as advance:

            def count_finished(active: Sequence[ActiveRequest]) -> None:
                advance(sum(r.finish_reason is not None for r in active))

            options = {"follow_text": False, "on_progress": count_finished}
            return engine.run(requests, **options, **loop_options), False
    except Interrupted as interrupted:
        return interrupted.results, True


def describe_stats(
    core: EngineCore, results: Sequence[ActiveRequest], seconds: float, settings: RunSettings
) -> dict[str, Any]:
    """Return the counts and times of `stats`."""
    from specdec.decode.requests import sum_stats

    totals = sum_stats(results)
    num_tokens = sum(result.stats.num_output_tokens for result in results)
    if untold := sorted(key for key, value in totals.items() if value is None):
        logger.info("the runtime does not report %s: null in the statistics", ", ".join(untold))
    stats: dict[str, Any] = {
        **totals,
        "generate_seconds": round(seconds, 4),
        "tokens_per_second": round(num_tokens / seconds, 2),
        "load_seconds": round(core.load_seconds, 4),
    }
    if settings.kv_cache_enable_block_reuse:
        stats["num_reused_tokens"] = core.num_reused_tokens
    if settings.run_profiling:
        stats["profile_seconds"] = {
            name: None if value is None else round(value, 4)
            for name, value in core.describe_profile().items()
        }
    return stats


def describe_result(result: ActiveRequest, tokenizer: Any, settings: RunSettings) -> dict[str, Any]:
    """Return an entry of `outputs`; with --show-drafts and without --json, also its pieces."""
    from specdec.text.harmony import open_answer
    from specdec.text.text_stream import decode_output

    from .drafts import split_pieces

    text = result.text
    if text is None:
        text = decode_output(tokenizer, result.output_ids) if tokenizer else ""
    more_fields: dict[str, Any] = {}
    answer = None if settings.show_drafts else open_answer(tokenizer, result.request)
    if answer is not None:
        text = answer.take(result.output_ids, is_over=True)
        more_fields = {"reasoning_text": answer.parser.reasoning, "tool_calls": answer.parser.calls}
    if settings.show_drafts:
        more_fields["origins"] = result.origins
        if not settings.json:
            more_fields["pieces"] = split_pieces(result, text, tokenizer)
    if result.request.num_logprobs is not None:
        more_fields["logprobs"] = [dataclasses.asdict(logprob) for logprob in result.logprobs]
    if result.request.wants_prompt_logprobs:
        prompt_logprobs = result.prompt_logprobs
        more_fields["prompt_logprobs"] = [
            logprob and dataclasses.asdict(logprob) for logprob in prompt_logprobs
        ]
    return {
        "index": result.request.index,
        "input_text": result.request.input_text,
        "input_ids": result.request.input_ids,
        "output_ids": result.output_ids,
        "output_text": text,
        "finish_reason": result.finish_reason,
        **more_fields,
        "stats": result.stats.to_json(),
    }


def name_logits(output_file: Path) -> Path:
    """Return the file of the logits that --output-generation-logits asks for."""
    return output_file.with_suffix(".logits.safetensors")


def write_logits(
    settings: RunSettings, results: Sequence[ActiveRequest], report: dict[str, Any]
) -> None:
    """Write each output's logits [tokens, V] in float32, and name the file in the report."""
    from specdec.files.tensor_file import TensorInfo, write_tensor_file
    from specdec.files.torch_tensors import to_array

    path = name_logits(need(settings.output_file))
    logits_by_name = {f"output.{r.request.index}": r.logits for r in results}
    tensors = {
        name: to_array(logits) for name, logits in logits_by_name.items() if logits is not None
    }
    infos = {name: TensorInfo("float32", array.shape) for name, array in tensors.items()}
    partial = Path(f"{path}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_tensor_file(partial, infos, lambda name: tensors[name])
        place_file(partial, path, force=settings.force)
    finally:
        partial.unlink(missing_ok=True)
    report["generation_logits"] = str(path)
    logger.info("logits are in %s", path)
