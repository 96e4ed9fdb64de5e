"""Rotary embedding (https://arxiv.org/abs/2104.09864): frequencies of every scaling, and tables.

What a frequency is follows transformers, token for token: each scaling is the rule that its
`generate` applies with a key/value cache.
Legend: R rotated dimensions of a head, P positions.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from specdec.errors import SpecDecError
from specdec.model.bounds import MAX_ROTARY_ELEMENTS
from specdec.model.config import FULL, SLIDING, ModelConfig
from specdec.model.rotary_scaling import get_kind

CHUNK_POSITIONS = 2048  # positions whose angles are computed at a time


def find_scaling(model: ModelConfig) -> tuple[str, dict[str, Any]]:
    """Return a model's kind of scaling and its keys; raise SpecDecError for what is not known."""
    model.find_scaling_problems().raise_all()
    scaling = model.rotary_scaling or {}
    return str(get_kind(scaling)), scaling


def find_switch_length(model: ModelConfig) -> int | None:
    """Return the longest sequence of longrope's short factors; None for other scalings."""
    kind, scaling = find_scaling(model)
    if kind != "longrope":
        return None
    return (
        model.original_max_position_embeddings
        or scaling.get("original_max_position_embeddings")
        or model.max_position_embeddings
    )


def compute_frequencies(model: ModelConfig, length: int) -> tuple[Tensor, float]:
    """Compute inverse frequencies [R / 2] of a sequence, and the factor of cos and sin."""
    kind, scaling = find_scaling(model)
    size, base = model.rotary_size, model.rotary_base
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    if kind == "dynamic":
        # "NTK-aware": the base grows with the length beyond the trained one.
        factor, trained = scaling["factor"], model.max_position_embeddings
        ratio = factor * torch.tensor(max(length, trained)) / trained - (factor - 1)
        grown = base * ratio ** (size / (size - 2))
        return 1.0 / grown**exponents, 1.0
    wavelengths = base**exponents  # over 2 pi
    if kind in ("linear", "proportional"):
        inverse = 1.0 / wavelengths / float(scaling.get("factor") or 1.0)
        # Of proportional scaling, the pairs that are not turned; a kind of whole heads has none.
        inverse[int(scaling.get("partial_rotary_factor", 1.0) * size // 2) :] = 0.0
        return inverse, 1.0
    if kind == "llama3":
        return _blend_llama3(1.0 / wavelengths, scaling), 1.0
    if kind == "yarn":
        return _blend_yarn(wavelengths, model, scaling), _get_yarn_attention(scaling)
    if kind == "longrope":
        switch = find_switch_length(model)
        assert switch is not None
        factors = scaling["long_factor" if length > switch else "short_factor"]
        inverse = 1.0 / (torch.tensor(factors, dtype=torch.float32) * wavelengths)
        return inverse, _get_longrope_attention(model, scaling, switch)
    return 1.0 / wavelengths, 1.0


def _blend_llama3(inverse: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, interpolate those between.

    "The Llama 3 Herd of Models", https://arxiv.org/abs/2407.21783.
    """
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inverse
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * inverse / factor + smooth * inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, blended)
    return torch.where(wavelength < original / high, inverse, scaled)


def _blend_yarn(wavelengths: Tensor, model: ModelConfig, scaling: dict[str, Any]) -> Tensor:
    """Interpolate by the turns that a frequency makes in the trained length.

    YaRN, https://arxiv.org/abs/2309.00071.
    """
    size = model.rotary_size
    original = scaling.get("original_max_position_embeddings") or model.max_position_embeddings

    def find_dimension(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(model.rotary_base))

    low = find_dimension(scaling.get("beta_fast") or 32)
    high = find_dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    span = high - low or 0.001
    kept_share = 1 - ((torch.arange(size // 2).float() - low) / span).clamp(0, 1)
    interpolated = 1.0 / (float(scaling["factor"]) * wavelengths)
    return interpolated * (1 - kept_share) + 1.0 / wavelengths * kept_share


def _get_yarn_attention(scaling: dict[str, Any]) -> float:
    attention_factor = scaling.get("attention_factor")
    if attention_factor is not None:
        return float(attention_factor)
    factor = float(scaling["factor"])
    mscale, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")

    def grow(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    return grow(mscale) / grow(all_dims) if mscale and all_dims else grow(1)


def _get_longrope_attention(model: ModelConfig, scaling: dict[str, Any], switch: int) -> float:
    """Return the factor of LongRoPE, https://arxiv.org/abs/2402.13753."""
    attention_factor = scaling.get("attention_factor")
    if attention_factor is not None:
        return float(attention_factor)
    factor = scaling.get("factor")
    scale = model.max_position_embeddings / switch if factor is None else factor
    return 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(switch))


def compute_query_scales(model: ModelConfig, num_positions: int) -> Tensor:
    """Compute the factors of queries by their positions, [P], in float32.

    Scaled scores keep attention sharp beyond the length of the first training, as in Llama 4:
    https://ai.meta.com/blog/llama-4-multimodal-intelligence/, after
    https://arxiv.org/abs/2501.19399.
    """
    scales = torch.ones(num_positions)
    if model.query_scaling_beta is not None:
        assert model.original_max_position_embeddings is not None
        lengths = torch.arange(num_positions) / model.original_max_position_embeddings
        scales += model.query_scaling_beta * torch.log(1 + torch.floor(lengths))
    return scales


class RotaryTable:
    """Cosines and sines of every position, [lines, R], in the model's type.

    Position p of a sequence is line `start + p`, with the start of `find_start`. There is more
    than one table where the frequencies depend on how long a sequence is:

    dynamic: a token beyond the trained length has the frequencies of the length that it completes;
    tokens before it keep theirs. Prompts must be within the trained length.
    longrope: one table for sequences up to the switch length, one for prompts beyond it. A sequence
    may not cross it: transformers computes all keys again there.

    query_shift: how many lines further on a query's line is than a key's. It is 0 but where queries
    are scaled by their positions, and then their lines, which are scaled, follow those of keys.
    """

    def __init__(
        self, model: ModelConfig, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.kind, _ = find_scaling(model)
        if num_positions * model.rotary_size > MAX_ROTARY_ELEMENTS:
            raise SpecDecError(
                f"{num_positions} positions of {model.rotary_size} rotated dimensions are"
                f" {num_positions * model.rotary_size} elements, more than {MAX_ROTARY_ELEMENTS}",
                "build with a smaller --max-seq-len",
            )
        self.num_positions = num_positions
        self.max_prompt_len: int | None = None
        self.switch_len = find_switch_length(model)
        if self.switch_len is not None and num_positions <= self.switch_len:
            self.switch_len = None  # never reached
        trained = model.max_position_embeddings
        inverse, self.attention_factor = compute_frequencies(model, 1)
        frequencies = [inverse]
        if self.kind == "dynamic":
            self.max_prompt_len = trained
        if self.switch_len is not None:
            frequencies.append(compute_frequencies(model, self.switch_len + 1)[0])
        shape = (len(frequencies), num_positions, 2, model.rotary_size // 2)
        cos, sin = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        positions = torch.arange(num_positions).float()
        # A part at a time: the angles of all positions take more memory than the table.
        for start in range(0, num_positions, CHUNK_POSITIONS):
            chunk = slice(start, start + CHUNK_POSITIONS)
            for table, inverse in enumerate(frequencies):
                angles = torch.outer(positions[chunk], inverse)
                dynamic_from = max(start, trained if self.kind == "dynamic" else num_positions)
                for position in range(dynamic_from, start + len(angles)):
                    position_frequencies, _ = compute_frequencies(model, position + 1)
                    angles[position - start] = position * position_frequencies
                for all_values, half in ((cos, angles.cos()), (sin, angles.sin())):
                    half = (half * self.attention_factor).to(device, dtype)
                    all_values[table, chunk] = half.unsqueeze(1)
        self.cos, self.sin = cos.view(-1, model.rotary_size), sin.view(-1, model.rotary_size)
        self.query_shift = 0
        self._add_queries(model, num_positions)

    def _add_queries(self, model: ModelConfig, num_positions: int) -> None:
        """Add lines for queries, which are those of keys times their scales, if any is not 1."""
        first_length = model.original_max_position_embeddings or num_positions
        if not model.query_scaling_beta or num_positions <= first_length:
            return
        scales = compute_query_scales(model, num_positions).to(self.cos.device)
        self.query_shift = len(self.cos)
        self.cos, self.sin = (
            torch.cat((half, (half.float() * scales[:, None]).to(half.dtype)))
            for half in (self.cos, self.sin)
        )

    def repeat(self, num_lines: int) -> None:
        """Let every table that another's lines are of, `num_lines` in all, be this one."""
        times = num_lines // len(self.cos)
        self.cos, self.sin = self.cos.repeat(times, 1), self.sin.repeat(times, 1)

    def find_start(self, prompt_len: int) -> int:
        """Find the line of position 0 for a sequence that begins with so many prompt tokens."""
        is_long = self.switch_len is not None and prompt_len > self.switch_len
        return self.num_positions if is_long else 0

    def check_request(self, prompt_len: int, total_len: int) -> tuple[str, str] | None:
        """Tell what is wrong with a request of so many tokens, and the remedy; None if nothing."""
        if self.max_prompt_len is not None and prompt_len > self.max_prompt_len:
            return (
                f"the prompt has {prompt_len} tokens; with dynamic rotary scaling a prompt may have"
                f" max_position_embeddings={self.max_prompt_len}",
                "shorten it: only the output may go beyond",
            )
        switch = self.switch_len
        if switch is not None and prompt_len <= switch < total_len:
            return (
                f"prompt and output of {prompt_len} + {total_len - prompt_len} tokens cross"
                f" {switch}, where longrope scaling changes all keys",
                f"ask for {switch - prompt_len} tokens or fewer, or give a prompt of more than"
                f" {switch}",
            )
        return None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R dimensions, halves paired; the others pass. x: [B, T, N, H]."""
    size = cos.shape[-1]
    rotated, passed = x[..., :size], x[..., size:]
    first_half, second_half = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((-second_half, first_half), dim=-1) * sin
    return torch.cat((rotated, passed), dim=-1) if passed.shape[-1] else rotated


def make_tables(
    model: ModelConfig, num_positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[RotaryTable, RotaryTable]:
    """Make the tables of layers without a window and with one, in most models one table."""
    types = model.layer_types or ()
    full_model, local_model = (
        model.resize(types.index(kind)) if kind in types else model for kind in (FULL, SLIDING)
    )
    table = RotaryTable(full_model, num_positions, dtype, device)
    if model.rope_local_base_freq is None:
        return table, table
    unscaled = dataclasses.replace(
        local_model, rotary_base=model.rope_local_base_freq, rotary_scaling=None
    )
    local = RotaryTable(unscaled, num_positions, dtype, device)
    local.repeat(len(table.cos))
    return table, local
