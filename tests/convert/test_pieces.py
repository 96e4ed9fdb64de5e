"""Parts of the converter around its plan, alone: names, downloads, wrappers, reports, sharing."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specdec.convert import drafter, flags, hub, report, resolve, wrappers
from specdec.convert.hf import HfFolder
from specdec.convert.plan import PlannedTensor
from specdec.convert.settings import ConvertSettings
from specdec.errors import SpecDecError, UsageError
from specdec.files.tensor_file import TensorInfo
from specdec.model.wrappers import NAMES, WRAPPERS
from tests.conftest import save_folder

# ---- Wrappers.


def make_wrapped(folder: Path, names: list[str], **config: Any) -> HfFolder:
    tensors = {name: torch.full((2,), float(n)) for n, name in enumerate(names)}
    return HfFolder(save_folder(folder, tensors, config))


@pytest.mark.parametrize("prefixes", NAMES)
def test_a_text_model_is_taken_by_the_names_that_it_has_alone(
    prefixes: tuple[str, str], tmp_path: Path
) -> None:
    wrapped, alone = prefixes
    folder = make_wrapped(
        tmp_path / "model", [f"{wrapped}a.weight", "vision_tower.b", "model.visual.c", "other.d"],
        architectures=["LlavaForConditionalGeneration"], torch_dtype="float16", hidden_size=1,
        text_config={"model_type": "llama", "hidden_size": 64},
    )  # fmt: skip
    wrappers.unwrap(folder)
    assert set(folder.tensors) == {f"{alone}a.weight", "other.d"}
    np.testing.assert_array_equal(folder.read(f"{alone}a.weight"), [0, 0])
    # Sizes that its class takes by default, its own, and the type from outside.
    assert (folder.config["hidden_size"], folder.config["vocab_size"]) == (64, 32000)
    assert (folder.config["torch_dtype"], folder.config["model_type"]) == ("float16", "llama")
    assert "architectures" not in folder.config


def test_a_head_that_the_wrapper_ties(tmp_path: Path) -> None:
    for name, tensors, ties in (
        ("tied", ["language_model.model.a"], True),
        ("untied", ["language_model.model.a", "language_model.lm_head.weight"], None),
    ):
        folder = make_wrapped(
            tmp_path / name, tensors, architectures=["LlavaForConditionalGeneration"],
            tie_word_embeddings=True, text_config={"model_type": "llama"},
        )  # fmt: skip
        wrappers.unwrap(folder)
        assert folder.config.get("tie_word_embeddings") is ties


def test_other_folders_are_left_as_they_are(tmp_path: Path) -> None:
    text = {"model_type": "llama"}
    configs: list[dict[str, Any]] = [
        {"architectures": ["LlamaForCausalLM"], "text_config": text},
        {"architectures": [WRAPPERS[0]]}, {"architectures": WRAPPERS[0], "text_config": text}, {},
    ]  # fmt: skip
    for number, config in enumerate(configs):
        folder = make_wrapped(tmp_path / str(number), ["language_model.model.a"], **config)
        wrappers.unwrap(folder)
        assert set(folder.tensors) == {"language_model.model.a"}
        assert folder.config == config


def test_what_a_wrapper_leaves_out_of_logits_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, text in (
        ("capped", {"model_type": "gemma2"}), ("scaled", {"logits_scaling": 8.0}),
        ("plain", {"logits_scaling": 1.0, "final_logit_softcapping": None}),
    ):  # fmt: skip
        folder = make_wrapped(
            tmp_path / name, ["a"], architectures=["LlavaForConditionalGeneration"],
            text_config=text,
        )  # fmt: skip
        wrappers.unwrap(folder)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert f"{tmp_path / 'capped'}: final_logit_softcapping 30.0 of the text model" in warnings[0]
    assert "logits_scaling 8.0" in warnings[1]


# ---- Names.


def test_a_model_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_folder(tmp_path / "model", {"a": torch.ones(1)}, {"model_type": "llama"})
    assert resolve.open_model(str(folder), "--model-dir").path == folder
    fetched: list[Any] = []

    def fetch(name: str, flag: str, weight_files: Any) -> Path:
        fetched.append((name, flag, tuple(weight_files)))
        return folder

    monkeypatch.setattr(resolve, "fetch_model", fetch)
    monkeypatch.chdir(tmp_path)
    assert resolve.open_model("org/name", "--model-dir").path == folder
    resolve.open_model("org/heads", "--medusa-model-dir", resolve.MEDUSA)
    resolve.open_model("org/any", "--drafter-model-dir", None)
    heads = tuple(resolve.MEDUSA_FILES)
    assert fetched == [
        ("org/name", "--model-dir", ()), ("org/heads", "--medusa-model-dir", heads),
        ("org/any", "--drafter-model-dir", heads),
    ]  # fmt: skip
    opened: list[Path] = []
    monkeypatch.setattr(resolve, "GgufFolder", lambda path: opened.append(path))
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    resolve.open_model(str(tmp_path / "a.gguf"), "--model-dir")
    assert opened == [tmp_path / "a.gguf"]


def test_names_of_no_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--model-dir is empty"):
        resolve.open_model("", "--model-dir")
    (tmp_path / "file.txt").write_text("a")
    with pytest.raises(SpecDecError, match=r"--model-dir .*file.txt is a file"):
        resolve.open_model(str(tmp_path / "file.txt"), "--model-dir")
    with pytest.raises(SpecDecError, match=r"--model-dir .*absent/a/b does not exist"):
        resolve.open_model(str(tmp_path / "absent" / "a" / "b"), "--model-dir")


# ---- The Hub.


def make_error(*names: str) -> Exception:
    kind: Any = Exception
    for name in reversed(names):
        kind = type(name, (kind,), {})
    return kind("x")


def test_a_download_goes_on_where_it_was_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    slept: list[float] = []
    asked: list[Any] = []
    failures = [make_error("RequestException"), make_error("ReadError", "TransportError")]

    def download(hub_id: str, **options: Any) -> str:
        asked.append(options["allow_patterns"])
        if failures:
            raise failures.pop(0)
        return "/cache"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(hub.time, "sleep", slept.append)
    assert hub._fetch_files("a/b", False, ["x[1].bin"]) == Path("/cache")
    assert asked == [["x[[]1].bin"]] * 3, "names, not patterns"
    assert slept == [1, 2]
    for error, attempts in (
        (make_error("HfHubHTTPError", "RequestException"), 1), (ValueError("x"), 1),
        (make_error("RequestException"), hub.ATTEMPTS),
    ):  # fmt: skip
        asked.clear()
        failures[:] = [error] * 9
        with pytest.raises(type(error)):
            hub._fetch_files("a/b", False, ["x"])
        assert len(asked) == attempts


def test_which_files_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first kind of weights that there is, and with an index the files that it names."""
    import huggingface_hub

    files = [
        "README.md", "config.json", "model.safetensors.index.json", "pytorch_model.bin",
        "hf_quant_config.json",
    ]  # fmt: skip
    fetched: list[Any] = []

    class Api:
        def __init__(self, token: Any) -> None:
            assert token is False

        def model_info(self, hub_id: str, timeout: float) -> Any:
            return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in files])

    def fetch(hub_id: str, token: Any, names: Any, **options: Any) -> Path:
        fetched.append(list(names))
        return tmp_path

    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(hub, "_fetch_files", fetch)
    monkeypatch.setattr(hub, "read_index", lambda path: {"s1": [], "s2": []})
    usual = ["config.json", "hf_quant_config.json", "model.safetensors.index.json"]
    assert hub.fetch_model("a/b", "--model-dir", ()) == tmp_path
    assert fetched == [usual, [*usual, "s1", "s2"]]
    fetched.clear()
    files[2:] = ["pytorch_model.bin"]
    hub.fetch_model("a/b", "--model-dir", ("medusa_lm_head.pt",))
    assert fetched == [["config.json", "pytorch_model.bin"]]
    files[1:] = ["tf_model.h5"]
    with pytest.raises(SpecDecError, match="--model-dir a/b on the Hub"):
        hub.fetch_model("a/b", "--model-dir", ())


