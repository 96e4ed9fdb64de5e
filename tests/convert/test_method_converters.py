"""Converters of ReDrafter and MTP, and the plan of a quantized target, on few tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from specdec.convert.hf import HfFolder
from specdec.convert.methods import mtp, redrafter
from specdec.convert.methods.mtp import MtpConverter
from specdec.convert.methods.redrafter import ReDrafterConverter
from specdec.convert.plan import SourceRows
from specdec.convert.quantize import calibration, scales, target
from specdec.convert.quantize.formats import FORMATS
from specdec.convert.settings import ConvertSettings
from specdec.errors import SpecDecError
from specdec.methods.redrafter import ReDrafterParams
from specdec.model.tensors import list_linears, list_target_tensors
from tests.engine.models import make_model

MODEL = make_model(vocab_size=16, hidden_size=8, num_attention_heads=2, num_key_value_heads=2,
                   head_size=4, intermediate_size=12)  # fmt: skip
HEADS = ("lm_head.0.linear", "lm_head.1.linear", "lm_head.2")
REDRAFTER = {"num_draft_layers": 2, "hidden_size": 8, "exit_dim": 12, "rnn": False}


def write_folder(path: Path, config: Mapping[str, Any], names: Sequence[str]) -> HfFolder:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: np.ones((2, 3), np.float32) for name in names}, path / "model.safetensors")
    return HfFolder(path)


def make_settings(**changes: Any) -> ConvertSettings:
    return ConvertSettings(**{"output_dir": Path("out"), **changes})


def make_params(**changes: Any) -> ReDrafterParams:
    values: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 8, "exit_dim": 12, "is_rnn": False, "num_beams": 5,
        "draft_len_per_beam": 5, "greedy_search": True,
    }  # fmt: skip
    return ReDrafterParams(**values | changes)


# ReDrafter.


def read_redrafter(
    path: Path, names: Sequence[str] = (*HEADS, "input_proj"), config: Any = (), **settings: Any
) -> ReDrafterConverter:
    tensors = [name + ".weight" for name in names]
    folder = write_folder(path / "drafter", REDRAFTER | dict(config), tensors)
    return ReDrafterConverter(folder, make_settings(**settings), MODEL)


def test_redrafter_s_parameters(tmp_path: Path) -> None:
    """Sizes are the folder's, beams and depth the user's; what is not given is 5."""
    assert read_redrafter(tmp_path).params == make_params()
    (tmp_path / "other").mkdir()
    converter = read_redrafter(
        tmp_path / "other", config={"rnn": True}, redrafter_num_beams=3,
        redrafter_draft_len_per_beam=2, redrafter_no_greedy_search=True,
    )  # fmt: skip
    assert converter.params == make_params(
        is_rnn=True, num_beams=3, draft_len_per_beam=2, greedy_search=False
    )


@pytest.mark.parametrize(
    ("config", "fact"),
    [
        ({"hidden_size": 9}, "the drafter's hidden_size is 9, the target's 8"),
        ({"vocab_size": 17}, "the drafter's vocab_size is 17, the target's 16"),
        ({"predict_n_tokens": 4}, r"draft_len_per_beam is 5, but the drafter was trained to predict"
         r" 4 tokens \(predict_n_tokens\)"),
        ({"num_draft_layers": -1}, "num_draft_layers is -1, not a whole number of at least 0"),
        ({"num_draft_layers": 9}, "is said to have 9 layers, but holds 4 tensors"),
        ({"rnn": None}, "rnn is missing"),
    ],
)  # fmt: skip
def test_redrafters_that_do_not_suit(config: dict[str, Any], fact: str, tmp_path: Path) -> None:
    with pytest.raises(SpecDecError, match=fact):
        read_redrafter(tmp_path, config=config)


@pytest.mark.parametrize(
    ("heads", "projection"),
    [("lm_head", "input_proj"), ("lm_heads", "input_projs"), ("0", "input_proj"),
     ("0", "input_projs")],
)  # fmt: skip
def test_names_of_three_trainers(heads: str, projection: str, tmp_path: Path) -> None:
    """The head is what follows the residual layers: number 2, after 0 and 1."""
    names = [name.replace("lm_head", heads) for name in HEADS] + [projection]
    converter = read_redrafter(tmp_path, names)
    found = converter.find_source_rows(
        ["drafter.layers.1.linear.weight", "drafter.lm_head.weight", "drafter.input_proj.bias"]
    )
    assert found == {
        "drafter.layers.1.linear.weight": (SourceRows(f"{heads}.1.linear.weight"),),
        "drafter.lm_head.weight": (SourceRows(f"{heads}.2.weight"),),
        "drafter.input_proj.bias": (SourceRows(f"{projection}.bias"),),
    }


@pytest.mark.parametrize(
    ("names", "config", "fact"),
    [
        ((*HEADS, "input_projs"), {}, r"mixes two namings: lm_head.\* and input_projs.weight"),
        ((*HEADS, "0.0"), {}, "holds the drafter's layers and head under 2 names"),
        (("input_proj", "a", "b"), {}, "holds no tensor of the drafter's layers and head"),
        (("0.0", "0.1", "0.2"), {}, "holds no tensor of the drafter's input projection"),
        ((*HEADS, "rnn_u", "input_proj"), {}, "rnn is false, but there is rnn_u.weight"),
        ((*HEADS, "input_proj"), {"exit_dim": 16}, "exit_dim 16 is twice hidden_size 8, which needs"
         " no input projection, but there is input_proj.weight"),
    ],
)  # fmt: skip
def test_names_that_are_refused(
    names: Sequence[str], config: dict[str, Any], fact: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecDecError, match=fact):
        read_redrafter(tmp_path, names, config).find_source_rows([])


def test_modules_that_are_not_quantized() -> None:
    assert redrafter.list_modules(make_params(num_layers=1), is_quantized=False) == [
        "drafter", "drafter.layers", "drafter.lm_head", "drafter.layers.0",
        "drafter.layers.0.linear",
    ]  # fmt: skip
    modules = redrafter.list_modules(make_params(num_layers=0, is_rnn=True), is_quantized=True)
    assert modules[3:] == ["drafter.rnn_u", "drafter.rnn_w", "drafter.input_proj"]
    bare = redrafter.list_modules(make_params(exit_dim=16), is_quantized=True)
    assert "drafter.input_proj" not in bare


@pytest.mark.parametrize(
    ("architecture", "combined", "algorithm"),
    [("LlamaForCausalLM", "ReDrafterForLLaMALM", None),
     ("Qwen3ForCausalLM", "SpecDecReDrafterForCausalLM", None),
     ("LlamaForCausalLM", "ReDrafterForLLaMALM", "FP8")],
)  # fmt: skip
def test_redrafter_s_keys(
    architecture: str, combined: str, algorithm: str | None, tmp_path: Path
) -> None:
    """TensorRT-LLM has a class for Llamas; for others the checkpoint has a name of our own."""
    config = {"architecture": architecture, "quantization": {"quant_algo": algorithm}}
    config = read_redrafter(tmp_path).add_to_config(config, is_head_quantized=False)
    assert config["architecture"] == combined
    assert config["base_model_architecture"] == architecture
    assert (config["redrafter_num_beams"], config["redrafter_exit_dim"]) == (5, 12)
    excluded = config["quantization"].get("exclude_modules", [])
    assert ("drafter.input_proj" in excluded) == (algorithm is not None)


# MTP.

FORMS = {
    "qwen": (["mtp.fc", "mtp.norm", "mtp.layers.0.mlp.up_proj"], "mtp."),
    "glm": (["model.layers.2.eh_proj", "model.layers.2.shared_head.norm",
             "model.layers.2.mlp.up_proj"], "model.layers.2."),
    "mimo": (["model.mtp_layers.0.input_proj", "model.mtp_layers.0.final_layernorm",
              "model.mtp_layers.0.mlp.up_proj"], "model.mtp_layers.0."),
}  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 16, "hidden_size": 8,
    "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12,
}  # fmt: skip
BODY = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"]


def write_head(path: Path, form: str) -> tuple[HfFolder, list[str]]:
    """A target's folder that holds a head of a form, and the head's tensors."""
    head = [f"{name}.weight" for name in FORMS[form][0]]
    return write_folder(path / form, LLAMA, [*BODY, *head]), head


@pytest.mark.parametrize("form", FORMS)
def test_heads_in_every_form(form: str, tmp_path: Path) -> None:
    """A target has its tensors without the head, the head its own by one form's names."""
    folder, head = write_head(tmp_path, form)
    found = mtp.find_form(folder)
    assert found == (mtp.FORMS[form], FORMS[form][1])
    assert sorted(mtp.list_head(folder)) == sorted(head)
    for is_converted in (True, False):
        assert sorted(mtp.leave_head(folder, is_converted=is_converted).tensors) == sorted(BODY)
    prepared = mtp.prepare_head(folder, MODEL)
    assert sorted(prepared.tensors) == [
        "mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "mtp.norm.weight",
    ]  # fmt: skip
    assert prepared.config[mtp.IS_REVERSED] is (form == "mimo")


