#!/usr/bin/env python3
"""How fast edits are written: lookups, a draft model and chains of both over plain decoding.

    python benchmarks/edits.py [--size full|small|pycode] [--only NAME...]

The target of benchmarks/peers.py is held to the references of examples/pycode/edits.jsonl, as in
examples/pycode/edits.py, with and without drafts: all passes run, and what is emitted is the
reference, whatever the target would have chosen. So these are the speeds of a target of this size
that writes these edits. Drafters that learned what another target writes have no such speeds.

Each way has a batch of one row, as a server would, and what it has learned it keeps from text to
text; every text is decoded by all ways in turn before the next one is. Prompts are counted, and
left out in a second figure. Engines are those that peers.py or batches.py left, or new ones.
Writes edits-SIZE.json into --output-dir.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.drafters import list_lengths, pace, put_suffix_before
from benchmarks.field import Figures, Rows, Way, measure
from benchmarks.side_by_side import models
from benchmarks.side_by_side.models import DTYPE, PYCODE, SIZES
from benchmarks.side_by_side.processes import Conditions
from benchmarks.side_by_side.report import lay_out
from benchmarks.side_by_side.ways import PLAIN
from examples.pycode.edits import ALL, EDITS, make_requests
from specdec.decode.drafters.base import Drafter
from specdec.decode.drafters.prompt_lookup import PromptLookupDrafter
from specdec.decode.drafters.suffix import SuffixDrafter
from specdec.decode.loop import Batch, Options
from specdec.decode.requests import Request
from specdec.decode.timing import Timing
from specdec.files.reading import write_json
from specdec.measure.engine import PHASES, Bench, open_bench
from specdec.measure.measure import divide
from specdec.measure.report import format_spread
from specdec.methods.prompt_lookup import LookupOptions
from specdec.methods.suffix import DEFAULT_FACTOR, SuffixOptions
from specdec.run.settings import RunSettings

DRAFT_MODEL = 8  # tokens that it drafts
LENGTHS = (8, 15, 31)  # of lookups: 15 and a root are what AMX multiplies at once
FACTOR = 16  # tokens drafted for each that was found, alongside the default
NGRAM = 4


def list_ways(bench: Bench) -> dict[str, Drafter]:
    """Plain decoding, then every drafter."""

    def draft() -> Drafter:
        drafter: Drafter = list_lengths(bench, DRAFT_MODEL)[-1].drafter
        return drafter

    def suffix(length: int, factor: float = DEFAULT_FACTOR) -> SuffixDrafter:
        return SuffixDrafter(SuffixOptions(max_tokens=length, max_factor=factor))

    ways: dict[str, Drafter] = {PLAIN: bench.plain}
    for length in LENGTHS:
        ways[f"suffix of {length}"] = suffix(length)
    most = max(LENGTHS)
    ways[f"suffix of {most}, factor {FACTOR}"] = suffix(most, FACTOR)
    ways[f"suffix of {most}, budget auto"] = pace(bench, suffix(most))
    ways["prompt lookup of 15"] = PromptLookupDrafter(
        LookupOptions(num_tokens=15, max_ngram_size=NGRAM)
    )
    ways[f"suffix of 15, else draft model of {DRAFT_MODEL}"] = put_suffix_before(bench, draft(), 15)
    ways[f"draft model of {DRAFT_MODEL}"] = draft()
    return ways


def make_way(bench: Bench, name: str, drafter: Drafter, longest: int) -> Way:
    """Return a writer of one text after another in one batch. longest: tokens of all of a text."""
    build, timing = bench.engine.config.build, Timing()
    batch = Batch(
        bench.engine.decoder, drafter, Options(max_num_tokens=build.max_num_tokens), timing,
        num_rows=1, max_seq_len=longest,
    )  # fmt: skip

    def write(request: Request) -> tuple[list[int], Figures]:
        before = timing.list_seconds()
        active = batch.submit(request)
        while batch.is_busy:
            batch.step()
        stats, after = active.stats, timing.list_seconds()
        if active.output_ids != bench.tokenizer(request.input_text)["input_ids"]:
            sys.exit(f"FAILED: {name}, line {request.index + 1}: not the reference")
        took = {part: after[part] - before[part] for part in PHASES}
        return active.output_ids, {
            "steps": stats.num_verify_steps, "drafted": stats.num_draft_tokens,
            "step_seconds": sum(took.values()), "draft_seconds": took["draft"],
        }  # fmt: skip

    return write


def describe(texts: Rows, plain: Rows) -> dict[str, Any]:
    """A way's speed over some texts, and over plain decoding's."""
    ours, theirs = (
        {key: sum(text[key] for text in done) for key in done[0]} for done in (texts, plain)
    )
    num_steps = ours["steps"]
    # Without the prompt, and the first token, which comes of it.
    num_tokens = ours["tokens"] - len(texts)
    return {
        "tokens_per_second": round(ours["tokens"] / ours["seconds"], 2),
        "ratio": round(theirs["seconds"] / ours["seconds"], 3),
        "step_tokens_per_second": round(num_tokens / ours["step_seconds"], 2),
        "step_ratio": round(theirs["step_seconds"] / ours["step_seconds"], 3),
        "ratio_by_text": divide([p["seconds"] for p in plain], [t["seconds"] for t in texts]),
        "acceptance_length": round(num_tokens / num_steps, 3),
        "draft_tokens_per_step": round(ours["drafted"] / num_steps, 3),
        "step_ms": round(1000 * ours["step_seconds"] / num_steps, 2),
        "draft_ms": round(1000 * ours["draft_seconds"] / num_steps, 2),
    }


def format_table(report: Mapping[str, Any]) -> str:
    """A row for each way; its speed over plain decoding's by category, prompts counted."""
    kinds = list(report["lines"])
    head = ("times plain decoding", *kinds, "a text: median, range", "without prompts",
            "tokens/s", "tokens a step", "drafted a step", "ms a step", "to draft")  # fmt: skip
    rows = []
    for name, found in report["ways"].items():
        every = found[ALL]
        rows.append(
            [
                name, *(f"{found[kind]['ratio']:.2f}" for kind in kinds),
                format_spread(every["ratio_by_text"]), f"{every['step_ratio']:.2f}",
                f"{every['tokens_per_second']:.1f}", f"{every['acceptance_length']:.2f}",
                f"{every['draft_tokens_per_step']:.1f}",
                f"{every['step_ms']:.1f}", f"{every['draft_ms']:.1f}",
            ]
        )  # fmt: skip
    return lay_out(head, rows)


