"""Drafts from outside of a TensorRT-LLM engine: our loop around its runner, on the double.

What the loop of TensorRT-LLM's own run.py gets wrong has a test here each, named after it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdec.errors import SpecDecError
from specdec.files.tensor_file import TensorFile
from tests.trtllm.worlds import (
    EXTERNAL,
    MAX_DRAFT,
    MAX_INPUT,
    PAGED,
    World,
    make_prompts,
)

GATHER = ("--gather-generation-logits",)


@pytest.fixture
def target(world: World) -> Path:
    return world.engine("target", world.checkpoint("plain"), *EXTERNAL)


@pytest.fixture
def draft(world: World) -> Path:
    return world.engine("draft", world.draft(), *PAGED)


def run_pair(
    world: World, target: Path, draft: Path, requests: list[dict[str, Any]], **settings: Any
) -> Any:
    options = {"draft_len": "4", "draft_devices": "0", "target_devices": "1", **settings}
    return world.run(target, requests, draft_engine_dir=draft, **options)


def run_torch(world: World, requests: list[dict[str, Any]], **settings: Any) -> Any:
    """The same run on engines of torch."""
    target = world.torch_engine("target", world.checkpoint("plain"), *EXTERNAL[:4])
    draft = world.torch_engine("draft", world.draft())
    settings = {"draft_len": "4", "draft_engine_dir": draft, **settings}
    return world.run(target, requests, draft_budget="fixed", **settings)


def list_outputs(report: Any) -> list[Any]:
    """Texts, ends and statistics."""
    return [dict(output) for output in report["outputs"]]


def list_drafts(world: World) -> list[tuple[list[list[int]], list[list[int]]]]:
    """Prompts and drafts of every call with drafts."""
    calls = world.calls("generate")
    return [
        (entry["prompts"], entry["options"]["draft_tokens_list"])
        for entry in calls
        if entry["options"].get("draft_tokens_list")
    ]


def test_the_text_and_the_statistics_are_the_torch_engines(
    world: World, target: Path, draft: Path
) -> None:
    """More prompts than rows, of several lengths and limits; drafts are partly right.

    0.14's loop writes after a finished row to its place among the live ones, not to the request's.
    """
    limits = [2, 17, 30]
    limited = [
        request | {"max_output_len": limit}
        for request, limit in zip(make_prompts(4, 9, 23), limits, strict=True)
    ]
    report = run_pair(world, target, draft, limited)
    assert list_outputs(report) == list_outputs(run_torch(world, limited))
    assert [len(output["output_ids"]) for output in report["outputs"]] == limits
    requests = make_prompts(4, 9, 23, 5, 12)
    expected = run_torch(world, requests, max_output_len=24)
    report = run_pair(world, target, draft, requests, max_output_len=24)
    assert list_outputs(report) == list_outputs(expected)
    accepted = sum(output["stats"]["num_accepted"] for output in report["outputs"])
    drafted = sum(output["stats"]["num_draft_tokens"] for output in report["outputs"])
    assert 0 < accepted < drafted
    for key in ("method", "acceptance_length", "acceptance_rate", "num_verify_steps"):
        assert report["stats"][key] == expected["stats"][key], key
    assert report["stats"]["method"] == "draft_target"


def test_engines_are_led_from_one_process_each_on_its_devices(
    world: World, target: Path, draft: Path
) -> None:
    run_pair(world, target, draft, make_prompts(4), max_output_len=3)
    loaded = {Path(entry["engine_dir"]).name: entry["options"] for entry in world.calls("from_dir")}
    ours, theirs = loaded[target.name], loaded[draft.name]
    assert (ours["device_ids"], theirs["device_ids"]) == ([1], [0])
    assert ours["kv_cache_enable_block_reuse"] is theirs["kv_cache_enable_block_reuse"] is True
    is_orchestrated = world.label != "0.14"
    assert ours.get("is_orchestrator_mode", False) is is_orchestrated
    same: dict[str, Any] = {"draft_devices": "0", "target_devices": "0"}
    run_pair(
        world, target, draft, make_prompts(4), kv_cache_free_gpu_memory_fraction=0.4,
        max_output_len=3, **same,
    )  # fmt: skip
    refused: list[tuple[dict[str, Any], str]] = [
        (same, "share GPU 0, and each KV cache would take 0.9"),
        ({"draft_devices": "0,1"}, r"device list \[0, 1\] has 2 entries"),
        ({"draft_vocabulary": "shared"}, "--draft-vocabulary shared is for engines of torch"),
        ({"draft_tree_tokens": 4}, "--draft-tree-tokens is for engines of torch"),
    ]
    for settings, match in refused:
        with pytest.raises(SpecDecError, match=match):
            run_pair(world, target, draft, make_prompts(4), **settings)


def test_an_end_token_in_the_prompt_ends_nothing(world: World, target: Path, draft: Path) -> None:
    """0.14's loop looks for it in prompt and output."""
    requests = make_prompts(6, 9)
    end_id = requests[0]["input_ids"][2]
    whole = run_torch(world, requests, max_output_len=16, end_id=126)
    assert end_id not in whole["outputs"][0]["output_ids"]
    report = run_pair(world, target, draft, requests, max_output_len=16, end_id=end_id)
    assert report["outputs"][0]["output_ids"] == whole["outputs"][0]["output_ids"]
    assert report["outputs"][0]["finish_reason"] == "length"


