"""Answers by an engine folder, turn by turn, in batches as large as the engine decodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from specdec import Engine, Prompt, Stream
from specdec.command.settings import need
from specdec.engine.layout import read_engine_config
from specdec.files.backends import Backend, find_backend
from specdec.methods.draft_target import METHOD
from specdec.system.logs import get_logger
from specdec.text.chat import ChatFormat

from .dialogues import Dialogue, RowError
from .settings import DataSettings

logger = get_logger(__name__)


class DialogueEngine:
    """Engine that answers dialogues, loaded from a folder until it is closed."""

    def __init__(self, settings: DataSettings) -> None:
        self.settings, folder = settings, need(settings.engine_dir)
        speculation = not _awaits_drafts(folder, find_backend(folder))
        if not speculation:
            logger.info(
                "%s was built for drafts from outside, and none are needed here: it decodes without"
                " speculation", folder,
            )  # fmt: skip
        self._engine = Engine.load(
            folder,
            tokenizer=settings.tokenizer_dir,
            device=settings.device,
            speculation=speculation,
        )
        self._tokenizer = self._engine.tokenizer
        self._format = ChatFormat(self._tokenizer)

    def close(self) -> None:
        """Free the engine."""
        self._engine.close()

    def answer(self, dialogues: Iterable[Dialogue]) -> Iterator[tuple[Dialogue, RowError | None]]:
        """Yield each dialogue when it ends, with the error where it failed."""
        remaining_dialogues = iter(dialogues)
        ready_dialogues: list[Dialogue] = []  # have an answer, and perhaps a turn to ask
        streams: list[tuple[Dialogue, Stream]] = []  # turns that the engine answers
        while True:
            while len(streams) < self._engine.max_batch_size:
                dialogue = next(itertools.chain(ready_dialogues[:1], remaining_dialogues), None)
                del ready_dialogues[:1]
                if dialogue is None:
                    break
                try:
                    prompt = self._make_prompt(dialogue)
                except RowError as error:
                    yield dialogue, error
                    continue
                if prompt is None:
                    yield dialogue, None
                else:
                    streams.append((dialogue, self._engine.stream(prompt)))
            if not streams:
                return
            self._engine.step()
            running_streams, streams = streams, []
            for dialogue, stream in running_streams:
                event = stream.take()
                if event is None or event.finish_reason is None:
                    streams.append((dialogue, stream))
                elif text := stream.output.text:
                    is_truncated = event.finish_reason == "length"
                    dialogue.add({"content": text}, is_truncated=is_truncated)
                    ready_dialogues.append(dialogue)
                else:
                    yield dialogue, RowError("the answer is empty")

    def _make_prompt(self, dialogue: Dialogue) -> Prompt | None:
        """Return the prompt of a dialogue's next turn; None where the dialogue is at its end."""
        context = dialogue.ask()
        if context is None:
            return None
        settings, engine = self.settings, self._engine
        if isinstance(context, str):
            ids = self._tokenizer(context, verbose=False)["input_ids"]
        else:
            try:
                text = self._format.render(context, ask=True)
            except ValueError as error:
                raise RowError(str(error)) from None
            ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        num_free_tokens = engine.max_seq_len - len(ids)
        if len(ids) > engine.max_input_len or num_free_tokens < 1:
            raise RowError(
                f"turn {dialogue.num_answers + 1} asks with {len(ids)} tokens, the engine's"
                f" max_input_len is {engine.max_input_len} and its max_seq_len {engine.max_seq_len}"
            )
        return Prompt(
            token_ids=ids, max_output_len=min(settings.max_tokens, num_free_tokens),
            temperature=settings.temperature, top_p=settings.top_p,
            seed=(settings.seed or 0) + dialogue.row.index,
            # Special tokens such as <think> and <tool_call>: the target writes them, too.
            skip_special_tokens=False, spaces_between_special_tokens=False,
        )  # fmt: skip


def _awaits_drafts(folder: Path, backend: Backend) -> bool:
    """Return whether an engine was built for drafts from an external drafter."""
    if not backend.is_loadable:  # which Engine.load refuses
        return False
    return read_engine_config(folder, backend.name).default_method == METHOD
