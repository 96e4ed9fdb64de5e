"""Releases of TensorRT-LLM that are known to write other text than the target's, or to fail.

Nothing in an engine or a log shows it; whoever has such a release is told when he builds and runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.methods import METHODS

from .facts import order_release

CHECK = "compare the text with that of a plain engine of the target"


def list_defects(version: str, mode: str | None, config: Mapping[str, Any]) -> list[str]:
    """List what is known of a release for an engine of this mode; config: the checkpoint's."""
    release = order_release(version)
    found = []
    if mode == METHODS["redrafter"].mode and release < (0, 19):
        beams = config.get("redrafter_num_beams")
        if isinstance(beams, int) and beams > 1:
            found.append(
                f"TensorRT-LLM before 0.19 (here {version}) accepts ReDrafter's drafts by"
                f" probabilities that are not normalized; with {beams} beams the text was reported"
                " to be clearly worse than the target's (issue 3125, fixed in April 2025 by pull"
                f" request 3278): use a later release or one beam, and {CHECK}"
            )
    if mode == METHODS["lookahead"].mode and release < (1, 0):
        found.append(
            f"lookahead of TensorRT-LLM {version}: from the second call on, a loaded engine was"
            " reported to write text that is wrong and differs from run to run (issue 2263, of"
            f" September 2024): {CHECK}"
        )
    return found
