"""Recipes that run."""
