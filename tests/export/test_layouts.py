"""Rows, names, keys and commands of an export, alone: on sizes of a few numbers.

test_export.py exports whole drafters; here is where each number of a file comes from.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gguf
import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import save_file

from specdec.errors import SpecDecError
from specdec.export import gguf as gguf_writer
from specdec.export import layouts, runtimes, source
from specdec.export.redrafter_proposer import ReDrafter
from specdec.export.settings import ExportSettings
from specdec.export.source import Contents, Order, Source, TensorRows, name_layer
from specdec.files.tensor_file import TensorFile, TensorInfo
from specdec.methods.dflash import DFlashParams
from specdec.methods.eagle import Eagle3Params, EagleParams
from specdec.methods.medusa import MedusaParams
from specdec.methods.redrafter import ReDrafterParams
from specdec.model.config import ModelConfig
from tests.engine.models import make_model

SIZES = {
    "vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_size": 2, "intermediate_size": 6,
}  # fmt: skip
TARGET = make_model(**SIZES)
HEADS = MedusaParams(max_draft_len=9, num_heads=2, num_layers=3)
EAGLE1 = EagleParams(net=TARGET, num_eagle_layers=1, max_non_leaves_per_layer=4, max_draft_len=9)
PARAMS = Eagle3Params(aux_layers=(0, 2), draft_vocab_size=5, norm_before_residual=True)
EAGLE3 = dataclasses.replace(EAGLE1, eagle3=PARAMS)
PARALLEL = dataclasses.replace(EAGLE1, eagle3=dataclasses.replace(PARAMS, mask_token_id=3))
DFLASH = DFlashParams(
    net=make_model(**SIZES, architecture="Qwen3ForCausalLM"), aux_layers=(1, 3), block_size=5,
    mask_token_id=7, draft_vocab_size=12, max_draft_len=9, sample_from_anchor=False,
)  # fmt: skip


def make_source(
    drafter: Any, arrays: dict[str, Any], folder: Path, model: ModelConfig = TARGET
) -> Source:
    """Return what a checkpoint's folder would be read as, of these tensors."""
    save_file(arrays, folder / "rank0.safetensors")
    made = Source.__new__(Source)
    made.folder, made.model, made.drafter = folder, model, drafter
    made.file = TensorFile(folder / "rank0.safetensors")
    made.left_out, made.computed_tensors = {}, {}
    made.kind, made.tensors = made._list_tensors()
    return made


def make_order(made: Any, to: str = "hf", **settings: Any) -> Order:
    chosen = ExportSettings(to=to, output_dir=Path("out/drafter"), **settings)
    return Order(settings=chosen, source=made, target="org/target", output_path="out/drafter")


def make_sketch(kind: str, drafter: Any, model: ModelConfig = TARGET) -> Any:
    """A source without a file."""
    return SimpleNamespace(kind=kind, drafter=drafter, model=model, tensors={}, left_out={})


# ---- Names and rows.


def list_rows(name: str, local_name: str, model: Any) -> dict[str, list[int] | None]:
    named = name_layer(name, local_name, model)
    return {
        hf_name: None if rows.rows is None else rows.rows.tolist()
        for hf_name, rows in named
        if rows.name == name
    }


def test_rows_of_queries_keys_and_values() -> None:
    """Heads of 2: four of queries, two of keys, two of values; gates stand after their queries."""
    name, local_name = "a.qkv.weight", "layers.3.attention.qkv.weight"
    assert list_rows(name, local_name, TARGET) == {
        "layers.3.self_attn.q_proj.weight": [0, 1, 2, 3, 4, 5, 6, 7],
        "layers.3.self_attn.k_proj.weight": [8, 9, 10, 11],
        "layers.3.self_attn.v_proj.weight": [12, 13, 14, 15],
    }
    gated = SimpleNamespace(
        num_attention_heads=2, num_key_value_heads=1, head_size=2, query_parts=2
    )
    assert list_rows(name, local_name, gated) == {
        "layers.3.self_attn.q_proj.weight": [0, 1, 8, 9, 2, 3, 10, 11],
        "layers.3.self_attn.k_proj.weight": [4, 5],
        "layers.3.self_attn.v_proj.weight": [6, 7],
    }


