"""What a model family is: a table of names and a config reader; and what the readers share."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from specdec.errors import SpecDecError, shorten
from specdec.model.config import SLIDING, ModelConfig, list_layer_types
from specdec.model.config_reader import ConfigReader, count_experts, list_layouts, read_rotary
from specdec.model.experts import Experts, name_shared
from specdec.model.rotary_scaling import find_scaling_problems, get_kind
from specdec.model.tensors import EMBEDDING, HEAD
from specdec.system import logs
from specdec.trtllm.facts import DEFAULT_LABEL

from ..hf import HfFolder
from ..plan import SourceRows, are_equal

logger = logs.get_logger(__name__)

_LAYER = re.compile(r"\.layers\.(\d+)\.")
# What every loader computes again.
ROTARY_BUFFERS = ("*.rotary_emb.inv_freq",)
TANH_GELU = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """What the user decides about a checkpoint.

    `ModelConfig` has fields of the same names, but for those about experts and the version.
    moe_tp_size, moe_ep_size: None where nothing was said.
    """

    dtype: str
    tp_size: int
    pp_size: int
    use_parallel_embedding: bool
    embedding_sharding_dim: int
    share_embedding_table: bool
    moe_tp_size: int | None = None
    moe_ep_size: int | None = None
    trtllm_version: str = DEFAULT_LABEL

    @property
    def can_share(self) -> bool:
        """Whether a rank's part of the embedding has its part of the head, or all of it."""
        splits_columns = self.use_parallel_embedding and self.embedding_sharding_dim == 1
        return self.pp_size == 1 and not (splits_columns and self.tp_size > 1)


Describe = Callable[[ModelConfig, dict[str, Any]], dict[str, Any]]
BIASES = ("mlp_bias", "attn_bias")
ROTARY = ("rotary_base", "rotary_scaling")


