"""The quantized model compared with the model itself, on text that the calibration has not seen."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec.errors import SpecDecError
from specdec.files.reading import Array
from specdec.model.quantization import ACTIVATION_SCALE
from specdec.system import logs

from .calibration import find_module, load_float_model
from .formats import Format
from .rounded import RoundedMatrix, Scales

if TYPE_CHECKING:
    import torch

LOGITS_BYTES = 256 << 20  # of the model's predictions, kept until the other's are there

logger = logs.get_logger(__name__)


def compare_models(
    model_dir: Path,
    rows: Sequence[list[int]],
    matrices: Mapping[str, RoundedMatrix],
    format_: Format,
    scales: Scales,
    *,
    dtype: str,
    device: str,
) -> dict[str, Any]:
    """Return perplexities and the mean KL divergence of the next token's distributions.

    Both are transformers' model, in `dtype`; the second has the rounded weights, and its linears'
    inputs are rounded where the format rounds them.
    """
    import torch

    model = load_float_model(model_dir, "AutoModelForCausalLM", dtype).to(device)
    rows = _choose(rows, model.config.get_text_config().vocab_size)

    def predict(row: list[int]) -> torch.Tensor:
        logits = model(input_ids=torch.tensor([row], device=device), use_cache=False).logits
        predictions: torch.Tensor = logits[0, :-1].float().log_softmax(-1)
        return predictions

    with torch.inference_mode(), contextlib.ExitStack() as hooks:
        expected = [predict(row).cpu() for row in rows]
        for module, matrix in logs.show_progress(
            matrices.items(), label="evaluating", total=len(matrices)
        ):
            for name in _replace(model, matrix, model_dir):
                hook = _make_hook(matrix, format_, scales, module)
                if hook is not None:
                    linear = find_module(model, name, model_dir)
                    hooks.callback(linear.register_forward_pre_hook(hook).remove)
        losses, own_losses, distances = [], [], []
        for row, reference in zip(rows, expected, strict=True):
            found, tokens = predict(row).cpu(), torch.tensor(row[1:])[:, None]
            losses.append(-found.gather(1, tokens).sum().item())
            own_losses.append(-reference.gather(1, tokens).sum().item())
            distances.append((reference.exp() * (reference - found)).sum().item())
    num_tokens = sum(len(row) - 1 for row in rows)
    if not math.isfinite(sum(losses)):
        raise SpecDecError(
            f"{format_.name} of {model_dir}: the quantized model's predictions are NaN",
            "use --dtype bfloat16 or float32 if the model overflows float16",
        )
    report = {
        "num_tokens": num_tokens,
        "perplexity": math.exp(sum(losses) / num_tokens),
        "unquantized_perplexity": math.exp(sum(own_losses) / num_tokens),
        "kl": sum(distances) / num_tokens,
    }
    logger.info(
        "%s on %d tokens that the calibration has not seen: perplexity %.4f, %s's %.4f;"
        " KL %.5f a token", format_.name, num_tokens, report["perplexity"], dtype,
        report["unquantized_perplexity"], report["kl"],
    )  # fmt: skip
    return report


def _choose(rows: Sequence[list[int]], vocab_size: int) -> list[list[int]]:
    """Return the first rows whose predictions fit into LOGITS_BYTES, the last one cut."""
    num_tokens_left, chosen_rows = LOGITS_BYTES // (4 * vocab_size), []
    for row in rows:
        if len(row) > 1 and num_tokens_left > 0:
            chosen_rows.append(row[: num_tokens_left + 1])
            num_tokens_left -= len(chosen_rows[-1]) - 1
    return chosen_rows


def _replace(model: Any, matrix: RoundedMatrix, model_dir: Path) -> list[str]:
    """Put rounded weights instead of the model's own; return the modules that have them."""
    import torch

    offset, names = 0, []
    for source_slice in matrix.tensor.slices:
        name = source_slice.name.removesuffix(".weight")
        weight = find_module(model, name, model_dir).weight.data
        weight_rows = weight.T if source_slice.is_transposed else weight
        height = source_slice.block.num_rows
        for start, stop in matrix.list_rows():
            first_row, last_row = max(start, offset), min(stop, offset + height)
            if first_row < last_row:
                top = source_slice.block.start - offset
                weight_rows[top + first_row : top + last_row] = torch.from_numpy(
                    matrix.restore(first_row, last_row)
                )
        offset += height
        names.append(name)
    return names


def _make_hook(matrix: RoundedMatrix, format_: Format, scales: Scales, module: str) -> Any:
    """Return what rounds a linear's inputs before it, or None where they are not rounded."""
    import torch

    name = f"{module}.{ACTIVATION_SCALE}"
    step = scales.get(name) if name in scales.tensors else np.float32(1)
    rounding = format_.make_input_rounding()
    if rounding is None:
        return None
    input_scale = np.float32(1) if matrix.input_scale is None else matrix.input_scale

    def round_inputs(_module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        values: Array = inputs[0].float().cpu().numpy()
        scaled = values.reshape(-1, values.shape[-1]) * input_scale
        restored = rounding(scaled, step) / input_scale
        rounded = torch.from_numpy(restored.reshape(values.shape)).to(inputs[0])
        return (rounded, *inputs[1:])

    return round_inputs
