"""Verification: proofs that checkpoints and engines are intact and exact."""
