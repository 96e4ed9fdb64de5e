"""MTP: drafts are those of transformers' modules, and a head that knows the text is accepted."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.decode.accept import Candidates
from specdec.decode.drafters.mtp import MtpDrafter
from specdec.decode.drafters.paced import PacedDrafter
from specdec.decode.engine import TorchEngine, load_engine
from specdec.decode.loop import Options, generate
from specdec.decode.requests import Request
from specdec.decode.sampling import SamplingParams
from specdec.errors import SpecDecError, UsageError
from specdec.methods.mtp import FORMS, MtpOptions
from specdec.run.settings import RunSettings
from tests.conftest import make_llama, make_mtp_head
from tests.convert.checkpoints import set_config
from tests.convert.quantized import CASES
from tests.engines import (
    call,
    continue_greedily,
    list_requests,
    make_knowing_drafter,
    make_tree_engine,
    run_cli_here,
)
from tests.families import make_family_model, make_hybrid
from tests.run.drafting import PROMPTS, make_requests

LIMIT = 16


class Reference:
    """transformers' MtpModel with a head's weights, applied again and again.

    The first pair of a text has no embedding where `is_reversed`, as vLLM has it for MiMo.
    """

    def __init__(self, target: Path, head: Path, form: str) -> None:
        from transformers import AutoModelForCausalLM

        modeling = pytest.importorskip("transformers.modeling_layers")
        if not hasattr(modeling, "MtpModel"):
            pytest.skip("this transformers has no MtpModel")
        self.main = AutoModelForCausalLM.from_pretrained(target).eval()
        config = self.main.config
        config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
        self.net = modeling.MtpModel(self.main, 1).eval()
        kind = FORMS[form]
        start = kind.prefix.format(layer=config.num_hidden_layers)
        theirs = ("eh_proj", "enorm", "hnorm", "post_norm")
        names = {f"{own}.weight": f"layers.0.{to}.weight"
                 for own, to in zip(kind.names.values(), theirs, strict=False)}  # fmt: skip
        tensors, found = load_file(head / "model.safetensors"), {}
        for key, weight in tensors.items():
            own = key.removeprefix(start)
            if kind.is_reversed and own == f"{kind.names['fc']}.weight":
                weight = weight.roll(weight.shape[1] // 2, 1)
            inner = f"layers.0.mtp_block.{own.removeprefix(kind.layer)}"
            found[names.get(own, inner)] = weight
        experts = "layers.0.mtp_block.mlp.experts."
        if f"{experts}0.gate_proj.weight" in found:  # transformers has all of a layer in one tensor
            num = len([key for key in found if key.startswith(experts)]) // 3
            rows = {part: [found.pop(f"{experts}{at}.{part}_proj.weight") for at in range(num)]
                    for part in ("gate", "up", "down")}  # fmt: skip
            pairs = zip(rows["gate"], rows["up"], strict=True)
            found[f"{experts}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
            found[f"{experts}down_proj"] = torch.stack(rows["down"])
        if not hasattr(self.net, "forward_layer"):
            pytest.skip("this release of transformers cannot call one layer of its head")
        missing, unexpected = self.net.load_state_dict(found, strict=False)
        shared = ("embed_tokens.weight", "shared_head.weight")
        assert set(missing) <= set(shared)
        assert {name.rpartition("mtp_block.")[2] for name in unexpected} <= {
            "embed_tokens.weight", "shared_head.head.weight"}  # fmt: skip
        self.embedding = self.head = None
        for key, weight in tensors.items():
            if key.endswith("embed_tokens.weight"):
                self.embedding = weight
            if key.endswith("shared_head.head.weight"):
                self.head = weight
        self.blanks = kind.is_reversed

    @torch.no_grad()
    def draft(self, text: Sequence[int], size: int) -> list[int]:
        """What follows a text, whose last token the target's states do not reach."""
        ids = torch.tensor([list(text)])
        states = self.main.get_decoder()(ids[:, :-1]).last_hidden_state
        drafted: list[int] = []
        table = self.net.embed_tokens.weight if self.embedding is None else self.embedding
        for _ in range(size):
            embedded = torch.nn.functional.embedding(ids[:, 1:], table)
            if self.blanks:
                embedded[:, 0] = 0
            places = torch.arange(1, ids.shape[1])[None]
            out = self.net.forward_layer(0, states, places, None, inputs_embeds=embedded)
            head = self.net.shared_head.weight if self.head is None else self.head
            drafted.append(int((out[0, -1] @ head.T).argmax()))
            states = torch.cat((states, out[:, -1:]), dim=1)
            ids = torch.cat((ids, torch.tensor([[drafted[-1]]])), dim=1)
        return drafted


