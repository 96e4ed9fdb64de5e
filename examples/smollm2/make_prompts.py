#!/usr/bin/env python3
"""Make the prompts whose answers the drafters of SmolLM2 learn from; train.sh says how.

    python make_prompts.py turns --engine-dir ENGINE --output turns.jsonl --num-turns 6144
    python make_prompts.py turns --engine-dir ENGINE --output begun.jsonl --num-turns 2560 --begun
    python make_prompts.py join --turns turns.jsonl begun.jsonl --output prompts.jsonl \\
        --num-docs 1500 --without Spec-Bench/data/spec_bench/question.jsonl HumanEval.jsonl.gz
    python make_prompts.py texts --data data.jsonl --model MODEL.gguf --output corpus

`turns` lets the model write user turns: it continues its own chat template from where a user would
speak, at temperature 1 (Magpie, https://arxiv.org/abs/2406.08464), with `--begun` after a few first
words of a list. A run that was interrupted goes on where it stopped. `join` keeps the sensible
ones, adds questions about the documentation of the packages that are installed here and of Python's
standard library, and leaves out every prompt that shares 8 words in a row with a benchmark's.
`texts` writes the answered prompts as texts, from which the draft model learns.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import importlib.metadata
import json
import re
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from specdec import Engine, Prompt
from specdec.measure.repetition import is_looping
from specdec.text.pretrained import load_tokenizer

TURNS_AT_ONCE, TURN_TOKENS = 512, 128
# Beginnings of a user's turns for `turns --begun`, of kinds that bare templates rarely bring.
BEGINNINGS = (
    "Summarize the following article:", "Translate this German sentence into English:",
    "Write a Python function that", "Who", "When did", "What is the", "Where", "A farmer has",
    "A shop sells", "If a train", "There are", "Read the text and answer the question.\n\nText:",
    "Rewrite this sentence:", "Explain", "Write a short", "Translate from German into English:",
)  # fmt: skip
SHARED_WORDS = 8
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings"}
MARK = "\0"  # stands where the user's text would; no template has it


def write_turns(
    engine_dir: str, model: str, output: Path, num_turns: int, beginnings: Sequence[str],
    first: int = 0,
) -> None:  # fmt: skip
    """Append user turns to a file until it has as many as asked for.

    Turn N, counted from `first`, has the seed N and the beginning N, counted around.
    """
    with Engine.load(engine_dir, tokenizer=model) as engine, output.open("ab+") as file:
        file.seek(0)
        written = file.read()
        file.truncate(written.rfind(b"\n") + 1)  # without a line that a kill cut
        num_written = written.count(b"\n")
        begun = [find_beginning(engine.tokenizer, text) for text in beginnings]
        while num_written < num_turns:
            end = min(num_written + TURNS_AT_ONCE, num_turns)
            seeds = range(first + num_written, first + end)
            prompts = [
                Prompt(token_ids=begun[seed % len(begun)], temperature=1.0, seed=seed)
                for seed in seeds
            ]
            turns = engine.generate(prompts, max_output_len=TURN_TOKENS)
            for seed, turn in zip(seeds, turns, strict=True):
                is_whole = turn.finish_reason == "eos" and not is_looping(turn.token_ids)
                text = beginnings[seed % len(begun)] + turn.text
                line = json.dumps({"text": text, "is_whole": is_whole})
                file.write(line.encode() + b"\n")
            file.flush()
            num_written = end
            print(f"{num_written} of {num_turns} turns", flush=True)


def find_beginning(tokenizer: Any, text: str) -> list[int]:
    """The ids of the chat template up to and including the beginning of the user's first turn."""
    talk = [{"role": "user", "content": MARK}]
    rendered = tokenizer.apply_chat_template(talk, tokenize=False)
    begun = rendered.split(MARK)[0] + text
    ids: list[int] = tokenizer(begun, add_special_tokens=False)["input_ids"]
    return ids


def is_sensible(turn: dict[str, Any]) -> bool:
    """Return whether a turn ended by itself and looks like a request in English or German."""
    text = turn["text"].strip()
    num_plain = sum(c < "\u0180" and (c.isalnum() or c in " ,.?!'\"\n") for c in text)
    return (
        turn["is_whole"]
        and 15 <= len(text) <= 600
        and num_plain >= 0.93 * len(text)
        and text[0].isupper()
        and text[-1] in ".?!:"
    )


def list_docs(library: Path) -> Iterator[str]:
    """Questions about the descriptions of installed packages and the functions of a library."""
    for number, (name, paragraph) in enumerate(sorted(list_paragraphs())):
        yield (
            f"Summarize the following text:\n\n{paragraph}",
            f"{paragraph}\n\nAnswer from this text: what is {name} good for?",
            f"Rewrite this paragraph in simple words.\n\n{paragraph}",
        )[number % 3]
    for number, (name, signature, text) in enumerate(list_functions(library)):
        first = text.split("\n\n")[0].replace("\n", " ")
        inside = textwrap.indent(text, "    ").strip()
        beginning = f'def {signature}:\n    """{inside}\n    """\n'
        yield (
            beginning,
            f"Write a Python function {signature}. {first}",
            beginning,
            f"What does the function {name} of Python do? Its documentation says: {first}",
        )[number % 4]


