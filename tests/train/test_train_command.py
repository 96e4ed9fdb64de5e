"""`specdec-train` as users run it: the folder it writes, resuming, errors, several processes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec.train import hidden_states, loop, target
from specdec.train.cli import command
from tests.engines import reset_accelerator
from tests.forks import fork, fork_command

BASIC = (
    "--dtype", "float32", "--model-max-length", "32", "--batch-size", "2", "--seed", "3",
    "--eval-prompts", "0",
)  # fmt: skip


def read_weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.fixture
def inputs(target_dir: Path, data_file: Path) -> tuple[str, ...]:
    return ("--model-dir", str(target_dir), "--data", str(data_file), *BASIC)


@pytest.mark.parametrize("command", [["train"], []])
def test_help_is_quick_to_import(command: list[str]) -> None:
    code = (
        "import sys\n"
        "from specdec.train.cli import command\n"
        "command.main(['--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    if command:
        code = code.replace(
            "specdec.train.cli import command", "specdec.command.stages import group"
        )
        code = code.replace("command.main(['--help']", "group.main(['train', '--help']")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "specdec help METHOD, with one of redrafter" in " ".join(done.stdout.split())


def test_the_output_is_complete(
    run_train: Any, inputs: Any, target_dir: Path, data_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "drafter"
    done = run_train(
        *inputs, "--output_dir", out, "--max_steps", 6, "--logging-steps", 2, "--eval-steps", 4,
        "--json",
    )  # fmt: skip
    report = json.loads(done.out)
    assert done.out.count("\n") == 1
    assert (report["steps"], report["method"]) == (6, "redrafter")
    assert len(report["eval"]["top_k_accuracy"]) == 5
    assert report["tokens"] <= 6 * 2 * 32
    assert "held out" in done.err
    assert "step 6/6" in done.err

    assert sorted(p.name for p in out.iterdir()) == [
        "README.md", "config.json", "manifest.json", "model.safetensors", "training_log.jsonl",
    ]  # fmt: skip
    config = json.loads((out / "config.json").read_text())
    assert config == {
        "architectures": ["Drafter"],
        "model_type": "recurrent_drafting_drafter",
        "vocab_size": 320,
        "hidden_size": 32,
        "exit_dim": 64,
        "num_draft_layers": 2,
        "num_lookback_tokens": -1,
        "rnn": True,
        "predict_n_tokens": 5,
        "dtype": "float32",
    }
    shapes = {name: tuple(t.shape) for name, t in read_weights(out).items()}
    assert shapes == {
        "lm_head.0.linear.weight": (64, 64),
        "lm_head.0.linear.bias": (64,),
        "lm_head.1.linear.weight": (64, 64),
        "lm_head.1.linear.bias": (64,),
        "lm_head.2.weight": (320, 64),
        "rnn_u.weight": (32, 32),
        "rnn_u.bias": (32,),
        "rnn_w.weight": (32, 32),
    }
    log = [json.loads(line) for line in (out / "training_log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [1, 2, 4, 4, 6, 6]
    assert [line["step"] for line in log if "eval" in line] == [4, 6]
    assert log[-1]["eval"] == report["eval"]

    card = (out / "README.md").read_text()
    sha256 = hashlib.sha256(data_file.read_bytes()).hexdigest()
    assert f"`data.jsonl` {data_file.stat().st_size} bytes, sha256 `{sha256}`" in card
    assert f"{report['tokens']} tokens" in card
    assert f"{100 * report['eval']['top_k_accuracy'][0][0]:.1f}%" in card
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["kind"] == "drafter"
    assert {Path(s["path"]).name for s in manifest["sources"]} == {
        "config.json", "model.safetensors", "tokenizer.json", "data.jsonl",
    }  # fmt: skip
    for entry in manifest["outputs"]:
        assert hashlib.sha256((out / entry["path"]).read_bytes()).hexdigest() == entry["sha256"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["drafter"]


def test_learning_beats_guessing_on_held_out_rows(
    run_train: Any, inputs: Any, data_file: Path, tmp_path: Path
) -> None:
    run_train(
        *inputs, "--output-dir", tmp_path / "out", "--max-steps", 80, "--learning-rate", "0.01",
        "--eval-steps", 20, "--logging-steps", 60, "--no-redrafter-rnn", "--save-dtype",
        "bfloat16", "--redrafter-exit-dim", 48, "--redrafter-predict-n-tokens", 3, "--json",
    )  # fmt: skip
    log = [json.loads(t) for t in (tmp_path / "out/training_log.jsonl").read_text().splitlines()]
    first, *_, last = [line["eval"] for line in log if "eval" in line]
    assert last["loss"] < first["loss"] - 1
    assert last["top_k_accuracy"][0][0] > 0.3
    assert last["chain_length"] > first["chain_length"]
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["exit_dim"], config["rnn"], config["dtype"]) == (48, False, "bfloat16")
    weights = read_weights(tmp_path / "out")
    assert {str(t.dtype) for t in weights.values()} == {"torch.bfloat16"}
    assert "input_proj.weight" in weights
    assert "rnn_u.weight" not in weights


def test_a_killed_training_resumes_to_the_same_bytes(
    run_train: Any, inputs: Any, tmp_path: Path
) -> None:
    options = (
        *inputs, "--max-steps", 60, "--save-steps", 5, "--logging-steps", 5,
        "--gradient-accumulation-steps", 2,
    )  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_train(*options, "--output-dir", whole)
    take_step = loop.Loop.take_step

    def die(self: Any, step: int, **named: Any) -> Any:
        if step == 17:  # steps 16 and 17 are after the last checkpoint
            os.kill(os.getpid(), signal.SIGKILL)
        return take_step(self, step, **named)

    def train_and_die() -> None:
        loop.Loop.take_step = die
        command.main([str(a) for a in (*options, "--output-dir", killed)])

    died = fork(train_and_die)
    died.communicate()
    assert died.returncode == -signal.SIGKILL
    state = tmp_path / ".killed.training"
    assert (state / "checkpoint.pt").is_file()
    assert not killed.exists()

    refused = run_train(*options, "--output-dir", killed, ends=1)
    assert refused.last_lines == [
        f"error: an unfinished training is in {state}",
        "hint: continue it with --resume, or start over with --force",
    ]
    again = (*options, "--output-dir", killed, "--resume")
    changed = run_train(*again, "--learning-rate", "0.002", ends=1)
    assert "--learning-rate is 0.002, was 0.001" in changed.last_lines[0]

    resumed = run_train(*again, "--save-steps", 40)
    assert re.search(r"resumed at step [1-5]\d?\n", resumed.err)
    for name in ("model.safetensors", "config.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    steps = [
        [json.loads(t)["step"] for t in (f / "training_log.jsonl").read_text().splitlines()]
        for f in (whole, killed)
    ]
    assert steps[0] == steps[1]
    assert not state.exists()


def test_a_damaged_checkpoint_is_refused_and_force_starts_anew(
    run_train: Any, inputs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: Any) -> None:
        raise KeyboardInterrupt

    options = (*inputs, "--output-dir", tmp_path / "out", "--max-steps", 4, "--save-steps", 2)
    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "_report_evaluation", stop)
        run_train(*options, ends=130)
    checkpoint = tmp_path / ".out.training" / "checkpoint.pt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-2000])
    damaged = run_train(*options, "--resume", ends=1)
    assert damaged.last_lines == [
        f"error: {checkpoint} is damaged",
        "hint: start over with --force",
    ]
    run_train(*options, "--force")
    existing = run_train(*options, ends=1)
    assert "exists and is not empty" in existing.last_lines[0]


def test_what_fails_before_the_first_step_leaves_nothing_to_resume(
    run_train: Any, inputs: Any, data_file: Path, tmp_path: Path
) -> None:
    """Once the line is mended, the command is the one of before."""
    data = tmp_path / "data.jsonl"
    options = (*inputs, "--data", data, "--output-dir", tmp_path / "out", "--max-steps", 1)
    data.write_text('{"prompt": "alone"}\n')
    done = run_train(*options, ends=1)
    assert "line 1 cannot be used" in done.last_lines[0]
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]
    data.write_bytes(data_file.read_bytes())
    run_train(*options)


def test_resuming_nothing_starts_a_training(run_train: Any, inputs: Any, tmp_path: Path) -> None:
    done = run_train(*inputs, "--output-dir", tmp_path / "out", "--max-steps", 1, "--resume")
    assert "nothing to resume" in done.err


def test_a_loss_that_is_not_finite_stops_the_training(
    run_train: Any, inputs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(optimizer: torch.optim.Optimizer, closure: Any = None) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(1e30)

    monkeypatch.setattr(torch.optim.AdamW, "step", explode)
    done = run_train(*inputs, "--output-dir", tmp_path / "out", "--max-steps", 40, ends=1)
    assert "error: the loss is " in done.last_lines[0]
    assert " at step " in done.last_lines[0]
    assert done.last_lines[1].startswith("hint: lower --learning-rate")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ("--model-dir /no/where", 1, "/no/where does not exist"),
        ("--model-dir {tmp}", 1, "{tmp} is an empty folder, not a Hugging Face model folder"),
        ("--data /no/where.jsonl", 1, "--data /no/where.jsonl does not exist"),
        ("--eval-data /no/where.txt", 1, "--eval-data /no/where.txt does not exist"),
        ("--model-max-length 65", 1, "--model-max-length 65 is more than the 64 positions"),
        ("--seed -1", 2, "--seed: expected at least 0"),
        ("--batch-size 9999999999999999999", 2, "--batch-size: expected at most 65536"),
        ("--learning-rate inf", 2, "--learning-rate: expected a finite number"),
        ("--redrafter-loss-decay 2", 2, "--redrafter-loss-decay: expected at most 1"),
        ("--redrafter-exit-dim 9999999999999999999", 2, "--redrafter-exit-dim: expected at most"),
        ("--learning-rate nan", 2, "--learning-rate: expected a finite number"),
        ("--method meduza", 2, "meduza"),
        ("--max-step 3", 2, "--max-step"),
        ("--medusa-num-heads 2", 2, "--medusa-num-heads has no effect with --method redrafter"),
        ("--method medusa --redrafter-num-layers 1", 2, "--redrafter-num-layers has no"),
        ("--method eagle --eagle-version 2", 2, "--eagle-version: '2' is not one of 1, 3"),
        ("--shard-target", 2, "--shard-target has no effect in a training of one process"),
        ("--shard-drafter", 2, "--shard-drafter has no effect in a training of one process"),
        ("--push-to-hub me/heads", 1, "--push-to-hub me/heads: HF_TOKEN is not set"),
    ],
)  # fmt: skip
def test_mistakes_are_named(
    run_train: Any, inputs: Any, tmp_path: Path, changes: str, status: int, words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("HF_TOKEN", raising=False)
    given = changes.format(tmp=tmp_path).split()
    done = run_train(*inputs, "--output-dir", tmp_path / "out", *given, ends=status)
    assert done.last_lines[0].startswith("error: ")
    assert words.format(tmp=tmp_path) in done.last_lines[0]
    assert done.last_lines[1].startswith("hint: ")
    assert done.out == ""
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_named(run_train: Any) -> None:
    done = run_train(ends=2)
    assert done.last_lines[0] == "error: missing --model-dir, --data, --output-dir"


def test_a_tokenizer_with_too_many_tokens_is_refused(
    run_train: Any, inputs: Any, target_dir: Path, tokenizer: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(target_dir, folder)
    document = json.loads((folder / "tokenizer.json").read_text())
    vocab = document["model"]["vocab"]
    vocab.update({f"word{i}": len(vocab) + i for i in range(40)})
    (folder / "tokenizer.json").write_text(json.dumps(document))
    done = run_train(*inputs, "--model-dir", folder, "--output-dir", tmp_path / "out", ends=1)
    assert f"the tokenizer has {len(vocab)} tokens, the target's vocabulary only 320" in done.err


def train_often(folder: Path, runs: dict[str, list[str]], arguments: list[str]) -> None:
    """Train several times in the same process, and write what it holds.

    The commands that measure drafters are copies of it: a start takes 2 s of a processor.
    """
    from accelerate import Accelerator

    from specdec.system import processes

    starts = {**vars(subprocess), "Popen": fork_command}
    vars(processes)["subprocess"] = SimpleNamespace(**starts)
    hidden_states.SHARD_BYTES = 1 << 14  # an odd number of files
    Accelerator.end_training = lambda self: None  # the processes are needed once more
    find_states, take_step = target.LiveTarget.find_states, loop.Loop.take_step
    held: dict[str, int] = {}
    killed: int | None = None

    def look(self: Any, batch: Any) -> Any:
        states = find_states(self, batch)
        weights = self.model.layers.parameters()
        held["target"] = sum(getattr(w, "to_local", lambda w=w: w)().numel() for w in weights)
        return states

    def stop(self: Any, step: int, *, measure: bool) -> Any:
        measures = take_step(self, step, measure=measure)
        states = [state for o in self.optimizers.values() for state in o.state.values()]
        tensors = [*self.drafter.parameters(), *(t for state in states for t in state.values())]
        held["drafter"] = sum(getattr(t, "to_local", lambda t=t: t)().numel() for t in tensors)
        if killed == step:
            raise InterruptedError
        return measures

    target.LiveTarget.find_states, loop.Loop.take_step = look, stop
    for name, more in runs.items():
        reset_accelerator()
        held.clear()
        killed = 5 if name == "killed" else None
        output = [*arguments, "--output-dir", str(folder / name), *more]
        try:
            command.main(output, standalone_mode=False)
        except InterruptedError:
            killed = None
            reset_accelerator()
            command.main([*output, "--resume"], standalone_mode=False)
        # A file each: on one stream the lines of two processes may run into one another.
        with open(folder / f"held-{os.environ['RANK']}.jsonl", "a") as file:
            print(json.dumps([name, held]), file=file)


def test_two_processes_learn_what_one_does(
    run_train: Any, inputs: Any, target_dir: Path, tmp_path: Path
) -> None:
    """However the work is split, and where one process has no row to evaluate."""
    inputs = (*inputs, "--redrafter-num-layers", "1")
    options = (
        "--max-steps", 6, "--save-steps", 3, "--eval-rows", 1, "--eval-steps", 4, "--json",
        "--gradient-accumulation-steps", 2,
    )  # fmt: skip
    one = run_train(*inputs, "--output-dir", tmp_path / "one", "--batch-size", 4, *options)
    runs = {
        "whole": [],
        "killed": [],
        "split": [
            "--shard-target", "--eval-prompts", "1", "--eval-output-len", "8", "--eval-steps", "0",
        ],
        "states": ["--shard-target", "--hidden-states-dir", str(tmp_path / "hidden")],
        "both": [
            "--shard-target", "--shard-drafter", "--eval-prompts", "1", "--eval-output-len", "8",
        ],
    }  # fmt: skip
    arguments = [str(a) for a in (*inputs, *options)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launch = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    first, second = (
        fork(
            lambda: train_often(tmp_path, runs, arguments),
            {**launch, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"},
        )
        for rank in "01"
    )  # fmt: skip
    (out, err), (_, other_err) = first.communicate(timeout=1800), second.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0), err + other_err
    alone = json.loads(one.out)
    reports = dict(zip(runs, map(json.loads, out.splitlines()), strict=True))
    # The engine's own processes do not take themselves for more of those that train.
    for name in ("split", "both"):
        assert reports[name]["eval"]["acceptance"]["num_output_tokens"] == 8
    expected = read_weights(tmp_path / "one")
    for name, report in reports.items():
        assert report["tokens"] == alone["tokens"]
        assert report["eval"]["num_labels"] == alone["eval"]["num_labels"]
        assert abs(report["eval"]["loss"] - alone["eval"]["loss"]) < 1e-3
        for key, tensor in read_weights(tmp_path / name).items():
            torch.testing.assert_close(tensor, expected[key], rtol=1e-3, atol=1e-5)
    files = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in runs}
    assert len({files[name] for name in runs if name != "both"}) == 1  # rounded otherwise
    assert "resumed at step 3" in err
    held, other = (
        dict(map(json.loads, (tmp_path / f"held-{rank}.jsonl").read_text().splitlines()))
        for rank in range(2)
    )
    assert held == other
    # Rows of a weight are given out whole, and all weights here have an even number of them.
    assert held["split"]["target"] * 2 == held["whole"]["target"]
    assert held["states"]["target"] * 2 == held["both"]["target"] * 2 == held["whole"]["target"]
    assert 0.5 <= held["both"]["drafter"] / held["whole"]["drafter"] < 0.51  # but for steps
    assert len(list((tmp_path / "hidden").glob("*-0*.safetensors"))) % 2 == 1


@pytest.mark.parametrize(
    "option", [("--use_fsdp",), ("--use_deepspeed",), ("--mixed_precision", "bf16")]
)
def test_what_accelerates_launcher_was_told_is_refused(
    option: tuple[str, ...], run_train: Any, inputs: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By the environment that its own code makes of the options."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    parsed = launch_command_parser().parse_args([*option, "--num_processes", "2", "script.py"])
    parsed.num_machines, parsed.num_cpu_threads_per_process = 1, 1
    parsed.main_process_port = 0
    parsed.mixed_precision = parsed.mixed_precision or "no"
    parsed.dynamo_backend, parsed.deepspeed_fields_from_accelerate_config = "no", ""
    made = (
        prepare_deepspeed_cmd_env(parsed)[1]
        if parsed.use_deepspeed
        else prepare_multi_gpu_env(parsed)
    )
    for name, value in made.items():
        if name not in os.environ:
            monkeypatch.setenv(name, value)
    done = run_train(*inputs, "--output-dir", tmp_path / "out", ends=2)
    assert done.last_lines[0].startswith(f"error: accelerate was launched with {option[0]} (")
    assert done.last_lines[1].startswith("hint: launch with torchrun")
    assert list(tmp_path.iterdir()) == []


def test_force_does_not_replace_what_is_read(run_train: Any, inputs: Any, target_dir: Path) -> None:
    for output in (target_dir, target_dir.parent):
        done = run_train(*inputs, "--output-dir", output, "--max-steps", 1, "--force", ends=1)
        assert "is or holds" in done.err
    assert (target_dir / "model.safetensors").is_file()