@pytest.mark.thorough
@pytest.mark.parametrize("at", [0, 5, 6, 7, 8])
def test_an_end_token_anywhere_in_a_step_ends_the_output(
    world: World, target: Path, draft: Path, at: int
) -> None:
    requests = make_prompts(4, 9, 23)
    whole = run_torch(world, requests, max_output_len=16, end_id=126)
    end_id = whole["outputs"][1]["output_ids"][at]
    expected = run_torch(world, requests, max_output_len=16, end_id=end_id)
    report = run_pair(world, target, draft, requests, max_output_len=16, end_id=end_id)
    assert list_outputs(report) == list_outputs(expected)
    assert report["outputs"][1]["finish_reason"] == "eos"
    assert report["outputs"][1]["output_ids"][-1] == end_id


def test_stop_words_end_a_request(world: World, target: Path, draft: Path) -> None:
    """The original leaves them to each call, and goes on after them."""
    requests = make_prompts(4, 9)
    whole = run_torch(world, requests, max_output_len=16)
    stop = whole["outputs"][0]["output_text"][4:7]
    expected = run_torch(world, requests, max_output_len=16, stop_words=[stop])
    report = run_pair(world, target, draft, requests, max_output_len=16, stop_words=[stop])
    assert list_outputs(report) == list_outputs(expected)
    assert report["outputs"][0]["finish_reason"] == "stop"


def test_drafts_shrink_towards_the_end(world: World, target: Path, draft: Path) -> None:
    """The original drafts beyond the limit, and counts what it cuts."""
    report = run_pair(world, target, draft, make_prompts(4, 9), max_output_len=11)
    longest = {4: 4 + 11, 9: 9 + 11}
    starts = {tuple(output["input_ids"]): output for output in report["outputs"]}
    for prompts, drafts in list_drafts(world):
        for prompt, tokens in zip(prompts, drafts, strict=True):
            (length,) = [len(start) for start in starts if tuple(prompt[: len(start)]) == start]
            assert len(prompt) + len(tokens) + 1 <= longest[length]
    for output in report["outputs"]:
        assert len(output["output_ids"]) == 11


def test_engines_need_no_room_for_the_output_twice(world: World) -> None:
    """The original sizes its runners for prompt + 2 * output."""
    room = 20 + 30
    flags = ("--max-input-len", room, "--max-seq-len", room, "--max-num-tokens", 100)
    target = world.engine("tight-target", world.checkpoint("plain"), *EXTERNAL, *flags)
    draft_room = room + MAX_DRAFT
    draft = world.engine(
        "tight-draft", world.draft(), *PAGED, "--max-input-len", draft_room, "--max-seq-len",
        draft_room, "--max-num-tokens", 100,
    )  # fmt: skip
    requests = make_prompts(20, 7, max_output_len=30)
    expected = run_torch(world, requests)
    assert list_outputs(run_pair(world, target, draft, requests)) == list_outputs(expected)
    with pytest.raises(SpecDecError, match="max_seq_len is 50"):
        run_pair(world, target, draft, make_prompts(21, max_output_len=30))