def join_as_mimo(target: Path, head: Path) -> None:
    """Write what MiMo 7B is published as, in small: a Qwen2 and its head, in one folder."""
    tensors = load_file(target / "model.safetensors") | load_file(head / "model.safetensors")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text()) | {
        "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1,
        "attention_bias": True, "head_dim": 8,
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(config))


TARGETS: dict[str, Any] = {
    "hybrid": make_hybrid,
    "llama": lambda parent: make_llama(parent, seed=3),
    "qwen3": lambda parent: make_family_model(parent, "qwen3", vocab=128),
    "qwen2": lambda parent: make_family_model(parent, "qwen2", vocab=128),
    "gemma2": lambda parent: make_family_model(parent, "gemma2", vocab=128),
    "hybrid mixture": lambda parent: make_family_model(
        parent, "qwen3_5_moe", vocab=128, layers=4, heads=4, head_dim=16),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "form", "own", "optimize"),
    [
        ("hybrid", "qwen", False, "auto"), ("hybrid", "qwen", True, "none"),
        ("hybrid mixture", "qwen", False, "auto"), ("llama", "glm", True, "auto"),
        ("gemma2", "glm", False, "auto"), ("qwen3", "qwen", False, "none"),
        ("qwen2", "mimo", False, "auto"),
    ],
)  # fmt: skip
def test_drafts_are_those_of_transformers(
    kind: str, form: str, own: bool, optimize: str, tmp_path: Path
) -> None:
    """In a batch, in every step, so that true states have taken the place of drafted ones."""
    target = TARGETS[kind](tmp_path)
    head = make_mtp_head(tmp_path, target, form=form, own=own)
    reference = Reference(target, head, form)
    folder = make_tree_engine("mtp", tmp_path, target, head, optimize=optimize)
    compare_drafts(folder, reference, every=1 if kind == "hybrid" else 3)


@pytest.mark.thorough
def test_mimo_drafts_by_its_own_head(tmp_path: Path) -> None:
    target = make_family_model(tmp_path, "qwen2", vocab=128)
    head = make_mtp_head(tmp_path, target, form="mimo")
    reference = Reference(target, head, "mimo")
    join_as_mimo(target, head)
    compare_drafts(make_tree_engine("mtp", tmp_path, target, target), reference)


def compare_drafts(folder: Path, reference: Reference, every: int = 1) -> None:
    """Those of every step of a batch, of whose texts so many are looked at."""
    engine = TorchEngine(folder, device="cpu")
    drafter = engine.drafter
    assert isinstance(drafter, MtpDrafter)
    seen: list[tuple[list[int], list[int]]] = []
    propose = drafter.propose

    def watch(requests: Any) -> list[Candidates]:
        found = propose(requests)
        for request, own in zip(requests, found, strict=True):
            text = [*request.request.input_ids, *request.output_ids]
            seen.append((text, own.tree.tokens[1:].tolist()))
            assert own.tree.parents.tolist() == [*range(-1, 8)], "a chain"
        return found

    drafter.propose = watch  # type: ignore[method-assign]
    results = engine.generate(list_requests(PROMPTS, LIMIT))
    expected = continue_greedily(reference.main, PROMPTS, LIMIT)
    assert [r.output_ids for r in results] == expected
    assert len(seen) > 3 * LIMIT / 2
    for text, drafted in seen[::every]:
        assert drafted == reference.draft(text, 8), text


