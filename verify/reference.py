"""Reference of a verification: the base model, run by transformers.

Legend: N new tokens, R rows, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.engine.layout import EngineConfig
from specdec.errors import SpecDecError
from specdec.files.torch_tensors import TORCH_DTYPES
from specdec.model.blocks import GGUF
from specdec.text.pretrained import load_generation_config, load_model

SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings",
)  # fmt: skip


def check_pair(engine: EngineConfig, engine_dir: Path, config: Any, model_dir: str) -> None:
    """Raise SpecDecError where the engine cannot have been made from the model."""
    model = engine.checkpoint.model
    quantized = engine.checkpoint.quantization.quant_algo
    if quantized not in (None, GGUF):
        raise SpecDecError(
            f"the weights of {engine_dir} are quantized ({quantized}): its text is that of the"
            " quantized model, not of the one that transformers runs",
            "verify an engine of the unquantized checkpoint; compare this one with its own"
            " specdec-run --no-speculation",
        )
    if _rounds_numbers(config):
        raise SpecDecError(
            f"{model_dir} is quantized (compressed-tensors): transformers rounds the inputs of its"
            " linears, or runs four-bit floats in bfloat16 alone, and no engine of its widened"
            " weights does",
            "verify an engine of the unquantized model; compare this one with its own"
            " specdec-run --no-speculation",
        )
    different = [
        f"{name} is {engine_size} and {model_size}"
        for name in SIZES
        if (model_size := _get_size(config, name)) is not None
        and (engine_size := getattr(model, name)) != model_size
    ]
    if different:
        raise SpecDecError(
            f"{engine_dir} was not made from {model_dir}: {'; '.join(different)}",
            "give the base model that the engine's checkpoint was converted from",
        )


def _rounds_numbers(config: Any) -> bool:
    """Return whether transformers computes with rounded inputs, or in bfloat16 alone."""
    section = getattr(config, "quantization_config", None)
    groups = section.get("config_groups") if isinstance(section, dict) else None
    for group in (groups or {}).values():
        weights = group.get("weights") or {}
        is_float4 = (weights.get("type"), weights.get("num_bits")) == ("float", 4)
        if is_float4 or group.get("input_activations") is not None:
            return True
    return False


def _get_size(config: Any, name: str) -> Any:
    """Return a size in transformers' configuration; None where it has none for all layers."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers' error for what differs from layer to layer
        return None


def find_own_arithmetic(engine: EngineConfig, device: str) -> str | None:
    """Return INT8, INT4 or GGUF where no other program computes the engine's text, else None.

    The native kernels round the inputs of products with a GGUF file's blocks.
    """
    is_gguf = engine.checkpoint.quantization.quant_algo == GGUF
    if is_gguf and engine.kernels is not None and device == "cpu":
        return GGUF
    return engine.quantization


class Reference:
    """Model on its device, in the engine's type."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model = model.to(device).eval().requires_grad_(False)
        self.device = device
        self._continued: dict[tuple[int, ...], list[int]] = {}
        parameters = inspect.signature(model.forward).parameters
        self._takes_count = "logits_to_keep" in parameters
        # transformers 5.40 and later has the first name only, transformers 4 the second.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"

    def widen(self) -> None:
        """Compute in float32 from now on, with the same weights."""
        self.model.float()
        self._continued.clear()

    @torch.inference_mode()
    def continue_greedily(self, prompt: Sequence[int], length: int) -> list[int]:
        """Return the argmax after each token, one token per step, end tokens included.

        `generate` would apply generation_config.json's settings of repetition.
        """
        continuation = self._continued.setdefault(tuple(prompt), [])
        if len(continuation) < length:
            from transformers import DynamicCache

            continuation.clear()
            cache = {self._cache_name: DynamicCache(config=self.model.config)}
            tokens = list(prompt)
            while len(continuation) < length:
                ids = torch.tensor([tokens], device=self.device)
                output = self.model(input_ids=ids, use_cache=True, **cache)
                tokens = [int(output.logits[0, -1].argmax())]
                continuation += tokens
        return continuation[:length]

    @torch.inference_mode()
    def score(self, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        """Return the logits [N, V], float32, by which each token of `output` would be chosen."""
        return self._compute([[*prompt, *output[:-1]]], len(output))[0]

    def score_next(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits [R, V], float32, after each of R texts of one length."""
        return self._compute(texts, 1)[:, 0]

    @torch.inference_mode()
    def _compute(self, texts: Sequence[Sequence[int]], count: int) -> Tensor:
        """Compute logits [R, count, V], float32, after the last tokens of R texts of one length."""
        keep: dict[str, Any] = {"logits_to_keep": count} if self._takes_count else {}
        ids = torch.tensor([list(text) for text in texts], device=self.device)
        logits: Tensor = self.model(input_ids=ids, use_cache=False, **keep).logits
        return logits[:, -count:].float().cpu()


def load_reference(model_dir: str, dtype: str, device: str) -> Reference:
    """Load the model in the engine's type."""
    model = load_model(model_dir, dtype=TORCH_DTYPES[dtype])
    return Reference(model, torch.device(device))


def read_end_ids(model_dir: str, config: Any, tokenizer: Any) -> tuple[set[int], set[int]]:
    """Return the tokens that must end a text, and those that may.

    generation_config.json's must; the model configuration's and the tokenizer's may, too.
    """
    must: set[int] = set()
    if tokenizer is not None and (Path(model_dir) / "generation_config.json").is_file():
        must = _list_ids(load_generation_config(model_dir).eos_token_id)
    tokenizer_ids = _list_ids(getattr(tokenizer, "eos_token_id", None))
    return must, must | tokenizer_ids | _list_ids(getattr(config, "eos_token_id", None))


def _list_ids(value: Any) -> set[int]:
    return set(value) if isinstance(value, list) else set() if value is None else {value}
