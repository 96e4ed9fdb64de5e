"""Limits of a table of n-grams, for what makes one and what reads it; needs no numpy."""

MAX_ORDER = 8  # tokens of a context
MAX_CONTINUATIONS = 255  # next tokens of a context: their number takes one byte
