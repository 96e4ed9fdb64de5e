"""TensorRT-RTX standing for the `tensorrt` that TensorRT-LLM 0.14 imports.

Networks, layers, shapes and types are TensorRT's own. TensorRT-LLM's plugins become native layers
with the same output shapes. Each plugin's place, inputs and fields are recorded for whoever
computes the network. A matrix multiplication computes as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from specdec.trt.library import load_tensorrt


@dataclass
class Plugin:
    """What create_plugin was given."""

    kind: str
    fields: dict[str, Any]


@dataclass
class Place:
    """The native layer that stands where a plugin was added."""

    plugin: Plugin
    layer: Any
    inputs: list[Any]


@dataclass
class Creator:
    """A plugin's creator, by the plugin's registered name."""

    kind: str

    def create_plugin(self, name: str, collection: Any) -> Plugin:
        fields = {one.name: np.array(one.data) for one in list(collection)}
        return Plugin(self.kind, {key: v.item() if v.size == 1 else v for key, v in fields.items()})


@dataclass
class Registry:
    plugin_creator_list: list[Any] = field(default_factory=list)

    def get_plugin_creator(self, kind: str, version: str, namespace: str) -> Creator:
        assert (version, namespace) == ("1", "tensorrt_llm")
        return Creator(kind)


@dataclass
class Placed:
    """The networks of a process: the plugins of each, and what was handed to the builder."""

    trt: Any
    places: dict[int, list[Place]] = field(default_factory=dict)
    networks: list[Any] = field(default_factory=list)

    def add_plugin(self, network: Any, inputs: list[Any], plugin: Plugin) -> Any:
        layer = getattr(self, f"_add_{plugin.kind.lower()}")(network, inputs, plugin.fields)
        self.places.setdefault(id(network), []).append(Place(plugin, layer, inputs))
        return layer

    def keep_network(self, builder: Any, network: Any, config: Any) -> bytes:
        """What build_serialized_network does here."""
        self.networks.append(network)
        return b"not built"

    def _constant(self, network: Any, values: np.ndarray) -> Any:
        self.places.setdefault(-1, []).append(values)  # type: ignore[arg-type]  # lasts as we do
        return network.add_constant(values.shape, self.trt.Weights(values)).get_output(0)

    def _add_gptattention(self, network: Any, inputs: list[Any], fields: dict[str, Any]) -> Any:
        """[T, (heads + 2 kv heads) head] to [T, heads head]."""
        width = fields["num_heads"] * fields["head_size"]
        columns = self._constant(network, np.arange(width, dtype=np.int32))
        return network.add_gather(inputs[0], columns, 1)

    def _add_gemm(self, network: Any, inputs: list[Any], fields: dict[str, Any]) -> Any:
        turns = [
            self.trt.MatrixOperation.TRANSPOSE if fields[name] else self.trt.MatrixOperation.NONE
            for name in ("transa", "transb")
        ]
        return network.add_matrix_multiply(inputs[0], turns[0], inputs[1], turns[1])

    def _add_identity(self, network: Any, inputs: list[Any], fields: dict[str, Any]) -> Any:
        return network.add_identity(inputs[0])

    _add_allreduce = _add_cumsumlastdim = _add_identity

    def _add_allgather(self, network: Any, inputs: list[Any], fields: dict[str, Any]) -> Any:
        return network.add_concatenation(inputs * len(fields["group"]))

    def _add_lookup(self, network: Any, inputs: list[Any], fields: dict[str, Any]) -> Any:
        return network.add_gather(inputs[1], inputs[0], 0)


def _check_type(tensor: Any, kind: Any) -> None:
    """Tensors of a strongly typed network have a type already; 10.4 let it be set again."""
    assert tensor.dtype == kind, (tensor.name, tensor.dtype, kind)


def make_tensorrt() -> tuple[ModuleType, Placed]:
    """Return the module `tensorrt`, and what is recorded of its networks."""
    trt = load_tensorrt()
    placed = Placed(trt)
    trt.INetworkDefinition.add_plugin_v2 = lambda network, inputs, plugin: placed.add_plugin(
        network, inputs, plugin
    )
    trt.Builder.build_serialized_network = lambda *given: placed.keep_network(*given)
    trt.ITensor.dtype = property(trt.ITensor.dtype.fget, _check_type)
    trt.ITensor.location = property(lambda _: trt.TensorLocation.DEVICE, lambda *_: None)
    trt.get_plugin_registry = Registry
    trt.__version__ = "10.4.0"
    return trt, placed
