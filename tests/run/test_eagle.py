"""EAGLE on the torch engine: the drafts are the papers', the text is the target's own."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.decode.drafters.eagle import (
    PUBLISHED_CHOICES,
    EagleDrafter,
    StaticTree,
    check_choices,
)
from specdec.decode.drafters.levels import DynamicTree
from specdec.decode.drafters.trees import DEFAULT_CPU_TOKENS, grow_choices
from specdec.decode.engine import TorchEngine
from specdec.errors import SpecDecError
from specdec.files.reading import read_json
from specdec.methods.base import parse_paths
from specdec.methods.eagle import EagleParams
from specdec.model.config import ModelConfig
from tests.conftest import make_eagle_drafter, make_llama, make_tokenizer
from tests.engine.eagle_reference import EagleReference
from tests.engines import (
    call,
    continue_by_transformers,
    make_knowing_drafter,
    make_tree_engine,
)
from tests.run.drafting import (
    LIMIT,
    PROMPTS,
    check_drafts_depend_on_the_text_alone,
    check_text,
    make_requests,
    record,
)

TREES: dict[str, Callable[[EagleDrafter], None]] = {
    "default": lambda drafter: None,
    "static": lambda drafter: drafter.use_choices(PUBLISHED_CHOICES[:-2]),
    "dynamic": lambda drafter: drafter.use_dynamic_tree(5, 20),
    "chain": lambda drafter: drafter.use_choices(((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))),
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle1": {},
    "eagle1-two-layers": {"layers": 2, "bias": False, "own_embedding": False, "kv_heads": 4},
    "eagle3": {"version": 3, "aux_layers": (0, 2)},
    "eagle3-reduced": {
        "version": 3,
        "draft_vocab": 70,
        "own_embedding": False,
        "kv_heads": 1,
        "norm_before_residual": True,
    },  # fmt: skip
    # EAGLE-3.1, with the one norm before fc and with the other.
    "eagle3-input-norm": {"version": 3, "norm_before_fc": True, "norm_output": True},
    "eagle3-fc-norm": {"version": 3, "aux_layers": (0, 2), "fc_norm": True, "norm_output": True},
    "p-eagle": {"version": 3, "aux_layers": (0, 2), "layers": 2, "mask_token_id": 9},
    "p-eagle-norms": {
        "version": 3,
        "draft_vocab": 70,
        "own_embedding": False,
        "fc_norm": True,
        "norm_output": True,
        "norm_before_residual": True,
        "mask_token_id": 2,
    },  # fmt: skip
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("target"), layers=3, seed=3)


make_eagle_engine = functools.partial(make_tree_engine, "eagle")


class Case:
    """A drafter's folder and its engine."""

    def __init__(self, name: str, parent: Path, target: Path) -> None:
        self.number = [*DRAFTERS].index(name)
        self.version = DRAFTERS[name].get("version", 1)
        self.target = target
        self.drafter_dir = make_eagle_drafter(parent, scale=2.0, **DRAFTERS[name])
        # By the kernels and, of every third drafter, by torch's operators.
        optimize = "auto" if self.number % 3 else "none"
        folder = make_eagle_engine(parent, target, self.drafter_dir, optimize=optimize)
        self.engine = TorchEngine(folder, device="cpu")
        assert isinstance(self.engine.drafter, EagleDrafter)
        self.drafter: EagleDrafter = self.engine.drafter

    def use(self, tree: str) -> None:
        self.drafter.__init__(self.drafter.net, self.engine.decoder)  # type: ignore[misc]
        TREES[tree](self.drafter)


@pytest.fixture(scope="module", params=list(DRAFTERS))
def case(
    request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param), target)


@pytest.fixture(scope="module")
def expected(target: Path) -> list[list[int]]:
    """What transformers continues the prompts with, no end token."""
    return continue_by_transformers(target, PROMPTS, LIMIT)


# ---- What is drafted.


