#!/usr/bin/env python3
"""Our engine compared with transformers, llama.cpp and OpenVINO GenAI: one machine, one run.

    python benchmarks/peers.py [--size full|small|pycode] [--peers NAME...] [--threads 2]

The same Hugging Face folders, prompts and output lengths for all, greedy, in bfloat16, one request
at a time. Each peer is installed from the package index into a virtual environment of its own, runs
in a process of its own that loads once, and takes its turn in every round. Speculative ways choose
the fastest of the same draft lengths first. A peer that cannot be installed, or dies, has its
reason in the table.

--size full grows the pycode models to 986M parameters (benchmarks/grow.py): it needs 20 GB of
memory, 24 GB of disk and more than an hour on 2 old cores. small takes some 20 minutes, pycode 10;
the first run of all installs the peers besides, half an hour with compiling llama.cpp.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):  # started as a file
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.side_by_side.command import main

if __name__ == "__main__":
    main(str(__doc__))
