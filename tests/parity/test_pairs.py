"""Every method on every family: the text is transformers', whatever drafts, and however well.

Each pair's engine is made by the commands, so convert has to take it. What drafters compute is
tested by method, on one family. Which line of TensorRT-LLM builds a pair is checked here as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.build.backends.tensorrt_llm.checks import find_checkpoint_problems
from specdec.checkpoint.config import read_checkpoint_config
from specdec.convert.families import FAMILIES
from specdec.decode.drafters.draft_target import attach_draft
from specdec.decode.engine import TorchEngine
from specdec.methods import METHODS
from specdec.model.architectures import ARCHITECTURES, Architecture
from specdec.trtllm.facts import LABELS, load_facts
from specdec.trtllm.lacks import find_pair
from tests.conftest import (
    make_dflash_drafter,
    make_drafter,
    make_eagle_drafter,
    make_medusa_heads,
    make_mtp_head,
)
from tests.covering import cover
from tests.engines import call
from tests.families import WRITTEN_AS
from tests.methods import use_method
from tests.parity.models import VARIANTS, VOCAB, make_model
from tests.parity.test_families import check_reference, generate, generate_reference

# One of each family that has a checkpoint of its own.
NAMES = [
    f"{name}-{next(iter(variants))}"
    for name, variants in VARIANTS.items()
    if FAMILIES[name].name not in WRITTEN_AS
]
LENGTHS, LIMIT = (5, 30), 16
# Drafters with weights: how their folders are made, and the option that names them. All sizes are
# those of the models in VARIANTS.
DRAFTERS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "redrafter": ("drafter", lambda parent: make_drafter(
        parent, vocab=VOCAB, exit_dim=96, scale=3.0, name="redrafter")),
    "medusa": ("medusa", lambda parent: make_medusa_heads(
        parent, vocab=VOCAB, scale=3.0, name="medusa")),
    "eagle": ("eagle", lambda parent: make_eagle_drafter(
        parent, vocab=VOCAB, own_embedding=False, scale=2.0, name="eagle")),
    "eagle3": ("eagle", lambda parent: make_eagle_drafter(
        parent, vocab=VOCAB, version=3, draft_vocab=70, own_embedding=False, name="eagle3")),
    "dflash": ("dflash", lambda parent: make_dflash_drafter(
        parent, vocab=VOCAB, aux_layers=(0,), scale=2.0, num_target_layers=None,
        dflash_config={"mask_token_id": 2, "target_layer_ids": [0], "input_embedding_scale": 0.5})),
    "p-eagle": ("eagle", lambda parent: make_eagle_drafter(
        parent, vocab=VOCAB, version=3, mask_token_id=4, own_embedding=False, name="p-eagle")),
    "dspark": ("dflash", lambda parent: make_dflash_drafter(
        parent, vocab=VOCAB, form="deepspec", markov_rank=8, aux_layers=(0,), scale=2.0,
        num_target_layers=None, input_embedding_scale=0.5, name="dspark")),
    "mtp": ("mtp", lambda target: make_mtp_head(target.parent, target, name=f"{target.name}-mtp")),
}  # fmt: skip
TITLES = {
    "redrafter": "ReDrafter", "medusa": "Medusa", "eagle": "EAGLE-1", "eagle3": "EAGLE-3",
    "p-eagle": "EAGLE-3", "dflash": "DFlash", "dspark": "DFlash", "mtp": "MTP",
}  # fmt: skip
NOWHERE = ("eagle3", "p-eagle", "dflash", "dspark", "mtp")  # which no line has for any target
# DSpark's Markov head adds to what a head says: these do more than multiply. P-EAGLE's masks are
# alongside embeddings, which some of these scale. A head for MTP is a layer of the target's own.
SOME = {
    "dspark": ("Llama", "Gemma2", "Granite", "Phi"), "p-eagle": ("Llama", "Gemma2"),
    "mtp": ("Llama", "Qwen", "Gemma", "Granite", "Phi3", "SmolLM3", "Mixtral", "Mistral"),
}  # fmt: skip
WITHOUT = [name for name, method in METHODS.items() if method.source != "checkpoint"]
MakeEngine = Callable[..., Path]


def method_of(kind: str) -> str:
    return {"dspark": "dflash", "p-eagle": "eagle"}.get(kind, kind.removesuffix("3"))


def test_all_methods_are_here() -> None:
    # Assistants are of one family alone: tests/run/test_mtp_assistant.py has them.
    made = {method_of(name) for name in DRAFTERS} | {"mtp_assistant"}
    assert made == {name for name, method in METHODS.items() if method.source == "checkpoint"}


@pytest.fixture(scope="module")
def get_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    parent = tmp_path_factory.mktemp("models")
    return functools.cache(lambda name: make_model(parent / name, name))


@pytest.fixture(scope="module")
def make(get_target: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> MakeEngine:
    """The engine folder of a target; each is made once.

    kind: of its drafter; None for an engine that another drafts for, "" for one that does that.
    """
    parent = tmp_path_factory.mktemp("engines")
    drafters = {n: do(parent / "drafters") for n, (_, do) in DRAFTERS.items() if n != "mtp"}

    @functools.cache
    def make_head(name: str) -> Path:
        return DRAFTERS["mtp"][1](get_target(name))

    @functools.cache
    def make(name: str, kind: str | None, *flags: object, optimize: str = "auto") -> Path:
        folder = parent / f"{name}-{kind}-{len(flags)}-{optimize}"
        with_drafter: list[object] = []
        if kind:
            drafter = drafters.get(kind) or make_head(name)
            with_drafter = [f"--{DRAFTERS[kind][0]}-model-dir", drafter]
        call(
            "convert", "--model-dir", get_target(name), "--output-dir", folder / "checkpoint",
            *with_drafter, *flags,
        )  # fmt: skip
        mode = ["draft_tokens_external", "--max-draft-len", 8]
        call(
            "build", "--checkpoint-dir", folder / "checkpoint", "--output-dir", folder / "engine",
            "--backend", "torch", "--optimize", optimize,
            *(["--speculative-decoding-mode", *mode] if kind is None else []),
        )  # fmt: skip
        return folder / "engine"

    return make


def use(engine: TorchEngine, method: str, draft: Path) -> None:
    """Let a method without weights draft, or the engine `draft`."""
    if method == "draft_target":
        attach_draft(engine, TorchEngine(draft, device="cpu"), draft_len=3, use_logits=False)
    use_method(engine, method)


def check_lines(folder: Path, kind: str) -> None:
    """What the lines of TensorRT-LLM lack for a checkpoint is what each one's build refuses."""
    checkpoint = read_checkpoint_config(folder)
    method, name = checkpoint.method, checkpoint.raw["architecture"]
    target = checkpoint.model.architecture
    assert method is not None
    title = TITLES[kind]
    is_own = kind in NOWHERE or find_pair("1.2", method.name, target) is None
    assert (method.own_architectures.get(name) == title) == is_own
    for label in LABELS:
        facts = load_facts(label)
        problems = find_checkpoint_problems(facts, checkpoint)
        lacking = [fact for fact, _ in problems if "has no" in fact]
        assert bool(lacking) == (name not in facts.architectures)
        if is_own:
            what = title if kind in NOWHERE else f"{title} for {target}"
            assert lacking == [f"TensorRT-LLM {label} has no {what}"]
            assert "use --backend torch" in problems[0][1]


