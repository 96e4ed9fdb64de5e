"""The models that all peers read, and what each peer makes of them before it can load them."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from specdec.errors import SpecDecError, name_extra
from specdec.system.processes import call_stage, read_memory
from specdec.text.pretrained import load_tokenizer

from .processes import PeerError, run_logged

ROOT = Path(__file__).resolve().parent.parent.parent
PYCODE = ROOT / "examples" / "pycode"
GROW = ROOT / "benchmarks" / "grow.py"
DTYPE = "bfloat16"
MAX_BATCH_SIZE = 16
# As docs/quantization.md advises for every trained drafter on a CPU.
DRAFTER_FLAGS = ("--drafter-weights", "int8")


@dataclasses.dataclass(frozen=True)
class Size:
    """A shape to measure at, and how much there is to decode.

    shape, draft_shape: flags of benchmarks/grow.py for the target with its ReDrafter drafter and
    for the draft model; none leaves them as they are. memory_gb: free ones that a run with all
    peers needs. disk_gb: what its models and environments take.
    """

    shape: tuple[str, ...]
    num_prompts: int
    max_output_len: int
    memory_gb: float
    disk_gb: float
    draft_shape: tuple[str, ...] = ()


SIZES = {
    "pycode": Size((), 8, 128, 5.0, 10.0),
    "small": Size(
        ("--layers", "12", "--hidden", "1024", "--intermediate", "2816", "--heads", "16",
         "--kv-heads", "4", "--head-size", "64", "--exit-dim", "1024"),
        4, 64, 7.0, 12.0,
    ),
    "full": Size(
        ("--layers", "22", "--hidden", "2048", "--intermediate", "5632", "--heads", "32",
         "--kv-heads", "4", "--head-size", "64", "--exit-dim", "2048"),
        4, 64, 20.0, 24.0,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Models:
    """Hugging Face folders."""

    folder: Path
    target: Path
    redrafter: Path
    draft: Path


def find_folder(size: Size, work: Path) -> Path:
    """Where the models of these sources and this shape lie, or will."""
    sources = [PYCODE / name / "model.safetensors" for name in ("target", "redrafter", "draft")]
    digest = hashlib.sha256(
        GROW.read_bytes() + json.dumps([*size.shape, *size.draft_shape, DTYPE]).encode()
    )
    for source in sources:
        digest.update(source.read_bytes())
    return work / digest.hexdigest()[:12]


def prepare_models(size: Size, work: Path, log: Path | None = None) -> Models:
    """Grow the pycode models unless they are there; grow.py compares logits before it writes.

    work: gets them into its folder models, and logs into logs, unless there is another log.
    """
    folder = find_folder(size, work.resolve() / "models")
    log = log or work / "logs" / "models.log"
    draft = folder / "draft" if size.draft_shape else PYCODE / "draft"
    if not size.shape:
        folder.mkdir(parents=True, exist_ok=True)
        return Models(folder, PYCODE / "target", PYCODE / "redrafter", draft)
    if not folder.exists():
        print(f"growing the models into {folder}", file=sys.stderr, flush=True)
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        drafter = ["--drafter-model-dir", str(PYCODE / "redrafter"),
                   "--drafter-output-dir", str(partial / "redrafter")]  # fmt: skip
        for name, words in (("target", [*drafter, *size.shape]), ("draft", size.draft_shape)):
            if words:
                run_logged(
                    [sys.executable, GROW, "--model-dir", PYCODE / name, "--output-dir",
                     partial / name, "--dtype", DTYPE, *words], log, f"growing the {name}",
                )  # fmt: skip
        partial.rename(folder)
    return Models(folder, folder / "target", folder / "redrafter", draft)


def find_engines(models: Models, names: Sequence[str]) -> dict[str, Path] | None:
    """Those that an earlier run has left, None unless all are there."""
    engines = {name: models.folder / "engines" / name for name in names}
    return engines if all((path / "config.json").exists() for path in engines.values()) else None


def build_engines(
    models: Models, beams: int, tree_length: int, max_length: int, build_flags: Sequence[str],
    quantization: str | None = None,
) -> dict[str, Path]:  # fmt: skip
    """Convert and build again, for the engine may have changed: redrafter, draft-target, draft.

    beams, tree_length, max_length: the most that any setting to be measured has. quantization: of
    the target; then there is none with ReDrafter, and the draft stays as it is.
    """
    folder = models.folder / ("engines" if quantization is None else f"engines-{quantization}")
    shutil.rmtree(folder, ignore_errors=True)
    redrafter = [
        "--drafter-model-dir", str(models.redrafter), "--redrafter-num-beams", str(beams),
        "--redrafter-draft-len-per-beam", str(tree_length),
    ]  # fmt: skip
    external = [
        "--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", str(max_length),
    ]  # fmt: skip
    engines = {}
    rounded = [] if quantization is None else ["--quantization", quantization]
    made: list[tuple[str, Path, list[str], list[str]]] = [
        ("draft-target", models.target, [], [*external, *rounded]),
        ("draft", models.draft, [], []),
    ]
    if quantization is None:
        made.insert(0, ("redrafter", models.target, redrafter, [*DRAFTER_FLAGS]))
    for name, model, convert, build in made:
        engines[name] = build_engine(
            model, folder / name, convert,
            ["--max-batch-size", str(MAX_BATCH_SIZE), *build, *build_flags],
        )  # fmt: skip
    return engines


def build_engine(
    model: Path, folder: Path, convert: Sequence[str] = (), build: Sequence[str] = (),
    dtype: str = DTYPE,
) -> Path:  # fmt: skip
    """Convert and build a model into a folder, instead of what is there."""
    checkpoint = folder.with_name(f"{folder.name}-checkpoint")
    for old in (folder, checkpoint):
        shutil.rmtree(old, ignore_errors=True)
    words = ["--model-dir", str(model), "--output-dir", str(checkpoint), "--dtype", dtype]
    # The heads that a grown model does not use are zeros.
    call_stage("convert", [*words, "--allow-zeros", *convert])
    words = ["--checkpoint-dir", str(checkpoint), "--output-dir", str(folder)]
    call_stage("build", [*words, "--backend", "torch", *build])
    shutil.rmtree(checkpoint)
    return folder


def make_gguf(models: Models) -> dict[str, Path]:
    """The target and the draft model as llama.cpp reads them; PeerError where gguf is missing."""
    if find_spec("gguf") is None:
        raise PeerError(f"the package gguf is missing: {name_extra('gguf')}")

    def export(source: Path, folder: Path) -> None:
        words = ["--model-dir", str(source), "--to", "gguf", "--output-dir", str(folder)]
        try:
            call_stage("export", words)
        except SpecDecError as error:
            raise PeerError(str(error)) from None

    made = _make_each(models, ".gguf", export)
    return {name: folder / "model.gguf" for name, folder in made.items()}


def quantize_gguf(files: dict[str, Path], kind: str, program: Path, log: Path) -> dict[str, Path]:
    """Those files, the target's with weights of another type; the draft model stays as it is."""
    target = files["target"].with_name(f"model-{kind}.gguf")
    if not target.exists():
        partial = target.with_suffix(".partial")
        run_logged([program, files["target"], partial, kind], log, f"llama-quantize to {kind}")
        partial.rename(target)
    return files | {"target": target}


