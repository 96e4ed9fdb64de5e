"""The rule of bits, held to by a program without Python; `make kernels` runs it on many builds."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.engine import native
from tests.engine import matrix
from tests.engine.kernels import EXTRA_FLAGS, in_every_form, needs_compiler

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(bool(EXTRA_FLAGS), reason="needs a program with the sanitizer in it"),
]


@in_every_form
def test_every_form_keeps_the_bits(library: Path) -> None:
    compiler = native.find_compiler()
    assert compiler is not None
    results, lines = matrix.run_driver([str(matrix.compile_driver(compiler)), str(library)])
    assert not lines
    assert len(results) == 42  # kernels and types


def test_what_a_compiler_chooses_makes_no_difference(capfd: pytest.CaptureFixture[str]) -> None:
    """Tunings at which GCC 12 fused some copies of a template and others not, and leave to fuse."""
    compiler = native.find_compiler()
    assert compiler is not None
    builds = matrix.list_chosen_builds(compiler)
    assert matrix.run_matrix(builds, jobs=1) == 0, capfd.readouterr().out