@pytest.mark.thorough
@pytest.mark.parametrize("tree", ["static", "dynamic"])
def test_drafts_are_the_reference_s(case: Case, tree: str) -> None:
    """Every path of the trees of a whole generation, computed anew from the folder, no cache."""
    case.use(tree)
    reference = EagleReference(case.target, case.drafter_dir, version=case.version)
    for drafts in record(case.engine, make_requests(PROMPTS[:2], limit=6)).values():
        for text, paths in drafts[:1] + drafts[-1:]:
            if tree == "static":
                wanted = reference.draft_static(text, PUBLISHED_CHOICES[:-2])
            else:
                depth = case.drafter.max_draft_depth
                wanted = reference.draft_dynamic(text, top_k=5, depth=depth, num_tokens=20)
            assert paths == wanted


@pytest.mark.thorough
def test_drafts_depend_on_the_text_alone(case: Case) -> None:
    case.use(("static", "dynamic")[case.number % 2])
    check_drafts_depend_on_the_text_alone(case.engine)


def test_reused_prefixes_are_not_run_again(case: Case) -> None:
    case.use("default")
    stem = [7, 3, 9, 22, 41, 13, 6, 80]
    ran: list[int] = []
    forward, packed = case.drafter.net.forward, case.drafter._packed

    def count(step: Any, features: Any, cache: Any) -> Any:
        if step.tree_mask.shape[1] == step.tree_mask.shape[2] and cache is case.drafter._cache:
            ran.append(step.tokens.size)
        return forward(step, features, cache)

    def count_pairs(cache: Any, features: Any, states: Any, pairs: Any, *others: Any) -> Any:
        assert packed is not None
        ran.append(sum(map(len, pairs.tokens)))
        return type(packed).draft(packed, cache, features, states, pairs, *others)

    requests = make_requests([[*stem, 5], [*stem, 9]], limit=2)
    case.drafter.net.forward = count  # type: ignore[method-assign]
    if packed is not None:
        packed.draft = count_pairs  # type: ignore[method-assign, assignment]
    try:
        record(case.engine, requests, max_batch_size=1, reuse_blocks=True)
    finally:
        del case.drafter.net.forward
        if packed is not None:
            del packed.draft
    masked = 0 if case.drafter.params.mask_token_id is None else case.drafter.max_draft_depth - 1
    assert ran[0] == 9 + masked, "all pairs of the first prompt"
    assert max(ran[1:]) < 9 + masked, "of the second, what is not in the cache"


# ---- The text.


@pytest.mark.thorough
@pytest.mark.parametrize("turn", range(2))
def test_random_drafters_leave_the_text_unchanged(
    case: Case, turn: int, expected: list[list[int]]
) -> None:
    """Each drafter with two trees; with the first also alone."""
    case.use([*TREES][(case.number + turn) % len(TREES)])
    check_text(case.engine, expected)
    if turn == 0:
        alone = [case.engine.generate([request])[0].output_ids for request in make_requests()]
        assert alone == expected


