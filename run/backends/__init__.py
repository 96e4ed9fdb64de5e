"""Opened engines of each backend, as specdec-run calls them."""