@pytest.mark.parametrize("kind", ["mtp-embedding", "mtp-feature"])
def test_a_head_that_knows_the_text_is_accepted_to_its_depth(kind: str, tmp_path: Path) -> None:
    """One place off in the pairing of tokens and states, and nothing would be accepted."""
    head = make_knowing_drafter(tmp_path, kind)
    folder = make_tree_engine("mtp", tmp_path, tmp_path / "counter", head)
    engine = TorchEngine(folder, device="cpu")
    assert isinstance(engine.drafter, MtpDrafter)
    net, prompts = engine.drafter.net, ([4], [30, 2])
    for depth in (8, 3, 1):
        engine.drafter = MtpDrafter(net, engine.decoder, MtpOptions(num_tokens=depth))
        for prompt, result in zip(
            prompts, engine.generate(make_requests(prompts, 30)), strict=True
        ):
            assert result.output_ids == [(prompt[-1] + 1 + n) % 32 for n in range(30)]
            assert result.stats.num_verify_steps == -(-29 // (depth + 1))


def test_a_hostile_head_costs_steps_only(tmp_path: Path) -> None:
    head = make_knowing_drafter(tmp_path, "mtp-feature", step=5)
    folder = make_tree_engine("mtp", tmp_path, tmp_path / "counter", head)
    for result in TorchEngine(folder, device="cpu").generate(make_requests([[4], [30, 2]], 9)):
        assert result.stats.num_accepted == 0
        assert result.output_ids[0] == result.request.input_ids[-1] + 1


def test_convert_keeps_the_head_that_a_model_is_published_with(tmp_path: Path) -> None:
    """Beside its target, in one folder: with the flag it is kept, without it is left out."""
    target = make_hybrid(tmp_path)
    head = make_mtp_head(tmp_path, target)
    expected = make_tree_engine("mtp", tmp_path / "apart", target, head)
    tensors = load_file(target / "model.safetensors") | load_file(head / "model.safetensors")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    found = make_tree_engine("mtp", tmp_path / "one", target, target)
    for name in ("checkpoint/rank0.safetensors", "engine/weights.safetensors"):
        assert (found.parent / name).stat().st_size == (expected.parent / name).stat().st_size
    both = [
        load_file(folder.parent / "checkpoint/rank0.safetensors") for folder in (found, expected)
    ]
    assert all(torch.equal(both[0][name], weight) for name, weight in both[1].items())
    own = ("--speculative-decoding-mode", "mtp", "--mtp-max-draft-len", 8)
    done = run_cli_here("convert", "--model-dir", target, "--output-dir", tmp_path / "own", *own)
    assert f"{target}: it holds a head that drafts, of 15 tensors" in done.stderr
    itself = (tmp_path / "own/rank0.safetensors").read_bytes()
    assert itself == (found.parent / "checkpoint/rank0.safetensors").read_bytes()
    done = run_cli_here("convert", "--model-dir", target, "--output-dir", tmp_path / "plain")
    assert done.returncode == 0
    assert "give --speculative-decoding-mode mtp to have it" in done.stderr
    plain = load_file(tmp_path / "plain/rank0.safetensors")
    assert plain.keys() == {name for name in both[0] if not name.startswith("mtp.")}


@pytest.mark.parametrize("name", ["fp8-block", "gptq-whole-rows"])
def test_a_quantized_head_of_a_quantized_model(name: str, tmp_path: Path) -> None:
    """As Qwen's FP8 folders have it: the weights of both are those that the numbers stand for."""
    case = CASES[name]
    target = make_hybrid(tmp_path, dtype=case.dtype)
    tensors = load_file(target / "model.safetensors")
    tensors |= load_file(make_mtp_head(tmp_path, target) / "model.safetensors")
    stored, generator = {}, torch.Generator().manual_seed(0)
    for key, weight in list(tensors.items()):
        stem = key.removesuffix("_proj.weight")
        if stem == key:
            stored[key] = weight
            continue
        packed, restored = case.pack(weight, generator)
        stored |= {f"{stem}_proj.{kind}": tensor for kind, tensor in packed.items()}
        tensors[key] = restored.to(weight.dtype)
    own = ("--model-dir", target, "--speculative-decoding-mode", "mtp", "--output-dir")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    call("convert", *own, tmp_path / "plain")
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    set_config(target, quantization_config=dict(case.section))
    call("convert", *own, tmp_path / "quantized", "--dequantize")
    files = [tmp_path / name / "rank0.safetensors" for name in ("plain", "quantized")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_target_without_a_head_of_its_own(tmp_path: Path) -> None:
    target, flags = make_llama(tmp_path), ("--speculative-decoding-mode", "mtp")
    run = functools.partial(run_cli_here, "convert", "--output-dir", tmp_path / "out")
    done = run("--model-dir", target, *flags)
    assert done.returncode == 1
    assert f"{target} holds no head for multi-token prediction, which has one of mtp" in done.stderr
    assert "give its folder as --mtp-model-dir" in done.stderr
    done = run("--model-dir", target, "--medusa-model-dir", target, *flags)
    assert done.returncode == 2
    assert "--medusa-model-dir and --speculative-decoding-mode mtp, which takes" in done.stderr
    done = run("--model-dir", target, "--speculative-decoding-mode", "medusa")
    assert done.returncode == 2
    assert "a drafter with weights is given by its folder" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        ({"mtp.layers.1.mlp.up_proj.weight": (4, 4)}, "a head of more than one layer: mtp.lay"),
        ({"mtp.fc.weight": (64, 64)}, "mtp.fc.weight has shape [64, 64], not [64, 128]"),
        ({"mtp.norm.weight": None}, "mtp.norm.weight"),
        ({"mtp.layers.0.mlp.down_proj.weight": None}, "mtp.layers.0.mlp.down_proj.weight"),
        ({"mtp.fc.weight": None}, "holds no head for multi-token prediction, which has one of mtp"),
        ({"mtp.layers.0.self_attn.q_norm.weight": (16,)}, "q_norm.weight"),
    ],
)  # fmt: skip
def test_a_head_that_does_not_fit(
    edit: dict[str, tuple[int, ...] | None], told: str, tmp_path: Path
) -> None:
    target = make_llama(tmp_path)
    head = make_mtp_head(tmp_path, target)
    tensors = load_file(head / "model.safetensors")
    for name, shape in edit.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = torch.ones(shape)
    save_file(tensors, head / "model.safetensors", metadata={"format": "pt"})
    done = run_cli_here(
        "convert", "--model-dir", target, "--mtp-model-dir", head, "--output-dir", tmp_path / "out"
    )
    assert done.returncode == 1
    assert told in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "facts",
    [
        {"rope_theta": 5e5, "rope_parameters": "ABSENT"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": "ABSENT"},
    ],
)
def test_a_head_of_another_rotary_embedding_is_refused(
    facts: dict[str, Any], tmp_path: Path
) -> None:
    """It would draft by the target's, and worse than it was trained to."""
    target = make_llama(tmp_path)
    head = set_config(make_mtp_head(tmp_path, target), **facts)
    done = run_cli_here(
        "convert", "--model-dir", target, "--mtp-model-dir", head, "--output-dir", tmp_path / "out"
    )
    assert done.returncode == 1
    assert "the head's rope_theta is 500000, the target's 10000, by which" in done.stderr


