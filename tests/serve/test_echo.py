"""`echo` with `logprobs`: what a prompt's own tokens were likely to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import Engine, Prompt, SpecDecError
from specdec.decode.requests import LOGPROB_TOKENS
from tests.serve.servers import post, read_events

LONG = [5 + (7 * at + at // 9) % 80 for at in range(LOGPROB_TOKENS + 30)]
NUM_TOP = 3


@pytest.fixture(scope="module")
def target(folder: Path) -> Any:
    """The same weights in transformers, in float32."""
    from transformers import AutoModelForCausalLM

    found = [path.parent for path in folder.parent.rglob("config.json")]
    (path,) = [p for p in found if p.name == "target"]
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def compute(target: Any, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of what follows each token, [T, V]."""
    with torch.inference_mode():
        found: torch.Tensor = target(torch.tensor([ids])).logits[0].log_softmax(-1)
    return found


def check(target: Any, ids: list[int], found: list[Any]) -> None:
    """Compare what is told of a prompt's tokens, [logprob, top] or None, with transformers."""
    assert found[0] is None
    expected = compute(target, ids)[:-1]
    assert len(found) == len(ids)
    own = expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([f[0] for f in found[1:]]), own, atol=1e-4, rtol=0)
    best = expected.topk(NUM_TOP)
    assert [[token for token, _ in f[1]] for f in found[1:]] == best.indices.tolist()


@pytest.mark.parametrize("chunk", [None, 7])
def test_prompts_are_told_of_as_transformers_has_them(
    folder: Path, target: Any, chunk: int | None
) -> None:
    """Alone, while another is decoded, and where the cache holds the prompt already."""
    asked: dict[str, Any] = {"logprobs": NUM_TOP, "prompt_logprobs": True, "end_ids": ()}
    with Engine.load(
        folder, device="cpu", prompt_chunk=chunk, kv_cache_enable_block_reuse=True
    ) as engine:
        other = engine.stream(Prompt(token_ids=LONG, end_ids=()), max_output_len=60)
        next(other)
        streams = [
            engine.stream(Prompt(token_ids=ids, **asked), max_output_len=2)
            for ids in (LONG, LONG[:1], LONG[:40])
        ]
        for stream, ids in zip(streams, (LONG, LONG[:1], LONG[:40]), strict=True):
            first, *rest = list(stream)
            check(target, ids, [p and (p.logprob, p.top) for p in first.prompt_logprobs])
            assert all(not event.prompt_logprobs for event in rest)
            assert stream.output.prompt_logprobs == first.prompt_logprobs
            assert len(stream.output.logprobs) == 2
        other.close()
        taken = engine.num_reused_tokens
        engine.generate(Prompt(token_ids=LONG, **asked), max_output_len=1)
        assert engine.num_reused_tokens == taken
    assert taken == 0


def test_prompt_logprobs_need_logprobs(folder: Path) -> None:
    with (
        Engine.load(folder, device="cpu") as engine,
        pytest.raises(SpecDecError, match="prompt_logprobs and no logprobs"),
    ):
        engine.generate(Prompt(token_ids=[5, 6], prompt_logprobs=True))


@pytest.mark.parametrize("limit", [0, 1, 4])
def test_echo_tells_of_prompt_and_output(url: str, target: Any, limit: int) -> None:
    """As lm-eval asks: several prompts as ids, greedy, one token or none."""
    prompts = [LONG, LONG[:2], LONG[:30]]
    asked: dict[str, Any] = {
        "echo": True,
        "logprobs": NUM_TOP,
        "max_tokens": limit,
        "temperature": 0,
        "seed": 1,
    }
    asked |= {"prompt": prompts, "ignore_eos": True}
    answer = post(url, "/v1/completions", **asked)
    assert answer["usage"]["completion_tokens"] == limit * len(prompts)
    events = read_events(url, "/v1/completions", **asked)
    for choice, ids in zip(answer["choices"], prompts, strict=True):
        told = choice["logprobs"]
        assert [len(values) for values in told.values()] == [len(ids) + limit] * 4
        assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
        own = compute(target, ids)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        found = torch.tensor(told["token_logprobs"][1 : len(ids)])
        torch.testing.assert_close(found, own, atol=1e-4, rtol=0)
        values = (told[key][1:] for key in told if key != "text_offset")
        for token, logprob, top in zip(*values, strict=True):
            assert top[token] == logprob <= max(top.values())
        for token, at in zip(told["tokens"], told["text_offset"], strict=True):
            assert choice["text"][at : at + len(token)] == token
        assert choice["finish_reason"] == "length"
        parts = [
            e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]
        ]  # fmt: skip
        assert "".join(part["text"] for part in parts) == choice["text"]
        for key, values in told.items():
            streamed = [one for part in parts for one in (part["logprobs"] or {}).get(key, [])]
            if key in ("tokens", "text_offset"):
                assert streamed == values


def test_a_prompt_as_text_is_where_its_tokens_are(url: str) -> None:
    text = "hello ab"
    (choice,) = post(
        url, "/v1/completions", prompt=text, echo=True, logprobs=0, max_tokens=0, temperature=0
    )["choices"]
    told = choice["logprobs"]
    assert choice["text"] == text
    ends = [*told["text_offset"][1:], len(text)]
    pieces = [text[start:end] for start, end in zip(told["text_offset"], ends, strict=True)]
    assert "".join(pieces) == text
    assert all(piece in ("", name) for piece, name in zip(pieces, told["tokens"], strict=True))
