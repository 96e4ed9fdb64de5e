"""Engines of TensorRT's own layers: their networks, and what runs them."""