def test_other_modules_of_a_layer() -> None:
    for module, hf_module in {
        "mlp.fc": "mlp.gate_proj", "mlp.gate": "mlp.up_proj", "mlp.proj": "mlp.down_proj",
        "attention.dense": "self_attn.o_proj", "post_layernorm": "post_attention_layernorm",
    }.items():  # fmt: skip
        expected = {f"layers.0.{hf_module}.bias": None}
        assert list_rows("a", f"layers.0.{module}.bias", TARGET) == expected
    with pytest.raises(SpecDecError, match="transformer.layers.0.mlp.router.weight has no name"):
        name_layer("transformer.layers.0.mlp.router.weight", "layers.0.mlp.router.weight", TARGET)


def test_tensors_of_heads_and_of_a_model(tmp_path: Path) -> None:
    rows = np.arange(128, dtype=np.float32).reshape(16, 8)
    made = make_source(HEADS, {"medusa_heads.0.lm_head.weight": rows}, tmp_path)
    assert made.kind == "medusa"
    assert {name: rows.name for name, rows in made.tensors.items() if name[0] == "1"} == {
        **{f"1.{layer}.linear.{kind}": f"medusa_heads.1.medusa_layers.{layer}.linear.{kind}"
           for layer in range(3) for kind in ("weight", "bias")},
        "1.3.weight": "medusa_heads.1.lm_head.weight",
    }  # fmt: skip
    drafter = ReDrafterParams(
        num_beams=2, draft_len_per_beam=4, num_layers=2, hidden_size=8, exit_dim=6, is_rnn=True,
        greedy_search=True,
    )  # fmt: skip
    made = make_source(drafter, {}, tmp_path)
    assert {"lm_head.0.linear.weight", "lm_head.1.linear.weight", "lm_head.2.weight"} <= {
        *made.tensors
    }
    assert made.tensors["lm_head.2.weight"].name == "drafter.lm_head.weight"
    plain = make_source(None, {"transformer.layers.0.attention.qkv.weight": rows}, tmp_path)
    keys = plain.tensors["model.layers.0.self_attn.k_proj.weight"]
    np.testing.assert_array_equal(plain.read(keys), rows[8:12])
    assert plain.get_info(keys) == TensorInfo("float32", (4, 8))
    assert plain.tensors["model.norm.weight"] == TensorRows("transformer.ln_f.weight")
    with pytest.raises(SpecDecError, match="a GemmaForCausalLM is not exported"):
        make_source(None, {}, tmp_path, make_model(**SIZES, architecture="GemmaForCausalLM"))


def make_eagle_arrays(drafter: EagleParams) -> dict[str, Any]:
    shapes = {name: spec.shape for name, spec in drafter.list_tensors(TARGET).items()}
    shapes |= {"transformer.vocab_embedding.weight": (12, 8), "lm_head.weight": (12, 8)}
    return {name: np.full(shape, n, np.float32) for n, (name, shape) in enumerate(shapes.items())}


def test_what_equals_the_targets_is_left_out(tmp_path: Path) -> None:
    """Where a runtime takes it from there: of EAGLE-1 the head too, of EAGLE-3 not."""
    arrays = make_eagle_arrays(EAGLE1)
    prefix = "eagle_nets.0."
    made = make_source(EAGLE1, arrays, tmp_path)
    assert {"embed_tokens.weight", "lm_head.weight", "fc.weight", "fc.bias"} <= set(made.tensors)
    arrays[f"{prefix}drafter.vocab_embedding.weight"] = arrays["transformer.vocab_embedding.weight"]
    arrays[f"{prefix}lm_head.weight"] = arrays["lm_head.weight"]
    arrays[f"{prefix}drafter.fc.bias"][:] = 0
    made = make_source(EAGLE1, arrays, tmp_path)
    same = "equals the target's, which is taken"
    assert made.left_out == {
        "embed_tokens.weight": same, "lm_head.weight": same, "fc.bias": "is zero",
    }  # fmt: skip
    assert not made.left_out.keys() & made.tensors.keys()
    kept = made._find_needless({"lm_head.weight": TensorRows("lm_head.weight")}, shares_head=False)
    assert kept == {}


def test_copies_of_a_net_are_one_or_refused(tmp_path: Path) -> None:
    drafter = dataclasses.replace(EAGLE1, num_eagle_layers=2)
    arrays = make_eagle_arrays(drafter)
    for name in arrays:
        if name.startswith("eagle_nets.1."):
            arrays[name] = arrays[name.replace("nets.1", "nets.0")].copy()
    made = make_source(drafter, arrays, tmp_path)
    assert all(rows.name.startswith("eagle_nets.0.") for rows in made.tensors.values())
    arrays["eagle_nets.1.drafter.fc.weight"][0, 0] += 1
    with pytest.raises(SpecDecError, match="eagle_nets.1.drafter.fc.weight differs from"):
        make_source(drafter, arrays, tmp_path)


