"""What `accelerate launch` says, by its own parser: taken in its meaning, or refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import UsageError
from specdec.train import sharding, target
from specdec.train.launch import Split, take_launch
from specdec.train.methods import load_method
from specdec.train.pipeline import open_target
from specdec.train.settings import TrainSettings


def launch(*arguments: str) -> dict[str, str]:
    """Return the environment that the launcher makes of its arguments."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    parsed = launch_command_parser().parse_args([*arguments, "--num_processes", "2", "script.py"])
    # What its `launch_command` fills in, and a port that is free to take.
    parsed.num_machines, parsed.num_cpu_threads_per_process = 1, 1
    parsed.main_process_port = 0
    parsed.mixed_precision = parsed.mixed_precision or "no"
    parsed.dynamo_backend = parsed.dynamo_backend or "no"
    parsed.deepspeed_fields_from_accelerate_config = ""
    if parsed.use_deepspeed:
        environment: dict[str, str] = prepare_deepspeed_cmd_env(parsed)[1]
    else:
        environment = prepare_multi_gpu_env(parsed)
    return {name: environment[name] for name in environment if name not in os.environ}


def take(*arguments: str, **settings: Any) -> tuple[TrainSettings, Split]:
    return take_launch(TrainSettings(**settings), launch(*arguments))


FSDP = ("--use_fsdp", "--fsdp_version", "2")
ZERO = ("--use_deepspeed", "--zero_stage")


@pytest.mark.parametrize(
    ("arguments", "split"),
    [
        (("--multi_gpu",), Split()),
        (
            FSDP,
            Split(asked_by="--use_fsdp", target=True, drafter=True, takes_turns=True),
        ),
        (
            (*FSDP, "--fsdp_cpu_ram_efficient_loading", "false", "--fsdp_auto_wrap_policy",
             "TRANSFORMER_BASED_WRAP", "--fsdp_transformer_layer_cls_to_wrap", "X"),
            Split(asked_by="--use_fsdp", target=True, drafter=True, layer_class="X"),
        ),
        (
            (*FSDP, "--fsdp_reshard_after_forward", "false"),
            Split(asked_by="--use_fsdp", drafter=True, regathers=False),
        ),
        ((*ZERO, "0"), Split(regathers=False)),
        (
            (*ZERO, "1"),
            Split(asked_by="--use_deepspeed --zero_stage 1", drafter=True, regathers=False,
                  adds_up_first=True),
        ),
        (
            (*ZERO, "2"),
            Split(asked_by="--use_deepspeed --zero_stage 2", drafter=True, regathers=False),
        ),
        (
            (*ZERO, "3"),
            Split(asked_by="--use_deepspeed --zero_stage 3", drafter=True, target=True,
                  takes_turns=True),
        ),
        (
            (*ZERO, "3", "--zero3_init_flag", "false"),
            Split(asked_by="--use_deepspeed --zero_stage 3", drafter=True, target=True),
        ),
    ],
)  # fmt: skip
def test_what_is_split(arguments: tuple[str, ...], split: Split) -> None:
    settings, found = take(*arguments)
    assert found == split
    assert settings == TrainSettings()


def test_shard_target_adds_to_what_the_launcher_says() -> None:
    assert take("--multi_gpu", shard_target=True)[1] == Split(
        asked_by="--shard-target", target=True
    )
    _, split = take(*ZERO, "2", shard_target=True)
    assert (split.target, split.drafter) == (True, True)


def test_the_environment_is_taken() -> None:
    """accelerate and transformers would do something of their own with it."""
    for arguments in (FSDP, (*ZERO, "2")):
        environment = launch(*arguments)
        assert "ACCELERATE_USE_FSDP" in environment or "ACCELERATE_USE_DEEPSPEED" in environment
        take_launch(TrainSettings(), environment)
        left = {n for n in environment if n.startswith(("FSDP", "ACCELERATE_DEEPSPEED"))}
        assert not left
        assert "ACCELERATE_USE_FSDP" not in environment
        assert "ACCELERATE_USE_DEEPSPEED" not in environment
        assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in environment


def test_amounts_of_the_launcher_count_like_our_own() -> None:
    given = (*ZERO, "2", "--gradient_accumulation_steps", "4", "--gradient_clipping", "0.5")
    settings, _ = take(*given)
    assert (settings.gradient_accumulation_steps, settings.max_grad_norm) == (4, 0.5)
    settings, _ = take(*given, gradient_accumulation_steps=4, max_grad_norm=0.5)
    assert (settings.gradient_accumulation_steps, settings.max_grad_norm) == (4, 0.5)
    # The launcher's own default says nothing.
    settings, _ = take(*ZERO, "2", gradient_accumulation_steps=3)
    assert settings.gradient_accumulation_steps == 3
    assert take("--multi_gpu", "--mixed_precision", "bf16")[0].dtype == "bfloat16"


