#!/usr/bin/env python3
"""The prompts that the field measures with: Spec-Bench's six tasks and HumanEval, for every method.

    python benchmarks/field.py --spec-bench FOLDER --human-eval FILE [--model-dir MODEL]
                               [--drafters FOLDER] [--prompts-per-category 2] [--llama-server FILE]
                               [--default]

All methods decode each request in turn, so that what drifts favours none: greedily, then at
temperature 1; with --default, the engines as a command without options has them, all by turns
beside plain decoding. Without --model-dir the target is the chat model that
examples/smollm2/get.py fetches. Every folder of --drafters with a config.json drafts for it,
whatever its method, and every GGUF file there is a draft model; prompt lookup, suffix decoding and
lookahead need none. Where the target is a GGUF file, llama.cpp decodes the same requests from the
same file (greedily, by the llama-server that benchmarks/peers.py compiles). Prints tables of tokens
per verify step and of speed over plain decoding, and writes them as JSON; fails where a greedy text
differs from plain decoding's.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.drafters import pace
from benchmarks.side_by_side import models
from benchmarks.side_by_side.processes import Conditions
from benchmarks.side_by_side.report import lay_out
from benchmarks.side_by_side.workers.llama_cpp import NGRAM_SIZE, Servers
from examples.smollm2.get import get_model
from specdec.decode.drafters.base import Drafter
from specdec.decode.drafters.lookahead import LookaheadDrafter
from specdec.decode.drafters.prompt_lookup import PromptLookupDrafter
from specdec.decode.drafters.suffix import SuffixDrafter
from specdec.decode.requests import Request
from specdec.decode.timing import Timing
from specdec.errors import SpecDecError
from specdec.files.reading import write_json
from specdec.generate.pipeline import hold_engines
from specdec.generate.settings import GenerateSettings
from specdec.measure.engine import Bench, open_bench
from specdec.measure.prompts import BenchPrompt, read_prompt_set
from specdec.measure.repetition import is_looping
from specdec.methods import METHODS, place_drafter
from specdec.methods.lookahead import LookaheadConfig
from specdec.methods.prompt_lookup import LookupOptions
from specdec.methods.suffix import SuffixOptions
from specdec.run.settings import RunSettings

LOOKAHEAD = LookaheadConfig(4, 4, 4)
PLAIN, LLAMA = "plain", "llama.cpp, "
WARM_UP_TOKENS = 8
SERVER = ROOT / "out" / "peers" / "environments" / "llama.cpp" / "build" / "bin" / "llama-server"
Figures = Mapping[str, float]
Way = Callable[[Request], tuple[list[int], Figures]]  # a request's text; `steps`, and others' own
Rows = Sequence[Mapping[str, Any]]


@contextlib.contextmanager
def open_engine(args: argparse.Namespace, drafter: Path | None) -> Iterator[Bench]:
    """Convert and build, or take what `specdec generate` keeps; yield the engine."""
    if args.default:
        with hold_engines(GenerateSettings(
            texts=["."], model_dir=str(args.model_dir), quantization=args.quantization,
            max_batch_size=1, device="cpu", drafter_model_dir=str(drafter) if drafter else None,
            drafter_weights=args.drafter_weights if drafter else "auto",
        )) as run:  # fmt: skip
            yield (bench := open_bench(RunSettings(**run)))
            bench.engine.close()
        return
    drafts: dict[str, Any] = {
        "prompt_lookup_num_tokens": max(args.num_tokens, LOOKAHEAD.max_draft_tokens)
    }
    if drafter is not None:  # a file is a draft model
        name = "draft_model_dir" if drafter.is_file() else str(METHODS["redrafter"].folder)
        drafts = {name: str(drafter), "drafter_weights": args.drafter_weights}
        if drafter.is_dir():
            drafts["eagle_choices"] = args.eagle_choices
    asked = place_drafter(GenerateSettings(
        texts=["."], model_dir=str(args.model_dir), quantization=args.quantization,
        max_batch_size=1, device="cpu", draft_budget="fixed", **drafts,
    ))  # fmt: skip
    if asked.draft_model_dir:
        asked = dataclasses.replace(
            asked, draft_len=str(args.num_tokens), draft_vocabulary=args.draft_vocabulary
        )
    with hold_engines(asked) as run:
        bench = open_bench(RunSettings(**run))
        yield bench
        bench.engine.close()


def list_ways(bench: Bench, name: str | None, args: argparse.Namespace) -> dict[str, Way]:
    """Plain decoding and the methods of an engine. name: of its drafter, None where it has none."""
    if args.default:
        engine = bench.engine
        return make_ways(bench, {PLAIN: bench.plain, f"default, {engine.method}": engine.drafter})
    drafters: dict[str, Drafter] = {
        f"prompt lookup, {args.num_tokens}": PromptLookupDrafter(
            LookupOptions(num_tokens=args.num_tokens, max_ngram_size=NGRAM_SIZE)
        ),
        f"suffix, {args.num_tokens}": SuffixDrafter(SuffixOptions(max_tokens=args.num_tokens)),
        f"lookahead {LOOKAHEAD}": LookaheadDrafter(LOOKAHEAD, bench.engine.decoder),
    }
    if name is not None:
        drafters = {name: bench.engine.drafter}
    if args.draft_budget == "auto":
        drafters = {name: pace(bench, drafter) for name, drafter in drafters.items()}
    return make_ways(bench, {PLAIN: bench.plain} | drafters)


def make_ways(bench: Bench, drafters: Mapping[str, Drafter]) -> dict[str, Way]:
    """Return what decodes a request by each of some drafters."""

    def make(drafter: Drafter) -> Way:
        def run(request: Request) -> tuple[list[int], Figures]:
            (result,) = bench.decode([request], drafter, 1, Timing())
            return result.output_ids, {"steps": result.stats.num_verify_steps}

        return run

    return {name: make(drafter) for name, drafter in drafters.items()}


def list_llama_ways(servers: Servers, num_tokens: int) -> dict[str, Way]:
    """llama.cpp's: plain, prompt lookup, and the draft model where there is one."""

    def make(way: str) -> Way:
        server = servers.get(way, {} if way == PLAIN else {"length": num_tokens})

        def run(request: Request) -> tuple[list[int], Figures]:
            found = server.complete(list(request.input_ids), request.max_output_len)
            accepted = found["timings"].get("draft_n_accepted", 0)
            return found["tokens"], {"steps": found["timings"]["predicted_n"] - 1 - accepted}

        return run

    names = [PLAIN, "prompt lookup", *(["draft model"] if servers.draft else [])]
    return {LLAMA + name: make(name) for name in names}