def test_a_target_without_such_layers_is_refused(tmp_path: Path) -> None:
    target = make_family_model(tmp_path, "phi", heads=4)
    head = make_mtp_head(tmp_path, make_llama(tmp_path, name="other"))
    done = run_cli_here(
        "convert", "--model-dir", target, "--mtp-model-dir", head, "--output-dir", tmp_path / "out"
    )
    assert done.returncode == 1
    assert "no head for multi-token prediction is known for it" in done.stderr


def test_how_many_tokens_are_drafted(tmp_path: Path) -> None:
    folder = make_tree_engine(
        "mtp", tmp_path, target := make_llama(tmp_path), make_mtp_head(tmp_path, target),
        flags=("--mtp-max-draft-len", 5),
    )  # fmt: skip

    def load(**options: Any) -> TorchEngine:
        return load_engine(RunSettings(engine_dir=folder, device="cpu", **options), None)

    fixed = load(mtp_num_draft_tokens="3", draft_budget="fixed").drafter
    assert isinstance(fixed, MtpDrafter)
    assert (fixed.max_draft_tokens, fixed.max_draft_depth) == (3, 3)
    lone = {"draft_chain": "mtp"}
    for given in ({"mtp_num_draft_tokens": "auto"}, {"mtp_num_draft_tokens": "5"}, lone):
        paced = load(**given).drafter
        assert isinstance(paced, PacedDrafter)
        assert paced.max_draft_tokens == 5
    with pytest.raises(SpecDecError, match="is 6, the engine's max_draft_len is 5") as caught:
        load(mtp_num_draft_tokens="6")
    assert caught.value.hint == "give at most 5, or convert with a larger --mtp-max-draft-len"
    for wrong in ("0", "two", "-1"):
        with pytest.raises(UsageError, match=f"--mtp-num-draft-tokens is '{wrong}'"):
            load(mtp_num_draft_tokens=wrong)
    with pytest.raises(UsageError, match="fixed and --mtp-num-draft-tokens auto are both given"):
        load(mtp_num_draft_tokens="auto", draft_budget="fixed")


@pytest.mark.thorough
@pytest.mark.parametrize("reuse", [False, True])
def test_rows_come_and_go(tmp_path: Path, reuse: bool) -> None:
    """More requests than rows, shared prefixes, prompts in pieces; some sampled, on a hybrid."""
    target = make_hybrid(tmp_path)
    folder = make_tree_engine("mtp", tmp_path, target, make_mtp_head(tmp_path, target))
    engine = TorchEngine(folder, device="cpu")
    generator = torch.Generator().manual_seed(7)
    text = torch.randint(3, 128, (60,), generator=generator).tolist()
    requests = [
        Request(
            index=at, input_ids=[*text[: 8 * at + 1], at + 3], max_output_len=LIMIT - at,
            end_ids=frozenset([17] if at % 3 == 0 else []),
            sampling=SamplingParams(seed=at, temperature=0.8 if at % 3 == 2 else 0.0),
        )
        for at in range(7)
    ]  # fmt: skip
    plain = TorchEngine(folder, device="cpu", speculate=False)
    expected = [result.output_ids for result in plain.generate(requests)]
    for chunk in (None, 5):
        options = Options(
            max_batch_size=3, max_num_tokens=16, prompt_chunk=chunk, reuse_blocks=reuse
        )
        found = generate(engine.decoder, engine.drafter, [*requests, *requests], options)
        assert [result.output_ids for result in found] == expected * 2
