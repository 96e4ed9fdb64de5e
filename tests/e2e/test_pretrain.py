"""How the shipped models were made: prompts, and the loss that unteaches running in circles."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.pycode.make_prompts import cut_prompts
from examples.pycode.pretrain import LoopBreaker, mark_repeats


def test_a_repeated_ngram_is_marked_where_it_ends() -> None:
    #          1  2  3  4  1  2  3  4  5
    expected = [0, 0, 0, 0, 0, 0, 0, 1, 0]
    assert mark_repeats([1, 2, 3, 4, 1, 2, 3, 4, 5]).int().tolist() == expected
    assert mark_repeats([7] * 6).int().tolist() == [0, 0, 0, 0, 1, 1]
    assert mark_repeats([7, 7]).int().tolist() == [0, 0]


def test_only_tokens_that_repeat_are_made_less_likely() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    rows = [([3, 4], [7] * 6), ([5, 6, 8], [1, 2, 3, 9])]  # the second repeats nothing
    breaker = LoopBreaker.__new__(LoopBreaker)
    breaker.model, breaker.rows = model, rows
    loss, num_looping = breaker.compute_loss(0, float32=True)
    assert num_looping == 1
    with torch.inference_mode():
        probs = model(torch.tensor([[3, 4, *[7] * 6]])).logits[0].softmax(-1)
    # The fifth and the sixth 7 are predicted by the places before them.
    expected = -torch.log1p(-probs[[5, 6], 7]).sum() / (breaker.NUM_ROWS * breaker.NUM_TOKENS)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    torch.autograd.backward(loss)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1000 * parameter.grad
    breaker.rows = rows
    assert breaker.compute_loss(0, float32=True)[0] < loss


def test_prompts_are_cut_at_top_level_or_at_methods() -> None:
    method = ["    def area(self):\n", *["        pass\n"] * 11]
    text = "".join(["class Shape:\n", *method, *["# end\n"] * 20])
    (top,) = cut_prompts("shape.py", text, 9)
    (inner,) = cut_prompts("shape.py", text, 9, is_inside=True)
    assert top.startswith("class Shape:\n    def area(self):\n")
    assert inner.startswith("    def area(self):\n        pass\n")
    assert (top.count("\n"), inner.count("\n")) == (9, 9)
