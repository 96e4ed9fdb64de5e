"""A model split over ranks computes what it computes whole: every rule of splitting, in threads."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from specdec.decode.ranks.part import list_options
from specdec.engine.decoder import Decoder
from specdec.engine.group import Group
from specdec.engine.layout import read_engine_config
from specdec.engine.loading import load_weights
from specdec.model.architectures import ARCHITECTURES, Architecture
from tests.conftest import ROOT, make_llama
from tests.covering import cover
from tests.engines import call, make_engine
from tests.parity.models import NAMES, VARIANTS, VOCAB, make_model
from tests.parity.test_families import CHAIN, TREE, assert_near, run_step, run_tree

GOLDEN = ROOT / "tests/golden/modelopt/trtllm"
CPU = torch.device("cpu")
CHUNKS = (70, 5, 1, 1)  # beyond a window; then single tokens
# What tells which weights there are, and how many of each.
PARTS = (
    "attention_bias", "mlp_bias", "tie_word_embeddings", "num_key_value_heads", "conv_bias",
    "attention_out_bias", "use_qkv_bias", "use_parallel_residual", "mamba_n_groups",
    "mamba_proj_bias", "attention_k_eq_v", "enable_moe_block", "num_kv_shared_layers",
    "use_expert_bias", "num_local_experts", "num_dense_layers", "do_layer_norm_before",
)  # fmt: skip


def describe_weights(name: str) -> tuple[object, ...]:
    """The architecture, and what weights a variant has: rotary tables and windows are no part."""
    architecture, _, variant = name.partition("-")
    settings = VARIANTS[architecture][variant]
    return architecture, *((key, repr(settings.get(key))) for key in PARTS)


def describe_embedding(name: str) -> tuple[object, ...]:
    """How tokens and positions are embedded, and what reads that."""
    architecture, _, variant = name.partition("-")
    settings = VARIANTS[architecture][variant]
    own = ARCHITECTURES.get(architecture, Architecture())
    return (
        own.positions, own.scales_embedding, own.norm, settings.get("tie_word_embeddings"),
        "embedding_multiplier" in settings, "vocab_size_per_layer_input" in settings,
        "word_embed_proj_dim" in settings, "mamba" in (settings.get("layer_types") or ()),
    )  # fmt: skip


# Of every architecture one, and each value of PARTS.
SPLIT = cover(NAMES, strength=1, key=describe_weights)
# By rows, every value; by columns where the head is not the embedding itself.
SPLIT_EMBEDDINGS = [(name, 0) for name in cover(NAMES, strength=1, key=describe_embedding)]
SPLIT_EMBEDDINGS += [
    ("LlamaForCausalLM-plain", 1), ("LlamaForCausalLM-tied_head_dim", 1),
    ("PhiForCausalLM-gelu_new", 1), ("GPT2LMHeadModel-gelu_untied", 1),
]  # fmt: skip
MakeDecoders = Callable[..., list[Decoder]]


class ThreadGroup(Group):
    """Ranks that are threads of one process."""

    def __init__(
        self, rank: int, size: int, barrier: threading.Barrier, slots: dict[int, torch.Tensor]
    ) -> None:
        super().__init__(rank, size)
        self._barrier, self._slots = barrier, slots

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return functools.reduce(torch.add, self._exchange(x))

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(part), dim=-1)

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._slots[self.rank] = x.clone()
        self._barrier.wait()
        parts = [self._slots[rank] for rank in range(self.size)]
        self._barrier.wait()
        return parts


def load_ranks(engine: Path) -> list[Decoder]:
    """Every rank's decoder of an engine folder."""
    config = read_engine_config(engine)
    options = list_options(config, engine, CPU)
    tp_size = config.checkpoint.model.tp_size
    barrier = threading.Barrier(tp_size, timeout=60)
    slots: dict[int, torch.Tensor] = {}
    groups: Sequence[Group | None] = [None]
    if tp_size > 1:
        groups = [ThreadGroup(rank, tp_size, barrier, slots) for rank in range(tp_size)]
    return [
        Decoder(
            config.checkpoint.model,
            load_weights(engine, config, CPU, rank=rank, kernels=options["kernels"]),
            group=group,
            **options,
        )
        for rank, group in enumerate(groups)
    ]


