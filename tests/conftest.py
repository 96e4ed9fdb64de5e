"""Factories used by all tests: tiny models, drafters, tokenizers, and the command line.

Import them as `from tests.conftest import make_llama`; every one is deterministic and offline.
"""

from __future__ import annotations

import os

# Before torch is imported anywhere: no network, and sums in the same order on every machine.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import contextlib
import copy
import gc
import importlib
import itertools
import json
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    import torch

# The same examples every time, and no time limit that a busy machine would break.
hypothesis.settings.register_profile("specdec", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("specdec")

# A shell's background jobs are deaf to Ctrl-C, and so are their children; some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
# Of processes: ours, then what `make test-transformers-4` has put there.
SEARCH_PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
# Kernels are compiled once for all processes of all runs, and nothing is written to a home folder.
os.environ.setdefault("SPECDEC_CACHE_DIR", str(ROOT / ".build" / "cache"))

# Begun first, in this order: nothing long is left for the end, when one worker is without work, and
# what needs kernels comes after those that compile them.
LONG_FILES = (
    "engine/test_native_kernels.py", "run/test_tensor_parallel.py", "train/test_train_command.py",
    "train/test_train_methods.py", "convert/test_convert_families.py", "parity/test_families.py",
    "run/test_hybrids.py", "run/test_graphs.py", "parity/test_pairs.py", "e2e/test_recipes.py",
    "trtllm/test_whole_path.py", "serve/test_operation.py", "e2e/test_readme.py",
    "run/test_drafter_weights.py", "run/test_exactness.py", "engine/test_native_step.py",
    "train/test_hidden_states.py", "decode/test_api.py", "audit/test_audit.py",
    "engine/test_kernel_bits.py", "parity/test_parallel_layers.py", "audit/test_agent.py",
    "train/test_processes.py", "trt/test_engine_bytes.py", "trt/test_ranks.py",
    "train/test_mtp.py", "run/test_eagle.py", "run/test_requests.py", "parity/test_new_family.py",
    "bench/test_edits.py",
)  # fmt: skip

# How the three kinds of published ReDrafter files name (input projection, head).
DRAFTER_NAMES = {"A": ("input_proj", "lm_head"), "B": ("input_projs", "lm_heads"), "C": ("", "0")}
UNK, BOS, EOS = "<unk>", "<s>", "</s>"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the choice of the two parts of the tests: `make test` and `make test-rest`."""
    parser.addoption(
        "--brief", action="store_const", dest="part", const="brief",
        help="leave out tests marked as thorough; of tables marked so, run a quarter of the cases",
    )  # fmt: skip
    parser.addoption(
        "--rest", action="store_const", dest="part", const="rest",
        help="run the tests alone that --brief leaves out",
    )  # fmt: skip


def choose_part(items: Sequence[pytest.Item], part: str) -> list[pytest.Item]:
    """Return the tests of a part: those that --brief runs, or the rest.

    Of a table that is marked as thorough, --brief runs the first case and about a quarter of the
    others, chosen by the golden ratio, which keeps step with no parameter inside of the table.
    """
    numbers, chosen = Counter[object](), list[pytest.Item]()
    for item in items:
        is_brief = True
        if item.get_closest_marker("thorough") is not None:
            table = item.path, getattr(item, "originalname", None)
            is_case = hasattr(item, "callspec")
            is_brief = is_case and numbers[table] * 0.618034 % 1 < 0.23
            numbers[table] += 1
        if is_brief == (part == "brief"):
            chosen.append(item)
    return chosen


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the part of the tests that is asked for, and put them in order.

    Long files come first, then those of many tests: little is left for the last worker alone.
    """
    if (part := config.getoption("part", None)) is not None:
        left_out = choose_part(items, "rest" if part == "brief" else "brief")
        config.hook.pytest_deselected(items=left_out)
        items[:] = choose_part(items, part)
    places = {ROOT / "tests" / name: place for place, name in enumerate(LONG_FILES)}
    assert all(file.is_file() for file in places), places
    num_tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (places.get(item.path, len(places)), -num_tests[item.path]))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let each process of pytest-xdist import the modules of tests from another one on.

    Byte code, with its rewritten assertions, is then made once for all: 7 s of a processor in a
    new clone.
    """
    own = getattr(session.config, "workerinput", {"workerid": "gw0", "workercount": 1})
    number, count = int(own["workerid"].removeprefix("gw")), own["workercount"]
    folders = [ROOT / name for name in session.config.args] if number else []
    files = sorted(file for folder in folders for file in folder.rglob("test_*.py"))
    first = len(files) * number // count
    for file in files[first:] + files[:first]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # collection tells of it
            importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """Let garbage be searched for in what tests make, not in all that was imported: 0.3 s each.

    And seldom, as what tests make is small.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture(scope="session", autouse=True)
