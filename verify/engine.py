"""Engine folder and base model to verdict: run the one, then the other, and compare."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from specdec import logs
from specdec.command.settings import need
from specdec.engine.layout import EngineConfig, read_engine_config
from specdec.errors import SpecDecError
from specdec.files.manifest import check_hashes
from specdec.methods import METHODS
from specdec.methods.budget import BudgetDraft
from specdec.methods.draft_target import DraftTargetDraft
from specdec.options import as_options
from specdec.pretrained import load_config
from specdec.trtllm.engine_folder import BACKEND as TENSORRT_LLM
from specdec.trtllm.engine_folder import read_backend

from .greedy import (
    SPACINGS,
    Comparison,
    Divergence,
    compare_text,
    find_wrong_end,
    judge_again,
)
from .prompts import Prompts, load_model_tokenizer, make_prompts
from .quantized import Text, compare_with_plain, measure_distance, refuse_sampling
from .reference import Reference, check_pair, load_reference, read_end_ids
from .runner import run_engine
from .sampling import NUM_PROMPTS, make_requests, verify_sampling
from .settings import VerifySettings, check_flags

logger = logs.get_logger(__name__)

MAX_DOUBT = 4  # bounds, up to which the model's own rounding may make a margin
EXACT, NEAR_TIES, DIFFERS = "exact", "near-ties", "differs"
LOSSY = "lossy"  # speculation leaves the engine's text as it is, but that is not the model's


def verify_engine(settings: VerifySettings) -> dict[str, Any]:
    """Compare an engine's text with its model's; return the verdict with all that differs."""
    check_flags(settings)
    engine_dir, model_dir = need(settings.engine_dir), need(settings.model_dir)
    began = time.monotonic()
    if read_backend(engine_dir) == TENSORRT_LLM:
        raise SpecDecError(
            f"{engine_dir} is TensorRT-LLM's, whose accept rules are its own: only engines"
            " of torch are verified",
            "build the same checkpoint with --backend torch, or compare this engine's text with"
            " that of one built without --speculative-decoding-mode",
        )
    engine = read_engine_config(engine_dir)
    for folder in (engine_dir, as_options(settings, DraftTargetDraft).draft_engine_dir):
        if folder is not None and settings.verify_hashes:
            check_hashes(folder)
    config = load_config(model_dir)
    check_pair(engine, engine_dir, config, model_dir)
    settings = draft_always(settings, engine)
    if engine.quantization is not None:
        refuse_sampling(settings, engine.quantization)
    model = engine.checkpoint.model
    tokenizer = load_model_tokenizer(model_dir)
    prompts = make_prompts(settings, engine.build, model.vocab_size, tokenizer)

    # The engine has its turn first, so that the two never share the memory.
    logger.info(
        "the engine writes %d prompts' texts at once and %d of them again alone, then transformers"
        " writes them, and each differing token is explained",
        len(prompts.requests), min(settings.num_alone, len(prompts.requests)),
    )  # fmt: skip
    texts, stats = run_greedy(settings, prompts, has_tokenizer=tokenizer is not None)
    tokens = [output["input_ids"] for run, _, output, _ in texts if run == "batch"]
    check_tokens(prompts, tokens)
    if engine.quantization is not None:
        ends = read_end_ids(model_dir, config, tokenizer)
        report = verify_quantized(settings, engine, prompts, texts, stats, tokenizer, ends)
        return report | {"verify_seconds": round(time.monotonic() - began, 2)}
    sampled_prompts = tokens[:NUM_PROMPTS] if settings.sampling else []
    sampled = run_sampled(settings, sampled_prompts, stats["method"])

    device = stats["device"]
    with logs.show_waiting(f"running {model_dir} by transformers, token by token", logger) as tell:
        reference = load_reference(model_dir, model.dtype, device)
        comparisons = compare_texts(reference, texts, model.dtype, model_dir, tell)
    divergences = [found for comparison in comparisons for found in comparison.divergences]
    ends = read_end_ids(model_dir, config, tokenizer)
    wrong_ends = find_wrong_ends(texts, settings.max_output_len, *ends)
    sampling = None
    if settings.sampling:
        sampling = verify_sampling(
            reference, sampled_prompts, *sampled, settings=settings, dtype=model.dtype
        )
    divergences = judge_in_float32(reference, divergences, texts)
    is_wrong = any(not found.near_tie for found in divergences) or bool(wrong_ends)
    is_wrong |= sampling is not None and sampling["verdict"] == DIFFERS
    worst = max(comparisons, key=lambda c: c.logit_difference / (c.logit_bound or math.inf))
    return {
        "verdict": DIFFERS if is_wrong else NEAR_TIES if divergences else EXACT,
        "lossy": False,
        "prompts": len(tokens),
        "divergences": [name_tokens(tokenizer, found.to_json()) for found in divergences],
        **describe_run(settings, model.dtype, stats, texts),
        "wrong_ends": wrong_ends,
        "logit_difference": worst.logit_difference,
        "logit_bound": worst.logit_bound,
        "sampling": sampling,
        "verify_seconds": round(time.monotonic() - began, 2),
    }


def draft_always(settings: VerifySettings, engine: EngineConfig) -> VerifySettings:
    """Let every step have drafts where nothing was said: steps that pause them prove nothing."""
    pair = as_options(settings, DraftTargetDraft)
    length = pair.draft_len or pair.draft_target_model_config or pair.draft_tree_tokens
    if pair.draft_len == "auto" or (pair.draft_engine_dir is not None and length is None):
        return settings  # such a length follows what is accepted
    starters = [method.starter for method in METHODS.values() if method.starter is not None]
    is_asked = any(getattr(settings, name) is not None for name in starters)
    if as_options(settings, BudgetDraft).draft_budget or not (is_asked or engine.checkpoint.method):
        return settings
    always: dict[str, Any] = {"draft_budget": "fixed"}
    return dataclasses.replace(settings, **always)


def verify_quantized(
    settings: VerifySettings,
    engine: EngineConfig,
    prompts: Prompts,
    texts: Sequence[Text],
    stats: dict[str, Any],
    tokenizer: Any,
    ends: tuple[set[int], set[int]],
) -> dict[str, Any]:
    """Compare a quantized engine's texts with its own without drafts; measure the distance."""
    model_dir = need(settings.model_dir)
    dtype, device = engine.checkpoint.model.dtype, stats["device"]
    plain, _ = run_greedy(
        dataclasses.replace(settings, num_alone=0), prompts,
        has_tokenizer=tokenizer is not None, speculate=False,
    )  # fmt: skip
    found, wrong_ends = compare_with_plain(texts, {text[1]: text for text in plain}, dtype)
    wrong_ends += find_wrong_ends(texts, settings.max_output_len, *ends)
    with logs.show_waiting(f"running {model_dir} by transformers, token by token", logger) as tell:
        distance = measure_distance(load_reference(model_dir, dtype, device), plain, tell)
    is_wrong = any(not divergence.near_tie for divergence in found) or bool(wrong_ends)
    distance["first_differences"] = [
        name_tokens(tokenizer, entry) for entry in distance["first_differences"]
    ]
    return {
        "verdict": DIFFERS if is_wrong else LOSSY,
        "lossy": True,
        "prompts": len(plain),
        "divergences": [name_tokens(tokenizer, divergence.to_json()) for divergence in found],
        **describe_run(settings, dtype, stats, texts),
        "quantization": engine.quantization,
        "wrong_ends": wrong_ends,
        "distance": distance,
        "sampling": None,
    }


