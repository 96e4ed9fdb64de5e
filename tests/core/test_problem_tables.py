"""Each row of each table of problems and refusals happens to an example, with a hint to follow.

Every call of `Problems.from_table` in the product is found: a row that no example meets fails here,
unless `ELSEWHERE` names the test that meets the rows of its module. Beside them are the tables of
refusals by name: of the Hub's answers, of trtllm-build's failures, of quantized folders.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.build import limits, triton
from specdec.build.backends import tensorrt, torch_checks
from specdec.build.backends.tensorrt_llm import checks, flags, process, script
from specdec.build.settings import BuildSettings
from specdec.checkpoint.config import CheckpointConfig
from specdec.command.stages import load_command
from specdec.convert.hf import HfFolder
from specdec.convert.quantize import sections
from specdec.decode.drafters import base, draft_target
from specdec.decode.requests import Request
from specdec.decode.sampling import SamplingParams
from specdec.decode.settings import DecodeSettings
from specdec.engine import support
from specdec.errors import Problems, SpecDecError, UsageError
from specdec.files import hub
from specdec.files.tensor_file import TensorInfo
from specdec.methods import METHODS
from specdec.methods.medusa import MedusaParams
from specdec.model.quantization import Quantization
from specdec.system import requirements
from specdec.system.machine import Gpu
from specdec.trt import doctor as trt_doctor
from specdec.trt import engine as trt_engine
from specdec.trtllm import doctor as trtllm_doctor
from specdec.trtllm import environment, run_checks
from specdec.trtllm.facts import LABELS, load_facts
from tests.conftest import ROOT
from tests.engine.models import make_model

FOLDERS = "specdec generate convert build run serve train export verify audit measure doctor"
# Rows that a test of whole folders meets, by module.
ELSEWHERE = {
    "specdec/model/bounds.py": "tests/convert/test_hints.py",
    "specdec/model/config.py": "tests/convert/test_hints.py",
    "specdec/model/experts.py": "tests/convert/test_hints.py",
    "specdec/model/linear_attention.py": "tests/convert/test_hints.py",
    "specdec/model/short_conv.py": "tests/convert/test_hints.py",
    "specdec/model/mamba2.py": "tests/convert/test_hints.py",
    "specdec/model/layer_sizes.py": "tests/convert/test_hints.py",
    "specdec/methods/mtp_assistant.py": "tests/convert/test_mtp_assistant.py",
    "specdec/checkpoint/config.py": "tests/convert/test_hints.py",
    "specdec/checkpoint/inventory.py": "tests/convert/test_hints.py",
    "specdec/trtllm/engine_folder.py": "tests/trtllm/test_engine_folder.py",
}
T4, H100 = (
    Gpu(name=name, compute_capability=capability, memory_bytes=10**9)
    for name, capability in (("T4", "7.5"), ("H100", "9.0"))
)
HEADS = MedusaParams(max_draft_len=9, num_heads=3, num_layers=1)


def make_checkpoint(
    drafter: Any = None, algorithm: str | None = None, excluded: Any = None,
    raw: dict[str, Any] | None = None, **changes: Any,
) -> CheckpointConfig:  # fmt: skip
    return CheckpointConfig(
        model=make_model(**changes), method=METHODS["medusa"] if drafter else None,
        drafter=drafter, raw={"architecture": "LlamaForCausalLM"} | (raw or {}),
        quantization=Quantization(quant_algo=algorithm, exclude_modules=excluded),
    )  # fmt: skip


# ---- Engines of TensorRT-LLM, and builds for it.


def make_folder(name: str = "e", **fields: Any) -> Any:
    values: dict[str, Any] = {
        "folder": Path(name), "mode": None, "max_draft_len": 0, "built_draft_len": 0,
        "max_beam_width": 1, "lacking": (), "kv_cache_type": "PAGED", "pretrained": {},
        "has_paged_context_fmha": True, "gathers_generation_logits": True, "vocab_size": 9,
        "logits_dtype": "float32", "max_input_len": 99, "max_num_tokens": 99, "world_size": 1,
    }  # fmt: skip
    return SimpleNamespace(**values | fields)


def make_build(
    typed: dict[str, Any] | None = None, *, label: str = "1.2", mode: str | None = None,
    recorded: dict[str, Any] | None = None, num_ranks: int = 1, is_paged: bool = True, **model: Any,
) -> Any:  # fmt: skip
    values = {
        "max_beam_width": 1, "gather_context_logits": False, "gather_all_token_logits": False,
        "max_draft_len": 0, "tokens_per_block": 32, "lora_plugin": "disable",
        "use_fused_mlp": "enable",
    }  # fmt: skip
    record = SimpleNamespace(
        values=values | (recorded or {}), reasons={}, is_on=lambda name: is_paged
    )
    return SimpleNamespace(
        given_flags=typed or {}, label=label, mode=mode, record=record, num_ranks=num_ranks,
        facts=load_facts(label), checkpoint=make_checkpoint(**model), gpus_per_node=8,
    )  # fmt: skip


def find_flags(typed: dict[str, Any], **fields: Any) -> Problems:
    return flags.find_flag_problems(make_build(typed, **fields))


def find_sampling(mode: str | None = None, pretrained: Any = None, **fields: Any) -> Problems:
    sampling = SamplingParams(**{k: fields.pop(k) for k in ("temperature", "top_k", "min_p")
                                 if k in fields})  # fmt: skip
    request = Request(
        index=0, input_ids=[1] * 50, max_output_len=50, end_ids=frozenset(), sampling=sampling,
        **fields,
    )  # fmt: skip
    folder = make_folder(mode=mode, pretrained=pretrained or {})
    return run_checks.find_sampling_problems(request, folder)


REQUEST = Request(index=0, input_ids=[1] * 50, max_output_len=50, end_ids=frozenset())
EXTERNAL = make_folder(mode="draft_tokens_external", max_draft_len=4, built_draft_len=4)
OPTIONS: Any = SimpleNamespace(draft_len=5, use_logits=True)


def find_engines(
    folder: Any, draft: Any = None, options: Any = None, **settings: Any
) -> Problems:  # fmt: skip
    return run_checks.find_engine_problems(
        DecodeSettings(**settings), options, folder, draft, has_lookup=False
    )


def make_config(mode: str | None, *, is_fixed: bool = True, max_draft_len: int = 4) -> Any:
    build = SimpleNamespace(
        speculative_decoding_mode=mode, max_draft_len=max_draft_len, max_num_tokens=40,
        max_batch_size=8,
    )  # fmt: skip
    checkpoint = SimpleNamespace(method=None)
    return SimpleNamespace(
        build=build, has_fixed_drafts=is_fixed, checkpoint=checkpoint, draft_room=4
    )


def check_trt_engine(gpus: list[Any], monkeypatch: pytest.MonkeyPatch) -> Problems:
    with monkeypatch.context() as patch:
        patch.setattr(trt_engine, "read_network_config", lambda folder: (None, None))
        patch.setattr(trt_engine, "find_network_problems", lambda *given: Problems())
        patch.setattr(trt_engine, "find_machine_problems", lambda *given: Problems())
        patch.setattr(trt_engine, "list_files", lambda checkpoint: [])
        patch.setattr(trt_doctor, "_read_library", lambda machine: None)
        machine: Any = {"gpus": [dataclasses.asdict(gpu) for gpu in gpus]}
        return trt_doctor.check_engine(Path("e"), {}, make_checkpoint(tp_size=2), machine)[0]


def check_trtllm_engine(monkeypatch: pytest.MonkeyPatch) -> Problems:
    """The problems of an engine of two ranks on a machine without MPI."""
    with monkeypatch.context() as patch:
        patch.setattr(trtllm_doctor, "read_reported", lambda machine: SimpleNamespace(
            tensorrt_llm="1.2", gpus=()
        ))  # fmt: skip
        patch.setattr(
            trtllm_doctor, "compare_environments", lambda *given, num_ranks: (Problems(), [])
        )
        patch.setattr(trtllm_doctor, "_can_start_ranks", bool)
        machine: Any = {"mpi": {"launchers": []}, "packages": {"mpi4py": None}}
        document: Any = {"version": "1.2", "build_config": {}}
        checkpoint = make_checkpoint(tp_size=2)
        return trtllm_doctor.check_engine(Path("e"), document, checkpoint, machine)[0]


def find_templates(folder: Path) -> Problems:
    """The problems of Triton's templates in which a variable has another name."""
    for model in triton.MODELS:
        (folder / model).mkdir(exist_ok=True)
        text = " ".join(f"${{{name}}}" for name in triton.NEEDED_VARIABLES[model])
        renamed = text.replace("${triton_max_batch_size}", "${other}")
        (folder / model / triton.CONFIG).write_text(renamed)
    with pytest.raises(SpecDecError) as caught:
        triton.read_templates(BuildSettings(triton_templates=folder))
    return Problems(caught.value.problems)


