#!/usr/bin/env python3
"""Costs of a drafter for a large target by stage, and how well such a sum predicts local runs.

    python benchmarks/scale.py plan                       # the tables of docs/scale.md
    python benchmarks/scale.py check [--work-dir DIR] [--output FILE.json] [--only STAGE...]

`plan` is arithmetic over `Rates`, whose sources docs/scale.md names. `check` runs stages of the
shipped pycode target in two sizes, lays a line through them (a start, and a rate), predicts a
third, larger run and measures it. Trainings are measured in seconds of processor time, since other
programs may share the machine; answers in seconds, since there a server's delay is what takes the
time. Bytes are predicted without a measurement.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.side_by_side.report import lay_out
from specdec.files.reading import write_json
from tests.loopback import LoopbackServer

PYCODE = ROOT / "examples" / "pycode" / "target"
HOUR = 3600.0
WIDTH, KEYS, INNER, VOCABULARY = 8192, 1024, 28_672, 128_256  # Llama 3's 70B


# ---- Sums for a large target.


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates of one GPU. read, write: tokens per second of the target; learn: FLOP per second."""

    read: float = 5000 / 0.40677 / 2  # 5,000 tokens in 406.77 ms on two GPUs
    # 500 tokens of a request and its prompt's share, at 920.9 tokens/s of two GPUs in all.
    write: float = 500 / (500 / 920.9 - 5000 * 0.40677 / 5000) / 2
    learn: float = 0.3 * 989e12  # a third of the dense bfloat16 peak, an assumption


@dataclasses.dataclass(frozen=True)
class Drafter:
    """Drafter of one method. states: vectors that a token keeps; parameters: of its own, trained.

    passes: how often its layers see a token in a training step.
    """

    name: str
    states: int
    parameters: float
    passes: int


@dataclasses.dataclass(frozen=True)
class Job:
    """Target and data. width: of a hidden state; epochs: of the training."""

    width: int = WIDTH
    answers: int = 100_000
    prompt_tokens: int = 224
    answer_tokens: int = 800
    epochs: int = 3
    rates: Rates = Rates()

    @property
    def tokens(self) -> int:
        """Tokens of all answers with their prompts."""
        return self.answers * (self.prompt_tokens + self.answer_tokens)


def count_layer(width: int, keys: int, inner: int, inputs: int = 1) -> float:
    """Return the parameters of a Llama layer whose attention reads `inputs` vectors of a token."""
    return inputs * width * (width + 2 * keys) + width * width + 3 * width * inner


DRAFTERS = (
    Drafter("ReDrafter", 1, 6 * WIDTH**2 + WIDTH * VOCABULARY, 5),
    Drafter(
        "EAGLE-3, 32,000 drafted tokens", 4,
        count_layer(WIDTH, KEYS, INNER, 2) + 3 * WIDTH**2 + WIDTH * 32_000, 7,
    ),
    # The target's output layer is not trained: two of three products.
    Drafter(
        "DFlash, 5 layers", 6,
        5 * count_layer(WIDTH, KEYS, INNER) + 5 * WIDTH**2 + WIDTH * VOCABULARY * 2 / 3, 1,
    ),
)  # fmt: skip


def count_state_bytes(width: int, states: int, *, is_fp8: bool = False) -> int:
    """Return the bytes of a token's states: bfloat16, or e4m3 with a scale for each state."""
    return states * (width + 4 if is_fp8 else 2 * width)


def find_hours(job: Job, drafter: Drafter) -> dict[str, float]:
    """Return GPU hours by stage."""
    rates = job.rates
    prompts, answers = job.answers * job.prompt_tokens, job.answers * job.answer_tokens
    flop = 6 * drafter.parameters * drafter.passes * job.tokens
    return {
        "data": (prompts / rates.read + answers / rates.write) / HOUR,
        "hidden states, once": job.tokens / rates.read / HOUR,
        "an epoch of training": flop / rates.learn / HOUR,
    }


