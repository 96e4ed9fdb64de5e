"""Messages between ranks, and rank 0's decoder, whose calls another decoder can follow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.decode.device_tokens import run_tokens
from specdec.decode.ranks import messages
from specdec.decode.ranks.leader import (
    LeadingCache,
    LeadingDecoder,
    open_decoder,
    pack_forward,
    unpack_forward,
)
from specdec.decode.ranks.messages import FRAME_BYTES, Message
from specdec.engine.decoder import Decoder
from specdec.engine.group import Group
from specdec.engine.kv_cache import KVCache
from specdec.engine.step import Step
from specdec.model.config import ModelConfig
from specdec.model.tensors import list_target_tensors
from tests.engine.models import make_model

MODEL = make_model(
    vocab_size=17, hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_size=4,
    intermediate_size=6, max_position_embeddings=64,
)  # fmt: skip


class Wire(Group):
    """A group of one rank, whose broadcasts are kept, and read again from the first on."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.sent: list[torch.Tensor] = []
        self.is_read = False

    def broadcast(self, x: torch.Tensor) -> None:
        if self.is_read:
            assert x.shape == self.sent[0].shape, "both sides know the size"
            x.copy_(self.sent.pop(0))
        else:
            self.sent.append(x.clone())

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, share: torch.Tensor) -> torch.Tensor:
        return share


class OneRank:
    """Takes the place of `Ranks`; notes the calls that the other ranks would get."""

    def __init__(self) -> None:
        self.group = Wire()
        self.calls: list[Message] = []
        self.owners: list[tuple[object, int]] = []
        self.num_entered = 0
        self._is_together = False

    def make_handle(self) -> int:
        return 10 + len(self.owners)

    def drop_with_owner(self, owner: object, handle: int) -> None:
        self.owners.append((owner, handle))

    def meet(self) -> None:
        self.group.sent.clear()

    def check_loaded(self) -> None:
        self.calls.append(Message("checked", {}))

    def tell(self, call: str, arrays: dict[str, Any], **values: Any) -> None:
        assert self._is_together
        self.calls.append(Message.decode(Message(call, values, arrays).encode()))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        self._is_together = True
        self.num_entered += 1
        yield
        self._is_together = False


def make_weights(model: ModelConfig) -> dict[str, torch.Tensor]:
    """Random weights under the names of an engine, whose gates and up projections are one."""
    generator, weights = torch.Generator().manual_seed(0), {}
    for name, spec in list_target_tensors(model).items():
        weights[name] = torch.randn(spec.shape, generator=generator) / 3
    for layer in range(model.num_hidden_layers):
        prefix = f"transformer.layers.{layer}.mlp."
        parts = [weights.pop(f"{prefix}{name}.weight") for name in ("fc", "gate")]
        weights[f"{prefix}gate_up.weight"] = torch.cat(parts)
    return weights


OPTIONS: dict[str, Any] = {"num_positions": 64, "device": torch.device("cpu"), "prepack": False}


@pytest.fixture
def ranks() -> OneRank:
    return OneRank()


@pytest.fixture
def leader(ranks: OneRank) -> LeadingDecoder:
    options = {**OPTIONS, "ranks": ranks, "group": ranks.group, "handle": 3}
    return LeadingDecoder(MODEL, make_weights(MODEL), **options)


def make_step(rows: list[int], starts: list[int], size: int, **changes: Any) -> Step:
    """A chain of tokens in each row."""
    tokens = np.arange(len(rows) * size).reshape(len(rows), size) % 17
    causal = np.tril(np.ones((size, size), np.bool_))
    return Step(
        rows=np.array(rows), tokens=tokens, positions=np.array(starts)[:, None] + np.arange(size),
        tree_mask=np.tile(causal, (len(rows), 1, 1)), **changes,
    )  # fmt: skip


