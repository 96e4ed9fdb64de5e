"""specdec-bench, specdec tune and specdec diagnose: what speculation brings on this machine.

These are commands of the product; what we measure while we develop it is in `benchmarks/`.
"""
