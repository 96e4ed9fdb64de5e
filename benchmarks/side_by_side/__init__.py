"""The parts of benchmarks/peers.py: our engine compared with others on one machine in one run."""
