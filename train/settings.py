"""Settings of the train stage: a field here is a flag, a recipe key and its help text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specdec.bounds import MAX_MODULES
from specdec.settings import setting

from .methods import TRAINABLE


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """What `specdec-train` takes; options of one method carry its name."""

    method: str = setting("redrafter", help="Kind of drafter.", choices=tuple(TRAINABLE))
    model_dir: str | None = setting(
        help="The target: a Hugging Face folder or Hub id; it is not changed.", metavar="BASE"
    )
    data: Path | None = setting(
        help="Training data: FILE.txt, or FILE.jsonl with `text`, `messages` or `conversations`.",
        kind="path",
        metavar="FILE",
    )
    output_dir: Path | None = setting(help="Folder for the drafter.", kind="path", metavar="OUT")
    eval_data: Path | None = setting(
        help="Held-out data in the same formats; without it 2% of --data is held out.",
        kind="path",
        metavar="FILE",
    )
    max_steps: int | None = setting(help="Optimizer steps.", kind="int", minimum=1, metavar="N")
    num_epochs: float | None = setting(
        help="Passes over the data, instead of --max-steps; 2 if neither is given.",
        kind="float",
        minimum=0,
        metavar="X",
    )
    learning_rate: float | None = setting(
        help="Highest learning rate of AdamW; the method's own if not given.",
        kind="float",
        minimum=0,
    )
    batch_size: int = setting(4, help="Rows per device and forward pass.", kind="int", minimum=1)
    gradient_accumulation_steps: int = setting(
        1, help="Forward passes per optimizer step.", kind="int", minimum=1
    )
    model_max_length: int | None = setting(
        help="Tokens per row; default: the target's limit, at most 2048.", kind="int", minimum=8
    )
    warmup_ratio: float = setting(
        0.1, help="Part of the steps in which the learning rate rises.", kind="float", minimum=0
    )
    weight_decay: float = setting(0.0, help="AdamW's weight decay.", kind="float", minimum=0)
    max_grad_norm: float = setting(1.0, help="Gradient clipping; 0: none.", kind="float", minimum=0)
    seed: int = setting(0, help="Of the first weights and of the data's order.", kind="int")
    dtype: str = setting(
        "auto",
        help="Type to compute in; the weights being trained stay float32. auto: bfloat16 where"
        " the processor has it.",
        choices=("auto", "bfloat16", "float32"),
    )
    self_distillation: float | None = setting(
        help="Share of the target's own distribution in what is learned, 0 to 1; the rest is the"
        " text's tokens. The method's own if not given.",
        kind="float",
        minimum=0,
        metavar="W",
    )
    shard_target: bool = setting(
        False,
        help="Split the target's layers over the processes, for one that does not fit one GPU; so"
        " do accelerate's FSDP and DeepSpeed ZeRO 3.",
        kind="flag",
    )
    hidden_states_dir: Path | None = setting(
        help="Compute the target's hidden states once and keep them here; or read those that are"
        " here, without the target's layers in memory.",
        kind="path",
        metavar="DIR",
    )
    save_dtype: str = setting(
        "auto",
        help="Type of the written weights. auto: bfloat16 if the target is, else float32.",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    save_steps: int = setting(
        500, help="Steps between checkpoints; 0: none.", kind="int", minimum=0
    )
    eval_steps: int = setting(
        500, help="Steps between evaluations; 0: at the end only.", kind="int", minimum=0
    )
    eval_rows: int = setting(128, help="Most rows per evaluation.", kind="int", minimum=1)
    eval_prompts: int = setting(
        16,
        help="Held-out prompts on which an engine's real acceptance is measured at every"
        " evaluation; 0: none.",
        kind="int",
        minimum=0,
    )
    eval_output_len: int = setting(
        64, help="Tokens written for each of --eval-prompts.", kind="int", minimum=2
    )
    stop_at_acceptance: float | None = setting(
        help="Stop at an evaluation with this acceptance length or more.",
        kind="float",
        minimum=1,
        metavar="X",
    )
    report_top_k: int = setting(5, help="Report top-1 to top-K accuracy.", kind="int", minimum=1)
    logging_steps: int = setting(10, help="Steps between progress lines.", kind="int", minimum=1)
    redrafter_num_layers: int = setting(
        2, help="Residual blocks in the drafter's head.", kind="int", minimum=0, maximum=MAX_MODULES
    )
    redrafter_predict_n_tokens: int = setting(
        5, help="Draft tokens that the loss covers.", kind="int", minimum=1, maximum=MAX_MODULES
    )
    redrafter_exit_dim: int | None = setting(
        help="Width of the residual blocks; default: twice the target's hidden size.",
        kind="int",
        minimum=1,
    )
    redrafter_rnn: bool = setting(
        True, help="Learned recurrence; else the sum of the token embeddings.", kind="flag"
    )
    redrafter_loss_decay: float = setting(
        1.0, help="Weight of each draft position relative to the one before.", kind="float",
        minimum=0,
    )  # fmt: skip
    medusa_num_heads: int = setting(
        4, help="Medusa heads: draft tokens ahead.", kind="int", minimum=1, maximum=MAX_MODULES
    )
    medusa_num_layers: int = setting(
        1, help="Residual blocks of each Medusa head.", kind="int", minimum=0, maximum=MAX_MODULES
    )
    medusa_loss_decay: float = setting(
        0.8, help="Weight of each Medusa head's loss relative to the one before.", kind="float",
        minimum=0,
    )  # fmt: skip
    eagle_version: str = setting(
        "1", help="1: for any engine, EAGLE-2's trees too; 3: for the torch engine.",
        choices=("1", "3"),
    )  # fmt: skip
    eagle_num_layers: int = setting(
        1, help="Decoder layers of the EAGLE drafter.", kind="int", minimum=1, maximum=MAX_MODULES
    )
    eagle_num_steps: int = setting(
        3, help="Draft steps unrolled in training; 1 is EAGLE-1's recipe.", kind="int", minimum=1
    )
    eagle_loss_decay: float = setting(
        0.9, help="Weight of each EAGLE draft step relative to the one before.", kind="float",
        minimum=0,
    )  # fmt: skip
    eagle_token_weight: float = setting(
        0.1, help="EAGLE-1: weight of the tokens' loss beside the features'.", kind="float",
        minimum=0,
    )  # fmt: skip
    eagle_noise: float = setting(
        0.2, help="EAGLE-1: width of the uniform noise on the features.", kind="float", minimum=0
    )
    sanity: bool = setting(
        False,
        help="Learn one row by heart and write nothing: exit status 1 when that does not work.",
        kind="flag",
    )
    push_to_hub: str | None = setting(
        help="Also upload the drafter to this (private) repository of the Hugging Face Hub; the"
        " token is HF_TOKEN.",
        metavar="ID",
    )
    resume: bool = setting(
        False, help="Continue an interrupted training from its last checkpoint.", kind="flag"
    )
    force: bool = setting(False, help="Replace the output, or start anew.", kind="flag")
    json: bool = setting(
        False, help="Print the measured results on stdout as a JSON object.", kind="flag"
    )
