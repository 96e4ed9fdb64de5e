#!/usr/bin/env python3
"""Our engine compared with transformers, llama.cpp and OpenVINO GenAI: one machine, one run.

    python benchmarks/peers.py [--size full|small|pycode] [--peers NAME...] [--threads 2]

All get equal Hugging Face folders, prompts and output lengths, greedy, in bfloat16, one request
at a time. Each peer is installed from the package index into a virtual environment of its own, runs
in a process of its own that loads once, and takes its turn in every round. Speculative ways choose
the fastest of the same draft lengths first. A peer that cannot be installed, or dies, has its
reason in the table.

--size full grows the pycode models to 986M parameters (benchmarks/grow.py): it needs 20 GB of
memory, 24 GB of disk and more than an hour on 2 old cores. small takes some 20 minutes, pycode 10;
the first run of all installs the peers besides, half an hour with compiling llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):  # started as a file
    sys.path.insert(0, str(ROOT))

from benchmarks.side_by_side import install, models
from benchmarks.side_by_side.models import DTYPE, PYCODE, SIZES, Models
from benchmarks.side_by_side.processes import Conditions, PeerError, Worker
from benchmarks.side_by_side.report import format_markdown
from benchmarks.side_by_side.rounds import Work, describe_ways, measure_ways
from benchmarks.side_by_side.ways import (
    LLAMA_CPP,
    OURS,
    PEERS,
    QUANTIZED,
    SearchShape,
    Way,
    list_ways,
)
from specdec.errors import SpecDecError
from specdec.files.reading import write_json
from specdec.system.machine import read_cpu_flags

BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")  # the last is ARM's
# llama.cpp decodes quantized weights in a form for AMX where the processor has it, and ends with a
# segmentation fault (0.3.36's, and its newest of November 2026). This leaves out all such forms.
NO_REPACK = "--no-repack"
NO_REPACK_REASON = f"{NO_REPACK}, as its form of them for AMX ends with a segmentation fault"
MODULES = {
    "specdec": "engine", "specdec-draft": "engine", "transformers": "transformers_models",
    "llama.cpp": "llama_cpp", "openvino": "openvino",
}  # fmt: skip


def main(words: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(words)
    try:
        report = json.loads(args.report.read_text()) if args.report else measure(args)
    except SpecDecError as error:
        raise SystemExit(f"error: {error.message}\nhint: {error.hint}") from None
    print(format_markdown(report))
    if not args.report:
        folder = args.output_dir or args.folder
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"peers-{args.size}.json", report)


def make_parser() -> argparse.ArgumentParser:
    parser = models.make_parser(__doc__, "peers")
    parser.set_defaults(output_dir=None)  # --folder
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=[*PEERS, *QUANTIZED],
                        metavar="NAME",
                        help=f"of {', '.join(PEERS)}, which are those if not given, and with"
                        f" quantized weights {', '.join(QUANTIZED)}")  # fmt: skip
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3, help="after one that warms up")
    parser.add_argument(
        "--prompts", type=int, help="of the prompt file; the size says if not given"
    )
    parser.add_argument("--max-output-len", type=int)
    parser.add_argument("--prompt-file", type=Path, default=PYCODE / "prompts.jsonl")
    parser.add_argument("--long-prompt", type=int, default=512, help="tokens")
    parser.add_argument("--trees", type=read_trees, default="1x5,4x5,8x5/15",
                        help="ReDrafter's beams x length to choose from; / the best so many"
                        " tokens of their tree")  # fmt: skip
    parser.add_argument("--lengths", type=read_lengths, default="2,4,6,8",
                        help="draft lengths that every peer chooses from")  # fmt: skip
    parser.add_argument("--draft-trees", type=read_lengths, default="15,31",
                        help="tokens of trees that our draft model chooses from, too")  # fmt: skip
    parser.add_argument("--build-flags", nargs="*", default=[], metavar="FLAG=VALUE",
                        help="of specdec-build, without the dashes, as optimize=none")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one answer")
    parser.add_argument("--report", type=Path, help="print a written report and measure nothing")
    parser.add_argument("--anyway", action="store_true", help="though memory or disk are short")
    return parser


def read_trees(text: str) -> list[SearchShape]:
    """Read beams x length, as 1x3,2x4, and the size of a dynamic tree, as 8x5/15."""
    number = r"([1-9]\d*)"
    pattern = re.compile(rf"{number}x{number}(?:/{number})?")
    shapes = []
    for part in text.split(","):
        match = pattern.fullmatch(part.strip())
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form 1x3,8x5/15")
        beams, length = int(match[1]), int(match[2])
        size = int(match[3]) if match[3] else None
        if size is not None and not length < size < beams * length:
            raise argparse.ArgumentTypeError(
                f"a dynamic tree of {size} tokens from {beams} x {length}: it has more than a beam"
                " and fewer than all of them"
            )
        shapes.append(SearchShape(beams, length, size))
    return shapes


def read_lengths(text: str) -> list[int]:
    """Read whole numbers above 0, as 2,4."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 2,4")
    return [int(part) for part in parts]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Install, prepare, start, measure, and end all workers whatever happens."""
    size = SIZES[args.size]
    if (shortage := models.find_shortage(size, args.folder)) and not args.anyway:
        raise SpecDecError(
            "; ".join(shortage), "choose fewer --peers, a smaller --size, or --anyway"
        )
    print(
        f"{args.size}: takes up to {size.memory_gb:.0f} GB of memory and {size.disk_gb:.0f} GB of"
        f" disk in {args.folder}",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    ways = list_ways(args.peers, args.trees, args.lengths, args.draft_trees)
    found, starters, errors = prepare(args)
    workers: dict[str, Worker] = {}
    about: dict[str, dict[str, Any]] = {}
    try:
        conditions = Conditions()
        for name, start in starters.items():
            print(f"starting {name}", file=sys.stderr, flush=True)
            try:
                workers[name] = start()
            except PeerError as error:
                errors[name] = str(error)
        for way in ways:
            told = workers[way.worker].about if way.worker in workers else None
            about.setdefault(way.peer, told or {"error": errors[way.worker]})
        found_ways = measure_workers(args, conditions, found, ways, workers, errors)
        return found_ways | {"threads": args.threads, "peers": about}
    finally:
        for worker in workers.values():
            worker.end()


def prepare(
    args: argparse.Namespace,
) -> tuple[Models, dict[str, Callable[[], Worker]], dict[str, str]]:
    """Return the models, what starts each worker, and why others cannot be, by their names."""
    log = args.folder / "logs" / f"{args.size}-prepare.log"
    log.unlink(missing_ok=True)
    try:
        found = models.prepare_models(SIZES[args.size], args.folder, log)
    except PeerError as error:
        raise SpecDecError(str(error), f"see {log}") from None
    starters: dict[str, Callable[[], Worker]] = {}
    errors: dict[str, str] = {}
    for peer in args.peers:
        program, kind = QUANTIZED.get(peer, (peer, None))
        install_log = args.folder / "logs" / f"{program}-install.log"
        try:
            python = Path(sys.executable)
            if program != OURS:
                folder = args.folder / "environments" / program
                python = install.install_peer(program, folder, install_log)
            for name, settings in list_settings(program, kind, args, found, python, log).items():
                starters[name] = make_starter(name, program, python, settings, args)
        except PeerError as error:
            names = [peer] if kind else [name for name in MODULES if MODULES[name] == MODULES[peer]]
            errors |= dict.fromkeys(names, str(error))
            print(f"{peer}: {error}", file=sys.stderr, flush=True)
    return found, starters, errors


def list_settings(
    peer: str, kind: str | None, args: argparse.Namespace, found: Models, python: Path, log: Path
) -> dict[str, dict[str, Any]]:
    """Make what the peer loads; return the settings of its workers by their names.

    kind: of its target's weights, None where they are as the model has them.
    """
    common: dict[str, Any] = {"threads": args.threads}
    if peer == OURS:
        print("converting and building our engines", file=sys.stderr, flush=True)
        beams, length = (max(getattr(t, key) for t in args.trees) for key in ("beams", "length"))
        longest = max(length, *args.lengths, *args.draft_trees)
        flags = [f"--{flag}" for flag in args.build_flags]
        engines = models.build_engines(found, beams, length, longest, flags, kind)
        common |= {
            "tokenizer_dir": str(found.target), "beams": sorted({t.beams for t in args.trees}),
            "sizes": sorted({t.size for t in args.trees if t.size}),
            "draft_engine_dir": None,
        }  # fmt: skip
        drafting = common | {
            "engine_dir": str(engines["draft-target"]), "max_length": max(args.lengths),
            "draft_engine_dir": str(engines["draft"]), "sizes": args.draft_trees,
        }  # fmt: skip
        if kind:
            return {f"{OURS}-{kind}": drafting}
        plain = common | {"engine_dir": str(engines["redrafter"]), "max_length": length}
        return {OURS: plain, "specdec-draft": drafting}
    if peer == "transformers":
        folders = {"target": str(found.target), "draft": str(found.draft)}
        return {peer: common | folders | {"dtype": DTYPE}}
    if peer == LLAMA_CPP:
        programs = python.parent.parent / "build" / "bin"
        files = models.make_gguf(found)
        if kind:
            files = models.quantize_gguf(files, kind, programs / "llama-quantize", log)
        positions = json.loads((found.target / "config.json").read_text())
        spoils = kind is not None and "amx_int8" in read_cpu_flags()
        return {
            f"{peer}-{kind}" if kind else peer: common
            | {name: str(path) for name, path in files.items()}
            | {
                "server": str(programs / "llama-server"), "flags": [NO_REPACK] if spoils else [],
                "computes_in": f"{kind or DTYPE} weights"
                + (f"; {NO_REPACK_REASON}" if spoils else ""),
                "positions": positions["max_position_embeddings"],
                "version": f"of {install.LLAMA_CPP}",
            }
        }  # fmt: skip
    print("exporting for OpenVINO", file=sys.stderr, flush=True)
    made = models.make_openvino(found, python, log)
    return {peer: common | {n: str(path) for n, path in made.items()} | {"dtype": DTYPE}}


def make_starter(
    name: str, peer: str, python: Path, settings: Mapping[str, Any], args: argparse.Namespace
) -> Callable[[], Worker]:
    log = args.folder / "logs" / f"{args.size}-{name}.log"
    command: list[str | Path] = [python, "-m", f"side_by_side.workers.{MODULES[peer]}"]
    return lambda: Worker(name, command, settings, log, threads=args.threads, timeout=args.timeout)


def measure_workers(
    args: argparse.Namespace, conditions: Conditions, found: Models, ways: Sequence[Way],
    workers: Mapping[str, Worker], errors: Mapping[str, str],
) -> dict[str, Any]:  # fmt: skip
    """All that needs running workers."""
    size = SIZES[args.size]
    end_id = json.loads((found.target / "config.json").read_text())["eos_token_id"]
    num_prompts = args.prompts or size.num_prompts
    work = Work(
        prompts=models.read_prompts(args.prompt_file, found.target, num_prompts),
        long_prompt=models.make_long_prompt(args.prompt_file, found.target, args.long_prompt),
        max_output_len=args.max_output_len or size.max_output_len,
        end_id=end_id, rounds=args.rounds,
    )  # fmt: skip
    conditions.watch([worker.group for worker in workers.values()])
    measured = measure_ways(ways, workers, errors, work)
    return conditions.describe() | {
        "size": args.size, "dtype": DTYPE,
        "instructions": [name for name in BF16_INSTRUCTIONS if name in read_cpu_flags()],
        "target_gb": (found.target / "model.safetensors").stat().st_size / 1e9,
        "num_prompts": len(work.prompts), "rounds": args.rounds,
        "max_output_len": work.max_output_len, "long_prompt_tokens": len(work.long_prompt),
        "build_flags": args.build_flags, "ways": describe_ways(measured),
    }  # fmt: skip


if __name__ == "__main__":
    main()
