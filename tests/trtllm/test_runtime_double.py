"""The runtime's double refuses what it must, and above all what the real one ignores or cuts."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trtllm.double import Refusal
from tests.trtllm.runtime_double import free_memory
from tests.trtllm.worlds import (
    EXTERNAL,
    LOOKAHEAD,
    MAX_INPUT,
    MAX_TOTAL,
    PAGED,
    World,
    make_world,
)

TREE = [[0], [0, 0], [0, 0, 0]]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"rank": 0},
    "redrafter": {"rank": 0},
    "target": {"rank": 0, "kv_cache_enable_block_reuse": True},
    "medusa": {"rank": 0, "medusa_choices": TREE, "multi_block_mode": False},
    "eagle": {"rank": 0, "eagle_choices": TREE, "multi_block_mode": False},
    "lookahead": {"rank": 0, "lookahead_config": [3, 3, 3]},
}
CALL: dict[str, Any] = {
    "max_new_tokens": 2, "end_id": -1, "pad_id": 0, "return_dict": True,
    "output_sequence_lengths": True, "num_beams": 1, "top_k": 1, "temperature": 1.0,
}  # fmt: skip
SAMPLED = {"top_k": 0, "top_p": 0.9, "temperature": 0.7, "random_seed": 3}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    yield from make_world(tmp_path_factory.mktemp("world"), "1.2")


def make_engine(world: World, name: str) -> Path:
    plain = world.checkpoint("plain")
    makers = {
        "plain": lambda: world.engine("plain", plain, *PAGED),
        "target": lambda: world.engine("target", plain, *EXTERNAL),
        "lookahead": lambda: world.engine("lookahead", plain, *LOOKAHEAD),
        "unpaged": lambda: world.engine("unpaged", plain, "--use-paged-context-fmha", "disable"),
        "redrafter": lambda: world.engine("redrafter", world.redrafter()),
        "medusa": lambda: world.engine("medusa", world.medusa()),
        "eagle": lambda: world.engine("eagle", world.eagle()),
    }
    return makers[name]()


def load(world: World, name: str, **options: Any) -> Any:
    free_memory()
    runner = importlib.import_module("tensorrt_llm.runtime").ModelRunnerCpp
    chosen = OPTIONS.get(name, {"rank": 0}) | options
    given = {key: value for key, value in chosen.items() if value is not None}
    return runner.from_dir(engine_dir=str(make_engine(world, name)), **given)


def generate(runner: Any, *prompts: list[int], **options: Any) -> Any:
    texts = [torch.tensor(prompt, dtype=torch.int32) for prompt in prompts or ([5, 6],)]
    return runner.generate(batch_input_ids=texts, **(CALL | options))


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("plain", {"eagle": 1}, "unexpected keyword"),
        ("plain", {"kv_cache_enable_block_reuse": "yes"}, "kv_cache_enable_block_reuse is 'yes'"),
        ("plain", {"kv_cache_free_gpu_memory_fraction": 1}, "fraction is 1"),
        ("plain", {"kv_cache_free_gpu_memory_fraction": 1.5}, "fraction"),
        ("plain", {"device_ids": (0,)}, "device_ids is"),
        ("unpaged", {"kv_cache_enable_block_reuse": True}, "turned off without paged"),
        ("plain", {"medusa_choices": TREE}, "choices"),
        ("plain", {"lookahead_config": [3, 3, 3]}, "lookahead"),
        ("plain", {"eagle_choices": TREE}, "without EAGLE"),
        ("target", {"kv_cache_enable_block_reuse": False}, "block reuse must be enabled"),
        ("medusa", {"medusa_choices": None}, "choices"),
        ("medusa", {"multi_block_mode": None}, "multi-block mode stays on"),
        ("medusa", {"medusa_choices": [[0], [1, 0]]}, "without its parent"),
        ("medusa", {"medusa_choices": [[0], [0]]}, "twice"),
        ("medusa", {"medusa_choices": [[n] for n in range(7)]}, "more paths than max_draft_len"),
        ("medusa", {"medusa_choices": [[0] * n for n in range(1, 5)]}, "deeper"),
        ("lookahead", {"lookahead_config": [3, 3]}, "list of three"),
        ("lookahead", {"lookahead_config": [5, 5, 5]}, "40 != 12"),
        ("lookahead", {"lookahead_config": [2, 2, 2]}, "4 != 12"),
        ("eagle", {"eagle_choices": None}, "a default tree, four deep"),
        ("eagle", {"eagle_choices": [[0], [0, 0]]}, "the depth of the engine"),
        ("eagle", {"eagle_choices": [*TREE, *([n] for n in range(1, 6)),
                                     *([n, 0] for n in range(1, 5))]}, "more paths|non leaf"),
        ("eagle", {"eagle_use_dynamic_tree": True}, "dropped beside a dynamic tree"),
        ("eagle", {"eagle_choices": None, "eagle_use_dynamic_tree": True}, "max_top_k > 0"),
        ("eagle", {"eagle_choices": None, "eagle_use_dynamic_tree": True,
                   "eagle_dynamic_tree_max_top_k": 5}, "wider than the engine"),
        ("eagle", {"eagle_posterior_threshold": 0.1}, "typical acceptance"),
        ("eagle", {"multi_block_mode": True}, "multi-block mode stays on"),
    ],
)  # fmt: skip
def test_loading_that_would_be_bent(
    world: World, name: str, options: dict[str, Any], match: str
) -> None:
    with pytest.raises((Refusal, TypeError, RuntimeError), match=match):
        load(world, name, **options)


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("plain", {"redrafter_temperature": 0.5}, "ignored in silence"),
        ("plain", {"medusa_choices": TREE}, "ignored in silence"),
        ("plain", {"num_beams": 2}, "beams"),
        ("plain", {"top_k": [1, 1]}, "one number a call"),
        ("plain", {"top_k": 2000}, "cut to 1024"),
        ("plain", {"temperature": [0.5, 0.7]}, "one temperature a call"),
        ("plain", {"random_seed": 4}, "a seed without sampling"),
        ("plain", {"end_id": None}, "padded with end_id"),
        ("plain", {"pad_id": None}, "pad_id"),
        ("plain", {"streaming": 1}, "streaming is a bool"),
        ("plain", {"max_new_tokens": MAX_TOTAL}, "are cut to max_seq_len"),
        ("plain", {"stop_words_list": [["x"]]}, "token sequences"),
        ("plain", {"draft_tokens_list": [[5]]}, "takes none"),
        ("plain", {"draft_logits_list": [torch.zeros(1, 128)]}, "logits without drafts"),
        ("plain", {"output_generation_logits": True}, "not gathered"),
        ("plain", {"lookahead_config": [3, 3, 3]}, "of no use"),
        ("redrafter", SAMPLED, "the engine decides whether to sample"),
        ("redrafter", {"max_new_tokens": MAX_TOTAL - 1}, "are cut to max_seq_len"),
        ("medusa", SAMPLED, "temperature must be 1.0"),
        ("eagle", SAMPLED, "decodes greedily"),
        ("target", {"draft_tokens_list": [[]]}, "must not be empty"),
        ("target", {"draft_tokens_list": [[5], [6]]}, "cut to the shorter"),
        ("target", {"draft_tokens_list": [[5] * 6]}, "exceeds maximum draft tokens"),
        ("target", {"draft_tokens_list": [[5]], "draft_logits_list": [torch.zeros(1, 128)]},
         "without generation logits"),
    ],
)  # fmt: skip
def test_calls_that_would_be_bent(
    world: World, name: str, options: dict[str, Any], match: str
) -> None:
    runner = load(world, name)
    with pytest.raises((Refusal, RuntimeError), match=match):
        generate(runner, **options)


def test_prompts_that_are_refused_or_leave_no_room(world: World) -> None:
    runner = load(world, "plain")
    with pytest.raises(RuntimeError, match="exceeds maximum input length"):
        generate(runner, [5] * (MAX_INPUT + 1))
    with pytest.raises(RuntimeError, match="batch size"):
        generate(runner, *([[5, 6]] * 4))
    with pytest.raises(Refusal, match="int32"):
        runner.generate(batch_input_ids=[[5, 6]], **CALL)
    with pytest.raises(Refusal, match="the draft is cut to max_input_len"):
        generate(load(world, "target"), [5] * MAX_INPUT, draft_tokens_list=[[5]])


def test_two_engines_do_not_share_a_gpu_unless_told_how(world: World) -> None:
    load(world, "plain")
    runner = importlib.import_module("tensorrt_llm.runtime").ModelRunnerCpp
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        runner.from_dir(engine_dir=str(make_engine(world, "plain")), rank=0)


def test_the_executor_is_the_session(world: World) -> None:
    """As in 0.14 and 1.x; and a binding's object takes no attribute that it does not have."""
    runner = load(world, "plain")
    assert runner.session.can_enqueue_requests()
    assert not hasattr(runner, "executor")
    with pytest.raises(AttributeError):
        runner.session.decoding_iter = 1
