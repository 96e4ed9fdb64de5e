#!/usr/bin/env python3
"""`make demo`: what speculation does, and where it pays, in a few minutes.

Converts, builds and runs the pycode model with its ReDrafter drafter, as a user would type it, with
the drafted tokens marked. Then measures plain decoding and three methods by turns, on the 25M model
and on its grown twin: the same model inside large matrices (benchmarks/grow.py), which writes the
same text at the cost of a model of some 200M parameters. Every figure is measured here. With and
without speculation the texts must be equal, and the 25M model's equal to what transformers writes;
the script fails if they are not. It takes 1.7 GB of disk, and leaves the engines: 1.1 GB.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SAMPLE = 'def read_lines(path):\n    """Return the lines of a file."""'
TARGET, DRAFTER, DRAFT = (f"examples/pycode/{name}" for name in ("target", "redrafter", "draft"))
NUM_CHECKED = 2  # prompts that transformers continues, too
ROUNDS = 3
BEAM_SHAPE = ("--redrafter-num-beams", "1", "--redrafter-draft-len-per-beam", "3")
EXTERNAL = ("--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", "8")
TWIN_SHAPE = (
    "--layers", "12", "--hidden", "1280", "--intermediate", "3456", "--heads", "20",
    "--kv-heads", "4", "--exit-dim", "1024",
)  # fmt: skip
NUM_BYTES = 1_700_000_000  # of disk
PLAIN = "plain decoding"


@dataclasses.dataclass(frozen=True)
class Model:
    """A target to measure: where it and its drafter lie, and how much of its text is written."""

    folder: str
    drafter: str
    dtype: str
    num_prompts: int
    max_output_len: int


@dataclasses.dataclass
class Figures:
    """What was measured of one way to decode, round after round."""

    speeds: list[float] = dataclasses.field(default_factory=list)  # tokens a second
    acceptance_length: float = 0.0
    output_ids: list[list[int]] = dataclasses.field(default_factory=list)


def call_program(words: Sequence[str], *, is_shown: bool = True, **options: Any) -> str:
    """Run a command from the project's root, shown as typed; end with it where it fails."""
    if is_shown:
        print(f"\n$ {shlex.join(words)}", flush=True)
    name, *arguments = words
    program = [sys.executable]
    if name.startswith("specdec-"):
        program += ["-m", "specdec", name.removeprefix("specdec-")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*program, *(arguments if len(program) > 1 else words)],
        cwd=ROOT, env=environment, text=True, check=False, **options,
    )  # fmt: skip
    if done.returncode != 0:
        sys.exit(f"FAILED: {name} ended with status {done.returncode}\n{done.stderr or ''}")
    return done.stdout or ""


def check_disk(folder: Path) -> None:
    """End at once, and not after minutes, where the engines have no room."""
    from specdec.errors import SpecDecError
    from specdec.files.staging import check_free_space

    try:
        check_free_space(folder, NUM_BYTES, "the demo takes")
    except SpecDecError as error:
        sys.exit(f"error: {error}\nhint: {error.hint}")


def remove(*folders: str) -> None:
    """Remove what this demo or an earlier one made, if it is there."""
    for folder in folders:
        shutil.rmtree(ROOT / folder, ignore_errors=True)


def make_engine(
    folder: str, model: str, dtype: str, *flags: str,
    build: Sequence[str] = (), spent: Sequence[str] = (),
) -> str:  # fmt: skip
    """Convert and build; return the engine's folder.

    spent: folders that nothing reads any more once the checkpoint is there. It, too, is removed,
    and no engine has its weights twice: a demo may not fill a disk.
    """
    checkpoint, engine = f"{folder}-checkpoint", f"{folder}-engine"
    remove(checkpoint, engine)
    call_program([
        "specdec-convert", "--model-dir", model, *flags, "--dtype", dtype,
        "--output-dir", checkpoint,
    ])  # fmt: skip
    remove(*spent)
    # One request at a time is what speculation is for.
    call_program([
        "specdec-build", "--checkpoint-dir", checkpoint, "--output-dir", engine,
        "--max-batch-size", "1", "--packed-weights", "disable", *build,
    ])  # fmt: skip
    remove(checkpoint)
    return engine


