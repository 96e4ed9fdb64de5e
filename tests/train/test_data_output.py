"""Output of training data: whole under its name, or not there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.errors import SpecDecError
from specdec.train.data import output
from specdec.train.data.settings import DataSettings


def test_rows_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    output.write_rows(path, [b"1\n", b"2\n"], force=False)
    with pytest.raises(SpecDecError, match=r"rows\.jsonl"):
        output.write_rows(path, [b"3\n"], force=False)
    assert path.read_bytes() == b"1\n2\n"

    def break_off() -> Iterator[bytes]:
        yield b"4\n"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        output.write_rows(path, break_off(), force=True)
    assert path.read_bytes() == b"1\n2\n"
    output.write_rows(path, [b"5\n"], force=True)
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"], "no partial file"
    assert path.read_bytes() == b"5\n"


def test_a_manifest_describes_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, rows of unknown origin would stay."""
    settings = DataSettings(
        input="i.jsonl", output=tmp_path / "rows.jsonl", base_url=["http://a"], model="m"
    )
    settings.output.write_bytes(b"1\n")
    output.write_manifest(settings, {"a": 1}, {"b": 2}, {"c": 3})
    manifest = json.loads((tmp_path / "rows.manifest.json").read_text())
    assert (manifest["facts"], manifest["input"], manifest["results"]) == (
        {"a": 1}, {"b": 2}, {"c": 3},
    )  # fmt: skip
    assert manifest["output"]["sha256"] == hashlib.sha256(b"1\n").hexdigest()
    assert manifest["settings"]["base_url"] == ["http://a"]

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output, "write_whole", fail)
    with pytest.raises(OSError, match="No space"):
        output.write_manifest(settings, {}, {}, {})
    assert not settings.output.exists()


def test_a_manifest_takes_no_foreign_file_s_place(tmp_path: Path) -> None:
    """One that was left when its rows were removed gives way."""
    path, manifest = tmp_path / "rows.jsonl", tmp_path / "rows.manifest.json"
    for text in ('{"name": "my app"}', "["):
        manifest.write_text(text)
        with pytest.raises(SpecDecError, match=r"rows\.manifest\.json exists"):
            output.check_output(path, force=False)
        output.check_output(path, force=True)
    manifest.write_text('{"tool": "specdec"}')
    output.check_output(path, force=False)
