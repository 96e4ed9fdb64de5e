"""The embedded engine's model: build lays it out, run executes it."""