def test_a_mask_of_the_drafted_tokens(tmp_path: Path) -> None:
    """Draft token n is the target's n + d2t[n]."""
    arrays = make_eagle_arrays(EAGLE3)
    arrays["eagle_nets.0.d2t"] = np.array([1, 1, 3, 3, 7], np.int64)
    made = make_source(EAGLE3, arrays, tmp_path)
    tensors = make_order(made).list_tensors()
    mask = made.read(tensors["t2d"])
    assert np.flatnonzero(mask).tolist() == [1, 2, 5, 6, 11]
    assert made.get_info(tensors["t2d"]) == TensorInfo("bool", (12,))
    assert source.list_entered(PARAMS) == [1, 3]


def test_how_many_tokens_a_step_drafts() -> None:
    for drafter, number in (
        (HEADS, 2), (EAGLE1, source.DEFAULT_DRAFT_TOKENS), (DFLASH, 4),
        (dataclasses.replace(DFLASH, sample_from_anchor=True), 5), (PARALLEL, source.MASK_DEPTH),
        (dataclasses.replace(PARALLEL, num_eagle_layers=6), 6),
    ):  # fmt: skip
        assert make_order(make_sketch("kind", drafter)).num_draft_tokens == number
        asked = make_order(make_sketch("kind", drafter), num_draft_tokens=8)
        assert asked.num_draft_tokens == 8


# ---- config.json.


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"architecture": "LlamaForCausalLM", "attn_bias": True, "share_embedding_table": True,
         "rotary_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"architecture": "MistralForCausalLM"},
        {"architecture": "MistralForCausalLM", "sliding_window": 5},
        {"architecture": "Qwen2ForCausalLM", "sliding_window": 5},
        {"architecture": "Qwen3ForCausalLM", "num_hidden_layers": 3, "sliding_window": 5,
         "layer_types": ("full_attention", "sliding_attention", "sliding_attention")},
    ],
)  # fmt: skip
def test_transformers_reads_the_sizes_that_are_written(changes: dict[str, Any]) -> None:
    from transformers import AutoConfig

    net = make_model(**SIZES | {"max_position_embeddings": 64, "rotary_base": 5e3} | changes)
    config = layouts.describe_net(net, "bfloat16", "SomeClass")
    read = AutoConfig.for_model(**config)
    for name, value in {
        "hidden_size": 8, "intermediate_size": 6, "num_attention_heads": 4, "vocab_size": 12,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
        "num_hidden_layers": net.num_hidden_layers, "tie_word_embeddings":
        net.share_embedding_table, "architectures": ["SomeClass"],
    }.items():  # fmt: skip
        assert getattr(read, name) == value, name
    parameters = getattr(read, "rope_parameters", None) or {"rope_theta": read.rope_theta}
    assert parameters["rope_theta"] == 5e3
    assert parameters.get("factor", 1.0) == (net.rotary_scaling or {}).get("factor", 1.0)
    if net.architecture == "LlamaForCausalLM":
        assert read.attention_bias is net.attn_bias
    assert getattr(read, "sliding_window", None) == net.sliding_window
    if net.architecture.startswith("Qwen"):
        kinds = net.layer_types or ("sliding_attention",) * net.num_hidden_layers
        assert read.layer_types == list(kinds)


