"""specdec-export: what is written is read back as the same bytes, the rest is refused."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.errors import SpecDecError, UsageError
from specdec.export.lacks import LACKS
from specdec.export.pipeline import export_model
from specdec.export.settings import RUNTIME_NAMES, ExportSettings, check_settings
from specdec.files import staging
from specdec.files.acceptance import MAX_DEPTH, NAME, NUM_BUCKETS, Acceptance
from specdec.files.manifest import read_manifest
from specdec.files.reading import read_json
from tests.conftest import (
    ROOT,
    change_tensors,
    make_dflash_drafter,
    make_drafter,
    make_eagle_drafter,
    make_llama,
    make_medusa_heads,
    make_mtp_head,
    make_tokenizer,
)
from tests.core.templates import match_template
from tests.engines import call, run_cli_here
from tests.export.gguf_reader import read_gguf
from tests.families import make_family_model, make_hybrid

VOCAB, AUX_LAYERS = 131, (1, 3, 4)
SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
USUAL: dict[str, Any] = {"version": 3, "aux_layers": AUX_LAYERS, "own_embedding": False}
DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle1": {"heads": 8, "rope_theta": 5e5},
    "eagle1-bare": {"bias": False, "own_embedding": False, "layers": 2},
    "eagle3": USUAL | {"rope_scaling": SCALING, "rope_theta": 5e5},
    "eagle3-reduced": USUAL | {"draft_vocab": 70},
    "eagle3-whole": USUAL
    | {"draft_vocab": 70, "own_embedding": True, "norm_before_residual": True,
       "norm_before_fc": True, "norm_output": True},
    "p-eagle": USUAL | {"mask_token_id": 9, "layers": 2},
    "p-eagle-norm": USUAL | {"mask_token_id": 9, "draft_vocab": 70, "fc_norm": True},
    "eagle3-parts": {"version": 3, "aux_layers": (0, 6), "layers": 2, "fc_norm": True},
}  # fmt: skip
WINDOW = {"use_sliding_window": True, "sliding_window": 9, "is_causal": False}
TELLING: dict[str, Any] = {"form": "speculators", "sliding_window_non_causal": True}
DFLASH: dict[str, dict[str, Any]] = {
    "dflash": {"bias": True, "aux_layers": (0, 3, 6)},
    "dflash-window": {"net": WINDOW | {"layer_types": ["sliding_attention"] * 2}},
    "dflash-mixed": {
        "net": WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
        "layers": 2, "block_size": 8,
    },
    "dflash-scaled": {"dflash_config": {
        "mask_token_id": 1, "target_layer_ids": [0, 1], "input_embedding_scale": 3.5}},
    "dflash-whole": TELLING | {"aux_layers": (0, 7), "net": {"rope_scaling": SCALING}},
    "dflash-reduced": TELLING | {"draft_vocab": 70, "net": WINDOW | {
        "layer_types": ["sliding_attention"] * 2}},
    "dflash-anchored": {"form": "deepspec", "markov_rank": 0},
    "dspark": {"form": "deepspec", "markov_rank": 6, "layers": 1},
    "dspark-reduced": TELLING | {"markov_rank": 6, "draft_vocab": 70},
    "dspark-masks": TELLING | {"markov_rank": 6, "sample_from_anchor": False},
}  # fmt: skip
FLAGS = {
    "medusa": "--medusa-model-dir", "redrafter": "--drafter-model-dir",
    **dict.fromkeys(DFLASH, "--dflash-model-dir"),
}  # fmt: skip
DIRECT = ("medusa", "redrafter", "eagle1", "eagle3-reduced", "dspark")  # one of each layout
EVERY = ("vllm", "hf")
# What each runtime can hold.
PAIRS = {
    "medusa": EVERY,
    "redrafter": EVERY,
    "eagle1": ("sglang", "hf"),
    "eagle1-bare": ("sglang", *EVERY),
    "eagle3": ("sglang", "speculators", "trtllm-pytorch", "gguf", "edge-llm", *EVERY),
    "eagle3-reduced": ("sglang", "speculators", "trtllm-pytorch", "gguf", "edge-llm", *EVERY),
    "eagle3-whole": ("speculators", *EVERY),
    "eagle3-parts": ("speculators", *EVERY),
    "p-eagle": ("speculators", *EVERY),
    "p-eagle-norm": EVERY,
    "dflash": ("sglang", "speculators", *EVERY),
    "dflash-window": ("sglang", "speculators", *EVERY),
    "dflash-mixed": ("sglang", "speculators", *EVERY),
    "dflash-scaled": ("hf",),
    "dflash-whole": ("speculators",),
    "dflash-reduced": ("speculators", "vllm"),
    "dflash-anchored": ("hf",),
    "dspark": ("speculators", *EVERY),
    "dspark-reduced": ("speculators", "vllm"),
    "dspark-masks": ("speculators", "vllm"),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("target")
    folder = make_llama(parent, layers=8, vocab=VOCAB, intermediate=96)
    make_tokenizer(folder, vocab=VOCAB)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder


@pytest.fixture(scope="module")
def checkpoints(
    target: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Path]]:
    """By kind: the drafter's folder, and the checkpoint that it makes with the target."""
    parent, made = tmp_path_factory.mktemp("drafters"), {}
    for kind in PAIRS:
        if kind == "medusa":
            drafter = make_medusa_heads(parent, vocab=VOCAB, layers=2, name=kind)
        elif kind == "redrafter":
            drafter = make_drafter(parent, vocab=VOCAB, exit_dim=96, name=kind)
        elif kind in DFLASH:
            drafter = make_dflash_drafter(
                parent, vocab=VOCAB, target_layers=8, name=kind, **DFLASH[kind]
            )
        else:
            drafter = make_eagle_drafter(parent, vocab=VOCAB, name=kind, **DRAFTERS[kind])
        if kind == "eagle1":  # a head of its own would be refused by most
            save_file(
                load_file(drafter / "model.safetensors")
                | {"embed_tokens.weight": load_file(target / "model.safetensors")[
                    "model.embed_tokens.weight"]},
                drafter / "model.safetensors",
            )  # fmt: skip
        made[kind] = (drafter, convert(parent / f"{kind}-checkpoint", target, kind, drafter))
    return made


def convert(output: Path, target: Path, kind: str, drafter: Path) -> Path:
    flag = FLAGS.get(kind, "--eagle-model-dir")
    call("convert", "--model-dir", target, flag, drafter, "--output-dir", output)
    return output


def export(output: Path, **flags: Any) -> dict[str, Any]:
    settings = ExportSettings(output_dir=output, **flags)
    check_settings(settings)
    return export_model(settings)


