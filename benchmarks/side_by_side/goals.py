"""What the engine is meant to reach, and what a report says of it."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping
from typing import Any

from specdec.bench.measure import divide

RELATIONS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le}
MET, MISSED, UNKNOWN = "met", "missed", "not measured"
SPECULATIVE = ("redrafter", "draft-target")
RIVALS = (("llama.cpp", "draft model"), ("transformers", "assisted"))


@dataclasses.dataclass(frozen=True)
class Goal:
    """A goal and what became of it. measured: None where a figure is missing; evidence says why."""

    name: str
    wanted: str
    measured: float | None
    verdict: str
    evidence: str

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Figures:
    """A report's figures by name; what is missing is None."""

    def __init__(self, report: Mapping[str, Any]) -> None:
        self.report = report
        self._ways = {(row["peer"], row["way"]): row for row in report["ways"]}

    def get(self, peer: str, way: str) -> dict[str, Any] | None:
        """A way that was measured."""
        row = self._ways.get((peer, way))
        return row if row is not None and "rates" in row else None

    def explain(self, peer: str, way: str) -> str:
        """Why a way was not measured, or its speed."""
        row = self._ways.get((peer, way))
        if row is None:
            return f"{peer}, {way}: not among the chosen peers"
        if "rates" not in row:
            return f"{peer}, {way}: {row['error']}"
        return f"{peer}, {way}: {row['tokens_per_second']['median']:.2f} tokens/s"

    def divide(self, over: tuple[str, str], under: tuple[str, str]) -> float | None:
        """The median over rounds of the ratio of two speeds."""
        first, second = self.get(*over), self.get(*under)
        if first is None or second is None:
            return None
        ratio: float = divide(first["rates"], second["rates"])["median"]
        return ratio


def judge(name: str, relation: str, bound: float, measured: float | None, evidence: str) -> Goal:
    """Hold a figure against its bound."""
    wanted = f"{relation} {bound:g}"
    if measured is None:
        return Goal(name, wanted, None, UNKNOWN, evidence)
    verdict = MET if RELATIONS[relation](measured, bound) else MISSED
    return Goal(name, wanted, round(measured, 3), verdict, evidence)


def list_goals(report: Mapping[str, Any]) -> list[Goal]:
    """The goals of the report's size, in the order of importance."""
    figures = Figures(report)
    find = find_small_goals if report["size"] == "pycode" else find_large_goals
    return list(find(figures))


def find_large_goals(figures: Figures) -> Iterator[Goal]:
    """Those of a model that memory bounds."""
    yield compare_plain(figures, "llama.cpp", 0.95)
    yield compare_plain(figures, "transformers", 3.0)
    yield from judge_verification(figures)
    yield from judge_quantized(figures)
    for way in SPECULATIVE:
        yield judge_overhead(figures, way)
    for way in SPECULATIVE:
        yield judge_speculation(figures, way, "at least", 1.8)
    for way in SPECULATIVE:
        for peer, theirs in RIVALS:
            yield judge(
                f"{way} over {peer}, {theirs}, tokens/s",
                "above",
                1.0,
                figures.divide(("specdec", way), (peer, theirs)),
                f"{figures.explain('specdec', way)}; {figures.explain(peer, theirs)}",
            )
    yield judge_load(figures)
    yield judge_first_token(figures)
    yield from judge_batches(figures)


def find_small_goals(figures: Figures) -> Iterator[Goal]:
    """Those of a model where overhead rules."""
    yield compare_plain(figures, "transformers", 3.0)
    for way in SPECULATIVE:
        yield judge_speculation(figures, way, "above", 1.0)
    yield from judge_batches(figures)


def compare_plain(figures: Figures, peer: str, least: float) -> Goal:
    return judge(
        f"plain decoding over {peer}, tokens/s",
        "at least",
        least,
        figures.divide(("specdec", "plain"), (peer, "plain")),
        f"{figures.explain('specdec', 'plain')}; {figures.explain(peer, 'plain')}",
    )