def test_fields_of_dflash_and_of_eagle3() -> None:
    order = make_order(
        make_sketch("dflash", DFLASH, make_model(**SIZES | {"num_hidden_layers": 9}))
    )
    config = layouts.describe_dflash(order, "Some")
    assert {name: config[name] for name in (
        "is_causal", "num_target_layers", "block_size", "draft_vocab_size", "layer_types"
    )} == {
        "is_causal": False, "num_target_layers": 9, "block_size": 5, "draft_vocab_size": 12,
        "layer_types": ["full_attention"],
    }  # fmt: skip
    assert layouts.describe_reading(DFLASH) == {"mask_token_id": 7, "target_layer_ids": [1, 3]}
    windowed = dataclasses.replace(
        DFLASH, markov_rank=6,
        net=dataclasses.replace(DFLASH.net, sliding_window=4, embedding_multiplier=2.5),
    )  # fmt: skip
    kinds = layouts.describe_dflash_net(windowed, "float32", "Some")["layer_types"]
    assert kinds == ["sliding_attention"]
    assert layouts.describe_reading(windowed)["input_embedding_scale"] == 2.5
    assert layouts.describe_markov(windowed) == {
        "sample_from_anchor": False, "markov_rank": 6, "markov_head_type": "vanilla",
        "enable_confidence_head": False,
    }  # fmt: skip
    config = layouts.write_eagle3(make_order(make_sketch("eagle3", EAGLE3))).config
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2]
    assert (config["draft_vocab_size"], config["norm_before_residual"]) == (5, True)
    assert "parallel_drafting" not in config
    for label, key in (("1.2", "speculative_model_dir"), ("0.14", "speculative_model")):
        order = make_order(make_sketch("eagle3", EAGLE3), trtllm_version=label)
        text = layouts.write_eagle3_trtllm(order).texts["extra_llm_api_options.yaml"]
        assert yaml.safe_load(text) == {"speculative_config": {
            "decoding_type": "Eagle3", "max_draft_len": 3, key: "out/drafter",
            "eagle3_layers_to_capture": [0, 2],
        }}  # fmt: skip


# ---- Commands.


def read_command(kind: str, drafter: Any, to: str, **settings: Any) -> list[str]:
    return shlex.split(
        runtimes.make_command(make_order(make_sketch(kind, drafter), to, **settings))
    )


def test_commands_that_use_a_folder() -> None:
    words = read_command("medusa", HEADS, "vllm")
    assert words[:4] == ["vllm", "serve", "org/target", "--speculative-config"]
    assert json.loads(words[4]) == {
        "method": "medusa", "model": "out/drafter", "num_speculative_tokens": 2,
    }  # fmt: skip
    words = read_command("eagle3", EAGLE3, "sglang", num_draft_tokens=4)
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    assert options == {
        "--model-path": "org/target", "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": "out/drafter", "--speculative-num-steps": "4",
        "--speculative-eagle-topk": "1", "--speculative-num-draft-tokens": "5",
    }  # fmt: skip
    assert "--speculative-num-steps" not in read_command("dflash", DFLASH, "sglang")
    assert read_command("plain", None, "gguf") == [
        "llama-server",
        "--model",
        "out/drafter/model.gguf",
    ]
    words = read_command("eagle3", EAGLE3, "gguf")
    assert words[words.index("--spec-draft-n-max") + 1] == "3"
    assert words[words.index("--spec-type") + 1] == "draft-eagle3"
    words = read_command("mtp", None, "vllm")
    assert words[2] == "out/drafter", "the head is in its target's folder"
    assert json.loads(words[-1]) == {"method": "mtp", "num_speculative_tokens": 3}
    assert "--mtp-model-dir" in read_command("mtp", None, "hf")
    redrafter = SimpleNamespace()
    words = read_command("redrafter", redrafter, "vllm")
    assert words[:4] == ["PYTHONPATH=out/drafter", "vllm", "serve", "org/target"]
    assert words[4] == "--enforce-eager"
    assert json.loads(words[-1])["method"] == "custom_class"
    assert json.loads(read_command("eagle3", PARALLEL, "vllm")[-1])["parallel_drafting"] is True
    spark = dataclasses.replace(DFLASH, markov_rank=4)
    assert json.loads(read_command("dflash", spark, "vllm")[-1])["method"] == "dspark"


# ---- GGUF.


