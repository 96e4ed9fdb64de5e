"""vLLM on the CPU: what specdec-export writes is loaded, and drafts as specdec itself drafts."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import make_eagle_drafter
from tests.engines import call
from tests.families import make_family_model
from tests.oracles.conftest import MAX_TOKENS
from tests.oracles.models import PYCODE, pad_heads
from tests.oracles.ours import FIXED, Counters, chain, count, decode, look_up, make_engine

EXTERNAL = ("--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 8)
# Way -> the drafter's folder and option, vLLM's method, --to, draft tokens a step.
WAYS: dict[str, tuple[str, str, str, str, int]] = {
    "medusa": ("medusa", "--medusa-model-dir", "medusa", "vllm", 3),
    "eagle1": ("eagle1", "--eagle-model-dir", "eagle", "vllm", 3),
    "eagle3": ("eagle3", "--eagle-model-dir", "eagle3", "vllm", 3),
    "eagle3-speculators": ("eagle3", "--eagle-model-dir", "eagle3", "speculators", 3),
    "p-eagle": ("p-eagle", "--eagle-model-dir", "eagle3", "vllm", 4),
    "p-eagle-speculators": ("p-eagle", "--eagle-model-dir", "eagle3", "speculators", 4),
    "dflash": ("dflash", "--dflash-model-dir", "dflash", "vllm", 7),
    "dflash-speculators": ("dflash", "--dflash-model-dir", "dflash", "speculators", 7),
    "redrafter": ("redrafter", "--drafter-model-dir", "custom_class", "vllm", 5),
}


@pytest.fixture(scope="module")
def run_vllm(environments: Path, work: Path, prompts: Any) -> Any:
    """Run vLLM once in its own environment; return its texts and counters."""
    python = environments / "vllm" / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"there is no vLLM in {environments}: docs/export.md tells how to install it")

    def run(
        name: str, speculative: dict[str, Any] | None, modules: Path | None = None,
        model: Path | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        job = {
            "model": str(model or work / "target"), "speculative_config": speculative,
            "prompts": prompts, "max_tokens": MAX_TOKENS,
        }  # fmt: skip
        (work / f"{name}.job").write_text(json.dumps(job))
        worker, result = Path(__file__).with_name("vllm_worker.py"), work / f"{name}.json"
        done = subprocess.run(
            [python, worker, work / f"{name}.job", result], capture_output=True, text=True,
            check=False, env=os.environ | ({"PYTHONPATH": str(modules)} if modules else {}),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        found: dict[str, Any] = json.loads(result.read_text())
        print(name, found["version"], found["counters"])
        return found

    return run


@pytest.fixture(scope="module")
def plain(run_vllm: Any) -> list[list[int]]:
    texts: list[list[int]] = run_vllm("plain", None)["texts"]
    return texts


def read_counters(found: dict[str, int | list[int]]) -> Counters:
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    drafts, proposed, accepted = (found[name] for name in names)
    positions: Any = found["num_accepted_tokens_per_pos"]
    return Counters(drafts, proposed, accepted, tuple(positions))  # type: ignore[arg-type]


@pytest.mark.parametrize("way", list(WAYS))
def test_drafters(way: str, run_vllm: Any, plain: Any, work: Path, prompts: Any) -> None:
    """The same text as plain decoding on both sides, and the same counters, number for number."""
    folder, option, method, to, length = WAYS[way]
    drafter, exported = work / folder, work / f"{way}-exported"
    call(
        "export", "--model-dir", PYCODE / "target", option, drafter, "--dtype", "float32",
        "--to", to, "--output-dir", exported,
    )  # fmt: skip
    place = pad_heads(exported, work / f"{way}-wide")
    speculative = {"method": method, "model": str(place), "num_speculative_tokens": length}
    if folder == "p-eagle":
        speculative["parallel_drafting"] = True
    own: list[object] = [option, drafter]
    choices: dict[str, Any] = {
        f"{'medusa' if method == 'medusa' else 'eagle'}_choices": chain(length)
    }
    if method == "dflash":
        choices = {"dflash_tokens": length, "dflash_top_k": 1}
    if way == "redrafter":
        speculative["model"], choices = "redrafter_proposer.ReDrafter", {}
        own += ["--redrafter-num-beams", 1]
    theirs = run_vllm(way, speculative, place)
    assert theirs["texts"] == plain
    engine = make_engine(work / f"ours-{way}", PYCODE / "target", own, [])
    ours = decode(engine, prompts, MAX_TOKENS, **FIXED, **choices)
    assert [output.token_ids[:MAX_TOKENS] for output in ours] == plain
    assert count(ours, MAX_TOKENS, length) == read_counters(theirs["counters"])


def test_a_mixture_as_eagle3s_target(run_vllm: Any, work: Path, prompts: Any) -> None:
    """A random Qwen3-MoE and a random drafter of a reduced vocabulary, of which little is right."""
    model = make_family_model(
        work, "qwen3_moe", vocab=4096, name="mixture", layers=5, heads=2, kv_heads=1, head_dim=32,
        max_position_embeddings=512,
    )  # fmt: skip
    drafter = make_eagle_drafter(
        work, vocab=4096, name="mixture-eagle3", version=3, aux_layers=(1, 2, 3),
        own_embedding=False, draft_vocab=2048, heads=2, kv_heads=1,
    )  # fmt: skip
    exported = work / "mixture-exported"
    own: list[object] = ["--eagle-model-dir", drafter]
    call("export", "--model-dir", model, *own, "--to", "vllm", "--output-dir", exported)
    plain = run_vllm("mixture", None, model=model)["texts"]
    speculative = {"method": "eagle3", "model": str(exported), "num_speculative_tokens": 3}
    theirs = run_vllm("mixture-eagle3", speculative, model=model)
    assert theirs["texts"] == plain
    engine = make_engine(work / "ours-mixture", model, own, [])
    ours = decode(engine, prompts, MAX_TOKENS, **FIXED, eagle_choices=chain(3))
    assert [output.token_ids[:MAX_TOKENS] for output in ours] == plain
    assert count(ours, MAX_TOKENS, 3) == read_counters(theirs["counters"])


def test_draft_model(
    run_vllm: Any, plain: Any, work: Path, prompts: Any, draft_engine: Path
) -> None:
    small = work / "draft-exported"
    call("export", "--model-dir", PYCODE / "draft", "--to", "vllm", "--output-dir", small)
    place = pad_heads(small, work / "draft-wide")
    theirs = run_vllm(
        "draft", {"method": "draft_model", "model": str(place), "num_speculative_tokens": 3}
    )
    assert theirs["texts"] == plain
    engine = make_engine(work / "ours-target", PYCODE / "target", [], EXTERNAL)
    ours = decode(engine, prompts, MAX_TOKENS, **FIXED, draft=draft_engine, draft_len="3")
    assert [output.token_ids[:MAX_TOKENS] for output in ours] == plain
    assert count(ours, MAX_TOKENS, 3) == read_counters(theirs["counters"])


def test_prompt_lookup(run_vllm: Any, plain: Any, work: Path, prompts: Any) -> None:
    """The same text; the counters are another rule's, which is told anew and gives the same."""
    theirs = run_vllm(
        "lookup",
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3,
         "prompt_lookup_min": 1},
    )  # fmt: skip
    assert theirs["texts"] == plain
    engine = make_engine(work / "ours-lookup", PYCODE / "target", [], EXTERNAL)
    ours = decode(
        engine,
        prompts,
        MAX_TOKENS,
        **FIXED,
        prompt_lookup_num_tokens=4,
        max_matching_ngram_size=3,
    )
    assert [output.token_ids[:MAX_TOKENS] for output in ours] == plain
    longer = [output.token_ids for output in ours]
    assert read_counters(theirs["counters"]) == look_up(
        prompts, longer, MAX_TOKENS, length=4, ngram=3
    )
