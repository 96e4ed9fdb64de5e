"""Records of the backends: what each is called, takes and needs, and the modules that do its work.

The stages ask these records and name no backend. A backend is added by a record here and by the
modules that it names; nothing of them is imported before it is asked for.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specdec.errors import SpecDecError, join_names

TORCH, TENSORRT, TENSORRT_LLM = "torch", "tensorrt", "tensorrt-llm"
# Kinds of modules that a record names -> what the stages call in them. An `engine` module loads
# engine folders (with `open_part` where ranks other than 0 need it) and may be None: the runtime
# then loads them itself. `support` is light: it is asked whenever a stage chooses among backends.
ENTRIES: Mapping[str, tuple[str, ...]] = {
    "engine": ("open_engine",),
    "build": ("build_engine", "foresee_limits"),
    "run": ("follow_ranks", "open_engine"),
    "doctor": ("PACKAGES", "describe_machine", "list_abilities", "check_engine", "describe_pins"),
    "support": ("is_installed", "suits_machine", "find_checkpoint_problems", "takes_flag"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """One backend of specdec-build, as every stage knows it.

    title: name in messages. modules: module by kind, a key of `ENTRIES`. build_fields: fields of
    BuildSettings that no other backend has a use for; ineffective_fields: those of them that say
    how it computes, not what, so that a backend that was chosen for a user may leave them out.
    builder: program that options of other names than specdec-build's are passed on to.
    leaves_name_out: its engine folders' config.json may name no backend. is_separate: a product of
    its own, of which nobody reads a word who has not installed it and did not ask for it. runners:
    what runs its engines in the place of `Engine`, where that cannot. has_fixed_drafts: its engines
    take drafts of no other method or length than they were built for.
    """

    name: str
    title: str
    modules: Mapping[str, str | None]
    build_fields: tuple[str, ...] = ()
    ineffective_fields: tuple[str, ...] = ()
    builder: str | None = None
    leaves_name_out: bool = False
    is_separate: bool = False
    runners: str | None = None
    has_fixed_drafts: bool = False

    def load(self, kind: str) -> Any:
        """Import the module of a kind, a key of `ENTRIES`."""
        module = self.modules[kind]
        assert module is not None, (self.name, kind)
        return importlib.import_module(module)

    @property
    def is_loadable(self) -> bool:
        """Return whether `Engine` can load the backend's engines."""
        return self.modules["engine"] is not None


# `--backend auto` takes the last that suits the machine.
BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend(
            name=TORCH,
            title="the torch backend",
            modules={
                "engine": "specdec.decode.engine",
                "build": "specdec.build.backends.torch_engine",
                "run": "specdec.run.backends.embedded",
                "doctor": "specdec.engine.doctor",
                "support": "specdec.engine.support",
            },
            build_fields=(
                "optimize", "packed_weights", "drafter_weights", "draft_vocab_file",
                "draft_vocab_size",
            ),
        ),
        Backend(
            name=TENSORRT,
            title="the tensorrt backend",
            modules={
                "engine": "specdec.trt.engine",
                "build": "specdec.build.backends.tensorrt",
                "run": "specdec.run.backends.embedded",
                "doctor": "specdec.trt.doctor",
                "support": "specdec.trt.support",
            },
            build_fields=("compute_capability",),
            has_fixed_drafts=True,
        ),
        Backend(
            name=TENSORRT_LLM,
            title="TensorRT-LLM",
            modules={
                "engine": None,
                "build": "specdec.build.backends.tensorrt_llm.pipeline",
                "run": "specdec.run.backends.tensorrt_llm",
                "doctor": "specdec.trtllm.doctor",
                "support": "specdec.trtllm.support",
            },
            build_fields=("trtllm_version", "emit_script", "launcher", "emit_triton"),
            # Command lines from its pages have them.
            ineffective_fields=(
                "gemm_plugin", "use_paged_context_fmha", "use_fp8_context_fmha", "workers",
            ),
            builder="trtllm-build",
            leaves_name_out=True,
            has_fixed_drafts=True,
            is_separate=True,
            runners="run it with specdec-run, serve it with trtllm-serve or Triton"
            " (docs/triton.md)",
        ),
    )
}  # fmt: skip


def name_backend(folder: Path, document: Mapping[str, Any]) -> str:
    """Return the backend's name in an engine's config.json, or that of the one that writes none."""
    if "build_config" not in document:
        raise refuse_config(folder)
    unnamed = next(backend.name for backend in BACKENDS.values() if backend.leaves_name_out)
    return str(document.get("backend", unnamed))


def read_backend(folder: Path) -> str:
    """Return the name of the backend that an engine folder was built for."""
    from specdec.files.folders import ENGINE, expect_folder
    from specdec.files.reading import read_json

    expect_folder(folder, ENGINE)
    return name_backend(folder, read_json(folder / "config.json"))


def find_backend(folder: Path) -> Backend:
    """Return the record of the backend that an engine folder was built for."""
    name = read_backend(folder)
    if name not in BACKENDS:
        raise SpecDecError(
            f"{folder} was built for the backend {name!r}, which this specdec does not have",
            f"it has {join_names(list(BACKENDS))}: build the checkpoint again for one of them",
        )
    return BACKENDS[name]


def refuse_config(folder: Path) -> SpecDecError:
    """Return the error for a config.json that describes no engine."""
    return SpecDecError(
        f"{folder} is not an engine: its config.json has no build_config",
        "run specdec-build on the checkpoint first",
    )


def choose_default() -> Backend:
    """Return the backend that `auto` takes: the last that suits this machine."""
    backends = reversed(BACKENDS.values())
    return next(backend for backend in backends if backend.load("support").suits_machine())


def list_worth_telling(*, is_asked: bool) -> Iterator[Backend]:
    """Yield the backends that a message may name.

    is_asked: the user has given an option that only separate backends have a use for.
    """
    for backend in BACKENDS.values():
        if is_asked or not backend.is_separate or backend.load("support").is_installed():
            yield backend
