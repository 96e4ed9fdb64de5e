"""Drafters in int8 and int4: they draft nearly as well, and the text stays the target's own."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdec.decode.engine import TorchEngine
from specdec.decode.requests import Request
from specdec.decode.sampling import SamplingParams
from specdec.engine.layout import DRAFTER_NAME, WEIGHTS_NAME, read_engine_config
from specdec.engine.weight_files import find_engine_problems
from specdec.errors import SpecDecError
from specdec.files.reading import read_json
from tests.conftest import (
    make_dflash_drafter,
    make_drafter,
    make_eagle_drafter,
    make_llama,
    make_medusa_heads,
    make_mtp_head,
)
from tests.engine.kernels import needs_compiler
from tests.engines import (
    build_plain,
    list_requests,
    run_cli_here,
    save_weights,
)
from tests.families import make_family_model
from tests.run.test_int8_engine import build, change_config, convert

PYCODE = Path(__file__).resolve().parents[2] / "examples/pycode"
METHODS = {"redrafter": "drafter", "medusa": "medusa", "eagle": "eagle", "dflash": "dflash"}
ALL = METHODS | {"mtp": "mtp"}  # pycode has no head for it
# Least draft tokens accepted, of those of the same drafter in bfloat16.
LEAST = {"int8": 0.98, "int4": 0.95}
NUM_PROMPTS, PROMPT, LIMIT = 4, 24, 24


def generate(folder: Path, *, samples: bool = False, speculate: bool = True) -> tuple[Any, int]:
    """Texts of pycode's prompts, and how many draft tokens were accepted."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(PYCODE / "target")
    lines = (PYCODE / "prompts.jsonl").read_text().splitlines()[:NUM_PROMPTS]
    requests = [
        Request(
            index=at, input_ids=tokenizer(json.loads(line)["prompt"])["input_ids"][:PROMPT],
            max_output_len=LIMIT, end_ids=frozenset(),
            sampling=SamplingParams(temperature=0.9 if samples else 0.0, seed=at),
        )
        for at, line in enumerate(lines)
    ]  # fmt: skip
    engine = TorchEngine(folder, device="cpu", speculate=speculate)
    results = engine.generate(requests)
    return [r.output_ids for r in results], sum(r.stats.num_accepted for r in results)