def skip_fsync() -> Iterator[None]:
    """Do not wait 5 ms for the disk with each file; that files are synced is storage's test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def fork_ranks() -> Iterator[None]:
    """Let ranks begin with what this process has imported: a start takes 2 s of a processor."""
    from specdec.decode.ranks import processes
    from tests.forks import fork_follower

    with pytest.MonkeyPatch.context() as patch:
        starts = {**vars(subprocess), "Popen": fork_follower}
        patch.setattr(processes, "subprocess", SimpleNamespace(**starts))
        yield


@pytest.fixture(scope="session")
def lasting_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where fixtures of the session make their folders."""
    return tmp_path_factory.mktemp("lasting", numbered=False)


@pytest.fixture(scope="session", autouse=True)
def even_costs() -> Iterator[None]:
    """Let engines have a table of costs by which drafts pay, instead of measuring this machine."""
    from specdec.decode import engine
    from tests.costs import make_costs

    with pytest.MonkeyPatch.context() as patch:
        for name in ("find_costs", "find_kept_costs"):
            patch.setattr(engine, name, lambda *given: make_costs(len(given[3])))
        yield


@pytest.fixture(scope="module", autouse=True)
def free_machine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """End the ranks that a module's tests shared: to start some takes 3 s of a processor.

    Remove its folders too, unless a test failed: all together have 7 GB.
    """
    yield
    if ranks := sys.modules.get("specdec.decode.ranks.processes"):
        ranks.end_ranks()
    if not request.session.testsfailed:
        for folder in tmp_path_factory.getbasetemp().iterdir():
            if folder.name != "lasting":
                shutil.rmtree(folder, ignore_errors=True)  # links among them stay


def make_llama(
    parent: Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 128,
    intermediate: int = 112,
    head_dim: int | None = None,
    tied: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    name: str = "target",
    **config: Any,
) -> Path:
    """Write a random Llama as transformers saves it and return its folder, `parent / name`.

    The weights are scaled so that greedy text varies and the two best logits lie well apart; norms
    and biases are random too, so that a forgotten one shows.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        intermediate_size=intermediate,
        head_dim=head_dim,
        tie_word_embeddings=tied,
        # A copy: transformers 5 writes into the dictionaries that it is given.
        **copy.deepcopy({"max_position_embeddings": 512, **config}),
    )
    model = LlamaForCausalLM(settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if key.endswith("norm.weight"):
                weight.copy_(1 + 0.1 * noise)
            elif weight.dim() == 1:
                weight.copy_(0.3 * noise)
            elif "embed_tokens" in key:
                weight.copy_(noise)
            else:
                weight.copy_(noise * (2.0 / weight.shape[1] ** 0.5))
    folder = parent / name
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def save_folder(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any],
    file: str = "model.safetensors",
) -> Path:  # fmt: skip
    """Write a folder with a file of tensors and a config.json, and return it."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file(dict(tensors), folder / file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