@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [
        (("--use_fsdp",), {}, "version 1 of FSDP"),
        ((*FSDP, "--fsdp_offload_params", "true"), {}, "--fsdp_offload_params true of"),
        ((*FSDP, "--fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"), {}, "--fsdp_auto_wrap_policy SIZ"),
        ((*FSDP, "--fsdp_sharding_strategy", "HYBRID_SHARD"), {}, "--fsdp_sharding_strategy HYB"),
        ((*FSDP, "--fsdp_state_dict_type", "SHARDED_STATE_DICT"), {}, "--fsdp_state_dict_type S"),
        ((*FSDP, "--fsdp_backward_prefetch", "BACKWARD_PRE"), {}, "--fsdp_backward_prefetch B"),
        ((*FSDP, "--fsdp_forward_prefetch", "true"), {}, "--fsdp_forward_prefetch true"),
        ((*FSDP, "--fsdp_activation_checkpointing", "true"), {}, "--fsdp_activation_checkpoint"),
        ((*FSDP, "--dynamo_backend", "inductor"), {}, "--dynamo_backend and --use_fsdp"),
        ((*ZERO, "4"), {}, "--zero_stage is 4"),
        ((*ZERO, "2", "--offload_optimizer_device", "cpu"), {}, "--offload_optimizer_device is c"),
        ((*ZERO, "3", "--offload_param_device", "nvme"), {}, "--offload_param_device is nvme"),
        ((*ZERO, "3", "--zero3_save_16bit_model", "true"), {}, "--zero3_save_16bit_model is tru"),
        ((*ZERO, "2", "--zero3_init_flag", "true"), {}, "--zero3_init_flag has no effect with"),
        ((*ZERO, "2", "--deepspeed_moe_layer_cls_names", "X"), {}, "--deepspeed_moe_layer_cls_na"),
        (
            (*ZERO, "2", "--gradient_clipping", "0.5"), {"max_grad_norm": 2.0},
            "--gradient_clipping is 0.5 for DeepSpeed, --max-grad-norm is 2",
        ),
        (("--multi_gpu", "--mixed_precision", "fp16"), {}, "--mixed_precision fp16, and --dtype"),
        (
            ("--multi_gpu", "--mixed_precision", "bf16"), {"dtype": "float32"},
            "--mixed_precision bf16, and --dtype is float32",
        ),
        (("--use_megatron_lm",), {}, "Megatron-LM"),
    ],
)  # fmt: skip
def test_what_nothing_here_obeys_is_refused(
    arguments: tuple[str, ...], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError) as info:
        take(*arguments, **settings)
    assert words in info.value.message


def take_file(path: Path, document: dict[str, Any]) -> tuple[TrainSettings, Split]:
    path.write_text(json.dumps(document))
    return take("--use_deepspeed", "--deepspeed_config_file", str(path))


def test_deepspeeds_configuration_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    usual: dict[str, Any] = {
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}},
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "train_micro_batch_size_per_gpu": 8,
        "train_batch_size": "auto",
    }
    settings, split = take_file(path, usual)
    assert split.asked_by == "--use_deepspeed --zero_stage 1"
    assert split.adds_up_first
    assert (settings.gradient_accumulation_steps, settings.max_grad_norm) == (2, 0.0)
    assert (settings.batch_size, settings.dtype) == (8, "bfloat16")
    assert take_file(path, {"zero_optimization": {"stage": 0}})[1] == Split(regathers=False)
    for more, words in (
        ({"optimizer": {"type": "AdamW"}}, f"optimizer.type in {path} is AdamW for DeepSpeed"),
        ({"fp16": {"enabled": True}}, "fp16.enabled in "),
        ({"zero_optimization": {"stage": 2, "overlap_comm": True}}, "overlap_comm in "),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "device in "),
    ):
        with pytest.raises(UsageError) as info:
            take_file(path, usual | more)
        assert words in info.value.message


def test_one_process_has_nothing_to_split(
    run_train: Any, target_dir: Path, data_file: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in launch(*FSDP).items():
        if name.startswith(("FSDP_", "ACCELERATE_USE_FSDP")):
            monkeypatch.setenv(name, value)
    done = run_train(
        "--model-dir", target_dir, "--data", data_file, "--output-dir", tmp_path / "out"
    )
    assert done.status == 2
    assert "--use_fsdp has no effect in a training of one process" in done.last_lines[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("takes_turns", "events"),
    [(True, ["wait", "load", "wait", "wait", "check"]), (False, ["load", "wait", "check"])],
)
def test_processes_may_load_one_after_another(
    takes_turns: bool, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three loads when the first is done; nothing runs before all have loaded."""
    happened: list[str] = []

    class Loaded:
        def check_head(self) -> None:
            happened.append("check")

    class Second:
        device, num_processes, process_index = "cpu", 3, 1

        def wait_for_everyone(self) -> None:
            happened.append("wait")

    def load(*_: Any, **__: Any) -> Loaded:
        happened.append("load")
        return Loaded()

    monkeypatch.setattr(target, "load_target", load)
    monkeypatch.setattr(sharding, "make_mesh", lambda device, count: "mesh")
    split = Split(target=True, takes_turns=takes_turns)
    settings = TrainSettings(model_dir="somewhere")
    open_target(settings, load_method("redrafter"), None, "float32", Second(), split=split)
    assert happened == events