def describe_run(
    settings: VerifySettings, dtype: str, stats: dict[str, Any], texts: Sequence[Text]
) -> dict[str, Any]:
    """What was run, how, and how much came out."""
    return {
        "engine_dir": str(settings.engine_dir),
        "model_dir": settings.model_dir,
        "method": stats["method"],
        "dtype": dtype,
        "device": stats["device"],
        "max_output_len": settings.max_output_len,
        "num_tokens": sum(len(output["output_ids"]) for _, _, output, _ in texts),
        "acceptance_length": stats["acceptance_length"],
        "num_drafted_steps": stats["num_drafted_steps"],
        "alone": compare_alone(texts),
        "near_tie_spacings": SPACINGS[dtype],
    }


def name_tokens(tokenizer: Any, entry: dict[str, Any]) -> dict[str, Any]:
    """Add the texts of a difference's two tokens."""
    return entry | {
        f"{whose}_text": decode(tokenizer, entry[f"{whose}_token"]) for whose in ("engine", "model")
    }


def run_greedy(
    settings: VerifySettings, prompts: Prompts, *, has_tokenizer: bool, speculate: bool = True
) -> tuple[list[Text], dict[str, Any]]:
    """Run all prompts in one call, then the first few in a call each; return texts and stats."""
    flags = ["--max-output-len", str(settings.max_output_len), "--temperature", "0"]
    tokenizer_dir = settings.model_dir if has_tokenizer else None
    num_alone = min(settings.num_alone, len(prompts.requests))
    calls = [("batch", 0, prompts.requests)]
    calls += [("alone", i, [line]) for i, line in enumerate(prompts.requests[:num_alone])]
    texts: list[Text] = []
    stats: dict[str, Any] = {}
    for run, first, lines in calls:
        what = f"{len(prompts.requests)} prompts" if run == "batch" else f"prompt {first} alone"
        what += "" if speculate else ", without speculation"
        with logs.show_waiting(f"running {settings.engine_dir}: {what}", logger):
            report, logits = run_engine(
                settings, lines, *flags, tokenizer_dir=tokenizer_dir, speculate=speculate,
                keep_logits=True,
            )  # fmt: skip
        stats = stats or report["stats"]
        texts += [
            (run, first + at, output, torch.from_numpy(logits[at]))
            for at, output in enumerate(report["outputs"])
        ]
    return texts, stats