def judge_quantized(figures: Figures) -> Iterator[Goal]:
    """Four-bit and eight-bit weights, where such peers were chosen."""
    int4, int8, rival = "specdec-int4", "specdec-int8", "llama.cpp-Q4_K_M"
    steps: Mapping[str, Mapping[str, float]] = figures.report.get("quantized_verify_ms") or {}
    bounds = [
        ((int4, "plain"), ("llama.cpp-Q4_0", "plain"), 1.0),
        ((int4, "plain"), (rival, "plain"), 1.0),
        ((int4, "plain"), ("specdec", "plain"), 3.0),
        ((int4, "draft-target"), (int4, "plain"), 1.5),
        ((int4, "draft-target"), (rival, "draft model"), 1.3),
    ]
    for over, under, least in bounds:
        if {over[0], under[0]} <= figures.report["peers"].keys():
            yield judge(
                f"{', '.join(over)} over {', '.join(under)}, tokens/s", "at least", least,
                figures.divide(over, under), f"{figures.explain(*over)}; {figures.explain(*under)}",
            )  # fmt: skip
    if times := steps.get(int4):
        yield judge(
            f"{int4}: a verify step of 8 tokens over one of 1, time", "at most", 1.6,
            times["8"] / times["1"], tell_steps(times),
        )  # fmt: skip
    if (times := steps.get(int8)) and (wide := figures.report.get("verify_ms")):
        yield judge(
            f"{int8}: a verify step over one in bfloat16, the worst of all sizes, time", "at most",
            1.0, max(times[size] / wide[size] for size in wide),
            f"{tell_steps(times)}; bfloat16 {tell_steps(wide)}",
        )  # fmt: skip


def tell_steps(times: Mapping[str, float]) -> str:
    return f"ms by tokens: {', '.join(f'{size}: {ms:.2f}' for size, ms in times.items())}"


def judge_verification(figures: Figures) -> Iterator[Goal]:
    times: Mapping[str, float] = figures.report.get("verify_ms") or {}
    for size, most in (("8", 1.4), ("16", 1.9)):
        is_known = size in times and "1" in times
        yield judge(
            f"a verify step of {size} tokens over one of 1, time",
            "at most",
            most,
            times[size] / times["1"] if is_known else None,
            tell_steps(times)
            if times
            else figures.report.get("verify_error") or "our engine was not measured",
        )


def describe_step(row: Mapping[str, Any]) -> str:
    parts = ", ".join(f"{part} {ms:.2f}" for part, ms in row["step_ms"].items())
    return f"ms a step: {parts}"


def judge_overhead(figures: Figures, way: str) -> Goal:
    row = figures.get("specdec", way)
    share = None
    if row is not None:
        total = sum(row["step_ms"].values())
        share = (total - row["step_ms"]["verify"]) / total
    return judge(
        f"{way}: all but verification, share of a step", "at most", 0.1, share,
        figures.explain("specdec", way) if row is None else describe_step(row),
    )  # fmt: skip


def judge_speculation(figures: Figures, way: str, relation: str, bound: float) -> Goal:
    """The evidence is the sum that makes the ratio: tokens a step over the price of a step."""
    row, plain = figures.get("specdec", way), figures.get("specdec", "plain")
    if row is None or plain is None:
        evidence = figures.explain("specdec", way)
    else:
        price = sum(row["step_ms"].values()) / sum(plain["step_ms"].values())
        evidence = (
            f"{row['acceptance_length']:.2f} tokens a step, which costs {price:.2f} plain ones;"
            f" {describe_step(row)}"
        )
    return judge(
        f"{way} over plain decoding, tokens/s", relation, bound,
        figures.divide(("specdec", way), ("specdec", "plain")), evidence,
    )  # fmt: skip


def judge_load(figures: Figures) -> Goal:
    about = figures.report["peers"].get("specdec") or {}
    seconds = about.get("load_seconds")
    return judge(
        f"load of the engine, {figures.report['target_gb']:.2f} GB, seconds",
        "at most", 3.0, seconds,
        about.get("error") or f"with the process's start {about.get('start_seconds')} s",
    )  # fmt: skip


def judge_first_token(figures: Figures) -> Goal:
    ours, theirs = figures.get("specdec", "plain"), figures.get("llama.cpp", "plain")
    ratio = None
    evidence = figures.explain("llama.cpp" if theirs is None else "specdec", "plain")
    if ours is not None and theirs is not None:
        first, second = ours["first_token_seconds"], theirs["first_token_seconds"]
        ratio = first["median"] / second["median"]
        evidence = f"{first['median']:.2f} s, llama.cpp {second['median']:.2f} s"
    return judge(
        f"first token of a prompt of {figures.report['long_prompt_tokens']} over llama.cpp, time",
        "at most", 1.2, ratio, evidence,
    )  # fmt: skip


def judge_batches(figures: Figures) -> Iterator[Goal]:
    rows = [
        row for row in figures.report.get("batches") or []
        if row["setting"].get("length") == "auto"
    ]  # fmt: skip
    if not rows:
        yield judge(
            "draft-target with an automatic length over plain, by batch", "at least", 0.95, None,
            figures.report.get("batches_error") or "no batches were measured",
        )  # fmt: skip
    for row in rows:
        yield judge(
            f"draft-target with an automatic length over plain, batch {row['batch_size']}",
            "at least",
            0.95,
            row["ratio"]["median"],
            f"{row['tokens_per_second']['median']:.1f} against {row['plain']['median']:.1f}"
            f" tokens/s, {row['acceptance_length']:.2f} tokens a step",
        )