def print_plan(job: Job) -> None:
    """Print the tables of docs/scale.md."""
    print(f"{job.answers:,} answers, {job.tokens / 1e6:.1f} million tokens, {job.epochs} epochs")
    rates = job.rates
    print(f"a GPU reads {rates.read:,.0f} and writes {rates.write:,.0f} tokens a second\n")
    rows = [["drafter", "data", "states once", "an epoch", "all, stored", "all, recomputed"]]
    disk = [["drafter", "bytes of a token", "TB", "TB in FP8", "read in all, TB", "GB/s a trainer"]]
    for drafter in DRAFTERS:
        data, states, epoch = find_hours(job, drafter).values()
        stored = data + states + job.epochs * epoch
        again = data + job.epochs * (states + epoch)
        rows.append(
            [drafter.name, *(f"{hours:.1f}" for hours in (data, states, epoch, stored, again))]
        )
        size = count_state_bytes(job.width, drafter.states)
        small = count_state_bytes(job.width, drafter.states, is_fp8=True)
        total = size * job.tokens / 1e12
        disk.append(
            [drafter.name, f"{size:,}", f"{total:.1f}", f"{small * job.tokens / 1e12:.1f}",
             f"{job.epochs * total:.1f}", f"{size * job.tokens / epoch / HOUR / 1e9:.2f}"]
        )  # fmt: skip
    for table in (rows, disk):
        print(lay_out(table[0], table[1:]) + "\n")


# ---- Local runs.


@dataclasses.dataclass(frozen=True)
class Run:
    """Run of a stage: its size in the stage's unit, and what it took."""

    units: float
    taken: float


def predict(runs: Sequence[Run], units: float) -> float:
    """Return what a run takes by the line through two others: a start, and a rate."""
    small, large = runs
    rate = (large.taken - small.taken) / (large.units - small.units)
    return small.taken + rate * (units - small.units)


def measure_processor(command: Sequence[object]) -> float:
    """Return the seconds of processor time that a command takes, its children's included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-m", "specdec", *map(str, command)]
    subprocess.run(words, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


class DelayedServer(LoopbackServer):
    """Server of a target that answers each request after a fixed delay. times: of its answers."""

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.times: list[float] = []

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("Content-Length") or 0)
        body = json.loads(handler.rfile.read(length)) if length else {}
        if body:
            self.times.append(time.monotonic())
            time.sleep(self.delay)
        choice = {"index": 0, "text": " pass", "finish_reason": "stop"}
        models = {"data": [{"id": "target"}]}
        data = json.dumps({"choices": [choice]} if body else models).encode()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.send_header("Content-Type", "application/json")
        handler.end_headers()
        handler.wfile.write(data)
        self.times.append(time.monotonic())


def run_answers(work: Path, rows: int, servers: int) -> Run:
    """Let several servers answer; the unit is a second in which all of their places are busy.

    The measure is seconds from the first request to the last answer, as the servers see them.
    """
    delay, concurrency = 4.0, 4
    prompts = work / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"row {i}"}) + "\n" for i in range(rows)))
    doubles = [DelayedServer(delay) for _ in range(servers)]
    urls = []
    for double in doubles:
        double.__enter__()
        urls.append(f"{double.url}/v1")
    measure_processor(
        ["train", "data", "--input", prompts, "--completion", "--model", "target", "--force",
         "--base-url", *urls, "--concurrency", concurrency, "--output", work / "data.jsonl"]
    )  # fmt: skip
    for double in doubles:
        double.__exit__(None, None, None)
    times = [moment for double in doubles for moment in double.times]
    return Run(rows * delay / (servers * concurrency), max(times) - min(times))


ROW_TOKENS = 256


def write_texts(path: Path, rows: int) -> None:
    """Write rows of Python's own library, each a little longer than a row of the training."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(PYCODE / "tokenizer.json"))
    ids: list[int] = []
    for source in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        ids += tokenizer.encode(source.read_text(errors="replace")).ids
        if len(ids) > rows * (ROW_TOKENS + 16):
            break
    starts = range(0, rows * (ROW_TOKENS + 16), ROW_TOKENS + 16)
    texts = [tokenizer.decode(ids[start : start + ROW_TOKENS + 16]) for start in starts]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def train(work: Path, rows: int, steps: int) -> float:
    """Train an EAGLE-3 of the pycode target; return the processor's seconds."""
    held_out = work / "heldout.jsonl"
    held_out.write_text((work / f"texts-{rows}.jsonl").read_text().partition("\n")[0] + "\n")
    return measure_processor(
        ["train", "--method", "eagle", "--eagle-version", "3", "--eagle-num-steps", 3,
         "--eagle-intermediate-size", 896, "--eagle-draft-vocab-size", 1024, "--model-dir", PYCODE,
         "--data", work / f"texts-{rows}.jsonl", "--eval-data", held_out, "--max-steps", steps,
         "--hidden-states-dir", work / f"states-{rows}", "--output-dir", work / "drafter",
         "--batch-size", 4, "--model-max-length", ROW_TOKENS, "--eval-prompts", 0,
         "--dtype", "float32", "--save-steps", 0, "--force"]
    )  # fmt: skip


