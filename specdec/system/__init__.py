"""Processes, threads, logs and connections of this machine."""
