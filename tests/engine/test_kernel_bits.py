"""The rule of bits, held to by a program without Python; `make kernels` runs it on many builds."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.engine import native
from tests.engine import matrix
from tests.engine.kernels import EXTRA_FLAGS, FORMS, in_every_form, needs_compiler

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(bool(EXTRA_FLAGS), reason="needs a program with the sanitizer in it"),
]


def compute_sums(library: Path) -> dict[str, str]:
    """Of the bits of every result; each kernel keeps them alone and among others."""
    compiler = native.find_compiler()
    assert compiler is not None
    sums, lines = matrix.run_driver([str(matrix.compile_driver(compiler)), str(library)])
    assert not lines
    assert len(sums) == 45  # kernels and types
    return sums


@in_every_form
def test_every_form_keeps_the_bits(library: Path) -> None:
    compute_sums(library)


@pytest.mark.skipif("avx2" not in FORMS, reason="of x86")
@pytest.mark.parametrize("library", ["avx2"], indirect=True)
def test_what_a_compiler_chooses_makes_no_difference(library: Path) -> None:
    """Tunings at which GCC 12 fused some copies of a template and others not, and leave to fuse."""
    compiler = native.find_compiler()
    assert compiler is not None
    builds = [b for b in matrix.list_chosen_builds(compiler) if b.form.name == "AVX-512"]
    if not builds:
        pytest.skip("no AVX-512 here")
    assert compute_sums(matrix.compile_shared(builds[0])) == compute_sums(library)
