"""Every way of decoding in turn, round after round, so that what drifts meanwhile favours none."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from specdec.measure.measure import summarize
from specdec.text.comparison import find_difference

from .processes import PeerError
from .ways import PLAIN, Setting, Way

PARTS = ("draft", "verify", "accept", "other")


class Caller(Protocol):
    """Answerer of calls: a worker."""

    def call(self, name: str, **settings: Any) -> dict[str, Any]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Texts to be decoded. long_prompt: for the time to the first token."""

    prompts: Sequence[Sequence[int]]
    long_prompt: Sequence[int]
    max_output_len: int
    end_id: int
    rounds: int


@dataclasses.dataclass
class Measured:
    """One way's rounds, or why there are none. first: the answer of the round that warmed up."""

    way: Way
    setting: Setting = dataclasses.field(default_factory=dict)
    tuning: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    first: dict[str, Any] | None = None
    timed: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    first_token_seconds: list[float] = dataclasses.field(default_factory=list)
    error: str | None = None

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each round, prompts included."""
        return [answer["num_tokens"] / answer["seconds"] for answer in self.timed]


def measure_ways(
    ways: Sequence[Way], workers: Mapping[str, Caller], errors: Mapping[str, str], work: Work
) -> list[Measured]:
    """Tune, warm up, then measure. errors: why a way's worker is missing, by its name."""
    measured = [Measured(way, error=errors.get(way.worker)) for way in ways]
    for one in measured:
        if one.error is None:
            guard(one, tune, workers, work)
    for one in measured:
        if one.error is None:
            guard(one, warm_up, workers, work)
    for number in range(work.rounds):
        print(f"round {number + 1} of {work.rounds}", file=sys.stderr, flush=True)
        for one in measured if number % 2 == 0 else measured[::-1]:
            if one.error is None:
                guard(one, measure_round, workers, work)
    return measured


def guard(one: Measured, action: Any, workers: Mapping[str, Caller], work: Work) -> None:
    """Do it, or note why it cannot be done; the other ways go on."""
    try:
        action(one, workers[one.way.worker], work)
    except PeerError as error:
        one.error = str(error)
        print(f"{one.way.key}: {error}", file=sys.stderr, flush=True)


def tune(one: Measured, worker: Caller, work: Work) -> None:
    """Choose the setting that is fastest over half the prompts.

    Each is tried after a warm-up, and again in the opposite order: what drifts favours none.
    """
    one.setting = one.way.settings[0]
    if len(one.way.settings) == 1:
        return
    some = dataclasses.replace(work, prompts=work.prompts[: -(-len(work.prompts) // 2)])
    # A short run first: some peers load or compile something for each setting.
    brief = dataclasses.replace(some, prompts=some.prompts[:1], max_output_len=8)
    tried: list[list[dict[str, Any]]] = [[] for _ in one.way.settings]
    for turn in (1, -1):
        for setting, answers in list(zip(one.way.settings, tried, strict=True))[::turn]:
            run(one.way, setting, worker, brief)
            answers.append(run(one.way, setting, worker, some))
    for setting, answers in zip(one.way.settings, tried, strict=True):
        rate = sum(a["num_tokens"] for a in answers) / sum(a["seconds"] for a in answers)
        one.tuning.append({"setting": setting, "tokens_per_second": round(rate, 2)})
    one.setting = max(one.tuning, key=lambda row: row["tokens_per_second"])["setting"]
    print(f"{one.way.key}: {one.setting} is fastest", file=sys.stderr, flush=True)


def warm_up(one: Measured, worker: Caller, work: Work) -> None:
    one.first = run(one.way, one.setting, worker, work)


def measure_round(one: Measured, worker: Caller, work: Work) -> None:
    one.timed.append(run(one.way, one.setting, worker, work))
    if one.way.name == PLAIN:
        brief = dataclasses.replace(work, prompts=[work.long_prompt], max_output_len=1)
        one.first_token_seconds.append(run(one.way, one.setting, worker, brief)["seconds"])


def run(way: Way, setting: Setting, worker: Caller, work: Work) -> dict[str, Any]:
    """Decode all prompts once."""
    return worker.call(
        "run", way=way.name, setting=setting, prompts=work.prompts,
        max_output_len=work.max_output_len, end_id=work.end_id,
    )  # fmt: skip


def describe_ways(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """One object a way: speed, acceptance, and its texts compared with others'.

    Texts are held against those of the first way that has any, which is plain decoding of the first
    peer, and against the same peer's plain decoding.
    """
    texts = {one.way.key: one.first["texts"] for one in measured if one.first is not None}
    reference = next(iter(texts), None)
    rows = []
    for one in measured:
        row: dict[str, Any] = {
            "peer": one.way.peer, "way": one.way.name, "setting": one.setting,
            "tuning": one.tuning, "error": one.error,
        }  # fmt: skip
        if one.error is None and one.first is not None and one.timed:
            row |= {
                "rates": [round(rate, 3) for rate in one.rates],
                "tokens_per_second": summarize(one.rates),
                "acceptance_length": one.first["acceptance_length"],
                "texts": {
                    "reference": reference,
                    "of_reference": compare(one.first["texts"], texts[str(reference)]),
                    "of_own_plain": compare(
                        one.first["texts"],
                        texts.get(f"{one.way.peer}: {PLAIN}", one.first["texts"]),
                    ),
                },
            }
            if one.first_token_seconds:
                row["first_token_seconds"] = summarize(one.first_token_seconds)
            if "step_ms" in one.first:
                row["step_ms"] = {
                    part: statistics.median(answer["step_ms"][part] for answer in one.timed)
                    for part in PARTS
                }
            if "own_tokens_per_second" in one.first:
                row["own_tokens_per_second"] = summarize(
                    [answer["own_tokens_per_second"] for answer in one.timed]
                )
        rows.append(row)
    return rows


def compare(ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> dict[str, Any]:
    """How many texts are equal, and where the first that differs does: prompt and token, from 0."""
    differing = [n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    found: dict[str, Any] = {"compared": len(ours), "equal": len(ours) - len(differing)}
    if differing:
        first = differing[0]
        token = find_difference(ours[first], theirs[first])
        found["first_difference"] = {"prompt": first, "token": token}
    return found