def test_the_text_that_is_fed_back_must_fit_max_input_len(
    world: World, target: Path, draft: Path
) -> None:
    """The runtime refuses a longer prompt in the middle of the run, and cuts a longer draft."""
    requests = make_prompts(MAX_INPUT - 20, max_output_len=21)
    with pytest.raises(SpecDecError, match=f"grows to {MAX_INPUT + 1} tokens, which are fed back"):
        run_pair(world, target, draft, requests)
    requests = make_prompts(MAX_INPUT - 20, max_output_len=20)
    assert list_outputs(run_pair(world, target, draft, requests)) == list_outputs(
        run_torch(world, requests)
    )


def test_logits_belong_to_their_requests_in_whatever_order_they_complete(
    world: World, tmp_path: Path
) -> None:
    """1.x returns a list of logits in the order of completion, for rows of any length."""
    target = world.engine("gather-target", world.checkpoint("plain"), *EXTERNAL, *GATHER)
    draft = world.engine("gather-draft", world.draft(), *PAGED, *GATHER)
    requests = [
        request | {"max_output_len": limit}
        for request, limit in zip(make_prompts(4, 23, 9), [3, 12, 8], strict=True)
    ]
    settings: dict[str, Any] = {"output_generation_logits": True}
    expected = run_torch(world, requests, output_file=tmp_path / "torch.json", **settings)
    report = run_pair(
        world, target, draft, requests, output_file=tmp_path / "trtllm.json", **settings
    )
    assert list_outputs(report) == list_outputs(expected)
    theirs, ours = (TensorFile(Path(r["generation_logits"])) for r in (expected, report))
    for index, output in enumerate(report["outputs"]):
        rows = ours.read(f"output.{index}")
        assert rows.shape == (len(output["output_ids"]), 128)
        assert rows.argmax(-1).tolist() == output["output_ids"]
        assert abs(rows - theirs.read(f"output.{index}")).max() < 1e-3


def test_use_logits_needs_logits_of_both_engines(world: World, target: Path, draft: Path) -> None:
    with pytest.raises(SpecDecError) as caught:
        run_pair(world, target, draft, make_prompts(4), use_logits=True)
    assert str(target) in caught.value.message
    assert str(draft) in caught.value.message
    assert "--gather-generation-logits" in caught.value.hint
    gathering = world.engine("gather-target", world.checkpoint("plain"), *EXTERNAL, *GATHER)
    pair = world.engine("gather-draft", world.draft(), *PAGED, *GATHER)
    requests = make_prompts(4, 9, 23)
    report = run_pair(world, gathering, pair, requests, use_logits=True, max_output_len=14)
    with_drafts = [c for c in world.calls("generate") if c["options"].get("draft_tokens_list")]
    assert list_outputs(report) == list_outputs(run_torch(world, requests, max_output_len=14))
    assert with_drafts
    assert all(entry["options"]["draft_logits_list"] is True for entry in with_drafts)


def test_each_call_draws_random_numbers_of_its_own(world: World, target: Path, draft: Path) -> None:
    """With one seed, every call of the original draws the same numbers again."""
    settings: dict[str, Any] = {"temperature": "1", "random_seed": 9, "max_output_len": 14}
    report = run_pair(world, target, draft, make_prompts(4), **settings)
    seeds = [entry["options"]["random_seed"] for entry in world.calls("generate")]
    assert len(set(seeds)) == len(seeds) > 4
    again = run_pair(world, target, draft, make_prompts(4), **settings)
    assert list_outputs(again) == list_outputs(report)
    settings["random_seed"] = 10
    other = run_pair(world, target, draft, make_prompts(4), **settings)
    assert list_outputs(other) != list_outputs(report)


