"""Stages `bench` and `diagnose`: what speculation brings on this machine, and why not more.

These are commands of the product; what we measure while we develop it is in `benchmarks/`.
"""
