"""References for the server's text: an engine of ours, or another server."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import SpecDecError
from specdec.files.backends import read_backend
from specdec.system.http_client import read_key

from .answers import AnyPrompt, Completion, Token
from .server import ServerClient
from .settings import AuditSettings

if TYPE_CHECKING:
    from specdec import Output


@contextlib.contextmanager
def open_reference(settings: AuditSettings) -> Iterator[Reference | None]:
    """Open the reference that the settings name; yield None where they name none."""
    if settings.reference_engine is not None:
        with contextlib.closing(EngineReference(settings)) as reference:
            yield reference
    elif settings.reference_url is not None:
        key = None
        if settings.reference_api_key_file is not None:
            key = read_key(settings.reference_api_key_file, "--reference-api-key-file")
        flags = ("--reference-url", "--reference-model", "--reference-api-key-file")
        model = settings.reference_model or settings.model
        server = ServerClient(settings.reference_url, model, key, settings.answer_seconds, flags)
        server.open()
        yield server
    else:
        yield None


class EngineReference:
    """Engine in this process that decodes one token per step until it starts to draft."""

    def __init__(self, settings: AuditSettings) -> None:
        self.name = str(settings.reference_engine)
        self._settings = settings
        self._engine = self._load(speculation=False)

    def close(self) -> None:
        self._engine.close()

    def _load(self, **options: Any) -> Any:
        from specdec import Engine

        settings = self._settings
        assert settings.reference_engine is not None
        engine = Engine.load(
            settings.reference_engine, tokenizer=settings.tokenizer_dir, device=settings.device,
            **options,
        )  # fmt: skip
        if engine.tokenizer is None:
            engine.close()
            raise SpecDecError(
                f"{self.name} holds no tokenizer", "give the base model's folder as --tokenizer-dir"
            )
        return engine

    def start_drafting(self, length: int | None) -> None:
        """Begin to draft. length: tokens of a chain; None for the engine's default drafts."""
        from specdec.engine.layout import read_engine_config

        folder = Path(self.name)
        method = read_engine_config(folder, read_backend(folder)).checkpoint.method
        if method is None:
            raise SpecDecError(
                f"{self.name} holds no drafter, which --same-drafter says it does",
                "convert the server's drafter with the base model and build that, or leave out"
                " --same-drafter",
            )
        options: dict[str, Any] = {}
        if length is not None:
            path = json.dumps([[0] * depth for depth in range(1, length + 1)])
            chains: dict[str, dict[str, Any]] = {
                "medusa": {"medusa_choices": path}, "eagle": {"eagle_choices": path},
                "dflash": {"dflash_tokens": length, "dflash_top_k": 1},
            }  # fmt: skip
            options = chains.get(method.name, {})
        self._engine.close()
        self._engine = self._load(draft_budget="fixed", **options)

    def can_continue(self, ids: Sequence[int], max_tokens: int) -> bool:
        """Return whether the engine has room for a prompt and `max_tokens` new tokens."""
        engine = self._engine
        room = min(engine.max_input_len, engine.max_seq_len - max_tokens)
        return bool(len(ids) <= room)

    def draft(self, prompts: Sequence[AnyPrompt], max_tokens: int) -> list[Output]:
        """Continue prompts greedily, several at once."""
        requests = [_make_prompt(prompt) for prompt in prompts]
        outputs: list[Output] = self._engine.generate(requests, max_output_len=max_tokens)
        return outputs

    def continue_all(self, prompts: Sequence[AnyPrompt], max_tokens: int) -> list[Completion]:
        """Continue prompts greedily with log-probabilities, several at once."""
        from specdec.text.prompts import MAX_LOGPROBS

        requests = [_make_prompt(prompt, logprobs=MAX_LOGPROBS) for prompt in prompts]
        outputs = self._engine.generate(requests, max_output_len=max_tokens)
        pairs = zip(prompts, outputs, strict=True)
        return [self._describe(prompt, output, max_tokens) for prompt, output in pairs]

    def _describe(self, prompt: AnyPrompt, output: Any, max_tokens: int) -> Completion:
        from specdec.text.text_stream import decode_text, read_stream

        stream = read_stream(self._engine.tokenizer, output.token_ids)
        ends = [min(end, len(output.text)) for end in stream.ends]
        starts = [0, *ends]

        def name(token: int, logprob: float) -> Token:
            return Token(token, decode_text(self._engine.tokenizer, [token]), logprob)

        tokens = [
            Token(
                token, output.text[start:end], logprobs.logprob,
                tuple(name(*pair) for pair in logprobs.top),
            )
            for token, logprobs, start, end in zip(
                output.token_ids, output.logprobs, starts[:-1], ends, strict=True
            )
        ]  # fmt: skip
        return Completion(
            prompt=prompt, text=output.text, max_tokens=max_tokens, ids=output.token_ids,
            tokens=tokens, ends=ends, finish_reason=output.finish_reason,
            prompt_ids=output.prompt_ids,
        )  # fmt: skip


def _make_prompt(prompt: AnyPrompt, **options: Any) -> Any:
    from specdec import Prompt

    if isinstance(prompt, str):
        kind = "text"
    else:
        kind = "messages" if prompt and isinstance(prompt[0], dict) else "token_ids"
    fields: dict[str, Any] = {kind: prompt, **options}
    return Prompt(**fields, temperature=0.0)


# Either kind continues prompts greedily, without speculation, with log-probabilities.
Reference = EngineReference | ServerClient
