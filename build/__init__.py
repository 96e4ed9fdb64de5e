"""Checkpoint folders to engine folders."""