def count_tokens(folder: Path) -> int:
    """Return the tokens whose states a folder holds, by the files' headers."""
    from safetensors import safe_open

    total = 0
    for path in [*folder.glob("train-*.safetensors"), *folder.glob("heldout-*.safetensors")]:
        with safe_open(path, "np") as file:
            total += file.get_slice("hidden").get_shape()[0]
    return total


def run_states(work: Path, rows: int) -> Run:
    """Write the hidden states of rows; the unit is a token. One step of training comes along."""
    write_texts(work / f"texts-{rows}.jsonl", rows)
    shutil.rmtree(work / f"states-{rows}", ignore_errors=True)
    taken = train(work, rows, 1)
    return Run(count_tokens(work / f"states-{rows}"), taken)


def run_training(work: Path, rows: int, steps: int) -> Run:
    """Train from states that `run_states` has written; the unit is a token that is learned."""
    return Run(4 * ROW_TOKENS * steps, train(work, rows, steps))


def measure_bytes(work: Path, rows: int) -> tuple[int, int]:
    """Return the bytes of a folder of states, predicted and as they are."""
    folder = work / f"states-{rows}"
    config = json.loads((PYCODE / "config.json").read_text())
    size = 2 * count_state_bytes(config["hidden_size"], 4)  # float32
    files = [*folder.glob("train-*.safetensors"), *folder.glob("heldout-*.safetensors")]
    return size * count_tokens(folder), sum(path.stat().st_size for path in files)


STAGES: dict[str, tuple[str, tuple[Callable[[Path], Run], ...]]] = {
    "answers": (
        "seconds", (
            lambda work: run_answers(work, 8, 1), lambda work: run_answers(work, 48, 2),
            lambda work: run_answers(work, 216, 3),
        ),
    ),
    "hidden states": (
        "processor seconds", (
            lambda work: run_states(work, 24), lambda work: run_states(work, 72),
            lambda work: run_states(work, 216),
        ),
    ),
    "training": (
        "processor seconds", (
            lambda work: run_training(work, 24, 6), lambda work: run_training(work, 24, 18),
            lambda work: run_training(work, 24, 54),
        ),
    ),
}  # fmt: skip


def check(work: Path, only: Sequence[str], output: Path | None) -> None:
    """Measure each stage in three sizes, and print the third beside its prediction."""
    work.mkdir(parents=True, exist_ok=True)
    report: dict[str, object] = {}
    table = [["stage", "small", "middle", "large, predicted", "large, measured", "error"]]
    for name, (unit, functions) in STAGES.items():
        if only and name not in only:
            continue
        runs = [function(work) for function in functions]
        expected = predict(runs[:2], runs[2].units)
        error = expected / runs[2].taken - 1
        report[name] = {
            "unit": unit, "runs": [*map(dataclasses.asdict, runs)], "predicted": expected,
            "error": error,
        }  # fmt: skip
        sizes = [f"{run.taken:.1f}" for run in runs]
        table.append([f"{name}, {unit}", *sizes[:2], f"{expected:.1f}", sizes[2], f"{error:+.1%}"])
        print(json.dumps(report[name]), file=sys.stderr, flush=True)
        if name == "hidden states":
            predicted_bytes, real_bytes = measure_bytes(work, 216)
            report["bytes"] = {"predicted": predicted_bytes, "measured": real_bytes}
            error = predicted_bytes / real_bytes - 1
            numbers = [f"{predicted_bytes:,}", f"{real_bytes:,}", f"{error:+.2%}"]
            table.append(["hidden states, bytes", "", "", *numbers])
    print(lay_out(table[0], table[1:]))
    if output is not None:
        write_json(output, report)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and do what it says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("task", choices=("plan", "check"))
    parser.add_argument("--work-dir", type=Path, default=ROOT / "out" / "scale")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", nargs="*", choices=tuple(STAGES), default=[])
    options = parser.parse_args(arguments)
    if options.task == "plan":
        print_plan(Job())
    else:
        check(options.work_dir, options.only, options.output)


if __name__ == "__main__":
    main()
