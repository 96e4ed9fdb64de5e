"""Flags of trtllm-build and the build's script, by themselves: no checkpoint, nothing is run."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.build.backends.tensorrt_llm import flags, script
from specdec.build.backends.tensorrt_llm.plan import TensorRTPlan
from specdec.build.backends.tensorrt_llm.record import Record
from specdec.build.settings import BuildSettings
from specdec.command.settings import UnknownOption
from specdec.errors import SpecDecError, UsageError
from specdec.model.quantization import Quantization
from specdec.trtllm.facts import load_facts
from tests.engine.models import make_model


def collect(label: str = "1.2", changes: Any = (), **options: str) -> dict[str, Any]:
    """The flags of settings; options: further ones, each with its words."""
    unknown = {name: UnknownOption(words=tuple(words.split())) for name, words in options.items()}
    settings = BuildSettings(
        checkpoint_dir=Path("checkpoint"), output_dir=Path("engine"), unknown_options=unknown,
        **dict(changes),
    )  # fmt: skip
    return flags.collect_flags(settings, load_facts(label))


def make_plan(
    label: str = "1.2", algorithm: str | None = None, mode: str | None = None, tp_size: int = 1,
    **given_flags: Any,
) -> TensorRTPlan:  # fmt: skip
    facts = load_facts(label)
    values = {name: flag.default for name, flag in facts.flags.items()} | given_flags
    checkpoint: Any = SimpleNamespace(
        model=make_model(tp_size=tp_size), quantization=Quantization(quant_algo=algorithm),
        raw={"mapping": {"gpus_per_node": 4}}, method=None,
    )  # fmt: skip
    return TensorRTPlan(
        facts=facts, checkpoint=checkpoint, checkpoint_dir=Path("/a b/ckpt"),
        output_dir=Path("/engines/e"), mode=mode, given_flags=given_flags, record=Record(values),
        files=[],
    )  # fmt: skip


def test_settings_become_flags() -> None:
    """Switches of ours are words there; what is not given is left to trtllm-build."""
    collected = collect(
        changes={"max_batch_size": 3, "use_paged_context_fmha": True, "use_fp8_context_fmha": False}
    )
    assert collected["max_batch_size"] == 3
    assert collected["use_paged_context_fmha"] == "enable"
    assert collected["use_fp8_context_fmha"] == "disable"
    assert "max_num_tokens" not in collected
    assert "gemm_plugin" not in collected


def test_further_options_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their types; a path is that of the caller's folder."""
    monkeypatch.chdir(tmp_path)
    collected = collect(
        tokens_per_block="64", gather_context_logits="", logits_dtype="float32", lora_dir="a /b",
        output_timing_cache="t.cache",
    )  # fmt: skip
    assert collected["tokens_per_block"] == 64
    assert collected["gather_context_logits"] is True
    assert collected["logits_dtype"] == "float32"
    assert collected["lora_dir"] == [str(tmp_path / "a"), "/b"]
    assert collected["output_timing_cache"] == str(tmp_path / "t.cache")


