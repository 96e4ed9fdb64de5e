"""The parts of benchmarks/peers.py: our engine beside others on one machine in one run."""
