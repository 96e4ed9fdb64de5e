#!/usr/bin/env python3
"""Cut prompts from files: the beginnings of functions and classes, some lines long.

    python make_prompts.py --data work/corpus/heldout.jsonl --output prompts.jsonl
    python make_prompts.py --data work/corpus/train.jsonl --output train_prompts.jsonl \\
        --num-prompts 4000 --per-file 8
    python make_prompts.py --data work/corpus/train.jsonl --output method_prompts.jsonl \\
        --num-prompts 4000 --per-file 8 --methods

Which ones depends only on the files' paths and texts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

PROMPT_LINES = 10
MAX_CHARS = 500


def cut_prompts(path: str, text: str, limit: int, is_inside: bool = False) -> list[str]:
    """Return the first lines of up to `limit` top-level definitions of a file, or of methods."""
    lines = text.splitlines(keepends=True)
    starts = [
        i
        for i, line in enumerate(lines[: -2 * PROMPT_LINES])
        if line.startswith("    def " if is_inside else ("def ", "class "))
        and lines[i + PROMPT_LINES].strip()
    ]
    first = int(hashlib.sha256(path.encode()).hexdigest(), 16)
    chosen = [starts[(first + i) % len(starts)] for i in range(min(limit, len(starts)))]
    # No newline at the end: the tokenizer joins it with the next line's indentation.
    prompts = ["".join(lines[start : start + PROMPT_LINES]).rstrip() for start in chosen]
    return [prompt for prompt in prompts if prompt.isascii() and len(prompt) <= MAX_CHARS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=40)
    parser.add_argument("--per-file", type=int, default=1, help="most prompts of one file")
    parser.add_argument("--methods", action="store_true", help="of classes, in place of top level")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.data.open(encoding="utf-8")]
    prompts = [
        prompt
        for row in rows
        for prompt in cut_prompts(row["path"], row["text"], args.per_file, args.methods)
    ]
    kept = prompts[:: max(1, len(prompts) // args.num_prompts)][: args.num_prompts]
    args.output.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in kept))
    print(f"{len(kept)} prompts of {len(rows)} files in {args.output}")


if __name__ == "__main__":
    main()
