"""Ministral: a Mistral whose layers may differ in their window."""

from __future__ import annotations

import dataclasses

from . import mistral

FAMILY = dataclasses.replace(
    mistral.FAMILY,
    name="ministral",
    architectures=("MinistralForCausalLM",),
    written_as="MistralForCausalLM",
)