def test_a_message_is_what_its_bytes_say() -> None:
    """Of any type and shape, and empty; what lies after it is ignored."""
    arrays = {
        "mask": np.array([[True, False]]), "none": np.zeros((0, 3), np.int64),
        "turned": np.arange(6, dtype=np.float32).reshape(2, 3).T, "one": np.array(7, np.uint8),
    }  # fmt: skip
    data = Message("forward", {"cache": 2, "names": ["a", "ü"]}, arrays).encode()
    num_bytes, header_size = np.frombuffer(data, np.int64, 2).tolist()
    assert num_bytes == len(data) == 16 + header_size + 2 + 0 + 24 + 1
    message = Message.decode(data + b"behind")
    assert (message.call, message.values) == ("forward", {"cache": 2, "names": ["a", "ü"]})
    assert message.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        assert message.arrays[name].dtype == array.dtype
        assert np.array_equal(message.arrays[name], array)
        assert message.arrays[name].shape == array.shape
        assert message.arrays[name].flags.writeable


@pytest.mark.parametrize("num_more_bytes", [-1, 0, 1, 5000])
def test_long_messages_are_two_broadcasts(num_more_bytes: int) -> None:
    empty = len(Message("x", {}, {"a": np.zeros(1000, np.uint8)}).encode()) - 1000
    array = np.arange(FRAME_BYTES - empty + num_more_bytes).astype(np.uint8)
    wire = Wire()
    messages.send(wire, Message("x", {}, {"a": array}))
    sizes = [FRAME_BYTES, num_more_bytes] if num_more_bytes > 0 else [FRAME_BYTES]
    assert [len(frame) for frame in wire.sent] == sizes
    wire.is_read = True
    message = messages.receive(wire)
    assert np.array_equal(message.arrays["a"], array)
    assert not wire.sent


def test_a_step_survives_its_message(leader: LeadingDecoder) -> None:
    """Every field that ranks read; a mask that begins with tokens of earlier steps."""
    cache = leader.make_cache(3, 8)
    assert isinstance(cache, LeadingCache)
    cache.past_lens[:], cache.rotary_starts[:] = (4, 5, 6), (0, 9, 0)
    mask = np.random.default_rng(1).random((2, 3, 5)) < 0.5
    step = make_step(
        [2, 0], [6, 4], 3, past=np.array([6, 3]), counts=np.array([3, 2]),
        certain_counts=np.array([1, 0]), earlier_positions=np.array([[4, 5], [2, 3]]),
    )  # fmt: skip
    object.__setattr__(step, "tree_mask", mask)
    follower = Decoder(MODEL, make_weights(MODEL), **OPTIONS).make_cache(3, 8)
    data = Message("forward", {}, pack_forward(step, cache)).encode()
    received = unpack_forward(Message.decode(data).arrays, follower)
    for name in ("rows", "tokens", "positions", "tree_mask", "past", "counts", "certain_counts",
                 "earlier_positions", "mask_positions"):  # fmt: skip
        assert np.array_equal(getattr(received, name), getattr(step, name)), name
    assert received.tree_mask.dtype == np.bool_
    assert follower.past_lens.tolist() == [4, 5, 6]
    assert follower.rotary_starts.tolist() == [0, 9, 0]
    plain = unpack_forward(pack_forward(make_step([0], [4], 2), cache), follower)
    assert plain.past is plain.counts is plain.certain_counts is plain.earlier_positions is None


def test_moves_are_repeated_in_their_order() -> None:
    """Each is a source row, a row, a start and positions; a later one reads what is moved."""
    sizes: dict[str, Any] = {
        "num_layers": 1, "num_rows": 2, "num_heads": 1, "num_positions": 6, "head_size": 1,
        "dtype": torch.float32, "device": torch.device("cpu"),
    }  # fmt: skip
    leader, follower = LeadingCache(**sizes), KVCache(**sizes)
    for cache in (leader, follower):
        cache.blocks.copy_(torch.arange(24.0).view(cache.blocks.shape))
        cache.past_lens[:] = 2
    leader.commit(0, [0, 2, 3])  # positions 2, 4 and 5 move to 2
    leader.copy_prefix(0, 1, 4)
    assert leader.moves == [0, 0, 2, 3, 2, 4, 5, 0, 1, 0, 4, 0, 1, 2, 3]
    unpack_forward(pack_forward(make_step([0], [5], 1), leader), follower)
    assert torch.equal(leader.blocks, follower.blocks)
    assert follower.past_lens.tolist() == leader.past_lens.tolist() == [5, 4]
    assert follower.blocks[0, 0, 1, 0, :4, 0].tolist() == [0, 1, 2, 4]


