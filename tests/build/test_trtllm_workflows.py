"""Every command of TensorRT-LLM's published workflows, and the specdec command that stands for it.

The commands are carried out on tiny models under the pages' own names; a build is compared with
the original by what trtllm-build of the line makes of both command lines. Engines of every mode are
run in tests/trtllm/test_whole_path.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from pathlib import Path

import pytest

from specdec.command.stages import load_command
from specdec.trtllm.facts import load_facts
from tests.conftest import make_drafter, make_llama, make_tokenizer
from tests.engines import call
from tests.families import make_family_model
from tests.trtllm.double import parse_arguments

PROGRAMS = {
    "convert_checkpoint.py": "convert", "quantize.py": "convert", "trtllm-build": "build",
    "run.py": "run",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Step:
    """A command of a page; ours has the program's name replaced, and what `changes` says."""

    original: str
    changes: tuple[tuple[str, str], ...] = ()

    @property
    def ours(self) -> str:
        program, _, words = self.original.partition(" ")
        for old, new in self.changes:
            words = words.replace(old, new)
        return f"{PROGRAMS[program]} {words}"


FROM_CHECKPOINT = ((" --speculative_decoding_mode explicit_draft_tokens", ""),)
REDRAFTER_FP16 = (
    Step("convert_checkpoint.py --model_dir ./vicuna-7b-v1.3 --output_dir ./vicuna-7b-v1.3-ckpt"
         " --dtype float16"),
    Step("convert_checkpoint.py --base_model_checkpoint_dir ./vicuna-7b-v1.3-ckpt"
         " --drafter_model_dir ./vicuna-7b-drafter --output_dir ./tllm_checkpoint_1gpu_redrafter"
         " --dtype float16 --redrafter_num_beams 4 --redrafter_draft_len_per_beam 5"),
    Step("trtllm-build --checkpoint_dir ./tllm_checkpoint_1gpu_redrafter"
         " --output_dir ./tmp/redrafter/7B/trt_engines/fp16/1-gpu/ --gemm_plugin float16"
         " --speculative_decoding_mode explicit_draft_tokens --max_batch_size 4", FROM_CHECKPOINT),
    Step("run.py --engine_dir ./tmp/redrafter/7B/trt_engines/fp16/1-gpu/"
         " --tokenizer_dir ./vicuna-7b-v1.3/ --max_output_len=100"
         " --input_text 'Once upon' 'The basic idea of a Transformer model is'"),
)  # fmt: skip
REDRAFTER_FP8 = (
    Step("quantize.py --model_dir ./Qwen2.5-7B-Instruct/ --dtype bfloat16 --qformat fp8"
         " --output_dir ./qwen_checkpoint_1gpu_fp8 --calib_size 1024",
         (("--qformat", "--quantization"),
          ("_size 1024", "_size 1024 --calibration-data texts.jsonl --calib-batch-size 64"))),
    Step("convert_checkpoint.py --base_model_checkpoint_dir ./qwen_checkpoint_1gpu_fp8"
         " --drafter_model_dir ./qwen-7b-drafter --output_dir ./tllm_checkpoint_1gpu_fp8"
         " --dtype bfloat16 --redrafter_num_beams 1 --redrafter_draft_len_per_beam 3"),
    Step("trtllm-build --checkpoint_dir ./tllm_checkpoint_1gpu_fp8 --output_dir ./engine_outputs"
         " --gemm_plugin fp8 --speculative_decoding_mode explicit_draft_tokens"
         " --max_beam_width 1 --max_batch_size 4"),
)  # fmt: skip
REDRAFTER_FROM_HF = (
    Step("convert_checkpoint.py --model_dir ./vicuna-7b-v1.3 --drafter_model_dir"
         " ./vicuna-7b-drafter --output_dir ./tllm_checkkpoint_1gpu_redrafter --dtype float16"
         " --redrafter_num_beams 4 --redrafter_draft_len_per_beam 5"),
    Step("trtllm-build --checkpoint_dir ./tllm_checkkpoint_1gpu_redrafter"
         " --output_dir ./tmp/redrafter/7B/trt_engines/fp16/1-gpu/ --gemm_plugin float16"
         " --speculative_decoding_mode explicit_draft_tokens --max_batch_size 4", FROM_CHECKPOINT),
    REDRAFTER_FP16[-1],
)  # fmt: skip
DRAFT_TARGET = (
    Step("convert_checkpoint.py --model_dir=./llama-7b --output_dir=./ckpt-draft --dtype=float16"),
    Step("convert_checkpoint.py --model_dir=./llama-13b --output_dir=./ckpt-target"
         " --dtype=float16"),
    Step("trtllm-build --checkpoint_dir ./ckpt-draft --output_dir=./draft-engine"
         " --gemm_plugin=float16 --use_paged_context_fmha=enable --max_batch_size=4"
         " --max_input_len=3200 --max_seq_len=4800"),
    Step("trtllm-build --checkpoint_dir=./ckpt-target --output_dir=./target-engine"
         " --gemm_plugin=float16 --use_paged_context_fmha=enable"
         " --speculative_decoding_mode=draft_tokens_external --max_draft_len=10 --max_batch_size=4"
         " --max_input_len=3200 --max_seq_len=4800"),
    Step("run.py --tokenizer_dir ./llama-7b --draft_engine_dir ./draft-engine"
         " --engine_dir ./target-engine --draft_target_model_config='[4,[0],[1],True]'"
         " --max_output_len=256 --kv_cache_enable_block_reuse"
         " --kv_cache_free_gpu_memory_fraction=0.4 --output_generation_logits"
         " --input_text='How does Draft-Sampling work?'"),
)  # fmt: skip
WORKFLOWS = [
    pytest.param(REDRAFTER_FP16, "1.2", id="redrafter-fp16"),
    pytest.param(REDRAFTER_FP8, "1.2", id="redrafter-fp8-base"),
    pytest.param(REDRAFTER_FROM_HF, "0.14", id="redrafter-from-hf-base"),
    pytest.param(DRAFT_TARGET, "0.14", id="draft-target-0.14"),
    pytest.param(DRAFT_TARGET, "1.2", id="draft-target-1.2"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds tiny models under the names of the pages."""
    parent = tmp_path_factory.mktemp("models")
    for name in ("vicuna-7b-v1.3", "llama-7b", "llama-13b"):
        make_llama(parent, name=name, dtype="float16", max_position_embeddings=8192)
        make_tokenizer(parent / name)
    make_drafter(parent, name="vicuna-7b-drafter", dtype="float16", exit_dim=96)
    qwen = make_family_model(parent, "qwen2")
    qwen.rename(parent / "Qwen2.5-7B-Instruct")
    config = json.loads((parent / "Qwen2.5-7B-Instruct" / "config.json").read_text())
    make_drafter(
        parent, name="qwen-7b-drafter", dtype="bfloat16", hidden=config["hidden_size"],
        vocab=config["vocab_size"], exit_dim=96,
    )  # fmt: skip
    rows = [{"input_ids": [3 + row % 60, 7, 11, 5]} for row in range(1024)]
    (parent / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return parent


def enter(models: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder that holds the models."""
    monkeypatch.chdir(folder)
    for path in models.iterdir():
        os.symlink(path, folder / path.name)


@pytest.mark.parametrize(("steps", "label"), WORKFLOWS)
def test_commands_of_the_page_have_their_equivalents(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], steps: tuple[Step, ...], label: str,
) -> None:  # fmt: skip
    enter(models, tmp_path, monkeypatch)
    for step in steps:
        program, *original = shlex.split(step.original)
        stage, *ours = shlex.split(step.ours)
        if stage == "convert":
            call(stage, *ours, "--trtllm-version", label)
        elif stage == "build":
            call(
                stage, *ours, "--backend", "tensorrt-llm", "--trtllm-version", label, "--dry-run",
                "--json",
            )  # fmt: skip
            (command,) = json.loads(capsys.readouterr().out.splitlines()[-1])["commands"]
            assert command["argv"][0] == program
            emitted, wanted = (
                parse_arguments(load_facts(label), words)[0]
                for words in (command["argv"][1:], original)
            )
            for folder in ("checkpoint_dir", "output_dir"):
                assert os.path.normpath(emitted.pop(folder)) == os.path.normpath(wanted.pop(folder))
            assert emitted == wanted
        else:
            command = load_command("run")
            read, wanted = (
                command.make_context("specdec-run", list(words)).params
                for words in (ours, original)
            )
            assert read == wanted