def check_tokens(prompts: Prompts, tokens: Sequence[list[int]]) -> None:
    """Raise SpecDecError where specdec-run did not read a prompt as its tokenizer does."""
    for index, (own, expected) in enumerate(zip(tokens, prompts.expected, strict=True)):
        if expected is not None and own != expected:
            raise SpecDecError(
                f"specdec-run read prompt {index} as {len(own)} tokens, {own[:8]}, the model's"
                f" tokenizer as {len(expected)}, {expected[:8]}",
                "this is a fault in specdec; report it with the prompt",
            )


def run_sampled(
    settings: VerifySettings, prompts: Sequence[Sequence[int]], method: str
) -> tuple[list[list[int]], list[list[int]] | None]:
    """Return the sampled texts, and the same seeds' without speculation where they must agree."""
    if not prompts:
        return [], None
    lines = make_requests(settings, prompts)
    label = f"running {settings.engine_dir}: {len(lines)} sampled requests"
    with logs.show_waiting(label, logger):
        sampled = _list_outputs(run_engine(settings, lines)[0])
    if as_options(settings, DraftTargetDraft).use_logits or method == "plain":
        return sampled, None
    with logs.show_waiting(f"{label}, without speculation", logger):
        return sampled, _list_outputs(run_engine(settings, lines, speculate=False)[0])


def _list_outputs(report: dict[str, Any]) -> list[list[int]]:
    return [output["output_ids"] for output in report["outputs"]]


def compare_texts(
    reference: Reference, texts: Sequence[Text], dtype: str, model_dir: str,
    tell: Callable[[str], None],
) -> list[Comparison]:  # fmt: skip
    """Compare every text with the model's; `tell` takes how far it is."""
    comparisons = []
    for number, (run, index, output, logits) in enumerate(texts, 1):
        tell(f"text {number} of {len(texts)}")
        comparison = compare_text(
            reference, output["input_ids"], output["output_ids"], logits,
            index=index, run=run, dtype=dtype,
        )  # fmt: skip
        if not math.isfinite(comparison.logit_bound):
            raise SpecDecError(
                f"the logits of {model_dir} after prompt {index} are not finite in {dtype}",
                "convert the model with another --dtype: there is no text to compare with",
            )
        comparisons.append(comparison)
    return comparisons


def judge_in_float32(
    reference: Reference, divergences: Sequence[Divergence], texts: Sequence[Text]
) -> list[Divergence]:
    """Ask the model again, in float32, where its own logits say that the engine computes others.

    The model rounds in half precision too, and may be the one that is wrong. It stays in float32,
    which takes twice the memory; so nothing is asked where one margin is out of all proportion.
    """
    doubtful = [found for found in divergences if found.cause == "logits"]
    if not doubtful or any(found.margin > MAX_DOUBT * found.bound for found in doubtful):
        return list(divergences)
    outputs = {(run, index): output for run, index, output, _ in texts}
    label = "running the model in float32, where its logits differ from the engine's"
    with logs.show_waiting(label, logger):
        reference.widen()
        logits = {
            key: reference.score(outputs[key]["input_ids"], outputs[key]["output_ids"])
            for key in {(found.run, found.prompt) for found in doubtful}
        }
    return [
        judge_again(found, logits[found.run, found.prompt][found.position])
        if found.cause == "logits"
        else found
        for found in divergences
    ]


def find_wrong_ends(
    texts: Sequence[Text], length: int, must_end: set[int], may_end: set[int]
) -> list[str]:
    """List what is wrong with the places at which the texts end."""
    ends = (find_wrong_end(output, length, must_end, may_end) for _, _, output, _ in texts)
    return [wrong for wrong in ends if wrong]


def compare_alone(texts: Sequence[Text]) -> dict[str, int]:
    """Count the prompts that were also run alone, and those with the same text as in the batch."""
    batch = {index: output["output_ids"] for run, index, output, _ in texts if run == "batch"}
    same = [
        output["output_ids"] == batch[index] for run, index, output, _ in texts if run == "alone"
    ]
    return {"prompts": len(same), "same": sum(same)}


def decode(tokenizer: Any, token: int) -> str | None:
    """Return a token's text, None without a tokenizer."""
    return None if tokenizer is None else str(tokenizer.decode([token]))
