"""Audit of a running server: losslessness and speculation, as docs/audit.md describes."""
