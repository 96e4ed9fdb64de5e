"""Forty deliberate breaks of the product, each of which the tests named alongside it must catch.

`make mutants` applies them one at a time to a copy of the tree and runs those tests there, as
far as `make test` does. A break whose text is not found exactly once is an error: give it the text
that does its work today.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PASSED, FAILED = 0, 1  # statuses of pytest; all others say that it could not run the tests


@dataclasses.dataclass(frozen=True)
class Break:
    """One change of a file: `old` becomes `new`. tests: what has to notice, below tests/."""

    file: str
    old: str
    new: str
    tests: Sequence[str]

    def apply(self, text: str) -> str:
        """Return the broken text; raise ValueError where `old` is not in it exactly once."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} has {self.old!r} {count} times, not once")
        return text.replace(self.old, self.new)


_KERNELS = "specdec/engine/kernels"
# By the promise that is broken.
BREAKS = {
    # The accept rule, trees, sampling.
    "a token is accepted by the root's choice": Break(
        "specdec/decode/accept.py", "token = int(choices[path[-1]])",
        "token = int(choices[path[0]])", ["run/test_accept.py"],
    ),
    "a drawn draft is kept twice as often": Break(
        "specdec/decode/accept.py", "(ACCEPT, position) * q < p",
        "(ACCEPT, position) * q < 2 * p", ["run/test_sampling.py"],
    ),
    "a GPU's rejection goes by another number": Break(
        "specdec/decode/accept.py", "sampler, position + end)",
        "sampler, position)", ["run/test_at_once.py"],
    ),
    "a node sees its parent only": Break(
        "specdec/engine/tree.py", "mask[node] |= mask[tree.parents[node]]",
        "mask[node, tree.parents[node]] = True", ["engine/test_tree.py"],
    ),
    "beams are joined by one token, not by their beginnings": Break(
        "specdec/engine/tree.py",
        "np.logical_and.accumulate(beams[:, None, :] == beams[None, :, :], axis=2)",
        "beams[:, None, :] == beams[None, :, :]", ["engine/test_tree.py"],
    ),
    "top-k drops the k-th token": Break(
        "specdec/decode/sampling.py", "np.arange(max(limited)) < np",
        "np.arange(max(limited)) + 1 < np", ["run/test_sampling.py"],
    ),
    "top-p keeps a token more": Break(
        "specdec/decode/sampling.py", "is_tail = mass <= 1 -",
        "is_tail = mass <= 0.9 -", ["run/test_sampling.py"],
    ),
    "a residual has what the target lacks": Break(
        "specdec/decode/sampling.py", ".clamp(min=0)", ".abs()", ["run/test_sampling.py"],
    ),
    "the three streams are one": Break(
        "specdec/decode/sampling.py", "key[1] = stream", "key[1] = 0", ["run/test_sampling.py"],
    ),
    "half of a seed is not read": Break(
        "specdec/decode/sampling.py", "params.seed & (2**64 - 1)", "params.seed & (2**32 - 1)",
        ["run/test_sampling.py"],
    ),
    "a repetition is rewarded": Break(
        "specdec/decode/shaping.py", "torch.where(scores < 0,", "torch.where(scores > 0,",
        ["run/test_shaping.py"],
    ),
    "a grammar's node keeps its sibling's tokens": Break(
        "specdec/text/grammar.py", "self._matcher.rollback(1)", "pass", ["run/test_grammar.py"],
    ),
    # The cache, the text, the drafters.
    "the accepted path is not moved together": Break(
        "specdec/engine/kv_cache.py", "if len(path) > 1 and path != list(range(len(path))):",
        "if False:",
        ["run/test_exactness.py"],
    ),
    "a shared prefix is copied one place off": Break(
        "specdec/engine/kv_cache.py", "self.move(source, row, np.arange(length), 0)",
        "self.move(source, row, np.arange(length) + 1, 0)", ["run/test_requests.py"],
    ),
    "text ends at the last stop word": Break(
        "specdec/text/text_stream.py", "word_start, size, self.stop_word = min(matches)",
        "word_start, size, self.stop_word = max(matches)",
        ["run/test_text.py"],
    ),
    "a stop word over two tokens is not seen": Break(
        "specdec/text/text_stream.py", "max(self._stop_start, len(self._text) - max_stop_len)",
        "len(self._text)",
        ["run/test_text.py"],
    ),
    "a lookup copies from one place further": Break(
        "specdec/decode/drafters/prompt_lookup.py", "tuple(self._text[end - size :])] = end",
        "tuple(self._text[end - size :])] = end - 1", ["run/test_ngrams.py"],
    ),
    "an EAGLE drafter keeps what it guessed": Break(
        "specdec/decode/drafters/eagle.py", "max(0, length - 1)", "length",
        ["run/test_eagle.py"],
    ),
    "a token shared by two vocabularies is named by its place": Break(
        "specdec/text/token_map.py", "target, draft = self._pairs[:, indices]",
        "target, draft = indices, self._pairs[1, indices]",
        ["run/test_mixed_vocabularies.py"],
    ),
    # What models compute.
    "low frequencies are kept where high ones should be": Break(
        "specdec/engine/rotary.py", "wavelength < original / high, inverse",
        "wavelength < original / low, inverse", ["engine/test_rotary.py"],
    ),
    "torch rotates the other way": Break(
        "specdec/engine/rotary.py", "torch.cat((-second_half, first_half), dim=-1)",
        "torch.cat((second_half, -first_half), dim=-1)", ["parity/test_families.py"],
    ),
    "the ranks' sums are not summed": Break(
        "specdec/engine/group.py", "self._call(lambda: torch.distributed.all_reduce(total))",
        "pass", ["run/test_tensor_parallel.py"],
    ),
    "kernels rotate the other way": Break(
        f"{_KERNELS}/norms.h", "-(b * to_float(sine[i]))", "b * to_float(sine[i])",
        ["engine/test_native_kernels.py"],
    ),
    "kernels forget the epsilon of a norm": Break(
        f"{_KERNELS}/norms.h", "sum / static_cast<float>(D) + epsilon",
        "sum / static_cast<float>(D)", ["engine/test_native_kernels.py"],
    ),
    "kernels scale rounded inputs by 128": Break(
        f"{_KERNELS}/integers.h", "is_zero ? 0.0f : largest / kLargest",
        "is_zero ? 0.0f : largest / 128", ["engine/test_integers.py"],
    ),
    "kernels give experts weights that do not sum to one": Break(
        f"{_KERNELS}/layers.h",
        "return e.renormalizes ? sum + static_cast<float>(e.sum_epsilon) : 1.0f", "return 1.0f",
        ["engine/test_experts.py"],
    ),
    "kernels let a window end one token late": Break(
        f"{_KERNELS}/attention.h", "get_position(b, t) - attention.window + 1 : 0;",
        "get_position(b, t) - attention.window : 0;",
        ["engine/test_native_kernels.py"],
    ),
    # Checkpoints, quantization, ranks' parts, folders.
    "the nibbles of two rows change places": Break(
        "specdec/model/int4.py", "signed[0::2] | signed[1::2] <<", "signed[1::2] | signed[0::2] <<",
        ["core/test_int4_layout.py"],
    ),
    "a tie of NVFP4 goes to the odd number": Break(
        "convert/quantize/formats.py", "self.BOUNDS[1::2]", "self.BOUNDS[0::2]",
        ["convert/test_quantized_layouts.py"],
    ),
    "columns sorted by group keep their places": Break(
        "convert/quantize/matrices.py", "weights[:, self.order] = int4", "weights[:] = int4",
        ["convert/test_quantized_sources.py"],
    ),
    "ranks with few K/V heads take the wrong one": Break(
        "specdec/model/sharding.py", "rank * num_kv_heads // model.tp_size", "rank % num_kv_heads",
        ["convert/test_convert_sharding.py"],
    ),
    "the last rank's vocabulary is not padded": Break(
        "specdec/model/sharding.py", "height = -(-num_rows // tp_size)",
        "height = num_rows // tp_size", ["convert/test_convert_sharding.py"],
    ),
    "a changed byte of an engine is not seen": Break(
        "specdec/files/manifest.py", "(sha256 := hash_file(path, is_ending)) != entry.sha256",
        "not (sha256 := entry.sha256)", ["run/test_engine_folder.py"],
    ),
    "what a failed command wrote stays": Break(
        "specdec/files/staging.py", "shutil.rmtree(partial, ignore_errors=True)", "pass",
        ["core/test_output_folders.py"],
    ),
    "an unusable file ends with status 0": Break(
        "specdec/command/stages.py", "(2 if isinstance(error, UsageError) else 1), error.message",
        "(2 if isinstance(error, UsageError) else 0), error.message",
        ["core/test_command_line.py"],
    ),
    # The other commands.
    "a label's loss has half its gradient": Break(
        "train/loss.py", "(share - 1) * row_weights", "(share - 1) / 2 * row_weights",
        ["train/test_drafter_losses.py"],
    ),
    "a drafter is trained on the user's words": Break(
        "train/rows.py", "mask[row, :length] = self.mask[start : start + length]",
        "mask[row, :length] = True", ["train/test_train_data.py"],
    ),
    "GGUF's heads keep Hugging Face's order": Break(
        "export/gguf.py", "if module in heads and ", "if False and ",
        ["export/test_export.py"],
    ),
    "a request beyond the queue is taken": Break(
        "serve/scheduler.py", "> self.max_queue + max(0, num_free)", "> 1000",
        ["serve/test_scheduler.py"],
    ),
    "verify takes an engine's choice for the model's": Break(
        "verify/greedy.py", "if token == expected and is_choice:",
        "if token == expected or is_choice:", ["verify/test_verify_engine.py"],
    ),
}  # fmt: skip


