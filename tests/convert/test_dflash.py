"""DFlash's folders in both layouts: what is written, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from specdec.checkpoint.config import read_checkpoint_config
from specdec.files.folders import DFLASH, look_at
from tests.conftest import make_dflash_drafter, make_llama, read_error_lines
from tests.engines import call, run_cli_here


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("target"), layers=3, vocab=131)


def convert(target: Path, drafter: Path, output: Path, *flags: object) -> Path:
    call(
        "convert", "--model-dir", target, "--dflash-model-dir", drafter, "--output-dir", output,
        *flags,
    )  # fmt: skip
    return output


@pytest.mark.parametrize("form", ["z-lab", "speculators"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_every_tensor_is_where_the_page_says(
    form: str, tp_size: int, target: Path, tmp_path: Path
) -> None:
    drafter = make_dflash_drafter(tmp_path, form=form, vocab=131, layers=1, kv_heads=2, bias=True)
    assert look_at(drafter).kind == DFLASH
    folder = convert(target, drafter, tmp_path / "ckpt", "--tp-size", tp_size)
    own, base = load_file(drafter / "model.safetensors"), load_file(target / "model.safetensors")
    height = -(-131 // tp_size)
    head = np.zeros((height * tp_size, 64), np.float32)
    head[:131] = own.get("lm_head.weight", base["lm_head.weight"])
    attention, mlp = "layers.0.self_attn.", "layers.0.mlp."
    for rank in range(tp_size):
        written = load_file(folder / f"rank{rank}.safetensors")

        def take(array: Any, rank: int = rank, axis: int = 0) -> Any:
            return np.split(array, tp_size, axis)[rank]

        def join(kind: str, rank: int = rank) -> Any:
            return np.concatenate([take(own[f"{attention}{p}_proj.{kind}"], rank) for p in "qkv"])

        ours = "drafter.layers.0."
        wanted = {
            "drafter.fc.weight": take(own["fc.weight"]),
            "drafter.hidden_norm.weight": own["hidden_norm.weight"],
            "drafter.ln_f.weight": own["norm.weight"],
            "drafter.vocab_embedding.weight": own.get(
                "embed_tokens.weight", base["model.embed_tokens.weight"]
            ),
            f"{ours}attention.qkv.weight": join("weight"),
            f"{ours}attention.qkv.bias": join("bias"),
            f"{ours}attention.dense.weight": take(own[attention + "o_proj.weight"], axis=1),
            f"{ours}attention.dense.bias": own[attention + "o_proj.bias"],
            f"{ours}attention.q_layernorm.weight": own[attention + "q_norm.weight"],
            f"{ours}attention.k_layernorm.weight": own[attention + "k_norm.weight"],
            f"{ours}mlp.fc.weight": take(own[mlp + "gate_proj.weight"]),
            f"{ours}mlp.gate.weight": take(own[mlp + "up_proj.weight"]),
            f"{ours}mlp.proj.weight": take(own[mlp + "down_proj.weight"], axis=1),
            f"{ours}input_layernorm.weight": own["layers.0.input_layernorm.weight"],
            f"{ours}post_layernorm.weight": own["layers.0.post_attention_layernorm.weight"],
            "lm_head.weight": take(head),
        }
        found = {n.removeprefix("dflash."): t for n, t in written.items() if "dflash" in n}
        assert set(found) == set(wanted)
        for name, array in wanted.items():
            np.testing.assert_array_equal(found[name], array, name)


def test_config_is_read_back(target: Path, tmp_path: Path) -> None:
    drafter = make_dflash_drafter(tmp_path, vocab=131, block_size=7)
    folder = convert(target, drafter, tmp_path / "ckpt", "--dflash-max-draft-len", 20)
    config = json.loads((folder / "config.json").read_text())
    assert config["architecture"] == "SpecDecDFlashForCausalLM"
    assert config["base_architecture"] == "LlamaForCausalLM"
    assert config["dflash"] == {
        "aux_layers": [0, 1], "block_size": 7, "mask_token_id": 2, "draft_vocab_size": 131,
        "sample_from_anchor": False,
    }  # fmt: skip
    params: Any = read_checkpoint_config(folder).drafter
    assert params.to_checkpoint() == {
        key: config[key] for key in ("dflash", "dflash_net_config", "max_draft_len")
    }
    assert (params.max_draft_tokens, params.max_draft_depth) == (20, 6)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_size", 1, "dflash.block_size is 1, not a whole number from 2"),
        ("aux_layers", [1, 0], r"dflash.aux_layers is \[1, 0\], not a rising list of layers"),
        ("mask_token_id", 131, "mask_token_id is 131, the target's vocab_size 131"),
        ("draft_vocab_size", 200, "draft_vocab_size is 200, the target's vocab_size 131"),
        ("sample_from_anchor", None, "dflash.sample_from_anchor is None, not true or false"),
        ("causal", True, "unknown keys causal"),
        ("markov_rank", -1, "dflash.markov_rank is -1, not a whole number from 0"),
    ],
)
def test_checkpoints_that_no_conversion_writes(
    key: str, value: Any, message: str, target: Path, tmp_path: Path
) -> None:
    from specdec.errors import SpecDecError

    folder = convert(target, make_dflash_drafter(tmp_path, vocab=131), tmp_path / "ckpt")
    config = json.loads((folder / "config.json").read_text())
    config["dflash"][key] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecDecError, match=message):
        read_checkpoint_config(folder)


SLIDING = {
    "use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention"] * 2,
}  # fmt: skip
SPECULATORS: dict[str, Any] = {"form": "speculators"}
DSPARK: dict[str, Any] = {"form": "deepspec", "markov_rank": 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab": 128}, "the DFlash drafter's vocab_size is 128, the target's 131"),
        ({"hidden": 32}, "fc.weight has shape [32, 64], for the outputs of 2 layers of 64"),
        ({"target_layers": 5}, "num_target_layers is 5, the target has 3 layers"),
        ({"aux_layers": (0, 2)}, "target_layer_ids names the last layer, 2"),
        ({"aux_layers": (1, 0)}, "the outputs of layers [1, 0] would be read"),
        ({"aux_layers": (1, 7)}, "the outputs of layers [1, 7] would be read"),
        ({"mask_token_id": 131}, "mask_token_id is 131, the target's vocab_size 131"),
        ({"mask_token_id": None}, "mask_token_id is missing"),
        ({"block_size": 1}, "block_size is 1"),
        ({"block_size": None}, "block_size is missing"),
        ({"net": {"model_type": "llama"}}, "model_type is 'llama'"),
        ({"net": {"hidden_act": "gelu"}}, "hidden_act is 'gelu'"),
        (
            {"dflash_config": {"mask_token_id": 2, "shift_label": True}},
            "dflash_config has shift_label, which is not known here",
        ),
        (
            {"dflash_config": {"projector_type": "domino", "mask_token_id": 2, "emb_dim": 8}},
            "dflash_config.projector_type is 'domino': only plain DFlash drafters of SpecForge's",
        ),
        (
            {"dflash_config": {"mask_token_id": 2, "block_size": 8}},
            "block_size is 5 at the top and 8 in dflash_config",
        ),
        ({"net": SLIDING}, "is_causal is absent"),
        ({"net": SLIDING | {"is_causal": True}}, "is_causal is true"),
        ({"is_neox_style": False}, "is_neox_style is False: rotary embeddings of interleaved"),
        (DSPARK | {"rope_is_neox_style": False}, "rope_is_neox_style is False: rotary"),
        (SPECULATORS | {"net": {"rope_interleave": True}}, ".rope_interleave is True: rotary"),
        ({"is_causal": True}, "is_causal is true: the tokens of a block would not see"),
        (
            {
                "input_embedding_scale": 3.0,
                "dflash_config": {"mask_token_id": 2, "embedding_scale": 2.0},
            },
            "input_embedding_scale is given as 2.0 and 3.0",
        ),
        (SPECULATORS | {"speculators_model_type": "mtp"}, "speculators_model_type is 'mtp'"),
        (SPECULATORS | {"speculators_model_type": "dspark"}, "markov_rank is missing"),
        (
            SPECULATORS | {"markov_rank": 4, "sample_from_anchor": None},
            "sample_from_anchor is missing",
        ),
        (DSPARK | {"markov_head_type": "gated"}, "markov_head_type is 'gated'"),
        (DSPARK | {"target_layer_ids": None}, "target_layer_ids is missing"),
        (DSPARK | {"target_layer_ids": [-1, 1]}, "the outputs of layers [-1, 1] would be read"),
        (DSPARK | {"mask_token_id": None}, "mask_token_id is missing"),
        (DSPARK | {"num_target_layers": 4}, "num_target_layers is 4, the target has 3"),
        (DSPARK | {"net": SLIDING}, "is_causal is absent"),
        (DSPARK | {"enable_confidence_head": False}, "confidence_head.proj.bias"),
        (SPECULATORS | {"net": SLIDING}, "sliding_window_non_causal is absent"),
        (SPECULATORS | {"target_hidden_size": 32}, "target_hidden_size is 32"),
        (SPECULATORS | {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is miss"),
        (SPECULATORS | {"draft_vocab": 70, "draft_vocab_size": 60}, "d2t is int64 [70]"),
    ],
)
def test_what_is_refused(
    options: dict[str, Any], message: str, target: Path, tmp_path: Path
) -> None:
    drafter = make_dflash_drafter(tmp_path, **{"vocab": 131, **options})
    done = run_cli_here(
        "convert", "--model-dir", target, "--dflash-model-dir", drafter, "--output-dir",
        tmp_path / "ckpt",
    )  # fmt: skip
    assert done.returncode == 1
    assert message in done.stderr
    assert read_error_lines(done.stderr)
    assert not (tmp_path / "ckpt").exists()


@pytest.mark.parametrize(
    ("config", "interleaved"),
    [
        ({"is_neox_style": True, "rope_is_neox_style": None, "rope_interleaved": False}, []),
        ({"rope_scaling": {"rope_type": "yarn", "mrope_interleaved": True}}, []),
        ({"indexer_rope_interleave": True, "interleave_moe_layer_step": 2}, []),
        ({"position_embedding_type": "rope_gpt_neox", "rope_layout": "half"}, []),
        ({"rope_parameters": {"interleaved": True}}, ["rope_parameters.interleaved"]),
        ({"dflash_config": {"is_neox_style": 0}}, ["dflash_config.is_neox_style"]),
        ({"rope_traditional": True, "rope_style": "gptj"}, ["rope_traditional", "rope_style"]),
        ({"position_embedding_type": "rope_gptj"}, ["position_embedding_type"]),
        ({"rotary_layout": "legacy"}, ["rotary_layout"]),
    ],
)
def test_fields_about_the_layout_of_rotated_pairs(
    config: dict[str, Any], interleaved: list[str]
) -> None:
    from specdec.model.config_reader import list_layouts

    assert [name for name, _, is_interleaved in list_layouts(config) if is_interleaved] == (
        interleaved
    )


def test_a_layout_that_is_computed_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_llama(tmp_path, layers=3, vocab=131, rope_interleaved=True)
    drafter = make_dflash_drafter(tmp_path, vocab=131, rope_is_neox_style=True)
    config = json.loads((drafter / "config.json").read_text())
    config["dflash_config"]["is_neox_style"] = True
    config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0, "interleaved": False}
    (drafter / "config.json").write_text(json.dumps(config))
    folder = convert(target, drafter, tmp_path / "ckpt")
    assert "target: rope_interleaved is True, which transformers' models" in capsys.readouterr().err
    net = json.loads((folder / "config.json").read_text())["dflash_net_config"]
    assert net["rotary_scaling"] == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("form", ["deepspec", "speculators"])
def test_a_markov_head(form: str, tp_size: int, target: Path, tmp_path: Path) -> None:
    """Its matrices are kept as they are, the head by vocabulary; what guesses acceptance is not."""
    drafter = make_dflash_drafter(
        tmp_path, form=form, markov_rank=6, vocab=131, mask_token_id=9, block_size=7
    )
    folder = convert(target, drafter, tmp_path / "ckpt", "--tp-size", tp_size)
    own = load_file(drafter / "model.safetensors")
    height = -(-131 // tp_size)
    for rank in range(tp_size):
        written = load_file(folder / f"rank{rank}.safetensors")
        assert not [name for name in written if "confidence" in name]
        rows = np.zeros((height * tp_size, 6), np.float32)
        rows[:131] = own["markov_head.markov_w2.weight"]
        np.testing.assert_array_equal(
            written["dflash.markov.lm_head.weight"], rows[rank * height : (rank + 1) * height]
        )
        np.testing.assert_array_equal(
            written["dflash.markov.vocab_embedding.weight"], own["markov_head.markov_w1.weight"]
        )
    config = json.loads((folder / "config.json").read_text())
    assert config["dflash"] == {
        "aux_layers": [0, 1], "block_size": 7, "mask_token_id": 9, "draft_vocab_size": 131,
        "sample_from_anchor": True, "markov_rank": 6,
    }  # fmt: skip
    params: Any = read_checkpoint_config(folder).drafter
    assert params.max_draft_depth == 7
    assert params.to_checkpoint()["dflash"] == config["dflash"]


@pytest.mark.parametrize("kind", ["w1", "w2"])
def test_a_markov_head_without_a_matrix(kind: str, target: Path, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    from specdec.errors import SpecDecError

    drafter = make_dflash_drafter(tmp_path, vocab=131, **DSPARK)
    tensors = load_file(drafter / "model.safetensors")
    del tensors[f"markov_head.markov_{kind}.weight"]
    save_file(tensors, drafter / "model.safetensors")
    with pytest.raises(SpecDecError, match=rf"markov_head\.markov_{kind}\.weight"):
        convert(target, drafter, tmp_path / "ckpt")


def test_unread_tensors_and_embeddings_that_are_multiplied(target: Path, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    from specdec.errors import SpecDecError
    from tests.parity.models import make_model

    drafter = make_dflash_drafter(tmp_path, vocab=131)
    tensors = load_file(drafter / "model.safetensors")
    tensors["markov_head.weight"] = np.zeros((4, 4), np.float32)
    save_file(tensors, drafter / "model.safetensors")
    with pytest.raises(SpecDecError, match=r"markov_head\.weight"):
        convert(target, drafter, tmp_path / "ckpt")
    gemma = make_model(tmp_path / "gemma", "GemmaForCausalLM-tied")
    vocab = json.loads((gemma / "config.json").read_text())["vocab_size"]
    other = make_dflash_drafter(
        tmp_path, vocab=vocab, aux_layers=(0,), num_target_layers=None, name="other"
    )
    with pytest.raises(SpecDecError, match="the target multiplies its embedding"):
        convert(gemma, other, tmp_path / "ckpt")
    convert(gemma, set_scale(other), tmp_path / "ckpt")


def set_scale(drafter: Path) -> Path:
    config = json.loads((drafter / "config.json").read_text())
    config["dflash_config"]["input_embedding_scale"] = 8.0
    (drafter / "config.json").write_text(json.dumps(config))
    return drafter