@contextlib.contextmanager
def change_tensors(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of a folder's model.safetensors, which is written again with what they became."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    yield tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def save_random(
    folder: Path, shapes: dict[str, tuple[int, ...]], file: str, config: dict[str, Any], *,
    dtype: str, seed: int, scale: float,
) -> Path:  # fmt: skip
    """Write a folder of random tensors, scaled by the width of each, and return it."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for key, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[key] = (scale * noise / shape[-1] ** 0.5).to(getattr(torch, dtype))
    return save_folder(folder, tensors, config, file)


def make_drafter(
    parent: Path,
    *,
    hidden: int = 64,
    vocab: int = 128,
    exit_dim: int | None = None,
    layers: int = 2,
    rnn: bool = True,
    dtype: str = "float32",
    seed: int = 0,
    naming: str = "A",
    scale: float = 1.0,
    name: str = "drafter",
) -> Path:
    """Write a random ReDrafter drafter and return its folder, `parent / name`.

    Without `exit_dim` it is twice `hidden`, which needs no input projection; naming "C" knows none.
    """
    exit_dim = exit_dim or 2 * hidden
    projection, head = DRAFTER_NAMES[naming]
    shapes: dict[str, tuple[int, ...]] = {}
    if exit_dim != 2 * hidden:
        assert projection, "naming C has no input projection: leave exit_dim at 2 * hidden"
        shapes |= {
            f"{projection}.weight": (exit_dim, 2 * hidden),
            f"{projection}.bias": (exit_dim,),
        }
    for layer in range(layers):
        shapes |= {
            f"{head}.{layer}.linear.weight": (exit_dim, exit_dim),
            f"{head}.{layer}.linear.bias": (exit_dim,),
        }
    shapes[f"{head}.{layers}.weight"] = (vocab, exit_dim)
    if rnn:
        shapes |= {
            "rnn_u.weight": (hidden, hidden),
            "rnn_u.bias": (hidden,),
            "rnn_w.weight": (hidden, hidden),
        }
    config = {
        "architectures": ["DrafterModel"],
        "model_type": "recurrent_drafter",
        "hidden_size": hidden,
        "exit_dim": exit_dim,
        "num_draft_layers": layers,
        "rnn": rnn,
        "vocab_size": vocab,
        "torch_dtype": dtype,
    }
    return save_random(
        parent / name, shapes, "model.safetensors", config, dtype=dtype, seed=seed, scale=scale
    )


def make_medusa_heads(
    parent: Path,
    *,
    hidden: int = 64,
    vocab: int = 128,
    heads: int = 3,
    layers: int = 1,
    dtype: str = "float32",
    seed: int = 0,
    scale: float = 1.0,
    name: str = "heads",
) -> Path:
    """Write random Medusa heads as FasterDecoding publishes them; return `parent / name`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for layer in range(layers):
            shapes |= {
                f"{head}.{layer}.linear.weight": (hidden, hidden),
                f"{head}.{layer}.linear.bias": (hidden,),
            }
        shapes[f"{head}.{layers}.weight"] = (vocab, hidden)
    config = {
        "base_model_name_or_path": "target",
        "medusa_num_heads": heads,
        "medusa_num_layers": layers,
    }
    return save_random(
        parent / name, shapes, "medusa_lm_head.safetensors", config, dtype=dtype, seed=seed,
        scale=scale,
    )  # fmt: skip


def draw_drafter(
    shapes: Mapping[str, tuple[int, ...]], vocab: int, draft_vocab: int | None, *,
    dtype: str, seed: int, scale: float,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Random tensors, and those of a reduced vocabulary: every other token, then the rest."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for key, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[key] = 1 + 0.1 * noise if "norm" in key else noise
        if len(shape) > 1 and "embed" not in key:
            tensors[key] *= scale / shape[-1] ** 0.5
        tensors[key] = tensors[key].to(getattr(torch, dtype))
    if draft_vocab is not None:
        drafted = sorted([*range(0, vocab, 2), *range(1, vocab, 2)][:draft_vocab])
        tensors["d2t"] = torch.tensor(drafted) - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool)
        tensors["t2d"][drafted] = True
    return tensors


def make_eagle_drafter(
    parent: Path,
    *,
    version: int = 1,
    hidden: int = 64,
    vocab: int = 128,
    draft_vocab: int | None = None,
    layers: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 96,
    aux_layers: tuple[int, ...] = (0, 1),
    bias: bool = True,
    own_embedding: bool = True,
    mask_token_id: int | None = None,
    dtype: str = "float32",
    seed: int = 0,
    scale: float = 1.0,
    name: str = "eagle",
    **config: Any,
) -> Path:
    """Write a random EAGLE drafter and return `parent / name`.

    Version 1 as SafeAILab publishes it, 3 as ModelOpt exports it, with `aux_layers` the layers of
    the target whose outputs it reads. A reduced vocabulary has every other token, then the rest.
    mask_token_id: P-EAGLE's, as vLLM reads it.
    """
    head_dim = hidden // heads
    width = {1: 2 * hidden, 3: len(aux_layers) * hidden}[version]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, width)}
    for layer in range(layers):
        prefix = f"layers.{layer}."
        read = 2 * hidden if version == 3 and layer == 0 else hidden
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (hidden, read),
            f"{prefix}self_attn.k_proj.weight": (kv_heads * head_dim, read),
            f"{prefix}self_attn.v_proj.weight": (kv_heads * head_dim, read),
            f"{prefix}self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}mlp.gate_proj.weight": (intermediate, hidden),
            f"{prefix}mlp.up_proj.weight": (intermediate, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, intermediate),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
        }
        if version == 3 or layer:
            shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
    if version == 3:
        shapes |= {
            "layers.0.hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
            "lm_head.weight": (draft_vocab or vocab, hidden),
        }
        if config.get("norm_before_fc"):
            shapes["input_norm.weight"] = (width,)
        if config.get("fc_norm"):
            shapes |= {f"fc_norm.{part}.weight": (hidden,) for part in range(len(aux_layers))}
        if mask_token_id is not None:
            shapes["mask_hidden"] = (1, 1, width)
            config = {
                "parallel_drafting": True, "pard_token": mask_token_id,
                "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in aux_layers],
            } | config  # fmt: skip
    elif bias:
        shapes["fc.bias"] = (hidden,)
    if own_embedding:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    drafted = draft_vocab if version == 3 else None
    tensors = draw_drafter(shapes, vocab, drafted, dtype=dtype, seed=seed, scale=scale)
    if mask_token_id is not None:  # as large as what stands for
        tensors["mask_hidden"] *= width**0.5
    document: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "torch_dtype": dtype,
    }
    if version == 3:
        document |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": draft_vocab or vocab,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(aux_layers),
                "use_aux_hidden_state": True,
            },
        }
    return save_folder(parent / name, tensors, document | config)


