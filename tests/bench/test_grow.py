"""benchmarks/grow.py: the grown model and drafter compute what the small ones do."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import grow as shipped_grow
from benchmarks.side_by_side.drafters import write_drafter
from benchmarks.side_by_side.models import PYCODE, SIZES
from benchmarks.under_load.compare import DRAFT_SHAPE, SHAPES
from specdec.decode.accept import Candidates
from specdec.decode.requests import ActiveRequest, sum_stats
from specdec.measure.engine import open_bench
from specdec.measure.prompts import read_prompt_set
from specdec.run.settings import RunSettings
from tests.conftest import (
    ROOT,
    make_dflash_drafter,
    make_drafter,
    make_eagle_drafter,
    make_llama,
    make_medusa_heads,
    make_tokenizer,
)
from tests.engines import make_engine, make_tree_engine

SHAPE = (
    "--layers", "3", "--hidden", "96", "--intermediate", "160", "--heads", "12", "--kv-heads", "3",
    "--head-size", "24", "--exit-dim", "128",
)  # fmt: skip


@pytest.fixture(scope="module")
def grow() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grow", ROOT / "benchmarks" / "grow.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("small")
    make_tokenizer(make_llama(parent, seed=3))
    make_drafter(parent, exit_dim=80, seed=5, scale=3.0)
    return parent


def run_grow(grow: ModuleType, small: Path, output_dir: Path, *flags: str) -> dict[str, Any]:
    report: dict[str, Any] = grow.grow_model(
        grow.parse_args(
            ["--model-dir", str(small / "target"), "--output-dir", str(output_dir / "target"),
             "--drafter-model-dir", str(small / "drafter"),
             "--drafter-output-dir", str(output_dir / "drafter"), *SHAPE, *flags]
        )
    )  # fmt: skip
    return report


def make_markov_drafter(parent: Path, **options: Any) -> Path:
    """DSpark's as specdec-train writes it: with a Markov head, and no confidence head."""
    folder = make_dflash_drafter(parent, form="deepspec", markov_rank=6, **options)
    tensors = load_file(folder / "model.safetensors")
    drafter_tensors = {n: t for n, t in tensors.items() if not n.startswith("confidence_head.")}
    save_file(drafter_tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["enable_confidence_head"] = False
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def decode(
    engine: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], list[ActiveRequest]]:
    """Texts, drafts and statistics, and the results that they are of."""
    settings = RunSettings(
        engine_dir=engine, tokenizer_dir=str(target), device="cpu", max_output_len=30,
        **{"draft_budget": "fixed"},
    )  # fmt: skip
    bench = open_bench(settings)
    bench.take_prompts(read_prompt_set(None), settings)
    drafted: list[list[int]] = []
    drafter = bench.engine.drafter
    propose = drafter.propose

    def note(requests: Sequence[ActiveRequest]) -> list[Candidates]:
        trees = propose(requests)
        drafted.extend(candidates.tree.tokens.tolist() for candidates in trees)
        return trees

    monkeypatch.setattr(drafter, "propose", note)
    run = bench.run(drafter, 2)
    results = [result for group in run.results.values() for result in group]
    return [run.texts, drafted, [result.stats.to_json() for result in results]], results


@pytest.mark.thorough
def test_the_same_text_and_the_same_drafts(
    grow: ModuleType, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = run_grow(grow, small, tmp_path, "--dtype", "float32")
    assert report["float32"]["max_difference"] < 1e-4
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert (config["hidden_size"], config["head_dim"], config["num_hidden_layers"]) == (96, 24, 3)
    outcomes: list[Any] = []
    for parent in (small, tmp_path):
        engine = make_engine(
            tmp_path / parent.name, parent / "target", parent / "drafter", beams=2, length=3,
        )  # fmt: skip
        outcome, results = decode(engine, parent / "target", monkeypatch)
        outcomes.append((outcome, sum_stats(results)))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1]["acceptance_length"] > 1.0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "make", "options"),
    [
        ("eagle", make_eagle_drafter, {"version": 3, "draft_vocab": 70, "own_embedding": False}),
        ("eagle", make_eagle_drafter, {"layers": 2}),
        ("eagle", make_eagle_drafter, {"version": 3, "own_embedding": False, "mask_token_id": 9}),
        ("medusa", make_medusa_heads, {"layers": 2}),
        # An epsilon that counts: heads grow by another factor than what is normed elsewhere.
        (
            "dflash",
            make_dflash_drafter,
            {"aux_layers": (0,), "target_layers": 2, "rms_norm_eps": 0.05},
        ),
        ("dflash", make_markov_drafter, {"aux_layers": (0,), "target_layers": 2}),
    ],
    ids=["eagle3", "eagle", "p-eagle", "medusa", "dflash", "dspark"],
)
def test_the_same_drafts(
    grow: ModuleType, small: Path, tmp_path: Path, method: str, make: Callable[..., Path],
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run_grow(grow, small, tmp_path, "--dtype", "float32")
    drafter = make(tmp_path, seed=5, scale=3.0, **options)
    words = ["--model-dir", str(drafter), "--output-dir", str(tmp_path / "grown")]
    shape = grow.parse_args([*words, *SHAPE, "--dtype", "float32"])
    write_drafter(drafter, tmp_path / "grown", shape)
    outcomes: list[Any] = []
    for parent, drafter_dir in ((small, drafter), (tmp_path, tmp_path / "grown")):
        engine = make_tree_engine(
            method, tmp_path / drafter_dir.name / "engines", parent / "target", drafter_dir
        )
        outcome, results = decode(engine, parent / "target", monkeypatch)
        outcomes.append((outcome, sum_stats(results)))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1]["acceptance_length"] > 1.0


def test_a_wrong_growth_is_not_written(
    grow: ModuleType, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = grow.grow_config

    def forget_epsilon(config: dict[str, Any], args: Any) -> dict[str, Any]:
        changed: dict[str, Any] = honest(config, args)
        return changed | {"rope_theta": config["rope_theta"]}

    monkeypatch.setattr(grow, "grow_config", forget_epsilon)
    with pytest.raises(SystemExit, match="logits differ by"):
        run_grow(grow, small, tmp_path)
    assert not (tmp_path / "target").exists()


def test_the_small_models_hashes_are_left(grow: ModuleType, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    for name in ("config.json", "manifest.json", "tokenizer.json"):
        (small / name).write_text("{}")
    grow.write_model(tmp_path / "large", small, {"weight": torch.zeros(2)}, {"hidden_size": 2})
    names = {path.name for path in (tmp_path / "large").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}


def test_every_shape_of_the_benchmarks_holds_the_shipped_models() -> None:
    """They are grown where a benchmark runs, hours after it was started perhaps."""
    shapes = [("target", shape) for shape in (*SHAPES.values(), *(s.shape for s in SIZES.values()))]
    for name, shape in [*shapes, ("draft", DRAFT_SHAPE)]:
        if shape:
            config = json.loads((PYCODE / name / "config.json").read_text())
            words = ["--model-dir", "in", "--output-dir", "out", *shape]
            args = shipped_grow.parse_args(words)
            assert shipped_grow.grow_config(config, args)["vocab_size"] == 4096