class Pycode:
    """Checkpoints of the target that ships with its drafters, and its own texts."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self.convert = functools.cache(self._convert)
        self.same = functools.cache(lambda method: build(self.convert(method), "same"))
        self.texts, self.sampled = (
            generate(self.same("medusa"), samples=samples, speculate=False)[0]
            for samples in (False, True)
        )

    def _convert(self, method: str) -> Path:
        flag, folder = f"--{METHODS[method]}-model-dir", self._parent / method
        folder.mkdir()
        return convert(PYCODE / "target", folder / "ckpt", flag, PYCODE / method)


@pytest.fixture(scope="module")
def pycode(tmp_path_factory: pytest.TempPathFactory) -> Pycode:
    return Pycode(tmp_path_factory.mktemp("pycode"))


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize(("method", "weights"), zip(METHODS, itertools.cycle(LEAST)))
def test_pycode_drafters_draft_nearly_as_well(method: str, weights: str, pycode: Pycode) -> None:
    """And what is sampled is what plain decoding samples by the same seed."""
    checkpoint, texts, sampled = pycode.convert(method), pycode.texts, pycode.sampled
    same = pycode.same(method)
    found, num_accepted = generate(same)
    assert found == texts != sampled
    assert num_accepted > NUM_PROMPTS * LIMIT / 4
    engine = build(checkpoint, weights, "--drafter-weights", weights)
    found, number = generate(engine)
    assert found == texts
    assert number >= LEAST[weights] * num_accepted
    assert generate(engine, samples=True)[0] == sampled
    size, whole = (
        sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
        for folder in (engine, same)
    )
    assert size < whole


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize(
    ("method", "weights"),
    [("redrafter", "int8"), ("dflash", "same")],
)
def test_a_shortened_vocabulary(
    method: str, weights: str, tmp_path: Path, pycode: Pycode
) -> None:  # fmt: skip
    """The tokens of the texts are all that is drafted with success; a few others do for some."""
    checkpoint, flags = pycode.convert(method), ("--drafter-weights", weights)
    whole = pycode.same(method) if weights == "same" else build(checkpoint, "all", *flags)
    texts, num_accepted = generate(whole)
    tokens = sorted({token for text in texts for token in text})
    spare = [token for token in range(300) if token not in tokens]
    listed = tmp_path / "list.json"
    listed.write_text(json.dumps([*tokens, *spare]))
    engine = build(
        checkpoint, "list", *flags, "--draft-vocab-file", listed, "--draft-vocab-size", 256
    )
    found, number = generate(engine)
    assert found == texts
    assert number >= 0.98 * num_accepted
    options = read_json(engine / "config.json")["torch_config"]
    assert options["draft_vocab_size"] == 256
    stored = load_file(build_plain(engine) / WEIGHTS_NAME)
    (offsets,) = (tensor for name, tensor in stored.items() if name.endswith("d2t"))
    assert (offsets + torch.arange(256)).tolist() == sorted([*tokens, *spare][:256])
    heads = [name for name in stored if name.endswith(".lm_head.weight")]
    assert heads
    assert all(len(stored[name]) == 256 for name in heads)
    data = tmp_path / "data.jsonl"
    prompts = [json.loads(line) for line in (PYCODE / "prompts.jsonl").read_text().splitlines()]
    data.write_text("".join(json.dumps({"text": row["prompt"]}) + "\n" for row in prompts))
    engine = build(
        checkpoint, "few", *flags, "--draft-vocab-file", data, "--draft-vocab-size", 128,
        "--tokenizer-dir", PYCODE / "target",
    )  # fmt: skip
    found, number = generate(engine)
    assert found == texts
    assert number > num_accepted / 2
    assert generate(engine, samples=True)[0] == pycode.sampled


def test_tokens_that_are_refused(tmp_path: Path) -> None:
    checkpoint = make_checkpoints(tmp_path, "medusa")
    tokens, texts = tmp_path / "tokens.json", tmp_path / "texts.txt"
    texts.write_text("some text\n")

    def refuse(words: str, listed: Any, *flags: object, path: Path = tokens) -> None:
        tokens.write_text(json.dumps(listed))
        with pytest.raises(SpecDecError, match=words):
            build(checkpoint, "engine", "--draft-vocab-file", path, *flags)

    refuse("makes 3 tokens of 128; the drafter needs 64 at least", [1, 2, 3])
    refuse("makes 63 tokens of 128", list(range(127)), "--draft-vocab-size", 63)
    refuse("makes 128 tokens of 128; the drafter needs 64 at least, and fewer", list(range(128)))
    refuse("1 tokens are outside the vocabulary of 128, the first is 128", [5, 128])
    refuse("lists 3 tokens, 2 of them different", [1, 2, 2])
    refuse("is not a JSON list of tokens", {"tokens": [1]})
    refuse("holds texts", [], path=texts)
    refuse("a tokenizer is needed", [], "--draft-vocab-size", 70, path=texts)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input_ids": [1, 2]}\n{"input_ids": [1, 128]}\n')
    refuse("holds what is no token below 128", [], "--draft-vocab-size", 70, path=rows)
    with pytest.raises(SpecDecError, match="--draft-vocab-size 70 without --draft-vocab-file"):
        build(checkpoint, "engine", "--draft-vocab-size", 70)
    tokens.write_text(json.dumps(list(range(70))))
    plain = convert(tmp_path / "target", tmp_path / "plain")
    with pytest.raises(SpecDecError, match="the checkpoint has no drafter"):
        build(plain, "engine", "--draft-vocab-file", tokens)
    engine = build(checkpoint, "good", "--draft-vocab-file", tokens, "--optimize", "none")
    for size in (69, 128, True, "70"):
        change_config(engine, partial(set_option, name="draft_vocab_size", value=size))
        with pytest.raises(SpecDecError, match="draft_vocab_size is|expected"):
            TorchEngine(engine, device="cpu")


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_shortened_vocabulary_without_kernels(method: str, tp_size: int, tmp_path: Path) -> None:
    """As it is stored for one rank and for two, and drafted from by torch's operators."""
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(list(range(127, 20, -1))))
    split = ("--tp-size", 2) if tp_size > 1 else ()
    checkpoint = make_checkpoints(tmp_path, method, "--dtype", "float32", *split)
    flags = ("--optimize", "none", "--draft-vocab-file", tokens)
    engine = build(checkpoint, "engine", *flags)
    stored = load_file(engine / (WEIGHTS_NAME if tp_size == 1 else DRAFTER_NAME))
    whole = load_file(
        build(checkpoint, "whole", *flags[:2]) / (WEIGHTS_NAME if tp_size == 1 else DRAFTER_NAME)
    )
    for name in stored:
        rows = slice(21, 128) if name.endswith(".lm_head.weight") else slice(None)
        if not name.endswith("d2t"):
            assert torch.equal(stored[name], whole[name][rows]), name
    assert not find_engine_problems(engine, read_engine_config(engine))
    if tp_size > 1:
        return
    requests = [Request(index=0, input_ids=[5, 17, 30], max_output_len=12, end_ids=frozenset())]
    texts = [
        TorchEngine(engine, device="cpu", speculate=speculate).generate(requests)[0].output_ids
        for speculate in (True, False)
    ]
    assert texts[0] == texts[1]


