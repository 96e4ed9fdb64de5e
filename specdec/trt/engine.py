"""The tensorrt backend: an engine folder of networks, run by the same loop as the torch backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from specdec.decode.drafters import Drafting, choose_methods, make_proposer, name_methods
from specdec.decode.drafters.base import Drafter
from specdec.decode.engine import TorchEngine
from specdec.engine.layout import EngineConfig, read_engine_config
from specdec.errors import Problems, SpecDecError
from specdec.files.folders import TENSORRT
from specdec.files.reading import read_json
from specdec.trt.decoder import NetworkDecoder, Runner
from specdec.trt.drafters import list_observed, open_drafter
from specdec.trt.target import Sizes

# Rows of positions that caches have beyond the longest text at least: of drafts, and of the trees
# that a draft model runs.
SPARE_POSITIONS = 128
BODY, HEAD = "rank0.engine", "head0.engine"
OpenRunner = Callable[[str], Runner]


@dataclasses.dataclass(frozen=True)
class NetworkConfig:
    """What an engine's networks were built for, as its config.json has it.

    library: of `describe_library`. compute_capabilities: of GPUs that run it. networks: the files.
    num_head_rows: tokens that the head takes at once. sizes, drafter_sizes: limits of the layers'
    networks.
    """

    library: str
    compute_capabilities: list[str]
    networks: list[str]
    num_head_rows: int
    sizes: Sizes
    drafter_sizes: Sizes


def read_network_config(folder: Path) -> tuple[EngineConfig, NetworkConfig]:
    """Read an engine's config.json; raise SpecDecError if it is none, or of another backend."""
    config = read_engine_config(folder, TENSORRT)
    options = read_json(folder / "config.json")[f"{TENSORRT}_config"]
    try:
        values = {field.name: options[field.name] for field in dataclasses.fields(NetworkConfig)}
        for name in ("sizes", "drafter_sizes"):
            values[name] = Sizes(**values[name])
            if not all(type(n) is int and n > 0 for n in dataclasses.astuple(values[name])):
                raise TypeError(name)
        found = NetworkConfig(**values)
        is_right = type(found.num_head_rows) is int and found.num_head_rows > 0
        for names in (found.networks, found.compute_capabilities):
            is_right &= isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not is_right or not {BODY, HEAD} <= set(found.networks):
            raise TypeError("networks")
    except (KeyError, TypeError) as error:
        raise SpecDecError(
            f"{folder}/config.json: {TENSORRT}_config is not what this version of specdec writes:"
            f" {error}",
            "build the engine again",
        ) from error
    return config, found


def find_network_problems(folder: Path, networks: NetworkConfig) -> Problems:
    """The files that an engine lacks."""
    return Problems(
        (f"{folder} lacks {name}", "copy the folder again, or build the engine again")
        for name in networks.networks
        if not (folder / name).is_file()
    )


class TensorRTEngine(TorchEngine):
    """An engine folder of TensorRT's networks, on one GPU."""

    name = TENSORRT

    def __init__(
        self,
        folder: Path,
        *,
        device: str = "auto",
        devices: Sequence[int] | None = None,
        speculate: bool = True,
        drafting: Drafting | None = None,
        open_runner: OpenRunner | None = None,
    ) -> None:
        """open_runner: what runs a file's network, of its name; TensorRT's runtime if None.

        The others are `TorchEngine`'s.
        """
        with self._loading(folder, device, devices):
            self._open = open_runner or self._open_engine
            if open_runner is None:
                self._check_machine()
            self._load_networks(drafting, speculate=speculate)
            self.check_whole()

    def _read_config(self) -> None:
        self.config, self.networks = read_network_config(self.folder)
        find_network_problems(self.folder, self.networks).raise_all()

    def _check_machine(self) -> None:
        from specdec.trt.runtime import check_device, check_library

        if self.device.type != "cuda":
            raise SpecDecError(
                f"{self.folder} is an engine of TensorRT, which runs on a GPU, and torch sees none"
                if not torch.cuda.is_available()
                else f"--device {self.device.type}: {self.folder} is an engine of TensorRT",
                "run it on a machine with a GPU, or build with --backend torch",
            )
        check_library(self.networks.library, self.folder)
        check_device(self.device, self.networks.compute_capabilities, self.folder)

    def _open_engine(self, name: str) -> Runner:
        from specdec.trt.runtime import EngineRunner

        return EngineRunner(self.folder / name, self.device)

    def _load_networks(self, drafting: Drafting | None, *, speculate: bool) -> None:
        config, networks = self.config, self.networks
        model, build = config.checkpoint.model, config.build
        drafter = config.checkpoint.drafter
        depth = drafter.max_draft_depth if drafter else build.max_draft_len
        self.decoder = NetworkDecoder(
            model, self._open(BODY), self._open(HEAD), sizes=networks.sizes,
            num_head_rows=networks.num_head_rows, num_positions=build.max_seq_len + depth + 1,
            device=self.device,
        )  # fmt: skip
        methods = choose_methods(config, drafting) if speculate else ()
        if any(method.source == "checkpoint" for group in methods for method in group):
            assert drafter is not None
            self.decoder.observed_layers = list_observed(drafter)
            self.drafter_network = open_drafter(
                self.folder, drafter, model, self.device, self._open, networks.drafter_sizes,
                networks.num_head_rows,
            )  # fmt: skip
        self.proposer: Drafter = make_proposer(self, methods, {}, drafting)
        self.method = name_methods(methods)
