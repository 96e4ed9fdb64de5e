"""Steps of drafting and verifying, of our loop and of TensorRT-LLM 0.14's own networks.

The models are those of examples/pycode, whose drafts are accepted often. The networks read what
their runtime would give them in each step: packed rows, positions, masks as words of bits, and keys
and values in pages, which are moved together after acceptance.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from specdec.decode.accept import accept
from specdec.decode.drafters import read_drafting
from specdec.decode.engine import TorchEngine
from specdec.decode.loop import Batch
from specdec.decode.settings import DecodeSettings
from specdec.engine.tree import Tree, build_tree_mask
from tests.engines import call
from tests.real.driver import Network, Row, plan_build
from tests.real.network import Machine
from tests.real.test_networks_0_14 import SOURCE
from tests.trt.networks import NEEDS_TENSORRT, make_requests

pytestmark = NEEDS_TENSORRT
PYCODE = Path(__file__).parents[2] / "examples" / "pycode"
LIMIT = 40
GetCheckpoint = Callable[[str, int], Path]
PAGED = ("--use-paged-context-fmha", "enable")
EXTERNAL = ("--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 5, *PAGED)
LOOKAHEAD = ("--speculative-decoding-mode", "lookahead_decoding", "--max-draft-len", 11)
REDRAFTER = ("--drafter-model-dir", PYCODE / "redrafter", "--redrafter-num-beams")
CONVERTED: dict[str, tuple[object, ...]] = {
    "plain": (),
    "medusa": ("--medusa-model-dir", PYCODE / "medusa"),
    "redrafter": (*REDRAFTER, 4, "--redrafter-draft-len-per-beam", 5),
    "redrafter-wide": (*REDRAFTER, 8, "--redrafter-draft-len-per-beam", 5),
    "redrafter-chain": (*REDRAFTER, 1, "--redrafter-draft-len-per-beam", 4),
}


@dataclasses.dataclass
class Step:
    """What our loop read, which nodes it accepted, and the token after them."""

    tree: Tree
    path: list[int]
    bonus: int


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    machine = Machine(SOURCE)
    yield machine
    machine.close()


@pytest.fixture(scope="module")
def get_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> GetCheckpoint:
    parent = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def convert(name: str, tp_size: int) -> Path:
        folder = parent / f"{name}{tp_size}"
        call("convert", "--model-dir", PYCODE / "target", "--output-dir", folder, "--dtype",
             "float32", "--trtllm-version", "0.14", "--tp-size", tp_size,
             *CONVERTED[name])  # fmt: skip
        return folder

    return convert


@functools.cache
def read_prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(PYCODE / "target")
    lines = (PYCODE / "prompts.jsonl").read_text().splitlines()[:3]
    texts = [json.loads(line)["prompt"] for line in lines]
    return [tokenizer(text)["input_ids"][:n] for text, n in zip(texts, (40, 22, 31), strict=True)]


def build(checkpoint: Path, mode: str, *flags: object) -> Path:
    """Our engine of a whole checkpoint, unless there is one."""
    folder = checkpoint.with_name(f"{checkpoint.name}-{mode}")
    if not folder.exists():
        call("build", "--backend", "torch", "--optimize", "none", "--checkpoint-dir", checkpoint,
             "--output-dir", folder, "--max-batch-size", 3, *flags)  # fmt: skip
    return folder


def load_engine(folder: Path, **settings: Any) -> TorchEngine:
    """An engine whose drafts no budget cuts."""
    options: dict[str, Any] = {"engine_dir": folder, "draft_budget": "fixed", **settings}
    own = DecodeSettings(**options)
    return TorchEngine(folder, device="cpu", drafting=read_drafting(own, None))


def record_steps(engine: TorchEngine, prompt: list[int]) -> list[Step]:
    """The steps of a greedy request, the first of which read the prompt."""
    steps, real = [], Batch._accept

    def keep(batch: Batch, requests: Any, candidates: Any, *rest: Any) -> Any:
        found = real(batch, requests, candidates, *rest)
        steps.append(Step(candidates[0].tree, *found[0]))
        return found

    with mock.patch.object(Batch, "_accept", keep):
        engine.generate(make_requests([prompt], LIMIT))
    return steps


def make_row(step: Step, past: int, slot: int, *, is_chunk: bool = False) -> Row:
    """A step's tree as a generation step, or its chain as a chunk of a prompt."""
    tokens, depths = step.tree.tokens.tolist(), step.tree.depths.tolist()
    mask = torch.from_numpy(build_tree_mask(step.tree))
    return Row(tokens, past, slot, depths, mask, is_prompt=is_chunk, num_logits=len(tokens))


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("mode", ["medusa", "lookahead", "draft_model", "prompt_lookup"])
def test_networks_verify_the_trees_of_our_loop(
    machine: Machine, get_checkpoint: GetCheckpoint, mode: str, tp_size: int
) -> None:
    """Three requests in one batch; each step's choices are ours, and so is the cache after it."""
    kind = "medusa" if mode == "medusa" else "plain"
    flags = {"medusa": (), "lookahead": LOOKAHEAD}.get(mode, EXTERNAL)
    settings = list_settings(mode, get_checkpoint)
    engine = load_engine(build(get_checkpoint(kind, 1), mode, *flags[:4]), **settings)
    network = Network(machine, plan_build(get_checkpoint(kind, tp_size), *flags), most=64)
    prompts = read_prompts()
    steps = [record_steps(engine, prompt) for prompt in prompts]
    found = network.run([Row(p, 0, slot) for slot, p in enumerate(prompts)])
    assert found["logits"].argmax(-1).tolist() == [own[0].bonus for own in steps]
    texts, count = [list(prompt) for prompt in prompts], 0
    if mode == "medusa":
        compare_heads(engine, texts, found["medusa_logits"])
    for at in range(1, max(len(own) for own in steps)):
        own_steps = {slot: own[at] for slot, own in enumerate(steps) if at < len(own)}
        rows = [make_row(step, len(texts[slot]), slot, is_chunk=flags == EXTERNAL)
                for slot, step in own_steps.items()]  # fmt: skip
        found, ends, end = network.run(rows), [], 0
        for (slot, step), row in zip(own_steps.items(), rows, strict=True):
            choices = found["logits"][end : end + len(row.tokens)].argmax(-1).tolist()
            assert accept(step.tree, choices) == (step.path, step.bonus)
            if flags != EXTERNAL:
                network.accept(row, step.path)
            texts[slot] += step.tree.tokens[step.path].tolist()
            ends.append(end + step.path[-1])
            end += len(row.tokens)
            count += len(step.path) - 1
        if mode == "medusa":
            compare_heads(engine, [texts[i] for i in own_steps], found["medusa_logits"][:, ends])
    assert count > 20, "drafts are accepted"