def make_checkpoints(parent: Path, method: str, *flags: object) -> Path:
    target = make_llama(parent, seed=5, intermediate=128)
    drafters = {
        "redrafter": lambda: make_drafter(parent, exit_dim=96, scale=3.0),
        "medusa": lambda: make_medusa_heads(parent, scale=3.0),
        "eagle": lambda: make_eagle_drafter(parent, scale=2.0),
        "dflash": lambda: make_dflash_drafter(
            parent, form="deepspec", markov_rank=64, target_layers=2, aux_layers=(0,), scale=2.0
        ),
        "mtp": lambda: make_mtp_head(parent, target),
    }  # fmt: skip
    folder = f"--{ALL[method]}-model-dir"
    return convert(target, parent / f"ckpt-{len(flags)}", folder, drafters[method](), *flags)


@pytest.mark.thorough
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("method", ALL)
def test_what_is_stored(method: str, weights: str, tmp_path: Path) -> None:
    """Matrices of the drafter are integers, the target is as before; so it is of two ranks."""
    flags = ("--drafter-weights", weights, "--optimize", "none")
    checkpoint = make_checkpoints(tmp_path, method)
    same = load_file(build(checkpoint, "same", "--optimize", "none") / WEIGHTS_NAME)
    engine = build(checkpoint, "engine", *flags)
    tensors = load_file(engine / WEIGHTS_NAME)
    own = {n for n in same if not n.startswith(("transformer.", "lm_head"))}
    matrices = {n for n in own if same[n].dim() == 2 and "embedding" not in n}
    assert {n for n, t in tensors.items() if t.dtype is torch.int8} == matrices
    for name in set(same) - matrices:
        assert torch.equal(tensors[name], same[name])
    for name in matrices:
        codes, weight = tensors[name], same[name].float()
        module = name.removesuffix(".weight")
        scales = tensors.get(f"{module}.per_channel_scale")
        if scales is not None:
            assert torch.equal(scales, weight.abs().amax(1) / 127)
            error = (codes.float() * scales[:, None] - weight).abs()
            assert (error <= scales[:, None] * 0.5001).all()
        else:
            assert weights == "int4"
            assert codes.shape == (len(weight) // 2, weight.shape[1])
            assert tensors[f"{module}.weights_scaling_factor"].shape[1] == weight.shape[1] // 32
        is_whole = weights == "int8" or len(weight) % 2 != 0 or weight.shape[1] % 64 != 0
        assert (scales is not None) == is_whole
    config, manifest = (read_json(engine / f"{n}.json") for n in ("config", "manifest"))
    assert config["torch_config"]["drafter_weights"] == weights
    assert config["torch_config"]["quantization"] is None
    assert manifest["settings"]["drafter_weights"] == weights
    split = make_checkpoints(tmp_path / "split", method, "--tp-size", 2)
    ranks = load_file(build(split, "split", *flags) / DRAFTER_NAME)
    assert ranks.keys() == tensors.keys() - {n for n in same if n not in own}
    assert all(torch.equal(ranks[name], tensors[name]) for name in ranks)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "weights", "tp_size"),
    [
        ("medusa", "int4", 1), ("dflash", "int4", 1), ("mtp", "int8", 1), ("redrafter", "int4", 2),
        ("eagle", "int8", 2),
    ],
)  # fmt: skip
def test_text_without_kernels(method: str, weights: str, tp_size: int, tmp_path: Path) -> None:
    """Torch's operators multiply with what the integers stand for."""
    split = ("--tp-size", 2) if tp_size > 1 else ()
    checkpoint = make_checkpoints(tmp_path, method, "--dtype", "float32", *split)
    engine = build(checkpoint, "engine", "--drafter-weights", weights, "--optimize", "none")
    requests = list_requests([[5, 17, 30], list(range(3, 17))], 12)
    drafted, plain = (
        [result.output_ids for result in loaded.generate(requests)]
        for loaded in (
            TorchEngine(engine, device="cpu", speculate=speculate) for speculate in (True, False)
        )
    )
    assert drafted == plain


