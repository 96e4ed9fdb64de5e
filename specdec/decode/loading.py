"""From an engine folder and the options of a run to an engine that can decode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.decode.devices import check_devices
from specdec.decode.draft_options import DraftOptions, adapts_drafts, read_draft_options
from specdec.decode.drafters import eagle, medusa
from specdec.decode.drafters.lookahead import LookaheadProposer
from specdec.decode.drafters.prompt_lookup import PromptLookupProposer
from specdec.decode.drafters.switch import adapt
from specdec.decode.engine import TorchEngine
from specdec.decode.ngram_options import (
    check_lookup,
    choose_lookahead,
    read_lookahead_config,
    read_lookup_options,
)
from specdec.decode.settings import EAGLE_OPTIONS, DecodeSettings
from specdec.decode.vocabulary import ModelTokens, check_vocabularies
from specdec.errors import SpecDecError, UsageError
from specdec.methods import EXTERNAL_METHODS


def load_engine(settings: DecodeSettings, tokenizer: Any) -> TorchEngine:
    """Load an engine of torch, and the one that drafts for it.

    tokenizer: to compare with that of --draft-tokenizer-dir; None where there is none.
    """
    assert settings.engine_dir is not None
    options = read_draft_options(settings)
    read_lookahead_config(settings)  # what is written wrong is told before anything is loaded
    lookup = read_lookup_options(settings)
    devices = options.target_devices if options else lookup.devices if lookup else None
    engine = TorchEngine(
        settings.engine_dir,
        device=settings.device,
        devices=devices,
        speculate=not settings.no_speculation,
    )
    try:
        choose_drafter(engine, settings, options, tokenizer)
    except BaseException:
        engine.close()
        raise
    return engine


def choose_drafter(
    engine: TorchEngine, settings: DecodeSettings, options: DraftOptions | None, tokenizer: Any
) -> None:
    """Let an engine's own drafter draft as it is asked to, or another."""
    if settings.medusa_choices is not None:
        if not isinstance(engine.proposer, medusa.MedusaProposer):
            raise UsageError(
                f"--medusa-choices has no effect with an engine that runs {engine.method}",
                "leave it out",
            )
        engine.proposer.use_choices(medusa.parse_choices(settings.medusa_choices))
    choose_eagle_tree(engine, settings)
    attach_ngrams(engine, settings)
    if options is None:
        mode = engine.config.build.speculative_decoding_mode
        is_plain = engine.method == "plain" and not settings.no_speculation
        if is_plain and mode == EXTERNAL_METHODS["draft_target"]:
            raise SpecDecError(
                f"{settings.engine_dir} was built for a draft model, and none is given",
                "give --draft-engine-dir, --prompt-lookup-num-tokens to draft from the text itself,"
                " or --no-speculation to decode without",
            )
        if adapts_drafts(settings):
            adapt_drafts(engine, settings)
        return
    assert settings.draft_engine_dir is not None
    draft = TorchEngine(
        settings.draft_engine_dir, device=settings.device, devices=options.draft_devices
    )
    try:
        check_devices("draft", options.draft_devices, draft)
        check_devices("target", options.target_devices, engine)
        check_vocabularies(
            describe_tokens(settings.engine_dir, engine),
            describe_tokens(settings.draft_engine_dir, draft),
            tokenizer, settings.draft_tokenizer_dir,
        )  # fmt: skip
        engine.attach_draft(draft, draft_len=options.draft_len, use_logits=options.use_logits)
    except BaseException:
        draft.close()
        raise


def describe_tokens(folder: Path | None, engine: TorchEngine) -> ModelTokens:
    """What is known of the tokens of an engine."""
    assert folder is not None
    config = engine.config
    return ModelTokens(folder, config.checkpoint.model.vocab_size, config.vocabulary)


def choose_eagle_tree(engine: TorchEngine, settings: DecodeSettings) -> None:
    """Let an EAGLE engine propose the trees that are asked for."""
    given = [name for name in EAGLE_OPTIONS if getattr(settings, name) not in (None, False)]
    if not given:
        return
    flags = ["--" + name.replace("_", "-") for name in given]
    proposer = engine.proposer
    if not isinstance(proposer, eagle.EagleProposer):
        raise UsageError(
            f"{flags[0]} has no effect with an engine that runs {engine.method}", "leave it out"
        )
    if settings.eagle_choices is None:
        proposer.use_dynamic_tree(settings.eagle_dynamic_tree_max_top_k, settings.eagle_tree_tokens)
    elif len(given) > 1:
        raise UsageError(
            f"{flags[0]} gives a static tree, {flags[1]} a dynamic one", "leave one of them out"
        )
    else:
        proposer.use_choices(eagle.parse_choices(settings.eagle_choices))


def adapt_drafts(engine: TorchEngine, settings: DecodeSettings) -> None:
    """Let an engine's method draft only while that pays."""
    if settings.no_speculation or engine.method in ("plain", "lookahead"):
        method = "--no-speculation" if settings.no_speculation else f"{engine.method} decoding"
        raise UsageError(
            f"--draft-len auto has no effect with {method}",
            "leave it out; it is for draft models, ReDrafter, Medusa, EAGLE and prompt lookup",
        )
    engine.proposer = adapt(engine.proposer)


def attach_ngrams(engine: TorchEngine, settings: DecodeSettings) -> None:
    """Let n-grams draft for an engine that was built for them, or for any external draft."""
    if settings.no_speculation:
        return
    build = engine.config.build
    mode, max_draft_len = build.speculative_decoding_mode, build.max_draft_len
    lookup = read_lookup_options(settings)
    if lookup is not None:
        check_lookup(lookup, mode, max_draft_len)
        check_devices("target", lookup.devices, engine)
        engine.use_method("prompt_lookup", PromptLookupProposer(lookup))
    window = choose_lookahead(read_lookahead_config(settings), mode, max_draft_len)
    if window is not None:
        engine.use_method("lookahead", LookaheadProposer(window, engine.decoder))
