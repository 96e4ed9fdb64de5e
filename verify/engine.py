"""Verification of an engine: run it, run its base model, compare the texts."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdec.command.settings import need
from specdec.decode.api import Engine
from specdec.decode.drafters import read_drafting
from specdec.decode.drafters.defaults import add_suffixes
from specdec.decode.models import make_engines
from specdec.decode.outputs import Output
from specdec.decode.ranks.part import choose_device
from specdec.decode.requests import sum_stats
from specdec.decode.settings import DecodeSettings
from specdec.engine.layout import EngineConfig, read_engine_config
from specdec.errors import SpecDecError
from specdec.files.backends import find_backend
from specdec.files.folders import has_tokenizer
from specdec.files.manifest import check_hashes
from specdec.gguf.folder import localize
from specdec.methods import METHODS, name_options
from specdec.methods.budget import BudgetDraft
from specdec.methods.draft_target import DraftTargetDraft
from specdec.model.blocks import GGUF
from specdec.options import as_options
from specdec.system import logs
from specdec.text.comparison import DIFFERS, find_verdict
from specdec.text.pretrained import load_config, load_tokenizer
from specdec.text.prompts import SOURCES, Prompt, read_prompts
from specdec.text.samples import TEXTS
from specdec.text.tokenizer import find_tokenizer

from .greedy import (
    SPACINGS,
    Divergence,
    Text,
    compare_logits,
    compare_text,
    find_wrong_end,
    judge_in_float32,
)
from .layers import choose_text, compare_layers
from .quantized import compare_with_plain, measure_distance
from .readings import find_wrong_readings, open_reference
from .reference import Reference, check_pair, find_own_arithmetic, load_reference, read_end_ids
from .sampling import NUM_PROMPTS, list_samples, verify_sampling
from .settings import VerifySettings, check_settings

logger = logs.get_logger(__name__)

LOSSY = "lossy"  # verdict: the text with speculation is the engine's, but not the model's
LENGTHS = (1, 4, 11, 24, 8, 47)  # of random prompts, which models without tokenizer get


@dataclasses.dataclass(kw_only=True)
class EngineTexts:
    """Texts that the engine wrote. stats: counts of the batch, the engine's device and method.

    plain: the batch again without speculation, for an engine with its own arithmetic. sampled:
    outputs of `list_samples`. unspeculated: outputs of equal seeds without speculation, None where
    these may differ.
    """

    stats: dict[str, Any] = dataclasses.field(default_factory=dict)
    texts: list[Text] = dataclasses.field(default_factory=list)
    plain: list[Text] = dataclasses.field(default_factory=list)
    sampled: list[list[int]] = dataclasses.field(default_factory=list)
    unspeculated: list[list[int]] | None = None

    @property
    def batch(self) -> list[Text]:
        return [text for text in self.texts if text.run == "batch"]


def verify_engine(settings: VerifySettings) -> dict[str, Any]:
    """Compare an engine's text with its model's; return the verdict with every difference."""
    check_settings(settings)
    with contextlib.ExitStack() as stack:
        return _verify(hold_engine(stack, settings))


def hold_engine(stack: contextlib.ExitStack, settings: VerifySettings) -> VerifySettings:
    """Return the settings with an engine, which is made of the model where none is given.

    stack: keeps it in the cache of specdec generate until it is closed.
    """
    if settings.engine_dir is not None:
        return settings
    load_config(need(settings.model_dir))  # what transformers does not know needs no engine
    folders = make_engines(
        stack, need(settings.model_dir), drafter=None, draft=None, limits={},
        device=settings.device, options={"dtype": settings.dtype},
    )  # fmt: skip
    return dataclasses.replace(settings, engine_dir=Path(folders.engine))


def _verify(settings: VerifySettings) -> dict[str, Any]:
    engine_dir, model_dir = need(settings.engine_dir), need(settings.model_dir)
    start = time.monotonic()
    engine, arithmetic, model_config = check_engine(settings)
    dtype, texts_dir = engine.checkpoint.model.dtype, localize(model_dir)
    tokenizer, engine_tokenizer = open_tokenizers(engine_dir, texts_dir)
    prompts = list_prompts(settings, engine, tokenizer)
    logger.info(
        "the engine writes %d prompts' texts at once and %d of them again alone, then transformers"
        " writes them, and each differing token is explained",
        len(prompts), min(settings.num_alone, len(prompts)),
    )  # fmt: skip
    # The engine has its turn first, so that the two never share the memory.
    texts = write_texts(
        draft_always(settings, engine), prompts, engine_tokenizer,
        has_own_arithmetic=arithmetic is not None,
    )  # fmt: skip
    with logs.show_waiting(f"running {model_dir} by transformers, token by token", logger) as tell:
        # A file's blocks stand for numbers that bfloat16 does not hold.
        reference_dtype = "float32" if arithmetic == GGUF else dtype
        reference = load_reference(model_dir, reference_dtype, texts.stats["device"])
        if arithmetic is None:
            divergences, facts = compare_with_model(reference, settings, texts, dtype, tell)
            worst_text = facts.pop("worst_text")
        else:
            divergences, facts = compare_with_plain(texts.texts, texts.plain, dtype)
            distance = measure_distance(reference, texts.plain, dtype, tell)
            for difference in distance["first_differences"]:
                difference |= name_tokens(tokenizer, difference)
            facts |= {"quantization": arithmetic, "distance": {"dtype": reference_dtype} | distance}
    divergences = judge_in_float32(reference, divergences, texts.texts)
    del reference  # what compares layers takes the memory for its own
    if arithmetic is None and is_logits_fault(divergences, facts):
        facts["layers"] = describe_layers(
            settings, engine, texts, choose_text(divergences, texts.texts, worst_text)
        )
    ends = read_end_ids(texts_dir, model_config, tokenizer)
    wrong_ends = (find_wrong_end(t, settings.max_output_len, *ends) for t in texts.texts)
    facts["wrong_ends"] += filter(None, wrong_ends)
    facts["wrong_readings"] = find_wrong_readings(
        open_reference(texts_dir, tokenizer), tokenizer, engine_tokenizer, prompts, texts.batch
    )
    return {
        "verdict": judge_facts(divergences, facts),
        "prompts": len(texts.batch),
        "divergences": [d.to_json() | name_tokens(tokenizer, d.to_json()) for d in divergences],
        "engine_dir": str(engine_dir),
        "model_dir": model_dir,
        **{key: texts.stats[key] for key in ("method", "device")},
        "dtype": dtype,
        "max_output_len": settings.max_output_len,
        "num_tokens": sum(len(text.output_ids) for text in texts.texts),
        **{key: texts.stats[key] for key in ("acceptance_length", "num_drafted_steps")},
        "alone": compare_alone(texts),
        "near_tie_spacings": SPACINGS[dtype],
        **facts,
        "verify_seconds": round(time.monotonic() - start, 2),
    }


def check_engine(settings: VerifySettings) -> tuple[EngineConfig, str | None, Any]:
    """Read an engine and its model's configuration; refuse engines that cannot be verified.

    Returns the engine's configuration, the name of an arithmetic that no other program computes
    (None where transformers computes the engine's), and the model's configuration.
    """
    engine_dir, model_dir = need(settings.engine_dir), need(settings.model_dir)
    if not (backend := find_backend(engine_dir)).is_loadable:
        raise SpecDecError(
            f"{engine_dir} is {backend.title}'s, whose accept rules are its own: it is not"
            " verified",
            "build the same checkpoint with --backend torch, or compare this engine's text with"
            " that of one built without --speculative-decoding-mode",
        )
    engine = read_engine_config(engine_dir, backend.name)
    for folder in (engine_dir, as_options(settings, DraftTargetDraft).draft_engine_dir):
        if folder is not None and settings.verify_hashes:
            check_hashes(folder)
    model_config = load_config(model_dir)
    check_pair(engine, engine_dir, model_config, model_dir)
    device = choose_device(settings.device, engine.checkpoint.model.tp_size).type
    arithmetic = find_own_arithmetic(engine, device)
    if arithmetic is not None and settings.sampling:
        flag = "with --optimize none" if arithmetic == GGUF else "without --quantization"
        raise SpecDecError(
            f"{engine_dir} has {arithmetic} weights: its sampled text follows its own distribution,"
            " which transformers does not run",
            f"leave --sampling out, or verify an engine built {flag}",
        )
    return engine, arithmetic, model_config


def compare_alone(texts: EngineTexts) -> dict[str, int]:
    """Count the prompts that ran alone, and their texts that are equal to the batch's."""
    batch = {text.prompt: text.output_ids for text in texts.batch}
    is_same = [t.output_ids == batch[t.prompt] for t in texts.texts if t.run == "alone"]
    return {"prompts": len(is_same), "same": sum(is_same)}


def judge_facts(divergences: Sequence[Divergence], facts: Mapping[str, Any]) -> str:
    """Return the verdict of the worst difference; `differs` for a wrong end or tokenization."""
    verdict = find_verdict(divergence.kind for divergence in divergences)
    is_wrong = bool(facts["wrong_ends"] or facts["wrong_readings"])
    if is_wrong or (facts["sampling"] or {}).get("verdict") == DIFFERS:
        verdict = DIFFERS
    return LOSSY if facts["lossy"] and verdict != DIFFERS else verdict


def compare_with_model(
    reference: Reference, settings: VerifySettings, texts: EngineTexts, dtype: str,
    tell: Callable[[str], None],
) -> tuple[list[Divergence], dict[str, Any]]:  # fmt: skip
    """Compare every text with the model's, and sampled ones with its distribution."""
    divergences, distances = [], []
    for number, text in enumerate(texts.texts, 1):
        tell(f"text {number} of {len(texts.texts)}")
        model_tokens = reference.continue_greedily(text.input_ids, len(text.output_ids))
        logits = reference.score(text.input_ids, text.output_ids)
        distances.append(compare_logits(text.logits, logits, dtype))
        if not math.isfinite(distances[-1][1]):
            raise SpecDecError(
                f"the logits of {settings.model_dir} after prompt {text.prompt} are not finite in"
                f" {dtype}",
                "convert the model with another --dtype: there is no text to compare with",
            )
        divergences += compare_text(text, model_tokens, logits, dtype)
    shares = [difference / (bound or math.inf) for difference, bound in distances]
    worst_text = max(range(len(shares)), key=shares.__getitem__)
    difference, bound = distances[worst_text]
    sampling = None
    if settings.sampling:
        prompts = [text.input_ids for text in texts.batch[:NUM_PROMPTS]]
        sampling = verify_sampling(
            reference, prompts, texts.sampled, texts.unspeculated, settings=settings,
            dtype=dtype,
        )  # fmt: skip
    return divergences, {
        "lossy": False, "wrong_ends": [], "logit_difference": difference, "logit_bound": bound,
        "sampling": sampling, "worst_text": worst_text,
    }  # fmt: skip


def is_logits_fault(divergences: Sequence[Divergence], facts: Mapping[str, Any]) -> bool:
    """Return whether an engine computes other logits than its model, by more than rounding."""
    is_far = not facts["logit_difference"] <= facts["logit_bound"]
    return is_far or any(divergence.cause == "logits" for divergence in divergences)


def describe_layers(
    settings: VerifySettings, engine: EngineConfig, texts: EngineTexts, tokens: list[int]
) -> dict[str, Any] | None:
    """Return the comparison of layers for a text; None where an engine has several ranks."""
    engine_dir, model_dir = need(settings.engine_dir), need(settings.model_dir)
    model = engine.checkpoint.model
    if model.tp_size > 1:
        return None
    label = f"comparing the layers of {engine_dir} with those of {model_dir}"
    with logs.show_waiting(label, logger):
        return compare_layers(engine_dir, model_dir, tokens, model.dtype, texts.stats["device"])


def open_tokenizers(engine_dir: Path, texts_dir: str) -> tuple[Any, Any]:
    """Load the model's tokenizer and the engine's, which is the model's where it has none."""
    if Path(texts_dir).is_dir() and not has_tokenizer(Path(texts_dir)):
        return None, None
    tokenizer = load_tokenizer(texts_dir, "--model-dir")
    remembered = find_tokenizer(engine_dir)
    return tokenizer, tokenizer if remembered is None else load_tokenizer(remembered)


def draft_always(settings: VerifySettings, engine: EngineConfig) -> VerifySettings:
    """Fix the draft budget where no option sets it: steps without drafts would prove nothing.

    Where only suffixes draft in a run, they draft.
    """
    pair = as_options(settings, DraftTargetDraft)
    length = pair.draft_len or pair.draft_target_model_config or pair.draft_tree_tokens
    if pair.draft_len == "auto" or (pair.draft_engine_dir is not None and length is None):
        return settings  # the length of such drafts follows their acceptance
    if as_options(settings, BudgetDraft).draft_budget or settings.no_speculation:
        return settings
    options: dict[str, Any] = {"draft_budget": "fixed"}
    if not uses_drafts(settings, engine):
        device = choose_device(settings.device, engine.checkpoint.model.tp_size).type
        drafting = add_suffixes(engine, read_drafting(settings, None), device)
        if (suffixes := drafting.options.get("suffix")) is None:
            return settings
        options["suffix_max_tokens"] = suffixes.max_tokens
    return dataclasses.replace(settings, **options)


def uses_drafts(settings: VerifySettings, engine: EngineConfig) -> bool:
    """Return whether the engine has a method of drafting, or an option starts one."""
    if engine.default_method is not None:
        return True
    starters = [method.starter for method in METHODS.values() if method.starter is not None]
    return any(getattr(settings, name) is not None for name in starters)


def list_prompts(settings: VerifySettings, engine: EngineConfig, tokenizer: Any) -> list[Prompt]:
    """Read --prompts, or choose the built-in ones that the engine has room for.

    Sampling settings of --prompts have no effect: decoding is under test here.
    """
    if settings.prompts is not None:
        return read_prompt_file(settings, has_tokenizer=tokenizer is not None)
    build = engine.build
    max_prompt_len = min(build.max_input_len, build.max_seq_len - settings.max_output_len)
    if tokenizer is None:
        prompts = draw_prompts(engine.checkpoint.model.vocab_size, max_prompt_len)
    else:
        prompts = [
            Prompt(text=text) for text in TEXTS
            if 0 < len(tokenizer(text)["input_ids"]) <= max_prompt_len
        ]  # fmt: skip
    if not prompts:
        raise SpecDecError(
            f"max_seq_len {build.max_seq_len} and max_input_len {build.max_input_len} of the"
            f" engine leave {max(0, max_prompt_len)} tokens for a prompt beside"
            f" {settings.max_output_len} of output: none of the built-in prompts is so short",
            "lower --max-output-len, or give --prompts",
        )
    return prompts


def read_prompt_file(settings: VerifySettings, *, has_tokenizer: bool) -> list[Prompt]:
    """Return the inputs of --prompts, without the settings beside them."""
    prompts = [line.prompt for line in read_prompts(need(settings.prompts), "--prompts")]
    if not has_tokenizer and any(prompt.token_ids is None for prompt in prompts):
        raise SpecDecError(
            f"{settings.prompts} holds texts, and {settings.model_dir} has no tokenizer",
            'give token ids, {"input_ids": [...]} a line of a .jsonl file',
        )
    sources = SOURCES.values()
    return [Prompt(**{name: getattr(prompt, name) for name in sources}) for prompt in prompts]


def draw_prompts(vocab_size: int, max_prompt_len: int) -> list[Prompt]:
    """Return prompts of random tokens, always the same ones, of the LENGTHS that fit."""
    generator = np.random.Generator(np.random.Philox(key=0))
    rows = generator.integers(0, vocab_size, (len(LENGTHS), max(LENGTHS)))
    return [
        Prompt(token_ids=row[:length].tolist())
        for row, length in zip(rows, LENGTHS, strict=True)
        if length <= max_prompt_len
    ]


def write_texts(
    settings: VerifySettings, prompts: Sequence[Prompt], tokenizer: Any, *, has_own_arithmetic: bool
) -> EngineTexts:
    """Let the engine write all prompts at once, the first few alone, and the sampled texts."""
    texts = EngineTexts()
    num_prompts = f"{len(prompts)} prompts"
    with open_engine(settings, tokenizer) as (about, write):
        outputs = write(num_prompts, prompts, is_greedy=True)
        texts.stats = {**about, **sum_stats(outputs)}
        texts.texts = describe_batch(outputs)
        for index, prompt in enumerate(prompts[: settings.num_alone]):
            (output,) = write(f"prompt {index} alone", [prompt], is_greedy=True)
            texts.texts.append(describe_text("alone", index, output))
        sampled = [text.input_ids for text in texts.batch[:NUM_PROMPTS]]
        samples = list_samples(settings, sampled) if settings.sampling else []
        num_samples = f"{len(samples)} sampled requests"
        if samples:
            texts.sampled = [output.token_ids for output in write(num_samples, samples)]
    uses_logits = as_options(settings, DraftTargetDraft).use_logits
    if has_own_arithmetic:
        with open_engine(settings, tokenizer, speculate=False) as (_, write):
            outputs = write(num_prompts, prompts, is_greedy=True)
        texts.plain = describe_batch(outputs)
    elif samples and not uses_logits and about["method"] != "plain":
        with open_engine(settings, tokenizer, speculate=False) as (_, write):
            texts.unspeculated = [output.token_ids for output in write(num_samples, samples)]
    return texts


@contextlib.contextmanager
def open_engine(
    settings: VerifySettings, tokenizer: Any, *, speculate: bool = True
) -> Iterator[tuple[dict[str, Any], Callable[..., list[Output]]]]:
    """Load the engine; yield its description, and a function that continues prompts."""
    options = {name: getattr(settings, name) for name in name_options("draft")}
    decode = DecodeSettings(
        engine_dir=need(settings.engine_dir), device=settings.device,
        tokenizer_dir=None if tokenizer is None else find_tokenizer(need(settings.engine_dir))
        or localize(need(settings.model_dir)),
        no_speculation=settings.no_speculation or not speculate,
        **options if speculate else {},
    )  # fmt: skip
    with Engine.open(decode, tokenizer) as engine:

        def write(work: str, prompts: Sequence[Prompt], *, is_greedy: bool = False) -> list[Output]:
            label = f"running {settings.engine_dir}: {work}"
            label += "" if speculate else ", without speculation"
            with logs.show_waiting(label, logger):
                return engine.generate(
                    prompts, max_output_len=settings.max_output_len, temperature=0.0,
                    # Sampled texts, and those without a tokenizer, go on to their limits.
                    end_ids=None if is_greedy and tokenizer is not None else (),
                    keep_logits=is_greedy,
                )  # fmt: skip

        yield engine.describe(), write


def describe_batch(outputs: Sequence[Output]) -> list[Text]:
    """Return the texts of a batch's outputs, for the comparison."""
    return [describe_text("batch", index, output) for index, output in enumerate(outputs)]


def describe_text(run: str, prompt: int, output: Output) -> Text:
    """Return the text of an output, for the comparison. prompt: its number."""
    assert output.logits is not None
    return Text(
        run=run, prompt=prompt, input_ids=output.prompt_ids, output_ids=output.token_ids,
        logits=output.logits, finish_reason=output.finish_reason,
    )  # fmt: skip


def name_tokens(tokenizer: Any, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the texts of a difference's two tokens; None without a tokenizer."""
    tokens = {side: entry[f"{side}_token"] for side in ("engine", "model")}
    return {
        f"{side}_text": None if tokenizer is None else str(tokenizer.decode([token]))
        for side, token in tokens.items()
    }
