"""Hugging Face checkpoint -> checkpoint folder."""
