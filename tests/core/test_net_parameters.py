"""Parameters of drafters with layers of their own in a checkpoint, and chains of methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from specdec.errors import SpecDecError, UsageError
from specdec.methods.base import USE_ITS_DRAFTER
from specdec.methods.chain import ChainDraft, read_chain
from specdec.methods.dflash import DFlashDraft, DFlashParams, read_options
from specdec.methods.net import NetParams
from specdec.model.config import ModelConfig
from specdec.model.tensors import Shard
from tests.engine.models import make_model

NET = {
    "vocab_size": 50, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_size": 2, "intermediate_size": 10, "norm_epsilon": 1e-6,
    "max_position_embeddings": 64, "rotary_base": 1e4, "rotary_scaling": None,
    "hidden_act": "silu",
}  # fmt: skip
TARGET = make_model(vocab_size=50, hidden_size=12, num_attention_heads=2, num_key_value_heads=2)
DFLASH_NET = NET | {
    "attn_bias": False, "sliding_window": 4, "embedding_multiplier": 2.0,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
DFLASH = {
    "max_draft_len": 5,
    "dflash_net_config": DFLASH_NET,
    "dflash": {
        "aux_layers": [0, 1], "block_size": 4, "mask_token_id": 49, "draft_vocab_size": 50,
        "sample_from_anchor": False,
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params(NetParams):
    """The least that such a drafter is."""

    net: ModelConfig
    draft_vocab_size: int
    TITLE = "Toy"
    NET = "toy_net"


def read_params(**changes: Any) -> Params:
    net = Params.read_net({"toy_net": NET | changes, "dtype": "float16"})
    return Params(net=net, draft_vocab_size=20)


def test_layers_are_read_as_they_are_described() -> None:
    params = read_params()
    assert params.net.architecture == "LlamaForCausalLM"
    assert (params.net.dtype, params.net.head_size, params.net.norm_epsilon) == ("float16", 2, 1e-6)
    assert params.describe_net() == NET
    model = params.make_net_model(dataclasses.replace(TARGET, dtype="bfloat16", tp_size=2))
    assert (model.dtype, model.vocab_size, model.tp_size) == ("bfloat16", 20, 2)
    assert model.num_attention_heads == 6, "the drafter's, not the target's"


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"hidden_size": 0}, "toy_net.hidden_size is 0, not a whole number from 1 to"),
        ({"norm_epsilon": -1}, "toy_net.norm_epsilon is -1, not a positive number"),
        ({"num_key_value_heads": 4},
         "toy_net.num_key_value_heads is 4, not a divisor of toy_net.num_attention_heads=6"),
        ({"hidden_act": "gelu"}, "toy_net.hidden_act is 'gelu', not 'silu'"),
        ({"rotary_scaling": [1]}, r"toy_net.rotary_scaling is \[1\], not an object or null"),
    ],
)  # fmt: skip
def test_wrong_layers_are_refused(changes: dict[str, Any], fact: str) -> None:
    with pytest.raises(SpecDecError, match=fact):
        read_params(**changes)
    with pytest.raises(SpecDecError, match="toy_net is None, not an object"):
        Params.read_net({})


def test_sizes_that_are_not_the_target_s() -> None:
    params = read_params()
    ((fact, remedy),) = params.compare_sizes(vocab_size=51, hidden_size=12)
    assert fact == "the Toy drafter's vocab_size is 50, the target's 51"
    assert remedy == USE_ITS_DRAFTER


@pytest.mark.parametrize(
    ("tp_size", "uneven"),
    [(1, []), (2, ["num_key_value_heads=3"]), (6, ["intermediate_size=10"]),
     (4, ["num_attention_heads=6", "intermediate_size=10", "num_key_value_heads=3"])],
)  # fmt: skip
def test_sizes_that_do_not_split(tp_size: int, uneven: list[str]) -> None:
    """K/V heads are shared out, or each rank has a copy of one: 6 ranks have 3 heads twice."""
    from specdec.errors import Problems

    problems = read_params().add_uneven(Problems(), tp_size)
    assert [fact for fact, _ in problems] == [
        f"the Toy drafter's {', '.join(uneven)} do not split over tp_size={tp_size}"
    ] * bool(uneven)


def test_tensors_of_the_layers() -> None:
    """Shapes by hand: 6 query, 3 key and 3 value heads of 2; a reduced vocabulary has offsets."""
    tensors = read_params().list_net_tensors(TARGET, 24)
    shapes = {name: spec.shape for name, spec in tensors.items()}
    assert shapes["drafter.vocab_embedding.weight"] == (50, 12), "the target's vocabulary"
    assert shapes["drafter.fc.weight"] == (12, 24)
    assert shapes["drafter.layers.1.attention.qkv.weight"] == (24, 12)
    assert shapes["drafter.layers.0.mlp.proj.weight"] == (12, 10)
    assert shapes["drafter.ln_f.weight"] == (12,)
    assert shapes["lm_head.weight"] == (20, 12)
    assert shapes["d2t"] == (20,)
    assert "drafter.layers.2.attention.qkv.weight" not in shapes
    owner = tensors["drafter.layers.0.attention.qkv.weight"].owner
    assert owner is not None
    assert owner.num_attention_heads == 6, "by whose heads the rows are dealt"
    whole = dataclasses.replace(read_params(), draft_vocab_size=50)
    assert "d2t" not in whole.list_net_tensors(TARGET, 24)


def read_dflash(**changes: Any) -> DFlashParams:
    section: Any = DFLASH["dflash"]
    return DFlashParams.from_checkpoint(DFLASH | {"dflash": section | changes})


def test_dflash_is_written_as_it_was_read() -> None:
    assert read_dflash().to_checkpoint() == DFLASH
    assert read_dflash().aux_layers == (0, 1)
    assert read_dflash().net.layer_types == ("sliding_attention", "full_attention")
    assert read_dflash(markov_rank=8).to_checkpoint()["dflash"]["markov_rank"] == 8


def test_dflash_drafts_all_places_but_the_anchor_s() -> None:
    """A block of 4: the anchor's place drafts too where the network learned it so."""
    params = read_dflash()
    assert (params.num_positions, params.max_draft_depth, params.max_draft_tokens) == (3, 3, 5)
    anchored = read_dflash(sample_from_anchor=True)
    assert (anchored.num_positions, anchored.max_draft_depth) == (4, 4)
    assert dataclasses.replace(anchored, max_draft_len=2).max_draft_depth == 2
    assert read_dflash(sample_from_anchor=True, block_size=1).num_positions == 1
    with pytest.raises(SpecDecError, match="dflash.block_size is 1, not a whole number from 2 to"):
        read_dflash(block_size=1)


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"aux_layers": [1, 0]}, r"dflash.aux_layers is \[1, 0\], not a rising list of layers"),
        ({"block_size": 0}, "dflash.block_size is 0"),
        ({"depth": 3}, "unknown keys depth"),
        ({"sample_from_anchor": 1}, "dflash.sample_from_anchor is 1, not true or false"),
    ],
)
def test_wrong_dflash_is_refused(changes: dict[str, Any], fact: str) -> None:
    with pytest.raises(SpecDecError, match=fact):
        read_dflash(**changes)


