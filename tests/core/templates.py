"""Texts beside the templates that they come of."""

from __future__ import annotations

import re
from string import Formatter


def match_template(template: str, text: str) -> bool:
    """Whether a text comes of a template with {fields}."""
    pieces = Formatter().parse(template)
    pattern = "".join(re.escape(words) + ".+" * (field is not None) for words, field, *_ in pieces)
    return re.fullmatch(pattern, text) is not None
