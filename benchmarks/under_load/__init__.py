"""Measurements of benchmarks/serve.py: servers under load, costs, memory, texts.

A client of our own makes the load, beside guidellm and aiperf in tests/clients: it takes one thread
of the cores that the servers share, counts a step's tokens as one arrival whether they come as one
event or as several, and keeps the texts, which are compared between servers.
"""
