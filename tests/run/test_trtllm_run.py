"""specdec-run on TensorRT-LLM engines, by the runtime's double: texts as the torch engine's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import SpecDecError, UsageError
from specdec.files.reading import read_json, write_json
from specdec.files.tensor_file import TensorFile
from tests.trtllm.worlds import MAX_INPUT, MAX_TOTAL, PAGED, World, make_prompts

UNTOLD = {
    "num_drafted_steps", "num_draft_tokens", "num_accepted", "acceptance_rate",
    "accepted_histogram",
}  # fmt: skip
UNTOLD_STEPS = {"num_verify_steps", "acceptance_length"}  # results of 0.14 do not count steps


@pytest.fixture
def plain(world: World) -> Path:
    return ENGINES["plain"](world)


@pytest.fixture
def redrafter(world: World) -> Path:
    return ENGINES["redrafter"](world)


def list_texts(report: Any) -> list[Any]:
    keys = ("index", "input_ids", "output_ids", "output_text", "finish_reason")
    return [{key: output[key] for key in keys} for output in report["outputs"]]


@pytest.mark.thorough
def test_plain_engine_writes_what_the_torch_engine_writes(world: World, plain: Path) -> None:
    """Seven prompts for three rows, two of them with limits of their own."""
    requests = make_prompts(4, 9, 23, 5, 12) + make_prompts(6, 31, max_output_len=9)
    torch_engine = world.torch_engine("plain", world.checkpoint("plain"))
    expected = world.run(torch_engine, requests, max_output_len=20, no_speculation=True)
    report = world.run(plain, requests, max_output_len=20)
    assert list_texts(report) == list_texts(expected)
    assert [o["stats"] for o in report["outputs"]] == [o["stats"] for o in expected["outputs"]]
    stats = report["stats"]
    assert (stats["backend"], stats["method"], stats["device"]) == ("tensorrt-llm", "plain", "cuda")
    assert stats["acceptance_length"] == expected["stats"]["acceptance_length"] == 1
    sizes = [len(entry["prompts"]) for entry in world.calls("generate")]
    assert sorted(sizes) == [2, 2, 3]


@pytest.mark.thorough
def test_redrafter_engine_counts_steps_and_tells_what_it_cannot(
    world: World, redrafter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    requests = make_prompts(4, 17, 30)
    expected = world.run(
        world.torch_engine("redrafter", world.redrafter()), requests, draft_budget="fixed"
    )
    with caplog.at_level("INFO"):
        report = world.run(redrafter, requests)
    assert list_texts(report) == list_texts(expected)
    unknown = UNTOLD | (UNTOLD_STEPS if world.label == "0.14" else set())
    for ours, theirs in zip(report["outputs"], expected["outputs"], strict=True):
        for key, value in theirs["stats"].items():
            assert ours["stats"][key] == (None if key in unknown else value), key
    assert report["stats"]["method"] == "redrafter"
    length = expected["stats"]["acceptance_length"]
    assert report["stats"]["acceptance_length"] == (None if world.label == "0.14" else length)
    assert length > 1
    assert report["stats"]["acceptance_rate"] is None
    # A command that ran before may have taken the logger away.
    if any(record.name.startswith("specdec") for record in caplog.records):
        assert "does not tell acceptance_rate" in caplog.text


def test_steps_are_not_told_without_the_runtimes_count(
    world: World, redrafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.trtllm import runtime_double

    world.run(redrafter, make_prompts(4), max_output_len=3)
    monkeypatch.setitem(runtime_double.RESULTS, "1.2", runtime_double.ResultDouble)
    report = world.run(redrafter, make_prompts(4), max_output_len=12)
    stats = report["outputs"][0]["stats"]
    assert stats["num_output_tokens"] == 12
    assert stats["num_verify_steps"] is None
    assert report["stats"]["acceptance_length"] is None


@pytest.mark.thorough
@pytest.mark.parametrize("keeps_end", ["0", "1"])
def test_the_end_token_ends_the_output_whether_or_not_the_runtime_returns_it(
    world: World, plain: Path, redrafter: Path, monkeypatch: pytest.MonkeyPatch, keeps_end: str
) -> None:
    monkeypatch.setenv("SPECDEC_DOUBLE_KEEPS_END", keeps_end)
    requests = make_prompts(4, 9, 23)
    whole = world.run(plain, requests, max_output_len=20)
    end_id = whole["outputs"][0]["output_ids"][7]
    expected = world.run(
        world.torch_engine("plain", world.checkpoint("plain")), requests, max_output_len=20,
        end_id=end_id,
    )  # fmt: skip
    assert expected["outputs"][0]["finish_reason"] == "eos"
    for engine in (plain, redrafter):
        report = world.run(engine, requests, max_output_len=20, end_id=end_id)
        assert list_texts(report) == list_texts(expected)
        for output in report["outputs"]:
            assert output["stats"]["num_output_tokens"] == len(output["output_ids"])


def test_stop_words_are_cut_off_and_end_the_runtimes_work(world: World, plain: Path) -> None:
    requests = make_prompts(4, 9, 23)
    whole = world.run(plain, requests, max_output_len=20)
    stop = whole["outputs"][0]["output_text"][3:6]
    torch_engine = world.torch_engine("plain", world.checkpoint("plain"))
    expected = world.run(torch_engine, requests, max_output_len=20, stop_words=[stop])
    report = world.run(plain, requests, max_output_len=20, stop_words=[stop])
    assert list_texts(report) == list_texts(expected)
    assert report["outputs"][0]["finish_reason"] == "stop"
    assert world.calls("generate")[0]["options"]["stop_words_list"]


@pytest.mark.thorough
def test_streaming_writes_the_same_text(world: World, plain: Path, redrafter: Path) -> None:
    for engine in (plain, redrafter):
        requests = make_prompts(4, 9, 23, 7)
        expected = world.run(engine, requests, max_output_len=18)
        pieces: list[str] = []
        report = world.run(engine, requests, pieces.append, max_output_len=18, streaming=True)
        assert list_texts(report) == list_texts(expected)
        assert [o["stats"] for o in report["outputs"]] == [o["stats"] for o in expected["outputs"]]
        text = "".join(pieces)
        for output in expected["outputs"]:
            shown = f'Output [Text {output["index"]} Beam 0]: "{output["output_text"]}"'
            assert shown in text
        assert len(pieces) > 8
        assert world.calls("generate")[-1]["options"]["streaming"] is True


def test_prompts_of_different_settings_go_in_calls_of_their_own(world: World, plain: Path) -> None:
    requests = [
        *make_prompts(4, 9, temperature=0.7, seed=5),
        *make_prompts(6, temperature=1.3, seed=5),
        *make_prompts(8),
    ]
    report = world.run(plain, requests, max_output_len=6)
    assert [len(output["output_ids"]) for output in report["outputs"]] == [6] * 4
    options = [(len(e["prompts"]), e["options"]) for e in world.calls("generate")]
    found = {(n, o["temperature"], o["top_k"], o.get("random_seed")) for n, o in options}
    assert found == {(2, 0.7, 0, 5), (1, 1.3, 0, 5), (1, 1.0, 1, None)}
    again = world.run(plain, requests, max_output_len=6)
    assert list_texts(again) == list_texts(report)


def test_a_redrafter_engine_that_samples(world: World) -> None:
    settings: dict[str, Any] = {"temperature": "0.7", "max_output_len": 4}
    report = world.run(ENGINES["sampling"](world), make_prompts(4), **settings)
    assert len(report["outputs"][0]["output_ids"]) == 4


def test_generation_logits_need_the_flag_of_the_build_or_of_the_run(
    world: World, plain: Path, tmp_path: Path
) -> None:
    """1.x gathers them when the run asks; 0.14 only if the engine was built so."""
    torch_engine = world.torch_engine("plain", world.checkpoint("plain"))
    expected = world.run(
        torch_engine, make_prompts(4, 9), max_output_len=5, output_generation_logits=True,
        output_file=tmp_path / "torch.json",
    )  # fmt: skip
    gathering = world.engine("gather", world.checkpoint("plain"), "--gather-generation-logits")
    for engine in (gathering, plain):
        settings: dict[str, Any] = {
            "output_generation_logits": True,
            "output_file": tmp_path / "out.json",
            "force": True,
        }
        if world.label == "0.14" and engine == plain:
            with pytest.raises(SpecDecError, match="no generation logits") as caught:
                world.run(engine, make_prompts(4, 9), max_output_len=5, **settings)
            assert "--gather-generation-logits" in caught.value.hint
            continue
        report = world.run(engine, make_prompts(4, 9), max_output_len=5, **settings)
        ours, theirs = (TensorFile(Path(r["generation_logits"])) for r in (report, expected))
        for name in theirs.tensors:
            assert (ours.read(name) == theirs.read(name)).all()
    with pytest.raises(SpecDecError, match="--output-generation-logits with --streaming"):
        world.run(
            plain, make_prompts(4), streaming=True, output_generation_logits=True,
            output_file=tmp_path / "x",
        )  # fmt: skip


def test_block_reuse_is_handed_on(world: World, plain: Path) -> None:
    world.run(plain, make_prompts(4), max_output_len=3, kv_cache_enable_block_reuse=True)
    assert world.calls("from_dir")[0]["options"]["kv_cache_enable_block_reuse"] is True
    report = world.run(plain, make_prompts(4), max_output_len=3)
    assert world.calls("from_dir")[0]["options"]["kv_cache_enable_block_reuse"] is False
    assert "num_reused_tokens" not in report["stats"]


ENGINES: dict[str, Callable[[World], Path]] = {
    "plain": lambda w: w.engine("plain", w.checkpoint("plain"), *PAGED),
    "unpaged": lambda w: w.engine(
        "unpaged", w.checkpoint("plain"), "--use-paged-context-fmha", "disable"
    ),
    "redrafter": lambda w: w.engine("redrafter", w.redrafter()),
    "sampling": lambda w: w.engine(
        "sampling", w.redrafter("sampling", "--redrafter-no-greedy-search")
    ),
    "medusa": lambda w: w.engine("medusa", w.medusa(), "--speculative-decoding-mode", "medusa"),
}
DEEP = str([[0] * n for n in range(1, 7)])
REUSE = {"kv_cache_enable_block_reuse": True}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "settings", "error", "message"),
    [
        ("plain", {"device": "cpu"}, UsageError, "--device cpu"),
        ("plain", {"kv_cache_free_gpu_memory_fraction": 1.5}, UsageError, "fraction is 1.5"),
        ("plain", {"medusa_choices": "[[0]]"}, UsageError, "--medusa-choices has no effect"),
        ("plain", {"medusa_tree_tokens": 3}, UsageError, "--medusa-tree-tokens has no effect"),
        ("plain", {"redrafter_tree_tokens": 3}, UsageError, "-tree-tokens is for engines of"),
        ("plain", {"lookahead_config": "[3,3,3]"}, UsageError, "--lookahead-config has no effect"),
        ("plain", {"suffix_max_tokens": 3}, UsageError, "-max-tokens is for engines of torch"),
        ("plain", {"eagle_choices": "[[0]]"}, UsageError, "--eagle-choices has no effect"),
        ("plain", {"eagle_use_dynamic_tree": True}, UsageError, "-tree has no effect with an"),
        ("plain", {"prompt_lookup_num_tokens": 3}, SpecDecError, "prompt lookup drafts 3 tokens"),
        ("plain", {"top_k": 2000, "temperature": "1"}, SpecDecError, "cuts to 1024"),
        ("plain", {"max_output_len": MAX_TOTAL}, SpecDecError, f"max_seq_len is {MAX_TOTAL}"),
        ("unpaged", REUSE, SpecDecError, "cannot reuse blocks of its KV cache"),
        ("redrafter", {"temperature": "0.7"}, SpecDecError, "engine always decodes greedily"),
        ("redrafter", {"no_speculation": True}, SpecDecError, "always speculates"),
        ("sampling", {}, SpecDecError, "this engine always samples"),
        ("sampling", {"temperature": "1", "top_k": 5}, SpecDecError, "top_k 5 and top_p 1;"),
        ("medusa", {"temperature": "0.5"}, SpecDecError, "0.5, TensorRT-LLM's Medusa only 1"),
        ("medusa", {"medusa_choices": DEEP}, SpecDecError, "6 deep, the engine has 3 Medusa"),
        ("medusa", {"medusa_tree_tokens": 3}, UsageError, "trees of Medusa are static"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_before_it_is_loaded(
    world: World, name: str, settings: dict[str, Any], error: type[SpecDecError], message: str
) -> None:
    with pytest.raises(error) as caught:
        world.run(ENGINES[name](world), make_prompts(4), **settings)
    assert message in caught.value.message
    assert not world.calls("from_dir")


def test_requests_beyond_the_limits_are_listed(world: World, redrafter: Path) -> None:
    """The recorded max_seq_len holds a step's drafts, which are no room for output."""
    requests = [
        *make_prompts(MAX_INPUT + 1, max_output_len=1),
        *make_prompts(MAX_INPUT, max_output_len=MAX_TOTAL - MAX_INPUT),
        *make_prompts(MAX_INPUT, max_output_len=MAX_TOTAL - MAX_INPUT + 1),
        {"input_ids": [5, 200], "max_output_len": 1},
    ]
    with pytest.raises(SpecDecError) as caught:
        world.run(redrafter, requests)
    message = caught.value.message
    assert "3 problems" in message
    assert f"prompt 0 has {MAX_INPUT + 1} tokens" in message
    assert f"prompt 2 has {MAX_INPUT} tokens and asks for" in message
    assert "prompt 3 holds token 200" in message
    report = world.run(redrafter, requests[1:2])
    assert len(report["outputs"][0]["output_ids"]) == MAX_TOTAL - MAX_INPUT