def test_a_cached_copy_where_the_hub_cannot_be_asked(caplog: pytest.LogCaptureFixture) -> None:
    error = TimeoutError("x")
    fetched: list[Any] = []

    def fetch(names: Any, **options: Any) -> Path:
        fetched.append((names, options))
        if len(fetched) > 1:
            raise ValueError("not cached")
        return Path("/cache")

    assert hub._find_cached("a/b", "--x", error, fetch) == Path("/cache")
    assert fetched == [([], {"local_files_only": True})]
    assert "using the cached copy in /cache, since the Hub did not answer in time" in caplog.text
    with pytest.raises(SpecDecError, match="--x a/b is not a local folder, and the Hugging Face"):
        hub._find_cached("a/b", "--x", error, fetch)


# ---- The report.


def test_threads_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "count_usable_cores", lambda: 99)
    assert report.count_workers(ConvertSettings()) == report.MAX_WORKERS
    assert report.count_workers(ConvertSettings(workers=40)) == 40
    monkeypatch.setattr(report, "count_usable_cores", lambda: 3)
    assert report.count_workers(ConvertSettings()) == 3
    assert report.describe_ranks({"tp_size": 2, "pp_size": 1}) == "tp_size 2"
    assert report.describe_ranks({"tp_size": 2, "pp_size": 3}) == "tp_size 2, pp_size 3"


