"""Penalties, bias and min-p: transformers' numbers, and exact at every node of a tree."""

from __future__ import annotations

import collections
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec import Engine, Prompt, PromptError, SpecDecError
from specdec.decode.accept import accept_batch
from specdec.decode.sampling import Sampler, SamplingParams, process_logits
from specdec.decode.shaping import Penalties, make_shaper
from specdec.engine.tree import make_root, pack_beams
from specdec.text.pretrained import load_tokenizer
from tests.conftest import make_drafter, make_llama, make_tokenizer
from tests.engines import make_engine, run_here
from tests.run.statistics import FALSE_ALARM_RATE, compute_p_value
from tests.run.test_sampling import LENGTH, METHODS, TARGET, VOCAB, compute_tree_logits

PROMPT = [3, 0, 3]
SHAPED = SamplingParams(
    temperature=0.9, min_p=0.05, logit_bias=((1, 0.8), (4, -0.5)), repetition_penalty=1.3,
    frequency_penalty=0.4, presence_penalty=0.7,
)  # fmt: skip


def shape_by_hand(logits: list[float], text: list[int]) -> list[float]:
    """What SHAPED makes of logits after a text of the output, token by token."""
    counts = collections.Counter(text)
    shaped = []
    for token, logit in enumerate(logits):
        value = logit + dict(SHAPED.logit_bias).get(token, 0.0)
        if token in counts or token in PROMPT:
            value = value * 1.3 if value < 0 else value / 1.3
        if token in counts:
            value -= 0.4 * counts[token] + 0.7
        shaped.append(value)
    return shaped


def find_probs(logits: list[float]) -> np.ndarray:
    weights = np.exp((np.array(logits) - max(logits)) / SHAPED.temperature)
    weights /= weights.sum()
    weights[weights < SHAPED.min_p * weights.max()] = 0
    probs: np.ndarray = weights / weights.sum()
    return probs


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["beams", "draft model, ratio", "dynamic tree"])
def test_shaped_texts_follow_their_distribution(method: str) -> None:
    """False alarm: one seed in ten thousand, as of every test of this kind."""
    exact = np.zeros((VOCAB,) * LENGTH)
    for known in itertools.product(range(VOCAB), repeat=LENGTH):
        exact[known] = math.prod(
            find_probs(shape_by_hand(TARGET.get_logits(known[:at]).tolist(), list(known[:at])))[
                token
            ]
            for at, token in enumerate(known)
        )
    counts = np.zeros(exact.shape, np.int64)
    for seed in range(400):
        params = SamplingParams(**{**vars(SHAPED), "seed": seed})
        text: list[int] = []
        sampler = Sampler(params, LENGTH + 8, make_shaper(params, PROMPT, text))
        while len(text) < LENGTH:
            candidates = METHODS[method](text, sampler)
            logits = compute_tree_logits(candidates.tree, text)[None]
            ((path, bonus),) = accept_batch([candidates], logits, [sampler], [len(text)])
            text += [*candidates.tree.tokens[path[1:]].tolist(), bonus]
        counts[tuple(text[:LENGTH])] += 1
    assert compute_p_value(counts.reshape(-1), exact.reshape(-1)) > FALSE_ALARM_RATE


def test_every_node_is_shaped_by_its_own_text() -> None:
    """A path's drafted tokens count, other branches' do not; padding is not touched."""
    logits = torch.randn((8, VOCAB), generator=torch.Generator().manual_seed(1))
    tree = pack_beams(2, np.array([[1, 4], [1, 1], [0, 3]]))
    output = [4, 2]
    shaped = Penalties(SHAPED, PROMPT, output).shape(tree, logits)
    branches = [[], [1], [0], [1, 4], [1, 1], [0, 3]]
    assert len(shaped) == tree.num_nodes == len(branches)
    for node, branch in enumerate(branches):
        expected = shape_by_hand(logits[node].tolist(), [*output, *branch])
        torch.testing.assert_close(shaped[node], torch.tensor(expected))


def test_what_transformers_has_is_the_same() -> None:
    from transformers import (
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
    )

    generator = torch.Generator().manual_seed(2)
    logits = 4 * torch.randn((1, 200), generator=generator)
    prompt, output = torch.randint(200, (2, 40), generator=generator)
    params = SamplingParams(
        temperature=1.0, logit_bias=((5, 2.5), (7, -100.0)), repetition_penalty=1.7, min_p=0.1
    )
    root = make_root(int(output[-1]))
    shaped = Penalties(params, prompt.tolist(), output.tolist()).shape(root, logits)
    ids = torch.cat([prompt, output])[None]
    expected: Any = SequenceBiasLogitsProcessor({(5,): 2.5, (7,): -100.0})(ids, logits)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(ids, expected)
    assert torch.equal(shaped, expected)
    probs = MinPLogitsWarper(0.1)(ids, expected).softmax(-1)
    assert torch.equal(process_logits(shaped, [params]), probs)


