"""Stages `bench` and `diagnose`: the speed-up of speculation on this machine, and its causes.

These are commands of the product; measurements of its development are in `benchmarks/`.
"""
