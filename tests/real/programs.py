"""TensorRT-LLM 0.14's own programs as a machine has them: trtllm-build on PATH, the package.

Real are the parser, the configuration classes, the loading of weights, what `build` rewrites, what
an engine folder is written by, and the runner. Where a network would be made, trtllm-build stops
and writes the double's engine files instead.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.real.stubs import install
from tests.trtllm.double import MAGIC, ROOT, write_script

SOURCE_NAME = "SPECDEC_TRTLLM_SOURCE"
SHIM = """
import sys
sys.path.append({root!r})
from pathlib import Path
from tests.real.programs import patch_torch
from tests.real.stubs import install
del sys.modules["tensorrt_llm"]
install(Path({source!r}))
patch_torch()
import tensorrt_llm
"""


def read_version(source: Path) -> str:
    """Return the version that a source tree calls itself."""
    text = (source / "tensorrt_llm" / "version.py").read_text()
    found = re.search(r'__version__ = "(.+)"', text)
    assert found is not None, text
    return found[1]


def install_programs(folder: Path, source: Path) -> None:
    """Put the real programs where `install_double` has put its own."""
    write_script(
        folder / "bin" / "trtllm-build",
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        f"from tests.real.programs import build\nbuild({str(source)!r})\n",
    )
    package = folder / "site" / "tensorrt_llm"
    for path in package.iterdir():
        if path.suffix == ".py":
            path.unlink()
    (package / "__init__.py").write_text(SHIM.format(root=str(ROOT), source=str(source)))


def patch_torch() -> None:
    """What the runner does on a GPU happens on the CPU."""
    import torch

    make_device = torch.device

    class Device:
        def __new__(cls, name: Any, *rest: Any) -> Any:
            return make_device("cpu" if str(name).startswith("cuda") else name, *rest)

    runner = importlib.import_module("tensorrt_llm.runtime.model_runner_cpp")

    class Torch:
        device = Device

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    vars(runner)["torch"] = Torch()
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]


def load_command() -> Any:
    """The module whose `main` is trtllm-build, on a machine that seems to have a GPU."""
    import torch

    command: Any = importlib.import_module("tensorrt_llm.commands.build")
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: None
    command.infer_cluster_config = lambda: {"cluster_key": "H100-SXM"}
    return command


class Enough(Exception):
    """The configuration is complete; what follows needs TensorRT."""


def build(source: str) -> None:
    """Be trtllm-build, up to the network."""
    install(Path(source))
    command = load_command()
    builder: Any = importlib.import_module("tensorrt_llm.builder")
    version = importlib.import_module("tensorrt_llm.version").__version__
    real_build, seen = command.build, {}

    def stop(network: Any) -> None:
        seen["plugins"] = network.plugin_config
        raise Enough

    def remember(model: Any, config: Any) -> Any:
        seen.update(config=config, model=model)
        return real_optimize(model, config)

    real_optimize = builder.optimize_model_with_config
    builder.optimize_model_with_config, builder.net_guard = remember, stop
    builder.Builder.create_builder_config = lambda *_, **__: None
    builder.Builder.create_network = lambda _: SimpleNamespace()

    def build_config(model: Any, config: Any) -> Any:
        try:
            real_build(model, config)
        except Enough:
            pass
        mapping = model.config.mapping
        checkpoint = sys.argv[sys.argv.index("--checkpoint_dir") + 1]
        content = {
            "checkpoint_dir": os.path.realpath(checkpoint), "rank": mapping.rank,
            "tp_size": mapping.tp_size, "version": version, "label": "0.14",
        }  # fmt: skip
        engine = builder.EngineConfig(model.config, seen["config"], version)
        return builder.Engine(engine, MAGIC + json.dumps(content).encode())

    command.build = build_config
    command.main()