def make_redrafter(model: Model, folder: str) -> str:
    """Make the engine of a model and its ReDrafter drafter."""
    flags = ["--drafter-model-dir", model.drafter, *BEAM_SHAPE]
    return make_engine(f"{folder}/redrafter", model.folder, model.dtype, *flags)


def show_text(engine: str) -> None:
    """Continue a prompt, with the tokens marked by where they come from."""
    words = ["specdec-run", "--engine-dir", engine, "--tokenizer-dir", TARGET, "--show-drafts"]
    call_program([*words, "--max-output-len", "80", "--input-text", SAMPLE])


def grow_twin(folder: str) -> Model:
    """Make the large model that computes what the small one does, and its drafter."""
    twin = Model(f"{folder}/model", f"{folder}/drafter", "bfloat16", 3, 48)
    remove(twin.folder, twin.drafter)
    call_program([
        "benchmarks/grow.py", "--model-dir", TARGET, "--output-dir", twin.folder,
        "--drafter-model-dir", DRAFTER, "--drafter-output-dir", twin.drafter, *TWIN_SHAPE,
    ])  # fmt: skip
    return twin


def list_ways(
    model: Model, folder: str, redrafter: str, spent: Sequence[str] = ()
) -> dict[str, list[str]]:
    """Make the other engines; return the flags of specdec-run for each way to decode."""
    target = make_engine(f"{folder}/target", model.folder, model.dtype, build=EXTERNAL, spent=spent)
    draft = make_engine(f"{folder}/draft", DRAFT, model.dtype)
    return {
        PLAIN: ["--engine-dir", target, "--no-speculation"],
        "prompt lookup, 8 tokens": ["--engine-dir", target, "--prompt-lookup-num-tokens", "8"],
        "draft model, 4 tokens": [
            "--engine-dir", target, "--draft-engine-dir", draft, "--draft-len", "4",
        ],
        "ReDrafter, 1 beam x 3": ["--engine-dir", redrafter],
    }  # fmt: skip


def measure(
    model: Model, ways: Mapping[str, Sequence[str]], prompts: Sequence[str], folder: str
) -> dict[str, Figures]:
    """Run every way by turns, ROUNDS times."""
    prompt_file = f"{folder}/prompts.jsonl"
    chosen = prompts[: model.num_prompts]
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in chosen]
    (ROOT / prompt_file).write_text("".join(lines), encoding="utf-8")
    shared = [
        "--tokenizer-dir", TARGET, "--input-file", prompt_file,
        "--max-output-len", str(model.max_output_len), "--json",
    ]  # fmt: skip
    print(f"\n{len(chosen)} prompts, {model.max_output_len} new tokens each, {ROUNDS} rounds:")
    found = {name: Figures() for name in ways}
    for number in range(ROUNDS):
        for name, flags in ways.items():
            print(f"  round {number + 1}: {name:24}", end="", flush=True)
            words = ["specdec-run", *flags, *shared]
            report = json.loads(call_program(words, is_shown=False, stdout=-1, stderr=-1))
            figures, stats = found[name], report["stats"]
            figures.speeds.append(stats["tokens_per_second"])
            figures.acceptance_length = stats["acceptance_length"]
            figures.output_ids = [output["output_ids"] for output in report["outputs"]]
            if figures.output_ids != found[PLAIN].output_ids:
                sys.exit(f"\nFAILED: the text of {name} differs from plain decoding's")
            print(f"{figures.speeds[-1]:7.1f} tokens/s", flush=True)
    return found


def find_ratio(found: Mapping[str, Figures], name: str) -> float:
    """How many times as fast as plain decoding, in medians."""
    medians = [statistics.median(found[key].speeds) for key in (name, PLAIN)]
    return medians[0] / medians[1]


