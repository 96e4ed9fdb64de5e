"""Settings of specdec-build."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from specdec.command.settings import UnknownOption
from specdec.files.backends import BACKENDS
from specdec.methods import list_modes
from specdec.model.bounds import MAX_DRAFT_TOKENS, MAX_SIZE
from specdec.options import option_group, setting
from specdec.trtllm.facts import LABELS

FOLDERS = option_group("Folders")
ENGINE = option_group("Engine")
SPECULATION = option_group("Speculation")
SIZES = option_group("Sizes")
TENSORRT = option_group("TensorRT", rare=True)
TENSORRTLLM = option_group("TensorRT-LLM", rare=True)
TRITON = option_group("Triton", rare=True)

# Of a drafter's weights: as suits the target and the machine, or as the checkpoint has them.
AUTO, SAME = "auto", "same"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildSettings:
    """One field is one flag and one recipe key."""

    # Every build requires it; --emit-triton for an engine that is there does without.
    checkpoint_dir: Path = FOLDERS(help="Folder written by specdec-convert.")
    output_dir: Path = FOLDERS(required=True, help="Engine folder to write.")
    backend: str = ENGINE("auto", choices=("auto", *BACKENDS), help="The runtime of the engine.")
    compute_capability: str | None = TENSORRT(
        metavar="X.Y[,X.Y...]",
        help="With --backend tensorrt: the GPUs that the engine is for, such as 8.0,8.9; if not"
        " given, this machine's.",
    )  # fmt: skip
    tokenizer_dir: str | None = FOLDERS(
        metavar="DIR",
        help="Copy this tokenizer into the engine, which then needs no --tokenizer-dir to run:"
        " a folder or Hub id, usually the Hugging Face base model's.",
    )  # fmt: skip
    speculative_decoding_mode: str | None = SPECULATION(
        choices=list_modes(),
        help="How drafts are made; if not given, as the checkpoint says. On the torch backend each"
        " run of an engine without a drafter chooses that itself.",
    )  # fmt: skip
    max_batch_size: int = SIZES(8, minimum=1, maximum=2**16, help="Most requests in one batch.")
    max_input_len: int | None = SIZES(
        minimum=1, maximum=MAX_SIZE,
        help="Longest prompt in tokens; --max-seq-len minus 1 if not given.",
    )  # fmt: skip
    max_seq_len: int | None = SIZES(
        minimum=2, help="Longest prompt plus output in tokens; the model's limit if not given."
    )
    max_num_tokens: int | None = SIZES(
        minimum=1, maximum=MAX_SIZE, help="Most tokens in one forward pass."
    )
    max_draft_len: int | None = SPECULATION(
        minimum=0, maximum=MAX_DRAFT_TOKENS,
        help="Most draft tokens in a step; for ReDrafter, given by its beams and their length. On"
        " the torch backend what a run of a draft model or of lookahead drafts if it does not say.",
    )  # fmt: skip
    max_beam_width: int = SIZES(1, minimum=1, help="Beams of the output; 1 with speculation.")
    optimize: str = ENGINE(
        "auto", choices=("auto", "native", "none"),
        help="native: compile kernels for this CPU; auto: the same if there is a C++ compiler;"
        " none: use PyTorch's operators.",
    )  # fmt: skip
    packed_weights: bool | None = ENGINE(
        help="Store matrices as this machine's kernels read them: the engine loads in a moment and"
        " runs on such a machine only; disable: as the checkpoint has them, for any machine. Torch"
        " backend only.  [default: enable, with native kernels and without a GPU]",
    )  # fmt: skip
    quantization: str | None = ENGINE(
        choices=("int8", "int4"),
        elsewhere={
            name: f"specdec-convert --quantization {name}, whose checkpoint this builds as it is"
            for name in ("fp8", "fp8_pc_pt", "int8_sq", "int4_awq", "w4a8_awq", "nvfp4")
        },
        help="Store the target's layers as int8 or int4: half or a quarter of the memory of"
        " bfloat16, faster on a CPU, and the text can differ slightly. Torch backend only.",
    )  # fmt: skip
    group_size: int | None = ENGINE(
        metavar="[32|64|128]",
        help="With --quantization int4: weights that share a scale; if not given, the most that"
        " divide the columns of every matrix.",
    )  # fmt: skip
    drafter_weights: str = SPECULATION(
        AUTO, choices=(AUTO, SAME, "int8", "int4"),
        help="Type of the drafter's matrices: int8 and int4 draft faster on a CPU, nearly as well,"
        " and the text stays the target's own. auto: int8, of an EAGLE-3 int4, beside a quantized"
        " target, on a CPU and if the drafter has a head of its own; else the same as the model's."
        " Torch backend only.",
    )  # fmt: skip
    draft_vocab_file: Path | None = SPECULATION(
        metavar="FILE",
        help="Draft these tokens only, which reads less of the drafter's head: a JSON list, or"
        " .txt or .jsonl texts, of which the most frequent tokens are taken. Torch backend only.",
    )  # fmt: skip
    draft_vocab_size: int | None = SPECULATION(
        minimum=1, metavar="N",
        help="How many tokens to take of --draft-vocab-file; of a list, all if not given.",
    )  # fmt: skip
    gemm_plugin: str | None = TENSORRTLLM(
        help="TensorRT-LLM only: the type of its matrix products' plugin, auto or disable."
    )
    use_paged_context_fmha: bool | None = TENSORRTLLM(
        help="TensorRT-LLM only: read prompts in blocks of the cache; external drafts need it.",
    )
    use_fp8_context_fmha: bool | None = TENSORRTLLM(
        help="TensorRT-LLM only: compute the attention over prompts in FP8."
    )
    kv_cache_type: str | None = TENSORRTLLM(
        choices=("paged", "continuous"),
        help="Kind of KV cache; the torch backend has continuous only.",
    )
    workers: int | None = TENSORRTLLM(
        minimum=1, help="TensorRT-LLM only: ranks that are built at the same time."
    )
    trtllm_version: str | None = TENSORRTLLM(
        choices=LABELS,
        help="TensorRT-LLM version that the command is for; the installed one if not given.",
    )  # fmt: skip
    emit_script: Path | None = TENSORRTLLM(
        metavar="FILE", help="Write the TensorRT-LLM build as a shell script; build nothing here."
    )
    launcher: str = TENSORRTLLM(
        "local", choices=("local", "mpirun", "srun"), help="How the script starts trtllm-build."
    )
    emit_triton: Path | None = TRITON(
        metavar="DIR",
        help="Write a Triton model repository; without --checkpoint-dir, for the TensorRT-LLM"
        " engine that is already in --output-dir.",
    )  # fmt: skip
    triton_templates: Path | None = TRITON(
        metavar="DIR",
        help="The folder all_models/inflight_batcher_llm of the Triton release that will"
        " serve.  [default: where NVIDIA's image has it]",
    )  # fmt: skip
    triton_draft_engine_dir: Path | None = TRITON(
        metavar="DRAFT", help="The engine that drafts for this one."
    )
    triton_parameters: list[str] = TRITON(
        [],
        metavar="NAME=VALUE...",
        help="Variables of the templates: tokenizer_dir=DIR is needed; draft.NAME=VALUE is for the"
        " draft engine.",
    )  # fmt: skip
    dry_run: bool = setting(False, help="Check everything and print the plan; write nothing.")
    force: bool = setting(False, help="Replace an existing engine folder.")
    json: bool = setting(False, help="Print one JSON object on stdout.")
    # Further flags of trtllm-build, by name; the torch backend has none.
    unknown_options: Mapping[str, UnknownOption] = dataclasses.field(default_factory=dict)