def list_paragraphs() -> set[tuple[str, str]]:
    """Prose of the descriptions of the installed packages, with the package's name."""
    found = set()
    for package in importlib.metadata.distributions():
        if package.metadata["Name"] == "specdec-toolchain":  # whose text changes
            continue
        description = str(package.metadata.json.get("description", ""))
        for paragraph in re.split(r"\n\s*\n", description.replace("\r", "")):
            text = " ".join(paragraph.split())
            is_prose = sum(c.isalpha() or c in " ,.'" for c in text) >= 0.94 * len(text)
            if 200 <= len(text) <= 1200 and is_prose and text.isascii() and text.endswith("."):
                found.add((str(package.metadata["Name"]), text))
    return found


def list_functions(root: Path) -> Iterator[tuple[str, str, str]]:
    """Name, signature and docstring of documented functions of a folder's modules."""
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.intersection(path.relative_to(root).parts):
            continue
        for node in ast.parse(path.read_bytes()).body:
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if isinstance(node, ast.FunctionDef) and text and text.isascii():
                if 60 <= len(text) <= 500 and not node.name.startswith("_"):
                    signature = f"{node.name}({ast.unparse(node.args)})"
                    yield f"{path.stem}.{node.name}", signature, text


def list_runs(text: str) -> set[tuple[str, ...]]:
    """All runs of 8 words of a text, without regard to case and punctuation."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + SHARED_WORDS]) for i in range(len(words) - SHARED_WORDS + 1)}


def read_benchmark(path: Path) -> set[tuple[str, ...]]:
    """The runs of words of a benchmark's prompts: Spec-Bench's `turns` or HumanEval's `prompt`."""
    raw = path.read_bytes()
    lines = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode().splitlines()
    rows = [json.loads(line) for line in lines]
    texts = [text for row in rows for text in row.get("turns", [row.get("prompt")])]
    return set[tuple[str, ...]]().union(*map(list_runs, texts))


def sort_by_hash(texts: Iterable[str]) -> list[str]:
    """Texts in an order that depends on nothing else."""
    return sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())


def join_prompts(
    turns: Iterable[dict[str, Any]], docs: Iterable[str], known: set[tuple[str, ...]]
) -> tuple[list[str], dict[str, int]]:
    """Sensible turns and questions that share no run with `known`, mixed; and their counts."""
    kept_turns = [turn["text"].strip() for turn in turns if is_sensible(turn)]
    candidates = list(dict.fromkeys([*kept_turns, *docs]))
    kept = [text for text in candidates if known.isdisjoint(list_runs(text))]
    counts = {"turns": len(kept_turns), "all": len(candidates), "kept": len(kept)}
    return sort_by_hash(kept), counts


def write_texts(data: Path, model: str, folder: Path) -> None:
    """Write every answered row as one text, by the chat template: 2 % of them held out."""
    tokenizer = load_tokenizer(model)
    rows = [json.loads(line) for line in data.open(encoding="utf-8")]
    texts = sort_by_hash(
        tokenizer.apply_chat_template(row["messages"], tokenize=False).strip() for row in rows
    )
    folder.mkdir(parents=True, exist_ok=True)
    num_held_out = len(texts) // 50
    for name, part in (("heldout", texts[:num_held_out]), ("train", texts[num_held_out:])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part)
        (folder / f"{name}.jsonl").write_text(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    turns = commands.add_parser("turns")
    turns.add_argument("--engine-dir", required=True)
    turns.add_argument("--model", required=True, help="the GGUF file, for its tokenizer")
    turns.add_argument("--num-turns", type=int, default=6144)
    turns.add_argument("--first", type=int, default=0, help="the first turn's number, and seed")
    turns.add_argument("--begun", action="store_true", help="with the first words of a list")
    join = commands.add_parser("join")
    join.add_argument("--turns", type=Path, nargs="+", required=True)
    join.add_argument("--num-docs", type=int, default=1500)
    join.add_argument("--without", type=Path, nargs="*", default=[], help="benchmarks' prompts")
    texts = commands.add_parser("texts")
    texts.add_argument("--data", type=Path, required=True, help="answers of specdec-train data")
    texts.add_argument("--model", required=True, help="the GGUF file, for its chat template")
    for command in (turns, join, texts):
        command.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "turns":
        beginnings = BEGINNINGS if args.begun else ("",)
        write_turns(
            args.engine_dir, args.model, args.output, args.num_turns, beginnings, args.first
        )
        return
    if args.command == "texts":
        write_texts(args.data, args.model, args.output)
        return
    written = [json.loads(line) for path in args.turns for line in path.open(encoding="utf-8")]
    questions = sort_by_hash(list_docs(Path(sysconfig.get_paths()["stdlib"])))
    known = set[tuple[str, ...]]().union(*map(read_benchmark, args.without))
    prompts, counts = join_prompts(written, questions[: args.num_docs], known)
    args.output.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
