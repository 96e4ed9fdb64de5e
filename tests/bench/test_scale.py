"""benchmarks/scale.py: the page's tables and the sums after them."""

from __future__ import annotations

import pytest

from benchmarks import scale
from tests.conftest import ROOT


def test_the_page_shows_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    scale.main(["plan"])
    shown = (ROOT / "docs" / "scale.md").read_text().partition("scale.py plan\n")[2]
    assert shown.partition("```")[0].split() == capsys.readouterr().out.split()


def test_sums() -> None:
    """Bytes as docs/train.md's table has them; hours by hand; a line through two runs."""
    assert [scale.count_state_bytes(4096, n) for n in (1, 4, 6)] == [8192, 32_768, 49_152]
    assert [scale.count_state_bytes(4096, n, is_fp8=True) for n in (1, 4, 6)] == [
        4100, 16_400, 24_600,
    ]  # fmt: skip
    rates = scale.Rates(read=1000, write=100, learn=6e6)
    job = scale.Job(answers=36, prompt_tokens=1000, answer_tokens=2000, rates=rates)
    drafter = scale.Drafter("one", 1, 500, 2)
    hours = scale.find_hours(job, drafter)
    assert list(hours.values()) == pytest.approx([0.01 + 0.2, 0.03, 0.03])
    assert scale.count_layer(4, 2, 8, 2) == 2 * 4 * 8 + 16 + 96
    runs = [scale.Run(10, 7.0), scale.Run(30, 11.0)]
    assert scale.predict(runs, 100) == pytest.approx(25.0)
