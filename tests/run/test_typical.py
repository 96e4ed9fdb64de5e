"""Typical acceptance: the rule on numbers worked out by hand, and that it is known to be lossy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.decode.accept import Candidates, accept_batch
from specdec.decode.sampling import Sampler, SamplingParams, TypicalRule
from specdec.decode.typical import accept_typical, read_typical_rule
from specdec.engine.tree import make_root, pack_beams
from specdec.errors import UsageError
from specdec.run.settings import RunSettings
from specdec.verify.settings import VerifySettings, check_flags
from tests.conftest import make_llama, make_medusa_heads, make_tokenizer
from tests.engines import make_engine, run_here
from tests.run.statistics import FALSE_ALARM_RATE, compute_p_value
from tests.run.test_sampling import (
    LENGTH,
    METHODS,
    SETTINGS,
    TARGET,
    compute_text_probs,
    count_texts,
    with_seeds,
    write_texts,
)

# Entropy ln 4 after every node, exp(-entropy) = 1/4: the bound is min(0.09, 0.3 / 4 = 0.075).
EVEN = [0.25] * 4
# -(0.9 ln 0.9 + 0.05 ln 0.05 * 2) = 0.39439, exp(-0.39439) = 0.67409, * 0.3 = 0.20223 > 0.09.
SURE = [0.9, 0.05, 0.05, 0.0]
# -(0.5 ln 0.5 + 0.4 ln 0.4 + 0.07 ln 0.07 + 0.03 ln 0.03) = 1.00445, exp = 0.36625, 0.10987.
MIXED = [0.5, 0.4, 0.07, 0.03]
RULE = TypicalRule()


def test_the_defaults_are_medusas() -> None:
    assert (RULE.epsilon, RULE.delta) == (0.09, 0.3)
    assert RunSettings().acceptance == "exact"
    assert read_typical_rule(RunSettings()) is None
    assert SamplingParams().typical is None


@pytest.mark.parametrize(
    ("probs", "token", "rule", "is_accepted"),
    [
        (EVEN, 2, RULE, True),  # 0.25 > 0.075
        (SURE, 0, RULE, True),
        (SURE, 1, RULE, False),  # 0.05 < 0.09: epsilon is the less
        (SURE, 3, RULE, False),
        (MIXED, 1, RULE, True),
        (MIXED, 2, RULE, False),  # 0.07 < 0.09
        (MIXED, 2, TypicalRule(epsilon=0.05, delta=0.3), True),
        # 0.18 * 0.36625 = 0.06592 < 0.07 < 0.2 * 0.36625 = 0.07325: the entropy's bound decides.
        (MIXED, 2, TypicalRule(epsilon=0.09, delta=0.18), True),
        (MIXED, 2, TypicalRule(epsilon=0.09, delta=0.2), False),
        (EVEN, 0, TypicalRule(epsilon=0.25, delta=1.0), False),  # not above, but equal
    ],
)
def test_a_token_is_accepted_where_it_is_likely_enough(
    probs: list[float], token: int, rule: TypicalRule, is_accepted: bool
) -> None:
    tree = pack_beams(9, np.array([[token]]))
    path, bonus = accept_typical(tree, torch.tensor([probs, MIXED]), rule)
    assert path == ([0, 1] if is_accepted else [0])
    after = MIXED if is_accepted else probs
    assert bonus == after.index(max(after))


def test_the_deepest_path_is_taken_and_of_these_the_likeliest() -> None:
    # Nodes by depth: root 0; tokens 0, 1 below it are 1, 2; below them 3 (0), 4 (1); below 4 is 5.
    tree = pack_beams(9, np.array([[0, 0, 3], [1, 1, 3]]))
    assert tree.tokens.tolist() == [9, 0, 1, 0, 1, 3, 3]
    rows = [MIXED, MIXED, MIXED, SURE, MIXED, MIXED, MIXED]
    # Token 3 has 0 below node 3, 0.03 below node 4: both end at depth 2; 0.5 * 0.5 > 0.4 * 0.4.
    path, bonus = accept_typical(tree, torch.tensor(rows), RULE)
    assert (path, bonus) == ([0, 1, 3], 0)
    # With more of the third token below node 4, the less likely branch is the deeper one.
    rows[4] = [0.1, 0.1, 0.1, 0.7]
    path, bonus = accept_typical(tree, torch.tensor(rows), RULE)
    assert (path, bonus) == ([0, 2, 4, 6], 0)
    assert accept_typical(make_root(4), torch.tensor([MIXED]), RULE) == ([0], 0)
    # A node is not reached through one that is not accepted, however likely it is.
    rows[0] = [0.0, 0.0, 0.0, 1.0]
    assert accept_typical(tree, torch.tensor(rows), RULE) == ([0], 3)


def test_each_row_of_a_batch_has_its_own_rule() -> None:
    """Typical, exact and greedy rows side by side; temperature and top-k come before the rule."""
    tree = pack_beams(9, np.array([[1]]))
    logits = torch.tensor(MIXED).log()
    typical = SamplingParams(temperature=1.0, typical=RULE)
    rows = {
        "typical": typical,
        # 1 / temperature 4: [0.5, 0.4]^4 = [0.0625, 0.0256] -> 0.709, 0.290; both above 0.09.
        "cold": SamplingParams(temperature=0.25, typical=RULE),
        "likeliest alone": SamplingParams(temperature=1.0, top_p=0.4, typical=RULE),
        "greedy": SamplingParams(typical=RULE),
        "exact": SamplingParams(temperature=1.0, seed=3),
    }
    accepted = accept_batch(
        [Candidates(tree)] * len(rows),
        logits.expand(len(rows), 2, 4),
        [Sampler(params, 4) for params in rows.values()],
        [0] * len(rows),
    )
    found = dict(zip(rows, accepted, strict=True))
    assert found["typical"] == found["cold"] == ([0, 1], 0)
    assert found["likeliest alone"] == found["greedy"] == ([0], 0)
    drawn = [
        accept_batch(
            [Candidates(tree)], logits.expand(1, 2, 4),
            [Sampler(SamplingParams(temperature=1.0, seed=seed), 4)], [0],
        )[0]
        for seed in range(40)
    ]  # fmt: skip
    assert found["exact"] == drawn[3]
    assert len({bonus for _, bonus in drawn}) > 2, "exact rows draw"


@pytest.mark.parametrize("method", ["beams", "dynamic tree", "draft model, compared"])
def test_the_distribution_test_notices_it(method: str) -> None:
    params = SamplingParams(temperature=1.0, typical=RULE)
    number = 500
    texts = write_texts([METHODS[method]] * number, with_seeds(params, 10**6, number))
    exact = compute_text_probs(SETTINGS[0])
    assert compute_p_value(count_texts(texts), exact) < FALSE_ALARM_RATE
    # What is emitted is typical all the same: every token is likely, or the likeliest.
    for text in {tuple(text) for text in texts}:
        for at, token in enumerate(text[:LENGTH]):
            probs = TARGET.get_probs(text[:at], params)
            entropy = float(torch.special.entr(probs).sum())
            bound = min(RULE.epsilon, RULE.delta * math.exp(-entropy))
            assert probs[token] > bound or probs[token] == probs.max()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("typical")
    target = make_tokenizer(make_llama(parent, seed=3))
    convert = ["--medusa-model-dir", make_medusa_heads(parent)]
    return make_engine(parent, target, convert=convert).rename(parent / "engine")


def run(engine: Path, *flags: str) -> Any:
    target = str(engine.parent / "target")
    common = ["--engine-dir", str(engine), "--tokenizer-dir", target, "--max-output-len", "24"]
    return run_here([*common, "--input-text", "def add(", "one two", *flags])


def test_an_engine_accepts_more_and_says_that_it_is_lossy(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = run(engine, "--temperature", "1.5")["stats"]
    assert (exact["acceptance"], exact["lossy"]) == ("exact", False)
    assert "lossy" not in capsys.readouterr().err
    # Random heads are seldom right; a bound close to 0 takes nearly all that they draft.
    flags = ["--temperature", "1.5", "--acceptance", "typical", "--draft-budget", "fixed"]
    flags += ["--medusa-choices", "[[0],[0,0],[0,0,0]]"]
    tight = run(engine, *flags)["stats"]
    loose = run(engine, *flags, "--typical-epsilon", "1e-9")["stats"]
    assert (tight["acceptance"], tight["lossy"]) == ("typical", True)
    assert loose["acceptance_length"] > 2 > tight["acceptance_length"]
    assert "--acceptance typical is lossy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--typical-delta", "0.2"], "--typical-delta has no effect with --acceptance exact"),
        (["--acceptance", "typical"], "--acceptance typical has no effect on greedy requests"),
        (["--acceptance", "typical", "--no-speculation"], "no effect with --no-speculation"),
        (["--acceptance", "typical", "--typical-epsilon", "0"], "--typical-epsilon is 0"),
        (["--acceptance", "typical", "--typical-delta", "nan"], "--typical-delta: expected"),
    ],
)
def test_what_would_have_no_effect_is_refused(engine: Path, flags: list[str], words: str) -> None:
    with pytest.raises(UsageError) as info:
        run(engine, *flags)
    assert words in info.value.message


def test_plain_engines_have_nothing_to_accept(engine: Path) -> None:
    plain = make_engine(engine.parent, engine.parent / "target")
    with pytest.raises(UsageError, match="no effect with an engine that runs plain"):
        run(engine, "--temperature", "1", "--acceptance", "typical", "--engine-dir", str(plain))


def test_no_proof_of_it_is_offered(engine: Path) -> None:
    settings = VerifySettings(engine_dir=engine, model_dir="target", acceptance="typical")
    with pytest.raises(UsageError, match="it cannot be proved"):
        check_flags(settings)
    with pytest.raises(UsageError, match="^--acceptance: no effect with --checkpoint-dir"):
        check_flags(VerifySettings(checkpoint_dir=engine, acceptance="typical"))
