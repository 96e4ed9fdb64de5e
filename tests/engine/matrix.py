"""The kernels by many compilers, tunings and forms, held to the rule of bits: `make kernels`.

Each library is run by kernel_bits.cpp, which checks that a token's numbers have the same bits
whatever is with them, and tells what the library computes. Libraries of the same arithmetic must
compute the same, to the last bit. Then the tests of the engine run under the sanitizers. What is
not installed is named and left out. What was made and found is kept in .build/kernels.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from specdec.engine.compiler import FLAGS, SOURCE, find_compiler
from specdec.system.machine import read_cpu_flags
from tests.covering import cover

ROOT = Path(__file__).resolve().parents[2]
DRIVER = Path(__file__).with_name("kernel_bits.cpp")
CACHE = ROOT / ".build" / "kernels"
IS_X86 = platform.machine() in ("x86_64", "AMD64")
# Debian 12 has all of these.
COMPILERS = (
    "g++-11", "g++-12", "clang++-13", "clang++-14", "clang++-15", "clang++-16", "clang++-19",
)  # fmt: skip
CROSS_COMPILERS = ("aarch64-linux-gnu-g++-11", "aarch64-linux-gnu-g++-12", "clang++-16")
EMULATOR = "qemu-aarch64"
CROSS_ROOT = "/usr/aarch64-linux-gnu"
TUNINGS = ("haswell", "skylake-avx512", "znver2", "znver3", "znver4", "znver5")
# What a compiler may fuse. By itself it should fuse nothing, and wide vectors least (GCC alone has
# this parameter); whatever it chooses must make no difference.
FREEDOMS: tuple[tuple[str, ...], ...] = (
    (),
    ("-ffp-contract=fast",),
    ("--param=avoid-fma-max-bits=512",),
    ("--param=avoid-fma-max-bits=512", "-ffp-contract=fast"),
)
SANITIZERS = (
    "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer", "-D_GLIBCXX_DEBUG",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Form:
    """What the kernels are compiled as, and so which arithmetic they have."""

    name: str
    flags: tuple[str, ...]
    cpu_flags: tuple[str, ...] = ()  # of /proc/cpuinfo, without which it cannot run here
    is_fused: bool = True
    pairs: str = "none"  # how pairs of bfloat16 are multiplied, or bands of them


X86_FORMS = (
    Form("AMX", ("-march=x86-64-v4", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
         ("avx512vl", "amx_bf16", "amx_int8"), pairs="bands"),
    Form("AVX512-BF16", ("-march=x86-64-v4", "-mavx512bf16"), ("avx512vl", "avx512_bf16"),
         pairs="avx512"),
    Form("AVX-512", ("-march=x86-64-v4",), ("avx512vl",)),
    Form("AVX2", ("-march=x86-64-v3",), ("avx2", "fma")),
    Form("SSE2", ("-march=x86-64",), is_fused=False),
)  # fmt: skip
ARM_FORMS = (
    Form("NEON", ("-mcpu=generic",)),
    Form("Graviton 2", ("-mcpu=neoverse-n1",)),
    Form("Graviton 3", ("-mcpu=neoverse-v1",), pairs="arm"),
    Form("Apple M1", ("-mcpu=apple-m1",)),
    Form("ARMv8.6 (Apple M2)", ("-march=armv8.6-a",), pairs="arm"),
)


@dataclasses.dataclass(frozen=True)
class Build:
    """One library: a form by a compiler with more flags, for this machine or for aarch64."""

    compiler: str
    form: Form
    extra: tuple[str, ...]
    is_cross: bool = False

    def __str__(self) -> str:
        return f"{self.compiler} {self.form.name} {' '.join(self.extra)}"

    @property
    def is_clang(self) -> bool:
        return "clang" in describe_compiler(self.compiler)


@lru_cache
def describe_compiler(compiler: str) -> str:
    """First line of its --version."""
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]


@lru_cache
def knows(compiler: str, flags: tuple[str, ...]) -> bool:
    """Tell whether a compiler takes these flags, and does not pass over one of them."""
    command = [compiler, *flags, "-Werror", "-x", "c++", "-c", "-o", "/dev/null", "-"]
    return subprocess.run(command, input=b"int x;", capture_output=True).returncode == 0


def can_compile(build: Build) -> bool:
    """Tell whether a build's compiler knows its form and each of its other flags."""
    target = ("--target=aarch64-linux-gnu",) if build.is_cross and build.is_clang else ()
    parts = [build.form.flags, *((flag,) for flag in build.extra)]
    return all(knows(build.compiler, (*target, *part)) for part in parts)


