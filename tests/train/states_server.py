"""A server on this machine that answers as vLLM does with extract_hidden_states."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tests.loopback import LoopbackServer, read_json


class Extractor:
    """A target of transformers, whose states are taken by vLLM's numbers of layers."""

    def __init__(self, model_dir: Path, layer_ids: list[int]) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self.layer_ids = layer_ids

    def extract(self, ids: list[int]) -> tuple[dict[str, Tensor], int]:
        """Return the tensors of a file, and the next token."""
        layers, outputs = self.model.model.layers, []
        hooks = [
            layer.register_forward_hook(
                lambda _, inputs, output: outputs.append(
                    output[0] if isinstance(output, tuple) else output
                )
            )
            for layer in layers
        ]
        with torch.no_grad():
            tokens = torch.tensor([ids])
            logits = self.model(tokens, attention_mask=torch.ones_like(tokens)).logits
            embedded = self.model.get_input_embeddings()(tokens)
        for hook in hooks:
            hook.remove()
        states = [embedded, *outputs]
        stacked = torch.stack([states[i][0] for i in self.layer_ids], 1)
        return {"hidden_states": stacked, "token_ids": tokens[0]}, int(logits[0, -1].argmax())


class StatesServer(LoopbackServer):
    """Writes each prompt's states into a folder. change: alters tensors and answers, in place."""

    def __init__(
        self, extractor: Extractor, folder: Path,
        change: Callable[[dict[str, Tensor], dict[str, Any]], None] | None = None,
        statuses: list[int] | None = None,
    ) -> None:  # fmt: skip
        self.extractor, self.folder, self.change = extractor, folder, change
        self.statuses = statuses or []  # of the first answers
        self.num_prompts = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"{super().url}/v1"

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = read_json(handler)
        assert handler.path == "/v1/completions"
        with self._lock:
            number, self.num_prompts = self.num_prompts, self.num_prompts + 1
            tensors, next_token = self.extractor.extract(body["prompt"])
        path = self.folder / f"cmpl-{number}-0.safetensors"
        answer = {
            "object": "text_completion",
            "choices": [{
                "index": 0, "text": "", "finish_reason": "length",
                "token_ids": [next_token], "prompt_token_ids": list(body["prompt"]),
            }],
            "kv_transfer_params": {"hidden_states_path": str(path)},
        }  # fmt: skip
        if self.change is not None:
            self.change(tensors, answer)
        try:
            save_file(tensors, path)
            path.with_name(f"{path.name}.lock").touch()
        except (OSError, SafetensorError):
            if self.folder.is_dir():
                raise
            return  # the test is over, and nobody waits for the answer
        status = self.statuses[number] if number < len(self.statuses) else 200
        data = json.dumps(answer if status == 200 else {"error": {"message": "no"}}).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)
