"""Frozen target: loaded once, read without gradients."""

from __future__ import annotations

import abc
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.errors import SpecDecError, summarize
from specdec.files.folders import find_gguf, list_parts
from specdec.files.manifest import describe_file
from specdec.files.torch_tensors import TORCH_DTYPES
from specdec.text import pretrained

from .features import Features, OutputHead, TargetShape
from .rows import Array, TokenRows


@dataclasses.dataclass(frozen=True)
class RowBatch:
    """Rows of the data on the device that reads them, padded at their ends."""

    rows: TokenRows
    indices: list[int]
    tokens: Tensor  # [B, T] int64
    mask: Tensor  # [B, T] true for tokens that are labels

    @property
    def lengths(self) -> list[int]:
        bounds = self.rows.bounds
        return [int(bounds[i + 1] - bounds[i]) for i in self.indices]


def make_batch(rows: TokenRows, indices: list[int], device: torch.device) -> RowBatch:
    """Put some of the rows onto a device."""
    tokens, mask = rows.make_batch(indices)
    return RowBatch(
        rows, indices, torch.from_numpy(tokens).to(device), torch.from_numpy(mask).to(device)
    )


class FrozenTarget(abc.ABC):
    """Frozen model that a drafter learns from; head: its output layer, None for unused.

    aux_layers: inner layers, from 0, whose outputs drafters read. token_counts: [V] int64, labels
    of each token in the data. Legend as in methods/base.py.
    """

    token_counts: Array | None = None

    def __init__(
        self, embedding: torch.nn.Module, config: Any, *, name: str, head: OutputHead | None,
        aux_layers: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.embedding = embedding
        self.config = config
        self.name = name
        self.head = head
        self.aux_layers = aux_layers
        weight = embedding.weight
        assert isinstance(weight, Tensor)
        self.table = weight  # [V, D]
        self.shape = TargetShape(
            hidden_size=int(weight.shape[1]), vocab_size=int(weight.shape[0]),
            embedding_scale=find_embedding_scale(config),
        )  # fmt: skip

    def check_rows(self, splits: Mapping[str, TokenRows]) -> None:
        """Raise SpecDecError where it cannot read the rows; only some targets can know before."""
        return

    def expect(self, rows: TokenRows, indices: list[int]) -> None:
        """Prepare for these rows, which are read soon; only some targets take their time."""
        return

    @abc.abstractmethod
    def find_states(self, batch: RowBatch) -> tuple[Tensor, ...]:
        """Return the last hidden states, then the outputs of `aux_layers`: all [B, T, D]."""

    def read(self, batch: RowBatch) -> Features:
        """Return the features of a batch."""
        with torch.no_grad():
            hidden, *auxiliary_states = self.find_states(batch)
            # Stored rows, as engines give them to drafters; some targets scale them for themselves.
            embedded = torch.nn.functional.embedding(batch.tokens, self.table)
        return Features(
            tokens=batch.tokens,
            hidden=hidden,
            embedded=embedded,
            head=self.head,
            auxiliary=torch.cat(auxiliary_states, dim=-1) if auxiliary_states else None,
        )


class LiveTarget(FrozenTarget):
    """Target as a model of transformers, which runs at every read."""

    def __init__(
        self, model: Any, config: Any, *, name: str, head: OutputHead | None,
        aux_layers: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.whole_model = model.eval().requires_grad_(False)
        self.model = model if head is None else pretrained.find_base(model)
        embedding = model.get_input_embeddings()
        super().__init__(embedding, config, name=name, head=head, aux_layers=aux_layers)

    def find_states(self, batch: RowBatch) -> tuple[Tensor, ...]:
        """Run the model.

        Rows are padded at their ends, where causal attention hides the padding from the tokens, so
        no attention mask is needed; one of ones spares transformers a search for joined rows. A
        processor computes each row by itself, so that its states are the same bits whatever rows
        are read with it.
        """
        if batch.tokens.device.type != "cpu":
            return self._run(batch.tokens)
        rows = [
            self._run(tokens[None, :length])
            for tokens, length in zip(batch.tokens, batch.lengths, strict=True)
        ]
        return tuple(join_rows([row[i][0] for row in rows]) for i in range(len(rows[0])))

    def _run(self, tokens: Tensor) -> tuple[Tensor, ...]:
        output = self.model(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False,
            return_dict=True, output_hidden_states=bool(self.aux_layers),
        )  # fmt: skip
        # The first of the hidden states is the embedding.
        return (
            output.last_hidden_state, *(output.hidden_states[i + 1] for i in self.aux_layers)
        )  # fmt: skip

    def check_head(self) -> None:
        """Raise SpecDecError where the target's logits differ from `OutputHead`'s.

        A drafter would learn from another distribution than the target's.
        """
        if self.head is None:
            return
        tokens = torch.arange(min(8, self.shape.vocab_size), device=self.head.weight.device)[None]
        with torch.no_grad():
            hidden, *_ = self._run(tokens)
            expected = self.whole_model(input_ids=tokens, use_cache=False).logits.float()
            logits = self.head.compute_logits(hidden)
        compare_logits(self.name, logits, expected)


def compare_logits(name: str, logits: Tensor, expected: Tensor) -> None:
    """Raise SpecDecError where a target's logits are not those of its `OutputHead`."""
    error = float((logits - expected).abs().max())
    if error > 0.02 * float(expected.abs().max()):
        raise SpecDecError(
            f"{name}: its logits differ by up to {error:.3g} from its output layer's of"
            " the last hidden state, and how it changes them is not known",
            "train a drafter that does without the target's output layer: --method redrafter"
            " with --self-distillation 0",
        )


def join_rows(rows: list[Tensor]) -> Tensor:
    """Stack rows [T_i, D] of different lengths, with zeros at the ends of the shorter ones."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def load_config(model_dir: str) -> Any:
    """Read the target's configuration; a multimodal target's is its text model's."""
    config = pretrained.load_config(model_dir)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def get_stored_dtype(config: Any) -> str:
    """Name the type in which the target's weights are stored."""
    return str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")


def get_max_length(config: Any) -> int | None:
    """Return the most tokens that the target can read; None where its configuration has none."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def load_target(
    model_dir: str,
    config: Any,
    dtype: str,
    device: torch.device,
    *,
    with_head: bool,
    aux_layers: tuple[int, ...] = (),
    mesh: Any = None,
) -> LiveTarget:
    """Load the target's weights in `dtype` onto `device`; its output layer only `with_head`.

    mesh: processes that its layers are split over; all of them call this, and `read` afterwards,
    equally often.
    """
    kind = "AutoModelForCausalLM" if with_head else "AutoModel"
    model = pretrained.load_model(model_dir, kind, dtype=TORCH_DTYPES[dtype])
    fold_projections(model)
    try:
        if mesh is not None:
            shard_layers(model, config, mesh)
        model = model.to(device)
    except (ValueError, KeyError, RuntimeError) as error:
        raise SpecDecError(
            f"cannot put the target {model_dir} onto {device}: {summarize(error)}",
            "use a device with more memory, or split the target over several: --shard-target",
        ) from None
    name = get_name(model_dir)
    if not with_head:
        return LiveTarget(model, config, name=name, head=None, aux_layers=aux_layers)
    layer = model.get_output_embeddings().requires_grad_(False)
    head = make_head(config, layer.weight, getattr(layer, "bias", None))
    return LiveTarget(model, config, name=name, head=head, aux_layers=aux_layers)


def shard_layers(model: Any, config: Any, mesh: Any) -> None:
    """Split each decoder layer over the processes, which join it while it runs.

    Embedding, last norm and output layer stay whole, as drafters read them too.
    """
    from torch.distributed.fsdp import fully_shard

    model.eval().requires_grad_(False)
    stacks = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == config.num_hidden_layers
    ]
    if len(stacks) != 1:
        raise SpecDecError(
            f"--shard-target: the target has {len(stacks)} stacks of"
            f" {config.num_hidden_layers} layers, not one",
            "train without splitting it",
        )
    for layer in stacks[0]:
        fully_shard(layer, mesh=mesh)
        # torch takes each layer for a root, and would keep its weights joined.
        layer.register_forward_hook(lambda module, *_: module.reshard())


def fold_projections(model: Any) -> None:
    """Fold the projections of an OPT with a small embedding into its embedding and head.

    Engines store these products (convert/families/opt.py), and drafters read and predict by them.
    """
    decoder = getattr(pretrained.find_base(model), "decoder", None)
    inward, outward = (getattr(decoder, f"project_{way}", None) for way in ("in", "out"))
    if decoder is None or inward is None or outward is None:
        return
    table = decoder.embed_tokens.weight.data
    head = model.get_output_embeddings()
    if head is not None:
        weight = head.weight.data.float() @ outward.weight.data.float()
        folded = torch.nn.Linear(weight.shape[1], len(weight), bias=False, dtype=table.dtype)
        folded.weight.data = weight.to(table.dtype)
        model.set_output_embeddings(folded)
    weight = (table.float() @ inward.weight.data.float().T).to(table.dtype)
    size, width = weight.shape
    decoder.embed_tokens = torch.nn.Embedding(size, width, _weight=weight)
    decoder.project_in = decoder.project_out = None


def find_embedding_scale(config: Any) -> float:
    """Return the target's factor of the rows of its table of embeddings."""
    if str(getattr(config, "model_type", "")).startswith("gemma"):
        return math.sqrt(config.hidden_size)
    return float(getattr(config, "embedding_multiplier", None) or 1.0)


def make_head(config: Any, weight: Tensor, bias: Tensor | None) -> OutputHead:
    """Make the target's output layer, with its configuration's changes to the logits."""
    scaling = float(getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return OutputHead(weight, bias, 1 / scaling, None if cap is None else float(cap))


def get_name(model_dir: str) -> str:
    """Name a target: its folder's name, or its Hub id."""
    return Path(model_dir).resolve().name if Path(model_dir).is_dir() else model_dir


def load_tokenizer(model_dir: str, vocab_size: int) -> Any:
    """Load the target's tokenizer; raise SpecDecError where the target lacks some of its tokens."""
    tokenizer = pretrained.load_tokenizer(model_dir, "--model-dir")
    if len(tokenizer) > vocab_size:
        raise SpecDecError(
            f"the tokenizer has {len(tokenizer)} tokens, the target's vocabulary only {vocab_size}",
            "use the tokenizer that the target was trained with",
        )
    return tokenizer


def list_target_files(
    model_dir: str, weight_files: Iterable[Path] | None = None
) -> list[dict[str, Any]]:
    """List the files of a target that has been loaded, with their sha256; a Hub id's are cached.

    weight_files: those that are read, where not all are.
    """
    if (file := find_gguf(model_dir)) is not None:
        return [describe_file(shard) for shard in list_parts(file)]
    folder = Path(model_dir)
    if not folder.is_dir():
        from transformers.utils import cached_file

        folder = Path(str(cached_file(model_dir, "config.json"))).parent
    if weight_files is None:
        weight_files = _list_weight_files(folder)
    names = {"config.json", "tokenizer.json", "tokenizer.model", *(f.name for f in weight_files)}
    return [describe_file(folder / n) for n in sorted(names) if (folder / n).is_file()]


def _list_weight_files(folder: Path) -> list[Path]:
    """List the files of a folder's weights: safetensors, or torch's where there are none."""
    names = {path.name for path in folder.glob("model*.safetensors")}
    for index in folder.glob("*.index.json"):
        names.update(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values())
    if not any(name.endswith(".safetensors") for name in names):
        names.update(path.name for path in folder.glob("pytorch_model*.bin"))
    return [folder / name for name in names]
