"""The proposer class that an exported ReDrafter brings to vLLM, with vLLM's part played here.

`make oracles` runs it in vLLM itself.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdec.engine.redrafter import ReDrafterHead
from specdec.export.pipeline import export_model
from specdec.export.settings import ExportSettings
from specdec.methods.redrafter import ReDrafterParams
from tests.conftest import make_drafter, make_llama

VOCAB, HIDDEN, LENGTH = 131, 64, 4


class Target(torch.nn.Module):
    """As vLLM calls its models: by keyword, with the positions of all tokens of a step."""

    def __init__(self, vocab: int = VOCAB, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.embed_tokens = torch.nn.Embedding(vocab, hidden)
        self.output: Any = None

    def forward(self, *, input_ids: Any, positions: torch.Tensor) -> Any:
        return self.output


@pytest.fixture
def forward_context(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """What vLLM tells of the step that it computes."""
    context = types.SimpleNamespace(attn_metadata=None)
    module: Any = types.ModuleType("vllm.forward_context")
    module.get_forward_context = lambda: context
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.forward_context", module)
    return context


def load_class(folder: Path) -> Any:
    """The class in the exported folder, as `PYTHONPATH=FOLDER` finds it."""
    spec = importlib.util.spec_from_file_location("proposer", folder / "redrafter_proposer.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ReDrafter


def make_config(world_size: int = 1, *, enforce_eager: bool = True) -> Any:
    return types.SimpleNamespace(
        model_config=types.SimpleNamespace(enforce_eager=enforce_eager),
        parallel_config=types.SimpleNamespace(world_size=world_size),
        speculative_config=types.SimpleNamespace(num_speculative_tokens=LENGTH),
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """An exported folder with a recurrent network, and one without."""
    parent = tmp_path_factory.mktemp("proposer")
    target = make_llama(parent, vocab=VOCAB)
    made = {}
    for is_rnn in (True, False):
        drafter = make_drafter(
            parent, vocab=VOCAB, exit_dim=96 if is_rnn else 2 * HIDDEN, rnn=is_rnn,
            name=f"drafter-{is_rnn}",
        )  # fmt: skip
        made[is_rnn] = parent / f"exported-{is_rnn}"
        settings = ExportSettings(
            output_dir=made[is_rnn], to="vllm", model_dir=str(target),
            drafter_model_dir=str(drafter),
        )  # fmt: skip
        assert "redrafter_proposer.ReDrafter" in export_model(settings)["command"]
    return made


@pytest.mark.parametrize("is_rnn", [True, False])
def test_it_drafts_what_the_engine_drafts(
    is_rnn: bool, folders: dict[bool, Path], forward_context: Any
) -> None:
    """A prompt read whole, a step with drafts of which some were refused, one amid its prompt."""
    folder, target = folders[is_rnn], Target()
    proposer = load_class(folder)(make_config())
    proposer.load_model(target)
    torch.manual_seed(3)
    target.output = torch.randn(12, HIDDEN)
    target(input_ids=None, positions=torch.arange(12))  # measured: no step
    with pytest.raises(RuntimeError, match="no step of the target was seen"):
        proposer.propose([[1]], [2], None)
    starts = torch.tensor([0, 4, 9, 12])
    forward_context.attn_metadata = {"layer": types.SimpleNamespace(query_start_loc=starts)}
    # Request 0: tokens 0 to 3; 1: tokens 20 to 24, two drafts were right; 2: a part of its prompt.
    positions = torch.tensor([0, 1, 2, 3, 20, 21, 22, 23, 24, 7, 8, 9])
    target(input_ids=None, positions=positions)
    sampled: list[list[int]] = [[5], [9, 8, 7], []]
    drafts = proposer.propose(sampled, [5, 24, 40], None)
    tensors = load_file(folder / "model.safetensors")
    num_layers = proposer.config["num_draft_layers"]
    names = {f"lm_head.{num_layers}.weight": "drafter.lm_head.weight"}
    weights = {
        names.get(name, f"drafter.{name}".replace("drafter.lm_head.", "drafter.layers.")): tensor
        for name, tensor in tensors.items()
    }
    params = ReDrafterParams(
        num_layers=num_layers, hidden_size=HIDDEN, exit_dim=proposer.config["exit_dim"],
        is_rnn=is_rnn, num_beams=1, draft_len_per_beam=LENGTH, greedy_search=True,
    )  # fmt: skip
    embedding = target.state_dict()["model.embed_tokens.weight"]
    head = ReDrafterHead(params, weights, embedding)
    wanted = head.search_beams(target.output[[3, 6]], torch.tensor([5, 7]))[:, 0].tolist()
    assert drafts == [wanted[0], wanted[1], []]
    # A step is used once.
    with pytest.raises(RuntimeError, match="no step of the target was seen"):
        proposer.propose(sampled, [5, 24, 40], None)
    target(input_ids=None, positions=positions)
    assert proposer.propose([[], [], []], [5, 24, 40], None) == [[], [], []]


def test_what_it_cannot_draft_for_is_refused(
    folders: dict[bool, Path], forward_context: Any
) -> None:
    chosen = load_class(folders[True])
    with pytest.raises(ValueError, match="drafts on one device"):
        chosen(make_config(world_size=2))
    with pytest.raises(ValueError, match="give --enforce-eager"):
        chosen(make_config(enforce_eager=False))
    with pytest.raises(ValueError, match="hidden size is 64, the target's 32"):
        chosen(make_config()).load_model(Target(hidden=32))
    with pytest.raises(AttributeError, match="no attribute"):
        chosen(make_config()).load_model(torch.nn.Module())
    target = Target()
    chosen(make_config()).load_model(target)
    target.output = (torch.zeros(1, HIDDEN), [])
    forward_context.attn_metadata = {"layer": None}
    with pytest.raises(TypeError, match="yields a tuple"):
        target(input_ids=None, positions=torch.zeros(1))
