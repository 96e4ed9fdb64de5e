"""Convert, build, run: each stage is called as its command would be."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from specdec import logs
from specdec.command.stages import load_command
from specdec.engine.kernel_cache import find_cache
from specdec.errors import Problems, SpecDecError
from specdec.files.reading import read_json
from specdec.files.staging import find_existing
from specdec.methods import METHODS
from specdec.methods.budget import read_budget
from specdec.options import get_flags
from specdec.pretrained import load_tokenizer

from .cache import EngineCache, measure_folder
from .settings import DRAFTER_FOLDERS, DRAFTS, GenerateSettings
from .sources import describe_model, describe_tool, name_entry

logger = logs.get_logger(__name__)

MAX_SEQ_LEN = 4096  # of an engine that was not asked for more: its KV cache is allocated whole
MAX_DRAFT_LEN = 8  # room for `--draft-len auto`


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """How one engine is made: options of convert and of build, and all models that go in."""

    convert: dict[str, Any]
    build: dict[str, Any]

    @property
    def models(self) -> list[str]:
        names = [self.convert.get(name) for name in ("model_dir", "lora_dir", *DRAFTER_FOLDERS)]
        return [str(name) for name in names if name is not None]

    def describe(self) -> dict[str, Any]:
        """Everything that the engine depends on, as plain values."""
        return {
            "models": [describe_model(name) for name in self.models],
            "convert": self.convert,
            "build": self.build,
            "tool": describe_tool(),
        }


def plan_target(settings: GenerateSettings) -> EnginePlan:
    """Plan the engine that is run."""
    build = settings.list_stage("build") | {"max_seq_len": settings.max_seq_len}
    build |= plan_drafts(settings)
    return EnginePlan(convert=settings.list_stage("convert"), build=build)


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
    given = settings.list_stage("run") | {"no_speculation": False}  # which needs the same engine
    run = load_command("run").settings_class(**given)
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
    return EnginePlan(
        convert=convert, build=build | {"quantization": None, "drafter_weights": "same"}
    )


def generate(settings: GenerateSettings) -> None:
    """Make the engines, or take those that are kept, and run the prompts through them."""
    with hold_engines(settings) as run:
        call_stage("run", run)


@contextlib.contextmanager
def hold_engines(settings: GenerateSettings) -> Iterator[dict[str, Any]]:
    """Make the engines, or take those that are kept; yield the options of a run with them."""
    from specdec.decode.prompts import MAX_COUNT, list_prompts, make_requests
    from specdec.decode.requests import find_problems

    run = settings.list_stage("run") | {
        "input_text": settings.texts, "tokenizer_dir": settings.tokenizer_dir or settings.model_dir,
    }  # fmt: skip
    run_settings = load_command("run").settings_class(**run)
    run_settings.refuse_contradictions()
    if settings.draft_model_dir is not None and not settings.no_speculation:
        read_budget(dataclasses.replace(run_settings, draft_engine_dir=settings.draft_model_dir))
    prompts = list_prompts(settings.texts, settings.input_file, json=settings.json)

    @functools.cache  # for the second engine the prompts are the same
    def check() -> None:
        """Tokenize the prompts, before minutes of building rather than behind them."""
        flag = "--model-dir" if settings.tokenizer_dir is None else "--tokenizer-dir"
        tokenizer = load_tokenizer(run_settings.tokenizer_dir, flag)
        most, problems = settings.max_seq_len or MAX_SEQ_LEN, Problems()
        limits = {"max_input_len": most, "max_seq_len": most, "vocab_size": MAX_COUNT}
        for request in make_requests(
            prompts, run_settings, tokenizer, repeats=not settings.streaming
        ):
            problems += find_problems(request, **limits)
        problems.raise_all()

    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(open_cache(settings))
        engine = stack.enter_context(hold_engine(cache, plan_target(settings), settings, check))
        if settings.draft_model_dir is not None:
            draft = stack.enter_context(hold_engine(cache, plan_draft(settings), settings, check))
            if not settings.no_speculation:
                run["draft_engine_dir"] = draft
                if settings.draft_vocabulary != "same":
                    run["draft_tokenizer_dir"] = settings.draft_model_dir
        if settings.no_speculation:
            flags = {name: flag for kind in DRAFTS for name, flag in get_flags(kind).items()}
            run |= {"draft_len": None, "draft_tree_tokens": None, "draft_vocabulary": "same"} | {
                name: default for name, (_, default) in flags.items()
            }
        yield run | {"engine_dir": engine}


@contextlib.contextmanager
def open_cache(settings: GenerateSettings) -> Iterator[EngineCache]:
    """Yield the user's cache, or one that is gone afterwards."""
    folder = None if settings.no_cache else find_cache()
    if folder is not None and os.access(find_existing(folder / "generate"), os.W_OK):
        yield EngineCache(folder / "generate")
        return
    if not settings.no_cache:
        lack = "there is no home folder" if folder is None else f"{folder} is read-only"
        logger.warning("%s, so the engine is not kept: set SPECDEC_CACHE_DIR", lack)
    with tempfile.TemporaryDirectory(prefix="specdec-generate-") as temporary:
        yield EngineCache(Path(temporary))


@contextlib.contextmanager
def hold_engine(
    cache: EngineCache, plan: EnginePlan, settings: GenerateSettings, check: Callable[[], None]
) -> Iterator[Path]:
    """Yield the folder of a planned engine, which is made if it is not there, after a check."""
    description = plan.describe()
    name = name_entry(plan.models[0], description)
    is_made = False

    def make(folder: Path) -> None:
        nonlocal is_made
        is_made = True
        check()
        make_engine(plan, folder)
        if plan.describe() != description:
            raise SpecDecError(
                f"{' or '.join(plan.models)} changed while it was converted", "run it again"
            )

    with cache.hold(name, make, force=settings.force) as folder:
        engine = folder / "engine"
        size = measure_folder(folder) / 1e6
        if settings.no_cache:
            logger.info("engine of %.1f MB, not kept", size)
        else:
            logger.info(
                "engine %s: %s (%.1f MB; --clear-cache removes what is kept)",
                "kept" if is_made else "taken from the cache", engine, size,
            )  # fmt: skip
        yield engine


def make_engine(plan: EnginePlan, folder: Path) -> None:
    """Convert and build into `folder`/engine; the checkpoint between them is removed."""
    checkpoint = folder / "checkpoint"
    call_stage("convert", plan.convert | {"output_dir": checkpoint})
    build = dict(plan.build)
    if build["max_seq_len"] is None:
        positions = read_json(checkpoint / "config.json").get("max_position_embeddings")
        build["max_seq_len"] = min(int(positions or MAX_SEQ_LEN), MAX_SEQ_LEN)
    call_stage("build", build | {"checkpoint_dir": checkpoint, "output_dir": folder / "engine"})
    shutil.rmtree(checkpoint)


def call_stage(stage: str, options: dict[str, Any]) -> None:
    """Run a stage's command with these settings in this process."""
    command = load_command(stage)
    command.work(command.settings_class(**options))


def clear_cache() -> None:
    """Remove the engines that are kept and not in use."""
    folder = find_cache()
    if folder is None:
        raise SpecDecError("there is no home folder, and no cache in it", "set SPECDEC_CACHE_DIR")
    num_removed, num_bytes, num_used = EngineCache(folder / "generate").clear()
    in_use = f"; {num_used} in use are left" if num_used else ""
    logger.info("%d engines removed, %.1f MB%s", num_removed, num_bytes / 1e6, in_use)
