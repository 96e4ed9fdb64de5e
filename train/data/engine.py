"""Answers of an engine of our own: specdec-run, called for many rows at a time."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from specdec.chat import ChatFormat
from specdec.command.settings import need
from specdec.pretrained import load_tokenizer
from specdec.processes import call_run

from .dialogues import Dialogue, RowError
from .settings import DataSettings

# Each call loads the engine, and what a kill loses is one call's rows: at least so many, and so
# many times those that the engine answers at once.
ROWS_PER_CALL, BATCHES_PER_CALL = 128, 4


class EngineRunner:
    """Answers rows by an engine folder, turn by turn, each call all rows of a group."""

    def __init__(self, settings: DataSettings) -> None:
        from specdec.engine.layout import read_engine_config

        self.settings = settings
        self._limits = read_engine_config(need(settings.engine_dir)).build
        self._tokenizer = load_tokenizer(need(settings.tokenizer_dir))
        self._format = ChatFormat(self._tokenizer)

    def answer(self, dialogues: Iterable[Dialogue]) -> Iterator[tuple[Dialogue, RowError | None]]:
        """Yield each row when it is done, or with what it failed of."""
        group: list[Dialogue] = []
        most = max(ROWS_PER_CALL, BATCHES_PER_CALL * self._limits.max_batch_size)
        for dialogue in dialogues:
            group.append(dialogue)
            if len(group) == most:
                yield from self._answer_group(group)
                group = []
        if group:
            yield from self._answer_group(group)

    def _answer_group(self, group: list[Dialogue]) -> Iterator[tuple[Dialogue, RowError | None]]:
        turn = 0
        while group:
            asking: list[Dialogue] = []
            requests: list[dict[str, Any]] = []
            for dialogue in group:
                try:
                    request = self._make_request(dialogue, turn)
                except RowError as error:
                    yield dialogue, error
                    continue
                if request is None:
                    yield dialogue, None
                else:
                    asking.append(dialogue)
                    requests.append(request)
            group = []
            for dialogue, output in zip(asking, self._run(requests), strict=True):
                if output["output_text"]:
                    is_truncated = output["finish_reason"] == "length"
                    dialogue.add({"content": output["output_text"]}, is_truncated=is_truncated)
                    group.append(dialogue)
                else:
                    yield dialogue, RowError("the answer is empty")
            turn += 1

    def _make_request(self, dialogue: Dialogue, turn: int) -> dict[str, Any] | None:
        """The request line of what the row asks next, None when it is done."""
        context = dialogue.ask()
        if context is None:
            return None
        settings, limits = self.settings, self._limits
        if isinstance(context, str):
            ids = self._tokenizer(context, verbose=False)["input_ids"]
        else:
            try:
                text = self._format.render(context, ask=True)
            except ValueError as error:
                raise RowError(str(error)) from None
            ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        room = limits.max_seq_len - len(ids)
        if len(ids) > limits.max_input_len or room < 1:
            raise RowError(
                f"turn {turn + 1} asks with {len(ids)} tokens, the engine's max_input_len is"
                f" {limits.max_input_len} and its max_seq_len {limits.max_seq_len}"
            )
        return {
            "input_ids": ids,
            "max_output_len": min(settings.max_tokens, room),
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": (settings.seed or 0) + dialogue.row.index,
        }

    def _run(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not requests:
            return []
        with tempfile.TemporaryDirectory(prefix="specdec-data-") as folder:
            path = Path(folder) / "requests.jsonl"
            path.write_text("".join(json.dumps(r) + "\n" for r in requests), encoding="utf-8")
            report = call_run([
                "--engine-dir", str(self.settings.engine_dir), "--input-file", str(path),
                "--tokenizer-dir", str(self.settings.tokenizer_dir),
                "--device", self.settings.device,
            ])  # fmt: skip
        outputs: list[dict[str, Any]] = report["outputs"]
        return outputs
