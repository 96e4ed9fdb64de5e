#!/usr/bin/env python3
"""Cut prompts from held-out files: the beginning of a function or class, some lines long.

    python make_prompts.py --data work/corpus/heldout.jsonl --output prompts.jsonl

At most one prompt a file; which one depends only on the file's path and text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

NUM_PROMPTS = 40
PROMPT_LINES = 10
MAX_CHARS = 500


def cut_prompt(path: str, text: str) -> str | None:
    """Return the first lines of one top-level definition of a file, or None if it has none."""
    lines = text.splitlines(keepends=True)
    starts = [
        i
        for i, line in enumerate(lines[: -2 * PROMPT_LINES])
        if line.startswith(("def ", "class ")) and lines[i + PROMPT_LINES].strip()
    ]
    if not starts:
        return None
    choice = int(hashlib.sha256(path.encode()).hexdigest(), 16)
    start = starts[choice % len(starts)]
    # No newline at the end: the tokenizer joins it with the next line's indentation.
    prompt = "".join(lines[start : start + PROMPT_LINES]).rstrip()
    return prompt if prompt.isascii() and len(prompt) <= MAX_CHARS else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.data.open(encoding="utf-8")]
    prompts = [p for row in rows if (p := cut_prompt(row["path"], row["text"])) is not None]
    kept = prompts[:: max(1, len(prompts) // NUM_PROMPTS)][:NUM_PROMPTS]
    args.output.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in kept))
    print(f"{len(kept)} prompts of {len(rows)} held-out files in {args.output}")


if __name__ == "__main__":
    main()