def format_figures(title: str, found: Mapping[str, Figures]) -> list[str]:
    """A table: medians, with the lowest and the highest."""
    lines = [title, f"  {'':24}{'tokens/s':>22}{'times plain':>14}{'tokens a step':>16}"]
    for name, figures in found.items():
        speeds = figures.speeds
        speed = f"{statistics.median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f})"
        ratio, length = find_ratio(found, name), figures.acceptance_length
        lines.append(f"  {name:24}{speed:>22}{ratio:>14.2f}{length:>16.2f}")
    return lines


def conclude(found: Mapping[str, Figures]) -> str:
    """Say what the figures say, also where speculation loses."""
    ratios = {name: find_ratio(found, name) for name in found if name != PLAIN}
    best = max(ratios, key=lambda name: ratios[name])
    slower = [name for name, ratio in ratios.items() if ratio < 1]
    if len(slower) == len(ratios):
        return (
            "No method was faster than plain decoding on this machine, at this moment. Is something"
            " else running? `specdec diagnose` tells where the time goes."
        )
    told = f"The large model writes {ratios[best]:.1f} times as fast with {best}."
    return told + (f" Slower than plain decoding here: {', '.join(slower)}." if slower else "")


def generate_with_transformers(prompts: Sequence[str], limit: int) -> list[list[int]]:
    """What the target alone writes: greedy, float32, one prompt at a time."""
    import torch

    from specdec.pretrained import load_model, load_tokenizer

    tokenizer = load_tokenizer(HERE / "target")
    model = load_model(HERE / "target", dtype=torch.float32).eval()
    outputs = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=limit,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
        outputs.append(out[0, ids.shape[1] :].tolist())
    return outputs


def print_title(text: str) -> None:
    """Begin a part."""
    print(f"\n== {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", default="out/demo", help="relative to the project's root")
    work_dir: str = parser.parse_args().work_dir
    began = time.monotonic()
    lines = (HERE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    check_disk(ROOT / work_dir)
    folders = [f"{work_dir}/small", f"{work_dir}/large"]
    for folder in folders:
        (ROOT / folder).mkdir(parents=True, exist_ok=True)

    print_title("1. Text. Two Hugging Face folders become an engine, which writes Python.")
    small = Model(TARGET, DRAFTER, "float32", 6, 64)
    redrafter = make_redrafter(small, folders[0])
    show_text(redrafter)

    print_title("2. The small model: 25M parameters are soon read, a step is cheap.")
    found_small = measure(small, list_ways(small, folders[0], redrafter), prompts, folders[0])
    checked = generate_with_transformers(prompts[:NUM_CHECKED], small.max_output_len)
    if found_small[PLAIN].output_ids[:NUM_CHECKED] != checked:
        sys.exit("FAILED: the text differs from what transformers generates")

    print_title("3. Its grown twin: the same text, at the cost of a large model.")
    large = grow_twin(folders[1])
    size = (ROOT / large.folder / "model.safetensors").stat().st_size / 2e6  # two bytes each
    redrafter = make_redrafter(large, folders[1])
    ways = list_ways(large, folders[1], redrafter, spent=[large.folder, large.drafter])
    found_large = measure(large, ways, prompts, folders[1])

    print_title(f"Medians of {ROUNDS} rounds by turns (lowest to highest), one request at a time")
    for title, found in (
        ("\nSmall: 25M parameters, float32", found_small),
        (f"\nLarge: the same model grown to {size:.0f}M parameters, bfloat16", found_large),
    ):
        print("\n".join(format_figures(title, found)))
    print(
        f"\n{conclude(found_large)}"
        "\nPrompt lookup is flattered: small models repeat themselves, and their twins with them."
        "\nAll texts are the target's own: equal with and without speculation, and"
        f" {NUM_CHECKED} compared with transformers, token for token."
        f"\n{time.monotonic() - began:.0f} s. Your own models: specdec generate --help"
    )


if __name__ == "__main__":
    main()
