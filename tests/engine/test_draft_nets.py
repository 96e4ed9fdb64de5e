"""Networks of drafters by hand: one small layer whose attention and MLP are known numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.engine.dflash import DFlashNet
from specdec.engine.eagle import EagleNet, take_net
from specdec.engine.integers import take_tensors
from specdec.engine.mtp import MtpNet
from specdec.engine.step import Step
from specdec.methods.dflash import DFlashParams
from specdec.methods.eagle import Eagle3Params, EagleParams
from specdec.methods.mtp import MtpParams
from specdec.methods.net import NetParams
from specdec.model.config import ModelConfig
from tests.engine.models import make_model

# Query heads, K/V heads, and the size of each; of the target and of the drafters.
SIZES = {
    "vocab_size": 11, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_size": 2, "intermediate_size": 6, "max_position_embeddings": 32,
}  # fmt: skip
NUM_QUERY_ROWS = 4
TARGET = make_model(**SIZES)
OPTIONS: dict[str, Any] = {"num_positions": 32, "device": torch.device("cpu"), "prepack": False}


def draw_weights(params: NetParams, target: ModelConfig = TARGET) -> dict[str, Tensor]:
    """An engine's tensors, random; the drafter's MLPs yield zeros, its queries are zeros.

    So a token attends alike to all that it sees, and a layer adds its output matrix's product with
    the mean of their values.
    """
    generator = torch.Generator().manual_seed(5)
    shapes = {name: spec.shape for name, spec in params.list_tensors(target).items()}
    rows = target.vocab_size, target.hidden_size
    shapes |= {"transformer.vocab_embedding.weight": rows, "lm_head.weight": rows}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name, weight in weights.items():
        if name.endswith("mlp.proj.weight"):
            weight.zero_()
        if name.endswith("attention.qkv.weight"):
            weight[:NUM_QUERY_ROWS] = 0
    return weights


def take_drafter_tensors(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The drafter's tensors, without their prefix."""
    return {name[len(prefix) :]: w for name, w in weights.items() if name.startswith(prefix)}


def norm(x: Tensor, weight: Tensor, epsilon: float = 1e-5) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def take_values(weights: dict[str, Tensor], layer: str, x: Tensor) -> Tensor:
    """Compute what the layer adds for a mean [D] of what its attention reads."""
    values = weights[f"{layer}.attention.qkv.weight"][-SIZES["head_size"] :] @ x
    return weights[f"{layer}.attention.dense.weight"] @ torch.cat((values, values))  # both heads


def make_step(tokens: list[int], positions: list[int]) -> Step:
    """A step of one row, whose tokens see themselves alone."""
    size = len(tokens)
    return Step(
        rows=np.array([0]), tokens=np.array([tokens]), positions=np.array([positions]),
        tree_mask=np.eye(size, dtype=np.bool_)[None],
    )  # fmt: skip


def make_eagle(eagle3: Eagle3Params | None = None) -> EagleParams:
    return EagleParams(
        net=TARGET, num_eagle_layers=1, max_non_leaves_per_layer=2, max_draft_len=3, eagle3=eagle3
    )


def test_eagle_1_reads_the_embedding_before_the_feature() -> None:
    """`fc` of both makes the layer's input, which no norm changes; the head's scale is applied."""
    target = dataclasses.replace(TARGET, output_multiplier_scale=0.5)
    params = make_eagle()
    weights = draw_weights(params, target)
    net = EagleNet(params, weights, target, **OPTIONS)
    features = torch.randn(1, 2, 4, generator=torch.Generator().manual_seed(1))
    found = net.forward(make_step([3, 7], [0, 1]), features, net.decoder.make_cache(1, 8))
    embedding = weights["eagle_nets.0.drafter.vocab_embedding.weight"]
    for index, token in enumerate((3, 7)):
        pair = torch.cat((embedding[token], features[0, index]))
        x = weights["eagle_nets.0.drafter.fc.weight"] @ pair
        x = x + weights["eagle_nets.0.drafter.fc.bias"]
        wanted = x + take_values(weights, "eagle_nets.0.drafter.layers.0", x)
        torch.testing.assert_close(found[0, index], wanted)
        logits = weights["eagle_nets.0.lm_head.weight"] @ (0.5 * wanted)
        torch.testing.assert_close(net.compute_logits(found)[0, index], logits)
    assert net.make_features(features) is features