BANNED = SamplingParams(
    temperature=0.9, allowed_ids=frozenset({0, 1, 2, 4}), min_tokens=2,
    bad_words=frozenset({(1, 0), (4, 4, 1), (2, 2)}),
)  # fmt: skip
ENDS = (4,)


def ban_by_hand(logits: list[float], text: list[int]) -> list[float]:
    banned = {3} | ({4} if len(text) < 2 else set())
    for *before, last in BANNED.bad_words:
        if text[len(text) - len(before) :] == before and len(text) >= len(before):
            banned.add(last)
    return [-math.inf if token in banned else value for token, value in enumerate(logits)]


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["beams", "draft model, ratio", "dynamic tree"])
def test_texts_without_what_is_banned_follow_their_distribution(method: str) -> None:
    exact = np.zeros((VOCAB,) * LENGTH)
    for known in itertools.product(range(VOCAB), repeat=LENGTH):
        chances = []
        for at, token in enumerate(known):
            left = ban_by_hand(TARGET.get_logits(known[:at]).tolist(), list(known[:at]))
            weights = [math.exp(value / BANNED.temperature) for value in left]
            chances.append(weights[token] / sum(weights))
        exact[known] = math.prod(chances)
    counts = np.zeros(exact.shape, np.int64)
    for seed in range(400):
        params = SamplingParams(**{**vars(BANNED), "seed": seed})
        text: list[int] = []
        sampler = Sampler(params, LENGTH + 8, make_shaper(params, PROMPT, text, None, ENDS))
        while len(text) < LENGTH:
            candidates = METHODS[method](text, sampler)
            logits = compute_tree_logits(candidates.tree, text)[None]
            ((path, bonus),) = accept_batch([candidates], logits, [sampler], [len(text)])
            text += [*candidates.tree.tokens[path[1:]].tolist(), bonus]
        counts[tuple(text[:LENGTH])] += 1
    assert counts[exact == 0].sum() == 0
    assert compute_p_value(counts.reshape(-1), exact.reshape(-1)) > FALSE_ALARM_RATE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("shaping")
    target, drafter = make_llama(parent, seed=5), make_drafter(parent, exit_dim=96, scale=3.0)
    return make_engine(parent, target, drafter, beams=3, length=4)


def test_drafts_change_nothing_of_shaped_texts(folder: Path) -> None:
    """With drafts as without, greedy and sampled, alongside requests that are not shaped."""
    prompts = []
    for n in range(12):
        shaped: Any = {
            "repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": -0.5,
            "min_p": 0.02, "logit_bias": {n: 3.0, 100: -100},
        }  # fmt: skip
        own = {} if n % 4 == 3 else shaped
        prompt = [5, 9, 77 - n]
        prompts.append(
            Prompt(
                token_ids=prompt, temperature=(n % 3) * 0.6, seed=n, end_ids=(), logprobs=n % 4,
                **own,
            )
        )  # fmt: skip
    texts = []
    for speculation in (True, False):
        with Engine.load(folder, device="cpu", speculation=speculation) as engine:
            outputs = engine.generate(prompts, max_output_len=20)
        texts.append([output.token_ids for output in outputs])
        for number, output in enumerate(outputs):
            assert len(output.logprobs) == 20
            for token, told in zip(output.token_ids, output.logprobs, strict=True):
                assert len(told.top) == number % 4
                assert told.logprob <= 0
                assert (dict(told.top).get(token, told.logprob)) == told.logprob
    assert texts[0] == texts[1]


def test_bans_and_forms_of_text_are_exact_with_drafts(folder: Path) -> None:
    """Ends, stops and bans at every place of a block, greedy and sampled."""
    tokenizer = load_tokenizer(make_tokenizer(folder.parent / "words"))
    with Engine.load(folder, tokenizer=tokenizer, device="cpu", speculation=False) as engine:
        plain = engine.generate([5, 9, 77], max_output_len=40, end_ids=())[0]
    end, text = plain.token_ids[11], plain.text
    word = text[14:17]
    prompts = []
    for n in range(24):
        own: dict[str, Any] = {"temperature": (n % 3) * 0.5, "seed": n, "end_ids": [2]}
        if n % 4 < 2:
            own["min_tokens"] = n // 2
        if n % 4 == 0:
            own["stop"] = [word, text[20:22], "e"]
        if n % 4 == 1:
            own["stop_token_ids"] = [end]
        if n % 4 > 1:
            own |= {"bad_words": [text[3:5], text[9], text[12:15]], "skip_special_tokens": False}
        if n % 5 == 0:
            own |= {"allowed_token_ids": [2, end, *range(40, 128)]}
        prompts.append(Prompt(token_ids=[5, 9, 77], include_stop_str_in_output=n % 3 == 1, **own))
    results = []
    for speculation in (True, False):
        with Engine.load(
            folder, tokenizer=tokenizer, device="cpu", speculation=speculation
        ) as engine:
            outputs = engine.generate(prompts, max_output_len=40)
        results.append([(o.token_ids, o.text, o.finish_reason) for o in outputs])
    assert results[0] == results[1]
    assert {reason for *_, reason in results[0]} == {"length", "eos", "stop"}
    for prompt, (ids, told, reason) in zip(prompts, results[0], strict=True):
        assert len(ids) >= (prompt.min_tokens or 0)
        if prompt.allowed_token_ids:
            assert set(ids) <= set(prompt.allowed_token_ids)
        if reason == "eos" and ids[-1] == end:
            shown = ids if prompt.include_stop_str_in_output else ids[:-1]
            assert told == tokenizer.decode(shown)
        elif reason == "stop" and prompt.include_stop_str_in_output:
            assert told.endswith(tuple(prompt.stop or ()))


