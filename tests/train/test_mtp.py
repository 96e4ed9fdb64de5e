"""A trained MTP head drafts in an engine what it drafts in training, and is accepted there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specdec.decode.engine import TorchEngine
from specdec.decode.requests import Request
from specdec.errors import SpecDecError
from specdec.files.reading import write_json
from specdec.train.features import Features
from specdec.train.methods.mtp import METHOD, Mtp
from specdec.train.settings import TrainSettings
from specdec.train.target import load_config, load_target
from tests.engines import continue_greedily, make_tree_engine
from tests.families import make_family_model, make_hybrid

LENGTH, STEPS = 40, 4
# Of a Llama test_train_methods.py trains one, through the commands.
TARGETS: dict[str, Any] = {
    "hybrid": make_hybrid,
    "gemma2": lambda parent: make_family_model(parent, "gemma2", vocab=128),
    "granite": lambda parent: make_family_model(
        parent, "granite", vocab=128, logits_scaling=1.5, embedding_multiplier=2.0),
    "qwen3 mixture": lambda parent: make_family_model(parent, "qwen3_moe", vocab=128),
}  # fmt: skip


def load(folder: Path) -> Any:
    config = load_config(str(folder))
    return load_target(str(folder), config, "float32", torch.device("cpu"), with_head=True)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", TARGETS)
def test_a_head_that_learned_a_text_is_accepted_in_an_engine(kind: str, tmp_path: Path) -> None:
    """Its target's own text, by heart: of every step nearly all that is drafted is accepted.

    And at every step the drafts are what training makes of the same states and tokens.
    """
    folder = TARGETS[kind](tmp_path)
    target, prompt = load(folder), [5, 9, 77]
    (text,) = continue_greedily(target.whole_model, [prompt], LENGTH)
    tokens = torch.tensor([[*prompt, *text]])
    torch.manual_seed(1)
    drafter = Mtp(TrainSettings(mtp_num_steps=STEPS, self_distillation=0.5), target)
    features, mask = read(target, tokens), torch.ones_like(tokens, dtype=torch.bool)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=6e-3)
    for _ in range(80):
        optimizer.zero_grad()
        loss, _ = drafter(features, mask, drafter.count_labels(mask), False)
        loss.backward()
        optimizer.step()

    head = tmp_path / "head"
    head.mkdir()
    save_file(dict(drafter.state_dict()), head / "model.safetensors", metadata={"format": "pt"})
    write_json(head / "config.json", dict(METHOD.describe(drafter, target)))
    flags = ("--mtp-max-draft-len", STEPS)
    engine = TorchEngine(make_tree_engine("mtp", tmp_path, folder, head, flags=flags), device="cpu")
    seen, propose = [], engine.drafter.propose

    def watch(requests: Any) -> Any:
        found = propose(requests)
        seen.append((list(requests[0].output_ids), found[0].tree.tokens[1:].tolist()))
        return found

    engine.drafter.propose = watch  # type: ignore[method-assign]
    (result,) = engine.generate(
        [Request(index=0, input_ids=prompt, max_output_len=LENGTH, end_ids=frozenset())]
    )
    assert result.output_ids == text
    assert result.stats.acceptance_length > STEPS - 0.5, "of at most STEPS + 1"
    for output, drafted in seen:
        tokens = torch.tensor([[*prompt, *output, *drafted]])
        with torch.no_grad():
            guesses = drafter.eval().draft_states(read(target, tokens))
        place = len(prompt) + len(output) - 2
        found = [int(predict(target, guess[0, place])) for guess in guesses]
        assert found == drafted


def read(target: Any, tokens: torch.Tensor) -> Features:
    with torch.no_grad():
        states = target.model(input_ids=tokens, use_cache=False).last_hidden_state
    return Features(tokens, states, target.table[tokens], target.head)


def predict(target: Any, state: torch.Tensor) -> torch.Tensor:
    return target.head.compute_logits(state).argmax(-1)


def test_a_target_that_is_built_otherwise_is_refused(tmp_path: Path) -> None:
    target = load(make_family_model(tmp_path, "gpt2", heads=4))
    with pytest.raises(SpecDecError, match="no head for multi-token prediction is known for it"):
        Mtp(TrainSettings(), target)
