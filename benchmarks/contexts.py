#!/usr/bin/env python3
"""What a step costs behind a long context, and its first token: our engine beside llama.cpp.

    python benchmarks/contexts.py [--layers 4] [--contexts 256,8192,32768] [--prompt 8192]
                                  [--rounds 2] [--llama-server PROGRAM] [--prepare] [--output FILE]
                                  [--record]

A Llama of random weights in bfloat16 and random tokens, the same for both, one request, greedy; the
engines take turns behind each context. Ours runs as specdec serve runs it: a batch that takes from
its cache what it holds of a prompt already. --layers 4 keeps the price of attention to that of the
other products as it is with 22, of which 4 make reading a context bearable; the head counts more.

A context of up to --prompt tokens is read anew in each round, and the time to the first token is
taken; a longer one is read once. llama.cpp reads those so slowly that its cache of them is written
to a file in --folder when it is first filled, and restored by later runs. --prepare does no more
than that, and makes the model. The server is the one that benchmarks/peers.py has compiled.

Ours verifies drafts of 7 tokens in a step of 8, with the logits of all. llama.cpp cannot be made
to: it reads 8 tokens behind the context, with the logits of the last. Its times are its own counts,
without HTTP.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.side_by_side import models
from benchmarks.side_by_side.report import lay_out
from benchmarks.side_by_side.workers.llama_cpp import Server
from specdec.bench.engine import PARTS, Bench, open_bench
from specdec.bench.machine import LoadMeter, describe_load, describe_machine
from specdec.bench.measure import summarize
from specdec.decode.accept import Candidates
from specdec.decode.drafters.base import Drafter
from specdec.decode.loop import Batch, Options, Timing
from specdec.decode.requests import ActiveRequest, Request
from specdec.engine.tree import pack_beams
from specdec.processes import call_stage
from specdec.run.settings import RunSettings

PYCODE = ROOT / "examples" / "pycode"
LLAMA_SERVER = (
    ROOT / "out" / "peers" / "environments" / "llama.cpp" / "build" / "bin" / "llama-server"
)
RESULTS = ROOT / "benchmarks" / "results" / "contexts-bf16.json"
NUM_DRAFTED = 7
NUM_STEPS = 8
VOCAB_SIZE = 4096
FIRST_ID = 5  # of random tokens: those before it are special
ROOM = 64  # positions behind a context


class Guesses(Drafter):
    """Drafts `length` random tokens, which are hardly ever right."""

    def __init__(self) -> None:
        self.max_draft_tokens = self.max_draft_depth = NUM_DRAFTED
        self.length = 0
        self._generator = np.random.default_rng(0)

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """A chain of the length that is set; with 0, plain decoding."""
        roots = [request.output_ids[-1] for request in requests]
        if not self.length:
            return super().propose(requests)
        drafts = self._generator.integers(VOCAB_SIZE, size=(len(roots), 1, self.length))
        return [Candidates(pack_beams(r, d)) for r, d in zip(roots, drafts, strict=True)]


class Ours:
    """One cache row of our engine, and the context that it holds."""

    def __init__(self, bench: Bench, context: int) -> None:
        decoder = bench.engine.decoder
        self._guesses, self._timing = Guesses(), Timing()
        options = Options(
            max_num_tokens=bench.engine.config.build.max_num_tokens, reuse_blocks=True,
            max_batch_size=1,
        )  # fmt: skip
        self._batch = Batch(
            decoder, self._guesses, options, self._timing, num_rows=1, max_seq_len=context + ROOM
        )

    def read(self, context: Sequence[int]) -> float:
        """Seconds to the first token behind a context of which nothing is known."""
        began = time.perf_counter()
        self._run(context, 1)
        return time.perf_counter() - began

    def time_step(self, context: Sequence[int], extra: int, size: int) -> float:
        """Seconds of a step of so many tokens, of several behind a known context and a token."""
        self._guesses.length = size - 1
        for part in PARTS:
            setattr(self._timing, part, 0.0)
        self._timing.num_steps = self._timing.num_reused_tokens = 0
        self._run([*context, extra], 1 + NUM_STEPS)
        assert self._timing.num_reused_tokens == len(context)
        return float(sum(getattr(self._timing, part) for part in PARTS)) / self._timing.num_steps

    def _run(self, prompt: Sequence[int], max_output_len: int) -> None:
        self._batch.submit(
            Request(
                index=0, input_ids=list(prompt), max_output_len=max_output_len, end_ids=frozenset()
            )
        )
        while self._batch.is_busy:
            self._batch.step()


class Theirs:
    """llama-server with one slot."""

    def __init__(
        self, program: Path, gguf: Path, folder: Path, positions: int, threads: int
    ) -> None:
        words = [
            program, "--model", gguf, "--threads", threads, "--threads-batch", threads,
            "--ctx-size", positions, "--parallel", 1, "--cache-ram", 0, "--fit", "off",
            "--slot-save-path", folder, "--log-verbosity", 2,
        ]  # fmt: skip
        self._folder = folder
        self.server = Server([str(word) for word in words])

    def read(self, context: Sequence[int]) -> float:
        """Seconds to the first token behind a context of which nothing is known."""
        self.server.post("/slots/0?action=erase", {})
        return self._complete(context, 1, len(context))["prompt_ms"] / 1000

    def hold(self, context: Sequence[int]) -> None:
        """Have a context in the cache: out of a file, which is written if it is not there."""
        digest = hashlib.sha256(json.dumps(context).encode()).hexdigest()[:12]
        name = f"context-{len(context)}-{digest}.bin"
        if not (self._folder / name).exists():
            print(f"llama.cpp reads {len(context)} tokens", file=sys.stderr, flush=True)
            self.read(context)
            self.server.post("/slots/0?action=save", {"filename": f"{name}.partial"})
            (self._folder / f"{name}.partial").rename(self._folder / name)
        self.server.post("/slots/0?action=restore", {"filename": name})

    def time_step(self, context: Sequence[int], extra: int, size: int) -> float:
        """Seconds of a plain step, of several; or of reading `size` tokens behind the context."""
        if size > 1:
            return self._complete([*context, *[extra] * size], 1, size)["prompt_ms"] / 1000
        # Its first token is of the prompt, and not in this time.
        found = self._complete([*context, extra], 1 + NUM_STEPS, 1)
        return found["predicted_ms"] / NUM_STEPS / 1000

    def _complete(self, prompt: Sequence[int], count: int, expected: int) -> Mapping[str, float]:
        """Its times; raise SystemExit where it has read more than was unknown."""
        body = {
            "prompt": list(prompt), "n_predict": count, "temperature": 0.0, "top_k": 1,
            "samplers": ["top_k"], "cache_prompt": True, "ignore_eos": True,
        }  # fmt: skip
        timings: dict[str, float] = self.server.post("/completion", body)["timings"]
        if timings["prompt_n"] != expected or timings["predicted_n"] != count:
            raise SystemExit(
                f"llama.cpp has read {timings['prompt_n']} tokens and written"
                f" {timings['predicted_n']}, expected were {expected} and {count}"
            )
        return timings


def make_model(args: argparse.Namespace, positions: int) -> Path:
    """A Hugging Face folder, its engine and its GGUF file, unless they are there."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=args.hidden, intermediate_size=args.intermediate,
        num_hidden_layers=args.layers, num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads, max_position_embeddings=positions,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=0, dtype="bfloat16",
    )  # fmt: skip
    digest = hashlib.sha256(config.to_json_string().encode()).hexdigest()[:12]
    folder: Path = args.folder.resolve() / digest
    if not (folder / "gguf" / "model.gguf").exists():
        shutil.rmtree(folder, ignore_errors=True)
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained(folder / "model")
        for path in (PYCODE / "target").glob("*token*"):
            shutil.copy(path, folder / "model")
        call_stage(
            "export",
            ["--model-dir", str(folder / "model"), "--to", "gguf",
             "--output-dir", str(folder / "gguf")],
        )  # fmt: skip
    models.build_engine(  # anew: ours may have changed
        folder / "model", folder / "engine",
        build=["--max-batch-size", "1", "--max-input-len", str(positions - ROOM // 2)],
    )  # fmt: skip
    return folder


def draw(generator: random.Random, count: int) -> list[int]:
    """Random tokens."""
    return [generator.randrange(FIRST_ID, VOCAB_SIZE) for _ in range(count)]


def measure(bench: Bench, theirs: Theirs, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each context: milliseconds of each engine, by what was timed."""
    # Each time another token: what the cache holds behind the context is not to be found again.
    extras = itertools.cycle(range(FIRST_ID, FIRST_ID + 100))
    for length in args.contexts:
        generator = random.Random(length)
        context = draw(generator, length)
        ours = Ours(bench, length)
        is_read = length <= args.prompt
        times: dict[str, dict[str, list[float]]] = {"specdec": {}, "llama.cpp": {}}
        if not is_read:
            times["specdec"]["first_token"] = [1000 * ours.read(context)]
            theirs.hold(context)
        turns: list[tuple[str, Ours | Theirs]] = [("specdec", ours), ("llama.cpp", theirs)]
        for number in range(args.rounds):
            print(f"{length} tokens, round {number + 1} of {args.rounds}", file=sys.stderr)
            context = draw(generator, length) if is_read else context
            for name, engine in turns if number % 2 == 0 else turns[::-1]:
                if is_read:
                    taken = engine.read(context)
                    times[name].setdefault("first_token", []).append(1000 * taken)
            for _ in range(args.repeat):
                for name, engine in turns:
                    for size in (1, 1 + NUM_DRAFTED):
                        taken = engine.time_step(context, next(extras), size)
                        times[name].setdefault(f"step_{size}", []).append(1000 * taken)
        yield {"context": length} | {
            name: {what: summarize(values) for what, values in found.items()}
            for name, found in times.items()
        }


def compare(row: dict[str, Any]) -> dict[str, float]:
    """By what was timed, llama.cpp's median over ours."""
    ours, theirs = row["specdec"], row["llama.cpp"]
    return {
        what: round(theirs[what]["median"] / ours[what]["median"], 2)
        for what in ours
        if what in theirs
    }


def format_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """The report as a Markdown table: milliseconds of ours, of llama.cpp, and its over ours."""
    names = {"first_token": "first token", "step_1": "a plain step", "step_8": "a step of 8"}

    def tell(row: Mapping[str, Any], what: str) -> str:
        both = [
            "-" if what not in row[name] else f"{row[name][what]['median']:,.1f}"
            for name in ("specdec", "llama.cpp")
        ]
        ratio = row["ratios"].get(what)
        return " / ".join(both) + ("" if ratio is None else f" ({ratio:.2f})")

    lines = [[f"{row['context']:,}", *(tell(row, what) for what in names)] for row in rows]
    return lay_out(("context", *(f"{name}, ms" for name in names.values())), lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama-server", type=Path, default=LLAMA_SERVER)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--contexts", default="256,8192,32768", help="numbers with commas")
    parser.add_argument(
        "--prompt", type=int, default=8192, help="longest that both read in a round"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3, help="of each step in a round")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, default=ROOT / "out" / "contexts")
    parser.add_argument("--prepare", action="store_true",
                        help="fill llama.cpp's caches, and end")  # fmt: skip
    parser.add_argument("--output", type=Path, help="of the figures, as JSON")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results")
    args = parser.parse_args()
    args.contexts = [int(number) for number in args.contexts.split(",")]
    if not args.llama_server.exists():
        raise SystemExit(
            f"error: there is no {args.llama_server}\n"
            "hint: benchmarks/peers.py --peers llama.cpp compiles it; or give --llama-server"
        )
    torch.set_num_threads(args.threads)
    positions = max(args.contexts) + ROOM
    folder = make_model(args, positions)
    theirs = Theirs(
        args.llama_server, folder / "gguf" / "model.gguf", folder, positions, args.threads
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # else the server would live on
    try:
        if args.prepare:
            for length in args.contexts:
                if length > args.prompt:
                    theirs.hold(draw(random.Random(length), length))
            return
        bench = open_bench(
            RunSettings(
                engine_dir=folder / "engine", tokenizer_dir=str(folder / "model"), device="cpu"
            ),
            needs_drafter=False,
        )
        head, meter = describe_machine(), LoadMeter()
        rows = [row | {"ratios": compare(row)} for row in measure(bench, theirs, args)]
    finally:
        theirs.server.end()
    others = meter.measure()  # the server has ended, and is not one of them
    report = head | {
        "processors_used_by_others": others, "warnings": describe_load(others),
        "commit": models.read_commit(), "dtype": "bfloat16",
        "layers": args.layers, "hidden": args.hidden, "rounds": args.rounds,
        "repeat": args.repeat, "rows": rows,
    }  # fmt: skip
    if output := RESULTS if args.record else args.output:
        output.write_text(json.dumps(report, indent=2) + "\n")
    print(format_rows(rows))


if __name__ == "__main__":
    main()