def test_eagle_1_has_blank_norms_and_the_engine_s_vocabulary() -> None:
    """Norms that it never applies are ones; a head of fewer rows is a smaller vocabulary."""
    params = make_eagle()
    weights = draw_weights(params)
    weights["eagle_nets.0.lm_head.weight"] = weights["eagle_nets.0.lm_head.weight"][:8]
    weights["eagle_nets.1.lm_head.weight"] = torch.zeros(2, 4)  # a net that is not the first
    shortened, found = take_net(params, weights)
    tensors = take_tensors(found)
    assert shortened.draft_vocab_size == 8
    assert tensors["drafter.ln_f.weight"].tolist() == [1, 1, 1, 1]
    assert tensors["drafter.layers.0.input_layernorm.weight"].tolist() == [1, 1, 1, 1]
    assert tensors["lm_head.weight"].shape == (8, 4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True, "norm_before_fc": True},
        {"fc_norm": True, "norm_output": True, "draft_vocab_size": 6, "mask_token_id": 2},
    ],
    ids=["EAGLE-3", "normed", "EAGLE-3.1, P-EAGLE"],
)
def test_eagle_3_reads_layers_and_norms_each_half(changes: dict[str, Any]) -> None:
    values: dict[str, Any] = {
        "aux_layers": (0, 2), "draft_vocab_size": 11, "norm_before_residual": False,
    }  # fmt: skip
    eagle3 = Eagle3Params(**values | changes)
    params = make_eagle(eagle3)
    weights = draw_weights(params)
    if eagle3.draft_vocab_size < 11:
        weights["eagle_nets.0.d2t"] = torch.tensor([0, 0, 1, 1, 4, 5])
    target = dataclasses.replace(TARGET, output_multiplier_scale=0.5)  # not of its own head
    net = EagleNet(params, weights, target, **OPTIONS)
    drafter = take_drafter_tensors(weights, "eagle_nets.0.")
    states = torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(2))

    def make_feature(state: Tensor) -> Tensor:
        if eagle3.norm_before_fc:
            state = norm(state, drafter["drafter.input_norm.weight"])
        if eagle3.fc_norm:
            halves = state[:4], state[4:]
            weight = "drafter.fc_norm.{}.weight"
            state = torch.cat([norm(h, drafter[weight.format(n)]) for n, h in enumerate(halves)])
        return drafter["drafter.fc.weight"] @ state

    features = net.make_features(states)
    torch.testing.assert_close(features[0], torch.stack([make_feature(s) for s in states[0]]))
    if eagle3.mask_token_id is None:
        assert net.mask_feature is None
    else:
        wanted = make_feature(drafter["drafter.mask_hidden"][0, 0])
        assert net.mask_feature is not None
        torch.testing.assert_close(net.mask_feature, wanted)
    found = net.forward(make_step([3, 7], [0, 1]), features, net.decoder.make_cache(1, 8))
    for index, token in enumerate((3, 7)):
        embedding, feature = drafter["drafter.vocab_embedding.weight"][token], features[0, index]
        normed = norm(feature, drafter["drafter.layers.0.hidden_norm.weight"])
        normed_embedding = norm(embedding, drafter["drafter.layers.0.input_layernorm.weight"])
        x = normed if eagle3.norm_before_residual else feature
        x = x + take_values(drafter, "drafter.layers.0", torch.cat((normed_embedding, normed)))
        output = norm(x, drafter["drafter.ln_f.weight"])
        torch.testing.assert_close(found[0, index], output if eagle3.norm_output else x)
        logits = drafter["lm_head.weight"] @ output
        scores, drafted = logits.log_softmax(-1).topk(3)
        tokens, token_scores = net.rank_tokens(found[:, index], 3)
        torch.testing.assert_close(token_scores[0], scores)
        offsets = drafter.get("d2t", torch.zeros(11, dtype=torch.int64))
        assert tokens[0].tolist() == [int(n + offsets[n]) for n in drafted]


@pytest.mark.parametrize("is_reversed", [False, True])
def test_mtp_norms_an_embedding_and_a_state(is_reversed: bool) -> None:
    """MiMo's `fc` reads the state first, and zeros for the embedding of the first pair."""
    params = MtpParams(max_draft_len=2, is_reversed=is_reversed)
    weights = draw_weights(params)
    weights["mtp.lm_head.weight"] = weights["mtp.lm_head.weight"][:9]
    net = MtpNet(params, weights, TARGET, **OPTIONS)
    states = torch.randn(1, 2, 4, generator=torch.Generator().manual_seed(3))
    found = net.forward(make_step([3, 7], [0, 1]), states, net.decoder.make_cache(1, 8))
    drafter = take_drafter_tensors(weights, "mtp.")
    for index, token in enumerate((3, 7)):
        embedding = drafter["drafter.vocab_embedding.weight"][token]
        if is_reversed and index == 0:
            embedding = torch.zeros(4)
        pair = [
            norm(embedding, drafter["drafter.embedding_norm.weight"]),
            norm(states[0, index], drafter["drafter.hidden_norm.weight"]),
        ]
        x = drafter["drafter.fc.weight"] @ torch.cat(pair[::-1] if is_reversed else pair)
        read = norm(x, drafter["drafter.layers.0.input_layernorm.weight"])
        x = x + take_values(drafter, "drafter.layers.0", read)
        torch.testing.assert_close(found[0, index], norm(x, drafter["drafter.ln_f.weight"]))
    assert net.compute_logits(found).shape == (1, 2, 9), "the engine's head, not the checkpoint's"
    assert net.decoder.model.vocab_size == 9