def test_every_call_can_be_followed(leader: LeadingDecoder, ranks: OneRank) -> None:
    """A decoder that is told of the calls alone comes to the same states and the same cache."""
    follower = Decoder(MODEL, make_weights(MODEL), **OPTIONS)
    cache = leader.make_cache(2, 8)
    hidden = leader.forward(make_step([0, 1], [0, 0], 3), cache)
    cache.commit(0, [0, 1, 2])
    cache.commit(1, [0, 2])
    second = leader.forward(make_step([1, 0], [2, 3], 2), cache)
    leader.forward(make_step([0], [3], 1), cache)
    logits = leader.compute_logits(second)
    embedded = leader.embed(torch.tensor([4, 9]), torch.tensor([0, 1]))
    assert [call.call for call in ranks.calls] == [
        "make_cache", "forward", "forward", "forward", "compute_logits", "embed",
    ]  # fmt: skip
    assert ranks.num_entered == 6
    assert ranks.owners == [(leader, 3), (cache, 11)]
    assert all(call.values["decoder"] == 3 for call in ranks.calls)
    sizes = ranks.calls[0].values
    assert sizes == {"decoder": 3, "cache": 11, "num_rows": 2, "num_positions": 8}
    copy = follower.make_cache(sizes["num_rows"], sizes["num_positions"])
    states = []
    for call in ranks.calls[1:4]:
        assert call.values["cache"] == 11
        states.append(follower.forward(unpack_forward(call.arrays, copy), copy))
    assert torch.equal(states[0], hidden)
    assert torch.equal(states[1], second)
    assert ranks.calls[3].arrays["moves"].size == 0, "moves are told once"
    assert torch.equal(copy.blocks, cache.blocks)
    assert ranks.calls[4].values["shape"] == [2, 2, 8]
    (sent,) = ranks.group.sent
    assert torch.equal(sent, second)
    assert torch.equal(logits, follower.compute_logits(sent))
    assert ranks.calls[5].arrays["tokens"].tolist() == [4, 9]
    assert torch.equal(embedded, follower.embed(torch.tensor([4, 9]), torch.tensor([0, 1])))


def test_a_decoder_is_opened_on_all_ranks(ranks: OneRank, tmp_path: Path) -> None:
    def make(kind: type, **options: Any) -> tuple[type, dict[str, Any]]:
        return kind, options

    kinds = Decoder, LeadingDecoder
    alone = open_decoder(None, tmp_path, torch.device("cpu"), kinds, make)
    assert alone == (Decoder, {})
    kind, options = open_decoder(ranks, tmp_path, torch.device("cpu"), kinds, make)  # type: ignore[arg-type]
    assert kind is LeadingDecoder
    assert options == {"group": ranks.group, "ranks": ranks, "handle": 10}
    assert [call.call for call in ranks.calls] == ["load", "checked"]
    assert ranks.calls[0].values == {"decoder": 10, "folder": str(tmp_path), "device": "cpu"}


def test_tokens_that_the_host_does_not_know() -> None:
    """A step of one token a row, after what is committed, then committed; other rows stay."""
    decoder = Decoder(MODEL, make_weights(MODEL), **OPTIONS)
    decoder.observed_layers = (0,)
    cache, again = decoder.make_cache(3, 8), decoder.make_cache(3, 8)
    for kept in (cache, again):
        decoder.forward(make_step([0, 1, 2], [0, 0, 0], 3), kept)
        kept.past_lens[:] = (3, 2, 1)
    rows = np.array([2, 0])
    states = run_tokens(decoder, cache, rows, torch.tensor([11, 5]))
    assert cache.past_lens.tolist() == [4, 2, 2]
    step = Step(
        rows=rows, tokens=np.array([[11], [5]]), positions=np.array([[1], [3]]),
        tree_mask=np.ones((2, 1, 1), np.bool_),
    )  # fmt: skip
    assert torch.equal(states.hidden, decoder.forward(step, again))
    assert states.layers is not None
    assert decoder.observed_outputs is not None
    assert torch.equal(states.layers, decoder.observed_outputs)
    assert torch.equal(cache.blocks, again.blocks)
