"""What the server's text is held against: an engine of ours, or another server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from specdec.errors import SpecDecError
from specdec.http_client import read_key

from .answers import Answer, AnyPrompt, Token
from .server import Server
from .settings import AuditSettings


class Reference(Protocol):
    """Continues prompts greedily, without speculation, and tells of each token what it can."""

    name: str

    def continue_all(self, prompts: Sequence[AnyPrompt], max_tokens: int) -> list[Answer]: ...


@contextlib.contextmanager
def open_reference(settings: AuditSettings) -> Iterator[Reference | None]:
    """The reference that the settings name; None where they name none."""
    if settings.reference_engine is not None:
        from specdec import Engine

        with Engine.load(
            settings.reference_engine, tokenizer=settings.tokenizer_dir, device=settings.device,
            speculation=False,
        ) as engine:  # fmt: skip
            if engine.tokenizer is None:
                raise SpecDecError(
                    f"{settings.reference_engine} holds no tokenizer",
                    "give the base model's folder as --tokenizer-dir",
                )
            yield EngineReference(engine, str(settings.reference_engine))
    elif settings.reference_url is not None:
        key = None
        if settings.reference_api_key_file is not None:
            key = read_key(settings.reference_api_key_file, "--reference-api-key-file")
        flags = ("--reference-url", "--reference-model", "--reference-api-key-file")
        model = settings.reference_model or settings.model
        server = Server(settings.reference_url, model, key, settings.timeout, flags)
        server.open()
        yield ServerReference(server)
    else:
        yield None


class EngineReference:
    """An engine in this process, decoding one token a step."""

    def __init__(self, engine: Any, name: str) -> None:
        self.name = name
        self._engine = engine

    def continue_all(self, prompts: Sequence[AnyPrompt], max_tokens: int) -> list[Answer]:
        """Continue prompts, several at once."""
        from specdec import Prompt
        from specdec.decode.prompts import MAX_LOGPROBS

        def make(prompt: AnyPrompt) -> Prompt:
            if isinstance(prompt, str):
                kind = "text"
            else:
                kind = "messages" if prompt and isinstance(prompt[0], dict) else "token_ids"
            given: dict[str, Any] = {kind: prompt}
            return Prompt(**given, temperature=0.0, logprobs=MAX_LOGPROBS)

        asked = [make(prompt) for prompt in prompts]
        outputs = self._engine.generate(asked, max_output_len=max_tokens)
        pairs = zip(prompts, outputs, strict=True)
        return [self._describe(prompt, output, max_tokens) for prompt, output in pairs]

    def _describe(self, prompt: AnyPrompt, output: Any, max_tokens: int) -> Answer:
        from specdec.decode.text import TextStream, decode_text

        stream = TextStream(self._engine.tokenizer)
        for token in output.token_ids:
            stream.add(token)
        ends = [min(end, len(output.text)) for end in stream.ends]
        starts = [0, *ends]

        def name(token: int, logprob: float) -> Token:
            return Token(token, decode_text(self._engine.tokenizer, [token]), logprob)

        tokens = [
            Token(
                token, output.text[starts[at] : ends[at]], told.logprob,
                tuple(name(*pair) for pair in told.top),
            )
            for at, (token, told) in enumerate(zip(output.token_ids, output.logprobs, strict=True))
        ]  # fmt: skip
        return Answer(
            prompt=prompt, text=output.text, max_tokens=max_tokens, ids=output.token_ids,
            tokens=tokens, ends=ends, finish_reason=output.finish_reason,
            prompt_ids=output.prompt_ids,
        )  # fmt: skip


class ServerReference:
    """Another server."""

    def __init__(self, server: Server) -> None:
        self.name = server.base
        self._server = server

    def continue_all(self, prompts: Sequence[AnyPrompt], max_tokens: int) -> list[Answer]:
        """Continue prompts, one after the other."""
        return [self._server.ask_told(prompt, max_tokens=max_tokens) for prompt in prompts]
