"""llama.cpp's server: what specdec-export writes as GGUF is loaded, and drafts as specdec does."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.side_by_side.llama_files import convert_folder
from benchmarks.side_by_side.workers.llama_cpp import Server
from specdec.decode.engine import TorchEngine
from specdec.decode.requests import Request
from tests.conftest import ROOT, make_llama
from tests.engines import call, make_tree_engine
from tests.export.sentencepiece import list_hostile, make_sentencepiece
from tests.families import make_family_model
from tests.oracles.conftest import MAX_TOKENS
from tests.oracles.models import PYCODE, train_hybrid
from tests.oracles.ours import FIXED, Counters, chain, count, decode, make_engine

LENGTH = 3
EXTERNAL = ("--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 8)
METRIC = re.compile(r'^llamacpp:spec_decode_(\w+?)_total(?:\{position="(\d+)"\})? (\d+)', re.M)


@pytest.fixture(scope="module")
def start_server(environments: Path) -> Any:
    """Start a server of a GGUF folder, with one thread and all in float32."""
    server = environments / "llama.cpp" / "build" / "bin" / "llama-server"
    if not server.is_file():
        pytest.skip(f"there is no llama.cpp in {environments}: docs/export.md tells how to get it")

    @contextlib.contextmanager
    def start(model: Path, *words: object) -> Iterator[Server]:
        common = (
            server, "--model", model / "model.gguf", "--ctx-size", 512,
            "--parallel", 1, "--cache-ram", 0, "--fit", "off", "--metrics",
            "--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off",
            "--threads", 1, "--threads-batch", 1, "--no-repack",  # it crashed with AMX and Q8_0
        )  # fmt: skip
        running = Server([str(word) for word in (*common, *words)])
        try:
            yield running
        finally:
            running.end()

    return start


@pytest.fixture(scope="module")
def run_server(start_server: Any, work: Path, prompts: Any) -> Any:
    """Decode with a server of its own; return texts and counters."""
    export_gguf(PYCODE / "target", work / "target-gguf")

    def run(*words: object, model: Path | None = None) -> tuple[list[list[int]], dict[str, Any]]:
        with start_server(model or work / "target-gguf", *words) as running:
            texts = [running.complete(ids, MAX_TOKENS)["tokens"] for ids in prompts]
            with urllib.request.urlopen(f"{running.address}/metrics") as answer:
                text = answer.read().decode()
        found: dict[str, Any] = {"positions": {}}
        for name, position, value in METRIC.findall(text):
            if position:
                found["positions"][int(position)] = int(value)
            else:
                found[name] = int(value)
        print(words, found)
        return texts, found

    return run


def export_gguf(model: Path, output: Path, *words: object) -> Path:
    call(
        "export", "--model-dir", model, *words, "--dtype", "float32", "--to", "gguf",
        "--output-dir", output,
    )  # fmt: skip
    return output


@pytest.fixture(scope="module")
def plain(run_server: Any) -> list[list[int]]:
    texts: list[list[int]] = run_server()[0]
    return texts


def draft_with(kind: str, folder: Path) -> list[object]:
    return [
        "--spec-type", kind, "--spec-draft-model", folder / "model.gguf", "--spec-draft-n-max",
        LENGTH, "--spec-draft-n-min", 0, "--spec-draft-p-min", 0, "--spec-draft-type-k", "f32",
        "--spec-draft-type-v", "f32", "--spec-draft-threads", 1, "--spec-draft-threads-batch", 1,
    ]  # fmt: skip


@pytest.mark.parametrize("way", ["eagle3", "draft"])
def test_drafters(
    way: str, run_server: Any, plain: Any, work: Path, prompts: Any, draft_engine: Path
) -> None:
    """The same text as plain decoding on both sides, and the same counters, number for number."""
    exported = work / f"{way}-gguf"
    options: dict[str, Any]
    if way == "eagle3":
        model, own = PYCODE / "target", ["--eagle-model-dir", work / "eagle3"]
        engine = make_engine(work / "ours-gguf-eagle3", PYCODE / "target", own, [])
        options = {"eagle_choices": chain(LENGTH)}
    else:
        model, own = PYCODE / "draft", []
        engine = make_engine(work / "ours-gguf-draft", PYCODE / "target", [], EXTERNAL)
        options = {"draft": draft_engine, "draft_len": str(LENGTH)}
    export_gguf(model, exported, *own)
    kind = "draft-eagle3" if way == "eagle3" else "draft-simple"
    texts, counters = run_server(*draft_with(kind, exported))
    assert texts == plain
    compare(decode(engine, prompts, MAX_TOKENS, **FIXED, **options), plain, counters)


def compare(ours: list[Any], plain: list[list[int]], counters: dict[str, Any]) -> None:
    """Texts and counters of specdec with those of the server."""
    assert [output.token_ids[:MAX_TOKENS] for output in ours] == plain
    positions = tuple(counters["positions"][place] for place in range(LENGTH))
    found = Counters(
        counters["num_drafts"], counters["num_draft_tokens"], counters["num_accepted_tokens"],
        positions,
    )  # fmt: skip
    assert found == count(ours, MAX_TOKENS, LENGTH, is_cut=True)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_models(family: str, run_server: Any, work: Path, prompts: Any) -> None:
    """Random models of each family in float32: the same text. Other types are loaded and decode."""
    model = make_family_model(
        work, family, vocab=4096, name=family, intermediate=96,
        max_position_embeddings=512,
    )  # fmt: skip
    for path in (PYCODE / "target").glob("*token*"):
        shutil.copyfile(path, model / path.name)
    engine = make_engine(work / f"ours-{family}", model, [], [])
    ours = [output.token_ids[:MAX_TOKENS] for output in decode(engine, prompts, MAX_TOKENS)]
    for kind in ("F32", "F16", "BF16", "Q8_0"):
        place = export_gguf(model, work / f"{family}-{kind}", "--gguf-type", kind)
        texts, _ = run_server(model=place)
        # The server ends at a token that ends a text.
        same = sum(text == own[: len(text)] for text, own in zip(texts, ours, strict=True))
        print(family, kind, f"{same} of {len(ours)} texts are equal")
        assert same == len(ours) or kind != "F32"
        assert sum(map(len, texts)) > len(ours) * MAX_TOKENS // 2


@pytest.mark.parametrize("kind", ["pycode", "prefix", "bare"])
def test_tokenizers(kind: str, start_server: Any, tmp_path: Path) -> None:
    """A hundred hostile texts become the tokens that transformers makes of them.

    pycode: its byte-level BPE; the others are SentencePiece, with a space before a text or without.
    """
    from tokenizers import Tokenizer

    folder = tmp_path / "model"
    if kind == "pycode":
        shutil.copytree(PYCODE / "target", folder)
    else:
        size = make_sentencepiece(tmp_path, adds_space=kind == "prefix")
        make_llama(tmp_path, layers=1, vocab=size, name="model")
        shutil.move(tmp_path / "tokenizer.json", folder)
    exported = export_gguf(folder, tmp_path / "gguf")
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    differ = []
    with start_server(exported) as running:
        for text in list_hostile():
            for told in (False, True):
                body = {"content": text, "add_special": told, "parse_special": True}
                request = urllib.request.Request(
                    f"{running.address}/tokenize", json.dumps(body).encode(),
                    {"Content-Type": "application/json"},
                )  # fmt: skip
                with urllib.request.urlopen(request) as answer:
                    found = json.loads(answer.read())["tokens"]
                if found != theirs.encode(text, add_special_tokens=told).ids:
                    differ.append((text, told, found))
    print(kind, f"{len(differ)} of 200 differ", differ[:5])
    assert not differ


def test_an_exported_head(
    run_server: Any, environments: Path, work: Path, prompts: Any, tmp_path: Path
) -> None:
    """Of a trained Qwen3.5: the same text as plain decoding, and the same counters.

    llama.cpp's own converter writes the target, we the head.
    """
    data, folder = tmp_path / "texts.jsonl", tmp_path / "gguf"
    texts = (path.read_text() for path in sorted((ROOT / "specdec").rglob("*.py")))
    rows = [text[at : at + 400] for text in texts for at in range(0, len(text) - 400, 400)]
    data.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    model = train_hybrid(tmp_path / "model", data)
    call(
        "train", "--method", "mtp", "--model-dir", model, "--data", data, "--self-distillation", 0,
        "--output-dir", tmp_path / "head", "--max-steps", 100, "--model-max-length", 96,
        "--learning-rate", 0.003, "--dtype", "float32",
    )  # fmt: skip
    own = ["--mtp-model-dir", tmp_path / "head"]
    exported = export_gguf(model, tmp_path / "head-gguf", *own)
    folder.mkdir()
    source = environments / "llama.cpp" / "source" / "vendor" / "llama.cpp"
    convert_folder(source, model, folder / "model.gguf", tmp_path / "log", "f32", "--no-mtp")
    plain, _ = run_server(model=folder)
    found, counters = run_server(*draft_with("draft-mtp", exported), model=folder)
    assert found == plain
    engine = make_engine(tmp_path / "ours", model, own, [])
    options = {"mtp_num_draft_tokens": str(LENGTH)}
    compare(decode(engine, prompts, MAX_TOKENS, **FIXED, **options), plain, counters)


@pytest.mark.parametrize("name", ["qwen35", "qwen35_moe"])
def test_mtp(name: str, environments: Path, tmp_path: Path) -> None:
    """Of every step of four texts the drafts are those of llama.cpp's own MTP graph.

    Both read one file. llama.cpp's driver puts a pair of zeros and the first token before the
    others, as transformers and vLLM do not: with it, many drafts of a random head differ.
    """
    python = environments / "llama-cpp-python" / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"there is no {python}: docs/export.md tells how to get it")
    model = ROOT / "tests" / "golden" / "gguf" / f"{name}.gguf"
    flags = ("--dtype", "float32", "--dequantize")
    folder = make_tree_engine("mtp", tmp_path, model, model, flags=flags)
    engine, seen = TorchEngine(folder, device="cpu"), []
    propose, generator = engine.drafter.propose, torch.Generator().manual_seed(1)

    def watch(requests: Any) -> Any:
        found = propose(requests)
        for request, own in zip(requests, found, strict=True):
            text = [*request.request.input_ids, *request.output_ids]
            seen.append((text, own.tree.tokens[1:].tolist()))
        return found

    engine.drafter.propose = watch  # type: ignore[method-assign]
    vocab_size = engine.config.checkpoint.model.vocab_size
    requests = [
        Request(
            index=size, max_output_len=24, end_ids=frozenset(),
            input_ids=torch.randint(3, vocab_size, (size,), generator=generator).tolist(),
        )
        for size in (2, 5, 17, 20)
    ]  # fmt: skip
    engine.generate(requests)
    assert len(seen) > 80
    worker = Path(__file__).with_name("llama_cpp_worker.py")
    same = {}
    for first in "01":
        done = subprocess.run(
            [python, worker, model, "8", first], input=json.dumps([text for text, _ in seen]),
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        theirs = json.loads(done.stdout)
        pairs = [zip(own, other, strict=True) for (_, own), other in zip(seen, theirs, strict=True)]
        same[first] = sum(a == b for pair in pairs for a, b in pair)
    print(name, f"{same['0']} of {8 * len(seen)} drafted tokens, {same['1']} with its first pair")
    assert same["0"] == 8 * len(seen)