def main() -> None:
    parser = models.make_parser(__doc__, "edits")
    parser.add_argument("--only", nargs="+", help="ways whose names hold one of these, and plain")
    parser.add_argument("--prompts", type=Path, default=EDITS)
    args = parser.parse_args()
    found = models.prepare_models(SIZES[args.size], args.folder)
    engines = models.find_engines(found, ("draft-target", "draft"))
    if engines is None:
        print("building the engines", file=sys.stderr, flush=True)
        engines = models.build_engines(found, 1, 5, DRAFT_MODEL, [])
    conditions = Conditions()
    settings = RunSettings(
        engine_dir=engines["draft-target"], draft_engine_dir=engines["draft"], device="cpu",
        tokenizer_dir=str(PYCODE / "target"), draft_len=str(DRAFT_MODEL), draft_budget="fixed",
    )  # fmt: skip
    bench = open_bench(settings)
    requests = make_requests(args.prompts, bench.tokenizer)
    bench.engine.check_requests([request for _, request in requests])
    longest = max(len(r.input_ids) + r.max_output_len for _, r in requests)
    ways = {
        name: make_way(bench, name, drafter, longest)
        for name, drafter in list_ways(bench).items()
        if name == PLAIN or args.only is None or any(word in name for word in args.only)
    }
    groups: dict[str, list[Request]] = {}
    for kind, request in requests:
        groups.setdefault(kind, []).append(request)
    rows = measure(ways, groups, warms_up=False)
    rows[ALL] = {name: [row for own in rows.values() for row in own[name]] for name in ways}
    told = {
        name: {kind: describe(own[name], own[PLAIN]) for kind, own in rows.items()} for name in ways
    }
    report = {
        **conditions.describe(),
        "size": args.size, "dtype": DTYPE,
        "lines": {kind: len(own[PLAIN]) for kind, own in rows.items()}, "ways": told,
    }  # fmt: skip
    args.output_dir.mkdir(parents=True, exist_ok=True)
    write_json(args.output_dir / f"edits-{args.size}.json", report)
    print(format_table(report))
    bench.engine.close()


if __name__ == "__main__":
    main()