def copy_tree(parent: Path) -> Path:
    """Copy what git knows or would add into `parent`/tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    tree = parent / "tree"
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


def run_tests(tree: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run tests in a copy until one fails."""
    # Kernels are compiled into the cache of the tree that is tested, or the one that is set.
    cache = os.environ.get("SPECDEC_CACHE_DIR", str(ROOT / ".build" / "cache"))
    words = [
        sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider",
        "--tb=no",  # Python 3.11 fails at times to parse a test for it while a thread is at work
        "--brief",
        f"--basetemp={tree.parent / 'tmp'}", *(f"tests/{name}" for name in tests),
    ]  # fmt: skip
    return subprocess.run(
        words, cwd=tree, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(tree), "SPECDEC_CACHE_DIR": cache},
    )  # fmt: skip


def judge(name: str, tree: Path) -> tuple[str, str]:
    """Break a copy, run its tests, mend it; return a verdict and what shows it."""
    found = BREAKS[name]
    path = tree / found.file
    whole = path.read_text()
    try:
        path.write_text(found.apply(whole))
    except ValueError as error:
        return "error", str(error)
    try:
        result = run_tests(tree, found.tests)
    finally:
        path.write_text(whole)
    lines = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
    shown = (lines or result.stdout.splitlines()[-1:] or [result.stderr[-200:]])[0]
    verdict = {PASSED: "SURVIVED", FAILED: "caught"}.get(result.returncode, "error")
    return verdict, shown.removeprefix("FAILED ").split(" - ")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="breaks whose name or file has this in it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="copies of the tree")
    parser.add_argument("--unbroken", action="store_true", help="first see that all tests pass")
    options = parser.parse_args()
    chosen = [n for n, b in BREAKS.items() if options.only in n or options.only in b.file]
    verdicts = dict.fromkeys(("caught", "SURVIVED", "error"), 0)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for job in range(options.jobs):
            trees.put(copy_tree(Path(folder, str(job))))
        if options.unbroken:
            tree = trees.get()
            result = run_tests(tree, sorted({t for n in chosen for t in BREAKS[n].tests}))
            trees.put(tree)
            if result.returncode != PASSED:
                print(result.stdout[-3000:])
                return 1

        def work(name: str) -> tuple[str, str, str, float]:
            tree, began = trees.get(), time.perf_counter()
            try:
                return name, *judge(name, tree), time.perf_counter() - began
            finally:
                trees.put(tree)

        for name, verdict, shown, seconds in pool.map(work, chosen):
            verdicts[verdict] += 1
            print(
                f"{verdict:8} {seconds:5.0f} s  {name} ({BREAKS[name].file}): {shown}", flush=True
            )
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    return int(verdicts["caught"] < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