def test_folders_without_a_head(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", LLAMA, BODY)
    assert mtp.find_form(folder) is None
    assert mtp.list_head(folder) == []
    assert mtp.leave_head(folder, is_converted=True) is folder
    with pytest.raises(SpecDecError) as caught:
        mtp.prepare_head(folder, MODEL)
    assert "holds no head for multi-token prediction" in caught.value.message
    assert "model.layers.N.eh_proj.weight" in caught.value.message


def test_heads_of_several_layers(tmp_path: Path) -> None:
    names = [*BODY, "model.layers.2.eh_proj.weight", "model.layers.3.eh_proj.weight"]
    folder = write_folder(tmp_path / "m", LLAMA, names)
    assert mtp.list_head(folder) == names[2:], "all of it is left out of the target"
    with pytest.raises(SpecDecError, match=r"more than one layer: model.layers.3.eh_proj.weight"):
        mtp.prepare_head(folder, MODEL)


def test_mtp_s_parameters_and_names(tmp_path: Path) -> None:
    """8 draft tokens unless another number is given; `fc` and its norms are no layer's."""
    folder, _ = write_head(tmp_path, "mimo")
    head = mtp.prepare_head(folder, MODEL)
    assert MtpConverter(head, make_settings(), MODEL).params.max_draft_len == 8
    converter = MtpConverter(head, make_settings(mtp_max_draft_len=3), MODEL)
    assert (converter.params.max_draft_len, converter.params.is_reversed) == (3, True)
    names = {
        "mtp.drafter.fc.weight": "mtp.fc.weight",
        "mtp.drafter.embedding_norm.weight": "mtp.pre_fc_norm_embedding.weight",
        "mtp.drafter.hidden_norm.weight": "mtp.pre_fc_norm_hidden.weight",
        "mtp.drafter.ln_f.weight": "mtp.norm.weight",
        "mtp.drafter.layers.0.mlp.gate.weight": "mtp.layers.0.mlp.up_proj.weight",
        "mtp.lm_head.weight": "mtp.lm_head.weight",
    }  # fmt: skip
    rows = converter.find_source_rows(list(names))
    assert {name: source.name for name, (source,) in rows.items()} == names
    layered = make_model(architecture="PhiForCausalLM", hidden_act="gelu_new")
    with pytest.raises(SpecDecError, match="PhiForCausalLM has layer norms, learned positions"):
        MtpConverter(head, make_settings(), layered)


# The plan of a quantized target.


def find_problems(name: str, group_size: int | None, **sizes: Any) -> list[tuple[str, str]]:
    model = make_model(**sizes)
    specs = list_target_tensors(model)
    linears = {f"{n}.weight": specs[f"{n}.weight"] for n in list_linears(model)}
    problems = target.find_problems(FORMATS[name], linears, model, group_size)
    return [(fact, hint or "") for fact, hint in problems]


@pytest.mark.parametrize(
    ("name", "group_size", "sizes", "fact", "hint"),
    [
        ("fp8", None, {}, None, ""),
        ("int4_awq", 128, {}, None, ""),
        ("int4_awq", 128, {"tp_size": 4}, "the 64 columns that a rank has are no multiple of the"
         " group size 128", "give --group-size 64"),
        ("int4_awq", 64, {"tp_size": 4}, None, ""),
        ("int4_awq", 64, {"intermediate_size": 255}, "rows 0 to 255, and four-bit rows are stored"
         " in pairs", "use another --quantization"),
        ("int4_awq", 64, {"intermediate_size": 510, "tp_size": 2}, "rows 0 to 255",
         "use a smaller --tp-size, or another --quantization"),
        ("nvfp4", 16, {"intermediate_size": 520}, "the 520 columns that a rank has are no multiple",
         "use another --quantization"),
        ("fp8", None, {"intermediate_size": 255}, None, ""),
    ],
)  # fmt: skip
def test_matrices_that_cannot_be_stored(
    name: str, group_size: int | None, sizes: dict[str, Any], fact: str | None, hint: str
) -> None:
    """Rows in pairs, and whole groups of columns, on every rank."""
    problems = find_problems(name, group_size, **sizes)
    assert bool(problems) == (fact is not None), problems
    if fact is not None:
        assert fact in problems[0][0]
        assert problems[0][1] == hint


ROWS = [[n] for n in range(9)]


@pytest.mark.parametrize(
    ("name", "size", "usual_size", "spare", "has_evaluation"),
    [("fp8", None, 512, 0, False), ("int8_sq", 6, 128, 32, True), ("int4_awq", None, 128, 32, True),
     ("nvfp4", 9, 512, 32, False)],
)  # fmt: skip
def test_rows_of_a_calibration(
    name: str, size: int | None, usual_size: int, spare: int, has_evaluation: bool,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    """A search takes fewer; all formats but FP8 are measured on rows that it did not see."""
    asked: dict[str, Any] = {}
    observed: list[Any] = []
    warnings: list[str] = []

    def read_rows(data: Any, load: Any, **options: Any) -> list[list[int]]:
        asked.update(options, data=data)
        return ROWS

    def hold_out(rows: Any, size: int | None, usual_size: int) -> tuple[Any, Any]:
        count = size or len(rows) - 2
        return rows[:count], rows[count:]

    monkeypatch.setattr(calibration, "choose_device", lambda name: name)
    monkeypatch.setattr(calibration, "check_memory", lambda *given: asked.update(memory=given))
    monkeypatch.setattr(calibration, "read_rows", read_rows)
    monkeypatch.setattr(calibration, "hold_out", hold_out)
    monkeypatch.setattr(calibration, "observe", lambda *given, **_: observed.append(given))
    monkeypatch.setattr(target.logger, "warning", lambda text, *_: warnings.append(text))
    settings = make_settings(
        model_dir="base", calibration_data=Path("texts.txt"), quantization=name, calib_size=size,
        calib_device="cpu", calib_max_seq_length=5000,
    )  # fmt: skip
    folder = write_folder(tmp_path / "m", {}, ["a", "b"])
    calls = target._prepare_calibration(settings, folder, MODEL, FORMATS[name])
    assert (asked["usual_size"], asked["spare"], asked["size"]) == (usual_size, spare, size)
    assert asked["memory"][:2] == (4 * 12, "cpu"), "two tensors of six numbers in float32"
    assert asked["max_length"] == MODEL.max_position_embeddings == 2048
    assert asked["vocab_size"] == 16
    calls["calibrate"](["watch"])
    rows = ROWS if name in ("fp8", "nvfp4") else ROWS[: size or 7]
    assert observed == [(folder.path, rows, ["watch"])]
    assert ("evaluate" in calls) is has_evaluation
    assert bool(warnings) == (name == "nvfp4"), "no row is left to measure on"


def test_the_plan_of_a_quantized_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole matrices are planned on one rank, for whatever number of ranks the weights are."""
    model = make_model(tp_size=2)
    planned: list[dict[str, Any]] = []
    asked: dict[str, Any] = {}

    class Target:
        folder: Any = None
        specs = list_target_tensors(model)

        def __init__(self) -> None:
            self.model = model

        def plan(self, specs: Any, **changed: Any) -> list[Any]:
            planned.append({"specs": specs, **changed})
            return ["whole"]

    def plan_quantizer(*given: Any, **options: Any) -> tuple[Any, Any]:
        asked.update(options, given=given)
        return ["quantized"], "quantizer"

    monkeypatch.setattr(target, "plan_quantizer", plan_quantizer)
    settings = make_settings(quantization="int4_awq", kv_cache_dtype="fp8")
    source: Any = Target()
    ranks: Any = ["rank 0", "rank 1"]
    result: Any = target.quantize_target(settings, source, ranks)
    assert result == (["quantized"], result[1], "quantizer")
    assert result[1]["quant_algo"] == "W4A16_AWQ"
    assert result[1]["kv_cache_quant_algo"] == "FP8"
    assert result[1]["group_size"] == asked["group_size"] == 128
    assert asked["given"][2:] == (ranks, "whole")
    assert asked["kv_scales"] == scales.KV_SCALES, "those of 1.2"
    ((plan,),) = [planned]
    assert (plan["model"].tp_size, plan["ignored"]) == (1, ("*",))
    assert len(plan["specs"]) == len(list_linears(model))
    assert asked["calibrate"](SimpleNamespace()) is not None
    old = make_settings(quantization="int4_awq", kv_cache_dtype="fp8", trtllm_version="0.14")
    target.quantize_target(old, source, ranks)
    assert asked["kv_scales"] == ("kv_cache_scaling_factor",)
    settings = make_settings(quantization="fp8")
    _, section, _ = target.quantize_target(settings, source, ranks)
    assert section["kv_cache_quant_algo"] is None
    assert asked["kv_scales"] == ()
    with pytest.raises(SpecDecError, match="no multiple of the group size 128"):
        target.quantize_target(
            make_settings(quantization="int4_awq"),
            SimpleNamespace(model=make_model(tp_size=4), specs=source.specs), ranks,
        )  # fmt: skip