def find_plain(way: str) -> str:
    """The way that another is held against."""
    return LLAMA + PLAIN if way.startswith(LLAMA) else PLAIN


def measure(
    ways: Mapping[str, Way], groups: Mapping[str, Sequence[Request]], *, warms_up: bool = True
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """By task and way, a row for each request."""
    first = next(iter(groups.values()))[0]
    for way in ways.values() if warms_up else ():
        way(dataclasses.replace(first, max_output_len=WARM_UP_TOKENS))
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for task, requests in groups.items():
        rows = found[task] = {name: [] for name in ways}
        for number, request in enumerate(requests):
            texts = {}
            for name in list(ways)[:: -1 if number % 2 else 1]:  # what drifts favours none
                began = time.perf_counter()
                texts[name], figures = ways[name](request)
                rows[name].append({"seconds": time.perf_counter() - began, **figures})
            for name, text in texts.items():
                plain = texts[find_plain(name)]
                rows[name][-1] |= {
                    "tokens": len(text), "is_plain": text == plain, "loops": is_looping(plain)
                }  # fmt: skip
    return found


def measure_target(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """By temperature, a row for each way of all engines."""
    prompts = [
        prompt
        for source in (f"spec-bench:{args.spec_bench}", f"humaneval:{args.human_eval}")
        for prompt in read_prompt_set(Path(source), num_each=args.prompts_per_category)
    ]
    table: dict[str, list[dict[str, Any]]] = {t: [] for t in args.temperatures}
    drafters: dict[str | None, Path | None] = {None: None}
    if args.drafters is not None:
        folders = [config.parent for config in args.drafters.glob("*/config.json")]
        # A draft model is no drafter of an engine's own, which alone drafts without a flag.
        draft_models = [] if args.default else args.drafters.glob("*.gguf")
        found = sorted([*folders, *draft_models])
        drafters |= {path.stem if path.is_file() else path.name: path for path in found}
    engines = list(drafters.items())
    for held in [engines] if args.default else [[engine] for engine in engines]:
        with contextlib.ExitStack() as stack:
            benches = {name: stack.enter_context(open_engine(args, path)) for name, path in held}
            for temperature, rows in table.items():
                names = ", ".join(name or "methods without a drafter" for name in benches)
                print(f"temperature {temperature}: {names}", file=sys.stderr, flush=True)
                told = describe(measure_engines(args, benches, prompts, temperature))
                rows += told[1:] if rows else told  # plain decoding is told once
    return table


def measure_engines(
    args: argparse.Namespace, benches: Mapping[str | None, Bench], prompts: Sequence[BenchPrompt],
    temperature: str,
) -> dict[str, dict[str, list[dict[str, Any]]]]:  # fmt: skip
    """Let the ways of some engines, by their drafters' names, decode each request in turn."""
    settings = RunSettings(
        engine_dir=Path(), temperature=temperature, max_output_len=args.max_output_len
    )
    ways: dict[str, Way] = {}
    for name, bench in benches.items():
        bench.take_prompts(prompts, settings)
        ways |= {way: run for way, run in list_ways(bench, name, args).items() if way not in ways}
    with contextlib.ExitStack() as stack:
        if None in benches and temperature == "0" and args.llama_server:
            servers = Servers(
                str(args.llama_server), [], str(args.model_dir), args.llama_draft or "",
                args.threads, 4096,
            )  # fmt: skip
            stack.callback(servers.end)
            ways |= list_llama_ways(servers, args.num_tokens)
        return measure(ways, next(iter(benches.values())).groups)


def describe(found: Mapping[str, Mapping[str, Rows]]) -> list[dict[str, Any]]:
    """A row for each way: by task and over all, its tokens per step and its speed."""
    names = next(iter(found.values()))
    every = {name: [row for ways in found.values() for row in ways[name]] for name in names}
    return [
        {"way": name}
        | {
            task: summarize(ways[name], ways[find_plain(name)])
            for task, ways in ({"all": every} | {**found}).items()
        }
        for name in names
    ]


def summarize(rows: Rows, plain: Rows) -> dict[str, Any]:
    """One way's requests beside plain decoding's."""

    def add(rows: Rows, key: str) -> float:
        return float(sum(row[key] for row in rows))

    def count_per_step(rows: Rows) -> float:  # the prompt's own pass yields the first token
        return (add(rows, "tokens") - len(rows)) / max(1.0, add(rows, "steps"))

    rate, plain_rate = (add(r, "tokens") / add(r, "seconds") for r in (rows, plain))
    return {
        "tokens_per_step": count_per_step(rows), "times_plain": rate / plain_rate,
        "tokens_per_step_without_loops": count_per_step([row for row in rows if not row["loops"]]),
        "tokens_per_second": rate, "texts": len(rows), "like_plain": int(add(rows, "is_plain")),
        "loops": int(add(rows, "loops")),
    }  # fmt: skip


def format_tables(rows: Rows, temperature: str) -> str:
    """Tokens per verify step, and times plain decoding."""
    name = f"temperature {temperature}"
    tasks = [task for task in rows[0] if task != "way"]
    texts = f"without the {rows[0]['all']['loops']} of {rows[0]['all']['texts']} that loop"
    steps, speeds = [], []
    for row in rows:
        way, total = row["way"], row["all"]
        lengths = [row[task]["tokens_per_step"] for task in tasks]
        lengths.append(total["tokens_per_step_without_loops"])
        steps.append([way, *(f"{length:.2f}" for length in lengths)])
        ratios = [f"{row[task]['times_plain']:.2f}" for task in tasks]
        equal = f"{total['like_plain']} of {total['texts']}"
        speeds.append([way, *ratios, f"{total['tokens_per_second']:.1f}", equal])
    return "\n\n".join((
        lay_out([f"tokens per step, {name}", *tasks, texts], steps),
        lay_out([f"times plain, {name}", *tasks, "tokens/s", "texts like plain"], speeds),
    ))  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    parser = models.make_parser(__doc__)
    parser.add_argument("--spec-bench", type=Path, required=True)
    parser.add_argument("--human-eval", type=Path, required=True)
    parser.add_argument("--model-dir", type=Path)
    parser.add_argument("--drafters", type=Path)
    parser.add_argument("--quantization")
    parser.add_argument("--draft-vocabulary", default="same", choices=("same", "shared"))
    parser.add_argument(
        "--drafter-weights", default="auto", choices=("auto", "same", "int8", "int4")
    )
    parser.add_argument("--eagle-choices", help="the tree of the folders' drafters, all EAGLE's")
    parser.add_argument("--draft-budget", default="fixed", choices=("fixed", "auto"))
    parser.add_argument(
        "--default",
        action="store_true",
        help="measure what drafts without a flag, and nothing else",
    )
    parser.add_argument("--temperatures", nargs="+", default=["0", "1"], metavar="T")
    parser.add_argument("--num-tokens", type=int, default=8, help="drafted in a step, at most")
    parser.add_argument("--prompts-per-category", type=int, default=2)
    parser.add_argument("--max-output-len", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--llama-draft", help="a GGUF of the draft model, for llama.cpp")
    parser.add_argument("--output", type=Path, default=ROOT / "out" / "field.json")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    import torch

    args = make_parser().parse_args(words)
    torch.set_num_threads(args.threads)
    try:
        if args.model_dir is None:
            args.model_dir, args.drafters = get_model(), args.drafters or ROOT / "examples/smollm2"
        if args.model_dir.suffix == ".gguf" and args.llama_server is None and SERVER.exists():
            args.llama_server = SERVER
        conditions = Conditions()
        table = measure_target(args)
    except SpecDecError as error:
        raise SystemExit(f"error: {error.message}\nhint: {error.hint}") from None
    args.output.parent.mkdir(parents=True, exist_ok=True)
    settings = {name: str(value) for name, value in vars(args).items()}
    write_json(args.output, conditions.describe() | {"settings": settings, "rows": table})
    print("\n\n".join(format_tables(table[t], t) for t in args.temperatures))
    greedy = [row for row in table.get("0", []) if not row["way"].startswith(LLAMA)]
    different = [r["way"] for r in greedy if r["all"]["like_plain"] < r["all"]["texts"]]
    if different:
        raise SystemExit(f"FAILED: texts differ from plain decoding's: {', '.join(different)}")


if __name__ == "__main__":
    main()