def list_settings(mode: str, get_checkpoint: GetCheckpoint) -> dict[str, Any]:
    """How our engine drafts."""
    if mode == "draft_model":
        draft = get_checkpoint("plain", 1).with_name("draft")
        if not draft.exists():
            call("convert", "--model-dir", PYCODE / "draft", "--output-dir", draft)
        return {"draft_engine_dir": build(draft, "engine"), "draft_len": "4"}
    ways: dict[str, dict[str, Any]] = {
        "medusa": {},
        "lookahead": {"lookahead_config": "[3,3,3]"},
        "prompt_lookup": {"prompt_lookup_num_tokens": 5},
    }
    return ways[mode]


@torch.inference_mode()
def compare_heads(engine: TorchEngine, texts: list[list[int]], found: torch.Tensor) -> None:
    """Heads' logits [heads, B, V] after texts are those of our heads on transformers' states."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(PYCODE / "target", dtype=torch.float32)
    hidden = torch.cat([model.model(torch.tensor([text]))[0][:, -1] for text in texts])
    heads = engine.drafter.heads  # type: ignore[attr-defined]
    for head, logits in enumerate(found):
        torch.testing.assert_close(logits, heads.compute_logits(head, hidden), atol=1e-3, rtol=1e-4)


@dataclasses.dataclass
class Draft:
    """A row of the ReDrafter network's outputs, which are its inputs of the next step."""

    row: Row
    beams: torch.Tensor  # [W, L + 1], the root first
    places: torch.Tensor  # [W, L + 1], of the beams' tokens in the step
    scores: torch.Tensor  # [W, L, V], of what was drafted

    def list_paths(self) -> set[tuple[int, ...]]:
        """The path to each token of the step, as the network's own mask and depths have it."""
        assert self.row.mask is not None
        assert self.row.offsets is not None
        tokens, depths, found = self.row.tokens, self.row.offsets, set()
        for seen in self.row.mask:
            nodes = sorted(torch.nonzero(seen)[:, 0].tolist(), key=depths.__getitem__)
            assert [depths[node] for node in nodes] == list(range(len(nodes)))
            found.add(tuple(tokens[node] for node in nodes))
        assert len(found) == len(tokens)
        return found


def list_tree_paths(tree: Tree) -> set[tuple[int, ...]]:
    mask = build_tree_mask(tree)  # nodes are in the order of their depths
    return {tuple(tree.tokens[seen].tolist()) for seen in mask}


