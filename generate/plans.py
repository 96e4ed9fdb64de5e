"""The engines that a command needs: how each is made, and what would stop that, known before."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec import __version__
from specdec.command.stages import load_command
from specdec.errors import Problems, SpecDecError, UsageError
from specdec.files.backends import BACKENDS, TORCH, Backend, choose_default
from specdec.methods import METHODS
from specdec.methods.eagle import EagleParams
from specdec.options import get_flags
from specdec.system import logs

from .settings import DRAFTER_FOLDERS, GenerateSettings
from .sources import describe_model, describe_tool, name_entry

if TYPE_CHECKING:
    from specdec.decode.requests import Request
    from specdec.engine.layout import EngineConfig

MAX_SEQ_LEN = 4096  # of an engine that was not asked for more: its KV cache is allocated whole
MAX_DRAFT_LEN = 8  # room for `--draft-len auto`
UNROUNDED_TYPES = ("auto", "same")  # of --drafter-weights, for a draft model
MODEL_FLAG, DRAFT_MODEL_FLAG = "--model-dir", "--draft-model-dir"
AS_IT_IS = {"drafter_weights": "auto"}  # of an engine without a drafter in its checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """How one engine is made: options of convert and of build, and all models that go in.

    flag: the option that names the model, for errors.
    """

    convert: dict[str, Any]
    build: dict[str, Any]
    flag: str = MODEL_FLAG

    @property
    def models(self) -> list[str]:
        names = [self.convert.get(name) for name in ("model_dir", "lora_dir", *DRAFTER_FOLDERS)]
        return [str(name) for name in names if name is not None]

    @functools.cached_property
    def description(self) -> dict[str, Any]:
        """Description of the sources when it was first asked for."""
        return self.describe()

    @property
    def name(self) -> str:
        """Return the engine's name in the cache."""
        return name_entry(self.models[0], self.description)

    def describe(self) -> dict[str, Any]:
        """Describe the sources that the engine depends on, as plain values."""
        return {
            "models": [describe_model(name) for name in self.models],
            "convert": list_changes("convert", self.convert),
            "build": list_changes("build", self.build)
            | {"backend": choose_backend(self.build["backend"]).name},
            "tool": describe_tool(),
        }


def plan_target(settings: GenerateSettings) -> EnginePlan:
    """Plan the engine that is run."""
    build = settings.list_stage("build") | {"max_seq_len": settings.max_seq_len}
    if choose_backend(settings.backend).has_fixed_drafts:
        build |= plan_drafts(settings)
    if settings.draft_model_dir is not None:
        build |= AS_IT_IS
    build |= plan_packing(settings)
    return EnginePlan(convert=settings.list_stage("convert"), build=build)


def choose_backend(name: str) -> Backend:
    """Return the backend that builds, which `auto` leaves to the machine."""
    return choose_default() if name == "auto" else BACKENDS[name]