def make_openvino(models: Models, python: Path, log: Path) -> dict[str, Path]:
    """The target and the draft model as OpenVINO reads them, by its own exporter."""

    def export(source: Path, folder: Path) -> None:
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        run_logged(
            [python.parent / "optimum-cli", "export", "openvino", "--model", source,
             "--task", "text-generation-with-past", partial],
            log, "exporting to OpenVINO", env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        partial.rename(folder)

    return _make_each(models, ".openvino", export)


def _make_each(models: Models, suffix: str, make: Callable[[Path, Path], None]) -> dict[str, Path]:
    made = {}
    for name, source in (("target", models.target), ("draft", models.draft)):
        made[name] = models.folder / f"{name}{suffix}"
        if not made[name].exists():
            make(source, made[name])
    return made


def find_shortage(size: Size, work: Path) -> list[str]:
    """List the resources that a run with all peers needs and the machine lacks, with both numbers.

    work: with the folders models and environments; what an earlier run has left there is counted.
    """
    found = []
    memory = read_memory("MemAvailable")
    if memory is not None and memory / 1e9 < size.memory_gb:
        free = f"there are {memory / 1e9:.1f}"
        found.append(f"{size.memory_gb:.0f} GB of free memory are needed, {free}")
    work.mkdir(parents=True, exist_ok=True)
    here = (find_folder(size, work / "models"), work / "environments")
    needed = max(0.0, size.disk_gb - sum(map(measure_folder, here)) / 1e9)
    disk = shutil.disk_usage(work).free / 1e9
    if disk < needed:
        found.append(f"{needed:.1f} GB of free disk are needed, there are {disk:.1f}")
    return found


def measure_folder(folder: Path) -> int:
    """Bytes that the files in it take on the disk; 0 where there is none."""
    paths = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return sum(path.lstat().st_blocks * 512 for path in paths)


def read_lines(path: Path) -> list[str]:
    """The prompts of a .jsonl file, as texts."""
    return [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()]


def read_prompts(path: Path, target: Path, count: int) -> list[list[int]]:
    """Token ids of the first prompts of a file."""
    tokenizer, texts = load_tokenizer(str(target)), read_lines(path)[:count]
    if len(texts) < count:
        raise PeerError(f"{path} has {len(texts)} prompts, {count} are asked for")
    return [tokenizer(text)["input_ids"] for text in texts]


def make_long_prompt(path: Path, target: Path, length: int) -> list[int]:
    """Prompts of a file one after another, cut to a number of tokens."""
    text = "\n\n".join(read_lines(path))
    # It would warn of a text beyond the model's positions, of which the beginning is kept.
    ids: list[int] = load_tokenizer(str(target))(text, verbose=False)["input_ids"]
    if len(ids) < length:
        raise PeerError(f"{path} has {len(ids)} tokens in all, {length} are asked for")
    return ids[:length]


def make_parser(description: str | None, out: str = "") -> argparse.ArgumentParser:
    """A script's parser, of its docstring. out: where its reports go, of one on grown models."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if out:
        parser.add_argument("--size", choices=SIZES, default="full")
        parser.add_argument("--folder", type=Path, default=ROOT / "out" / "peers",
                            help="models and environments, for all scripts")  # fmt: skip
        parser.add_argument("--output-dir", type=Path, default=ROOT / "out" / out)
    return parser
