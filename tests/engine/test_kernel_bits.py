"""The rule of bits, held to by a program without Python; `make kernels` runs it on many builds."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.engine.compiler import find_compiler
from tests.engine import matrix
from tests.engine.kernels import EXTRA_FLAGS, in_every_form, needs_compiler

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(bool(EXTRA_FLAGS), reason="needs a program with the sanitizer in it"),
]


@in_every_form
def test_every_form_keeps_the_bits(library: Path) -> None:
    """Each kernel gives a row the same bits alone and among others."""
    compiler = find_compiler()
    assert compiler is not None
    sums, lines = matrix.run_driver([str(matrix.compile_driver(compiler)), str(library)])
    assert not lines
    assert len(sums) == 54  # kernels and types
