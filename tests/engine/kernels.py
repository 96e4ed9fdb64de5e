"""The kernels in the forms that processors get."""

from __future__ import annotations

import os
import platform

import pytest

from specdec.engine.compiler import find_compiler

# form -> what the compiler is told with the usual. No user has pairs and bands, which are plain
# code, and hardly any has SSE2 only: they are compiled in a quarter of the time (`make kernels`
# compiles them at -O3 too).
FORMS = {
    "own": (),
    # The products of processors with AVX512-BF16, in plain code.
    "pairs": ("-DSPECDEC_PAIRS", "-Og"),
}
if platform.machine() in ("x86_64", "AMD64"):
    # That, and products of integers in pairs, though the processor may have instructions for both.
    FORMS["pairs"] += ("-mno-avx512bf16", "-mno-avx512vnni", "-mno-amx-int8")
    # With the tuning and the freedom that broke the rule of bits once. A compiler takes the freedom
    # to fuse only with expensive optimizations.
    FORMS["avx2"] = (
        "-mno-avx512f", "-mtune=znver3", "-ffp-contract=fast", "-O1", "-fexpensive-optimizations",
    )  # fmt: skip
    FORMS["sse2"] = ("-march=x86-64", "-mtune=haswell", "-Og")
    # The sums of processors with AMX, in plain code; integers without AMX.
    FORMS["bands"] = ("-DSPECDEC_BANDS", "-mno-amx-int8", "-Og")

# Such as those of a sanitizer, see matrix.py.
EXTRA_FLAGS = tuple(os.environ.get("SPECDEC_TEST_KERNEL_FLAGS", "").split())

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")
in_every_form = pytest.mark.parametrize("library", FORMS, indirect=True)