def test_names_of_a_gguf_file() -> None:
    net = make_model(**SIZES)
    for name, gguf_name in {
        "model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight",
        "model.layers.10.self_attn.q_proj.weight": "blk.10.attn_q.weight",
        "layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        "layers.0.self_attn.q_proj.bias": "blk.0.attn_q.bias", "d2t": "d2t",
        "mtp.fc.weight": "blk.0.nextn.eh_proj.weight",
        "mtp.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    }.items():  # fmt: skip
        assert gguf_writer.rename(name, net) == gguf_name
    with pytest.raises(SpecDecError, match="fc_norm.0.weight has no name in a GGUF file"):
        gguf_writer.rename("fc_norm.0.weight", net)


def test_divisors_of_rotary_frequencies() -> None:
    assert gguf_writer.plan_rotary(TARGET) is None
    linear = make_model(**SIZES, rotary_scaling={"rope_type": "linear", "factor": 4.0})
    factors = gguf_writer.plan_rotary(linear)
    np.testing.assert_allclose(factors, [4.0], rtol=1e-6)
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    net = make_model(**SIZES | {"head_size": 32}, rotary_scaling=scaling, rotary_base=1e4)
    # Llama 3: of frequencies whose waves are longer than 64 / 1 all is divided, of those shorter
    # than 64 / 4 nothing, and between the two in proportion to the waves that 64 tokens hold.
    waves = 2 * np.pi * 1e4 ** (np.arange(16) / 16)
    share = np.clip((64 / waves - 1.0) / (4.0 - 1.0), 0, 1)
    np.testing.assert_allclose(
        gguf_writer.plan_rotary(net), 1 / ((1 - share) / 8 + share), rtol=1e-4
    )
    with pytest.raises(SpecDecError, match="rotary scaling 'dynamic' is not written as GGUF"):
        gguf_writer.plan_rotary(
            make_model(**SIZES, rotary_scaling={"rope_type": "dynamic", "factor": 2.0})
        )


def test_queries_turn_in_pairs_as_llama_cpp_has_them(tmp_path: Path) -> None:
    """llama.cpp's own converter: reshape [heads, 2, half, ...] and swap the second and third."""
    model = make_model(**SIZES | {"head_size": 8})
    generator = np.random.default_rng(0)
    qkv = generator.normal(size=(64, 8)).astype(np.float32)
    norm = generator.normal(size=8).astype(np.float32)
    arrays = {"transformer.layers.0.attention.qkv.weight": qkv, "transformer.ln_f.weight": norm}
    made = make_source(None, arrays, tmp_path, model)
    order = make_order(made, "gguf")
    types = gguf.GGMLQuantizationType
    rows = made.tensors["model.layers.0.self_attn.k_proj.weight"]
    turned = gguf_writer.read_tensor(gguf, order, "blk.0.attn_k.weight", rows, types.F32)
    expected = qkv[32:48].reshape(2, 2, 4, 8).swapaxes(1, 2).reshape(16, 8)
    np.testing.assert_array_equal(turned, expected)
    values = made.tensors["model.layers.0.self_attn.v_proj.weight"]
    read = gguf_writer.read_tensor(gguf, order, "blk.0.attn_v.weight", values, types.F16)
    np.testing.assert_array_equal(read, qkv[48:].astype(np.float16))
    # Gemma's norms are one larger in a file; Qwen's queries keep their order.
    rows = made.tensors["model.norm.weight"]
    read = gguf_writer.read_tensor(gguf, order, "output_norm.weight", rows, types.F32)
    np.testing.assert_array_equal(read, norm)
    made.model = dataclasses.replace(model, architecture="GemmaForCausalLM")
    read = gguf_writer.read_tensor(gguf, order, "output_norm.weight", rows, types.F32)
    np.testing.assert_array_equal(read, norm + 1)
    made.model = dataclasses.replace(model, architecture="Qwen2ForCausalLM")
    rows = TensorRows("transformer.layers.0.attention.qkv.weight", np.arange(32))
    read = gguf_writer.read_tensor(gguf, order, "blk.0.attn_q.weight", rows, types.F32)
    np.testing.assert_array_equal(read, qkv[:32])


def test_types_and_sizes_that_are_announced(tmp_path: Path) -> None:
    arrays = {
        "matrix": np.ones((4, 32), np.float32), "vector": np.ones(5, np.float32),
        "offsets": np.array([2, 2, 5], np.int64),
    }  # fmt: skip
    model = make_model(**SIZES, rotary_scaling={"rope_type": "linear", "factor": 2.0})
    made = make_source(HEADS, arrays, tmp_path, model)
    made.kind = "plain"
    contents = Contents({}, {
        "output.weight": TensorRows("matrix"), "output_norm.weight": TensorRows("vector"),
        "d2t": TensorRows("offsets"),
    })  # fmt: skip
    announced: list[Any] = []
    writer = SimpleNamespace(add_tensor_info=lambda *given, raw_dtype: announced.append(
        (given[0], given[1], given[3], raw_dtype.name)
    ))  # fmt: skip
    planned = gguf_writer.plan_tensors(gguf, writer, make_order(made, "gguf"), contents, "Q8_0")
    assert announced == [
        ("rope_freqs.weight", (1,), 4, "F32"), ("d2t", (3,), 24, "I64"),
        ("output.weight", (4, 32), 4 * 34, "Q8_0"), ("output_norm.weight", (5,), 20, "F32"),
    ]  # fmt: skip
    assert [size for size, _ in planned] == [4, 24, 136, 20]
    assert planned[1][1]().tolist() == [2, 3, 7], "ids, not offsets"
    weights = gguf.quants.dequantize(planned[2][1](), gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_allclose(weights, 1, rtol=1e-3)
    gguf_writer.check_q8_rows({"a": (3, 64), "b": (7,)})
    with pytest.raises(SpecDecError, match="c has rows of 48 numbers"):
        gguf_writer.check_q8_rows({"a": (3, 64), "c": (64, 48)})


# ---- The class that vLLM loads.


def test_a_drafters_steps_by_hand() -> None:
    """Hidden states of 2, three tokens; the head reads the target's state and its own.

    The state is the sum of the tokens' embeddings: the head names the token after the last.
    """
    drafter = ReDrafter.__new__(ReDrafter)
    drafter.length = 4
    drafter.config = {"rnn": False, "num_draft_layers": 0}
    table = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-2.0, -1.0]])
    drafter.embedding = torch.nn.Embedding(3, 2, _weight=table)
    # Logits of tokens 0, 1, 2 by a state (s, t): t - s / 2 - 5 h, s, s + 2 t - 1.5.
    drafter.weights = {"lm_head.0.weight": torch.tensor(
        [[-5.0, 0.0, -0.5, 1.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 2.0]]
    ), "lm_head.0.bias": torch.tensor([0.0, 0.0, -1.5])}  # fmt: skip
    hidden = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    # From token 0, state (1, 0): (-5.5, 1, -0.5) is 1; (1, 1): (-4.5, 1, 1.5) is 2;
    # (-1, 0): (-4.5, -1, -2.5) is 1; (-1, 1): (-3.5, -1, -0.5) is 2. With h = -1 the first,
    # (4.5, 1, -0.5), is 0, and again until the sum is (4, 0): (3, 4, 2.5) is 1.
    assert drafter.draft(hidden, torch.tensor([0, 0])).tolist() == [[1, 2, 1, 2], [0, 0, 0, 1]]
    drafter.weights["input_proj.weight"] = torch.eye(4)
    drafter.weights["lm_head.0.linear.weight"] = torch.zeros(4, 4)
    drafter.weights["lm_head.1.weight"] = drafter.weights.pop("lm_head.0.weight")
    drafter.weights["lm_head.1.bias"] = drafter.weights.pop("lm_head.0.bias")
    drafter.config["num_draft_layers"] = 1
    assert drafter.draft(hidden, torch.tensor([0, 0])).tolist() == [[1, 2, 1, 2], [0, 0, 0, 1]]
    drafter.weights["rnn_w.weight"] = torch.eye(2)
    drafter.weights["rnn_u.weight"] = torch.zeros(2, 2)
    drafter.config["rnn"] = True
    # SiLU of the newest token's embedding alone: 0.73 where that is 1, -0.24 of -2, -0.27 of -1.
    # (0.73, 0) is 1, (0, 0.73) is 1 for h = 1: 0.0 beside -5 + 0.73 and -0.04.
    assert drafter.draft(hidden[:1], torch.tensor([0])).tolist() == [[1, 1, 1, 1]]


