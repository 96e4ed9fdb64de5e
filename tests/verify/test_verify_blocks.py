"""An engine that keeps a GGUF file's blocks: compared with itself, or with its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdec.errors import SpecDecError
from specdec.files.reading import read_json
from specdec.verify.engine import verify_engine
from specdec.verify.report import find_error, format_report
from specdec.verify.settings import VerifySettings
from tests.blocks import write_gguf
from tests.conftest import make_drafter
from tests.convert.test_keeping_blocks import KINDS
from tests.engine.kernels import needs_compiler
from tests.engines import call
from tests.verify.test_verify_engine import break_outputs
from tests.verify.test_verify_quantized import change_a_token


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of `model.gguf` beside it, with a drafter, in bfloat16."""
    folder = tmp_path_factory.mktemp("blocks")
    source = write_gguf(folder / "model.gguf", KINDS)
    call(
        "convert", "--model-dir", source, "--output-dir", folder / "ckpt",
        "--drafter-model-dir", make_drafter(folder / "drafter", hidden=256),
    )  # fmt: skip
    config = read_json(folder / "ckpt" / "config.json")
    assert (config["quantization"]["quant_algo"], config["dtype"]) == ("GGUF", "bfloat16")
    return folder / "ckpt"


def build(checkpoint: Path, *flags: object) -> Path:
    engine = checkpoint.with_name("-".join(["engine", *map(str, flags)]))
    if not engine.is_dir():
        call("build", "--checkpoint-dir", checkpoint, "--output-dir", engine, *flags)
    return engine


def verify(engine: Path, **flags: Any) -> dict[str, Any]:
    model = str(engine.with_name("model.gguf"))
    flags = {"max_output_len": 12, "num_alone": 2, **flags}
    return verify_engine(VerifySettings(engine_dir=engine, model_dir=model, **flags))


@needs_compiler
def test_with_kernels_it_is_compared_with_itself(checkpoint: Path) -> None:
    engine = build(checkpoint)
    report = verify(engine)
    assert (report["verdict"], report["quantization"], report["lossy"]) == ("lossy", "GGUF", True)
    assert (report["divergences"], report["wrong_ends"]) == ([], [])
    assert report["alone"] == {"prompts": 2, "same": 2}
    assert report["num_drafted_steps"] > 0
    distance = report["distance"]
    assert distance["dtype"] == "float32"
    assert 0 < distance["mean_divergence"] < 0.01
    assert distance["num_tokens"] == 12 * report["prompts"]
    text = format_report(report)
    assert "with GGUF weights on cpu: inputs of products are rounded, as transformers does" in text
    assert "run by transformers in float32" in text
    with pytest.raises(SpecDecError, match="GGUF weights: its sampled text") as caught:
        verify(engine, sampling=True)
    assert caught.value.hint is not None
    assert "with --optimize none" in caught.value.hint


@needs_compiler
def test_other_text_with_drafts_is_a_fault(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(checkpoint)
    break_outputs(monkeypatch, change_a_token)
    report = verify(engine)
    assert report["verdict"] == "differs"
    error = find_error(report)
    assert error is not None
    assert "with speculation differs from itself without: prompt 0, position 7" in error.message


def test_without_kernels_it_is_compared_with_the_model(checkpoint: Path) -> None:
    report = verify(build(checkpoint, "--optimize", "none"))
    assert report["verdict"] in ("exact", "near-ties")
    assert "distance" not in report
    assert report["logit_difference"] <= report["logit_bound"]