def list_changes(stage: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a stage that are not its defaults, which need not be given."""
    flags = get_flags(load_command(stage).settings_class)
    return {name: value for name, value in options.items() if value != flags[name][1]}


def plan_packing(settings: GenerateSettings) -> dict[str, Any]:
    """Return the build's options for the device: a GPU reads no matrices that are packed."""
    is_torch = choose_backend(settings.backend).name == TORCH
    return {"packed_weights": False} if is_torch and settings.device == "cuda" else {}


def plan_drafts(settings: GenerateSettings) -> dict[str, Any]:
    """Return the build's options for drafts of no weights in the checkpoint, {} if there are none.

    Methods of the same mode share an engine.
    """
    if settings.draft_model_dir is not None:
        length = settings.draft_len or ""
        num_tokens = max(
            MAX_DRAFT_LEN, int(length) if length.isdecimal() else 0, settings.draft_tree_tokens or 0
        )
        return {
            "speculative_decoding_mode": METHODS["draft_target"].mode, "max_draft_len": num_tokens,
        }  # fmt: skip
    run_options = settings.list_stage("run") | {
        "no_speculation": False
    }  # which needs the same engine
    run = load_command("run").settings_class(**run_options)
    for method in METHODS.values():
        options = method.read(run) if method.source == "target" else None
        if options is not None:
            return {
                "speculative_decoding_mode": method.mode,
                "max_draft_len": options.max_draft_tokens,
            }
    return {}


def plan_draft(settings: GenerateSettings) -> EnginePlan:
    """Plan the draft model's engine, with room for what the target's takes."""
    convert = {"model_dir": settings.draft_model_dir, "dtype": settings.dtype}
    build = settings.list_stage("build") | {"max_seq_len": settings.max_seq_len}
    weights = settings.drafter_weights
    return EnginePlan(
        flag=DRAFT_MODEL_FLAG,
        convert=convert,
        build=build
        | {"quantization": None if weights in UNROUNDED_TYPES else weights, **AS_IT_IS}
        | plan_packing(settings),
    )


def complete_build(build: dict[str, Any], max_positions: int | None) -> dict[str, Any]:
    """Return the options of a build with a maximum length, which may follow from the model's."""
    length = build["max_seq_len"] or min(max_positions or MAX_SEQ_LEN, MAX_SEQ_LEN)
    return build | {"max_seq_len": length}


def foresee_engine(plan: EnginePlan) -> EngineConfig | None:
    """Return what the config.json of a planned engine will say; None if `Engine` cannot load it.

    Nothing is written. Raises SpecDecError for what would stop the conversion or the build.
    """
    try:
        return _foresee(plan)
    except SpecDecError as error:
        texts = (text.replace(MODEL_FLAG, plan.flag) for text in (error.message, error.hint))
        raise type(error)(*texts) from error


def _foresee(plan: EnginePlan) -> EngineConfig | None:
    from specdec.engine.layout import EngineConfig

    checkpoint_dir, engine_dir = Path("checkpoint"), Path("engine")  # neither is looked at
    convert, build = load_command("convert"), load_command("build")
    # The work itself tells what is read and made; but a model of the Hub is fetched here.
    with logs.hush("specdec", logging.ERROR), logs.hush("specdec.convert.hub", logging.INFO):
        settings = convert.settings_class(**plan.convert, output_dir=checkpoint_dir)
        checkpoint, vocabulary = convert.foresee(settings)
        options = complete_build(plan.build, checkpoint.model.max_position_embeddings)
        settings = build.settings_class(
            **options, checkpoint_dir=checkpoint_dir, output_dir=engine_dir
        )
        limits = build.foresee(settings, checkpoint)
    if limits is None:
        return None
    return EngineConfig(
        version=__version__, checkpoint=checkpoint, build=limits, build_id="", prepack=False,
        kernels=None, vocabulary=vocabulary,
        has_fixed_drafts=choose_backend(settings.backend).has_fixed_drafts,
    )  # fmt: skip


def check_decoding(
    settings: GenerateSettings, run: Any, tokenizer: Any, engines: Sequence[EngineConfig]
) -> None:
    """Raise SpecDecError for a device that is not there, and for drafts that cannot be.

    run: the settings of the run. engines: the planned ones, the draft model's after the target's.
    """
    from specdec.decode.drafters import (
        check_draft_sizes,
        choose_methods,
        read_drafting,
        refuse_trees,
    )
    from specdec.decode.drafters.defaults import add_suffixes
    from specdec.decode.drafters.eagle import check_choices
    from specdec.decode.ranks.part import choose_device
    from specdec.text.vocabulary_check import ModelTokens, check_vocabularies

    device = choose_device(settings.device, 1)
    if settings.no_speculation:
        return
    params = engines[0].checkpoint.drafter
    drafting = add_suffixes(engines[0], read_drafting(run, tokenizer), device.type)
    methods = choose_methods(engines[0], drafting)
    if settings.show_drafts and not methods:
        raise UsageError(
            "--show-drafts, and nothing drafts",
            "give a drafter or --draft-model-dir, or leave it out",
        )
    if isinstance(params, EagleParams) and settings.eagle_choices is not None:
        check_choices(drafting.options["eagle"].choices, params)
    with logs.hush("specdec", logging.ERROR):
        refuse_trees(methods, engines[0])
    check_draft_sizes(engines[0], methods, drafting)
    if len(engines) > 1 and settings.draft_vocabulary == "same":
        names = str(settings.model_dir), str(settings.draft_model_dir)
        target, draft = (
            ModelTokens(Path(name), engine.checkpoint.model.vocab_size, engine.vocabulary)
            for name, engine in zip(names, engines, strict=True)
        )
        with logs.hush("specdec", logging.ERROR):
            check_vocabularies(target, draft, tokenizer, None)


def check_lengths(requests: Sequence[Request], engines: Sequence[EngineConfig]) -> None:
    """Raise SpecDecError that lists every request beyond the limits of the planned engines."""
    from specdec.decode.requests import find_problems
    from specdec.engine.layout import count_positions

    problems = Problems()
    for request in requests:
        problems += find_problems(
            request, max_input_len=min(e.build.max_input_len for e in engines),
            max_seq_len=min(e.build.max_seq_len for e in engines),
            max_positions=min(count_positions(e.checkpoint.model) for e in engines),
            vocab_size=engines[0].checkpoint.model.vocab_size, is_built=False,
        )  # fmt: skip
    problems.raise_all()