def test_lines_of_a_file_say_what_a_prompt_says(folder: Path, tmp_path: Path) -> None:
    """A run, whose own end is in no text, gives what the API gives."""
    words = make_tokenizer(tmp_path / "words")
    settings: list[dict[str, Any]] = [
        {"min_tokens": 5, "stop_token_ids": [67], "include_stop_str_in_output": True},
        {"bad_words": ["e", "n"], "skip_special_tokens": False},
        {"allowed_token_ids": [1, 2, 40, 41, 42], "skip_special_tokens": False},
        {"grammar": {"choice": ["abc", "xyz"]}},
        {"truncate_prompt_tokens": 1, "add_special_tokens": False},
    ]
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": "hello", "max_output_len": 12} | own) for own in settings]
    path.write_text("\n".join(lines))
    told = run_here(
        ["--engine-dir", str(folder), "--tokenizer-dir", str(words), "--input-file", str(path)]
    )
    with Engine.load(folder, tokenizer=str(words), device="cpu") as engine:
        outputs = engine.generate(
            [Prompt(text="hello", max_output_len=12, temperature=0, **own) for own in settings]
        )
    assert [o["output_text"] for o in told["outputs"]] == [o.text for o in outputs]
    assert outputs[3].text in ("abc", "xyz")
    assert len(outputs[4].prompt_ids) == 1


def test_greedy_text_with_bans_is_that_of_transformers(folder: Path) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder.parent / "target")
    ids = torch.tensor([[5, 9, 77, 3]])
    tokenizer = load_tokenizer(make_tokenizer(folder.parent / "other words"))
    with Engine.load(folder, tokenizer=tokenizer, device="cpu") as engine:
        plain = engine.generate(ids[0].tolist(), max_output_len=24, end_ids=())[0].token_ids
        words = [tokenizer.decode(plain[at : at + 2]) for at in (2, 9)] + ["e"]
        bad = [
            tokenizer(text, add_special_tokens=False)["input_ids"]
            for word in words for text in (word, f" {word}")
        ]  # fmt: skip
        allowed = [token for token in range(128) if token % 7]
        more: dict[str, Any] = {"eos_token_id": plain[5], "pad_token_id": 0}
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False,
            bad_words_ids=bad, min_new_tokens=11, suppress_tokens=[*range(0, 128, 7)], **more,
        )[0, 4:].tolist()  # fmt: skip
        prompt = Prompt(
            token_ids=ids[0].tolist(), end_ids=[plain[5]], min_tokens=11, bad_words=words,
            allowed_token_ids=allowed,
        )  # fmt: skip
        (output,) = engine.generate(prompt, max_output_len=24)
        assert output.token_ids == expected
        assert len(output.token_ids) >= 11
        for field, given, message in (
            ("allowed_token_ids", {"allowed_token_ids": [128]}, "allows token 128, .* has 128"),
            ("allowed_token_ids", {"allowed_token_ids": [2], "min_tokens": 1, "end_ids": [2]},
             "none may be left"),
            ("bad_words", {"bad_words": ["a"], "grammar": {"regex": "b"}}, "both grammar and bad"),
        ):  # fmt: skip
            with pytest.raises(PromptError, match=message) as caught:
                engine.prepare(Prompt(token_ids=[5], **given))
            assert caught.value.field == field


def test_greedy_text_with_a_repetition_penalty_is_that_of_transformers(folder: Path) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder.parent / "target")
    ids = torch.tensor([[5, 9, 77, 3]])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False,
        repetition_penalty=1.4, eos_token_id=None, pad_token_id=0,
    )[0, 4:].tolist()  # fmt: skip
    with Engine.load(folder, device="cpu") as engine:
        prompt = Prompt(token_ids=ids[0].tolist(), repetition_penalty=1.4, end_ids=())
        (output,) = engine.generate(prompt, max_output_len=24)
        assert output.token_ids == expected
        plain = engine.generate(ids[0].tolist(), max_output_len=24, end_ids=())[0].token_ids
        assert output.token_ids != plain
        with pytest.raises(SpecDecError, match=r"logit_bias for token 128.* vocabulary has 128"):
            engine.prepare(Prompt(token_ids=[5], logit_bias={128: 1.0}))
        told = "repetition_penalty is 0, not a number from 0.001 to 1000"
        with pytest.raises(SpecDecError, match=told):
            engine.prepare(Prompt(token_ids=[5], repetition_penalty=0))