Write = Callable[..., tuple[dict[str, Any], Path]]


@pytest.fixture
def write(target: Path, checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path) -> Write:
    """Export the checkpoint of a kind; return the report and the folder."""

    def run(kind: str, to: str, name: str = "", **flags: Any) -> tuple[dict[str, Any], Path]:
        folder = tmp_path / (name or to)
        values: dict[str, Any] = {"model_dir": str(target), "to": to, **flags}
        return export(folder, checkpoint_dir=checkpoints[kind][1], **values), folder

    return run


def read_checkpoint(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in ("config.json", "rank0.safetensors")]


@pytest.mark.thorough
def test_nothing_is_told_of_what_only_lies_between(
    target: Path, checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """The conversion on the way has a temporary folder, and is TensorRT-LLM's affair."""
    drafter, _ = checkpoints["eagle3"]
    done = run_cli_here(
        "export", "--model-dir", target, "--eagle-model-dir", drafter, "--to", "vllm",
        "--output-dir", tmp_path / "out",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = done.stdout + done.stderr
    assert str(tmp_path / "out") in told
    assert "specdec-export" not in told.replace("specdec-export ", "")
    assert "TensorRT" not in told


# ---- There and back.


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "to"), [(kind, to) for kind in PAIRS for to in PAIRS[kind] if to != "gguf"]
)
def test_what_is_exported_is_converted_to_the_same_bytes(
    kind: str, to: str, target: Path, checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    drafter, checkpoint = checkpoints[kind]
    folder = tmp_path / "exported"
    export(folder, checkpoint_dir=checkpoint, model_dir=str(target), to=to)
    again = convert(tmp_path / "again", target, kind, folder)
    assert read_checkpoint(again) == read_checkpoint(checkpoint)
    if kind not in DIRECT or to != PAIRS[kind][0]:
        return
    # The other way in: from the folders, without a checkpoint of one's own.
    option = FLAGS.get(kind, "--eagle-model-dir").removeprefix("--").replace("-", "_")
    flags: dict[str, Any] = {"model_dir": str(target), option: str(drafter), "to": to}
    export(tmp_path / "direct", **flags)
    # And by the option that takes any drafter.
    export(tmp_path / "told", model_dir=str(target), drafter_model_dir=str(drafter), to=to)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "direct", "exported", "told"]
    for name, other in itertools.product(("model.safetensors", "config.json"), ("direct", "told")):
        assert (tmp_path / other / name).read_bytes() == (folder / name).read_bytes()


def test_an_exported_drafter_knows_its_target(
    target: Path, checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """Also of a checkpoint alone; one without a record claims nothing."""
    _, made = checkpoints["eagle3"]
    checkpoint = shutil.copytree(made, tmp_path / "checkpoint")
    other = make_llama(tmp_path, layers=8, vocab=VOCAB, intermediate=96, seed=9, name="other")
    for folder, warns in (("recorded", True), ("bare", False)):
        export(tmp_path / folder, checkpoint_dir=checkpoint, to="vllm")
        for model, is_other in ((target, False), (other, True)):
            done = run_cli_here(
                "convert", "--model-dir", model, "--eagle-model-dir", tmp_path / folder,
                "--output-dir", tmp_path / "again", "--force",
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert ("trained for another target" in done.stderr) == (warns and is_other)
        (checkpoint / "manifest.json").unlink(missing_ok=True)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "config"),
    [("llama", {"rope_theta": 5000.0, "tie_word_embeddings": True}), ("mistral", {}),
     ("mistral", {"sliding_window": 7}), ("qwen2", {}),
     ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}),
     ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
     ("qwen3", {"attention_bias": True, "head_dim": 16}),
     ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0})],
)  # fmt: skip
def test_models_there_and_back(family: str, config: dict[str, Any], tmp_path: Path) -> None:
    model = make_family_model(tmp_path, family, dtype="bfloat16", **config)
    make_tokenizer(model, vocab=100)
    for name, source in (("first", model), ("second", tmp_path / "exported")):
        call("convert", "--model-dir", source, "--output-dir", tmp_path / name)
        if name == "first":
            export(source := tmp_path / "exported", model_dir=str(model), to="hf")
    assert read_checkpoint(tmp_path / "first") == read_checkpoint(tmp_path / "second")
    assert (tmp_path / "exported" / "tokenizer.json").read_bytes() == (
        model / "tokenizer.json"
    ).read_bytes()
    assert read_json(tmp_path / "exported" / "config.json")["eos_token_id"] == 2


# ---- What a runtime's loader looks for.

LAYER = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm",
)  # fmt: skip
LAYER3 = (*LAYER, "input_layernorm", "hidden_norm")
LAYER_DFLASH = (*LAYER, "input_layernorm", "self_attn.q_norm", "self_attn.k_norm")
# As the loaders of docs/export.md name them: all that each one fills, and no more.
LOADED = {
    ("medusa", "vllm"): {
        f"{head}.{part}" for head in range(3)
        for part in ("0.linear.weight", "0.linear.bias", "1.linear.weight", "1.linear.bias",
                     "2.weight")
    },
    ("eagle1", "sglang"): {"fc.weight", "fc.bias", *(f"layers.0.{n}.weight" for n in LAYER)},
    ("eagle1-bare", "sglang"): {
        "fc.weight", "fc.bias", "layers.1.input_layernorm.weight",
        *(f"layers.{layer}.{n}.weight" for layer in (0, 1) for n in LAYER),
    },
    ("eagle1-bare", "vllm"): {
        "fc.weight", "layers.1.input_layernorm.weight",
        *(f"layers.{layer}.{n}.weight" for layer in (0, 1) for n in LAYER),
    },
    ("eagle3-reduced", "sglang"): {
        "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d",
        *(f"midlayer.{n}.weight" for n in LAYER3),
    },
    ("eagle3-whole", "speculators"): {
        "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "embed_tokens.weight",
        "input_norm.weight", *(f"layers.0.{n}.weight" for n in LAYER3),
    },
    ("dflash", "sglang"): {
        "fc.weight", "norm.weight", "hidden_norm.weight",
        *(f"layers.{layer}.{n}.weight" for layer in (0, 1) for n in LAYER_DFLASH),
        *(f"layers.{layer}.self_attn.{p}_proj.bias" for layer in (0, 1) for p in "qkvo"),
    },
    ("dflash-reduced", "vllm"): {
        "fc.weight", "norm.weight", "hidden_norm.weight", "lm_head.weight", "embed_tokens.weight",
        "d2t", "t2d", *(f"layers.{layer}.{n}.weight" for layer in (0, 1) for n in LAYER_DFLASH),
    },
    ("p-eagle", "vllm"): {
        "fc.weight", "norm.weight", "lm_head.weight", "mask_hidden",
        *(f"layers.0.{n}.weight" for n in LAYER3),
        *(f"layers.1.{n}.weight" for n in (*LAYER, "input_layernorm")),
    },
    ("dspark", "hf"): {
        "fc.weight", "norm.weight", "hidden_norm.weight", "lm_head.weight", "embed_tokens.weight",
        "markov_head.markov_w1.weight", "markov_head.markov_w2.weight",
        *(f"layers.0.{n}.weight" for n in LAYER_DFLASH),
    },
    ("eagle3-parts", "vllm"): {
        "fc.weight", "norm.weight", "lm_head.weight", "embed_tokens.weight", "fc_norm.0.weight",
        "fc_norm.1.weight", *(f"layers.0.{n}.weight" for n in LAYER3),
        *(f"layers.1.{n}.weight" for n in (*LAYER, "input_layernorm")),
    },
}  # fmt: skip


