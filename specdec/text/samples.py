"""Prompts of our own, for commands that are given none."""

# Short ones first: the first two are those of specdec-verify's sampling test.
TEXTS = (
    "The",
    "def add(a, b):\n    return",
    "Once upon a time, in a village by the sea, there lived",
    "import json\n\n\ndef load(path):\n    with open(path) as file:\n        data =",
    "Q: What is 17 + 25?\nA:",
    "The kettle had boiled dry an hour ago, and nobody in the kitchen had noticed: they were all at"
    " the window, watching the river come up over the second step, then the third. Someone ought"
    " to",
)