def compile_shared(build: Build, source: Path = SOURCE) -> Path:
    """Compile a library, or take the one kept of what is the same without comments and with other
    forms left out. Raises CalledProcessError.
    """
    flags = [flag for flag in FLAGS if not flag.endswith("=native")]
    if build.is_clang and build.is_cross:
        flags += ["--target=aarch64-linux-gnu"]
    command = [build.compiler, *flags, *build.form.flags, *build.extra, "-fPIC", "-shared"]
    if build.is_clang:
        command += ["-Wno-pass-failed"]
    expand = [*command, "-E", "-P", str(source)]
    expanded = subprocess.run(expand, capture_output=True, check=True).stdout.decode()
    content = [describe_compiler(build.compiler), *command, expanded]
    library = CACHE / f"{hashlib.sha256(chr(0).join(content).encode()).hexdigest()[:32]}.so"
    if not library.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, str(source), "-o", str(made)], capture_output=True, check=True)
        os.replace(made, library)
    return library


def compile_driver(compiler: str, *flags: str) -> Path:
    """Compile kernel_bits.cpp, or take the one kept."""
    command = [compiler, "-std=c++17", "-O1", *flags]
    content = "\0".join([describe_compiler(compiler), *command, DRIVER.read_text()])
    program = CACHE / hashlib.sha256(content.encode()).hexdigest()[:32]
    if not program.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        made = program.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [*command, str(DRIVER), "-ldl", "-o", str(made)], capture_output=True, check=True
        )
        os.replace(made, program)
    return program


def run_driver(command: list[str]) -> tuple[dict[str, str], list[str]]:
    """What a library computes, by kernel and type; and where it breaks the rule."""
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stderr.splitlines()
    if done.returncode not in (0, 1) or (done.returncode == 1 and not lines):
        lines = [f"status {done.returncode}", *lines[-3:]]
    return dict(line.split() for line in done.stdout.splitlines()), lines


def group(build: Build, kernel: str) -> tuple[object, ...]:
    """Builds that have this in common must compute the same bits."""
    form = build.form
    return (
        kernel,
        form.is_fused,
        form.pairs if kernel.endswith("bf16") else "",
        # The C library's own erf, exp and log.
        build.is_cross and any(word in kernel for word in ("erf", "scores", "mamba2")),
    )


def list_forms() -> list[Form]:
    """The forms that this CPU runs, as compiled for it first."""
    has = set(read_cpu_flags())
    forms = [form for form in X86_FORMS if IS_X86 and has.issuperset(form.cpu_flags)]
    flags = tuple(flag for flag in FLAGS if flag.endswith("=native"))
    own = [dataclasses.replace(form, name="own", flags=flags) for form in forms[:1]]
    return [*own, *forms]


def list_builds(compilers: list[str], is_full: bool = False) -> list[Build]:
    """What can run here: as users build it, what broke the rule once, and every pair of choices.

    is_full: every combination.
    """
    forms = list_forms()
    builds = [Build(compiler, form, ("-O3",)) for form in forms[:1] for compiler in compilers]
    for compiler in compilers:
        builds += [build for build in list_chosen_builds(compiler) if build.form.is_fused]
    for form in forms:
        for kind, name in (("plain", "pairs"), ("bands", "bands")):
            if form.name == "AVX2" or (form.name, kind) == ("AVX-512", "bands"):
                plain = dataclasses.replace(form, name=f"{form.name} {name}", pairs=kind)
                flags = ("-O3", f"-DSPECDEC_{name.upper()}")
                ends = dict.fromkeys([*compilers[:1], *compilers[-1:]])
                builds += [Build(compiler, plain, flags) for compiler in ends]
    builds = [build for build in builds if can_compile(build)]
    choices = [
        Build(compiler, form, (level, f"-mtune={tuning}", *freedom))
        for compiler in compilers
        for form in forms
        for level in ("-O3", "-O2")
        for tuning in TUNINGS
        for freedom in FREEDOMS
    ]
    choices = [build for build in choices if can_compile(build)]
    choices = choices if is_full else cover(choices, key=list_choices)
    return list(dict.fromkeys([*builds, *choices]))


def list_choices(build: Build) -> tuple[str, ...]:
    """A build's choices: form, compiler, level, tuning, what is left to the compiler."""
    level, *others = build.extra
    tuning = [flag for flag in others if flag.startswith("-mtune=")]
    freedom = [flag for flag in others if flag not in tuning]
    return build.form.name, build.compiler, level, " ".join(tuning), " ".join(freedom)


def list_chosen_builds(compiler: str) -> list[Build]:
    """Those that broke the rule once, or would where the source left the compiler a choice."""
    chosen: dict[str, tuple[str, ...]] = {
        "AVX-512": ("-O3", "-mtune=znver3", *FREEDOMS[3]),
        "AVX2": ("-O3", "-mtune=znver3", *FREEDOMS[1]),
        "SSE2": ("-O2", "-mtune=haswell"),
    }
    return [
        Build(compiler, form, chosen[form.name]) for form in list_forms() if form.name in chosen
    ]


def list_cross_builds(compilers: list[str], is_full: bool = False) -> list[Build]:
    builds = [
        Build(compiler, form, (level, *freedom), is_cross=True)
        for compiler in compilers
        for form in ARM_FORMS
        for level in ("-O3", "-O2")
        for freedom in FREEDOMS[:2]
    ]
    builds = [build for build in builds if can_compile(build)]
    return builds if is_full else cover(builds, key=list_choices)


