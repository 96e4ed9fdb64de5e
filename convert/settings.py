"""Settings of specdec-convert."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specdec.methods import list_modes, list_options
from specdec.model.bounds import MAX_RANKS
from specdec.options import add_options, option_group, setting
from specdec.trtllm.facts import DEFAULT_LABEL, LABELS

MODELS = option_group("Models")
CHECKPOINT = option_group("Checkpoint")
EXPERTS = option_group("Experts", rare=True)
WORK = option_group("Work", rare=True)
EMBEDDING = option_group("Embedding", rare=True)
QUANTIZATION = option_group("Quantization", rare=True)


@add_options(*list_options("convert"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertSettings:
    """One field is one flag and one recipe key.

    None stands for "not given", so that a flag that cannot take effect is refused, not ignored.
    """

    model_dir: str | None = MODELS(
        folder="model",
        metavar="BASE",
        help="The target: a Hugging Face folder, a Hub id, or a GGUF file.",
    )
    base_model_checkpoint_dir: Path | None = MODELS(
        metavar="CKPT", help="The target as an existing checkpoint folder, instead of --model-dir."
    )
    speculative_decoding_mode: str | None = MODELS(
        choices=("mtp",), rare=True,
        elsewhere={
            mode: "specdec-build takes this mode; a drafter with weights is given by its folder"
            for mode in list_modes() if mode != "mtp"
        },
        help="mtp: the head that --model-dir itself holds drafts, as --mtp-model-dir BASE says.",
    )  # fmt: skip
    lora_dir: Path | None = MODELS(
        metavar="ADAPTER",
        help="A LoRA adapter that PEFT saved: it is merged into the weights of --model-dir.",
    )
    output_dir: Path = CHECKPOINT(required=True, help="Checkpoint folder to write.")
    dtype: str = CHECKPOINT(
        "auto", choices=("auto", "float16", "bfloat16", "float32"),
        help="Type of the weights; auto keeps the target's. With --base-model-checkpoint-dir,"
        " the type of the drafter's weights.",
    )  # fmt: skip
    tp_size: int | None = CHECKPOINT(
        minimum=1, maximum=MAX_RANKS, metavar="N",
        help="Number of tensor-parallel ranks; if not given, 1, or as many as an existing"
        " checkpoint has.",
    )  # fmt: skip
    pp_size: int | None = CHECKPOINT(
        minimum=1, maximum=MAX_RANKS, metavar="N",
        help="Number of pipeline-parallel stages, only without a drafter; 1 if not given.",
    )  # fmt: skip
    moe_tp_size: int | None = EXPERTS(
        minimum=1, maximum=MAX_RANKS, metavar="N",
        help="Of a mixture of experts: ranks that share each expert; if not given, as many as are"
        " left by --moe-ep-size.",
    )  # fmt: skip
    moe_ep_size: int | None = EXPERTS(
        minimum=1, maximum=MAX_RANKS, metavar="N",
        help="Of a mixture of experts: groups of ranks that have experts of their own; 1 if not"
        " given. Times --moe-tp-size it is --tp-size.",
    )  # fmt: skip
    workers: int | None = WORK(
        minimum=1, metavar="N", help="Threads; if not given, one for each usable core, at most 16."
    )
    use_parallel_embedding: bool = EMBEDDING(
        False, help="Split the embedding table over the ranks."
    )
    embedding_sharding_dim: int | None = EMBEDDING(
        metavar="[0|1]",
        help="With --use-parallel-embedding: split by vocabulary (0, the default) or hidden"
        " size (1).",
    )  # fmt: skip
    use_embedding_sharing: bool = EMBEDDING(
        False, help="Store a tied head and embedding once; only with --trtllm-version 0.14."
    )
    trtllm_version: str | None = CHECKPOINT(
        choices=LABELS,
        help="TensorRT-LLM version that the checkpoint is for; its names are 1.2's if not given.",
    )
    quantization: str | None = QUANTIZATION(
        choices=("fp8", "fp8_pc_pt", "int8_sq", "int4_awq", "w4a8_awq", "nvfp4"),
        elsewhere={
            name: f"convert without --quantization, then specdec-build --quantization {name}"
            for name in ("int8", "int4")
        },
        help="Quantize the target's linear layers; all but fp8_pc_pt need --calibration-data.",
    )
    group_size: int | None = QUANTIZATION(
        metavar="[32|64|128]",
        help="With int4_awq and w4a8_awq: weights that share a scale; 128 if not given.",
    )  # fmt: skip
    dequantize: bool = QUANTIZATION(
        False,
        help="Write the plain weights that a quantized target's numbers stand for, in --dtype.",
    )  # fmt: skip
    kv_cache_dtype: str | None = QUANTIZATION(
        choices=("fp8",),
        rare=True,
        help="With --quantization: also write scales for an FP8 KV cache.",
    )
    calibration_data: Path | None = QUANTIZATION(
        metavar="FILE",
        help="Texts like those to be decoded: .txt, one a line, or .jsonl or .json with `text`,"
        " `messages`, `conversations` or `input_ids`.",
    )  # fmt: skip
    calib_size: int | None = QUANTIZATION(
        minimum=1, metavar="N",
        help="Rows of --calibration-data to use; if not given, all up to 512, with int4_awq,"
        " w4a8_awq and int8_sq up to 128.",
    )  # fmt: skip
    calib_batch_size: int | None = QUANTIZATION(
        minimum=1, metavar="N", help="Rows of equal length in a forward pass; 1 if not given."
    )
    calib_max_seq_length: int | None = QUANTIZATION(
        minimum=1, metavar="N", help="Cut each row to this many tokens; 512 if not given."
    )
    calib_device: str | None = QUANTIZATION(
        choices=("auto", "cpu", "cuda"), help="Where the calibration runs; auto if not given."
    )
    allow_nonfinite: bool = WORK(
        False,
        help="Accept weights that are NaN or infinite, or become so in --dtype; manifest.json"
        " counts them.",
    )  # fmt: skip
    allow_zeros: bool = WORK(
        False,
        help="Accept zeros in the place of weights, as an unfinished download leaves them.",
    )  # fmt: skip
    dry_run: bool = setting(False, help="Check everything and print the plan; write nothing.")
    force: bool = setting(False, help="Replace an existing output folder.")
    json: bool = setting(False, help="Print one JSON object on stdout.")

    @property
    def line(self) -> str:
        """Return the line of TensorRT-LLM whose names and keys the checkpoint has."""
        return self.trtllm_version or DEFAULT_LABEL