def make_trt_plan(name: str, size: int) -> Any:
    return SimpleNamespace(files={"a": {name: TensorInfo("float32", (size,))}})


TRT: Any = SimpleNamespace()
LIBRARY: Any = SimpleNamespace(name="RTX 2", explain=lambda gpu, capability: None)
NETWORKS: Any = SimpleNamespace(library="RTX 1", compute_capabilities=["8.0"])


def find_trt(checkpoint: CheckpointConfig, capability: str = "9.0") -> Problems:
    return tensorrt.find_problems(checkpoint, [capability], TRT)


def find_torch(settings: dict[str, Any], **checkpoint: Any) -> Problems:
    return torch_checks.find_problems(BuildSettings(**settings), make_checkpoint(**checkpoint))


def find_limits(checkpoint: CheckpointConfig, **settings: Any) -> Problems:
    with pytest.raises(SpecDecError) as caught:
        limits.resolve_limits(BuildSettings(**settings), checkpoint)
    return Problems(caught.value.problems)


FIXED = next(iter(triton.FIXED_FOR_PAIRS))
FRACTION = triton.FRACTION
LOOKAHEAD = make_folder(mode="lookahead_decoding", max_draft_len=4)
WINDOW = triton.USER_VARIABLES["lookahead_decoding"]
QUANTIZED = make_checkpoint(algorithm="FP8", excluded=())
HEAD_FILES: Any = [SimpleNamespace(tensors={"lm_head.weight": TensorInfo("float16", (2, 2))})]
MIXTURE = SimpleNamespace(shared_inner=4, shared_name="old_name")
SCALED: dict[str, Any] = {"rotary_scaling": {"rope_type": "yarn", "factor": 4.0}}

