"""The drafter folder: weights, config.json, model card, log, manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.settings import to_plain
from specdec.storage import TensorInfo, write_json, write_manifest, write_tensor_file
from specdec.torch_tensors import TORCH_DTYPES, to_array

from .methods.base import Drafter
from .settings import TrainSettings


def write_drafter(
    folder: Path,
    drafter: Drafter,
    config: Mapping[str, Any],
    *,
    settings: TrainSettings,
    save_dtype: str,
    log: list[dict[str, Any]],
    report: dict[str, Any],
    target_files: list[dict[str, Any]],
    data_files: list[dict[str, Any]],
    compute: dict[str, Any],
) -> None:
    """Write everything into `folder`; all numbers are those measured in this training."""
    weights = {
        name: to_array(tensor.detach().to("cpu", TORCH_DTYPES[save_dtype]))
        for name, tensor in drafter.state_dict().items()
    }

    infos = {n: TensorInfo(save_dtype, tuple(t.shape)) for n, t in weights.items()}
    sha256 = write_tensor_file(
        folder / "model.safetensors", infos, weights.__getitem__, metadata={"format": "pt"}
    )
    write_json(folder / "config.json", {**config, "dtype": save_dtype})
    text = "".join(json.dumps(line) + "\n" for line in log)
    (folder / "training_log.jsonl").write_text(text, encoding="utf-8")
    card = write_card(settings, log, report, target_files, data_files, compute)
    (folder / "README.md").write_text(card, encoding="utf-8")
    write_manifest(
        folder,
        kind="drafter",
        settings=to_plain(settings),
        sources=[*target_files, *data_files],
        hashes={"model.safetensors": sha256},
        compute=compute,
        results=report,
    )


def write_card(
    settings: TrainSettings,
    log: list[dict[str, Any]],
    report: dict[str, Any],
    target_files: list[dict[str, Any]],
    data_files: list[dict[str, Any]],
    compute: dict[str, Any],
) -> str:
    """Write the model card."""
    evaluation = report["eval"]
    accuracies = evaluation["top_k_accuracy"]
    max_k = len(accuracies[0])
    losses = [line["mean_loss"] for line in log if "mean_loss" in line]
    held_out = f"`{settings.eval_data.name}`" if settings.eval_data else "held out of the data"
    options = {k: v for k, v in to_plain(settings).items() if k.startswith(settings.method + "_")}
    lines = [
        "---",
        f"tags: [speculative-decoding, {settings.method}]",
        "---",
        "",
        f"# {settings.method} drafter for {Path(str(settings.model_dir)).name}",
        "",
        f"A drafter for speculative decoding, trained by `specdec-train --method {settings.method}`"
        " with the target frozen. It is of use with this target only:",
        "",
        *_list_files(target_files),
        "",
        "## Data",
        "",
        *_list_files(data_files),
        "",
        f"{report['tokens']} tokens were seen in {report['steps']} steps of"
        f" {compute['rows_per_step']} rows of up to {compute['model_max_length']} tokens.",
        "",
        "## Training",
        "",
        f"* AdamW, learning rate {settings.learning_rate:g} after a warm-up over"
        f" {100 * settings.warmup_ratio:g}% of the steps, then a cosine to zero; weight decay"
        f" {settings.weight_decay:g}, gradients clipped at {settings.max_grad_norm:g}; seed"
        f" {settings.seed}",
        f"* computed in {compute['dtype']} on {compute['processes']} x {compute['device']}",
        "* " + ", ".join(f"{name} {value}" for name, value in options.items() if value is not None),
        *([f"* training loss {losses[0]} at the start, {losses[-1]} at the end"] if losses else []),
        "",
        "## Held-out results",
        "",
        f"{evaluation['rows']} rows {'of ' if settings.eval_data else ''}{held_out},"
        f" {evaluation['num_labels']} labels at the first position. Loss (nats, summed over the"
        f" positions): {evaluation['loss']}.",
        "",
        "| draft token | loss | " + " | ".join(f"top-{k}" for k in range(1, max_k + 1)) + " |",
        "| --- " * (max_k + 2) + "|",
        *(
            f"| {i} | {loss:.3f} | " + " | ".join(f"{100 * x:.1f}%" for x in row) + " |"
            for i, (loss, row) in enumerate(
                zip(evaluation["loss_per_position"], accuracies, strict=True), 1
            )
        ),
        "",
        f"A greedy chain of {len(accuracies)} draft tokens would yield"
        f" {evaluation['chain_length']:.2f} tokens per verify step on this text if the target wrote"
        " exactly it. What an engine accepts is shown by `specdec-run --json`.",
        "",
    ]
    return "\n".join(lines)


def _list_files(entries: list[dict[str, Any]]) -> list[str]:
    return [
        f"* `{Path(entry['path']).name}` {entry['bytes']} bytes, sha256 `{entry['sha256']}`"
        for entry in entries
    ]
