"""Writing of the drafter folder: weights, config.json, model card, log, manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.command.settings import to_plain
from specdec.files.acceptance import copy_acceptance
from specdec.files.manifest import write_manifest
from specdec.files.reading import write_json
from specdec.files.tensor_file import TensorInfo, write_tensor_file
from specdec.files.torch_tensors import TORCH_DTYPES, to_array

from .settings import TrainSettings

if TYPE_CHECKING:
    from torch import Tensor

    from .job import TrainingJob
    from .methods.base import TrainableDrafter


def write_drafter(
    folder: Path,
    job: TrainingJob,
    drafter: TrainableDrafter,
    weights: Mapping[str, Tensor],
    report: dict[str, Any],
    *,
    rows_per_step: int,
) -> None:
    """Write all files of a drafter into `folder`; report: the results of the training.

    weights: the drafter's tensors, whole.
    """
    log = job.state.read_log()
    compute = {
        "dtype": job.dtype,
        "device": job.accelerator.device.type,
        "processes": job.accelerator.num_processes,
        "rows_per_step": rows_per_step,
        "model_max_length": job.max_length,
    }
    hashes = write_weights(folder, job, drafter, weights)
    if report["eval"].get("acceptance") is not None:  # else an interrupted run may have left one
        copy_acceptance(job.state.folder, folder)
    text = "".join(json.dumps(line) + "\n" for line in log)
    (folder / "training_log.jsonl").write_text(text, encoding="utf-8")
    (folder / "README.md").write_text(write_card(job, log, report, compute), encoding="utf-8")
    write_manifest(
        folder,
        kind="drafter",
        settings=to_plain(job.settings),
        sources=[*job.target_files, *job.data_files],
        hashes=hashes,
        compute=compute,
        results=report,
    )


def write_weights(
    folder: Path, job: TrainingJob, drafter: TrainableDrafter, weights: Mapping[str, Tensor]
) -> dict[str, str]:
    """Write the weights and config.json, which specdec-convert reads; return the sha256."""
    method, target, dtype = job.method, job.target, job.save_dtype
    infos, arrays = {}, {}
    tensors = {**drafter.finish_weights(weights), **method.list_written_copies(target)}
    for name, tensor in tensors.items():
        kind = dtype if tensor.is_floating_point() else "int64"  # d2t holds offsets of ids
        arrays[name] = to_array(tensor.detach().to("cpu", TORCH_DTYPES.get(kind)))
        infos[name] = TensorInfo(kind, tuple(tensor.shape))
    sha256 = write_tensor_file(
        folder / method.weights_name, infos, arrays.__getitem__, metadata={"format": "pt"}
    )
    config = method.describe(drafter, target)
    write_json(folder / "config.json", {**config, "dtype": dtype})
    return {method.weights_name: sha256}


def write_card(
    job: TrainingJob, log: Sequence[dict[str, Any]], report: dict[str, Any], compute: dict[str, Any]
) -> str:
    """Write the model card."""
    settings = job.settings
    lines = [
        "---",
        f"tags: [speculative-decoding, {settings.method}]",
        "---",
        "",
        f"# {settings.method} drafter for {Path(settings.model_dir).name}",
        "",
        f"A drafter for speculative decoding, trained by `specdec-train --method {settings.method}`"
        " with the target frozen. It is of use with this target only:",
        "",
        *_list_files(job.target_files),
        "",
        "## Data",
        "",
        *_list_files(job.data_files),
        "",
        f"{report['tokens']} tokens were seen in {report['steps']} steps of"
        f" {compute['rows_per_step']} rows of up to {compute['model_max_length']} tokens.",
        "",
        "## Training",
        "",
        *_describe_training(settings, log, compute),
        "",
        "## Held-out results",
        "",
        *_describe_results(settings, report["eval"]),
        "",
    ]
    return "\n".join(lines)


def _describe_training(
    settings: TrainSettings, log: Sequence[dict[str, Any]], compute: dict[str, Any]
) -> list[str]:
    """Return the model card's lines about optimizer, devices, method and loss."""
    losses = [line["mean_loss"] for line in log if "mean_loss" in line]
    options = {k: v for k, v in to_plain(settings).items() if k.startswith(settings.method + "_")}
    return [
        f"* {_name_optimizer(settings)}, learning rate {settings.learning_rate:g} after a warm-up"
        f" over {100 * settings.warmup_ratio:g}% of the steps, then a cosine to zero; weight decay"
        f" {settings.weight_decay:g}, gradients clipped at {settings.max_grad_norm:g}; seed"
        f" {settings.seed}",
        *([f"* went on from the drafter `{start.name}`"] if (start := settings.start_from) else []),
        f"* computed in {compute['dtype']} on {compute['processes']} x {compute['device']}",
        f"* {100 * settings.self_distillation:g}% of what is learned is the target's own"
        f" distribution (loss {settings.loss}), the rest the text's tokens; weights by depth:"
        f" {settings.depth_weighting}",
        "* " + ", ".join(f"{name} {value}" for name, value in options.items() if value is not None),
        *([f"* training loss {losses[0]} at the start, {losses[-1]} at the end"] if losses else []),
    ]


def _name_optimizer(settings: TrainSettings) -> str:
    if settings.optimizer == "adamw":
        return "AdamW"
    rate = settings.muon_learning_rate or settings.learning_rate
    return f"Muon for matrices, learning rate {rate:g}; AdamW for other weights"


def _describe_results(settings: TrainSettings, evaluation: dict[str, Any]) -> list[str]:
    """Return the model card's lines about the held-out rows and the engine's acceptance."""
    accuracies = evaluation["top_k_accuracy"]
    max_k = len(accuracies[0])
    held_out = f"`{settings.eval_data.name}`" if settings.eval_data else "held out of the data"
    return [
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
        " exactly it.",
        "",
        _describe_acceptance(evaluation.get("acceptance")),
    ]


def _describe_acceptance(acceptance: dict[str, Any] | None) -> str:
    if acceptance is None:
        return "The acceptance by an engine was not measured; `specdec-run --json` shows it."
    return (
        f"An engine made by specdec-convert and specdec-build ({acceptance['dtype']}, their"
        f" defaults) emitted **{acceptance['acceptance_length']:.2f}** tokens per verify step:"
        f" greedy decoding of {acceptance['prompts']} held-out prompts,"
        f" {acceptance['num_output_tokens']} tokens in {acceptance['num_verify_steps']} verify"
        " steps."
    )


def _list_files(entries: list[dict[str, Any]]) -> list[str]:
    return [
        f"* `{Path(entry['path']).name}` {entry['bytes']} bytes, sha256 `{entry['sha256']}`"
        for entry in entries
    ]
