"""What an engine's config.json may lack or say that the runtime reads as something else."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import SpecDecError
from specdec.files.reading import read_json, write_json
from specdec.trtllm.engine_folder import read_engine_folder
from tests.trtllm.worlds import EXTERNAL, PAGED, World, make_prompts, make_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    yield from make_world(tmp_path_factory.mktemp("world"), "1.2")


def change(engine: Path, folder: Path, keys: str, value: Any) -> Path:
    """Copy an engine; change the key `keys`, dotted, of its config.json: None removes it."""
    shutil.copytree(engine, folder)
    (folder / "manifest.json").unlink()
    document = read_json(folder / "config.json")
    *outer, last = keys.split(".")
    inner = document
    for key in outer:
        inner = inner[key]
    inner.pop(last, None)
    if value is not None:
        inner[last] = value
    write_json(folder / "config.json", document)
    return folder


def make_engine(world: World, name: str) -> Path:
    if name == "redrafter":
        return world.engine(name, world.redrafter())
    if name == "medusa":
        return world.engine(name, world.medusa())
    flags = EXTERNAL if name == "target" else PAGED
    return world.engine(name, world.checkpoint("plain"), *flags)


@pytest.mark.parametrize(
    ("name", "keys", "value", "match"),
    [
        ("redrafter", "pretrained_config.redrafter_num_beams", None, "redrafter_num_beams is None"),
        ("redrafter", "pretrained_config.redrafter_draft_len_per_beam", None, "len_per_beam is"),
        ("medusa", "pretrained_config.max_draft_len", None, "pretrained_config.max_draft_len"),
        ("target", "build_config.max_draft_len", 0, "which TensorRT-LLM's runtime refuses"),
        ("plain", "version", None, "version is None"),
        ("plain", "build_config.speculative_decoding_mode", 64, "speculative_decoding_mode is 64"),
        ("plain", "build_config.max_num_tokens", None, "max_num_tokens is None"),
        ("plain", "pretrained_config.mapping.tp_size", None, "mapping.tp_size is None"),
        ("plain", "build_config.plugin_config", None, "plugin_config is None"),
        ("plain", "pretrained_config.mapping.tp_size", 10**9, "are 1000000000, more than 1024"),
        ("plain", "pretrained_config.mapping.pp_size", "2", "mapping.pp_size is '2'"),
        ("plain", "build_config.max_seq_len", 2**62, "max_seq_len is 4611686018427387904"),
        ("redrafter", "pretrained_config.redrafter_draft_len_per_beam", 10**5, "more than 4096"),
    ],
)
def test_missing_key_that_the_runtime_takes_for_something_else(
    world: World, tmp_path: Path, name: str, keys: str, value: Any, match: str
) -> None:
    folder = change(make_engine(world, name), tmp_path / "engine", keys, value)
    with pytest.raises(SpecDecError, match=match):
        read_engine_folder(folder)


@pytest.mark.parametrize(
    ("name", "keys", "value", "match"),
    [
        ("plain", "build_config.kv_cache_type", "CONTINUOUS", "kv_cache_type CONTINUOUS: it has"),
        ("plain", "build_config.plugin_config.remove_input_padding", False, "padding false: it"),
        ("plain", "build_config.plugin_config.gpt_attention_plugin", "", "no in-flight batching"),
        ("redrafter", "build_config.max_beam_width", 4, "max_beam_width 4"),
        ("medusa", "build_config.max_draft_len", 63, "drafts of 63 tokens, and its medusa makes 6"),
    ],
)
def test_engine_of_trtllm_build_alone_that_the_runtime_does_not_run(
    world: World, tmp_path: Path, name: str, keys: str, value: Any, match: str
) -> None:
    folder = change(make_engine(world, name), tmp_path / "engine", keys, value)
    with pytest.raises(SpecDecError, match=match):
        world.run(folder, make_prompts(4))
    assert not world.calls("from_dir")


def test_engine_of_trtllm_build_alone_runs(world: World, tmp_path: Path) -> None:
    """Without a manifest, with what 1.x writes besides."""
    engine = change(
        make_engine(world, "plain"), tmp_path / "engine",
        "pretrained_config.runtime_defaults", {"kv_cache_config": None},
    )  # fmt: skip
    report = world.run(engine, make_prompts(4), max_output_len=3)
    assert len(report["outputs"][0]["output_ids"]) == 3


def test_a_damaged_engine_is_not_loaded(world: World, tmp_path: Path) -> None:
    """Its manifest has the checksums, which specdec-build wrote."""
    engine = shutil.copytree(make_engine(world, "plain"), tmp_path / "engine")
    data = bytearray((engine / "rank0.engine").read_bytes())
    data[-3] ^= 1
    (engine / "rank0.engine").write_bytes(data)
    with pytest.raises(SpecDecError, match="rank0.engine is damaged: its bytes 0 to"):
        world.run(engine, make_prompts(4))
    assert not world.calls("from_dir")
