#!/usr/bin/env python3
"""Our server under load: compared with others, what HTTP costs, and whether texts are right.

    python benchmarks/serve.py load [--size full|pycode] [--llama-server PROGRAM]
        [--vllm-python PYTHON] [--concurrency 1 4 16]
    python benchmarks/serve.py costs [--size full|pycode]
    python benchmarks/serve.py protocols [--model-dir MODEL]
    python benchmarks/serve.py exact [--requests 500] [--dtypes bfloat16 float32]

load: `specdec serve`, llama.cpp's llama-server and vLLM on the CPU, with the same weights and the
same draft model, each at the fastest of its settings. --size full grows the models to 986M
parameters; all servers take 20 GB of memory together. costs: what HTTP, tokens as text and
streaming take of a step, and what 200 requests per second of /health take. protocols: what each of
the APIs that the server speaks takes of its processor time. exact: mixed requests at concurrency 32
compared with what each gets without others, completions from the API, chats and responses from the
server; and its memory; pycode. --output FILE writes the figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):  # started as a file
    sys.path.insert(0, str(ROOT))

from specdec.command.signals import take_ending_signals
from specdec.errors import SpecDecError
from specdec.files.reading import write_json
from specdec.system.threads import calm_threads


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    from benchmarks.side_by_side import models
    from benchmarks.under_load import compare, costs, protocols

    parser = models.make_parser(__doc__)
    modes = parser.add_subparsers(dest="mode", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--output", type=Path, help="of the figures, as JSON")
    compare.add_options(modes.add_parser("load", parents=[common]))
    costs.add_options(modes.add_parser("costs", parents=[common]))
    protocols.add_options(modes.add_parser("protocols", parents=[common]))
    mode = modes.add_parser("exact", parents=[common])
    mode.add_argument("--requests", type=int, default=500)
    dtypes = ["bfloat16", "float32"]
    mode.add_argument("--dtypes", nargs="+", default=dtypes, choices=dtypes)
    return parser.parse_args(words)


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """The figures, and whether what must hold at any time does."""
    from benchmarks.under_load import compare, costs, exact, protocols
    from specdec.measure.machine import describe_machine

    if args.mode == "load":
        return compare.measure(args), True
    if args.mode == "costs":
        return costs.measure(args), True
    if args.mode == "protocols":
        return protocols.measure(args), True
    found = [exact.measure(args.requests, dtype) for dtype in args.dtypes]
    differing = sum(
        count for one in found for name, count in one.items() if name.startswith("different_from")
    )
    return describe_machine() | {"exact": found}, not differing


def main(words: list[str] | None = None) -> None:
    from benchmarks.under_load import compare

    args = parse_args(words)
    calm_threads()
    try:
        with take_ending_signals():  # servers that were started are ended
            report, holds = measure(args)
    except KeyboardInterrupt:
        raise SystemExit("error: stopped") from None
    except SpecDecError as error:
        raise SystemExit(f"error: {error.message}\nhint: {error.hint}") from None
    print(json.dumps(report, indent=2))
    if args.output is not None:
        write_json(args.output, report)
    if "load" in report:
        print(compare.format_markdown(report))
    if not holds:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