def test_an_engine_of_another_version_is_not_loaded(
    world: World, plain: Path, tmp_path: Path
) -> None:
    import shutil

    engine = tmp_path / "engine"
    shutil.copytree(plain, engine)
    manifest = read_json(engine / "manifest.json")
    manifest["environment"]["tensorrt_llm"] = "9.9.9"
    write_json(engine / "manifest.json", manifest)
    with pytest.raises(SpecDecError, match=r"built with TensorRT-LLM 9\.9\.9, here is") as caught:
        world.run(engine, make_prompts(4))
    assert "tensorrt-llm==9.9.9" in caught.value.hint
    assert world.run(engine, make_prompts(4), dry_run=True)["backend"] == "tensorrt-llm"
    (engine / "rank0.engine").unlink()
    with pytest.raises(SpecDecError, match=r"lacks rank0\.engine"):
        world.run(engine, make_prompts(4))


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("[TensorRT-LLM][ERROR] CUDA out of memory", "--kv-cache-free-gpu-memory-fraction"),
        ("6: The engine plan file is generated on an incompatible device, expecting compute 8.0"
         " got compute 8.9, please rebuild.", "on a GPU of the kind that runs it"),
        ("6: The engine plan file is not compatible with this version of TensorRT, expecting"
         " library version 9.2.0.5 got 9.3.0.1, please rebuild.", "with the TensorRT that is"),
        ("Assertion failed: Failed to deserialize cuda engine", "with the TensorRT that is"),
        ("draft tokens (56) exceeds the maximum draft tokens (0)", "a larger --max-draft-len"),
        ("Prompt length (9) exceeds maximum input length (8)", "a larger --max-input-len"),
        ("something nobody has seen", "its own log above"),
    ],
)  # fmt: skip
def test_the_runtimes_own_error_becomes_one_line(
    world: World, plain: Path, monkeypatch: pytest.MonkeyPatch, said: str, hint: str
) -> None:
    from tests.trtllm import runtime_double

    def fail(*_: Any) -> None:
        raise RuntimeError(f"{said}\n1 0x7f somewhere")

    monkeypatch.setattr(runtime_double.EngineDouble, "check_options", fail)
    with pytest.raises(SpecDecError) as caught:
        world.run(plain, make_prompts(4))
    assert said in caught.value.message
    assert hint in caught.value.hint
    assert "0x7f" not in caught.value.message


def test_release_that_writes_other_text_than_the_targets_is_told(
    world: World, redrafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec.trtllm import run_checks

    told: list[str] = []
    monkeypatch.setattr(
        run_checks.logger, "warning", lambda text, *words: told.append(text % words)
    )
    world.run(redrafter, make_prompts(4), max_output_len=2)
    assert any("issue 3125" in text for text in told) == (world.label == "0.14")