def add_keys(*names: str, base: Describe | None = None, **constants: Any) -> Describe:
    """Return what adds keys to a checkpoint's config.json.

    base: what adds others first; names: of fields of `ModelConfig`; constants: the same for all.
    """

    def describe(model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
        config = config if base is None else base(model, config)
        return config | {name: getattr(model, name) for name in names} | constants

    return describe


# What an architecture of our own needs.
describe_rotary = add_keys(*BIASES, *ROTARY, "rotary_pct")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A Hugging Face model family.

    model_type: transformers' name of it, where that is not `name`.
    modules: canonical module -> the family's modules that make it, one below the other, or the
    `SourceRows` of them; `{layer}` stands for a layer's number, and weight and bias follow their
    module. Those with `{expert}` are repeated for each expert.
    prefixes: what the names of `modules` begin with, then what writers put in its place.
    ignored: patterns of tensors that carry no weights.
    always_shares: TensorRT-LLM's own checkpoints of the family store a tied head as the embedding
    alone.
    written_as: TensorRT-LLM's name of an architecture that computes the same; else a checkpoint
    has the family's own.
    prepare: a folder as `modules` and `read_config` want it, where they need another than there is;
    it gets the checkpoint's type, too.
    read_config: reads fields of `ModelConfig` out of a config.json; `own_arithmetic` is one of them
    where TensorRT-LLM has no class for the model, and one of the layout's where that is changed.
    describe: completes a checkpoint's config.json with the keys that TensorRT-LLM has for it.
    find_problem_014: what TensorRT-LLM 0.14 cannot express of a model, with a remedy, or None.
    """

    name: str
    model_type: str = ""
    architectures: tuple[str, ...]
    modules: Mapping[str, tuple[str | SourceRows, ...]]
    prefixes: tuple[str, ...] = ("model.", "")
    ignored: tuple[str, ...] = ROTARY_BUFFERS
    is_tied_by_default: bool = False
    always_shares: bool = False
    written_as: str = ""
    prepare: Callable[[HfFolder, str], HfFolder] = lambda folder, dtype: folder
    read_config: Callable[[ConfigReader, Layout], dict[str, Any]]
    describe: Describe = describe_rotary
    find_problem_014: Callable[[ModelConfig], tuple[str, str] | None] = lambda model: None

    def read_model(self, folder: HfFolder, layout: Layout) -> tuple[ModelConfig, bool]:
        """Return the model's configuration and whether its head is tied to the embedding."""
        reader = ConfigReader(folder.config, folder.path / "config.json")
        is_tied = reader.get_bool("tie_word_embeddings", self.is_tied_by_default)
        is_tied = is_tied and not self.stores_other_head(folder)
        if self.always_shares and is_tied and layout.can_share:
            splits = layout.use_parallel_embedding or layout.tp_size > 1
            layout = dataclasses.replace(
                layout, share_embedding_table=True, use_parallel_embedding=splits
            )
        elif layout.share_embedding_table:
            layout = self._share(folder, layout, is_tied=is_tied)
        values = self.read_config(reader, layout)
        reader.finish()
        for name, value, is_interleaved in list_layouts(folder.config):
            if is_interleaved:
                logger.warning(
                    "%s: %s is %s, which transformers' models of this family do not read: rotated"
                    " pairs are half-split, not interleaved",
                    folder.path, name, shorten(value),
                )  # fmt: skip
        fields = {field.name for field in dataclasses.fields(ModelConfig)}
        values = {key: value for key, value in vars(layout).items() if key in fields} | values
        architecture = self.written_as or self.architectures[0]
        return ModelConfig(architecture=architecture, **values), is_tied

    def list_tied(self, folder: HfFolder) -> list[str]:
        """The names of the embedding and of the head where both are one tensor, else none."""
        is_tied = folder.config.get("tie_word_embeddings", self.is_tied_by_default)
        if not is_tied or self.stores_other_head(folder, warns=False):
            return []
        return [
            parts[0].name for parts in self.find_source_rows([EMBEDDING, HEAD], folder).values()
        ]

    def stores_other_head(self, folder: HfFolder, *, warns: bool = True) -> bool:
        """Whether a folder whose config.json ties the head stores one that differs; then warn.

        transformers 5 takes such a head. Earlier versions take the embedding instead.
        """
        sources = self.find_source_rows([EMBEDDING, HEAD], folder)
        embedding, head = (sources[name][0].name for name in (EMBEDDING, HEAD))
        if not {embedding, head} <= folder.tensors.keys() or are_equal(folder, (embedding, head)):
            return False
        if not warns:
            return True
        logger.warning(
            "%s: config.json ties the head to the embedding, but %s differs from %s: the stored"
            " head is taken, as transformers 5 takes it; 4.x takes the embedding",
            folder.path, head, embedding,
        )  # fmt: skip
        return True

    def _share(self, folder: HfFolder, layout: Layout, *, is_tied: bool) -> Layout:
        if not is_tied:
            logger.warning(
                "%s: --use-embedding-sharing has no effect: the head is not tied to the embedding",
                folder.path,
            )
            return dataclasses.replace(layout, share_embedding_table=False)
        if layout.tp_size > 1 and not layout.use_parallel_embedding:
            logger.warning(
                "%s: every rank holds the whole shared table, of which a TensorRT-LLM rank's head"
                " takes a part; with --use-parallel-embedding it holds that part",
                folder.path,
            )
        return layout

    def is_turned(self, folder: HfFolder, name: str) -> bool:
        """Whether a tensor of a folder is stored as [in, out]; a computed one never is."""
        module = name.rpartition(".")[0].rpartition(".")[2]
        parts = (
            part for own in self.modules.values() for part in own if isinstance(part, SourceRows)
        )
        turned = {part.name.rpartition(".")[2] for part in parts if part.is_transposed}
        return module in turned and name not in folder.computed

    def find_source_rows(
        self, canonical: Iterable[str], folder: HfFolder | None = None, num_experts: int = 1
    ) -> dict[str, tuple[SourceRows, ...]]:
        """Map canonical tensor names to the family's own, under the prefix that a folder has."""
        canonical = list(canonical)
        present = folder.tensors if folder is not None else {}
        namings = [
            self._list_parts(canonical, prefix, num_experts, present) for prefix in self.prefixes
        ]
        if folder is None:
            return namings[0]
        names = [{part.name for parts in n.values() for part in parts} for n in namings]
        shared = set.intersection(*names)
        found = [sorted((own - shared) & folder.tensors.keys()) for own in names]
        chosen = [naming for naming, own in zip(namings, found, strict=True) if own]
        if len(chosen) > 1:
            examples = " and ".join(own[0] for own in found if own)
            raise SpecDecError(
                f"{folder.path} has {len(chosen)} namings of one model, as {examples}",
                "keep one of them: which holds the model's weights cannot be known",
            )
        return chosen[0] if chosen else namings[0]

    def _list_parts(
        self, canonical: Iterable[str], prefix: str, num_experts: int, present: Collection[str]
    ) -> dict[str, tuple[SourceRows, ...]]:
        parts = {}
        for name in canonical:
            module, _, kind = name.rpartition(".")
            match = _LAYER.search(module)
            layer = match.group(1) if match else ""
            generic = _LAYER.sub(".layers.{layer}.", module)
            # TensorRT-LLM 0.14's names, see `Experts.shared_name`.
            own = self.modules[generic.replace("}.shared_expert", "}.mlp.shared_expert")]
            has_experts = any("{expert}" in str(part) for part in own)
            parts[name] = tuple(
                self._name_part(part, layer, kind, prefix, expert)
                for expert in range(num_experts if has_experts else 1)
                for part in own
            )
            stem, separator, _ = parts[name][0].name.partition(".experts.")
            fused = f"{stem}{separator}{'down_proj' if len(own) == 1 else 'gate_up_proj'}"
            if has_experts and fused in present:
                parts[name] = tuple(_list_fused(fused, len(own), num_experts))
        return parts

    def _name_part(
        self, part: str | SourceRows, layer: str, kind: str, prefix: str, expert: int
    ) -> SourceRows:
        part = SourceRows(part) if isinstance(part, str) else part
        name = part.name
        if name.startswith(self.prefixes[0]):
            name = prefix + name.removeprefix(self.prefixes[0])
        return dataclasses.replace(part, name=f"{name.format(layer=layer, expert=expert)}.{kind}")


def _list_fused(name: str, num_parts: int, num_experts: int) -> Iterator[SourceRows]:
    """The parts of all experts in one tensor, as transformers 5 has them in memory.

    The half of each expert that is activated comes first there; a checkpoint has it second.
    """
    for expert in range(num_experts):
        for place in reversed(range(num_parts)):
            yield SourceRows(
                name, share=num_parts * expert + place, num_shares=num_parts * num_experts,
                num_matrices=num_experts,
            )  # fmt: skip


def tie_head(
    family: Family, folder: HfFolder, parts: dict[str, tuple[SourceRows, ...]]
) -> dict[str, tuple[SourceRows, ...]]:
    """Let a tied head come from the embedding, or both from the head where it alone is stored."""
    embedding, head = parts[EMBEDDING], family.find_source_rows([HEAD])[HEAD]
    if embedding[0].name not in folder.tensors and head[0].name in folder.tensors:
        embedding = (dataclasses.replace(embedding[0], name=head[0].name),)
    return {name: embedding if name in (EMBEDDING, HEAD) else own for name, own in parts.items()}


def read_decoder(
    reader: ConfigReader,
    *,
    norm_epsilon: tuple[str, float] = ("rms_norm_eps", 1e-6),
    max_positions: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    absent_head_dim: int | None = None,
    rotary_fraction: float | None = None,
    rotary_base: float = 10000.0,
    local_base: float | None = None,
    hidden_act: str = "silu",
) -> dict[str, Any]:
    """Read the fields of a rotary model as `ModelConfig` names them, problems into `reader`.

    The arguments are what transformers takes for an absent field; `norm_epsilon` has the field's
    name too. head_dim: also for null; absent_head_dim: not for null, which then means the hidden
    size over the heads. rotary_fraction: None where the family rotates whole heads. local_base:
    None where sliding layers have the rotary embedding of the others.
    """
    if "head_dim" not in reader.config:
        head_dim = head_dim or absent_head_dim
    num_heads, hidden_size = reader.get_int("num_attention_heads"), reader.get_int("hidden_size")
    if reader.config.get("head_dim") is None and head_dim is None and hidden_size % num_heads:
        reader.refuse(
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}",
            "give head_dim",
        )
    if "num_key_value_heads" in reader.config or num_kv_heads is None:
        num_kv_heads = num_heads  # what null means
    rotary = read_rotary(reader)
    fraction, scaling = rotary.fraction or rotary_fraction or 1.0, rotary.scaling
    if rotary_fraction is None and fraction != 1:
        reader.refuse(
            f"partial_rotary_factor is {fraction:g}",
            "models of this family rotate whole heads: remove the field if it was copied from"
            " another config.json, as drafters have it from their targets; if this one was trained"
            " so, it is not supported",
        )
    if rotary.by_layer_type and local_base is None:
        reader.refuse(
            "rope_parameters has an object for each type of layer",
            "models of this family rotate alike in all layers; this one is not supported",
        )
    values: dict[str, Any] = {
        "vocab_size": reader.get_int("vocab_size"),
        "hidden_size": hidden_size,
        "num_hidden_layers": reader.get_int("num_hidden_layers"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": reader.get_int("num_key_value_heads", num_kv_heads),
        "head_size": reader.get_int("head_dim", head_dim or max(1, hidden_size // num_heads)),
        "intermediate_size": reader.get_int("intermediate_size"),
        "norm_epsilon": reader.get_float(*norm_epsilon),
        "max_position_embeddings": reader.get_int("max_position_embeddings", max_positions),
        "hidden_act": reader.get_text("hidden_act", hidden_act),
        "rotary_base": rotary.base or rotary_base,
        "rotary_scaling": scaling,
        "rotary_pct": fraction,
    }
    if scaling is not None and get_kind(scaling) == "longrope":
        values["original_max_position_embeddings"] = _read_original_length(reader, scaling)
    for fact, remedy in find_scaling_problems(
        scaling,
        rotary_size=int(values["head_size"] * values["rotary_pct"]),
        rotary_base=values["rotary_base"],
        max_positions=values["max_position_embeddings"],
        original_positions=values.get("original_max_position_embeddings"),
    ):
        reader.refuse(fact, remedy)
    if local_base is not None:
        if rotary.local_scaling:
            reader.refuse(
                f"rope_parameters scales sliding layers: {shorten(rotary.local_scaling)}",
                "models of this family scale full layers only; this one is not supported",
            )
        values["rope_local_base_freq"] = rotary.local_base or local_base
    return values


def decoder(*more: More, **absent: Any) -> Callable[[ConfigReader, Layout], dict[str, Any]]:
    """Return a `read_config`: what `read_decoder` reads, then what each of `more` adds."""

    def read_config(reader: ConfigReader, layout: Layout) -> dict[str, Any]:
        values = read_decoder(reader, **absent)
        for read in more:
            values |= read(reader, layout, values)
        return values

    return read_config


# Reads further fields of `ModelConfig`, given those that were read before.
More = Callable[[ConfigReader, Layout, Mapping[str, Any]], Mapping[str, Any]]


def read_biases(reader: ConfigReader, _: Layout, __: Mapping[str, Any]) -> dict[str, Any]:
    """Read whether the attention and the MLP have biases."""
    names = {"attn_bias": "attention_bias", "mlp_bias": "mlp_bias"}
    return {name: reader.get_bool(own, False) for name, own in names.items()}


def read_experts(
    reader: ConfigReader,
    layout: Layout,
    values: Mapping[str, Any],
    *,
    num: int,
    top_k: int,
    renormalizes: bool,
    inner: tuple[str, int] | None = None,
    shared_inner: tuple[str, int] | None = None,
) -> dict[str, Any]:
    """Read the fields of a mixture of experts that `ModelConfig` has, problems into `reader`.

    values: what `read_decoder` has read. The other arguments are what transformers takes for an
    absent field, `inner` and `shared_inner` with its name; without `inner` an expert has the size
    of an MLP.
    """
    if values["hidden_act"] != "silu":
        reader.refuse(
            f"hidden_act is {shorten(values['hidden_act'])}", "experts are supported with silu"
        )
    tp_size, moe_tp_size, moe_ep_size = layout.tp_size, layout.moe_tp_size, layout.moe_ep_size
    if moe_ep_size is None:
        moe_ep_size = 1 if moe_tp_size is None else max(1, tp_size // moe_tp_size)
    experts = Experts(
        num=count_experts(reader, num),
        top_k=reader.get_int("num_experts_per_tok", top_k),
        inner=values["intermediate_size"] if inner is None else reader.get_int(*inner),
        shared_inner=0 if shared_inner is None else reader.get_int(*shared_inner),
        renormalizes=renormalizes,
        tp_size=moe_tp_size or max(1, tp_size // moe_ep_size),
        ep_size=moe_ep_size,
        shared_name=name_shared(layout.trtllm_version),
    )
    return {"experts": experts, "hidden_act": "swiglu"}


def refuse_unless(reader: ConfigReader, name: str, *allowed: Any, remedy: str) -> None:
    """Note a problem unless a field is absent, null, or has one of the values."""
    value = reader.config.get(name)
    if value is not None and value not in allowed:
        reader.refuse(f"{name} is {value!r}", remedy)


def read_plain_heads(
    reader: ConfigReader, heads: str, hidden: str, activation: str
) -> dict[str, Any]:
    """Read the sizes of a decoder whose heads are as many for keys as for queries.

    heads, hidden: what their numbers are called; activation: the one of no field.
    """
    num_heads, hidden_size = reader.get_int(heads), reader.get_int(hidden)
    if hidden_size % num_heads:
        reader.refuse(
            f"{hidden} {hidden_size} is not a multiple of {heads} {num_heads}", f"correct {heads}"
        )
    return {
        "vocab_size": reader.get_int("vocab_size"),
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_size": max(1, hidden_size // num_heads),
        "hidden_act": name_activation(reader, reader.get_text("activation_function", activation)),
    }


def name_activation(reader: ConfigReader, value: str) -> str:
    """Return TensorRT-LLM's name of a plain MLP's activation; warn where it computes another."""
    if value == "gelu":
        logger.warning(
            "%s: activation gelu is the exact one; TensorRT-LLM computes its tanh form under this"
            " name, which differs by up to 5e-4",
            reader.path,
        )
    return "gelu_new" if value == "gelu_pytorch_tanh" else value


def read_windows(
    reader: ConfigReader,
    num_layers: int,
    window: int | None,
    *,
    first_layer: int = 0,
    pattern: int | None = None,
) -> dict[str, Any]:
    """Return the fields that tell which layers have the window, those from `first_layer` on.

    pattern: every so many layers one has not, and even a model without a window tells them apart.
    `layer_types`, which newer transformers write, tells the layers itself.
    """
    types = list_layer_types(num_layers, pattern, first_layer)
    listed = reader.config.get("layer_types")
    if isinstance(listed, list):
        types = tuple(listed)
    if pattern is not None:
        return {"sliding_window": window, "layer_types": types}
    if window is None or SLIDING not in types:
        return {}
    is_mixed = any(kind != SLIDING for kind in types)
    return {"sliding_window": window, "layer_types": types if is_mixed else None}


def refuse_layer_types(reader: ConfigReader, kind: str) -> None:
    """Note a problem where `layer_types` names other layers than those of one kind."""
    listed = reader.config.get("layer_types")
    if isinstance(listed, list) and any(each != kind for each in listed):
        reader.refuse(
            f"layer_types is {shorten(listed)}",
            f"models of this family are supported whose layers are all {kind}",
        )


def get_window(reader: ConfigReader, default: int | None) -> int | None:
    """Return the sliding_window field; null means none, an absent one the default."""
    if "sliding_window" not in reader.config:
        return default
    return None if reader.config["sliding_window"] is None else reader.get_int("sliding_window")


def _read_original_length(reader: ConfigReader, scaling: Mapping[str, Any]) -> int:
    """Length at which longrope switches its factors; in the scaling, or alongside it."""
    name = "original_max_position_embeddings"
    inner, outer = scaling.get(name), reader.config.get(name)
    if inner is None:
        return reader.get_int(name)
    if outer is not None and outer != inner:
        reader.refuse(f"{name} is {outer} and in the scaling {inner}", "remove the wrong one")
    return reader.enter(scaling).get_int(name)