def run_matrix(builds: list[Build], jobs: int) -> int:
    """Compile, run and compare; returns the number of faults, which it prints."""

    def run(build: Build) -> tuple[Build, dict[str, str], list[str]]:
        try:
            library = compile_shared(build)
        except subprocess.CalledProcessError as error:
            return build, {}, [f"does not compile: {error.stderr.decode()[-300:]}"]
        driver = drivers[build.is_cross]
        kept = CACHE / f"{library.stem}-{driver.name}.txt"
        if kept.is_file():
            return build, dict(line.split() for line in kept.read_text().splitlines()), []
        command = [str(driver), str(library)]
        if build.is_cross:
            command = [EMULATOR, "-cpu", "max", "-L", CROSS_ROOT, *command]
        sums, lines = run_driver(command)
        if not lines:
            kept.write_text("".join(f"{kernel} {value}\n" for kernel, value in sums.items()))
        return build, sums, lines

    if not builds:
        return 0
    drivers = {
        is_cross: compile_driver(
            next((b.compiler for b in builds if b.is_cross and not b.is_clang), "")
            if is_cross else builds[0].compiler
        )
        for is_cross in {build.is_cross for build in builds}
    }  # fmt: skip
    faults, found = 0, defaultdict[tuple[object, ...], dict[Build, str]](dict)
    counts = Counter[tuple[str, str]]()
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for build, sums, lines in pool.map(run, builds):
            counts[build.compiler, build.form.name] += 1
            faults += bool(lines)
            print("  fault" if lines else "  ok   ", build, flush=True)
            for line in lines[:5]:
                print(f"          {line}", flush=True)
            for kernel, value in sums.items():
                found[group(build, kernel)][build] = value
    faults += compare_bits(found)
    for (compiler, form), count in counts.items():
        print(f"{count:4} libraries: {describe_compiler(compiler)}, {form}")
    print(f"{sum(counts.values())} libraries, {len(found)} results compared, {faults} faults")
    return faults


def compare_bits(found: Mapping[tuple[object, ...], Mapping[Build, str]]) -> int:
    """Print which builds have other bits than most; return how many."""
    faults = 0
    for key, values in found.items():
        ((usual, _),) = Counter(values.values()).most_common(1)
        for build in (build for build, value in values.items() if value != usual):
            faults += 1
            print(f"  fault {build}: other bits of {key[0]} than most")
    return faults


def run_sanitized() -> int:
    """Run kernel_bits and the engine's tests on libraries with the sanitizers in them."""
    compiler = find_compiler()
    assert compiler is not None
    if "clang" in describe_compiler(compiler):
        print("sanitizers: left out, they are run with GCC")
        return 0
    faults = 0
    driver = compile_driver(compiler, *SANITIZERS)
    environ = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    os.environ.update(environ)
    for form in list_forms()[1:]:
        build = Build(compiler, form, SANITIZERS)
        _, lines = run_driver([str(driver), str(compile_shared(build))])
        faults += bool(lines)
        print("  fault" if lines else "  ok   ", build, flush=True)
        for line in lines[:12]:
            print(f"          {line}")
    preload = []
    for name in ("libasan.so", "libubsan.so"):
        command = [compiler, f"-print-file-name={name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        preload.append(done.stdout.strip())
    environ |= {"LD_PRELOAD": " ".join(preload), "SPECDEC_TEST_KERNEL_FLAGS": " ".join(SANITIZERS)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "tests/engine"]
    return faults + bool(subprocess.call(command, cwd=ROOT, env={**os.environ, **environ}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", choices=("matrix", "aarch64", "sanitizers"))
    parser.add_argument("--compilers", nargs="*", help="some of them")
    parser.add_argument("--full", action="store_true", help="every combination, not every pair")
    options = parser.parse_args()
    faults = 0
    builds: list[Build] = []
    if options.only in (None, "matrix"):
        wanted = options.compilers or COMPILERS
        compilers = [name for name in wanted if shutil.which(name)]
        for name in sorted(set(wanted) - set(compilers)):
            print(f"left out, not installed: {name}")
        builds += list_builds(compilers, options.full)
    if options.only in (None, "aarch64"):
        compilers = [name for name in CROSS_COMPILERS if shutil.which(name)]
        for name in sorted(set(CROSS_COMPILERS) - set(compilers)):
            print(f"left out, not installed: {name}")
        if not shutil.which(EMULATOR):
            print(f"aarch64 left out: no {EMULATOR} (Debian: apt install qemu-user)")
        elif not any(name.startswith("aarch64") for name in compilers):
            print("aarch64 left out: no compiler (Debian: apt install g++-aarch64-linux-gnu)")
        else:
            builds += list_cross_builds(compilers, options.full)
    faults += run_matrix(builds, options.jobs)
    if options.only in (None, "sanitizers"):
        faults += run_sanitized()
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main())