@pytest.mark.parametrize(
    ("label", "options", "fact", "hint"),
    [
        ("1.2", {"strip_plan": ""}, "--strip-plan is not passed on: it leaves the", "leave"),
        ("1.2", {"tokens_per_blok": "64"}, "has --tokens-per-blok", "check the name"),
        ("1.2", {"streamingllm_": "x"}, "has --streamingllm-", ""),
        ("1.2", {"tp_size": "2"}, "neither specdec-build nor trtllm-build of TensorRT-LLM 1.2 has"
         " --tp-size", "the checkpoint has it: specdec-convert --tp-size"),
        ("1.2", {"auto_parallel": "2"}, "has --auto-parallel", "only the line 0.14 has it"),
        ("1.2", {"tokens_per_block": "many"}, "--tokens_per_block: expected a whole", "give"),
    ],
)  # fmt: skip
def test_options_that_are_not_passed_on(
    label: str, options: dict[str, str], fact: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        collect(label, **options)
    assert fact in caught.value.message
    assert hint in (caught.value.hint or "")


def test_an_alias_of_a_setting_is_named() -> None:
    with pytest.raises(UsageError) as caught:
        collect(max_decoder_seq_len="4")
    assert caught.value.message == "--max-decoder-seq-len is another name of --max-seq-len"
    assert caught.value.hint == "give --max-seq-len"


def list_facts(**options: Any) -> list[str]:
    return [fact for fact, _ in flags.find_flag_problems(make_plan(**options))]


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"max_beam_width": 2}, "--max-beam-width 2: specdec-run has no beam search"),
        ({"max_beam_width": 2, "mode": "medusa"},
         "--max-beam-width 2: drafts and beams exclude each other"),
        ({"gather_context_logits": True, "mode": "medusa", "max_draft_len": 7},
         "--gather-context-logits does not go with speculation (max_draft_len 7)"),
        ({"gather_all_token_logits": True, "mode": "medusa", "max_draft_len": 7},
         "--gather-all-token-logits does not go with speculation (max_draft_len 7)"),
        ({"remove_input_padding": "disable"}, "--remove-input-padding disable: such an engine"),
        ({"kv_cache_type": "continuous"}, "--kv-cache-type continuous: such an engine"),
        ({"gpt_attention_plugin": "disable"}, "--gpt-attention-plugin disable: such an engine"),
        ({"label": "0.14", "streamingllm": "enable"}, "--streamingllm enable: no mode"),
        ({"label": "0.14", "auto_parallel": 2}, "--auto-parallel 2: the checkpoint decides"),
        ({"workers": 3, "tp_size": 2}, "--workers 3 for 2 rank(s)"),
        ({"workers": 0}, "--workers 0"),
        ({"opt_num_tokens": 0}, "--opt-num-tokens 0"),
        ({"tokens_per_block": 48}, "--tokens-per-block 48: the kernels take powers of two alone"),
        ({"mamba_conv1d_plugin": "auto"}, "--mamba-conv1d-plugin is for models with Mamba"),
        ({"max_lora_rank": 8, "lora_plugin": None, "lora_dir": ["a"]}, None),
        ({"max_lora_rank": 8, "lora_plugin": "disable"}, "--max-lora-rank without --lora-plugin"),
        ({"pp_reduce_scatter": "enable"}, "--pp-reduce-scatter is for Mixtral alone"),
        ({"gemm_allreduce_plugin": "float16"}, "--gemm-allreduce-plugin adds up what"),
        ({"gemm_allreduce_plugin": "float16", "tp_size": 2}, None),
        ({"gemm_plugin": "fp8"}, "--gemm-plugin fp8 for a checkpoint that is not quantized"),
        ({"gemm_plugin": "fp8", "algorithm": "FP8"}, None),
        ({"low_latency_gemm_plugin": "fp8", "algorithm": "NVFP4"},
         "--low-latency-gemm-plugin fp8 for a checkpoint that is NVFP4: it is for FP8"),
        ({"gemm_swiglu_plugin": "fp8", "algorithm": "FP8", "use_fused_mlp": "disable"},
         "--gemm-swiglu-plugin needs the fused MLP"),
        ({"fuse_fp4_quant": "enable", "algorithm": "FP8"},
         "--fuse-fp4-quant enable for a checkpoint that is FP8: it is for NVFP4"),
        ({"kv_cache_type": "paged", "workers": 2, "tp_size": 2, "tokens_per_block": 64}, None),
    ],
)  # fmt: skip
def test_flags_that_would_do_harm_or_nothing(options: dict[str, Any], fact: str | None) -> None:
    facts = list_facts(**options)
    assert len(facts) == (fact is not None), facts
    assert fact is None or facts[0].startswith(fact)


def test_tokens_per_block_are_suggested() -> None:
    ((_, hint),) = flags.find_flag_problems(make_plan(tokens_per_block=48))
    assert hint == "give 32 or 64"


def test_files_that_are_read_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "here").touch()
    absent = str(tmp_path / "absent")
    plan = make_plan(lora_dir=[str(tmp_path / "here"), absent], output_timing_cache=absent)
    assert list(flags.find_path_problems(plan)) == [
        (f"--lora-dir {absent} does not exist", "check the path")
    ]


# script.py