def describe(pair: tuple[str, str]) -> tuple[Any, ...]:
    """The drafter, and what of the target's arithmetic it may meet."""
    name, kind = pair
    own = ARCHITECTURES.get(name.partition("-")[0], Architecture())
    return (
        kind, own.norm, own.positions, own.mlp, own.is_parallel, own.head_bias,
        own.scales_embedding, own.inner_norms, own.qk_norm,
    )  # fmt: skip


PAIRS = [
    (name, kind) for name in NAMES for kind in DRAFTERS if name.startswith(SOME.get(kind, ""))
]  # fmt: skip
CHOSEN = cover(PAIRS, key=describe)
# Drafters that are published for hybrids read the outputs of layers of either kind.
HYBRIDS = [
    ("Qwen3_5ForCausalLM-plain", "eagle3"), ("Qwen3_5ForCausalLM-plain", "dflash"),
    ("Qwen3_5MoeForCausalLM-plain", "eagle3"), ("Qwen3NextForCausalLM-plain", "dflash"),
    ("Qwen3NextForCausalLM-plain", "dspark"), ("Qwen3_5ForCausalLM-plain", "p-eagle"),
    ("Lfm2ForCausalLM-plain", "eagle3"), ("Lfm2MoeForCausalLM-plain", "dflash"),
    ("GraniteMoeHybridForCausalLM-tiny", "eagle3"),
]  # fmt: skip
CHOSEN += [pair for pair in HYBRIDS if pair not in CHOSEN]
CHOSEN += [
    (name, [*DRAFTERS][at % 5]) for at, name in enumerate(NAMES)
    if not any(name == other for other, _ in CHOSEN)
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "kind"), CHOSEN)
def test_every_drafter_on_every_kind_of_family(
    name: str, kind: str, make: MakeEngine, get_target: Callable[[str], Path]
) -> None:
    folder = make(name, kind)
    check_lines(folder.parent / "checkpoint", kind)
    engine = TorchEngine(folder, device="cpu")
    assert engine.method == method_of(kind)
    assert engine.decoder.kernels is not None or engine.device.type == "cuda"
    outputs = generate(engine, LENGTHS, LIMIT)
    assert outputs == check_reference(get_target(name), LENGTHS, outputs)


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES[::2])
def test_every_method_without_weights_on_families(
    name: str, make: MakeEngine, get_target: Callable[[str], Path]
) -> None:
    """The draft model is of another family."""
    expected = generate_reference(get_target(name), LENGTHS, LIMIT)
    engine = TorchEngine(make(name, None), device="cpu")
    is_hybrid = engine.decoder.model.recurrence is not None  # which refuse several texts
    for method in (m for m in WITHOUT if not (is_hybrid and m == "lookahead")):
        use(engine, method, make(NAMES[NAMES.index(name) - 1], ""))
        assert engine.method == method
        assert generate(engine, LENGTHS, LIMIT) == expected, method


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kind"),
    [(NAMES[2 * at], kind) for at, kind in enumerate(DRAFTERS)]
    + [("PhiForCausalLM-gelu_new", "eagle"), ("GemmaForCausalLM-tied", "redrafter")]
    + [("OPTForCausalLM-350m", "redrafter")]
    + [pair for pair in HYBRIDS[:4] if pair[0] != NAMES[2 * [*DRAFTERS].index(pair[1])]],
)
def test_two_ranks(
    name: str, kind: str, make: MakeEngine, get_target: Callable[[str], Path]
) -> None:
    """Every drafter at least once, in torch's kernels."""
    engine = TorchEngine(make(name, kind, "--tp-size", 2, optimize="none"), device="cpu")
    assert engine.decoder.model.tp_size == 2
    if kind == "eagle" and engine.decoder.model.arithmetic.head_bias:  # whose net has no head here
        assert engine.drafter.net.decoder.lm_head.bias is not None  # type: ignore[attr-defined]
    outputs = generate(engine, LENGTHS, LIMIT)
    assert outputs == check_reference(get_target(name), LENGTHS, outputs)
