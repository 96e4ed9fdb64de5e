"""Target whose layers an engine of specdec runs: by its kernels, on its quantized weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.decode.engine import TorchEngine
from specdec.decode.prefill import fill_cache
from specdec.engine.step import States
from specdec.errors import Problems, SpecDecError, UsageError
from specdec.files.backends import read_backend
from specdec.files.folders import ENGINE, find_gguf, look_at
from specdec.files.torch_tensors import TORCH_DTYPES

from .features import OutputHead
from .parts import PartsPlan
from .rows import TokenRows
from .settings import TrainSettings
from .state_server import FLAG
from .target import FrozenTarget, RowBatch, get_name, join_rows, load_target

# Largest share by which an engine's logits may differ from those of the output layer of --model-dir
# on the engine's state: its weights may have four bits, and its kernels round otherwise.
LOGIT_TOLERANCE = 0.1
HINT = "build the engine from --model-dir"


def is_engine(source: str) -> bool:
    """Return whether --hidden-states-from names an engine's folder."""
    folder = Path(source)
    return folder.is_dir() and look_at(folder).kind == ENGINE


def open_engine_target(
    settings: TrainSettings, config: Any, dtype: str, device: torch.device, *,
    layers: tuple[int, ...], with_head: bool,
) -> EngineTarget:  # fmt: skip
    """Load the target's embedding and output layer, and the engine; check that the two fit.

    layers: inner layers, from 0, whose outputs the drafter reads. Raises SpecDecError for an engine
    of another model or backend.
    """
    folder = Path(settings.hidden_states_from or "")
    if settings.hidden_states_layers is not None:
        raise UsageError(
            f"--hidden-states-layers {settings.hidden_states_layers} with the engine {folder},"
            " which has all layers",
            "leave the layers out",
        )
    if (backend := read_backend(folder)) != TorchEngine.name:
        raise SpecDecError(
            f"{FLAG} {folder} is an engine of the backend {backend}, which gives no hidden states",
            "build the checkpoint for torch: specdec-build --backend torch",
        )
    engine = TorchEngine(
        folder, device=device.type, speculate=False,
        devices=[device.index or 0] if device.type == "cuda" else None,
    )  # fmt: skip
    _check_sizes(engine, folder, config)
    embedding, head = _load_tables(settings.model_dir, config, dtype, device)
    _check_logits(engine, folder, head, dtype)
    return EngineTarget(
        engine, embedding, config, name=get_name(settings.model_dir), layers=layers, dtype=dtype,
        head=head if with_head else None,
    )  # fmt: skip


def _check_sizes(engine: TorchEngine, folder: Path, config: Any) -> None:
    """Raise SpecDecError that lists the sizes in which the engine and --model-dir differ."""
    model, problems = engine.config.checkpoint.model, Problems()
    for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
        size, expected = getattr(model, name), int(getattr(config, name))
        if size != expected:
            problems.add(f"{FLAG} {folder}: {name} is {size}, of --model-dir {expected}", HINT)
    if model.tp_size != 1:
        problems.add(
            f"{FLAG} {folder} was built for {model.tp_size} ranks",
            "build it for one: specdec-convert --tp-size 1",
        )
    problems.raise_all()


def _load_tables(
    model_dir: str, config: Any, dtype: str, device: torch.device
) -> tuple[torch.nn.Module, OutputHead]:
    """Return the target's embedding and its output layer, as its own files have them."""
    if find_gguf(model_dir) is None:
        parts = PartsPlan(model_dir, config).load(dtype, device)
        return parts.embedding, parts.head
    # transformers widens a GGUF as a whole; its layers are dropped again.
    target = load_target(model_dir, config, dtype, device, with_head=True)
    target.check_head()
    assert target.head is not None
    return target.embedding, target.head


def _check_logits(engine: TorchEngine, folder: Path, head: OutputHead, dtype: str) -> None:
    """Raise SpecDecError where the engine's logits are not those of the output layer here."""
    tokens = [*range(min(8, engine.config.checkpoint.model.vocab_size))]
    with torch.no_grad():
        state, *_ = run_row(engine, tokens, ())
        expected = engine.decoder.compute_logits(state).float()
        logits = head.compute_logits(state.to(TORCH_DTYPES[dtype]))
    error, size = float((logits - expected).abs().max()), float(expected.abs().max())
    if not error <= LOGIT_TOLERANCE * size:
        raise SpecDecError(
            f"{FLAG} {folder}: its logits, of at most {size:.3g}, differ by up to {error:.3g} from"
            " those that the output layer of --model-dir has for its state",
            HINT,
        )


def run_row(engine: TorchEngine, tokens: Sequence[int], layers: tuple[int, ...]) -> list[Tensor]:
    """Return a row's last states and the outputs of `layers`, each [T, D], in the engine's type.

    A row is read by itself, so that its states are the same bits whatever rows are read with it.
    """
    decoder = engine.decoder
    cache = decoder.make_cache(1, len(tokens))
    passes: list[list[Tensor]] = []

    def keep(
        rows: Sequence[int], starts: Sequence[int], counts: Sequence[int], states: States
    ) -> None:
        outputs = [] if states.layers is None else list(states.layers[0].chunk(len(layers), -1))
        passes.append([column[: counts[0]] for column in (states.hidden[0], *outputs)])

    with _observe(engine, layers):
        limit = engine.config.build.max_num_tokens
        fill_cache(decoder, cache, [0], [tokens], limit, keep)
    return [torch.cat(columns) for columns in zip(*passes, strict=True)]


@contextlib.contextmanager
def _observe(engine: TorchEngine, layers: tuple[int, ...]) -> Iterator[None]:
    """Let the decoder keep the outputs of some layers meanwhile."""
    before, engine.decoder.observed_layers = engine.decoder.observed_layers, layers
    try:
        yield
    finally:
        engine.decoder.observed_layers = before


class EngineTarget(FrozenTarget):
    """Target of which embedding and output layer are here, and whose layers an engine runs."""

    def __init__(
        self, engine: TorchEngine, embedding: torch.nn.Module, config: Any, *, name: str,
        layers: tuple[int, ...], dtype: str, head: OutputHead | None,
    ) -> None:  # fmt: skip
        self.engine, self.dtype = engine, dtype
        super().__init__(embedding, config, name=name, head=head, aux_layers=layers)

    def check_rows(self, splits: Mapping[str, TokenRows]) -> None:
        """Raise SpecDecError where a row is longer than the engine's texts."""
        lengths = [int(n) for rows in splits.values() for n in rows.bounds[1:] - rows.bounds[:-1]]
        longest, limit = max(lengths, default=0), self.engine.config.build.max_seq_len
        if longest > limit:
            raise SpecDecError(
                f"{FLAG} {self.engine.folder}: its max_seq_len is {limit}, the longest row has"
                f" {longest} tokens",
                f"build it with --max-seq-len {longest}, or train with --model-max-length {limit}",
            )

    def find_states(self, batch: RowBatch) -> tuple[Tensor, ...]:
        """Let the engine read the rows, one by one."""
        rows = [
            run_row(self.engine, tokens[:length].tolist(), self.aux_layers)
            for tokens, length in zip(batch.tokens, batch.lengths, strict=True)
        ]
        dtype, device = TORCH_DTYPES[self.dtype], batch.tokens.device
        columns = (join_rows([row[i] for row in rows]) for i in range(len(rows[0])))
        return tuple(column.to(device, dtype) for column in columns)
