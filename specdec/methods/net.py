"""Drafters that have decoder layers of their own: EAGLE's, DFlash's and MTP's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from specdec.errors import Problems
from specdec.model.config import BOUNDS, ModelConfig
from specdec.model.tensors import (
    EMBEDDING,
    HEAD,
    Shard,
    TensorSpec,
    list_layer_tensors,
    list_norm,
    list_target_tensors,
)

from .base import (
    OBJECT,
    POSITIVE,
    USE_ITS_DRAFTER,
    DrafterParams,
    Rule,
    add_uneven,
    check,
    or_null,
    whole_number,
)

# Facts of a checkpoint about the layers that draft, in a Llama's field names.
NET_RULES = {
    **{
        name: whole_number(*BOUNDS[name])
        for name in (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_size", "intermediate_size",
        )
    },
    "norm_epsilon": POSITIVE,
    "max_position_embeddings": whole_number(*BOUNDS["max_position_embeddings"]),
    "rotary_base": POSITIVE,
    "rotary_scaling": or_null(OBJECT, "an object or null"),
    "hidden_act": Rule("'silu'", lambda value: value == "silu"),
}  # fmt: skip


class NetParams(DrafterParams):
    """Parameters of such a drafter. net: its layers, with the target's vocabulary.

    NET: the key of a checkpoint's config.json that tells of the layers, by RULES; they are those of
    NET_ARCHITECTURE.
    """

    TITLE: ClassVar[str]
    NET: ClassVar[str]
    NET_ARCHITECTURE: ClassVar[str] = "LlamaForCausalLM"
    RULES: ClassVar[Mapping[str, Rule]] = NET_RULES
    net: ModelConfig

    if TYPE_CHECKING:  # a field of DFlash's, a property of EAGLE's

        @property
        def draft_vocab_size(self) -> int:
            """Tokens that can be drafted."""

    @classmethod
    def make_net(cls, values: Mapping[str, Any], dtype: str) -> ModelConfig:
        """Return the drafter's layers from values by RULES, for the target's vocabulary."""
        fields = {name: values[name] for name in cls.RULES}
        if fields.get("layer_types") is not None:
            fields["layer_types"] = tuple(fields["layer_types"])
        return ModelConfig(architecture=cls.NET_ARCHITECTURE, dtype=dtype, **fields)

    @classmethod
    def read_net(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the layers of a checkpoint's config.json; raise SpecDecError for what is wrong."""
        key, values = cls.NET, config.get(cls.NET)
        check(key, values, OBJECT)
        assert isinstance(values, dict)
        for name, rule in cls.RULES.items():
            check(f"{key}.{name}", values.get(name), rule)
        fields = {name: values.get(name) for name in cls.RULES}
        net = cls.make_net(fields, config.get("dtype", "float32"))
        heads = net.num_attention_heads
        words = f"a divisor of {key}.num_attention_heads={heads}"
        check(
            f"{key}.num_key_value_heads", net.num_key_value_heads,
            Rule(words, lambda number: heads % number == 0),
        )  # fmt: skip
        problems = net.find_scaling_problems()
        Problems((f"{key}: {fact}", remedy) for fact, remedy in problems).raise_all()
        return net

    def describe_net(self) -> dict[str, Any]:
        """Return the object of config.json that `read_net` reads."""
        values = {name: getattr(self.net, name) for name in self.RULES}
        lists = {name: list(value) for name, value in values.items() if isinstance(value, tuple)}
        return values | lists

    def make_net_model(self, model: ModelConfig) -> ModelConfig:
        """Return the net for `model` as a model of its own, with the drafted vocabulary."""
        names = ("dtype", "use_parallel_embedding", "embedding_sharding_dim", "tp_size")
        fields: dict[str, Any] = {name: getattr(model, name) for name in names}
        return dataclasses.replace(self.net, vocab_size=self.draft_vocab_size, **fields)

    def compare_sizes(self, **targets: int) -> Problems:
        """List the sizes that the net has otherwise than the target."""
        problems = Problems()
        for name, size in targets.items():
            if (net_size := getattr(self.net, name)) != size:
                fact = f"the {self.TITLE} drafter's {name} is {net_size}, the target's {size}"
                problems.add(fact, USE_ITS_DRAFTER)
        return problems

    def add_uneven(self, problems: Problems, tp_size: int) -> Problems:
        """Add the sizes of the net that do not split over so many ranks; return the problems."""
        names = ("num_attention_heads", "intermediate_size", "hidden_size")
        sizes = {name: getattr(self.net, name) for name in names}
        if tp_size % self.net.num_key_value_heads:  # else a rank has a copy of one
            sizes["num_key_value_heads"] = self.net.num_key_value_heads
        add_uneven(problems, f"the {self.TITLE} drafter's", sizes, tp_size)
        return problems

    def list_net_tensors(self, model: ModelConfig, width: int) -> dict[str, TensorSpec]:
        """List the tensors that all these drafters have. width: input columns of `fc`."""
        net = self.make_net_model(model)
        hidden, vocab_size = net.hidden_size, net.vocab_size
        shard = list_target_tensors(model)[EMBEDDING].shard
        tensors = {
            "drafter.vocab_embedding.weight": TensorSpec((model.vocab_size, hidden), shard),
            "drafter.fc.weight": TensorSpec((hidden, width), Shard.ROWS),
        }
        for layer in range(net.num_hidden_layers):
            for name, spec in list_layer_tensors(net).items():
                if spec.shard is Shard.QKV:
                    spec = dataclasses.replace(spec, owner=net)
                tensors[f"drafter.layers.{layer}.{name}"] = spec
        tensors |= list_norm(net, "drafter.ln_f")
        tensors[HEAD] = TensorSpec((vocab_size, hidden), Shard.VOCAB)
        if vocab_size < model.vocab_size:
            tensors["d2t"] = TensorSpec((vocab_size,), Shard.REPLICATED)
        return tensors
