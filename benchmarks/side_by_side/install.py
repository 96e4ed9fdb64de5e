"""Each peer in a virtual environment of its own, with pinned versions, made once."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from .processes import PeerError, run_logged

TORCH = "torch==2.13.0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # PyPI has the build for CUDA, several GB
INSTALL_TORCH = Path(__file__).parents[2] / ".ci" / "install_torch.py"
LLAMA_CPP = "llama-cpp-python==0.3.36"  # its source archive holds all of llama.cpp
SOURCE = "vendor/llama.cpp"
LLAMA_PROGRAMS = ("llama-server", "llama-quantize")
CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_LLGUIDANCE=OFF",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Packages of a peer's environment; `finish` does the steps that pip does not.

    removed: packages that come along and break others; torchvision is built for another torch.
    """

    packages: tuple[str, ...]
    removed: tuple[str, ...] = ()
    finish: Callable[[Path, Path], None] | None = None

    def describe(self) -> str:
        """Return the inputs that an environment must have been made with to be used again."""
        words = [*self.packages, *(f"-{name}" for name in self.removed)]
        return json.dumps([*words, *((*CMAKE_FLAGS, *LLAMA_PROGRAMS) if self.finish else ())])


def build_llama_cpp(folder: Path, log: Path) -> None:
    """Compile LLAMA_PROGRAMS for this processor out of the source archive on the package index."""
    source = folder / "source"
    if not source.exists():
        partial = folder / "source.partial"
        shutil.rmtree(partial, ignore_errors=True)
        run_logged(
            [folder / "bin" / "python", "-m", "pip", "download", "--no-deps",
             "--no-binary", LLAMA_CPP.split("==")[0], "--dest", partial, LLAMA_CPP],
            log, "pip download of llama.cpp's source",
        )  # fmt: skip
        unpack(partial)
        (archive,) = (path for path in partial.iterdir() if path.is_dir())
        archive.rename(source)
        shutil.rmtree(partial)
    cmake = folder / "bin" / "cmake"
    environment = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    run_logged(
        [cmake, "-S", source / SOURCE, "-B", folder / "build", "-G", "Ninja", *CMAKE_FLAGS],
        log, "cmake of llama.cpp", env=environment,
    )  # fmt: skip
    run_logged(
        [cmake, "--build", folder / "build", "--target", *LLAMA_PROGRAMS],
        log, "compiling llama.cpp", env=environment,
    )  # fmt: skip
    for name in LLAMA_PROGRAMS:
        if not (folder / "build" / "bin" / name).is_file():
            raise PeerError(f"{folder / 'build' / 'bin' / name} was not built")


def unpack(folder: Path) -> None:
    """Unpack the only archive in a folder."""
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        if hasattr(tarfile, "data_filter"):
            packed.extraction_filter = tarfile.data_filter
        packed.extractall(folder)


RECIPES = {
    "transformers": Recipe((TORCH, "transformers==5.24.0", "numpy<3", "safetensors==0.8.0")),
    "llama.cpp": Recipe(("cmake==4.4.4", "ninja==1.13.2"), finish=build_llama_cpp),
    "openvino": Recipe(
        ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", TORCH, "transformers==5.5.4"),
        removed=("torchvision",),
    ),
}


def install_peer(name: str, folder: Path, log: Path) -> Path:
    """Make the peer's environment unless it is there; return its Python, or raise PeerError."""
    recipe = RECIPES[name]
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.is_file() and ready.read_text() == recipe.describe():
        return python
    ready.unlink(missing_ok=True)
    print(f"installing {name} into {folder} (log: {log})", file=sys.stderr, flush=True)
    run_logged([sys.executable, "-m", "venv", folder], log, "making a virtual environment")
    if TORCH in recipe.packages:
        run_logged([python, INSTALL_TORCH, TORCH_INDEX, TORCH], log, f"installing {TORCH}")
    run_logged(
        [python, "-m", "pip", "install", "--no-compile", *recipe.packages],
        log, f"installing {' '.join(recipe.packages)}",
    )  # fmt: skip
    if recipe.removed:
        run_logged(
            [python, "-m", "pip", "uninstall", "--yes", *recipe.removed], log, "uninstalling"
        )
    if recipe.finish is not None:
        recipe.finish(folder, log)
    ready.write_text(recipe.describe())
    return python
