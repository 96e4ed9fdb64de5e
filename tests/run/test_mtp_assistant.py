"""MTP assistants: drafts are those of transformers' own, and texts are plain decoding's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.decode.drafters.mtp_assistant import MtpAssistantDrafter
from specdec.decode.engine import TorchEngine
from specdec.decode.prefill import fill_cache
from specdec.engine.mtp_assistant import CentroidHead
from specdec.errors import SpecDecError
from specdec.methods.mtp_assistant import MtpAssistantDraft
from tests.assistants import make_mtp_assistant, make_target
from tests.engines import continue_by_transformers, make_tree_engine
from tests.run.drafting import (
    PROMPTS,
    check_drafts_depend_on_the_text_alone,
    make_requests,
    record,
)

LIMIT, ROOM = 12, 63
# The target's window is of 16 positions: one prompt is longer, the others' texts become so.
WINDOWED = [*PROMPTS, [(7 * n) % 120 for n in range(30)]]
# Name -> target, centroids of the assistant's head, and whether kernels compute.
CASES = {
    "values are keys": ("equal_values", 0, "auto"),
    "shared keys, centroids": ("tables", 16, "none"),
}


class Reference:
    """The assistant and the generator of candidates that transformers has for it."""

    def __init__(self, target: Path, assistant: Path) -> None:
        import transformers

        self.target = transformers.AutoModelForCausalLM.from_pretrained(target).eval()
        self.assistant = transformers.Gemma4AssistantForCausalLM.from_pretrained(assistant).eval()

    @torch.no_grad()
    def draft(self, text: Sequence[int], size: int) -> tuple[list[int], Tensor]:
        """Return a chain after a text, whose last token the target has not read, and logits."""
        from transformers import GenerationConfig
        from transformers.generation import candidate_generator

        self.assistant.generation_config.num_assistant_tokens = size
        generator = candidate_generator.SinglePositionMultiTokenCandidateGenerator(
            self.assistant, self.target.get_input_embeddings(), GenerationConfig(max_length=999)
        )
        ids = torch.tensor([list(text)])
        read = self.target(ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
        drafted, logits = generator.get_candidates(ids, {}, read, False, 0)
        return drafted[0, len(text) :].tolist(), logits[0]


@dataclasses.dataclass(frozen=True)
class Pair:
    engine: TorchEngine
    reference: Reference
    texts: list[list[int]]  # of WINDOWED, by the target alone


@pytest.fixture(scope="module", params=CASES)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    variant, centroids, optimize = CASES[request.param]
    parent = tmp_path_factory.mktemp("pair")
    target = make_target(parent / "target", variant)
    assistant = make_mtp_assistant(parent, target, centroids=centroids)
    flags = ("--mtp-assistant-max-draft-len", ROOM)
    folder = make_tree_engine(
        "mtp_assistant", parent, target, assistant, optimize=optimize, flags=flags
    )
    texts = continue_by_transformers(target, WINDOWED, LIMIT)
    return Pair(TorchEngine(folder, device="cpu"), Reference(target, assistant), texts)


def use_tree(engine: TorchEngine, num_tokens: int, top_k: int = 1) -> MtpAssistantDrafter:
    drafter = engine.drafter
    assert isinstance(drafter, MtpAssistantDrafter)
    drafter.use_tree(num_tokens, top_k)
    return drafter


@pytest.mark.thorough
def test_chains_are_those_of_transformers(pair: Pair) -> None:
    use_tree(pair.engine, 3)
    requests = make_requests(WINDOWED, LIMIT)
    for steps in record(pair.engine, requests, max_batch_size=3).values():
        for text, paths in steps:
            drafted, _ = pair.reference.draft(text, 3)
            assert paths == {tuple(drafted[:size]) for size in (1, 2, 3)}


@pytest.mark.thorough
@pytest.mark.parametrize(("num_tokens", "top_k"), [(3, 1), (60, 20)])
def test_texts_are_plain_decodings(pair: Pair, num_tokens: int, top_k: int) -> None:
    """In batches, beyond the window, and cut by the end in the middle of a draft."""
    use_tree(pair.engine, num_tokens, top_k)
    requests = make_requests(WINDOWED, LIMIT)
    results = pair.engine.generate(requests)
    assert [result.output_ids for result in results] == pair.texts
    accepted = sum(sum(result.stats.accepted_histogram[1:]) for result in results)
    assert accepted or top_k == 1
    end = pair.texts[-1][4]
    stopped = dataclasses.replace(requests[-1], end_ids=frozenset({end}))
    (result,) = pair.engine.generate([stopped])
    text = pair.texts[-1]
    assert result.output_ids == text[: text.index(end) + 1]


def test_trees_begin_with_the_best_tokens(pair: Pair) -> None:
    """Behind accepted tokens, too: each draft reads the keys of the text alone."""
    use_tree(pair.engine, 60, 20)
    drafts = record(pair.engine, make_requests(WINDOWED[-2:], LIMIT), max_batch_size=2)
    for text, paths in (step for steps in drafts.values() for step in steps):
        _, logits = pair.reference.draft(text, 1)
        nodes = {path[0] for path in paths if len(path) == 1}
        assert nodes == set(logits[0].topk(len(nodes)).indices.tolist())


def test_logits_are_those_of_transformers(pair: Pair) -> None:
    """To the rounding of float32; those of centroids at the tokens that these have."""
    drafter, decoder = use_tree(pair.engine, 3), pair.engine.decoder
    net, text = drafter.net, [*WINDOWED[-1], 5]
    cache = decoder.make_cache(2, 64)
    with torch.inference_mode():
        states = fill_cache(decoder, cache, [1], [text[:-1]], 64)
        rows, roots = np.array([1]), np.array([text[-1]])
        hidden = net.begin(cache, rows, roots, states.reshape(1, -1))
        if isinstance(net.head, CentroidHead):
            tokens, found = net.head(hidden)
            assert tokens.shape == (1, 3 * 128 // 16)
        else:
            tokens, found = torch.arange(128)[None], net.head(hidden)
    _, expected = pair.reference.draft(text, 1)
    torch.testing.assert_close(found, expected[:, tokens[0]], rtol=1e-5, atol=1e-5)
    assert pair.reference.draft(text, 1)[0] == [int(tokens[0, found.argmax()])]


@pytest.mark.thorough
def test_drafts_depend_on_the_text_alone(pair: Pair) -> None:
    use_tree(pair.engine, 3)
    check_drafts_depend_on_the_text_alone(pair.engine)


def test_limits_are_told(pair: Pair) -> None:
    drafter = use_tree(pair.engine, 3)
    with pytest.raises(SpecDecError, match="the engine's max_draft_len is 63"):
        drafter.use_tree(ROOM + 1)
    with pytest.raises(SpecDecError, match="the assistant scores"):
        drafter.use_tree(3, 1000)
    options = MtpAssistantDraft(mtp_assistant_tokens=4, mtp_assistant_top_k=2)
    assert MtpAssistantDrafter(drafter.net, options).max_draft_tokens == 4
