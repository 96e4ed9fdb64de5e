"""Library of native kernels: compiled by specdec-build for this machine, kept, loaded, called."""

from __future__ import annotations

import contextlib
import ctypes
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from specdec.engine.compiler import (
    FLAGS,
    SOURCE,
    call_compiler,
    describe_cpu,
    find_compiler,
    hash_source,
)
from specdec.engine.kernel_cache import find_kept, keep, take_turn
from specdec.engine.native_border import FLOAT, INT, POINTER, RECORDS
from specdec.errors import SpecDecError
from specdec.system import logs
from specdec.system.cache import find_cache

logger = logs.get_logger(__name__)
LIBRARY_NAME = "kernels.so"
ABI_VERSION = 33
_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
# Types of arguments and results by the letters that a library names them by, see kernels.cpp.
_LETTERS = {"v": None, "p": POINTER, "i": INT, "f": FLOAT, "d": ctypes.c_double}


def compile_kernels(folder: Path, reason: str = "") -> dict[str, str]:
    """Compile the kernels into `folder` and return what they were compiled with.

    reason: why this is done now, for people. A library that this compiler made of this source on
    this machine before is taken from the user's cache.
    Raises SpecDecError with the compiler's last lines when there is no compiler or it fails.
    """
    command = find_compiler()
    if command is None:
        raise SpecDecError(
            "no C++ compiler: neither $CXX nor g++, c++ or clang++ is on the PATH",
            "install one (Debian: apt install g++), or build with --optimize none",
        )
    compiler = shlex.split(command)
    version = call_compiler([*compiler, "--version"])
    info = {
        "compiler": " ".join([(version.splitlines() or compiler)[0], *compiler[1:]]),
        **_describe_kernels(),
    }
    library = folder / LIBRARY_NAME
    if not _copy_kept(info, library):
        with take_turn(info):
            if not _copy_kept(info, library):  # nor has another process compiled them meanwhile
                _compile(compiler, info, library, reason)
    return info


def _copy_kept(info: Mapping[str, str], library: Path) -> bool:
    """Copy a library out of the user's cache; return False where it does not hold it."""
    if (cached_library := find_kept(info)) is None:
        return False
    # One that this process has loaded may lie there: written into, it would break under us.
    library.unlink(missing_ok=True)
    try:
        shutil.copyfile(cached_library, library)
    except FileNotFoundError:  # another process has cleared the cache meanwhile
        return False
    logger.debug("kernels taken from %s", cached_library)
    return True


def _compile(
    compiler: Sequence[str], info: Mapping[str, str], library: Path, reason: str
) -> None:  # fmt: skip
    objects = library.with_name("kernels.o")
    if reason:
        logger.info("%s", reason)
    label = f"compiling the native kernels for this CPU with {info['compiler']}, once"
    with logs.show_waiting(label, logger):
        call_compiler(
            [*compiler, *FLAGS, "-c", "-fPIC", str(SOURCE), "-o", str(objects)], output=objects
        )
        call_compiler(
            [*compiler, "-shared", "-pthread", str(objects), "-o", str(library)], output=library
        )
    objects.unlink()
    _load_library(library)  # what does not load is not kept
    keep(library.read_bytes(), info)


@contextlib.contextmanager
def provide_library(info: Mapping[str, str]) -> Iterator[Path]:
    """Provide kernels of this version for this CPU: those an engine was built with, or new ones.

    info: what the engine's kernels were compiled with. They come out of the user's cache; an engine
    folder's own copy is code of whoever built it, and is not looked at. Raises SpecDecError where
    they are not in the cache and cannot be compiled.
    """
    is_ours = all(info.get(key) == value for key, value in _describe_kernels().items())
    if is_ours and (cached_library := find_kept(info)):
        yield cached_library
        return
    try:
        with tempfile.TemporaryDirectory(prefix="specdec-kernels-") as folder:
            compiled = compile_kernels(
                Path(folder),
                f"no kernels for this engine are kept in {find_cache() or 'a home folder'}, and"
                " those in its folder are not used, as code may be anybody's: they are compiled",
            )
            yield find_kept(compiled) or Path(folder) / LIBRARY_NAME
    except OSError as error:
        raise SpecDecError(
            f"the native kernels cannot be compiled: {error.strerror or error}",
            "free space in the folder for temporary files, or set TMPDIR to another one",
        ) from None


def _describe_kernels() -> dict[str, str]:
    """Return what makes a library right for this machine and this version of specdec."""
    return {
        "flags": " ".join(FLAGS),
        "cpu": describe_cpu(),
        "source_sha256": hash_source(SOURCE),
    }


def _load_library(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise SpecDecError(
            f"the compiled kernels do not load: {error}",
            "set CXX to another C++ compiler, or build with --optimize none",
        ) from None


def _check_interface(path: Path, library: ctypes.CDLL) -> None:
    """Raise SpecDecError where a library is of another version, or has another size of a record."""
    try:
        library.specdec_abi_version.restype = INT
        version = library.specdec_abi_version()
    except AttributeError:
        version = 0
    if version != ABI_VERSION:
        raise SpecDecError(
            f"{path} has kernel interface {version}, this specdec needs {ABI_VERSION}",
            "remove the file: it is compiled again",
        )
    for record in RECORDS:
        size = INT.in_dll(library, f"specdec_size_of_{record.__name__}").value
        if size != ctypes.sizeof(record):
            raise RuntimeError(f"{record.__name__} has {ctypes.sizeof(record)} bytes, not {size}")


class KernelLibrary:
    """A loaded library of kernels, whose functions are called by name, for one dtype."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._library = _load_library(path)
        _check_interface(path, self._library)
        self._functions: dict[str, Any] = {}

    @property
    def handle(self) -> int:
        """Number of the library among those that this process has loaded."""
        return self._library._handle

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the library, that of our dtype where there is one for each."""
        if name not in self._functions:
            symbol = f"specdec_{name}_{_SUFFIXES[self.dtype]}"
            symbol = symbol if hasattr(self._library, symbol) else f"specdec_{name}"
            # The library tells the types that a function returns and takes.
            letters = ctypes.c_char_p.in_dll(self._library, f"{symbol}_types").value or b""
            function = getattr(self._library, symbol)
            function.restype, *function.argtypes = [_LETTERS[x] for x in letters.decode()]
            self._functions[name] = function
        return self._functions[name](*arguments)

    def _call_with_threads(self, name: str, *arguments: Any) -> Any:
        """Call a function whose loops are shared by as many threads as torch has."""
        self._call("set_num_threads", torch.get_num_threads())
        return self._call(name, *arguments)