def test_prompt_lookup_drafts_from_the_text_and_never_an_empty_draft(
    world: World, target: Path
) -> None:
    """An empty draft is refused by the runtime; 1.x's loop drafts the end token instead."""
    requests = [
        {"input_ids": [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]},
        *make_prompts(9, 23, max_output_len=18),
    ]
    settings: dict[str, Any] = {"prompt_lookup_num_tokens": 4, "max_output_len": 24}
    engine = world.torch_engine("target", world.checkpoint("plain"), *EXTERNAL[:4])
    expected = world.run(engine, requests, draft_budget="fixed", **settings)
    report = world.run(target, requests, **settings)
    assert list_outputs(report) == list_outputs(expected)
    assert report["stats"]["method"] == "prompt_lookup"
    assert any(entry["options"].get("draft_tokens_list") is None for entry in
               world.calls("generate")[1:])  # fmt: skip


def test_without_speculation_an_engine_for_external_drafts_writes_whole_texts(
    world: World, target: Path
) -> None:
    """Such an engine ends every request after one step: a single call would write one token."""
    requests = make_prompts(4, 9, 23, 7)
    engine = world.torch_engine("plain", world.checkpoint("plain"))
    expected = world.run(engine, requests, max_output_len=12, no_speculation=True)
    report = world.run(target, requests, max_output_len=12, no_speculation=True)
    assert list_outputs(report) == list_outputs(expected)
    assert report["stats"]["method"] == "plain"


def test_streaming_and_profiling(world: World, target: Path, draft: Path) -> None:
    requests = make_prompts(4, 9, 23, 5)
    expected = run_pair(world, target, draft, requests, max_output_len=14)
    pieces: list[str] = []
    report = run_pair(
        world, target, draft, requests, max_output_len=14, streaming=True, run_profiling=True,
        write=pieces.append,
    )  # fmt: skip
    assert list_outputs(report) == list_outputs(expected)
    assert f'"{expected["outputs"][3]["output_text"]}"' in "".join(pieces)
    assert report["stats"]["profile_seconds"]["verify"] > 0


def test_automatic_draft_length(world: World, target: Path, draft: Path) -> None:
    requests = make_prompts(4, 9)
    report = run_pair(world, target, draft, requests, max_output_len=40, draft_len=None)
    assert list_drafts(world)
    expected = world.run(
        world.torch_engine("plain", world.checkpoint("plain")), requests, max_output_len=40
    )
    for ours, theirs in zip(report["outputs"], expected["outputs"], strict=True):
        assert ours["output_ids"] == theirs["output_ids"]


def test_pairs_that_do_not_fit_are_refused_together(
    world: World, target: Path, draft: Path
) -> None:
    unpaged = world.engine("unpaged-draft", world.draft(), "--use-paged-context-fmha", "disable")
    with pytest.raises(SpecDecError) as caught:
        run_pair(world, target, unpaged, make_prompts(4), draft_len="9")
    assert "the draft length is 9" in caught.value.message
    assert f"{unpaged} cannot reuse blocks" in caught.value.message
    with pytest.raises(SpecDecError) as caught:
        run_pair(world, draft, target, make_prompts(4))
    assert "built with speculative_decoding_mode None" in caught.value.message
    assert "built with speculative_decoding_mode draft_tokens_external" in caught.value.message
    with pytest.raises(SpecDecError, match="and nothing drafts"):
        world.run(target, make_prompts(4))
    assert not world.calls("from_dir")


def test_answers_that_are_not_a_steps_are_an_error() -> None:
    """What the runtime emits is the agreeing part of the draft and one token more."""
    from specdec.run.backends.tensorrt_external import check_step

    check_step(0, [5, 6, 7], [5, 6, 9])
    check_step(0, [5, 6, 7], [5, 6, 7, 8])
    check_step(0, [], [4])
    for emitted in ([], [5, 6, 7, 8, 9]):
        with pytest.raises(SpecDecError, match="one to 4 were expected"):
            check_step(3, [5, 6, 7], emitted)
    with pytest.raises(SpecDecError, match="does not begin as the draft"):
        check_step(3, [5, 6, 7], [5, 9, 7])
