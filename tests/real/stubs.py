"""Stand-ins for what TensorRT-LLM's Python needs and a machine without a GPU does not have.

The package's own code is the real one, out of a source folder. `tensorrt` and other packages that
are not installed become modules where every name is some class; the compiled bindings are written
out below, with the arguments and fields that their source lists, so that anything else fails.
"""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ABSENT = (
    "tensorrt", "cuda", "polygraphy", "onnx", "onnx_graphsurgeon", "h5py", "pulp",
    "pandas", "datasets", "modelopt", "ammo", "sentencepiece", "pynvml", "openai", "jax", "flax",
    "click_option_group", "diffusers", "evaluate", "colored", "lark", "aenum",
)  # fmt: skip


class AnyMeta(type):
    """Every attribute of such a class is another one, the same each time."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = AnyMeta(name, (Anything,), {})
        setattr(cls, name, found)
        return found

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())


class Anything(metaclass=AnyMeta):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = AnyMeta(name, (Anything,), {})
        self.__dict__[name] = found
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else Anything()


class AbsentModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        found: Any = "10.4.0" if name == "__version__" else AnyMeta(name, (Anything,), {})
        setattr(self, name, found)
        return found


class AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of packages that are not there."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = frozenset(names)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install(source: Path) -> None:
    """Let this process import TensorRT-LLM 0.14 from its source tree."""
    from tests.real.bindings import make_modules

    os.environ["TRT_LLM_NO_LIB_INIT"] = "1"
    sys.path.insert(0, str(source))
    absent = [name for name in ABSENT if importlib.util.find_spec(name) is None]
    sys.meta_path.append(AbsentFinder([*absent, "mpi4py"]))
    import transformers

    if not hasattr(transformers, "AutoModelForVision2Seq"):  # transformers 5 has it no more
        # On the class: importing its models makes the module anew.
        vision = AnyMeta("AutoModelForVision2Seq", (Anything,), {})
        type(transformers).AutoModelForVision2Seq = vision
    strenum = ModuleType("strenum")
    vars(strenum).update(StrEnum=StrEnum, LowercaseStrEnum=LowercaseStrEnum)
    mpi4py = AbsentModule("mpi4py")
    vars(mpi4py).update(MPI=SimpleNamespace(COMM_WORLD=World()), __path__=[])
    sys.modules |= {"strenum": strenum, "mpi4py": mpi4py}
    sys.modules.update(make_modules(AbsentModule))


class World:
    """The processes that an mpirun has started; what one sends to all, all have."""

    def Get_rank(self) -> int:
        return int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))

    def Get_size(self) -> int:
        return int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))

    def Barrier(self) -> None:
        pass

    def bcast(self, value: Any, root: int) -> Any:
        return value

    def Split(self, color: int, key: int) -> World:
        return self


class StrEnum(str, enum.Enum):
    """As of the package of that name: `auto()` gives a member's own name."""

    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[Any]) -> str:
        return name

    def __str__(self) -> str:
        return str(self.value)


class LowercaseStrEnum(StrEnum):
    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[Any]) -> str:
        return name.lower()
