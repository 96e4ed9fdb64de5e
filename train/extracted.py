"""Target whose layers vLLM runs: its hidden states are asked of a server, or read from files."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.errors import SpecDecError, UsageError
from specdec.files.tensor_file import TensorFile
from specdec.system.logs import get_logger

from .parts import PartsPlan, TargetParts
from .rows import Array, TokenRows
from .settings import LAYERS_FLAG, TrainSettings
from .state_files import StatesFolder, StatesForm, read_states
from .state_server import FLAG, StatesServer
from .target import FrozenTarget, RowBatch, get_name, join_rows

CONCURRENCY = 16  # rows that are asked for at the same time
# A logit may be less than the largest by this share of it and still be that of the decoded token:
# server and trainer round otherwise.
NEAR_TIE = 0.02

logger = get_logger(__name__)


def choose_layer_ids(settings: TrainSettings, layers: tuple[int, ...], config: Any) -> list[int]:
    """Return vLLM's ids of the states in a file, rising; layers: those that the drafter reads."""
    last_id = int(config.num_hidden_layers)
    needed_ids = [*(layer + 1 for layer in layers), last_id]
    text = settings.hidden_states_layers
    if text is None:
        return needed_ids
    try:
        layer_ids = [int(word) for word in text.split(",")]
    except ValueError:
        layer_ids = []
    if not layer_ids or layer_ids != sorted(set(layer_ids)):
        raise UsageError(
            f"{LAYERS_FLAG} is {text!r}",
            "give vLLM's layer ids, rising and separated by commas, such as"
            f" {','.join(map(str, needed_ids))}",
        )
    missing_ids = [str(layer) for layer in needed_ids if layer not in layer_ids]
    if missing_ids:
        raise SpecDecError(
            f"{LAYERS_FLAG} {text} lacks {', '.join(missing_ids)} of the {len(needed_ids)} states"
            " that this drafter reads",
            "start the server with the layer ids"
            f" {','.join(map(str, sorted({*needed_ids, *layer_ids})))}",
        )
    return layer_ids


def open_extracted(
    settings: TrainSettings, config: Any, dtype: str, device: torch.device, *,
    layers: tuple[int, ...], with_head: bool,
) -> ExtractedTarget:  # fmt: skip
    """Load the target's parts, and open the server or the folder of its states."""
    source = settings.hidden_states_from or ""
    layer_ids = choose_layer_ids(settings, layers, config)
    form = StatesForm(tuple(layer_ids), int(config.hidden_size))
    logger.info("hidden states: %s has vLLM's layer ids %s", source, form.describe())
    states: StatesFolder | StatesServer
    if source.startswith(("http://", "https://")):
        states = StatesServer(source, form)
    elif Path(source).is_dir():
        states = StatesFolder(Path(source), form)
    else:
        raise SpecDecError(
            f"{FLAG} {source} is neither a folder nor a URL",
            "give an engine's folder, a server, such as http://127.0.0.1:8000/v1, or a folder that"
            " speculators wrote",
        )
    parts = PartsPlan(settings.model_dir, config).load(dtype, device)
    return ExtractedTarget(
        parts, states, config, name=get_name(settings.model_dir), layers=layers, dtype=dtype,
        with_head=with_head,
    )  # fmt: skip


class ExtractedTarget(FrozenTarget):
    """Target of which only embedding, last norm and output layer are here."""

    def __init__(
        self, parts: TargetParts, states: StatesFolder | StatesServer, config: Any, *, name: str,
        layers: tuple[int, ...], dtype: str, with_head: bool,
    ) -> None:  # fmt: skip
        self.parts, self.states, self.dtype = parts, states, dtype
        ids = states.form.layer_ids
        # The places along a file's layers of the last state, and of each layer that is read.
        last_id = int(config.num_hidden_layers)
        self.indices = [ids.index(last_id), *(ids.index(layer + 1) for layer in layers)]
        super().__init__(
            parts.embedding, config, name=name, head=parts.head if with_head else None,
            aux_layers=layers,
        )  # fmt: skip
        self._threads = ThreadPoolExecutor(CONCURRENCY, thread_name_prefix="hidden-states")
        self._expected: dict[tuple[int, int], Future[list[Tensor]]] = {}

    def check_rows(self, splits: Mapping[str, TokenRows]) -> None:
        """Raise SpecDecError where the folder lacks rows, or the server is of another form."""
        for split, rows in splits.items():
            self.states.check_rows(split, rows)

    def expect(self, rows: TokenRows, indices: list[int]) -> None:
        """Begin to fetch the states of rows that are read soon."""
        for index in indices:
            if (key := (id(rows), index)) not in self._expected:
                tokens = rows.tokens[rows.bounds[index] : rows.bounds[index + 1]]
                self._expected[key] = self._threads.submit(self._fetch, tokens)

    def find_states(self, batch: RowBatch) -> tuple[Tensor, ...]:
        """Return the rows' states, once they are there."""
        self.expect(batch.rows, batch.indices)
        try:
            futures = {i: self._expected.pop((id(batch.rows), i)) for i in set(batch.indices)}
            row_states = [futures[index].result() for index in batch.indices]
        except BaseException:
            self._threads.shutdown(wait=False, cancel_futures=True)
            raise
        device = batch.tokens.device
        columns = [join_rows([states[i] for states in row_states]).to(device)
                   for i in range(len(self.indices))]  # fmt: skip
        return self.parts.norm(columns[0]), *columns[1:]

    def _fetch(self, tokens: Array) -> list[Tensor]:
        """Return a row's states, the last one before the norm."""
        file, next_token = self.states.fetch(tokens)
        states = read_states(file, len(tokens), self.indices, self.dtype)
        if next_token is not None:
            self._check_next_token(file, states[0][-1], next_token)
        self.states.release(file)
        return states

    def _check_next_token(self, file: TensorFile, state: Tensor, next_token: int) -> None:
        """Raise SpecDecError where the server decodes another token than its state gives here.

        Then its last layer's id, its weights or its norm are others.
        """
        with torch.no_grad():
            state = self.parts.norm(state.to(self.table.device)[None])
            logits = self.parts.head.compute_logits(state)[0]
        best = int(logits.argmax())
        is_near = logits[best] - logits[next_token] <= NEAR_TIE * logits.abs().max()
        if not is_near:
            raise SpecDecError(
                f"{file.path}: the server's next token is {next_token}, but by the state that it"
                f" gives and the output layer of --model-dir it is {best}"
                f" (logits {float(logits[next_token]):.4g} and {float(logits[best]):.4g})",
                f"let the server run the model of --model-dir, with the layer ids"
                f" {self.states.form.describe()}",
            )