REPORT: dict[str, Any] = {
    "architecture": "LlamaForCausalLM", "method": "plain", "output_dir": "out", "dtype": "float16",
    "trtllm_version": "1.2", "backends": ["torch", "tensorrt-llm"], "lack": "it has no norm",
    "quant_algo": "FP8", "kv_cache_quant_algo": None, "tp_size": 1, "pp_size": 1,
    "num_tensors": 9, "left_out": {"visual": 2}, "warnings": ["odd"], "sources": ["a/b"],
    "total_bytes": 1_234_567_890,
    "files": [{"path": "rank0.safetensors", "bytes": 1_234_567_890}, {"path": "config.json"}],
    "buffer_bytes": 64_000_000, "hash_seconds": 1.25,
}  # fmt: skip


def test_a_dry_runs_plan_as_text() -> None:
    lines = report.format_report(REPORT, tells_backends=True).split("\n")
    assert lines == [
        "LlamaForCausalLM (plain) for TensorRT-LLM 1.2 -> out",
        "backends that take it: torch, tensorrt-llm (it has no norm)",
        "dtype float16, linears FP8, tp_size 1, 9 tensors a rank",
        "vision tensors that are left out: visual 2",
        "warning: odd",
        "  read  a/b",
        "  write rank0.safetensors        1,234,567,890 bytes",
        "  write config.json           ",
        "total 1,234.6 MB; buffers up to 64 MB; at least 1.2 s, the hashes alone at this machine's"
        " speed; nothing was written",
    ]
    quiet = report.format_report(REPORT, tells_backends=False).split("\n")
    assert quiet[:2] == ["LlamaForCausalLM (plain) -> out", "backends that take it: torch"]
    alone = report.format_report(REPORT | {"backends": ["tensorrt-llm"]}, tells_backends=False)
    assert "backends that take it: none of this machine" in alone


# ---- The drafter.