def make_dflash(**changes: Any) -> DFlashParams:
    fields = {f.name: getattr(TARGET, f.name) for f in dataclasses.fields(TARGET)}
    fields |= {"architecture": "Qwen3ForCausalLM", "num_hidden_layers": 2, "attn_bias": True}
    values: dict[str, Any] = {
        "net": ModelConfig(**fields), "aux_layers": (1,), "block_size": 3, "mask_token_id": 10,
        "draft_vocab_size": 11, "max_draft_len": 5, "sample_from_anchor": False,
    }  # fmt: skip
    return DFlashParams(**values | changes)


def rotate_pair(x: Tensor, position: int) -> Tensor:
    """A key of two numbers, turned by one radian a position."""
    turned = complex(*x.tolist()) * np.exp(1j * position)
    return torch.tensor([turned.real, turned.imag], dtype=torch.float32)


def test_dflash_writes_keys_and_values_of_the_context() -> None:
    """Each layer has its own rows of one product; only keys are normed and turned."""
    params = make_dflash()
    weights = draw_weights(params)
    net = DFlashNet(params, weights, TARGET, **OPTIONS)
    cache, before = net.decoder.make_cache(2, 8), net.decoder.make_cache(2, 8).blocks
    states = torch.randn(2, 4, generator=torch.Generator().manual_seed(4))
    net.write_context(cache, torch.tensor([1, 0]), torch.tensor([5, 2]), states)
    for state, row, position in zip(states, (1, 0), (5, 2), strict=True):
        read = norm(
            weights["dflash.drafter.fc.weight"] @ state,
            weights["dflash.drafter.hidden_norm.weight"],
        )
        for layer in range(2):
            prefix = f"dflash.drafter.layers.{layer}.attention."
            projected = weights[f"{prefix}qkv.weight"] @ read + weights[f"{prefix}qkv.bias"]
            key, value = projected[4:6], projected[6:8]
            key = rotate_pair(norm(key, weights[f"{prefix}k_layernorm.weight"]), position)
            torch.testing.assert_close(cache.blocks[layer, 0, row, 0, position], key)
            torch.testing.assert_close(cache.blocks[layer, 1, row, 0, position], value)
            before[layer, :, row, 0, position] = cache.blocks[layer, :, row, 0, position]
    assert torch.equal(cache.blocks, before), "nothing else is written"


@pytest.mark.parametrize("samples_anchor", [False, True])
def test_dflash_blocks_see_their_context_and_all_of_themselves(samples_anchor: bool) -> None:
    """Queries of zeros: each place adds the mean of the values of context and block."""
    params = make_dflash(sample_from_anchor=samples_anchor)
    params = dataclasses.replace(
        params, net=dataclasses.replace(params.net, num_hidden_layers=1, attn_bias=False)
    )
    weights = draw_weights(params)
    net = DFlashNet(params, weights, TARGET, **OPTIONS)
    cache = net.decoder.make_cache(1, 8)
    values = torch.tensor([[1.0, 2.0], [3.0, -4.0]])
    cache.blocks[0, 1, 0, 0, :2] = values
    cache.fill(2)
    found = net.run_blocks(cache, np.array([0]), np.array([4]))
    drafter = take_drafter_tensors(weights, "dflash.")
    x = drafter["drafter.vocab_embedding.weight"][[4, 10, 10]]
    prefix = "drafter.layers.0."
    read = norm(x, drafter[f"{prefix}input_layernorm.weight"])
    block_values = read @ drafter[f"{prefix}attention.qkv.weight"][6:].T
    mean = torch.cat((values, block_values)).mean(0)
    x = x + drafter[f"{prefix}attention.dense.weight"] @ torch.cat((mean, mean))
    wanted = norm(x, drafter["drafter.ln_f.weight"])
    assert params.num_positions == (3 if samples_anchor else 2)
    torch.testing.assert_close(found[0], wanted if samples_anchor else wanted[1:])


def test_dspark_adds_what_the_token_before_makes_likely() -> None:
    params = make_dflash(markov_rank=3, draft_vocab_size=7)
    weights = draw_weights(params)
    weights["dflash.d2t"] = torch.tensor([0, 0, 0, 0, 2, 2, 4])
    net = DFlashNet(params, weights, TARGET, **OPTIONS)
    logits = torch.randn(1, 7, generator=torch.Generator().manual_seed(6))
    tokens, scores = net.rank_after(logits, np.array([[9, 0]]), 2)
    for index, token in enumerate((9, 0)):
        row = weights["dflash.markov.vocab_embedding.weight"][token]
        summed = logits[0] + weights["dflash.markov.lm_head.weight"] @ row
        best = summed.log_softmax(-1).topk(2)
        torch.testing.assert_close(scores[0, index], best.values)
        names = [0, 1, 2, 3, 6, 7, 10]  # of drafted tokens, by the offsets
        assert tokens[0, index].tolist() == [names[n] for n in best.indices]