def run_redrafter(
    network: Network, rows: list[Row], drafts: list[Draft]
) -> tuple[list[int], list[int], list[Draft]]:
    """Compute a step; return how many tokens each row accepted, of which beam, and new drafts."""
    beams, length, size = network.shapes["draft_probs"][1:]
    is_drafted = torch.tensor([0 if row.is_prompt else 1 for row in rows]).int()
    base = [
        row.past if draft else len(row.tokens) - 1
        for row, draft in zip(rows, is_drafted, strict=True)
    ]
    found = network.run(
        rows,
        device_request_types=is_drafted,
        draft_tokens=stack([draft.beams for draft in drafts], beams, length + 1).int(),
        draft_indices=stack([draft.places for draft in drafts], beams, length + 1).int(),
        draft_probs=stack([draft.scores for draft in drafts], beams, length, size),
        redrafter_inverted_temperature=torch.ones(len(rows)),
        rand_data_validation=torch.full((len(drafts), beams, length), 0.5),
        rand_data_sample=torch.full((len(rows),), 0.5),
        position_ids_base=torch.tensor(base).int(),
    )
    counts = found["num_accepted_tokens"].tolist()
    sizes = found["next_spec_decoding_generation_lengths"].tolist()
    assert (max(sizes), sum(sizes)) == (int(found["max_gen_token"]), int(found["total_gen_token"]))
    new, start = [], 0
    for at, (row, count, width) in enumerate(zip(rows, counts, sizes, strict=True)):
        past = len(row.tokens) if row.is_prompt else row.past + count
        offsets = found["next_spec_decoding_position_offsets"][at, :width].tolist()
        own = slice(start, start + width)
        assert found["packed_position_ids"][own].tolist() == [past + depth for depth in offsets]
        tokens, mask = found["next_flat_tokens"][own].tolist(), found["spec_decoding_mask"][at]
        step = Row(tokens, past, row.slot, offsets, mask[:width, :width], False, width)
        parts = (found[f"next_draft_{name}"][at] for name in ("tokens", "indices", "probs"))
        new.append(Draft(step, *parts))
        start += width
    return counts, found["accepted_beam_index"].tolist(), new


def stack(parts: list[torch.Tensor], *shape: int) -> torch.Tensor:
    return torch.stack(parts) if parts else torch.zeros(0, *shape)


@pytest.mark.parametrize("is_mended", [False, True])
@pytest.mark.parametrize(
    ("kind", "tp_size"),
    [("redrafter", 1), ("redrafter", 2), ("redrafter-wide", 1), ("redrafter-chain", 1)],
)
def test_redrafter_drafts_and_verifies_as_our_loop(
    machine: Machine, get_checkpoint: GetCheckpoint, kind: str, tp_size: int, is_mended: bool
) -> None:
    """The network's drafts, masks and accepted tokens, the third prompt two steps later.

    Public issue 3125: 0.14 takes logits of drafts for logarithms of probabilities. Where it
    rejects a token it then gives the drafter's own favourite no chance, and the text is not the
    target's. With what it returns normalized between the steps every token is ours.
    """
    engine = load_engine(build(get_checkpoint(kind, 1), "engine"))
    network = Network(machine, plan_build(get_checkpoint(kind, tp_size)), most=64)
    prompts = read_prompts()
    steps = [record_steps(engine, prompt) for prompt in prompts]
    at, wrong, num_accepted = [0, 0, 0], [], 0
    drafts: dict[int, Draft] = {}
    for turn in range(max(len(own) for own in steps) + 2):
        begun = [slot for slot in range(3) if turn == (0, 0, 2)[slot]]
        running = [slot for slot in drafts if at[slot] < len(steps[slot])]
        if not begun and not running:
            continue
        last = [drafts.pop(slot) for slot in running]
        rows = [Row(prompts[slot], 0, slot) for slot in begun] + [draft.row for draft in last]
        counts, beams, new = run_redrafter(network, rows, last)
        last_of = dict(zip(running, last, strict=True))
        for slot, count, beam, draft in zip([*begun, *running], counts, beams, new, strict=True):
            step, before = steps[slot][at[slot]], last_of.get(slot)
            assert count == len(step.path)
            if before is not None:
                num_accepted += count - 1
                assert before.list_paths() == list_tree_paths(step.tree)
                assert before.beams[beam, :count].tolist() == step.tree.tokens[step.path].tolist()
                network.accept(before.row, before.places[beam, :count].tolist())
            at[slot] += 1
            if draft.row.tokens[0] != step.bonus:
                assert before is not None
                favourite = before.scores[beam, count - 1].argmax()
                wrong.append((slot, int(favourite) == step.bonus))
                continue
            if is_mended:
                draft.scores = draft.scores.log_softmax(-1)
            drafts[slot] = draft
    assert num_accepted > 20
    assert bool(wrong) == (not is_mended and kind != "redrafter-chain")
    assert all(is_favourite for _, is_favourite in wrong)