def make_dflash_drafter(
    parent: Path,
    *,
    form: str = "z-lab",
    hidden: int = 64,
    vocab: int = 128,
    draft_vocab: int | None = None,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 96,
    target_layers: int = 3,
    aux_layers: tuple[int, ...] = (0, 1),
    block_size: int | None = 5,
    mask_token_id: int = 2,
    bias: bool = False,
    markov_rank: int | None = None,
    dtype: str = "float32",
    seed: int = 0,
    scale: float = 1.0,
    name: str = "dflash",
    net: Mapping[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Write a random DFlash drafter and return `parent / name`.

    form: as z-lab publishes it, or as `speculators` or `deepspec` do, with embedding and head of
    its own; a reduced vocabulary, which only speculators' have, has every other token, then the
    rest. markov_rank: of DSpark's Markov head, with a confidence head with it. net: fields of its
    layers, config: others.
    """
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(aux_layers) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(layers):
        prefix = f"layers.{layer}."
        rows = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
        for part, size in rows.items():
            shapes[f"{prefix}self_attn.{part}_proj.weight"] = (size, hidden)
            if bias:
                shapes[f"{prefix}self_attn.{part}_proj.bias"] = (size,)
        if bias:
            shapes[f"{prefix}self_attn.o_proj.bias"] = (hidden,)
        shapes |= {
            f"{prefix}self_attn.o_proj.weight": (hidden, heads * head_dim),
            f"{prefix}self_attn.q_norm.weight": (head_dim,),
            f"{prefix}self_attn.k_norm.weight": (head_dim,),
            f"{prefix}mlp.gate_proj.weight": (intermediate, hidden),
            f"{prefix}mlp.up_proj.weight": (intermediate, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, intermediate),
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
        }
    if form != "z-lab":
        shapes |= {
            "embed_tokens.weight": (vocab, hidden),
            "lm_head.weight": (draft_vocab or vocab, hidden),
        }
    markov: dict[str, Any] = {"enable_confidence_head": False}
    if markov_rank:
        shapes |= {
            "markov_head.markov_w1.weight": (vocab, markov_rank),
            "markov_head.markov_w2.weight": (draft_vocab or vocab, markov_rank),
            "confidence_head.proj.weight": (1, hidden + markov_rank),
            "confidence_head.proj.bias": (1,),
        }
        markov = {"markov_head_type": "vanilla", "enable_confidence_head": True,
                  "confidence_head_with_markov": True}  # fmt: skip
    if markov_rank is not None:
        markov["markov_rank"] = markov_rank
    tensors = draw_drafter(shapes, vocab, draft_vocab, dtype=dtype, seed=seed, scale=scale)
    fields: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "attention_bias": bias,
        **(net or {}),
    }
    if form == "speculators":
        document: dict[str, Any] = {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "speculators_version": "0.5.0",
            "transformer_layer_config": fields,
            "draft_vocab_size": draft_vocab or vocab,
            "block_size": block_size,
            "aux_hidden_state_layer_ids": [layer + 1 for layer in aux_layers],
            "mask_token_id": mask_token_id,
        }
        if markov_rank is not None:
            document |= markov | {
                "architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark",
                "sample_from_anchor": True,
            }  # fmt: skip
    elif form == "deepspec":
        document = fields | markov | {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": block_size,
            "mask_token_id": mask_token_id,
            "target_layer_ids": list(aux_layers),
            "num_target_layers": target_layers,
            "num_anchors": 512,
            "layer_types": fields.get("layer_types", ["full_attention"] * layers),
            "tie_word_embeddings": False,
            "torch_dtype": dtype,
        }  # fmt: skip
    else:
        document = fields | {
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "block_size": block_size,
            "num_target_layers": target_layers,
            "dflash_config": {
                "mask_token_id": mask_token_id, "target_layer_ids": list(aux_layers),
            },
            "torch_dtype": dtype,
        }  # fmt: skip
    return save_folder(parent / name, tensors, document | config)


def make_mtp_head(
    parent: Path, target: Path, *, form: str = "qwen", own: bool = False, seed: int = 0,
    name: str = "mtp",
) -> Path:  # fmt: skip
    """Write a random head for multi-token prediction and return `parent / name`.

    Its layer has the tensors of the target's last layer that attends to keys, in another order of
    rows. form: a name of FORMS. own: with an embedding and a head, as far as the form has them.
    """
    import re

    import torch
    from safetensors.torch import load_file

    from specdec.methods.mtp import FORMS

    config = json.loads((target / "config.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for file in target.glob("*.safetensors"):
        tensors |= load_file(file)
    generator = torch.Generator().manual_seed(seed)
    layers = [int(m[1]) for key in tensors if (m := re.search(r"layers\.(\d+)\.self_attn", key))]
    stem = next(key for key in tensors if key.endswith("norm.weight")).partition("layers.")[0]
    kind = FORMS[form]
    prefix = kind.prefix.format(layer=config["num_hidden_layers"])

    def draw(like: torch.Tensor) -> torch.Tensor:
        return like[torch.randperm(len(like), generator=generator)].contiguous()

    first = f"{stem}layers.{max(layers)}."
    head = {
        f"{prefix}{kind.layer}{key.removeprefix(first)}": draw(weight)
        for key, weight in tensors.items() if key.startswith(first)
    }  # fmt: skip
    hidden, norm = config["hidden_size"], tensors[f"{stem}norm.weight"]
    for module, theirs in kind.names.items():
        if module in ("vocab_embedding", "lm_head") and not own:
            continue
        like = {
            "fc": torch.randn(hidden, 2 * hidden, generator=generator) / hidden**0.5,
            "vocab_embedding": (embedding := tensors[f"{stem}embed_tokens.weight"]),
            "lm_head": tensors.get("lm_head.weight", embedding),
        }  # fmt: skip
        head[f"{prefix}{theirs}.weight"] = draw(like.get(module, norm)).to(norm.dtype)
    return save_folder(parent / name, head, config)


def make_tokenizer(folder: Path, *, vocab: int = 128, add_bos: bool = False) -> Path:
    """Write a byte-level tokenizer of exactly `vocab` tokens (100 or more) into `folder`.

    Ids 0, 1, 2 are <unk>, <s>, </s>; then printable ASCII, space, newline and tab; then made-up
    pairs of letters, so that every id has a text of its own. Other bytes become <unk>.
    """
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    # Byte-level BPE writes space, newline and tab as these three letters.
    singles = [UNK, BOS, EOS, *map(chr, range(33, 127)), "\u0120", "\u010a", "\u0109"]
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    pairs = list(
        itertools.islice(itertools.product(letters, letters), max(0, vocab - len(singles)))
    )
    tokens = singles + [a + b for a, b in pairs]
    assert len(tokens) == vocab, f"vocab={vocab} is not in {len(singles)}...{len(singles) + 26**2}"
    tokenizer = Tokenizer(
        BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs, unk_token=UNK)
    )
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    if add_bos:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, 1)]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=UNK, bos_token=BOS, eos_token=EOS
    ).save_pretrained(folder)
    return folder


def run_cli(
    *args: object,
    cwd: Path = ROOT,
    env: dict[str, str] | None = None,
    timeout: float = 1200,
    stdin: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `specdec ARGS...` as a user would and return its status, stdout and stderr."""
    return subprocess.run(
        [sys.executable, "-m", "specdec", *map(str, args)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": SEARCH_PATH, **(env or {})},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def read_error_lines(stderr: str) -> tuple[str, str]:
    """Return the fact and the hint that end a failed command's stderr."""
    error, hint = stderr.rstrip("\n").split("\n")[-2:]
    assert error.startswith("error: "), stderr
    assert hint.startswith("hint: "), stderr
    return error.removeprefix("error: "), hint.removeprefix("hint: ")