@pytest.mark.parametrize(("kind", "to"), list(LOADED))
def test_names_are_the_loaders(kind: str, to: str, write: Write) -> None:
    report, out = write(kind, to)
    written = load_file(out / "model.safetensors")
    assert set(written) == LOADED[kind, to] == set(report["tensors"])
    if "t2d" in written:
        assert written["t2d"].shape == (VOCAB,)
        drafted = written["d2t"] + torch.arange(70)
        assert written["t2d"].bool().nonzero()[:, 0].tolist() == sorted(drafted.tolist())
    assert read_manifest(out, "export").outputs
    text = (out / "README.md").read_text()
    assert report["command"] in text
    assert all(f"`{name}` is not among them" in text for name in report["left_out"])


def test_keys_that_runtimes_take_differently_are_told(write: Write) -> None:
    """vLLM takes norm_before_residual for true in speculators' format, speculators for false."""
    norms = dict.fromkeys(
        ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), False
    )
    configs = {}
    for to in ("vllm", "speculators", "sglang", "trtllm-pytorch", "hf"):
        _, folder = write("eagle3", to, model_dir="BASE", num_draft_tokens=5)
        configs[to] = read_json(folder / "config.json")
        assert norms.items() <= configs[to].items()
        assert configs[to]["draft_vocab_size"] == VOCAB  # Edge-LLM knows EAGLE-3 by this key
        # Layers 1, 3, 4 are read: the ones after them are entered.
        assert configs[to]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
        if to != "speculators":
            inner = configs[to]["eagle_config"]
            assert inner["eagle_aux_hidden_state_layer_ids"] == list(AUX_LAYERS)
    described = configs["speculators"]["speculators_config"]
    assert described["proposal_methods"][0]["speculative_tokens"] == 5
    assert described["verifier"] == {"name_or_path": "BASE", "architectures": ["LlamaForCausalLM"]}
    assert isinstance(configs["speculators"]["transformer_layer_config"], dict)
    for version, key in (("1.2", "speculative_model_dir"), ("1.3", "speculative_model")):
        _, folder = write("eagle3", "trtllm-pytorch", version, trtllm_version=version)
        assert (folder / "extra_llm_api_options.yaml").read_text().splitlines() == [
            "speculative_config:", "  decoding_type: Eagle3", "  max_draft_len: 3",
            f"  {key}: {folder}", "  eagle3_layers_to_capture: [1, 3, 4]",
        ]  # fmt: skip


# ---- GGUF.


@pytest.mark.parametrize("kind", ["eagle3", "eagle3-reduced"])
def test_gguf_of_a_drafter(
    kind: str, checkpoints: dict[str, tuple[Path, Path]], write: Write
) -> None:
    values, tensors = read_gguf(write(kind, "gguf")[1] / "model.gguf")
    assert values["general.architecture"] == "eagle3"
    assert values["eagle3.target_layers"] == [2, 4, 5]
    assert values["eagle3.target_hidden_size"] == 64
    assert values["eagle3.norm_before_residual"] is values["eagle3.norm_before_fc"] is False
    assert values["eagle3.block_count"] == 1
    assert len(values["tokenizer.ggml.tokens"]) == VOCAB
    assert values["tokenizer.ggml.pre"] == "gpt-2"
    own = load_file(checkpoints[kind][0] / "model.safetensors")
    wanted = {
        "fc": "fc", "output_norm": "norm", "output": "lm_head",
        "blk.0.attn_norm": "layers.0.input_layernorm", "blk.0.attn_norm_2": "layers.0.hidden_norm",
        "blk.0.ffn_norm": "layers.0.post_attention_layernorm",
        "blk.0.attn_v": "layers.0.self_attn.v_proj", "blk.0.ffn_down": "layers.0.mlp.down_proj",
    }  # fmt: skip
    for name, theirs in wanted.items():
        assert torch.equal(tensors[f"{name}.weight"], own[f"{theirs}.weight"]), name
    assert tensors["blk.0.attn_q.weight"].shape == (64, 128)
    assert "token_embd.weight" not in tensors, "the target's is taken"
    if kind == "eagle3":
        assert "d2t" not in tensors
        factors = tensors["rope_freqs.weight"]
        assert factors[0] == 1.0
        assert factors[-1] == 8.0
    else:
        assert torch.equal(tensors["d2t"], own["d2t"] + torch.arange(70))