@needs_compiler
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_experts_of_a_head_stay_as_they_are(weights: str, tmp_path: Path) -> None:
    """With what chooses them, as the kernels read it."""
    target = make_family_model(tmp_path, "qwen2_moe", intermediate=64)
    flags = "--mtp-model-dir", make_mtp_head(tmp_path, target)
    folder = build(
        convert(target, tmp_path / "ckpt", *flags), "engine", "--drafter-weights", weights
    )
    tensors = load_file(build_plain(folder) / WEIGHTS_NAME)
    rounded = {name for name, tensor in tensors.items() if tensor.dtype is torch.int8}
    assert rounded == {f"mtp.{name}.weight" for name in (
        "lm_head", "drafter.fc", *(f"drafter.layers.0.attention.{m}" for m in ("qkv", "dense"))
    )}  # fmt: skip
    request = Request(index=0, input_ids=[5, 9, 7], max_output_len=16, end_ids=frozenset())
    drafted, plain = (
        TorchEngine(folder, device="cpu", speculate=speculate).generate([request])[0]
        for speculate in (True, False)
    )
    assert drafted.output_ids == plain.output_ids
    assert drafted.stats.num_draft_tokens > 0


def test_what_is_lost_without_kernels_is_said(tmp_path: Path) -> None:
    checkpoint = make_checkpoints(tmp_path, "medusa")
    engine = build(checkpoint, "engine", "--drafter-weights", "int8", "--optimize", "none")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input_ids": [5, 6], "max_output_len": 4}\n')
    done = run_cli_here("run", "--engine-dir", engine, "--input-file", prompts, "--json")
    assert "int8: no native kernels run here: the drafter's weights are widened" in done.stderr
    stats = json.loads(done.stdout)["stats"]
    assert (stats["method"], stats["quantization"]) == ("suffix,medusa", None)


@pytest.mark.parametrize(
    ("quantization", "kind"), [("int8", "per_channel_scale"), ("int4", "weights_scaling_factor")]
)
def test_with_a_quantized_target(quantization: str, kind: str, tmp_path: Path) -> None:
    """Each has its own kind."""
    checkpoint = make_checkpoints(tmp_path, "medusa")
    flags = (
        "--quantization", quantization, "--drafter-weights", "int4", "--optimize", "none",
        *(("--group-size", 64) if quantization == "int4" else ()),
    )  # fmt: skip
    tensors = load_file(build(checkpoint, "engine", *flags) / WEIGHTS_NAME)
    kinds = {name.rpartition(".")[2] for name in tensors if name.startswith("transformer.layers")}
    assert kinds == {"weight", kind}
    assert "medusa_heads.0.medusa_layers.0.linear.weights_scaling_factor" in tensors
    assert "medusa_heads.0.lm_head.weights_scaling_factor" in tensors
    assert TorchEngine(tmp_path / "engine", device="cpu").method == "medusa"


def set_option(config: dict[str, Any], name: str, value: object) -> None:
    config["torch_config"][name] = value


def test_what_is_refused(tmp_path: Path) -> None:
    plain = convert(make_llama(tmp_path, seed=5), tmp_path / "plain")
    with pytest.raises(SpecDecError, match="--drafter-weights int8: the checkpoint has no drafter"):
        build(plain, "engine", "--drafter-weights", "int8")
    checkpoint = make_checkpoints(tmp_path / "medusa", "medusa")
    engine = build(checkpoint, "engine", "--drafter-weights", "int8", "--optimize", "none")
    name = "medusa_heads.0.lm_head.per_channel_scale"
    for value, words in ((None, "does not hold the engine"), ("int3", "drafter_weights is 'int3'")):
        other = shutil.copytree(engine, tmp_path / f"config-{value}")
        change_config(other, partial(set_option, name="drafter_weights", value=value))
        with pytest.raises(SpecDecError, match=words):
            TorchEngine(other, device="cpu")
    tensors = load_file(engine / WEIGHTS_NAME)
    tensors[name][3] = float("nan")
    save_weights(tensors, engine / WEIGHTS_NAME)
    with pytest.raises(SpecDecError, match=rf"{name}: 1 of \d+ scales .* row 3: nan"):
        TorchEngine(engine, device="cpu")
