"""A TensorRT-LLM engine folder, read without TensorRT-LLM: by run, and for serving with Triton.

Only what is needed is read, so a folder of trtllm-build itself is as good as one of specdec-build.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.errors import Problems, SpecDecError
from specdec.files.backends import refuse_config
from specdec.files.folders import ENGINE, expect_folder
from specdec.files.reading import read_json
from specdec.methods import METHODS, find_mode
from specdec.model.bounds import MAX_DRAFT_TOKENS, MAX_RANKS, MAX_SIZE
from specdec.trtllm.facts import DEFAULT_LABEL, load_facts

EXTERNAL = METHODS["draft_target"].mode


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineFolder:
    """Engine folder of TensorRT-LLM, by its config.json and manifest; lengths in tokens.

    max_seq_len: the recorded one, which counts prompt, output and the draft tokens of a step. mode:
    as in `--speculative-decoding-mode`, None for a plain engine. max_draft_len: what the runtime
    takes; built_draft_len: what build_config says. lacking: settings of the engine without which
    there is no in-flight batching. manifest: None if specdec-build did not write the engine.
    """

    folder: Path
    version: str
    architecture: str
    dtype: str
    logits_dtype: str
    vocab_size: int
    tp_size: int
    pp_size: int
    mode: str | None
    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int
    max_draft_len: int
    built_draft_len: int
    max_beam_width: int
    kv_cache_type: str
    has_paged_context_fmha: bool
    gathers_generation_logits: bool
    lacking: tuple[str, ...]
    pretrained: Mapping[str, Any]
    manifest: Mapping[str, Any] | None

    @property
    def world_size(self) -> int:
        """Ranks, each with a GPU of its own."""
        return self.tp_size * self.pp_size

    @property
    def max_total_len(self) -> int:
        """Longest prompt plus output: TensorRT-LLM cuts the output silently beyond it."""
        return self.max_seq_len - self.max_draft_len

    @property
    def method(self) -> str:
        """The method that the engine itself runs; one with external drafts is plain by itself."""
        if self.mode in (None, EXTERNAL):
            return "plain"
        method = find_mode(self.mode)
        return method.name if method is not None else self.mode

    @property
    def vocabulary(self) -> dict[str, Any] | None:
        """Vocabulary that the manifest records."""
        vocabulary = self.manifest.get("vocabulary") if self.manifest else None
        return vocabulary if isinstance(vocabulary, dict) else None

    @property
    def environment(self) -> Mapping[str, Any]:
        """Environment of the machine that built the engine."""
        environment = self.manifest.get("environment") if self.manifest else None
        return environment if isinstance(environment, dict) else {"tensorrt_llm": self.version}


def list_mode_names() -> dict[int, str]:
    """Return the modes of speculation by their numbers in config.json."""
    return {number: name for name, number in load_facts(DEFAULT_LABEL).modes.items()}


def read_engine_folder(folder: Path) -> EngineFolder:
    """Read an engine's config.json; raise SpecDecError that lists what is missing or of no use."""
    expect_folder(folder, ENGINE)
    path = folder / "config.json"
    document = read_json(path)
    reader = _Reader(path)
    if "build_config" not in document:
        raise refuse_config(folder)
    pretrained = reader.get(document, "pretrained_config", dict, {})
    build = reader.get(document, "build_config", dict, {})
    plugins = reader.get(build, "build_config.plugin_config", dict, {})
    mapping = reader.get(pretrained, "pretrained_config.mapping", dict, {})
    dtype = reader.get(pretrained, "pretrained_config.dtype", str, "")
    mode = reader.find_mode(build)
    cache = str(build.get("kv_cache_type", "CONTINUOUS")).rpartition(".")[2].upper()
    manifest = folder / "manifest.json"
    limits = {
        name: reader.get(build, f"build_config.{name}", int, 0)
        for name in ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens",
                     "max_beam_width")
    }  # fmt: skip
    engine = EngineFolder(
        folder=folder,
        version=reader.get(document, "version", str, ""),
        architecture=reader.get(pretrained, "pretrained_config.architecture", str, ""),
        dtype=dtype,
        logits_dtype=str(pretrained.get("logits_dtype", "float32")),
        vocab_size=reader.get(pretrained, "pretrained_config.vocab_size", int, 0),
        tp_size=reader.get(mapping, "pretrained_config.mapping.tp_size", int, 1),
        pp_size=reader.get({"pp_size": 1} | mapping, "pretrained_config.mapping.pp_size", int, 1),
        mode=mode,
        max_draft_len=reader.find_draft_len(mode, pretrained, build),
        built_draft_len=build.get("max_draft_len", 0),
        kv_cache_type=cache,
        has_paged_context_fmha=bool(plugins.get("use_paged_context_fmha")),
        gathers_generation_logits=bool(build.get("gather_generation_logits")),
        lacking=_list_lacking(plugins, cache),
        pretrained=pretrained,
        manifest=read_json(manifest) if manifest.is_file() else None,
        **limits,
    )
    reader.problems += Problems.from_table(*(
        (number > maximum, f"{path}: {label} are {number}, more than {maximum}",
         "build the engine again")
        for label, number, maximum in (
            ("tp_size x pp_size", engine.world_size, MAX_RANKS),
            ("draft tokens a step", engine.max_draft_len, MAX_DRAFT_TOKENS),
        )
    ))  # fmt: skip
    reader.problems.raise_all()
    names = [f"rank{rank}.engine" for rank in range(engine.world_size)]
    if missing_files := [name for name in names if not (folder / name).is_file()]:
        raise SpecDecError(
            f"{folder} has tp_size {engine.tp_size} and pp_size {engine.pp_size}, and lacks"
            f" {', '.join(missing_files)}",
            "build the engine again, or copy the whole folder",
        )
    return engine