@pytest.fixture(scope="module")
def make_decoders(tmp_path_factory: pytest.TempPathFactory) -> MakeDecoders:
    """Decoders of every rank: of a model of NAMES, converted and built with these flags."""
    parent = tmp_path_factory.mktemp("split")

    @functools.cache
    def get_target(name: str) -> Path:
        if name in NAMES:
            return make_model(parent / f"{name}-hf", name)
        return make_llama(
            parent, heads=24, kv_heads=24, hidden=192, intermediate=96, vocab=VOCAB,
            name=f"{name}-hf",
        )  # fmt: skip

    @functools.cache
    def load(name: str, tp_size: int, flags: tuple[object, ...], optimize: str) -> list[Decoder]:
        folder = parent / name
        folder.mkdir(exist_ok=True)
        convert = ["--tp-size", tp_size, *flags]
        engine = make_engine(folder, get_target(name), optimize=optimize, convert=convert)
        return load_ranks(engine)

    def make(name: str, tp_size: int, *flags: object, optimize: str = "none") -> list[Decoder]:
        return load(name, tp_size, flags, optimize)

    return make


def compute(decoders: Sequence[Decoder]) -> torch.Tensor:
    """Rank 0's logits of two rows: prompts in chunks, single tokens, then a tree."""
    with ThreadPoolExecutor(len(decoders)) as pool:
        futures = [pool.submit(compute_rank, decoder) for decoder in decoders]
        return [future.result() for future in futures][0]


@torch.inference_mode()
def compute_rank(decoder: Decoder) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    cache = decoder.make_cache(2, 128)
    logits = []
    for row in range(2):
        text = torch.randint(3, VOCAB, (sum(CHUNKS),), generator=generator).tolist()
        decoder.start_row(cache, row, len(text))
        for size in CHUNKS[row:]:
            logits.append(run_step(decoder, cache, row, [text.pop() for _ in range(size)]))
    shape = TREE if decoder.model.recurrence is None else CHAIN
    return torch.cat([*logits, *run_tree(decoder, cache, shape)])


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "optimize"), zip(SPLIT, itertools.cycle(["auto", "none"])))
def test_four_ranks_compute_the_whole_model(
    name: str, optimize: str, make_decoders: MakeDecoders
) -> None:
    """Two K/V heads, or one, are duplicated; the vocabulary is padded; biases are added once."""
    whole = make_decoders(name, 1, optimize=optimize)
    parts = make_decoders(name, 4, optimize=optimize)
    assert parts[0].lm_head(torch.zeros(1, 64)).shape[1] == -(-VOCAB // 4)
    expected = compute(whole)
    assert expected.shape[1] == VOCAB
    assert_near(compute(parts), expected, name)


@pytest.mark.parametrize(("name", "dim"), SPLIT_EMBEDDINGS)
def test_a_split_embedding_is_the_whole_one(
    name: str, dim: int, make_decoders: MakeDecoders
) -> None:
    """Each rank holds rows or columns of it, and of learned positions likewise."""
    parts = make_decoders(name, 2, "--use-parallel-embedding", "--embedding-sharding-dim", dim)
    assert parts[0].model.use_parallel_embedding
    assert parts[0].embedding.shape == ((VOCAB, 32) if dim else (66, 64))
    assert_near(compute(parts), compute(make_decoders(name, 1)), name)


@pytest.mark.parametrize("tp_size", [3, 8])
def test_other_numbers_of_ranks(tp_size: int, make_decoders: MakeDecoders) -> None:
    whole = make_decoders("heads24", 1)
    assert_near(compute(make_decoders("heads24", tp_size)), compute(whole), f"{tp_size} ranks")


def test_a_shared_whole_table_is_cut_for_the_head(make_decoders: MakeDecoders) -> None:
    name, flags = (
        "LlamaForCausalLM-tied_head_dim",
        ["--use-embedding-sharing", "--trtllm-version", "0.14"],
    )
    parts = make_decoders(name, 4, *flags)
    assert parts[0].model.share_embedding_table
    assert not parts[0].model.use_parallel_embedding
    assert_near(compute(parts), compute(make_decoders(name, 1)), name)


def test_fp8_of_two_ranks(tmp_path: Path) -> None:
    """ModelOpt's own files of one model; the difference is that of bfloat16 sums."""
    logits = []
    for tp_size in (1, 2):
        folder = tmp_path / f"engine{tp_size}"
        call(
            "build", "--checkpoint-dir", GOLDEN / f"llama-fp8-tp{tp_size}", "--output-dir", folder,
            "--optimize", "none",
        )  # fmt: skip
        logits.append(compute(load_ranks(folder)).float())
    error = (logits[1] - logits[0]).abs().max() / logits[0].abs().max()
    assert error < 0.02, f"{error:.2e} of the largest logit"