def test_dflash_for_another_target() -> None:
    sizes = {"hidden_size": 12, "vocab_size": 50, "tp_size": 1}
    assert not read_dflash().find_problems(**sizes)
    params = read_dflash(mask_token_id=50, draft_vocab_size=51)
    assert [fact for fact, _ in params.find_problems(**sizes)] == [
        "the DFlash drafter's mask_token_id is 50, the target's vocab_size 50",
        "the DFlash drafter's draft_vocab_size is 51, the target's vocab_size 50",
    ]
    ((fact, _),) = params.find_problems(**sizes | {"vocab_size": 40})
    assert fact == "the DFlash drafter's vocab_size is 50, the target's 40", "which explains all"


def test_tensors_of_dflash() -> None:
    tensors = read_dflash().list_tensors(TARGET)
    assert {name.split(".")[0] for name in tensors} == {"dflash"}
    assert tensors["dflash.drafter.fc.weight"].shape == (12, 24), "two layers of the target"
    assert tensors["dflash.drafter.hidden_norm.weight"].shape == (12,)
    assert "dflash.markov.lm_head.weight" not in tensors
    dspark = read_dflash(markov_rank=8, draft_vocab_size=30).list_tensors(TARGET)
    assert dspark["dflash.markov.vocab_embedding.weight"].shape == (50, 8)
    assert dspark["dflash.markov.lm_head.weight"].shape == (30, 8)
    assert dspark["dflash.markov.lm_head.weight"].shard is Shard.VOCAB


def test_options_of_dflash() -> None:
    assert read_options(DFlashDraft()) is None
    options = DFlashDraft(dflash_top_k=3)
    assert read_options(options) is options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(ChainDraft):
    no_speculation: bool = False


NAMES: Mapping[str, int] = {"suffix": 1, "redrafter": 2, "prompt_lookup": 3}


@pytest.mark.parametrize(
    ("text", "chain"),
    [
        (None, None),
        ("suffix,redrafter", (("suffix",), ("redrafter",))),
        (" suffix + redrafter ", (("suffix", "redrafter"),)),
        ("suffix+redrafter,prompt_lookup", (("suffix", "redrafter"), ("prompt_lookup",))),
    ],
)
def test_chains(text: str | None, chain: object) -> None:
    assert read_chain(Settings(draft_chain=text), NAMES) == chain


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("suffix", "--draft-chain is 'suffix'$"),
        ("suffix,eagle", "--draft-chain is 'suffix,eagle': 'eagle' is no method that can be in a"),
        ("suffix,", "--draft-chain is 'suffix,': '' is no method"),
        ("suffix,redrafter+suffix", "'suffix,redrafter.suffix', with a method twice$"),
    ],
)
def test_chains_that_are_refused(text: str, fact: str) -> None:
    with pytest.raises(UsageError, match=fact):
        read_chain(Settings(draft_chain=text), NAMES)
    with pytest.raises(UsageError, match="--draft-chain has no effect with --no-speculation"):
        read_chain(Settings(draft_chain=text, no_speculation=True), NAMES)
