"""transformers: generate, assisted generation and prompt lookup."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers

from ..wire import Calls, describe_texts, serve


class Models:
    """The target and its draft model; passes of the target are counted."""

    def __init__(self, target: str, draft: str, dtype: str) -> None:
        self.model, self.assistant = (
            transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, dtype), trust_remote_code=False
            ).eval()
            for folder in (target, draft)
        )
        self._default = {
            name: getattr(self.assistant.generation_config, name)
            for name in (
                "num_assistant_tokens", "num_assistant_tokens_schedule",
                "assistant_confidence_threshold",
            )
        }  # fmt: skip
        self._num_passes = 0
        self.model.model.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._num_passes += 1

    def choose(self, way: str, setting: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `generate` that decode in some way."""
        if way == "plain":
            return {}
        if way == "prompt lookup":
            return {"prompt_lookup_num_tokens": setting["length"]}
        changes = dict(self._default)
        if "length" in setting:
            changes = {
                "num_assistant_tokens": setting["length"],
                "num_assistant_tokens_schedule": "constant",
                "assistant_confidence_threshold": 0.0,
            }
        for name, value in changes.items():
            setattr(self.assistant.generation_config, name, value)
        return {"assistant_model": self.assistant}

    def run(
        self, way: str, setting: dict[str, Any], prompts: list[list[int]], max_output_len: int,
        end_id: int,
    ) -> dict[str, Any]:  # fmt: skip
        """Decode each prompt by itself."""
        extra = self.choose(way, setting)
        self._num_passes = 0
        texts = []
        began = time.perf_counter()
        for prompt in prompts:
            ids = torch.tensor([prompt])
            output = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_output_len,
                do_sample=False, eos_token_id=end_id, pad_token_id=end_id, **extra,
            )  # fmt: skip
            texts.append(output[0, len(prompt) :].tolist())
        seconds = time.perf_counter() - began
        # The prompt's own pass yields a token too.
        steps = 0 if way == "plain" else self._num_passes - len(prompts)
        return describe_texts(texts, steps, seconds, end_id)


def start(target: str, draft: str, dtype: str, threads: int) -> tuple[dict[str, Any], Calls]:
    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity_error()
    began = time.perf_counter()
    models = Models(target, draft, dtype)
    about = {
        "load_seconds": time.perf_counter() - began,
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "computes_in": dtype,
    }
    return about, {"run": models.run}


if __name__ == "__main__":
    serve(start)