HYBRID = dataclasses.replace(
    make_checkpoint(),
    model=SimpleNamespace(  # type: ignore[arg-type]
        architecture="LlamaForCausalLM", arithmetic=make_model().arithmetic, tp_size=1,
        dtype="float32", experts=None, recurrence=SimpleNamespace(),
        linear_attention=SimpleNamespace(), short_conv=None, mamba2=None, layer_sizes=None,
    ),
)  # fmt: skip

Examples = dict[str, Callable[[], Any]]


def make_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Examples]:
    """Examples by module: the beginning of a fact, and what finds such a problem."""
    monkeypatch.setattr(tensorrt, "can_meet_ranks", lambda trt: False)
    monkeypatch.setattr(tensorrt, "describe_library", lambda trt: LIBRARY)
    monkeypatch.setattr(checks, "find_loading_problems", lambda *given: None)
    config = tmp_path / triton.MODELS[0] / triton.CONFIG
    int4 = {"quantization": "int4"}
    mixture: dict[str, Any] = {"architecture": "MixtralForCausalLM", "experts": MIXTURE}
    return {
        "build/limits.py": {
            "max_beam_width=2": lambda: find_limits(make_checkpoint(), max_beam_width=2),
            "max_num_tokens=79": lambda: find_limits(make_checkpoint(HEADS), max_num_tokens=79),
            "max_seq_len=2049 exceeds": lambda: find_limits(make_checkpoint(), max_seq_len=2049),
            "max_seq_len=99999999 makes rotary": lambda: find_limits(
                make_checkpoint(max_position_embeddings=10**9), max_seq_len=99999999
            ),
            "max_seq_len=1 has no room": lambda: find_limits(
                make_checkpoint(max_position_embeddings=1)
            ),
            "max_input_len=9 leaves": lambda: find_limits(
                make_checkpoint(), max_input_len=9, max_seq_len=9
            ),
            "--speculative-decoding-mode eagle does not fit": lambda: find_limits(
                make_checkpoint(HEADS), speculative_decoding_mode="eagle"
            ),
            "--speculative-decoding-mode draft_tokens_external needs": lambda: find_limits(
                make_checkpoint(), speculative_decoding_mode="draft_tokens_external"
            ),
            "--max-draft-len 4 contradicts": lambda: find_limits(
                make_checkpoint(HEADS), max_draft_len=4
            ),
        },
        "build/backends/torch_checks.py": {
            "the torch backend has a continuous": lambda: find_torch({"kv_cache_type": "paged"}),
            "the checkpoint is split": lambda: find_torch({}, pp_size=2),
            "hidden_act='tanh'": lambda: find_torch({}, hidden_act="tanh"),
            "the checkpoint is quantized (NVFP4)": lambda: find_torch({}, algorithm="NVFP4"),
            "--quantization int8: the": lambda: find_torch(
                {"quantization": "int8"}, algorithm="FP8"
            ),
            "--packed-weights enable: ": lambda: find_torch(
                {"packed_weights": True, "optimize": "none"}
            ),
            "--group-size without": lambda: find_torch({"group_size": 32}),
            "--drafter-weights int8": lambda: find_torch({"drafter_weights": "int8"}),
            "--group-size 48": lambda: find_torch({"group_size": 48, **int4}),
            "--quantization int4: Mixtral": lambda: find_torch(int4, **mixture),
        },
        "specdec/engine/support.py": {
            "the torch backend has no": lambda: support.find_checkpoint_problems(
                make_checkpoint(pp_size=2)
            ),
            "the torch backend does not execute NVFP4": lambda: support.find_checkpoint_problems(
                make_checkpoint(algorithm="NVFP4")
            ),
        },
        "specdec/system/requirements.py": {
            "the weights take 2.0 GB": lambda: requirements.find_memory_problems(
                2 * 10**9, 10**9, "it"
            ),
        },
        "build/backends/tensorrt.py": {
            "the checkpoint is split for tp_size=2, and ": lambda: find_trt(
                make_checkpoint(tp_size=2)
            ),
            "MixtralForCausalLM is a mixture": lambda: find_trt(make_checkpoint(**mixture)),
            "LlamaForCausalLM has linear attention": lambda: find_trt(HYBRID),
            "the tensorrt backend has no network of Other": lambda: find_trt(
                make_checkpoint(SimpleNamespace(TITLE="Other"))
            ),
            "dtype=bfloat16: TensorRT has it from compute": lambda: find_trt(
                make_checkpoint(dtype="bfloat16"), "7.5"
            ),
            "1 matrices of the checkpoint have weights_zero_point": lambda: (
                tensorrt.find_plan_problems(make_trt_plan("a.weights_zero_point", 1))
            ),
            "TensorRT's builder takes about": lambda: tensorrt.find_plan_problems(
                make_trt_plan("a.weight", 10**14)
            ),
        },
        "specdec/trt/engine.py": {
            "e was built by RTX 1": lambda: trt_engine.find_machine_problems(
                Path("e"), NETWORKS, LIBRARY, "H100", "8.0"
            ),
            "e was built for": lambda: trt_engine.find_machine_problems(
                Path("e"), NETWORKS, LIBRARY, "H100", "9.0"
            ),
        },
        "specdec/trt/doctor.py": {
            "its 2 ranks need a GPU each, 1": lambda: check_trt_engine([H100], monkeypatch),
            "it runs on a GPU": lambda: check_trt_engine([], monkeypatch),
        },
        "specdec/decode/drafters/base.py": {
            "draft-target drafts 5 tokens": lambda: base.find_room_problems(
                make_config(None), METHODS["draft_target"], 5
            ),
        },
        "specdec/decode/drafters/draft_target.py": {
            "the draft engine was built with": lambda: draft_target._find_mode_problems(
                make_config("medusa")
            ),
            "the target's engine was built with speculative": lambda: (
                draft_target.find_length_problems(make_config("medusa"), None, None)
            ),
            "the draft length is 5": lambda: draft_target.find_length_problems(
                make_config("draft_tokens_external"), 5, None
            ),
            "--draft-tree-tokens is 5": lambda: draft_target.find_length_problems(
                make_config("draft_tokens_external"), None, 5
            ),
        },
        "build/backends/tensorrt_llm/checks.py": {
            "the checkpoint's shared experts": lambda: checks.find_checkpoint_problems(
                load_facts("1.2"), make_checkpoint(**mixture)
            ),
            "the checkpoint is Qwen2ForCausalLM": lambda: checks.find_checkpoint_problems(
                load_facts("1.2"), make_checkpoint(raw={"architecture": "Qwen2ForCausalLM"})
            ),
            "logits_dtype is 'bfloat16'": lambda: checks.find_checkpoint_problems(
                load_facts("1.2"), make_checkpoint(raw={"logits_dtype": "bfloat16"})
            ),
            "--speculative-decoding-mode eagle does not": lambda: checks.find_mode_problems(
                make_checkpoint(HEADS), "eagle", None
            ),
            "--max-draft-len 4 contradicts": lambda: checks.find_mode_problems(
                make_checkpoint(HEADS), None, 4
            ),
            "--speculative-decoding-mode eagle needs": lambda: checks.find_mode_problems(
                make_checkpoint(), "eagle", None
            ),
            "--speculative-decoding-mode lookahead_decoding with": lambda: (
                checks.find_mode_problems(make_checkpoint(), "lookahead_decoding", 0)
            ),
            "--max-draft-len 4 without a mode": lambda: checks.find_mode_problems(
                make_checkpoint(), None, 4
            ),
            "draft_tokens_external without": lambda: checks.find_method_problems(
                make_build(mode="draft_tokens_external", is_paged=False)
            ),
            "vocab_size=9 does not divide": lambda: checks.find_method_problems(
                make_build(mode="explicit_draft_tokens", vocab_size=9, tp_size=2)
            ),
            "--use-paged-context-fmha disable with EAGLE": lambda: checks.find_method_problems(
                make_build({"use_paged_context_fmha": "disable"}, mode="eagle")
            ),
            "max_seq_len=2049 exceeds": lambda: checks.find_length_problems(
                make_build({"max_seq_len": 2049})
            ),
            "without --max-seq-len trtllm-build takes": lambda: checks.find_length_problems(
                make_build(**SCALED)
            ),
            "quantization.exclude_modules is an empty list": lambda: checks.find_head_problems(
                load_facts("1.2"), QUANTIZED, HEAD_FILES
            ),
            "T4 has compute capability 7.5": lambda: checks.find_gpu_problems(make_build(), (T4,)),
            "--workers 2 with 1 GPU(s)": lambda: checks.find_gpu_problems(
                make_build({"workers": 2}), (H100,)
            ),
        },
        "build/backends/tensorrt_llm/script.py": {
            "--launcher mpirun: trtllm-build of 0.14": lambda: script.find_launcher_problems(
                make_build(label="0.14", num_ranks=2), "mpirun"
            ),
            "--workers 2 has no effect": lambda: script.find_launcher_problems(
                make_build({"workers": 2}, num_ranks=2), "mpirun"
            ),
            "--launcher mpirun for one rank": lambda: script.find_launcher_problems(
                make_build(), "mpirun"
            ),
        },
        "build/backends/tensorrt_llm/flags.py": {
            "--max-beam-width 2": lambda: find_flags({}, recorded={"max_beam_width": 2}),
            "--gather-context-logits does not go": lambda: find_flags(
                {}, mode="medusa", recorded={"gather_context_logits": True}
            ),
            "--kv-cache-type continuous": lambda: find_flags({"kv_cache_type": "continuous"}),
            "--streamingllm enable": lambda: find_flags({"streamingllm": "enable"}, label="0.14"),
            "--auto-parallel 2": lambda: find_flags({"auto_parallel": 2}, label="0.14"),
            "--workers 3 for 2 rank(s)": lambda: find_flags({"workers": 3}, num_ranks=2),
            "--workers 0": lambda: find_flags({"workers": 0}),
            "--tokens-per-block 48": lambda: find_flags({}, recorded={"tokens_per_block": 48}),
            "--mamba-conv1d-plugin is for": lambda: find_flags({"mamba_conv1d_plugin": "auto"}),
            "--pp-reduce-scatter is for": lambda: find_flags({"pp_reduce_scatter": "enable"}),
            "--lora-dir without --lora-plugin": lambda: find_flags({"lora_dir": ["a"]}),
            "--gpus-per-node without --auto-parallel": lambda: find_flags(
                {"gpus_per_node": 4}, label="0.14"
            ),
            "--gemm-allreduce-plugin adds": lambda: find_flags({"gemm_allreduce_plugin": "auto"}),
            "--gemm-swiglu-plugin fp8 for a": lambda: find_flags({"gemm_swiglu_plugin": "fp8"}),
            "--gemm-swiglu-plugin needs the fused": lambda: find_flags(
                {"gemm_swiglu_plugin": "fp8"}, recorded={"use_fused_mlp": "disable"}
            ),
            "--gemm-plugin fp8 for a": lambda: find_flags({"gemm_plugin": "fp8"}),
            "--fuse-fp4-quant enable for": lambda: find_flags({"fuse_fp4_quant": "enable"}),
        },
        "build/triton.py": {
            "kv_cache_free_gpu_mem_fraction is '2'": lambda: triton.find_engine_problems(
                make_folder(), None, {FRACTION: "2"}, {}
            ),
            "an engine of mode lookahead_decoding is served": lambda: triton.find_engine_problems(
                LOOKAHEAD, None, {}, {}
            ),
            "speculative_decoding_fast_logits needs": lambda: triton.find_engine_problems(
                make_folder(), None, {"speculative_decoding_fast_logits": "True"}, {}
            ),
            "gpu_device_ids is '0,1', the engine has 1": lambda: triton.find_engine_problems(
                make_folder(), None, {"gpu_device_ids": "0,1"}, {}
            ),
            f"--triton-parameters {FIXED} with": lambda: triton.find_pair_problems(
                EXTERNAL, make_folder(), {FIXED: "1"}, {}
            ),
            "e has mode None and takes no drafts": lambda: triton.find_pair_problems(
                make_folder(), make_folder(), {}, {}
            ),
            "d has mode medusa": lambda: triton.find_pair_problems(
                EXTERNAL, make_folder("d", mode="medusa"), {}, {}
            ),
            "d cannot reuse blocks": lambda: triton.find_pair_problems(
                EXTERNAL, make_folder("d", has_paged_context_fmha=False), {}, {}
            ),
            "both engines are on one GPU": lambda: triton.find_pair_problems(
                EXTERNAL, make_folder("d"), {}, {}
            ),
            f"{WINDOW[0]}": lambda: triton.find_window_problems(
                LOOKAHEAD, dict.fromkeys(WINDOW, "0")
            ),
            "lookahead [3,3,3] drafts 11 tokens": lambda: triton.find_window_problems(
                LOOKAHEAD, dict.fromkeys(WINDOW, "3")
            ),
            f"{config} has no variable triton_max": lambda: find_templates(tmp_path),
            f"{config} has unknown variables other": lambda: find_templates(tmp_path),
        },
        "specdec/trtllm/environment.py": {
            "the engine was built with TensorRT 9": lambda: environment._compare_library("9", "10"),
            "the engine has 2 ranks, 1 GPUs": lambda: environment._compare_gpus([], (H100,), 2)[0],
            "the engine was built for compute capability 8.0": lambda: environment._compare_gpus(
                [{"name": "A100", "compute_capability": "8.0"}], (H100,), 1
            )[0],
            "the engine was tuned on H200": lambda: environment._compare_gpus(
                [{"name": "H200", "compute_capability": "9.0"}], (H100,), 1
            )[1],
        },
        "specdec/trtllm/doctor.py": {
            "the engine has 2 ranks and no mpirun": lambda: check_trtllm_engine(monkeypatch),
            "TensorRT-LLM does not load without mpi4py": lambda: check_trtllm_engine(monkeypatch),
        },
        "specdec/trtllm/run_checks.py": {
            "prompt 0 grows to 100 tokens": lambda: run_checks.find_growth_problems(
                REQUEST, make_folder(), None
            ),
            "e was built for external drafts": lambda: find_engines(EXTERNAL),
            "e cannot reuse blocks": lambda: find_engines(
                make_folder(kv_cache_type="CONTINUOUS"), kv_cache_enable_block_reuse=True
            ),
            "the target's engine was built with speculative": lambda: find_engines(
                make_folder(), make_folder("d"), OPTIONS
            ),
            "the draft length is 5": lambda: find_engines(EXTERNAL, make_folder("d"), OPTIONS),
            "the draft engine was built with": lambda: find_engines(
                EXTERNAL, make_folder("d", mode="medusa"), OPTIONS
            ),
            "e was built with a plugin": lambda: find_engines(make_folder(lacking=("a plugin",))),
            "e was built with max_beam_width 2": lambda: find_engines(
                make_folder(mode="medusa", max_beam_width=2)
            ),
            "e was built for drafts of 3": lambda: find_engines(
                make_folder(mode="medusa", built_draft_len=3)
            ),
            "--no-speculation: a TensorRT-LLM": lambda: find_engines(
                make_folder(mode="medusa"), no_speculation=True
            ),
            "--use-logits: d built without": lambda: find_engines(
                EXTERNAL, make_folder("d", gathers_generation_logits=False), OPTIONS
            ),
            "--use-logits: the target's vocab_size is 9": lambda: find_engines(
                EXTERNAL, make_folder("d", vocab_size=10), OPTIONS
            ),
            "prompt 0 has temperature 0.5, TensorRT-LLM's Medusa": lambda: find_sampling(
                "medusa", temperature=0.5
            ),
            "prompt 0 samples with temperature 0.5, and TensorRT-LLM's EAGLE": lambda: (
                find_sampling("eagle", temperature=0.5)
            ),
            "prompt 0 asks for a penalty": lambda: find_sampling(min_p=0.5),
            "prompt 0 asks for log-prob": lambda: find_sampling(num_logprobs=1),
            "prompt 0 asks for decoding without": lambda: find_sampling(
                "medusa", allows_drafts=False
            ),
            "prompt 0 chooses how it is drafted": lambda: find_sampling(max_draft_tokens=2),
            "prompt 0 asks for structured": lambda: find_sampling(grammar=SimpleNamespace()),
            "prompt 0 has top_k 99999": lambda: find_sampling(temperature=1.0, top_k=99999),
            "prompt 0 samples with temperature 0.5, but": lambda: find_sampling(
                "explicit_draft_tokens", temperature=0.5
            ),
            "prompt 0 decodes greedily": lambda: find_sampling(
                "explicit_draft_tokens", {"redrafter_greedy_search": False}
            ),
            "prompt 0 has top_k 3 and": lambda: find_sampling(
                "explicit_draft_tokens", {"redrafter_greedy_search": False}, temperature=1.0,
                top_k=3,
            ),
        },
    }  # fmt: skip


