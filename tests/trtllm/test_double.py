"""The double refuses what it must: a contract that nothing breaks proves nothing."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.build.backends.tensorrt_llm.pipeline import make_plan
from specdec.build.settings import BuildSettings
from specdec.convert.config import adapt_config
from specdec.errors import SpecDecError
from specdec.files.reading import read_json, write_json
from specdec.model.checkpoint import read_checkpoint_config
from specdec.trtllm.facts import load_facts
from tests.conftest import make_llama
from tests.engines import call
from tests.trtllm.checkpoints import CheckpointStore
from tests.trtllm.double import H100, Refusal, build_engine, check_engine_config, install_double


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    return CheckpointStore(tmp_path_factory.mktemp("double"))


@pytest.fixture(autouse=True)
def one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = install_double(tmp_path / "double", "1.2", gpus=[H100])
    monkeypatch.setenv("PATH", environment["PATH"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)


def attempt(checkpoint: Path, *words: str, label: str = "1.2") -> None:
    build_engine(
        load_facts(label), f"{label}.0",
        ["--checkpoint_dir", str(checkpoint), "--output_dir", "engine", *words],
    )  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ["--enable_xqa", "enable"], ["--max_batch", "4"], ["--max_batch_size", "four"],
        ["--gemm_plugin", "fp16"], ["--gather_generation_logits", "yes"], ["--tp_size", "2"],
        ["--speculative-decoding-mode", "medusa"],
    ],
)  # fmt: skip
def test_unknown_flags_types_and_choices(store: CheckpointStore, words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        attempt(store.get("plain"), *words)
    assert caught.value.code == 2


SILENT = [
    ("redrafter", [], "built as None"),
    ("medusa", [], "built as None"),
    ("redrafter", ["explicit_draft_tokens", "--max_draft_len", "3"], "silently become 12"),
    ("medusa", ["medusa", "--max_draft_len", "3"], "silently become 63"),
    ("plain", ["explicit_draft_tokens"], "without a drafter"),
    ("plain", ["draft_tokens_external"], "with max_draft_len 0"),
    ("plain", [None, "--max_draft_len", "4"], "mode None with max_draft_len 4"),
    ("redrafter", ["explicit_draft_tokens", "--max_num_tokens", "64"], "silently become 26624"),
    ("plain", [None, "--max_input_len", "600"], "silently become 512"),
    ("plain", [None, "--max_seq_len", "600"], "larger than positions"),
    ("plain", [None, "--use_fp8_context_fmha", "enable"], "silently become disable"),
    ("plain", [None, "--reduce_fusion", "enable"], "silently become disable"),
    ("plain", [None, "--context_fmha", "disable", "--use_paged_context_fmha", "enable"], "become"),
    ("plain", [None, "--workers", "2"], "cut to the GPUs"),
    ("redrafter", ["explicit_draft_tokens", "--gather_context_logits"], "Gather context logits"),
    ("redrafter", ["explicit_draft_tokens", "--max_beam_width", "2"], "beams"),
    (
        "plain",
        ["draft_tokens_external", "--max_draft_len", "4", "--use_paged_context_fmha", "disable"],
        "without paged context FMHA",
    ),
]


@pytest.mark.parametrize(("kind", "words", "match"), SILENT)
def test_what_the_real_one_lets_pass(
    store: CheckpointStore, kind: str, words: list[Any], match: str
) -> None:
    flags = [] if not words or words[0] is None else ["--speculative_decoding_mode", words[0]]
    with pytest.raises(Refusal, match=match):
        attempt(store.get(kind), *flags, *words[1:])
    assert not Path("engine", "config.json").exists()


@pytest.mark.parametrize(
    ("config", "label", "match"),
    [
        ({"architecture": "ReDrafterForCausalLM"}, "1.2", "Unsupported model architecture"),
        ({"hidden_size": None}, "1.2", "KeyError: \\['hidden_size'\\]"),
        ({"mapping": {"tp_size": 1, "cp_config": {}}}, "0.14", "keyword argument 'cp_config'"),
        ({"quantization": {"quant_algo": None, "use_meta_recipe": False}}, "0.14", "use_meta"),
        ({"architecture": "Qwen2ForCausalLM"}, "1.2", "qwen_type"),
    ],
)
def test_checkpoints_that_the_line_does_not_load(
    store: CheckpointStore, tmp_path: Path, config: dict[str, Any], label: str, match: str
) -> None:
    checkpoint = store.copy(tmp_path / "ckpt", "plain", label, **config)
    with pytest.raises(Refusal, match=match):
        attempt(checkpoint, label=label)


# Flags of convert, line, what our plan and the double say: None where they take it.
LAYOUTS: list[tuple[list[Any], str, str | None, str | None]] = [
    (["nvfp4"], "1.2", None, None),
    (["int8_sq"], "0.14", None, None),
    (["int4_awq", "--group-size", 64], "1.2", None, None),
    (["int4_awq", "--group-size", 64], "0.14", None, None),
    (["int4_awq"], "1.2", None, None),
    (["w4a8_awq"], "1.2", None, None),
    (["int4_awq", "--group-size", 32], "1.2", "groups of 64 and 128, not of 32", "group size 32"),
    (
        ["w4a8_awq", "--group-size", 64, "--tp-size", 2], "1.2", "multiples of 256, tp_size 2",
        "not of whole tiles",
    ),
    (["nvfp4"], "0.14", "0.14 cannot load NVFP4", "not a valid QuantAlgo"),
    (["fp8_pc_pt"], "0.14", "only the MLPs of the inner layers", "not a valid QuantAlgo"),
]  # fmt: skip


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[Any]], Path]:
    """Checkpoints by their flags, of a model in whole tiles of 128; for 1.2, each made once."""
    parent = tmp_path_factory.mktemp("quantized")
    target = make_llama(parent, hidden=128, intermediate=384, heads=8, kv_heads=4, layers=1)
    rows = parent / "rows.jsonl"
    rows.write_text("".join(f'{{"input_ids": [5, {i}, 9, 30, 2]}}\n' for i in range(4)))

    def get(flags: list[Any]) -> Path:
        folder = parent / "-".join(map(str, flags))
        if not folder.exists():
            data = [] if flags[0] == "fp8_pc_pt" else ["--calibration-data", rows]
            call("convert", "--model-dir", target, "--output-dir", folder, "--quantization",
                 *flags, *data)  # fmt: skip
        return folder

    return get


@pytest.mark.parametrize(("flags", "label", "refusal", "match"), LAYOUTS)
def test_what_the_line_loads_of_quantized_matrices(
    quantized: Callable[[list[Any]], Path],
    tmp_path: Path,
    flags: list[Any],
    label: str,
    refusal: str | None,
    match: str | None,
) -> None:
    checkpoint = quantized(flags)
    if label == "0.14":  # as convert writes it, or would
        config = adapt_config(read_json(checkpoint / "config.json"), label)
        checkpoint = tmp_path / "copy"
        shutil.copytree(quantized(flags), checkpoint)
        write_json(checkpoint / "config.json", config)
    settings = BuildSettings(
        checkpoint_dir=checkpoint, output_dir=tmp_path / "engine", trtllm_version=label
    )
    parsed = read_checkpoint_config(checkpoint)
    if refusal is None:
        make_plan(settings, load_facts(label), parsed, None)
        attempt(checkpoint, "--kv_cache_type", "paged", label=label)
        return
    with pytest.raises(SpecDecError, match=refusal):
        make_plan(settings, load_facts(label), parsed, None)
    with pytest.raises(Refusal, match=str(match)):
        attempt(checkpoint, label=label)


@pytest.mark.parametrize("flags", [["nvfp4"], ["fp8_pc_pt"], ["int8_sq"], ["w4a8_awq"]])
def test_the_torch_backend_says_what_it_does_not_execute(
    quantized: Callable[[list[Any]], Path], tmp_path: Path, flags: list[Any]
) -> None:
    with pytest.raises(SpecDecError, match="which the torch backend does not execute"):
        call("build", "--checkpoint-dir", quantized(flags), "--output-dir", tmp_path / "e",
             "--backend", "torch")  # fmt: skip


@pytest.mark.parametrize(
    ("path", "match"),
    [
        (("version",), "lacks version"),
        (("pretrained_config", "vocab_size"), "vocab_size"),
        (("build_config", "lora_config"), "lora_config"),
        (("build_config", "plugin_config", "tokens_per_block"), "tokens_per_block"),
    ],
)
def test_engine_config_that_the_runtime_does_not_read(
    store: CheckpointStore, path: tuple[str, ...], match: str
) -> None:
    attempt(store.get("plain"))
    document = read_json(Path("engine/config.json"))
    check_engine_config(document)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    with pytest.raises(Refusal, match=match):
        check_engine_config(document)


def test_runtime_does_not_take_an_external_engine_of_no_drafts(store: CheckpointStore) -> None:
    attempt(store.get("plain"))
    document = read_json(Path("engine/config.json"))
    document["build_config"]["speculative_decoding_mode"] = 2
    write_json(Path("engine/config.json"), document)
    with pytest.raises(Refusal, match="larger than 0"):
        check_engine_config(document)


def test_executable_ends_with_status_1(store: CheckpointStore, tmp_path: Path) -> None:
    program = tmp_path / "double" / "bin" / "trtllm-build"
    done = subprocess.run(
        [program, "--checkpoint_dir", store.get("medusa"), "--output_dir", "engine"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "a checkpoint of mode medusa is built as None" in done.stderr