def test_a_tensor_that_is_the_targets() -> None:
    info = TensorInfo("float16", (4, 2))
    tensor = PlannedTensor(TensorInfo("float32", (4, 2)), ("a slice",))
    shared = drafter.share_tensor({"a": tensor}, "a", info)
    assert shared == PlannedTensor(info, tensor.slices)
    assert drafter.share_tensor({}, None, info) == PlannedTensor(info, ()), "zeros"
    assert drafter.share_tensor({"a": tensor}, "b", info) is None
    assert drafter.share_tensor({"a": tensor}, "a", TensorInfo("float16", (2, 4))) is None
    integers = PlannedTensor(TensorInfo("int8", (4, 2)), ())
    assert drafter.share_tensor({"a": integers}, "a", info) is None


def test_the_type_of_a_drafter(caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = Path("c")
    for settings, dtype in (
        (ConvertSettings(dtype="float16"), "bfloat16"),
        (ConvertSettings(base_model_checkpoint_dir=checkpoint), "bfloat16"),
        (ConvertSettings(base_model_checkpoint_dir=checkpoint, dtype="bfloat16"), "bfloat16"),
    ):  # fmt: skip
        assert drafter._choose_dtype(settings, "bfloat16") == dtype
    assert caplog.text == ""
    other = ConvertSettings(base_model_checkpoint_dir=checkpoint, dtype="float32")
    assert drafter._choose_dtype(other, "bfloat16") == "float32"
    assert "the drafter is written as float32 beside a bfloat16 target" in caplog.text


def test_a_drafter_whose_method_is_not_given_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []

    def open_model(name: str, flag: str, kind: Any) -> Any:
        opened.append((name, flag, kind))
        return SimpleNamespace(path=tmp_path)

    monkeypatch.setattr(drafter, "open_model", open_model)
    monkeypatch.setattr(drafter, "check_settings", lambda settings: opened.append("checked"))
    monkeypatch.chdir(tmp_path)
    fetch = drafter.fetch_drafter
    assert fetch(ConvertSettings(drafter_model_dir="org/a")) == tmp_path
    assert opened == ["checked", ("org/a", "--drafter-model-dir", None)]
    (tmp_path / "local").mkdir()
    for settings in (
        {"drafter_model_dir": "local"}, {"drafter_model_dir": "a/b/c"},
        {"medusa_model_dir": "org/a"}, {"drafter_model_dir": "org/a", "medusa_model_dir": "o/b"},
    ):  # fmt: skip
        assert fetch(ConvertSettings(**settings)) is None
    assert len(opened) == 2


# ---- Flags.


def test_options_of_methods_and_their_folders(tmp_path: Path) -> None:
    def find(find_words: Any, **settings: Any) -> Any:
        return find_words(ConvertSettings(**settings))

    two = flags._find_two_drafters
    assert find(two, medusa_model_dir="a") is None
    assert find(two, medusa_model_dir="a", eagle_model_dir="b") == (
        "--medusa-model-dir and --eagle-model-dir"
    )
    others = flags._find_other_methods
    assert find(others, medusa_model_dir="a", num_medusa_heads=2) is None
    assert find(others, eagle_model_dir="a", num_medusa_heads=2) == (
        "--num-medusa-heads has no effect without --medusa-model-dir"
    )
    assert find(flags._calibrates) is False
    assert find(flags._calibrates, quantization="fp8") is True
    given: dict[str, Any] = {
        "model_dir": "m", "output_dir": Path("o"), "quantization": "fp8",
    }  # fmt: skip
    with pytest.raises(UsageError, match="--quantization fp8 without --calibration-data"):
        flags.check_settings(ConvertSettings(**given))
    with pytest.raises(SpecDecError, match="--calibration-data .*absent.txt does not exist"):
        flags.check_settings(ConvertSettings(**given, calibration_data=tmp_path / "absent.txt"))
    (tmp_path / "texts.txt").write_text("a")
    flags.check_settings(ConvertSettings(**given, calibration_data=tmp_path / "texts.txt"))
    with pytest.raises(UsageError, match="missing --output-dir"):
        flags.check_settings(ConvertSettings(model_dir="m"))
