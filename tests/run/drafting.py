"""What holds for every drafter that reads the target's states: texts and drafts on one target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specdec.decode.engine import TorchEngine
from specdec.decode.loop import Options, generate
from specdec.decode.requests import Request
from tests.engine.eagle_reference import Drafts, record_drafts
from tests.engines import list_requests

PROMPTS = ([5, 9, 77], [3] * 20, [100], [8, 60])
LIMIT = 24


def make_requests(prompts: Sequence[Sequence[int]] = PROMPTS, limit: int = LIMIT) -> list[Request]:
    return list_requests(prompts, limit)


def record(engine: TorchEngine, requests: Sequence[Request], **options: Any) -> Drafts:
    with record_drafts(engine.drafter) as drafts, torch.inference_mode():
        generate(engine.decoder, engine.drafter, requests, Options(**options))
    return drafts


def check_drafts_depend_on_the_text_alone(engine: TorchEngine) -> None:
    """Not on the batch, a row's last request, chunks of prompts, or a prefix from the cache."""
    stem = [7, 3, 9, 22, 41, 13, 6, 80]
    prompts = [*PROMPTS, [*stem, 5, 5], [*stem, 9], stem, [*stem[:4], 90, 91]]
    requests = make_requests(prompts, limit=8)
    alone = [record(engine, [request])[request.index] for request in requests]
    for options in (
        {"max_batch_size": 3}, {"max_batch_size": 3, "max_num_tokens": 9},
        {"max_batch_size": 2, "reuse_blocks": True},
    ):  # fmt: skip
        drafts = record(engine, requests, **options)
        assert [drafts[request.index] for request in requests] == alone, options


def check_text(engine: TorchEngine, expected: list[list[int]]) -> None:
    """The text is the target's, and a step drafts and accepts what its tree has room for."""
    drafter, results = engine.drafter, engine.generate(make_requests())
    assert [r.output_ids for r in results] == expected
    for result in results:
        stats = result.stats
        assert len(stats.accepted_histogram) == 1 + drafter.max_draft_depth
        assert stats.num_draft_tokens == stats.num_verify_steps * drafter.max_draft_tokens