def test_a_disk_that_is_too_small_for_a_gguf_file(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's own error looked like a fault of ours."""
    call("convert", "--model-dir", target, "--output-dir", tmp_path / "checkpoint")
    given = {"checkpoint_dir": tmp_path / "checkpoint", "model_dir": str(target)}
    monkeypatch.setattr(staging, "measure_free_space", lambda folder: (folder, 1000))
    with pytest.raises(SpecDecError, match="the file takes .* has 0.0 MB free"):
        export(tmp_path / "out", to="gguf", **given)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_gguf_of_a_gguf_file_is_told_to_be_needless(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("specdec").propagate = True
    export(tmp_path / "first", model_dir=str(target), to="gguf", gguf_type="Q8_0")
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    file = tmp_path / "first" / "model.gguf"
    export(tmp_path / "again", model_dir=str(file), to="gguf")
    assert f"{file} is a file for llama.cpp already" in caplog.text


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_gguf_of_a_model(kind: str, target: Path, tmp_path: Path) -> None:
    """Every tensor is found again; queries and keys turn as they do in Llama."""
    export(tmp_path / "out", model_dir=str(target), to="gguf", gguf_type=kind)
    values, tensors = read_gguf(tmp_path / "out" / "model.gguf")
    assert values["general.architecture"] == "llama"
    assert values["general.file_type"] == {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}[kind]
    assert values["llama.block_count"] == 8
    assert values["llama.attention.head_count_kv"] == 2
    assert values["llama.rope.dimension_count"] == 16
    described = json.loads((target / "tokenizer.json").read_text())
    for text, number in described["model"]["vocab"].items():
        assert values["tokenizer.ggml.tokens"][number] == text
    source = load_file(target / "model.safetensors")
    assert len(tensors) == len(source)
    pairs = {
        "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
        "blk.1.attn_output": "model.layers.1.self_attn.o_proj",
        "blk.0.attn_norm": "model.layers.0.input_layernorm",
        "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj",
        "blk.0.ffn_up": "model.layers.0.mlp.up_proj",
    }  # fmt: skip
    within = {"F32": 0.0, "F16": 2**-11, "BF16": 2**-8, "Q8_0": 1 / 200}[kind]
    for name, theirs in pairs.items():
        found, expected = tensors[f"{name}.weight"].float(), source[f"{theirs}.weight"]
        assert (found - expected).abs().max() <= within * expected.abs().max(), name
    # Channel c of a head turns with channel c + 8 in transformers, 2 c with 2 c + 1 in llama.cpp.
    for name, theirs, num_heads in (("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)):
        expected = source[f"model.layers.0.self_attn.{theirs}.weight"].view(num_heads, 2, 8, 64)
        found = tensors[f"blk.0.{name}.weight"].float().view(num_heads, 8, 2, 64)
        most = within * expected.abs().max()
        assert (found.transpose(1, 2) - expected).abs().max() <= most


@pytest.mark.parametrize(("family", "is_tied"), [("qwen2", False), ("qwen3", True)])
def test_gguf_of_other_families(family: str, is_tied: bool, tmp_path: Path) -> None:
    """Their queries and keys are rotated as in transformers; Qwen3 norms them.

    An output layer that is the embedding is written once, as transformers does.
    """
    model = make_family_model(tmp_path, family, vocab=VOCAB, tie_word_embeddings=is_tied)
    make_tokenizer(model, vocab=VOCAB)
    export(tmp_path / "out", model_dir=str(model), to="gguf")
    values, tensors = read_gguf(tmp_path / "out" / "model.gguf")
    assert values["general.architecture"] == family
    source = load_file(model / "model.safetensors")
    assert len(tensors) == len(source)
    assert ("output.weight" in tensors) is not is_tied
    names = ["attn_q.weight", "attn_k.weight"]
    names += ["attn_q.bias"] if family == "qwen2" else ["attn_q_norm.weight", "attn_k_norm.weight"]
    for name in names:
        module, kind = name.removeprefix("attn_").split(".")
        theirs = module if "norm" in module else f"{module}_proj"
        expected = source[f"model.layers.1.self_attn.{theirs}.{kind}"]
        assert torch.equal(tensors[f"blk.1.{name}"], expected), name


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [("mistral", {"sliding_window": 7}, "see all tokens, this one a window of 7"),
     ("llama", {"intermediate": 100}, "ffn_down.weight has rows of 100 numbers")],
)  # fmt: skip
def test_gguf_has_no_windows_and_no_odd_blocks(
    family: str, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = make_family_model(tmp_path, family, vocab=VOCAB, **config)
    make_tokenizer(model, vocab=VOCAB)
    with pytest.raises(SpecDecError, match=message):
        export(tmp_path / "out", model_dir=str(model), to="gguf", gguf_type="Q8_0")
    assert not (tmp_path / "out").exists()


def test_gguf_without_its_package(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(SpecDecError, match="needs the package gguf") as caught:
        export(tmp_path / "out", model_dir=str(target), to="gguf")
    assert "pip install 'gguf>=" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre_tokenizer": {"type": "Whitespace"}}, "splits texts in a way without a known name"),
        ({"model": {"type": "Unigram"}}, "has no BPE tokenizer"),
    ],
)
def test_tokenizers_that_a_gguf_file_cannot_hold(
    change: dict[str, Any], message: str, target: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        (folder / name).symlink_to(target / name)
    described = json.loads((target / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(described | change))
    with pytest.raises(SpecDecError, match=message):
        export(tmp_path / "out", model_dir=str(folder), to="gguf")
    assert not (tmp_path / "out").exists()


# ---- What is refused.


@pytest.mark.parametrize(
    ("kind", "to", "message", "hint"),
    [
        ("redrafter", "sglang", "SGLang does not take a ReDrafter drafter", "--to vllm or hf"),
        ("medusa", "gguf", "llama.cpp does not take Medusa heads", "--to vllm or hf"),
        ("eagle1", "gguf", "does not take an EAGLE-1 drafter", "--to vllm or sglang or hf"),
        ("eagle1", "edge-llm", "TensorRT Edge-LLM does not take an EAGLE-1", "--to vllm or sglang"),
    ],
)  # fmt: skip
def test_refusals_say_who_takes_it(
    kind: str, to: str, message: str, hint: str, write: Write, tmp_path: Path
) -> None:
    with pytest.raises(SpecDecError, match=message) as caught:
        write(kind, to)
    assert hint in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def make_on_family(parent: Path, _: Path, family: str, **drafter: Any) -> dict[str, Any]:
    model = make_family_model(parent, family, vocab=VOCAB, layers=5, intermediate=96)
    make_tokenizer(model, vocab=VOCAB)
    if drafter:
        folder = make_eagle_drafter(parent, vocab=VOCAB, **drafter)
    else:
        folder = make_dflash_drafter(parent, vocab=VOCAB, target_layers=5)
    return {"model_dir": str(model), "drafter_model_dir": str(folder)}


def make_on_llama(parent: Path, target: Path, **drafter: Any) -> dict[str, Any]:
    num_draft_tokens = drafter.pop("num_draft_tokens", None)
    folder = make_dflash_drafter(parent, vocab=VOCAB, target_layers=8, **drafter)
    return {"drafter_model_dir": str(folder), "num_draft_tokens": num_draft_tokens}


def make_head(parent: Path, target: Path, **head: Any) -> dict[str, Any]:
    return {"mtp_model_dir": str(make_mtp_head(parent, target, **head))}


def make_with_own_head(parent: Path, target: Path) -> dict[str, Any]:
    folder = make_eagle_drafter(parent, vocab=VOCAB, bias=False, own_embedding=False)
    generator = torch.Generator().manual_seed(5)
    with change_tensors(folder) as tensors:
        tensors["lm_head.weight"] = torch.randn((VOCAB, 64), generator=generator)
    return {"eagle_model_dir": str(folder)}


def make_without_template(parent: Path, target: Path) -> dict[str, Any]:
    model = shutil.copytree(target, parent / "bare")
    (model / "chat_template.jinja").unlink()
    drafter = make_eagle_drafter(parent, vocab=VOCAB, **USUAL)
    return {"model_dir": str(model), "eagle_model_dir": str(drafter)}


def make_of_other_layers(parent: Path, target: Path) -> dict[str, Any]:
    folder = make_eagle_drafter(parent, vocab=VOCAB, **USUAL | {"aux_layers": (1, 2, 4)})
    return {"eagle_model_dir": str(folder)}


AS_HF, ALL_OF_EAGLE3 = (
    "export it as hf, which specdec runs",
    ("vllm, speculators and hf write all of EAGLE-3"),
)
UNREAD_HEAD = (
    "it reads Qwen's beside Qwen3.5, Qwen3.6 and Qwen3-Next, MiMo's beside MiMo 7B; hf is for"
    " specdec"
)
# Examples of LACKS: a drafter of `checkpoints`, or what makes one; the runtime; the fact and the
# hint. Each is written by the text, {tmp} is the test's folder.
LACKING: list[tuple[str | Callable[[Path, Path], dict[str, Any]], str, str, str]] = [
    (lambda parent, target: make_on_family(parent, target, "gemma", **USUAL), "vllm",
     "vLLM lets no EAGLE-3 drafter read the layers of a GemmaForCausalLM",
     "it does of LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM,"
     " Qwen3MoeForCausalLM, Phi3ForCausalLM, PhiForCausalLM, GraniteForCausalLM,"
     " SmolLM3ForCausalLM, SeedOssForCausalLM; for this target there are --to sglang and"
     " trtllm-pytorch and hf"),
    (make_head, "vllm", "vLLM reads no head of Qwen's layout beside a LlamaForCausalLM",
     UNREAD_HEAD),
    (lambda *folders: make_head(*folders, form="mimo"), "sglang",
     "SGLang reads no head of MiMo's layout beside a LlamaForCausalLM", UNREAD_HEAD),
    (lambda *folders: make_head(*folders, form="glm", own=True), "vllm",
     "vLLM reads no head of GLM's layout beside a LlamaForCausalLM", UNREAD_HEAD),
    (make_head, "gguf", "llama.cpp reads no head of Qwen's layout beside a LlamaForCausalLM",
     UNREAD_HEAD),
    ("dspark", "sglang", "SGLang is not known to read the Markov head that the drafter has",
     "export it for vllm or speculators, or as hf"),
    ("dspark-masks", "hf",
     "DeepSpec's layout drafts from the first token of a block, this drafter does not",
     "export it for vllm or speculators"),
    (lambda *folders: make_on_llama(*folders, **TELLING, sample_from_anchor=True), "speculators",
     "speculators drafts from the masks of a block, this drafter from its first token too",
     "specdec runs it from the folder that it came in, or from that of --to hf"),
    (lambda *folders: make_on_llama(*folders, num_draft_tokens=5), "vllm",
     "--num-draft-tokens is 5, a block of this drafter drafts 4",
     "give 1 to 4; fewer than 4 are other blocks than it was trained with"),
    (lambda parent, _: {"medusa_model_dir": str(make_medusa_heads(parent, vocab=VOCAB)),
                        "num_draft_tokens": 99}, "vllm",
     "--num-draft-tokens is 99, there are 3 Medusa heads, of a token each", "give 1 to 3"),
    ("dflash-whole", "vllm",
     "the drafter reads the last layer, 7, whose output z-lab's layout takes after the final norm",
     "export it as speculators, or as hf with a drafter that reads inner layers"),
    (lambda *folders: make_on_llama(*folders, **TELLING), "sglang",
     "SGLang drafts with the target's embedding and head, the drafter has embed_tokens.weight,"
     " lm_head.weight of its own",
     "export it for vllm or speculators; hf and sglang have no room for them"),
    ("dflash-reduced", "hf",
     "specdec and its origin drafts with the target's embedding and head, the drafter has d2t,"
     " embed_tokens.weight, lm_head.weight of its own",
     "export it for vllm or speculators; hf and sglang have no room for them"),
    ("dspark-reduced", "hf",
     "specdec and its origin drafts with the target's embedding and head, the drafter has d2t of"
     " its own",
     "export it for vllm or speculators; hf and sglang have no room for them"),
    ("dflash-scaled", "vllm",
     "vLLM gives the drafter the rows of the embedding as they are, this one was trained with them"
     " multiplied by 3.5", AS_HF),
    (lambda parent, target: make_on_family(parent, target, "phi"), "vllm",
     "vLLM drafts without the bias of the target's head", AS_HF),
    ("eagle3-whole", "sglang",
     "SGLang drafts with the target's embedding, the drafter has its own",
     "export it for another runtime, or train it with the target's"),
    (make_with_own_head, "vllm",
     "vLLM drafts with the target's head, this EAGLE-1 drafter has its own", AS_HF),
    ("eagle1", "vllm",
     "vLLM's EAGLE-1 has no fc.bias, and eagle_nets.0.drafter.fc.bias is not zero",
     "export it for sglang or as hf; or train one with specdec-train --no-eagle-bias"),
    (make_of_other_layers, "edge-llm",
     "TensorRT Edge-LLM gives a drafter what enters layers [2, 4, 5] of this target, whatever"
     " config.json says; the drafter was trained on [2, 3, 5]",
     "train it on the usual layers, or export it for vllm or trtllm-pytorch"),
    (make_without_template, "edge-llm",
     "{tmp}/bare has no chat template, and TensorRT Edge-LLM refuses such a target",
     "add chat_template.jinja, which may be no more than the messages' contents"),
    ("p-eagle", "edge-llm",
     "TensorRT Edge-LLM drafts a token a pass, this drafter all in one", ALL_OF_EAGLE3),
    ("p-eagle-norm", "speculators", "vLLM drops fc_norm of a P-EAGLE drafter of speculators'",
     "use --to vllm, or hf"),
    ("eagle3-whole", "gguf",
     "llama.cpp is not known to compute norm_output, which the drafter has", ALL_OF_EAGLE3),
    ("eagle3-parts", "trtllm-pytorch",
     "TensorRT-LLM's PyTorch backend reads three layers of the target with a drafter of one layer;"
     " this one reads 2 with 2", ALL_OF_EAGLE3),
]  # fmt: skip


def test_every_lack_has_an_example() -> None:
    for *_, fact, hint in LACKS:
        assert any(
            match_template(fact, example[2]) and match_template(hint, example[3])
            for example in LACKING
        ), f"no example of LACKING shows: {fact}"


@pytest.mark.thorough
@pytest.mark.parametrize(("drafter", "to", "fact", "hint"), LACKING)
def test_what_a_runtime_lacks_is_refused(
    drafter: str | Callable[[Path, Path], dict[str, Any]], to: str, fact: str, hint: str,
    target: Path, checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path,
) -> None:  # fmt: skip
    flags: dict[str, Any]
    if isinstance(drafter, str):
        flags = {"checkpoint_dir": checkpoints[drafter][1]}
    else:
        flags = drafter(tmp_path, target)
    with pytest.raises(SpecDecError) as caught:
        export(tmp_path / "out", **{"model_dir": str(target), "to": to} | flags)
    assert (fact.format(tmp=tmp_path), hint) in caught.value.problems
    assert not (tmp_path / "out").exists()


# Whose layers EAGLE-3 reads: in vLLM and in llama.cpp, in one of them, or in none.
TARGETS = {
    "qwen3": ("vllm", "speculators", "gguf"), "qwen3_moe": ("vllm", "speculators", "gguf"),
    "qwen2": ("vllm", "speculators"), "mixtral": ("gguf",), "gemma": (),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("family", list(TARGETS))
def test_targets_of_eagle3(family: str, tmp_path: Path) -> None:
    model = make_family_model(tmp_path, family, vocab=VOCAB, layers=5, intermediate=96)
    make_tokenizer(model, vocab=VOCAB)
    drafter = make_eagle_drafter(tmp_path, vocab=VOCAB, **USUAL)
    checkpoint = convert(tmp_path / "checkpoint", model, "eagle3", drafter)
    for to in ("vllm", "speculators", "gguf", "sglang"):
        flags: dict[str, Any] = {"checkpoint_dir": checkpoint, "model_dir": str(model), "to": to}
        if to == "sglang" or to in TARGETS[family]:
            export(tmp_path / to, **flags)
            if to != "gguf":
                again = convert(tmp_path / f"{to}-again", model, "eagle3", tmp_path / to)
                assert read_checkpoint(again) == read_checkpoint(checkpoint)
            continue
        with pytest.raises(SpecDecError, match="lets no EAGLE-3 drafter read the layers") as caught:
            export(tmp_path / to, **flags)
        assert all(f" {taker}" in caught.value.hint for taker in (*TARGETS[family], "sglang"))


def test_every_other_pair_is_refused(write: Write, tmp_path: Path) -> None:
    for kind, runtimes in PAIRS.items():
        for to in set(RUNTIME_NAMES) - set(runtimes):
            with pytest.raises(SpecDecError) as caught:
                write(kind, to)
            assert "hf" in caught.value.hint, (kind, to)
    assert list(tmp_path.iterdir()) == []


def test_a_dflash_drafter_is_told_as_each_runtime_counts(
    checkpoints: dict[str, tuple[Path, Path]], write: Write, tmp_path: Path
) -> None:
    """Outputs 0, 3, 6 of the target are read by two layers; blocks of five draft four tokens."""
    reports = {to: write("dflash", to)[0] for to in PAIRS["dflash"]}
    configs = {to: read_json(tmp_path / to / "config.json") for to in PAIRS["dflash"]}
    assert configs["vllm"] == configs["sglang"] == configs["hf"]
    config = configs["vllm"]
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"] == {"mask_token_id": 2, "target_layer_ids": [0, 3, 6]}
    assert (config["block_size"], config["num_target_layers"]) == (5, 8)
    assert config["is_causal"] is False
    assert config["layer_types"] == ["full_attention"] * 2
    told = configs["speculators"]
    assert told["aux_hidden_state_layer_ids"] == [1, 4, 7]
    assert (told["block_size"], told["mask_token_id"], told["target_hidden_size"]) == (5, 2, 64)
    assert told["sliding_window_non_causal"] is True
    assert told["sample_from_anchor"] is False
    assert told["speculators_config"]["algorithm"] == "dflash"
    assert told["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert told["transformer_layer_config"]["layer_types"] == ["full_attention"] * 2
    assert '"method": "dflash"' in reports["vllm"]["command"]
    assert '"num_speculative_tokens": 4' in reports["vllm"]["command"]
    assert "--speculative-algorithm DFLASH" in reports["sglang"]["command"]
    assert reports["sglang"]["command"].endswith("--speculative-num-draft-tokens 5")
    own = load_file(checkpoints["dflash"][0] / "model.safetensors")
    for to in PAIRS["dflash"]:
        written = load_file(tmp_path / to / "model.safetensors")
        assert written.keys() == own.keys()
        assert all(torch.equal(written[name], own[name]) for name in own)


def test_a_drafter_of_one_pass_is_told(write: Write, tmp_path: Path) -> None:
    reports = {to: write("p-eagle", to)[0] for to in PAIRS["p-eagle"]}
    config = read_json(tmp_path / "vllm" / "config.json")
    assert (config["mask_token_id"], config["pard_token"]) == (9, 9)
    assert '"num_speculative_tokens": 8, "parallel_drafting": true' in reports["vllm"]["command"]
    told = read_json(tmp_path / "speculators" / "config.json")
    assert (told["speculators_model_type"], told["mask_token_id"]) == ("peagle", 9)
    assert told["architectures"] == ["PEagleSpeculator"]
    assert told["speculators_config"]["algorithm"] == "peagle"
    assert told["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 8


def test_a_markov_head_is_told(
    target: Path, checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """DeepSpec's fields, which its model asks for; its loader takes nothing from the target."""
    drafter, checkpoint = checkpoints["dspark"]
    own = load_file(drafter / "model.safetensors")
    spark: dict[str, Any] = {
        "markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": False,
        "sample_from_anchor": True, "mask_token_id": 2, "block_size": 5,
    }  # fmt: skip
    base = load_file(target / "model.safetensors")
    shared = {
        "embed_tokens.weight": base["model.embed_tokens.weight"],
        "lm_head.weight": base["lm_head.weight"],
    }
    save_file(own | shared, drafter / "model.safetensors")
    for to in PAIRS["dspark"]:
        report = export(tmp_path / to, model_dir=str(target), drafter_model_dir=str(drafter), to=to)
        written, config = (
            load_file(tmp_path / to / "model.safetensors"),
            read_json(tmp_path / to / "config.json"),
        )
        missing = set(own) - set(written) - {n for n in own if n.startswith("confidence_head.")}
        assert missing == (set() if to == "hf" else set(shared))
        assert all(torch.equal(t, (own | shared)[name]) for name, t in written.items())
        assert spark.items() <= config.items()
        if to == "speculators":
            assert config["speculators_model_type"] == "dspark"
            assert config["aux_hidden_state_layer_ids"] == [1, 2]
        else:
            assert config["architectures"] == ["Qwen3DSparkModel"]
            assert config["target_layer_ids"] == [0, 1]
            assert config["num_anchors"] > 0
    assert '"method": "dspark"' in report["command"] or to == "hf"
    save_file(own, drafter / "model.safetensors")


def test_checkpoints_that_cannot_be_exported(
    target: Path, checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    split = tmp_path / "split"
    call("convert", "--model-dir", target, "--output-dir", split, "--tp-size", 2)
    with pytest.raises(SpecDecError, match="is split over 2 ranks"):
        export(tmp_path / "out", checkpoint_dir=split, to="hf")
    windows: dict[str, Any] = {
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7,
    }  # fmt: skip
    for family, title in (
        ("stablelm", "StableLmForCausalLM"),
        ("qwen3_moe", "Qwen3MoeForCausalLM"),
        ("ministral", "MinistralForCausalLM"),
    ):
        config = windows if family == "ministral" else {}
        other = make_family_model(tmp_path, family, name=family, **config)
        with pytest.raises(SpecDecError, match=f"a {title} is not exported"):
            export(tmp_path / "out", model_dir=str(other), to="hf")
    folder = tmp_path / "copies"
    folder.mkdir()
    _, checkpoint = checkpoints["eagle1"]
    (folder / "config.json").symlink_to(checkpoint / "config.json")
    tensors = load_file(checkpoint / "rank0.safetensors")
    tensors["eagle_nets.2.drafter.fc.bias"][3] += 1
    save_file(tensors, folder / "rank0.safetensors")
    with pytest.raises(SpecDecError, match=r"eagle_nets\.2\.drafter\.fc\.bias differs from"):
        export(tmp_path / "out", checkpoint_dir=folder, to="hf")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"model_dir": "x"}, "--to"),
        ({"to": "hf", "model_dir": "x", "eagle_model_dir": "a", "medusa_model_dir": "b"},
         "are both given"),
        ({"to": "hf", "checkpoint_dir": Path("c"), "eagle_model_dir": "a"}, "are both given"),
    ],
)  # fmt: skip
def test_flags_without_effect(flags: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        export(tmp_path / "out", **flags)


def test_ctrl_c_while_all_is_tidied_up(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint that lies between was left behind."""
    real: Callable[..., None] = shutil.rmtree
    interrupted: list[Any] = []

    def remove(path: Any, *args: Any, **options: Any) -> None:
        if Path(path).name == ".out.checkpoint.partial" and Path(path).exists() and not interrupted:
            interrupted.append(path)
            raise KeyboardInterrupt
        real(path, *args, **options)

    monkeypatch.setattr(shutil, "rmtree", remove)
    settings = ExportSettings(model_dir=str(target), to="hf", output_dir=tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        export_model(settings)
    assert interrupted
    assert not list(tmp_path.iterdir())


def test_what_a_killed_export_converted_goes(target: Path, tmp_path: Path) -> None:
    left = tmp_path / ".out.checkpoint.partial" / "checkpoint"
    left.mkdir(parents=True)
    (left / "rank0.safetensors").touch()
    export(tmp_path / "out", model_dir=str(target), to="hf")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_acceptance_goes_along_for_specdec(
    target: Path, checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """From a checkpoint that has it, and from the drafter's folder by way of one."""
    drafter, checkpoint = (tmp_path / name for name in ("drafter", "checkpoint"))
    for folder, copy in zip(checkpoints["eagle3"], (drafter, checkpoint), strict=True):
        shutil.copytree(folder, copy)
        measured = Acceptance(
            right=((1,) * NUM_BUCKETS,) * MAX_DEPTH, seen=((2,) * NUM_BUCKETS,) * MAX_DEPTH,
            gains=(0.5,), num_drafts=3, about={"prompts": 1},
        )  # fmt: skip
        measured.write(copy / NAME)
    flags: dict[str, Any] = {"model_dir": str(target)}
    export(tmp_path / "hf", to="hf", checkpoint_dir=checkpoint, **flags)
    export(tmp_path / "direct", to="hf", eagle_model_dir=str(drafter), **flags)
    export(tmp_path / "vllm", to="vllm", checkpoint_dir=checkpoint, **flags)
    for name in ("hf", "direct"):
        assert (tmp_path / name / NAME).read_bytes() == (checkpoint / NAME).read_bytes()
    assert not (tmp_path / "vllm" / NAME).exists()


def test_another_target_is_refused_beside_a_checkpoint(
    target: Path, checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """By the facts that its config.json has; a folder without them may be of this target."""
    _, checkpoint = checkpoints["eagle3"]
    other, config = tmp_path / "other", read_json(target / "config.json")
    other.mkdir()
    flags: dict[str, Any] = {"to": "hf", "checkpoint_dir": checkpoint, "model_dir": str(other)}
    for key, value in (
        ("vocab_size", VOCAB + 1), ("hidden_size", 7), ("num_hidden_layers", 3),
        ("architectures", ["Qwen3ForCausalLM"]),
    ):  # fmt: skip
        for changed in (config | {key: value}, {"text_config": {key: value}, key: value}):
            (other / "config.json").write_text(json.dumps(changed))
            name = key.removesuffix("s") if isinstance(value, list) else key
            with pytest.raises(SpecDecError, match=f"other has {name} .*, the target of"):
                export(tmp_path / "out", **flags)
    assert not (tmp_path / "out").exists()
    (other / "config.json").write_text(
        json.dumps({"architectures": ["Some"]} | {"vocab_size": VOCAB})
    )
    export(tmp_path / "out", **flags)


def test_the_drafter_keeps_its_type(target: Path, tmp_path: Path) -> None:
    drafter = make_eagle_drafter(tmp_path, vocab=VOCAB, dtype="bfloat16", **DRAFTERS["eagle3"])
    flags: dict[str, Any] = {"model_dir": str(target), "eagle_model_dir": str(drafter)}
    assert export(tmp_path / "kept", to="hf", **flags)["dtype"] == "bfloat16"
    own, written = (load_file(f / "model.safetensors") for f in (drafter, tmp_path / "kept"))
    assert own.keys() == written.keys()
    assert all(torch.equal(own[name], written[name]) for name in own)
    export(tmp_path / "cast", to="hf", dtype="float16", **flags)
    cast = load_file(tmp_path / "cast" / "model.safetensors")
    assert cast["fc.weight"].dtype == torch.float16
    with pytest.raises(SpecDecError, match="exists and is not empty"):
        export(tmp_path / "kept", to="hf", **flags)
    export(tmp_path / "kept", to="vllm", force=True, **flags)
    assert torch.equal(
        load_file(tmp_path / "kept" / "model.safetensors")["fc.weight"], own["fc.weight"]
    )


def test_edge_llm_is_told_the_layers_that_are_entered(target: Path, tmp_path: Path) -> None:
    """Its three, counted as those that are entered; a chat template may stand in the config."""
    shape: dict[str, Any] = {"version": 3, "vocab": VOCAB, "own_embedding": False}
    usual = make_eagle_drafter(tmp_path, aux_layers=AUX_LAYERS, name="usual", **shape)
    flags: dict[str, Any] = {"to": "edge-llm"}
    report = export(tmp_path / "out", model_dir=str(target), eagle_model_dir=str(usual), **flags)
    assert report["command"].startswith(f"tensorrt-edgellm-export {target} ")
    assert read_json(tmp_path / "out" / "config.json")["target_layer_ids"] == [2, 4, 5]
    bare = tmp_path / "bare"
    shutil.copytree(target, bare)
    (bare / "chat_template.jinja").unlink()
    settings = read_json(bare / "tokenizer_config.json")
    (bare / "tokenizer_config.json").write_text(
        json.dumps({**settings, "chat_template": "{{ 1 }}"})
    )
    export(tmp_path / "told", model_dir=str(bare), eagle_model_dir=str(usual), **flags)


# ---- MTP.


@pytest.mark.parametrize(
    ("form", "count"), [("qwen", "mtp_num_hidden_layers"), ("mimo", "num_nextn_predict_layers")]
)
def test_a_head_goes_back_into_its_targets_folder(form: str, count: str, tmp_path: Path) -> None:
    """As hf the head alone, tensor for tensor; for the others the whole, which converts as before.

    The gates of queries, which lie apart in a checkpoint, are among them again.
    """
    if form == "qwen":
        target = make_hybrid(tmp_path, vocab=VOCAB)
    else:
        target = make_family_model(tmp_path, "qwen2", vocab=VOCAB)
        config = read_json(target / "config.json")
        config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
        (target / "config.json").write_text(json.dumps(config))
    make_tokenizer(target, vocab=VOCAB)
    head = make_mtp_head(tmp_path, target, form=form)
    flags = {"model_dir": str(target), "mtp_model_dir": str(head)}
    own = load_file(head / "model.safetensors")
    report = export(tmp_path / "hf", to="hf", **flags)
    assert report["kind"] == "mtp"
    assert f"--mtp-model-dir {tmp_path / 'hf'}" in report["command"]
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in own.items())

    report = export(tmp_path / "vllm", to="vllm", num_draft_tokens=2, **flags)
    folder = tmp_path / "vllm"
    assert report["command"] == (
        f"vllm serve {folder} --speculative-config"
        ' \'{"method": "mtp", "num_speculative_tokens": 2}\''
    )
    index = read_json(folder / "model.safetensors.index.json")["weight_map"]
    held = {path.name: set(load_file(path)) for path in folder.glob("*.safetensors")}
    assert held == {
        name: {key for key, place in index.items() if place == name} for name in held
    }  # fmt: skip
    assert held["model-00002-of-00002.safetensors"] == own.keys()
    assert (folder / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()
    assert read_json(folder / "config.json")[count] == 1
    for name, base, drafter in (("a", target, head), ("b", folder, folder)):
        call(
            "convert", "--model-dir", base, "--mtp-model-dir", drafter,
            "--output-dir", tmp_path / name,
        )  # fmt: skip
    assert read_checkpoint(tmp_path / "a") == read_checkpoint(tmp_path / "b")
    with pytest.raises(SpecDecError, match="holds a head already: m"):
        export(tmp_path / "again", to="sglang", **flags | {"model_dir": str(folder)})


def test_gguf_of_a_head(tmp_path: Path) -> None:
    """Each tensor and value is that of the file in which llama.cpp's own converter wrote it."""
    golden = ROOT / "tests" / "golden" / "gguf" / "qwen35.gguf"
    call(
        "convert", "--model-dir", golden, "--speculative-decoding-mode", "mtp", "--dequantize",
        "--dtype", "float32", "--output-dir", tmp_path / "checkpoint",
    )  # fmt: skip
    words = make_tokenizer(tmp_path / "words")
    path = words / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"] |= {"merges": [], "vocab": {
        token: at for token, at in tokenizer["model"]["vocab"].items() if at < 67}}  # fmt: skip
    path.write_text(json.dumps(tokenizer))
    (words / "config.json").write_text("{}")
    report = export(
        tmp_path / "out", checkpoint_dir=tmp_path / "checkpoint", model_dir=str(words), to="gguf"
    )
    assert " --spec-type draft-mtp --spec-draft-model " in report["command"]
    assert not report["left_out"]
    (values, tensors), (told, given) = (
        read_gguf(path) for path in (tmp_path / "out" / "model.gguf", golden)
    )
    of_target = ("token_embd.weight", "output_norm.weight", "output.weight")
    assert tensors.keys() == {
        name for name in given if name.startswith("blk.2.") or name in of_target
    }  # fmt: skip
    assert all(torch.equal(tensor, given[name].float()) for name, tensor in tensors.items())
    own = {key: value for key, value in values.items() if key.startswith("qwen35.")}
    assert len(own) == 19
    assert own == {key: told[key] for key in own}


def test_a_head_of_scaled_positions_is_no_gguf(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    target = make_hybrid(tmp_path, vocab=VOCAB, rope_parameters=scaling)
    make_tokenizer(target, vocab=VOCAB)
    head = make_mtp_head(tmp_path, target)
    with pytest.raises(SpecDecError, match="rotary scaling 'linear' is not written as GGUF"):
        export(tmp_path / "out", to="gguf", model_dir=str(target), mtp_model_dir=str(head))


def test_a_head_that_no_runtime_reads_is_exported_for_specdec(target: Path, tmp_path: Path) -> None:
    own = make_mtp_head(tmp_path, target, form="glm", own=True, name="own")
    flags = {"model_dir": str(target), "mtp_model_dir": str(own)}
    report = export(tmp_path / "hf", to="hf", **flags)
    assert report["kind"] == "mtp"
    assert read_json(tmp_path / "hf" / "config.json")["num_nextn_predict_layers"] == 1
    found, given = (load_file(f / "model.safetensors") for f in (tmp_path / "hf", own))
    assert found.keys() == given.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in given.items())