@pytest.mark.parametrize("kind", ["embedding", "feature", "layers"])
def test_perfect_drafters_are_accepted_to_their_depth(kind: str, tmp_path: Path) -> None:
    drafter_dir = make_knowing_drafter(tmp_path, kind)
    engine = TorchEngine(
        make_eagle_engine(tmp_path, tmp_path / "counter", drafter_dir), device="cpu"
    )
    drafter = engine.drafter
    assert isinstance(drafter, EagleDrafter)
    requests = make_requests([[4], [30, 2]], limit=30)
    wanted = [[(p[-1] + 1 + n) % 32 for n in range(30)] for p in ([4], [30, 2])]
    plans: list[tuple[Callable[[], None], int]] = [
        (lambda: drafter.use_choices(((0,), (0, 0), (0, 0, 0))), 3),
        (lambda: drafter.use_choices(((1,), (0,), (0, 0))), 2),
        (lambda: drafter.use_choices(((1,),)), 0),
        (lambda: drafter.use_dynamic_tree(3, 9), 4),
        (lambda: drafter.use_dynamic_tree(1, 2), 2),
    ]
    for use, depth in plans:
        use()
        for result, tokens in zip(engine.generate(requests), wanted, strict=True):
            assert result.output_ids == tokens
            assert result.stats.num_verify_steps == -(-29 // (depth + 1))
            assert sum(result.stats.accepted_histogram[:depth]) <= 1, "all but a cut last step"


@pytest.mark.parametrize("kind", ["feature", "layers"])
def test_hostile_drafters_cost_steps_only(kind: str, tmp_path: Path) -> None:
    drafter = make_knowing_drafter(tmp_path, kind, step=5)
    engine = TorchEngine(make_eagle_engine(tmp_path, tmp_path / "counter", drafter), device="cpu")
    assert isinstance(engine.drafter, EagleDrafter)
    engine.drafter.use_choices(((0,), (0, 0)))
    for result in engine.generate(make_requests([[4], [30, 2]], limit=9)):
        assert result.stats.num_accepted == 0
        assert result.stats.num_verify_steps == 8
        start = result.request.input_ids[-1] + 1
        assert result.output_ids == [(start + n) % 32 for n in range(9)]


def test_one_pass_drafts_all_places(target: Path, tmp_path: Path) -> None:
    """Of P-EAGLE: the new pairs of all rows, and masks after them, whatever the depth."""
    drafter_dir = make_eagle_drafter(tmp_path, version=3, mask_token_id=5, scale=2.0)
    folder = make_eagle_engine(tmp_path, target, drafter_dir)
    engine = TorchEngine(folder, device="cpu")
    drafter = engine.drafter
    assert isinstance(drafter, EagleDrafter)
    assert drafter.max_draft_depth == 8, "as many as speculators trains"
    sizes: list[tuple[int, ...]] = []
    forward, propose, steps = drafter.net.forward, drafter.propose, 0

    def count(step: Any, features: Any, cache: Any) -> Any:
        sizes.append(step.tokens.shape)
        return forward(step, features, cache)

    def count_steps(requests: Any) -> Any:
        nonlocal steps
        steps += 1
        return propose(requests)

    drafter.net.forward = count  # type: ignore[method-assign]
    drafter.propose = count_steps  # type: ignore[method-assign]
    engine.generate(make_requests([[4, 9]], limit=5))
    assert len(sizes) == steps
    assert all(8 <= np.prod(size) <= 8 + 9 for size in sizes)


# ---- Trees and limits.

NET = ModelConfig(
    architecture="LlamaForCausalLM", dtype="float32",
    vocab_size=90, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_size=16, intermediate_size=96, norm_epsilon=1e-6,
    max_position_embeddings=512, rotary_base=10000.0, rotary_scaling=None, hidden_act="silu",
)  # fmt: skip
PARAMS = EagleParams(net=NET, num_eagle_layers=3, max_non_leaves_per_layer=2, max_draft_len=10)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ("[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]", "is 4 deep, the engine has num_eagle_layers 3"),
        (json.dumps([[n] for n in range(11)]), "has 11 paths, the engine's max_draft_len is 10"),
        ("[[0], [90]]", "has rank 90, the vocabulary 90 tokens"),
        ("[[0], [1, 0]]", r"--eagle-choices has \[1, 0\] but not \[1\]"),
        (
            "[[0], [1], [2], [0, 0], [1, 0], [2, 0]]",
            "has 3 paths of 1 ranks that go on, the engine's max_non_leaves_per_layer is 2",
        ),
    ],
)
def test_choices_that_the_engine_has_no_room_for(choices: str, message: str) -> None:
    with pytest.raises(SpecDecError, match=message):
        check_choices(parse_paths(choices, "--eagle-choices"), PARAMS)
    check_choices(((0,), (1,), (2,), (0, 89), (1, 0), (0, 89, 3)), PARAMS)


def test_trees_know_their_sizes() -> None:
    static = StaticTree(PUBLISHED_CHOICES)
    assert (static.num_tokens, static.depth) == (25, 5)
    # Nodes with children: 4, 5, 1 and 1 of the levels from the root's children on.
    assert static.num_run == sum(
        any(p[: len(q)] == q != p for p in PUBLISHED_CHOICES) for q in PUBLISHED_CHOICES
    )
    dynamic = DynamicTree(top_k=3, depth=4, num_tokens=1000)
    assert (dynamic.num_tokens, dynamic.num_run) == (3 + 9 * 3, 9)
    assert DynamicTree(top_k=2, depth=1, num_tokens=9).num_tokens == 2


