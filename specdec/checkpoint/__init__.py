"""Checkpoint folders: their config.json and the tensors that belong to it."""