def _list_lacking(plugins: Mapping[str, Any], kv_cache_type: str) -> tuple[str, ...]:
    """Return the settings by which an engine has no in-flight batching, with their values."""
    missing_keys = [
        f"{name} {str(plugins[name]).lower()}"
        for name in ("gpt_attention_plugin", "remove_input_padding")
        if name in plugins and not plugins[name]
    ]
    if kv_cache_type == "CONTINUOUS":
        missing_keys.append("kv_cache_type CONTINUOUS")
    return tuple(missing_keys)


class _Reader:
    """Takes values out of a config.json and keeps what is wrong with it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems = Problems()

    def get(self, document: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
        """Return the value of a dotted name's last part, or a default and note the problem."""
        value: Any = document.get(name.rpartition(".")[2])
        is_huge = isinstance(value, int) and not 0 <= value <= MAX_SIZE
        if type(value) is kind and not is_huge:
            return value
        self.problems.add(
            f"{self.path}: {name} is {value!r}", "build the engine again with trtllm-build"
        )
        return default

    def find_mode(self, build: Mapping[str, Any]) -> str | None:
        """Return the mode's name; config.json has its number."""
        number = self.get(build, "build_config.speculative_decoding_mode", int, 1)
        mode_names = list_mode_names()
        if number not in mode_names:
            self.problems.add(
                f"{self.path}: speculative_decoding_mode is {number}",
                f"the known ones are {', '.join(f'{n} {name}' for n, name in mode_names.items())}",
            )
        name = mode_names.get(number, "none")
        return None if name == "none" else name

    def find_draft_len(
        self, mode: str | None, pretrained: Mapping[str, Any], build: Mapping[str, Any]
    ) -> int:
        """Return the most draft tokens of a step, from where the C++ runtime reads it."""
        if mode is None:
            return 0
        section = "pretrained_config"
        if mode == METHODS["redrafter"].mode:
            beams = self.get(pretrained, f"{section}.redrafter_num_beams", int, 0)
            length = self.get(pretrained, f"{section}.redrafter_draft_len_per_beam", int, 0)
            return int(beams * length)
        if mode == METHODS["medusa"].mode:
            return int(self.get(pretrained, f"{section}.max_draft_len", int, 0))
        draft_len = int(self.get(build, "build_config.max_draft_len", int, 0))
        if draft_len < 1:
            self.problems.add(
                f"{self.path}: build_config.max_draft_len is {draft_len}, which TensorRT-LLM's"
                f" runtime refuses for {mode}",
                "build the engine again with --max-draft-len",
            )
        return draft_len
