"""The tensorrt backend: an engine folder of networks, run by the same loop as the torch backend."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch

from specdec.checkpoint.config import CheckpointConfig
from specdec.decode.drafters import Methods, uses_drafter
from specdec.decode.engine import TorchEngine
from specdec.decode.ranks.leader import LeadingDecoder, open_decoder
from specdec.engine.graphs import CudaRecorder
from specdec.engine.group import Group
from specdec.engine.layout import EngineConfig, read_engine_config
from specdec.engine.native_matrices import Weight
from specdec.engine.verification import Verification
from specdec.errors import Problems, SpecDecError
from specdec.files.backends import TENSORRT
from specdec.files.reading import read_json
from specdec.system import logs
from specdec.trt.decoder import NetworkDecoder
from specdec.trt.drafters import list_networks, open_drafter
from specdec.trt.library import OTHER_RELEASE, Library, describe_library, load_tensorrt
from specdec.trt.network import Sizes
from specdec.trt.runtime import EngineRunner

# Rows of positions that caches have beyond the longest text at least: of drafts, and of the trees
# that a draft model runs.
SPARE_POSITIONS = 128


def name_networks(rank: int) -> tuple[str, str]:
    """Return the files of a rank's networks: its layers, and its head."""
    return f"rank{rank}.engine", f"head{rank}.engine"


@dataclasses.dataclass(frozen=True)
class NetworkConfig:
    """Sizes and files of an engine's networks, as its config.json has them.

    library: of `describe_library`. compute_capabilities: of GPUs that run it. sizes, drafter_sizes:
    limits of the networks.
    """

    library: str
    compute_capabilities: list[str]
    sizes: Sizes
    drafter_sizes: Sizes


def read_network_config(folder: Path) -> tuple[EngineConfig, NetworkConfig]:
    """Read an engine's config.json; raise SpecDecError if it is none, or of another backend."""
    config = read_engine_config(folder, TENSORRT)
    options = read_json(folder / "config.json")[f"{TENSORRT}_config"]
    try:
        names = [options["library"], *options["compute_capabilities"]]
        sizes = [Sizes(**options[name]) for name in ("sizes", "drafter_sizes")]
        numbers = [number for group in sizes for number in dataclasses.astuple(group)]
        wrong_values = [name for name in names if not isinstance(name, str)]
        wrong_values += [number for number in numbers if type(number) is not int or number < 1]
        if wrong_values:
            raise TypeError(f"{wrong_values[0]!r} is neither a name nor a size")
        network_config = NetworkConfig(names[0], names[1:], *sizes)
    except (KeyError, TypeError) as error:
        raise SpecDecError(
            f"{folder}/config.json: {TENSORRT}_config is not what this version of specdec writes:"
            f" {error}",
            "build the engine again",
        ) from error
    return config, network_config


def list_files(checkpoint: CheckpointConfig) -> list[str]:
    """Return the files of an engine's networks."""
    ranks = range(checkpoint.model.tp_size)
    names = [name for rank in ranks for name in name_networks(rank)]
    return names + list_networks(checkpoint.drafter)


def find_network_problems(folder: Path, checkpoint: CheckpointConfig) -> Problems:
    """Return the files that an engine lacks."""
    return Problems(
        (f"{folder} lacks {name}", "copy the folder again, or build the engine again")
        for name in list_files(checkpoint)
        if not (folder / name).is_file()
    )


def find_machine_problems(
    folder: Path, networks: NetworkConfig, library: Library, gpu: str, capability: str
) -> Problems:
    """Return the reason why an engine cannot run on this GPU with a machine's TensorRT."""
    fact, built_for = library.explain(gpu, capability), networks.compute_capabilities
    return Problems.from_table(
        (library.name != networks.library,
         f"{folder} was built by {networks.library}, and {library.name} is installed",
         "install the release that built it, or build the engine again"),
        (capability not in built_for,
         f"{folder} was built for compute capability {', '.join(built_for)}, and {gpu} has"
         f" {capability}",
         f"{fact}: {OTHER_RELEASE}" if fact
         else f"build it again with --compute-capability {capability}"),
    )  # fmt: skip


def check_machine(folder: Path, networks: NetworkConfig, device: torch.device) -> None:
    """Raise SpecDecError where an engine does not run: no GPU, another one, another TensorRT."""
    if device.type != "cuda":
        has_gpu = torch.cuda.is_available()
        raise SpecDecError(
            f"--device {device.type}: {folder} is an engine of TensorRT" if has_gpu
            else f"{folder} is an engine of TensorRT, which runs on a GPU, and torch sees none",
            "run it on a machine with a GPU, or build with --backend torch",
        )  # fmt: skip
    library, name = describe_library(load_tensorrt()), torch.cuda.get_device_name(device)
    capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
    find_machine_problems(folder, networks, library, name, capability).raise_all()


class LeadingNetworks(LeadingDecoder, NetworkDecoder):
    """Rank 0's networks, in the hands of code that knows of no ranks."""


def open_target(
    folder: Path, config: EngineConfig, networks: NetworkConfig, device: torch.device,
    kind: type[NetworkDecoder] = NetworkDecoder, group: Group | None = None, **leading: Any,
) -> NetworkDecoder:  # fmt: skip
    """Return a rank's part of the target. kind: its class; leading: what a `LeadingDecoder` has."""
    names = name_networks(group.rank if group else 0)
    runners = [EngineRunner(folder / name, device, group) for name in names]
    return kind(
        config.checkpoint.model, *runners, sizes=networks.sizes, device=device,
        num_positions=config.num_positions, group=group, **leading,
    )  # fmt: skip


def open_part(folder: Path, device: torch.device, group: Group) -> NetworkDecoder:
    """Return the part of a rank other than 0."""
    config, networks = read_network_config(folder)
    check_machine(folder, networks, device)
    if logs.get_launched_rank() is not None:  # perhaps on another machine than rank 0
        Verification(folder, name_networks(group.rank)).finish()
    return open_target(folder, config, networks, device, group=group)


class TensorRTEngine(TorchEngine):
    """An engine folder of TensorRT's networks, on one GPU or on one of every rank."""

    name = TENSORRT

    def _read_config(self) -> None:
        self.config, self.networks = read_network_config(self.folder)
        find_network_problems(self.folder, self.config.checkpoint).raise_all()

    def _load(
        self, folder: Path, recorder: CudaRecorder | None, methods: Methods
    ) -> dict[str, Weight]:
        networks, drafter = self.networks, self.config.checkpoint.drafter
        check_machine(folder, networks, self.device)
        self.decoder = open_decoder(
            self._ranks, folder, self.device, (NetworkDecoder, LeadingNetworks),
            functools.partial(open_target, folder, self.config, networks, self.device),
        )  # fmt: skip
        if drafter and uses_drafter(methods):
            self.drafter_network = open_drafter(
                folder, drafter, self.config.checkpoint.model, self.device, networks.drafter_sizes
            )
        return {}

    def _keep(self) -> None:
        super()._keep()
        if hasattr(self, "drafter"):  # else loading failed
            drafter = self.drafter_network
            for runner in self.decoder.runners + (drafter.runners if drafter else []):
                runner.keep_kernels()


def open_engine(folder: Path, **options: Any) -> TensorRTEngine:
    """Load an engine folder; see `TorchEngine` for the options."""
    return TensorRTEngine(folder, **options)
