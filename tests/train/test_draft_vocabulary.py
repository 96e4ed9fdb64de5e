"""How many tokens a drafter drafts: what covers the data, where the data says it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from specdec.errors import SpecDecError
from specdec.train import draft_vocabulary
from specdec.train.draft_vocabulary import MIN_LABELS, ROUNDING, choose_draft_tokens, find_size
from specdec.train.methods import eagle

EAGLE3 = ("--method", "eagle", "--eagle-version", 3, "--max-steps", 1, "--eval-prompts", 0)


def count_by_zipf(num_labels: int, vocab_size: int = 4000) -> Any:
    """Return the counts of labels whose frequencies fall as one over their rank, shuffled."""
    shares = 1 / np.arange(1, vocab_size + 1)
    generator = np.random.default_rng(5)
    counts = generator.multinomial(num_labels, shares / shares.sum())
    return generator.permutation(counts)


def test_the_fewest_tokens_that_cover_the_data_are_drafted() -> None:
    counts = count_by_zipf(1_000_000)
    size = find_size(counts)
    assert size is not None
    assert size % ROUNDING == 0
    falling = np.sort(counts)[::-1]
    assert falling[:size].sum() >= 0.99 * counts.sum() > falling[: size - ROUNDING].sum()
    tokens = choose_draft_tokens("auto", counts)
    assert tokens is not None
    assert len(tokens) == size
    assert (tokens[1:] > tokens[:-1]).all()
    others = np.delete(counts, tokens.numpy())
    assert others.max() <= counts[tokens.numpy()].min()


@pytest.mark.parametrize(
    "counts",
    [
        np.full(4, (MIN_LABELS - 1) // 4),  # too few labels
        np.concatenate([[MIN_LABELS], np.ones(200, np.int64)]),  # one in fifty occurs once
        count_by_zipf(20_000),
    ],
    ids=["few labels", "many tokens once", "a small sample"],
)
def test_data_too_small_to_say_keeps_the_whole_vocabulary(
    counts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("specdec").propagate = True
    caplog.set_level(logging.INFO)
    assert find_size(counts) is None
    assert choose_draft_tokens("auto", counts) is None
    assert f"all {len(counts)} tokens of the vocabulary are drafted" in caplog.text


def test_what_was_asked_for_is_drafted() -> None:
    counts = np.array([5, 0, 9, 9, 1])
    for option, expected in (("2", [2, 3]), ("3", [0, 2, 3]), ("5", None), ("full", None)):
        tokens = choose_draft_tokens(option, counts)
        assert (None if tokens is None else tokens.tolist()) == expected


def test_a_drafter_that_is_trained_further_keeps_its_tokens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The share of the data is that of these tokens, not of as many that are more frequent."""
    logging.getLogger("specdec").propagate = True
    caplog.set_level(logging.INFO)
    counts = np.array([5, 0, 9, 9, 1])
    for option in ("auto", "3"):
        tokens = choose_draft_tokens(option, counts, torch.tensor([0, 1, 4]))
        assert tokens is not None
        assert tokens.tolist() == [0, 1, 4]
        assert "3 of 5 tokens are drafted, 25.00% of the data's 24 labels" in caplog.messages[-1]
    other = choose_draft_tokens("2", counts, torch.tensor([0, 1, 4]))
    assert other is not None
    assert other.tolist() == [2, 3]
    assert choose_draft_tokens("auto", counts, torch.arange(5)) is None


def test_tokens_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    save_file({"d2t": torch.tensor([0, 2, 5])}, tmp_path / eagle.METHOD.weights_name)
    assert eagle.read_draft_tokens(tmp_path, 8).tolist() == [0, 3, 7]
    with pytest.raises(SpecDecError, match="drafts tokens from 0 to 7, the model has 7"):
        eagle.read_draft_tokens(tmp_path, 7)


def test_a_training_says_how_many_tokens_it_drafts(
    run_train: Any, target_dir: Path, data_file: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    inputs = ("--model-dir", target_dir, "--data", data_file, *EAGLE3)

    def train(name: str, *flags: object) -> tuple[int, str]:
        log = run_train(*inputs, "--output-dir", tmp_path / name, *flags).err
        config = json.loads((tmp_path / name / "config.json").read_text())
        return config["draft_vocab_size"], log

    size, log = train("small")
    assert size == 320
    assert "are too few to say which are needed" in log
    monkeypatch.setattr(draft_vocabulary, "MIN_LABELS", 100)
    monkeypatch.setattr(draft_vocabulary, "ROUNDING", 4)
    size, log = train("covered")
    assert 4 <= size < 100
    assert f"{size} of 320 tokens are drafted, 99." in log
    assert train("further", "--start-from", tmp_path / "covered")[0] == size
    assert train("text", "--self-distillation", 0.5)[0] == 320