# ---- The rows of the code.


def spell(node: ast.expr) -> str:
    """A text's pattern: its constants, and anything where there is a value."""
    if isinstance(node, ast.Constant):
        return re.escape(str(node.value))
    if isinstance(node, ast.JoinedStr):
        return "".join(spell(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return spell(node.left) + spell(node.right)
    if isinstance(node, ast.IfExp):
        return f"(?:{spell(node.body)}|{spell(node.orelse)})"
    return "(?s:.*)"


def list_rows() -> Iterator[tuple[str, int, str, str]]:
    """Rows of tables: file, line, pattern of the fact and of the remedy."""
    for path in [path for name in FOLDERS.split() for path in sorted((ROOT / name).rglob("*.py"))]:
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "from_table(" in text else ():
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_table":
                for row in (inner for argument in node.args for inner in ast.walk(argument)):
                    if isinstance(row, ast.Tuple) and len(row.elts) in (3, 4):
                        file = path.relative_to(ROOT).as_posix()
                        yield file, row.lineno, spell(row.elts[1]), spell(row.elts[2])


def list_flags() -> set[str]:
    """Flags of all commands, and of trtllm-build."""
    found = {f"--{name.replace('_', '-')}" for label in LABELS for name in
             load_facts(label).list_flag_names()}  # fmt: skip
    for stage in "convert build run serve train verify export bench generate doctor".split():
        command = load_command(stage)
        for parameter in command.params:
            found |= {*parameter.opts, *parameter.secondary_opts}
    return found


def test_each_row_has_an_example_and_each_hint_leads_somewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = make_examples(tmp_path, monkeypatch)
    found: dict[str, list[tuple[str, str]]] = {}
    for file, cases in examples.items():
        for beginning, find in cases.items():
            pairs = [(fact, remedy) for fact, remedy in find() if fact.startswith(beginning)]
            assert len(pairs) == 1, (file, beginning, find())
            found.setdefault(file, []).extend(pairs)
    rows = list(list_rows())
    assert len(rows) > 130
    missing = [
        f"{file}:{line}" for file, line, fact, remedy in rows if file not in ELSEWHERE
        and not any(re.fullmatch(fact, f) and re.fullmatch(remedy, r) for f, r in found[file])
    ]  # fmt: skip
    assert missing == []
    assert set(examples) | set(ELSEWHERE) == {file for file, *_ in rows}
    assert all((ROOT / test).is_file() for test in ELSEWHERE.values())
    known = list_flags()
    for file, pairs in found.items():
        for fact, remedy in pairs:
            assert remedy[0].islower() or remedy.startswith(("--", "TensorRT", "pip")), (file, fact)
            unknown = set(re.findall(r"(?<!\S)--[a-z0-9-]+", remedy)) - known
            assert not unknown, (file, remedy)


# ---- Tables by name.


# A table of refusals or causes that no example here meets -> the file of the test that does.
WALKED_ELSEWHERE = {"verify/report.py": "tests/verify/test_parts.py"}


def test_each_table_of_refusals_is_walked() -> None:
    """A new one needs a test that takes its rows."""
    tables = [
        (path.relative_to(ROOT).as_posix(), path.stem, name)
        for folder in FOLDERS.split() for path in sorted((ROOT / folder).rglob("*.py"))
        for name in re.findall(r"^(REFUSED|REFUSALS|CAUSES)\b", path.read_text(), re.MULTILINE)
    ]  # fmt: skip
    assert len(tables) >= 5
    for file, module, name in tables:
        text = (ROOT / WALKED_ELSEWHERE.get(file, f"tests/core/{Path(__file__).name}")).read_text()
        words = (f"{module}.{name}", f"in {name}.items()")
        assert any(word in text for word in words[file in WALKED_ELSEWHERE :]), (file, name)


def make_error(*names: str) -> Exception:
    """An exception whose class and bases have these names, the first the class's own."""
    kind: Any = Exception
    for name in reversed(names):
        kind = type(name, (kind,), {})
    return kind("what the library says")


@pytest.mark.parametrize(("name", "fact", "remedy"), hub.REFUSALS)
def test_answers_of_the_hub(name: str, fact: str, remedy: str) -> None:
    error = hub.explain("org/model", "--model-dir", make_error("Special", name))
    assert error.message == f"--model-dir org/model is not a local folder, and at the Hub {fact}"
    assert error.hint == remedy


def test_the_most_special_answer_comes_first() -> None:
    error = hub.explain("a/b", "--x", make_error("GatedRepoError", "RepositoryNotFoundError"))
    assert "access to that model is restricted" in error.message
    assert [row[0] for row in hub.REFUSALS][:2] == ["GatedRepoError", "RepositoryNotFoundError"]


@pytest.mark.parametrize(("name", "fact"), hub.FAILURES.items())
def test_failures_of_the_network(name: str, fact: str) -> None:
    outer = RuntimeError("outer")
    outer.__cause__ = make_error(name)
    assert hub.describe_answer(outer) == fact
    if name != "OfflineModeIsEnabled":
        error = hub.explain("org/model", "--model-dir", outer)
        assert error.message.endswith(f"and the Hugging Face Hub {fact}")
        assert error.hint is not None
        assert "goes on where it stopped" in error.hint


def test_other_answers_of_the_hub() -> None:
    answered = RuntimeError("x")
    answered.response = SimpleNamespace(status_code=503)  # type: ignore[attr-defined]
    outer = RuntimeError("outer")
    outer.__context__ = answered
    assert hub.describe_answer(outer) == "answered with status 503"
    assert hub.describe_answer(make_error("ReadTimeout")) == "did not answer in time"
    refused = ConnectionRefusedError(111, "Connection refused")
    assert hub.describe_answer(refused) == "cannot be reached: connection refused"
    text = hub.describe_answer(ValueError("a\n b" + "c" * 300))
    assert text.startswith("gave ValueError: a bccc")
    assert len(text) == len("gave ValueError: ") + 200


def test_files_of_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def download(hub_id: str, **options: Any) -> str:
        asked.append((hub_id, options))
        if len(asked) > 1:
            raise make_error("RepositoryNotFoundError")
        return str(tmp_path)

    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.fetch_files("a/b", "--x", ("c", "d")) == tmp_path
    assert asked == [("a/b", {"allow_patterns": ["c", "d"], "token": False})]
    with pytest.raises(SpecDecError, match="there is no such model, or a private one"):
        hub.fetch_files("a/b", "--x", ("c",))
    cached = {"tokenizer.model": "/cache/tokenizer.model"}
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda hub_id, name: cached.get(name)
    )
    assert hub.find_cached("a/b")
    cached.clear()
    assert not hub.find_cached("a/b")


@pytest.mark.parametrize("method", sections.REFUSED)
def test_quantized_folders_that_are_not_read(method: str, tmp_path: Path) -> None:
    folder = HfFolder.__new__(HfFolder)
    folder.path, folder.tensors = tmp_path, {}
    reason, remedy = sections.REFUSED[method]
    folder.config = {"quantization_config": {"quant_method": method, "bits": 4}}
    if method == "mlx":  # which names itself by no method
        folder.config = {"quantization": {"group_size": 64, "bits": 4}}
    with pytest.raises(SpecDecError) as caught:
        sections.read_scheme(folder)
    assert caught.value.message == f"{tmp_path} is quantized ({method}): {reason}"
    assert caught.value.hint == f"{remedy}; {sections._READ}"
    models = ("the model that it was made from", "the unquantized model")
    assert any(f"convert {model}" in remedy for model in models)


# Output of trtllm-build, by the beginning of the fact that it is explained by.
FAILURES = {
    "this trtllm-build does not know a flag or value: --odd 3":
        "trtllm-build: error: unrecognized arguments: --odd 3",
    "this TensorRT-LLM has no architecture OddForCausalLM":
        "ValueError: Unsupported model architecture: OddForCausalLM",
    "the checkpoint's config.json has the key cp_config":
        "TypeError: Mapping.__init__() got an unexpected keyword argument 'cp_config'",
    "the checkpoint lacks the tensor lm_head.weight": "KeyError: 'lm_head.weight'",
    "the GPU's memory is full": "[TRT] [E] CUDA runtime error: out of memory",
    "this machine's memory is full": "RuntimeError: std::bad_alloc",
    "the disk is full": "OSError: [Errno 28] No space left on device",
    "trtllm-build found no usable GPU or driver": "RuntimeError: no CUDA-capable device",
    "TensorRT has no kernel for /layers/0/gemm on this GPU":
        "Error: Could not find any implementation for node /layers/0/gemm",
    "a library is missing: libmpi.so.40":
        "x: error while loading shared libraries: libmpi.so.40: cannot open shared object file",
    "TensorRT-LLM's installation lacks the module modelopt.torch":
        "ModuleNotFoundError: No module named 'modelopt.torch'",
    "trtllm-build raised ValueError: odd": "ValueError: odd",
}  # fmt: skip


def test_each_cause_of_a_failure_has_an_example() -> None:
    explained = set()
    for fact, line in FAILURES.items():
        matching = [n for n, row in enumerate(process.CAUSES) if re.search(row[0], line)]
        error = process._explain(1, ["begun", line, ""], Path("/logs/a.log"))
        assert error.message.startswith(f"trtllm-build failed (status 1): {fact}"), fact
        assert error.message.endswith(f"; its last lines: begun | {line}")
        assert error.hint == f"{process.CAUSES[matching[0]][2]}; the log is /logs/a.log"
        explained.add(matching[0])
    assert explained == set(range(len(process.CAUSES)))
    known = list_flags()
    for _, _, remedy in process.CAUSES:
        assert set(re.findall(r"--[a-z][a-z-]+", remedy)) - {"--gpus"} <= known, remedy
    killed = process._explain(-9, [], Path("a.log"))
    assert killed.message == "trtllm-build was killed, as the system does when memory is full"
    assert process._explain(2, ["odd"], Path("a.log")).message == (
        "trtllm-build failed with status 2; its last lines: odd"
    )


def make_unknown(**words: Any) -> Any:
    options = {name: SimpleNamespace(words=[value]) for name, value in words.items()}
    return dataclasses.replace(BuildSettings(), unknown_options=options)


@pytest.mark.parametrize("name", flags.REFUSED)
def test_flags_that_are_not_passed_on(name: str) -> None:
    labels = [label for label in LABELS if load_facts(label).find_flag(name) is not None]
    assert labels, "no line has it"
    for label in labels:
        with pytest.raises(UsageError) as caught:
            flags.collect_flags(make_unknown(**{name: "x"}), load_facts(label))
        flag = f"--{name.replace('_', '-')}"
        assert caught.value.message == f"{flag} is not passed on: {flags.REFUSED[name]}"


@pytest.mark.parametrize("name", flags.MOVED)
def test_flags_that_went_elsewhere(name: str) -> None:
    labels = [label for label in LABELS if load_facts(label).find_flag(name) is None]
    assert labels, "every line has it"
    for label in labels:
        with pytest.raises(UsageError, match=f"neither specdec-build nor trtllm-build of .*"
                           f" {label} has --{name.replace('_', '-')}") as caught:  # fmt: skip
            flags.collect_flags(make_unknown(**{name: "x"}), load_facts(label))
        assert caught.value.hint == flags.MOVED[name]
