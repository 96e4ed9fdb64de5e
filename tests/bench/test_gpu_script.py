"""benchmarks/gpu.py at toy size on a CPU: what it reports, graphs included (tests/tape.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu
from tests.tape import TapeRecorder


@pytest.mark.thorough
def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--quick", "--repeat", "1", "--output-dir", str(tmp_path)]
    report = gpu.main(words, TapeRecorder())
    (path,) = tmp_path.glob("*.json")
    written_report = json.loads(path.read_text())
    assert written_report["shapes"].keys() == report["shapes"].keys() == {"toy"}
    result = report["shapes"]["toy"]
    plain = result["plain"]
    ways = ["eager", "graphs", "transformers", "transformers static"]
    assert list(plain["tokens_per_second"]) == ways
    assert all(rate > 0 for rate in plain["tokens_per_second"].values())
    # In float32 all four write the same text: the weights are the same.
    length = result["shape"]["output"]
    assert plain["equal_leading_tokens"] == dict.fromkeys(ways, length)
    for way in ("eager", "graphs"):
        share = result["step_gb"] / result["read_gb_per_second"] / plain["step_ms"][way] * 1000
        assert result["share_of_limit"][way] == pytest.approx(share, rel=0.1, abs=2e-3)
        assert set(result["verify"][way]["ms"]) == set(gpu.SIZES)
        assert result["verify"][way]["relative"][1] == 1
        milliseconds = result["redrafter"][way]["part_ms"]
        assert all(value > 0 for value in milliseconds.values())
        overhead = 1 - milliseconds["verify"] / sum(milliseconds.values())
        assert result["redrafter"][way]["overhead"] == pytest.approx(overhead, abs=2e-3)
        assert 1 <= result["redrafter"][way]["waits_per_step"] < 1.5
    assert result["graphs"]["replayed"] > result["graphs"]["recorded"] > 0
    assert written_report["machine"]["torch"]
    assert written_report["machine"]["transformers"]
    assert json.loads(capsys.readouterr().out) == written_report


def test_real_sizes_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="no GPU"):
        gpu.main([])
