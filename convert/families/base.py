"""Model family: a table of tensor names and a config reader; and functions that readers share."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from specdec.errors import SpecDecError, shorten
from specdec.model.config import SLIDING, ModelConfig, list_layer_types
from specdec.model.config_reader import (
    ConfigReader,
    Rotary,
    count_experts,
    list_layouts,
    read_rotary,
)
from specdec.model.experts import Experts, name_shared
from specdec.model.rotary_scaling import find_scaling_problems, get_kind
from specdec.model.tensors import EMBEDDING, HEAD, ROUTER
from specdec.system import logs
from specdec.trtllm.facts import DEFAULT_LABEL

from ..hf import HfFolder
from ..plan import SourceRows, are_equal

# Notes about what runs a checkpoint elsewhere: who did not ask for it does not read them.
BACKEND_NOTES = "specdec.convert.backends"
logger = logs.get_logger(__name__)
backend_logger = logs.get_logger(BACKEND_NOTES)

_LAYER = re.compile(r"\.layers\.(\d+)\.")
# Tensors that every loader computes again.
ROTARY_BUFFERS = ("*.rotary_emb.inv_freq",)
TANH_GELU = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of a checkpoint, as the user's flags decide it.

    `ModelConfig` has fields of the same names, but for those about experts and the version.
    moe_tp_size, moe_ep_size: None where the flag is not given.
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

    def split_experts(self) -> tuple[int, int]:
        """Return over how many ranks each expert is split, and over how many the experts are."""
        ep_size = self.moe_ep_size
        if ep_size is None:
            ep_size = 1 if self.moe_tp_size is None else max(1, self.tp_size // self.moe_tp_size)
        return self.moe_tp_size or max(1, self.tp_size // ep_size), ep_size

    @property
    def can_share(self) -> bool:
        """Return whether a rank's rows of the embedding have its rows of the head."""
        splits_columns = self.use_parallel_embedding and self.embedding_sharding_dim == 1
        return self.pp_size == 1 and not (splits_columns and self.tp_size > 1)


Describe = Callable[[ModelConfig, dict[str, Any]], dict[str, Any]]
BIASES = ("mlp_bias", "attn_bias")
ROTARY = ("rotary_base", "rotary_scaling")


