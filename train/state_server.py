"""vLLM server that extracts hidden states: prompts go there as token ids, files come back.

It runs the speculative method `extract_hidden_states` with vLLM's ExampleHiddenStatesConnector or
one of the package hs-connectors that writes files, into a folder that this machine reads at the
path that the server names.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from specdec.errors import SpecDecError, shorten
from specdec.files.tensor_file import TensorFile
from specdec.system.http_client import HttpClient, NoAnswer, Response, check_url, choose_wait

from .rows import Array, TokenRows
from .state_files import StatesForm, check_tokens, open_when_written

FLAG = "--hidden-states-from"
KEY_VARIABLE = "OPENAI_API_KEY"
TIMEOUT = 600.0  # seconds for an answer
TRIES = 4
OTHER_BYTES, BYTES_PER_TOKEN = 2**20, 64  # most bytes of an answer


class StatesServer:
    """Server of hidden states, which threads may share."""

    def __init__(self, url: str, form: StatesForm) -> None:
        check_url(url, FLAG, "train", KEY_VARIABLE)
        self.url, self.form = f"{url.rstrip('/')}/completions", form
        self._http = HttpClient(os.environ.get(KEY_VARIABLE, "").strip() or None, TIMEOUT)

    def fetch(self, tokens: Array) -> tuple[TensorFile, int | None]:
        """Return the file of a row's states, and the token that the server decodes after it."""
        ids = [int(token) for token in tokens]
        # Some answers carry the prompt's ids twice. No model is named: the server has one.
        body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        answer = self._ask(json.dumps(body).encode(), OTHER_BYTES + BYTES_PER_TOKEN * len(ids))
        path, next_token = self._read_answer(answer, ids)
        if not path.is_file() and not path.with_name(f"{path.name}.lock").exists():
            raise SpecDecError(
                f"{self.url} wrote hidden states to {path}, which is not on this machine",
                "let the connector's shared_storage_path be on a file system that both machines"
                " have at the same path",
            )
        file = open_when_written(path)
        self.form.check(file)
        check_tokens(file, tokens)
        if (num_tokens := len(file.read("token_ids"))) != len(ids):
            raise SpecDecError(
                f"{path} has {num_tokens} tokens, the prompt {len(ids)}",
                f"start the server without include_output_tokens for {self.url}",
            )
        return file, next_token

    def release(self, file: TensorFile) -> None:
        """Remove a file that has been read, and its lock."""
        for path in (file.path, file.path.with_name(f"{file.path.name}.lock")):
            with contextlib.suppress(OSError):
                path.unlink()

    def check_rows(self, split: str, rows: TokenRows) -> None:
        """Ask for the first row, so that a server of another form is refused at once."""
        file, _ = self.fetch(rows.tokens[: rows.bounds[1]])
        self.release(file)

    def _ask(self, body: bytes, max_bytes: int) -> Any:
        """Return the answer's JSON; repeat a request that another try may answer."""
        reason, wait = "", 0.0
        for number in range(TRIES):
            if number:
                time.sleep(max(choose_wait(number - 1), wait))
            try:
                response = self._http.exchange(self.url, body, max_bytes)
            except NoAnswer as lost:
                if lost.was_never:
                    raise lost.explain(self.url, FLAG) from None
                reason, wait = lost.reason, 0.0
                continue
            if response.is_success:
                return self._parse(response)
            reason, wait = f"HTTP {response.status}", response.wait
            if text := self._http.find_message(response.data):
                reason += f", {shorten(text, 300)}"
            if not response.is_transient:
                raise SpecDecError(
                    f"{self.url} refuses the request: {reason}",
                    f"check {FLAG} (does it end in /v1?), and that the server's --max-model-len is"
                    " more than --model-max-length",
                )
        raise SpecDecError(
            f"{self.url}: {reason} (after {TRIES} tries)",
            "look at the server's log, then run the same command again: with --hidden-states-dir"
            " it goes on with what is written",
        )

    def _parse(self, response: Response) -> Any:
        try:
            return json.loads(response.data)
        except (ValueError, RecursionError):
            raise self._refuse(f"{len(response.data)} bytes that are no JSON") from None

    def _refuse(self, fact: str) -> SpecDecError:
        return SpecDecError(
            f"{self.url} answers {fact}",
            "start vLLM with the speculative method extract_hidden_states and a connector that"
            f" writes files, and with the layer ids {self.form.describe()}: docs/train.md has the"
            " command",
        )

    def _read_answer(self, answer: Any, ids: list[int]) -> tuple[Path, int | None]:
        """Return the path of the states and the next token."""
        try:
            choice, params = answer["choices"][0], answer["kv_transfer_params"]
            next_token = choice["token_ids"][0]
            prompt = choice.get("prompt_token_ids", answer.get("prompt_token_ids"))
            path = params.get("hidden_states_path")
        except (LookupError, TypeError, AttributeError):
            raise self._refuse(
                "without kv_transfer_params and token_ids: it extracts no hidden states"
            ) from None
        if prompt != ids:
            count = len(prompt) if isinstance(prompt, list) else prompt
            raise self._refuse(f"for other token ids: {count} of them, {len(ids)} were sent")
        if not isinstance(path, str):
            handle = shorten(params.get("handle"))
            raise self._refuse(f"without hidden_states_path, with the handle {handle} of a store")
        return Path(path), next_token if isinstance(next_token, int) else None