@pytest.mark.parametrize(
    ("label", "launcher", "tp_size", "workers", "fact"),
    [
        ("1.2", "local", 1, 2, None), ("1.2", "mpirun", 2, None, None),
        ("1.2", "mpirun", 1, None, "--launcher mpirun for one rank"),
        ("1.2", "srun", 2, 2, "--workers 2 has no effect under srun"),
        ("0.14", "srun", 4, 2, None),
        ("0.14", "srun", 5, None, "--launcher srun: trtllm-build of 0.14 does not use MPI"),
        ("0.14", "mpirun", 2, None, "--launcher mpirun: trtllm-build of 0.14 does not use MPI"),
    ],
)  # fmt: skip
def test_launchers(
    label: str, launcher: str, tp_size: int, workers: int | None, fact: str | None
) -> None:
    """Machines have 4 GPUs: 5 ranks need two of them, which 0.14 cannot build on."""
    given_flags: dict[str, Any] = {} if workers is None else {"workers": workers}
    plan = make_plan(label, tp_size=tp_size, **given_flags)
    facts = [f for f, _ in script.find_launcher_problems(plan, launcher)]
    assert len(facts) == (fact is not None)
    assert fact is None or facts[0].startswith(fact)


@pytest.mark.parametrize(("tp_size", "nodes"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_machines_are_counted(tp_size: int, nodes: int) -> None:
    assert script.count_nodes(make_plan(tp_size=tp_size)) == nodes


def find_command(text: str) -> list[str]:
    """The words of the line that builds."""
    (line,) = [line for line in text.splitlines() if "trtllm-build --checkpoint_dir" in line]
    return shlex.split(line)


def test_the_script_is_shell_and_says_what_it_builds() -> None:
    plan = make_plan(mode="medusa", max_batch_size=3, tp_size=2, model_cls_file="/it's/m.py")
    text = script.format_script(plan, "local")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "# Builds a TensorRT-LLM engine: medusa, 2 rank(s)." in text
    assert "for the line 1.2 of TensorRT-LLM." in text
    assert "checkpoint=${1:-'/a b/ckpt'}" in text
    assert "engine=${2:-/engines/e}" in text
    assert "# Usage: bash SCRIPT [CHECKPOINT [ENGINE]]" in text
    assert text.count("for rank in $(seq 0 1); do") == 2
    assert "export PYTHONUNBUFFERED=1" in text
    assert find_command(text) == [
        "trtllm-build", "--checkpoint_dir", "$checkpoint", "--output_dir", "$partial",
        "--speculative_decoding_mode", "medusa", "--max_batch_size", "3", "--model_cls_file",
        "/it's/m.py", "--output_timing_cache", "$partial/model.cache",
    ]  # fmt: skip
    kept = make_plan(output_timing_cache="/t.cache")
    assert find_command(script.format_script(kept, "local"))[-1] == "/t.cache"


@pytest.mark.parametrize(
    ("label", "tp_size", "nodes", "tasks", "per_node"),
    [("1.2", 4, 1, 4, 4), ("1.2", 6, 2, 6, 3), ("0.14", 4, 1, 1, 1)],
)
def test_the_script_for_slurm(
    label: str, tp_size: int, nodes: int, tasks: int, per_node: int
) -> None:
    """6 ranks are 3 on each of two machines; 0.14 is one process on one of them."""
    text = script.format_script(make_plan(label, tp_size=tp_size), "srun")
    gpus = -(-tp_size // nodes)
    for line in (
        f"#SBATCH --nodes={nodes}", f"#SBATCH --ntasks={tasks}",
        f"#SBATCH --ntasks-per-node={per_node}", f"#SBATCH --gpus-per-node={gpus}",
    ):  # fmt: skip
        assert line in text.splitlines()
    assert text.index("#SBATCH") < text.index("# Builds"), "before any command"
    assert find_command(text)[:5] == [
        "srun", "--mpi=pmix", f"--nodes={nodes}", f"--ntasks={tasks}",
        f"--ntasks-per-node={per_node}",
    ]  # fmt: skip
    assert "Usage: sbatch SCRIPT" in text


def test_the_script_for_mpi() -> None:
    text = script.format_script(make_plan(tp_size=3), "mpirun")
    assert find_command(text)[:3] == ["mpirun", "-n", "3"]
    assert "export OMPI_ALLOW_RUN_AS_ROOT=1" in text
    assert "SBATCH" not in text


def test_the_script_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "build.sh"
    script.write_script(path, "one\n", force=False)
    assert path.read_text() == "one\n"
    assert path.stat().st_mode & 0o111, "it can be run"
    with pytest.raises(SpecDecError, match="exists"):
        script.write_script(path, "two\n", force=False)
    script.write_script(path, "two\n", force=True)
    assert [file.read_text() for file in path.parent.iterdir()] == ["two\n"]