def add_keys(*names: str, base: Describe | None = None, **constants: Any) -> Describe:
    """Return a function that adds keys to a checkpoint's config.json.

    base: a function that adds others first; names: of fields of `ModelConfig`; constants: keys that
    have one value for all models.
    """

    def describe(model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
        config = config if base is None else base(model, config)
        return config | {name: getattr(model, name) for name in names} | constants

    return describe


# The keys that an architecture of our own needs.
describe_rotary = add_keys(*BIASES, *ROTARY, "rotary_pct")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A Hugging Face model family.

    model_type: transformers' name of it, where that is not `name`.
    modules: canonical module -> the family's modules that make it, one below the other, or the
    `SourceRows` of them; `{layer}` stands for a layer's number, and weight and bias follow their
    module. Those with `{expert}` are repeated for each expert. dense_modules: those that a model
    without experts has in their place.
    prefixes: the beginning of the names of `modules`, then those that writers put in its place.
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
    find_problem_014: returns a fact that TensorRT-LLM 0.14 cannot express, with a remedy, or None.
    """

    name: str
    model_type: str = ""
    architectures: tuple[str, ...]
    modules: Mapping[str, tuple[str | SourceRows, ...]]
    dense_modules: Mapping[str, tuple[str | SourceRows, ...]] = dataclasses.field(
        default_factory=dict
    )
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
        layout = self._choose_sharing(folder, layout, is_tied=is_tied)
        values = self.read_config(reader, layout)
        _refuse_bidirectional(reader)
        if "layer_sizes" not in values:
            _refuse_layer_fields(reader)
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
        """Return the names of embedding and head where both are one tensor, else none."""
        is_tied = folder.config.get("tie_word_embeddings", self.is_tied_by_default)
        if not is_tied or self.stores_other_head(folder, warns=False):
            return []
        sources = self.find_source_rows([EMBEDDING, HEAD], folder)
        return [rows[0].name for rows in sources.values()]

    def stores_other_head(self, folder: HfFolder, *, warns: bool = True) -> bool:
        """Return whether a folder whose config.json ties the head stores another one; then warn.

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

    def _choose_sharing(self, folder: HfFolder, layout: Layout, *, is_tied: bool) -> Layout:
        """Return the layout with a tied head stored as the embedding alone, or not."""
        if self.always_shares and is_tied and layout.can_share:
            splits = layout.use_parallel_embedding or layout.tp_size > 1
            return dataclasses.replace(
                layout, share_embedding_table=True, use_parallel_embedding=splits
            )
        if not layout.share_embedding_table:
            return layout
        if not is_tied:
            logger.warning(
                "%s: --use-embedding-sharing has no effect: the head is not tied to the embedding",
                folder.path,
            )
            return dataclasses.replace(layout, share_embedding_table=False)
        if layout.tp_size > 1 and not layout.use_parallel_embedding:
            backend_logger.warning(
                "%s: every rank holds the whole shared table, of which a TensorRT-LLM rank's head"
                " takes a part; with --use-parallel-embedding it holds that part",
                folder.path,
            )
        return layout

    def is_turned(self, folder: HfFolder, name: str) -> bool:
        """Return whether a tensor of a folder is stored as [in, out]; a computed one never is."""
        module = name.rpartition(".")[0].rpartition(".")[2]
        candidates = (
            rows
            for modules in self.modules.values()
            for rows in modules
            if isinstance(rows, SourceRows)
        )
        turned_modules = {rows.name.rpartition(".")[2] for rows in candidates if rows.is_transposed}
        return module in turned_modules and name not in folder.computed

    def find_source_rows(
        self, canonical: Iterable[str], folder: HfFolder | None = None, num_experts: int = 1
    ) -> dict[str, tuple[SourceRows, ...]]:
        """Map canonical tensor names to the family's own, under the prefix that a folder has."""
        canonical = list(canonical)
        present_names = folder.tensors if folder is not None else {}
        namings = [
            self._list_source_rows(canonical, prefix, num_experts, present_names)
            for prefix in self.prefixes
        ]
        if folder is None:
            return namings[0]
        return _choose_naming(folder, namings)

    def _list_source_rows(
        self, canonical: Iterable[str], prefix: str, num_experts: int,
        present_names: Collection[str],
    ) -> dict[str, tuple[SourceRows, ...]]:  # fmt: skip
        """Map canonical tensor names to the family's own, under one prefix."""
        source_rows, family_modules = {}, {**self.modules}
        if not any(name.endswith(ROUTER) for name in canonical):
            family_modules |= self.dense_modules
        for name in canonical:
            module, _, kind = name.rpartition(".")
            match = _LAYER.search(module)
            layer = match.group(1) if match else ""
            generic = _LAYER.sub(".layers.{layer}.", module)
            # TensorRT-LLM 0.14's names, see `Experts.shared_name`.
            modules = family_modules[generic.replace("}.shared_expert", "}.mlp.shared_expert")]
            has_experts = any("{expert}" in str(rows) for rows in modules)
            source_rows[name] = tuple(
                self._name_rows(rows, layer, kind, prefix, expert)
                for expert in range(num_experts if has_experts else 1)
                for rows in modules
            )
            stem, separator, _ = source_rows[name][0].name.partition(".experts.")
            fused = f"{stem}{separator}{'down_proj' if len(modules) == 1 else 'gate_up_proj'}"
            if has_experts and fused in present_names:
                source_rows[name] = tuple(_list_fused(fused, len(modules), num_experts))
        return source_rows

    def _name_rows(
        self, rows: str | SourceRows, layer: str, kind: str, prefix: str, expert: int
    ) -> SourceRows:
        """Return the rows of a module as those of a tensor of a layer, an expert and a prefix."""
        rows = SourceRows(rows) if isinstance(rows, str) else rows
        name = rows.name
        if name.startswith(self.prefixes[0]):
            name = prefix + name.removeprefix(self.prefixes[0])
        return dataclasses.replace(rows, name=f"{name.format(layer=layer, expert=expert)}.{kind}")


def _refuse_bidirectional(reader: ConfigReader) -> None:
    """Note a model whose tokens attend to later ones, as transformers 5 computes any family's.

    It takes null for false where it masks by itself, and for true where torch does.
    """
    if (is_causal := reader.config.get("is_causal", True)) is not True:
        reader.refuse(
            f"is_causal is {shorten(is_causal)}: tokens that attend to later ones write no text",
            "give a model of text; if this is one, set is_causal to true",
        )


def _refuse_layer_fields(reader: ConfigReader) -> None:
    """Note fields that transformers 5 gives single layers of any family."""
    if fields := reader.get_object("per_layer_config"):
        reader.refuse(
            f"per_layer_config is {shorten(fields)}: some layers have fields of their own",
            "models of this family are supported whose layers are alike, but for layer_types",
        )


def _choose_naming(
    folder: HfFolder, namings: Sequence[dict[str, tuple[SourceRows, ...]]]
) -> dict[str, tuple[SourceRows, ...]]:
    """Return the naming of which a folder has tensors, by default the first; SpecDecError for two.

    Names that all of the namings have tell nothing.
    """
    names = [{rows.name for module_rows in n.values() for rows in module_rows} for n in namings]
    common_names = set.intersection(*names)
    signs = [sorted((own_names - common_names) & folder.tensors.keys()) for own_names in names]
    matches = [naming for naming, names in zip(namings, signs, strict=True) if names]
    if len(matches) > 1:
        examples = " and ".join(names[0] for names in signs if names)
        raise SpecDecError(
            f"{folder.path} has {len(matches)} namings of one model, as {examples}",
            "keep one of them: which holds the model's weights cannot be known",
        )
    return matches[0] if matches else namings[0]


def _list_fused(name: str, num_halves: int, num_experts: int) -> Iterator[SourceRows]:
    """Yield the rows of each expert in one tensor, as transformers 5 has them in memory.

    The half of each expert that is activated comes first there; a checkpoint has it second.
    """
    for expert in range(num_experts):
        for half in reversed(range(num_halves)):
            yield SourceRows(
                name, share=num_halves * expert + half, num_shares=num_halves * num_experts,
                num_matrices=num_experts,
            )  # fmt: skip


def tie_head(
    family: Family, folder: HfFolder, source_rows: dict[str, tuple[SourceRows, ...]]
) -> dict[str, tuple[SourceRows, ...]]:
    """Let a tied head come from the embedding, or both from the head where it alone is stored."""
    embedding, head = source_rows[EMBEDDING], family.find_source_rows([HEAD])[HEAD]
    if embedding[0].name not in folder.tensors and head[0].name in folder.tensors:
        embedding = (dataclasses.replace(embedding[0], name=head[0].name),)
    return {
        name: embedding if name in (EMBEDDING, HEAD) else rows for name, rows in source_rows.items()
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderDefaults:
    """Values that transformers takes for absent fields of a rotary model's config.json.

    norm_epsilon: with the field's name. head_dim: also for null; absent_head_dim: not for null,
    which then means the hidden size over the heads. rotary_fraction: None where the family rotates
    whole heads. local_base: None where sliding layers have the rotary embedding of the others.
    original_positions: beside a scaling, whose own value the class does not read then.
    """

    norm_epsilon: tuple[str, float] = ("rms_norm_eps", 1e-6)
    max_positions: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    absent_head_dim: int | None = None
    rotary_fraction: float | None = None
    rotary_base: float = 10000.0
    local_base: float | None = None
    original_positions: int | None = None
    hidden_act: str = "silu"


def read_decoder(reader: ConfigReader, **defaults: Any) -> dict[str, Any]:
    """Read the fields of a rotary model as `ModelConfig` names them, problems into `reader`.

    defaults: of `DecoderDefaults`.
    """
    absent_fields = DecoderDefaults(**defaults)
    num_heads, hidden_size = reader.get_int("num_attention_heads"), reader.get_int("hidden_size")
    head_dim = _choose_head_dim(reader, absent_fields, num_heads, hidden_size)
    num_kv_heads = absent_fields.num_kv_heads
    if "num_key_value_heads" in reader.config or num_kv_heads is None:
        num_kv_heads = num_heads  # the meaning of null
    rotary = read_rotary(reader)
    _check_rotary(reader, rotary, absent_fields)
    values: dict[str, Any] = {
        "vocab_size": reader.get_int("vocab_size"),
        "hidden_size": hidden_size,
        "num_hidden_layers": reader.get_int("num_hidden_layers"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": reader.get_int("num_key_value_heads", num_kv_heads),
        "head_size": reader.get_int("head_dim", head_dim or max(1, hidden_size // num_heads)),
        "intermediate_size": reader.get_int("intermediate_size"),
        "norm_epsilon": reader.get_float(*absent_fields.norm_epsilon),
        "max_position_embeddings": reader.get_int(
            "max_position_embeddings", absent_fields.max_positions
        ),
        "hidden_act": reader.get_text("hidden_act", absent_fields.hidden_act),
        "rotary_base": rotary.base or absent_fields.rotary_base,
        "rotary_scaling": rotary.scaling,
        "rotary_pct": rotary.fraction or absent_fields.rotary_fraction or 1.0,
    }
    return values | _read_scaling(reader, rotary, absent_fields, values)


def _choose_head_dim(
    reader: ConfigReader, defaults: DecoderDefaults, num_heads: int, hidden_size: int
) -> int | None:
    """Return the head_dim of an absent or null field; None: the hidden size over the heads."""
    head_dim = defaults.head_dim
    if "head_dim" not in reader.config:
        head_dim = head_dim or defaults.absent_head_dim
    if reader.config.get("head_dim") is None and head_dim is None and hidden_size % num_heads:
        reader.refuse(
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}",
            "give head_dim",
        )
    return head_dim


def _check_rotary(reader: ConfigReader, rotary: Rotary, defaults: DecoderDefaults) -> None:
    """Note a rotary embedding that models of the family do not compute."""
    if defaults.rotary_fraction is None and (rotary.fraction or 1) != 1:
        reader.refuse(
            f"partial_rotary_factor is {rotary.fraction:g}",
            "models of this family rotate whole heads: remove the field if it was copied from"
            " another config.json, as drafters have it from their targets; if this one was trained"
            " so, it is not supported",
        )
    if rotary.by_layer_type and defaults.local_base is None:
        reader.refuse(
            "rope_parameters has an object for each type of layer",
            "models of this family rotate alike in all layers; this one is not supported",
        )


def _read_scaling(
    reader: ConfigReader, rotary: Rotary, defaults: DecoderDefaults, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the length of longrope and the base of sliding layers; note faulty scalings."""
    fields: dict[str, Any] = {}
    if rotary.scaling is not None and get_kind(rotary.scaling) == "longrope":
        length = _read_original_length(reader, rotary.scaling, defaults.original_positions)
        fields["original_max_position_embeddings"] = length
    for fact, remedy in find_scaling_problems(
        rotary.scaling,
        rotary_size=int(values["head_size"] * values["rotary_pct"]),
        rotary_base=values["rotary_base"],
        max_positions=values["max_position_embeddings"],
        original_positions=fields.get("original_max_position_embeddings"),
    ):
        reader.refuse(fact, remedy)
    if defaults.local_base is not None:
        if rotary.local_scaling:
            reader.refuse(
                f"rope_parameters scales sliding layers: {shorten(rotary.local_scaling)}",
                "models of this family scale full layers only; this one is not supported",
            )
        fields["rope_local_base_freq"] = rotary.local_base or defaults.local_base
    return fields


def decoder(
    *extensions: FieldReader, **defaults: Any
) -> Callable[[ConfigReader, Layout], dict[str, Any]]:
    """Return a `read_config`: the fields of `read_decoder`, then those of each of `extensions`."""

    def read_config(reader: ConfigReader, layout: Layout) -> dict[str, Any]:
        values = read_decoder(reader, **defaults)
        for read in extensions:
            values |= read(reader, layout, values)
        return values

    return read_config


# Reads further fields of `ModelConfig`, given those that were read before.
FieldReader = Callable[[ConfigReader, Layout, Mapping[str, Any]], Mapping[str, Any]]


def read_biases(reader: ConfigReader, _: Layout, __: Mapping[str, Any]) -> dict[str, Any]:
    """Read whether the attention and the MLP have biases."""
    names = {"attn_bias": "attention_bias", "mlp_bias": "mlp_bias"}
    return {name: reader.get_bool(key, False) for name, key in names.items()}


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

    values: the fields that `read_decoder` has read. The other arguments are the values that
    transformers takes for an absent field, `inner` and `shared_inner` with its name; without
    `inner` an expert has the size of an MLP.
    """
    if values["hidden_act"] != "silu":
        reader.refuse(
            f"hidden_act is {shorten(values['hidden_act'])}", "experts are supported with silu"
        )
    tp_size, ep_size = layout.split_experts()
    experts = Experts(
        num=count_experts(reader, num),
        top_k=reader.get_int("num_experts_per_tok", top_k),
        inner=values["intermediate_size"] if inner is None else reader.get_int(*inner),
        shared_inner=0 if shared_inner is None else reader.get_int(*shared_inner),
        renormalizes=renormalizes,
        tp_size=tp_size,
        ep_size=ep_size,
        shared_name=name_shared(layout.trtllm_version),
    )
    return {"experts": experts, "hidden_act": "swiglu"}


def refuse_unless(reader: ConfigReader, name: str, *values: Any, remedy: str) -> None:
    """Note a problem unless a field is absent, null, or has one of the values."""
    value = reader.config.get(name)
    if value is not None and value not in values:
        reader.refuse(f"{name} is {value!r}", remedy)


def read_plain_heads(
    reader: ConfigReader, heads: str, hidden: str, activation: str
) -> dict[str, Any]:
    """Read the sizes of a decoder whose heads are as many for keys as for queries.

    heads, hidden: the names of the fields; activation: the default of an absent field.
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
        backend_logger.warning(
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
    layer_types = reader.config.get("layer_types")
    if isinstance(layer_types, list):
        types = tuple(layer_types)
    if pattern is not None:
        return {"sliding_window": window, "layer_types": types}
    if window is None or SLIDING not in types:
        return {}
    is_mixed = any(kind != SLIDING for kind in types)
    return {"sliding_window": window, "layer_types": types if is_mixed else None}


def refuse_layer_types(reader: ConfigReader, kind: str) -> None:
    """Note a problem where `layer_types` names other layers than those of one kind."""
    layer_types = reader.config.get("layer_types")
    if isinstance(layer_types, list) and any(layer_type != kind for layer_type in layer_types):
        reader.refuse(
            f"layer_types is {shorten(layer_types)}",
            f"models of this family are supported whose layers are all {kind}",
        )


def get_window(reader: ConfigReader, default: int | None) -> int | None:
    """Return the sliding_window field; null means none, an absent one the default."""
    if "sliding_window" not in reader.config:
        return default
    return None if reader.config["sliding_window"] is None else reader.get_int("sliding_window")


def _read_original_length(reader: ConfigReader, scaling: Mapping[str, Any], default: Any) -> int:
    """Return the length at which longrope switches its factors; in the scaling, or alongside it."""
    name = "original_max_position_embeddings"
    inner, outer = scaling.get(name), reader.config.get(name)
    if inner is None:
        return reader.get_int(name)
    if outer is None and default not in (None, inner):
        fact = f"{name} is {inner} in the scaling, and absent beside it, which means {default}"
        reader.refuse(fact, f"give {name} beside the scaling")
    elif outer is not None and outer != inner:
        reader.refuse(f"{name} is {outer} and in the scaling {inner}", "remove the wrong one")
    return reader.enter(scaling).get_int(name)
