"""Builders of each backend's engines."""
