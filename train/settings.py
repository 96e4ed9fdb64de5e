"""Settings of the train stage: a field here is a flag, a recipe key and its help text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specdec.methods import METHODS, list_options
from specdec.options import add_options, option_group, setting

MODELS_DATA = option_group("Models and data")
LENGTH_SPEED = option_group("Length and speed")
OPTIMIZER = option_group("Optimizer", rare=True)
WHAT_LEARNED = option_group("What is learned", rare=True)
LARGE_TARGETS = option_group("Large targets", rare=True)
OUTPUT = option_group("Output", rare=True)
INTERRUPTION = option_group("Interruption")
EVALUATION = option_group("Evaluation", rare=True)

LOSSES = ("kl", "ce", "tv", "lk", "lk_hybrid", "ce_l1")  # of loss_table.py, which imports torch
TRACKERS = ("tensorboard", "wandb", "trackio")  # modules and extras of these names
DEPTH_WEIGHTINGS = ("decay", "uniform", "reach", "dpace")
LAYERS_FLAG = "--hidden-states-layers"
TRAINABLE = tuple(name for name, method in METHODS.items() if method.training is not None)


@add_options(*list_options("train"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of `specdec-train`, without the options of each method."""

    method: str = MODELS_DATA("redrafter", help="Kind of drafter.", choices=TRAINABLE)
    model_dir: str = MODELS_DATA(
        required=True, folder="model", metavar="BASE",
        help="The target: a Hugging Face folder, Hub id or GGUF file; it is not changed.",
    )  # fmt: skip
    data: Path = MODELS_DATA(
        required=True,
        help="Training data: FILE.txt, or FILE.jsonl or FILE.json with `text`, `messages`,"
        " `conversations`, or `prompt` and `completion`.",
        metavar="FILE",
    )  # fmt: skip
    # Required by `check_settings`, except with --sanity and --plan, which write nothing.
    output_dir: Path = MODELS_DATA(help="Folder for the drafter.", metavar="OUT")
    eval_data: Path | None = MODELS_DATA(
        help="Held-out data in the same formats; without it 2% of --data is held out.",
        metavar="FILE",
    )  # fmt: skip
    start_from: Path | None = MODELS_DATA(
        help="Go on from this drafter, instead of fresh weights: a folder that specdec-train"
        " wrote, or a published one, of the same method and sizes; P-EAGLE also from an EAGLE-3,"
        " and a DFlash with a Markov head from one without.", metavar="DRAFTER",
    )  # fmt: skip
    max_steps: int | None = LENGTH_SPEED(help="Number of optimizer steps.", minimum=1, metavar="N")
    num_epochs: float | None = LENGTH_SPEED(
        help="Passes over the data, instead of --max-steps; 2 if neither is given.", minimum=0,
        metavar="X",
    )  # fmt: skip
    learning_rate: float = LENGTH_SPEED(
        help="Highest learning rate; if not given, the method's default.",
        minimum=0, maximum=1000,
    )  # fmt: skip
    batch_size: int = LENGTH_SPEED(
        4, help="Rows in a forward pass, on each device.", minimum=1, maximum=2**16
    )
    gradient_accumulation_steps: int = LENGTH_SPEED(
        1, help="Forward passes per optimizer step.", minimum=1, maximum=2**16
    )
    model_max_length: int | None = LENGTH_SPEED(
        help="Tokens in a row; if not given, the target's limit, at most 2048.", minimum=8
    )
    optimizer: str = OPTIMIZER(
        "adamw",
        help="adamw, or muon: Muon for the matrices of the drafter's layers, AdamW for embeddings,"
        " output layers, norms and biases.", choices=("adamw", "muon"),
    )  # fmt: skip
    muon_learning_rate: float | None = OPTIMIZER(
        help="Highest learning rate of Muon, whose steps are scaled to AdamW's size; if not given,"
        " --learning-rate.", minimum=0, maximum=1000, metavar="LR",
    )  # fmt: skip
    warmup_ratio: float = OPTIMIZER(
        0.1, help="Share of the steps in which the learning rate rises.", minimum=0
    )
    weight_decay: float = OPTIMIZER(0.0, help="Weight decay.", minimum=0, maximum=1)
    max_grad_norm: float = OPTIMIZER(1.0, help="Clip gradients to this norm; 0: never.", minimum=0)
    seed: int = OPTIMIZER(
        0, help="Seed of the first weights and of the order of the data.", minimum=0,
        maximum=2**64 - 1,
    )  # fmt: skip
    dtype: str = LENGTH_SPEED(
        "auto",
        help="Type to compute in; the weights that are trained stay float32. auto: bfloat16 if"
        " the processor has it.",
        choices=("auto", "bfloat16", "float32"),
    )
    self_distillation: float = WHAT_LEARNED(
        help="How much to learn from the target's own distribution, 0 to 1; the rest is"
        " learned from the tokens of the text. If not given, the method's default.", minimum=0,
        metavar="W",
    )  # fmt: skip
    loss: str = WHAT_LEARNED(
        "kl",
        help="Loss from the target's own distribution, as far as --self-distillation lets it count:"
        " kl; ce, of its most probable token; on the acceptance itself tv (total variation), lk"
        " (its logarithm) and lk_hybrid; or DSpark's ce_l1.", choices=LOSSES,
    )  # fmt: skip
    depth_weighting: str = WHAT_LEARNED(
        "decay",
        help="Weights of the tokens of a draft: decay, by the method's loss decay; uniform; reach,"
        " the measured probability that a depth is reached; or D-PACE's, dpace.",
        choices=DEPTH_WEIGHTINGS,
    )  # fmt: skip
    shard_target: bool = LARGE_TARGETS(
        False,
        help="Split the target's layers over the processes, for a target that does not fit on"
        " one GPU.",
    )  # fmt: skip
    shard_drafter: bool = LARGE_TARGETS(
        False,
        help="Split the drafter's weights, gradients and optimizer states over the processes, for"
        " a large drafter: less memory, more communication. --plan counts both.",
    )  # fmt: skip
    hidden_states_dir: Path | None = LARGE_TARGETS(
        help="Keep the target's hidden states in this folder. They are computed once; later"
        " runs read them and do not load the target's layers.", metavar="DIR",
    )  # fmt: skip
    hidden_states_dtype: str = LARGE_TARGETS(
        "auto",
        help="Type of the kept hidden states. auto: that of the computation; fp8: e4m3 with a scale"
        " for each token, half the disk of bfloat16.", choices=("auto", "fp8"),
    )  # fmt: skip
    max_disk: str | None = LARGE_TARGETS(
        help="Most bytes of --hidden-states-dir, such as 500GB: the states of rows that do not fit"
        " are computed, or asked for, whenever they are read.", metavar="BYTES",
    )  # fmt: skip
    hidden_states_from: str | None = LARGE_TARGETS(
        help="Take the target's hidden states from an engine of specdec-build, a vLLM server that"
        " extracts them, or a folder that it or speculators wrote; of --model-dir only"
        " configuration, tokenizer, embedding, last norm and output layer are read. With"
        " --hidden-states-dir they are kept there, else an engine or server is asked in every"
        " epoch.", metavar="ENGINE|URL|FOLDER",
    )  # fmt: skip
    hidden_states_layers: str | None = LARGE_TARGETS(
        help="vLLM's layer ids of the states that --hidden-states-from has, rising, such as"
        " 2,16,29,32; if not given, those that the drafter reads and the last.", metavar="IDS",
    )  # fmt: skip
    save_dtype: str = OUTPUT(
        "auto",
        help="Type of the written weights. auto: bfloat16 if the target has it, otherwise float32.",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    save_steps: int = INTERRUPTION(500, help="Steps between checkpoints; 0: none.", minimum=0)
    eval_steps: int = EVALUATION(
        500, help="Steps between evaluations; 0: at the end only.", minimum=0
    )
    eval_rows: int = EVALUATION(128, help="Most rows per evaluation.", minimum=1)
    eval_prompts: int = EVALUATION(
        16,
        help="Held-out prompts on which each evaluation measures an engine's real acceptance;"
        " 0: none.", minimum=0,
    )  # fmt: skip
    eval_output_len: int = EVALUATION(64, help="New tokens for each of --eval-prompts.", minimum=2)
    stop_at_acceptance: float | None = EVALUATION(
        help="Stop as soon as an evaluation reaches this acceptance length.", minimum=1, metavar="X"
    )
    report_top_k: int = EVALUATION(
        5, help="Report the accuracy of the top 1 to the top K tokens.", minimum=1
    )
    logging_steps: int = EVALUATION(10, help="Steps between progress lines.", minimum=1)
    tracker: str | None = EVALUATION(
        help="Also give the log's numbers to this tracker, by its own library: tensorboard, into"
        " OUT.tensorboard; wandb; or trackio.", choices=TRACKERS,
    )  # fmt: skip
    sanity: bool = EVALUATION(
        False,
        help="Test the training: learn one row by heart and write nothing; exit status 1 if"
        " that fails.",
    )  # fmt: skip
    plan: bool = EVALUATION(
        False,
        help="Say what the training would take, and write nothing: tokens, steps, disk for hidden"
        " states, memory, and hours here by a rate measured for some seconds.",
    )  # fmt: skip
    push_to_hub: str | None = OUTPUT(
        help="Also upload the drafter to this private repository of the Hugging Face Hub; the"
        " token is read from HF_TOKEN.",
        metavar="ID",
    )
    resume: bool = INTERRUPTION(
        False, help="Continue an interrupted training from its last checkpoint."
    )
    force: bool = setting(False, help="Replace the output, or start again.")
    json: bool = setting(False, help="Print one JSON object on stdout.")