def test_dynamic_trees_beyond_the_limits(case: Case) -> None:
    with pytest.raises(SpecDecError, match="max-top-k is 11, the engine's max_non_leaves_per_laye"):
        case.drafter.use_dynamic_tree(11)
    with pytest.raises(SpecDecError, match="tree-tokens is 64, the engine's max_draft_len is 63"):
        case.drafter.use_dynamic_tree(4, 64)


def test_default_trees_on_a_cpu(case: Case) -> None:
    case.use("default")
    tree = case.drafter.tree
    assert isinstance(tree, StaticTree if case.version == 1 else DynamicTree)
    assert tree.num_tokens == DEFAULT_CPU_TOKENS
    if isinstance(tree, StaticTree):
        assert tree.depth == max(map(len, grow_choices(4, DEFAULT_CPU_TOKENS, 128)))


# ---- The commands.


def test_three_commands(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    drafter = make_eagle_drafter(tmp_path, scale=2.0)
    engine = make_eagle_engine(
        tmp_path, target, drafter,
        flags=["--max-draft-len", 16, "--num-eagle-layers", 3, "--max-non-leaves-per-layer", 6],
    )  # fmt: skip
    config = read_json(engine / "config.json")
    assert config["build_config"]["speculative_decoding_mode"] == "eagle"
    assert config["build_config"]["max_draft_len"] == 16
    run = [
        "--engine-dir", engine, "--tokenizer-dir", tokenizer, "--input-text", "def a",
        "class", "--max-output-len", 12, "--json",
    ]  # fmt: skip
    reports = []
    for flags in (
        [], ["--no-speculation"], ["--eagle-choices", "[[0],[1],[1,4],[1,4,0]]"],
        ["--eagle-use-dynamic-tree"], ["--eagle-dynamic-tree-max-top-k", 6],
        ["--eagle-tree-tokens", 16],
    ):  # fmt: skip
        capsys.readouterr()
        fixed = () if flags == ["--no-speculation"] else ("--draft-budget", "fixed")
        call("run", *run, *flags, *fixed)
        reports.append(json.loads(capsys.readouterr().out))
    outputs = [[o["output_ids"] for o in report["outputs"]] for report in reports]
    assert all(output == outputs[0] for output in outputs)
    methods = [report["stats"]["method"] for report in reports]
    assert methods == ["eagle", "plain", *["eagle"] * 4]
    drafted = [
        report["outputs"][0]["stats"]["num_draft_tokens"]
        // report["outputs"][0]["stats"]["num_verify_steps"]
        for report in reports
    ]
    assert drafted == [7, 0, 4, 7, 7, 16]
    for flags, message in (
        (["--eagle-dynamic-tree-max-top-k", 7], "max-top-k is 7, the engine's max_non_leaves_per"),
        (["--eagle-choices", "[[0]]", "--eagle-use-dynamic-tree"], "gives a static tree, --eagle"),
        (["--eagle-use-dynamic-tree", "--no-speculation"], "no effect with an engine that runs pl"),
    ):
        with pytest.raises(SpecDecError, match=message):
            call("run", *run, *flags)


def test_copies_that_differ_are_refused(target: Path, tmp_path: Path) -> None:
    """TensorRT-LLM would run one net a level; the torch backend runs the first for all."""
    from safetensors.torch import load_file, save_file

    drafter = make_eagle_drafter(tmp_path)
    make_eagle_engine(tmp_path, target, drafter)
    path = tmp_path / "checkpoint" / "rank0.safetensors"
    tensors = load_file(path)
    tensors["eagle_nets.2.drafter.fc.bias"][3] += 1
    save_file(tensors, path)
    with pytest.raises(
        SpecDecError, match=r"eagle_nets\.2\.drafter\.fc\.bias differs from eagle_n"
    ):
        call(
            "build", "--checkpoint-dir", tmp_path / "checkpoint", "--output-dir", tmp_path / "no",
        )  # fmt: skip