def test_drafts_belong_to_the_requests_that_have_new_tokens() -> None:
    drafter = ReDrafter.__new__(ReDrafter)
    drafter.step = None
    with pytest.raises(RuntimeError, match="no step of the target was seen"):
        drafter.propose([[1]], [1], None)
    asked: list[Any] = []

    def draft(hidden: Any, tokens: Any) -> Any:
        asked.append((hidden[:, 0].tolist(), tokens.tolist()))
        return torch.stack((tokens, tokens + 1), 1)

    drafter.draft = cast(Any, draft)
    # Three requests have 2, 3 and 1 tokens in the step; the second is amid its prompt. The first
    # wrote token 9 as its 6th, which follows position 4, the third two, the last as its 3rd.
    hidden = torch.arange(6.0)[:, None]
    drafter.step = (hidden, torch.tensor([3, 4, 0, 1, 2, 1]), torch.tensor([0, 2, 5, 6]))
    assert drafter.propose([[9], [], [5, 8]], [6, 3, 3], None) == [[9, 10], [], [8, 9]]
    assert asked == [([1.0, 5.0], [9, 8])]
    assert drafter.step is None
    drafter.step = (hidden, torch.tensor([3, 4, 0, 1, 2, 1]), torch.tensor([0, 2, 5, 6]))
    assert drafter.propose([[], [], []], [6, 3, 3], None) == [[], [], []]
