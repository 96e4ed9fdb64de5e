"""The tensorrt backend: an engine folder of networks, run by the same loop as the torch backend."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch

from specdec import logs
from specdec.decode.drafters import Drafting, choose_methods, make_proposer, name_methods
from specdec.decode.drafters.base import Drafter
from specdec.decode.engine import TorchEngine
from specdec.decode.ranks.leader import LeadingDecoder, lead_decoder
from specdec.decode.ranks.processes import Ranks
from specdec.engine.decoder import Decoder
from specdec.engine.graphs import CudaRecorder
from specdec.engine.group import Group
from specdec.engine.layout import EngineConfig, read_engine_config
from specdec.engine.verification import Verification
from specdec.errors import Problems, SpecDecError
from specdec.files.folders import TENSORRT
from specdec.files.reading import read_json
from specdec.model.checkpoint import CheckpointConfig
from specdec.trt.decoder import NetworkDecoder
from specdec.trt.drafters import list_networks, list_observed, open_drafter
from specdec.trt.library import (
    OTHER,
    describe_library,
    explain_capability,
    list_capabilities,
    load_tensorrt,
)
from specdec.trt.network import Sizes
from specdec.trt.runtime import EngineRunner

# Rows of positions that caches have beyond the longest text at least: of drafts, and of the trees
# that a draft model runs.
SPARE_POSITIONS = 128


def name_networks(rank: int) -> tuple[str, str]:
    """The files of a rank's networks: its layers, and its head."""
    return f"rank{rank}.engine", f"head{rank}.engine"


@dataclasses.dataclass(frozen=True)
class NetworkConfig:
    """What an engine's networks were built for, as its config.json has it.

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
        numbers = [number for each in sizes for number in dataclasses.astuple(each)]
        if wrong := [name for name in names if not isinstance(name, str)]:
            raise TypeError(f"{wrong[0]!r} is no name")
        if wrong := [number for number in numbers if type(number) is not int or number < 1]:
            raise TypeError(f"{wrong[0]!r} is no size")
        found = NetworkConfig(names[0], names[1:], *sizes)
    except (KeyError, TypeError) as error:
        raise SpecDecError(
            f"{folder}/config.json: {TENSORRT}_config is not what this version of specdec writes:"
            f" {error}",
            "build the engine again",
        ) from error
    return config, found


def list_files(checkpoint: CheckpointConfig) -> list[str]:
    """The files of an engine's networks."""
    ranks = range(checkpoint.model.tp_size)
    names = [name for rank in ranks for name in name_networks(rank)]
    return names + list_networks(checkpoint.drafter)


def find_network_problems(folder: Path, checkpoint: CheckpointConfig) -> Problems:
    """The files that an engine lacks."""
    return Problems(
        (f"{folder} lacks {name}", "copy the folder again, or build the engine again")
        for name in list_files(checkpoint)
        if not (folder / name).is_file()
    )


def find_machine_problems(
    folder: Path, networks: NetworkConfig, library: str, usable: list[str], name: str,
    capability: str,
) -> Problems:  # fmt: skip
    """What keeps an engine from running on a GPU with the TensorRT that is installed.

    usable: the compute capabilities that this builds for, none where it builds for its machine's.
    """
    fact = explain_capability(library, usable, name, capability)
    return Problems.where(
        (library != networks.library,
         f"{folder} was built by {networks.library}, and {library} is installed",
         "install the release that built it, or build the engine again"),
        (capability not in networks.compute_capabilities,
         f"{folder} was built for compute capability {', '.join(networks.compute_capabilities)},"
         f" and {name} has {capability}",
         f"{fact}: {OTHER}" if fact else f"build it again with --compute-capability {capability}"),
    )  # fmt: skip


def check_machine(folder: Path, networks: NetworkConfig, device: torch.device) -> None:
    """Raise SpecDecError where an engine does not run: no GPU, another one, another TensorRT."""
    if device.type != "cuda":
        raise SpecDecError(
            f"{folder} is an engine of TensorRT, which runs on a GPU, and torch sees none"
            if not torch.cuda.is_available()
            else f"--device {device.type}: {folder} is an engine of TensorRT",
            "run it on a machine with a GPU, or build with --backend torch",
        )
    trt = load_tensorrt()
    find_machine_problems(
        folder, networks, describe_library(trt), list_capabilities(trt),
        torch.cuda.get_device_name(device),
        "{}.{}".format(*torch.cuda.get_device_capability(device)),
    ).raise_all()  # fmt: skip


class LeadingNetworks(LeadingDecoder, NetworkDecoder):
    """Rank 0's networks, in the hands of code that knows of no ranks."""


def open_target(
    folder: Path, config: EngineConfig, networks: NetworkConfig, device: torch.device,
    group: Group | None = None, ranks: Ranks | None = None, handle: int = 0,
) -> Any:  # fmt: skip
    """A rank's part of the target. ranks, handle: of rank 0, which leads others."""
    group = ranks.group if ranks else group
    names = name_networks(group.rank if group else 0)
    runners = [EngineRunner(folder / name, device, group) for name in names]
    kind: Any = LeadingNetworks if ranks else NetworkDecoder
    return kind(
        config.checkpoint.model, *runners, sizes=networks.sizes, device=device,
        num_positions=config.num_positions,
        **({"ranks": ranks, "handle": handle} if ranks else {"group": group}),
    )  # fmt: skip


def open_part(folder: Path, device: torch.device, group: Group) -> Decoder:
    """The part of a rank other than 0."""
    config, networks = read_network_config(folder)
    check_machine(folder, networks, device)
    if logs.get_launched_rank() is not None:  # perhaps on another machine than rank 0
        Verification(folder, name_networks(group.rank)).finish()
    decoder: Decoder = open_target(folder, config, networks, device, group)
    return decoder


class TensorRTEngine(TorchEngine):
    """An engine folder of TensorRT's networks, on one GPU or on one of every rank."""

    name = TENSORRT

    def _read_config(self) -> None:
        self.config, self.networks = read_network_config(self.folder)
        find_network_problems(self.folder, self.config.checkpoint).raise_all()

    def _load(
        self,
        folder: Path,
        recorder: CudaRecorder | None,
        drafting: Drafting | None,
        *,
        speculate: bool,
    ) -> None:
        check_machine(folder, self.networks, self.device)
        config, networks = self.config, self.networks
        model, drafter = config.checkpoint.model, config.checkpoint.drafter
        make = functools.partial(open_target, folder, config, networks, self.device)
        ranks = self._ranks
        self.decoder = (
            lead_decoder(ranks, folder, self.device, make) if ranks is not None else make()
        )
        methods = choose_methods(config, drafting) if speculate else ()
        if any(method.source == "checkpoint" for group in methods for method in group):
            assert drafter is not None
            self.decoder.observed_layers = list_observed(drafter)
            self.drafter_network = open_drafter(
                folder, drafter, model, self.device, networks.drafter_sizes
            )
        self.proposer: Drafter = make_proposer(self, methods, {}, drafting)
        self.method = name_methods(methods)
