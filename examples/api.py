"""Text from an engine in this process: all at once, token by token, several streams together.

    python examples/api.py out/engine

The engine is one that holds its tokenizer (`specdec-build --tokenizer-dir`); docs/api.md explains.
"""

from __future__ import annotations

import sys

from specdec import Engine, Prompt

MARKS = {"draft": "+", "bonus": ">", "plain": "."}


def main(engine_dir: str) -> None:
    """Show what the API does with an engine."""
    with Engine.load(engine_dir) as engine:
        print(f"{engine.describe()['method']}, up to {engine.max_seq_len} tokens a request")

        # Several prompts at once, one of them with settings of its own.
        prompts: list[str | Prompt] = [
            "def read(path):",
            Prompt(text="class Stack:", temperature=0.7, seed=1),
        ]
        for output in engine.generate(prompts, max_output_len=24):
            accepted = output.origins.count("draft")
            print(f"{output.prompt!r} -> {output.text!r}")
            print(f"  {len(output.token_ids)} tokens, {accepted} of them drafted, ", end="")
            print(f"{output.stats.acceptance_length:.2f} a verify step, {output.finish_reason}")

        # One prompt as it is made, with a mark for how each token came.
        for event in engine.stream("import json", max_output_len=24):
            print(event.text, "".join(MARKS[origin] for origin in event.origins), sep="\t")

        # Streams that are open together share their steps.
        streams = [engine.stream(text, max_output_len=8) for text in ("for i in", "return")]
        while engine.step():
            for stream in streams:
                stream.take()
        print([stream.output.text for stream in streams])


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(f"{__doc__}")
    main(sys.argv[1])
