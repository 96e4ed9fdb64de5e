"""Every trainable method through the command: data to drafter to engine, resuming, measuring."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.errors import SpecDecError
from specdec.files.acceptance import read_acceptance
from specdec.files.tensor_file import TensorFile
from specdec.train import acceptance, hub, loop
from specdec.train.acceptance import choose_prompts
from specdec.train.methods.eagle import choose_layers, describe_layers
from specdec.train.pipeline import fill_defaults
from specdec.train.rows import TokenRows, prepare_rows
from specdec.train.settings import TRAINABLE, TrainSettings
from specdec.train.target import load_config, load_target, make_batch
from tests.engines import call, call_here
from tests.parity.models import make_model
from tests.train.conftest import Finished

BASIC = (
    "--dtype", "float32", "--model-max-length", 32, "--batch-size", 2, "--seed", 3,
    "--learning-rate", 0.01, "--eval-output-len", 16,
)  # fmt: skip
OWN_SIZE = 64  # of an MLP; the target's is 48
KINDS = {
    "redrafter": ("--method", "redrafter", "--redrafter-predict-n-tokens", 3),
    "medusa": ("--method", "medusa", "--medusa-num-heads", 3),
    "eagle": ("--method", "eagle"),
    "dflash": (
        "--method", "dflash", "--dflash-block-size", 4, "--dflash-intermediate-size", OWN_SIZE,
    ),
    "p-eagle": ("--method", "eagle", "--eagle-version", 3, "--eagle-parallel"),
    "dspark": ("--method", "dflash", "--dflash-block-size", 3, "--dflash-markov-rank", 8),
    "mtp": ("--method", "mtp"),
    "eagle-bare": ("--method", "eagle", "--no-eagle-bias"),
    "eagle3": ("--method", "eagle", "--eagle-version", 3),
    "eagle3-all": (
        "--method", "eagle", "--eagle-version", 3, "--eagle-intermediate-size", OWN_SIZE,
        "--eagle-draft-vocab-size", 50, "--eagle-fc-norm", "--eagle-norm-output",
        # The target is random: what it writes itself is guessed by chance, or not at all.
        "--eagle-start", "random",
    ),
}  # fmt: skip
# Those whose drafts are accepted here; of all others tests/e2e/test_recipes.py measures some steps.
MEASURED = {
    "medusa": "--medusa-model-dir",
    "eagle": "--eagle-model-dir",
    "dflash": "--dflash-model-dir",
    "dspark": "--dflash-model-dir",
    "mtp": "--mtp-model-dir",
    "eagle3-all": "--eagle-model-dir",
}


@pytest.fixture
def inputs(target_dir: Path, data_file: Path) -> tuple[object, ...]:
    return ("--model-dir", target_dir, "--data", data_file, *BASIC)


@pytest.fixture
def stages_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the measurement call its stages in this process; return the list of those called."""
    called: list[str] = []

    def call_stage(stage: str, arguments: Sequence[str]) -> dict[str, Any]:
        called.append(stage)
        return call_here(stage, arguments)

    monkeypatch.setattr(acceptance, "call_stage", call_stage)
    return called


def test_every_method_has_its_case_here() -> None:
    assert {flags[1] for flags in KINDS.values()} == set(TRAINABLE)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", MEASURED)
def test_every_evaluation_converts_builds_and_runs(
    kind: str, run_train: Any, inputs: Any, stages_here: list[str], target_dir: Path, tmp_path: Path
) -> None:
    """The same commands, called at every evaluation; what they measure is what a user measures."""
    heads = tmp_path / "heads"
    done = run_train(
        *inputs, *KINDS[kind], "--output-dir", heads, "--max-steps", 90,
        "--eval-steps", 60, "--self-distillation", 1, "--eval-prompts", 2, "--eval-output-len",
        20, "--json",
    )  # fmt: skip
    assert stages_here == ["convert", *2 * ["convert", "build", "run"]]
    log = [json.loads(line) for line in (heads / "training_log.jsonl").read_text().splitlines()]
    lengths = [line["eval"]["acceptance"]["acceptance_length"] for line in log if "eval" in line]
    assert len(lengths) == 2
    assert lengths[-1] > 1
    assert [p.name for p in tmp_path.iterdir()] == ["heads"]
    has_own_size = any("intermediate-size" in str(flag) for flag in KINDS[kind])
    config = json.loads((heads / "config.json").read_text())
    assert (config.get("intermediate_size") == OWN_SIZE) is has_own_size
    measured = json.loads(done.out)["eval"]["acceptance"]
    assert f"engine: acceptance length {lengths[-1]:.2f}" in done.err
    assert f"**{lengths[-1]:.2f}** tokens per verify step" in (heads / "README.md").read_text()

    checkpoint, engine = str(tmp_path / "checkpoint"), str(tmp_path / "engine")
    base = str(target_dir)
    call_here(
        "convert", ["--model-dir", base, MEASURED[kind], str(heads), "--output-dir", checkpoint]
    )
    call_here("build", ["--checkpoint-dir", checkpoint, "--output-dir", engine, "--optimize=none"])
    from transformers import AutoTokenizer

    _, heldout = prepare_rows(Path(inputs[3]), None, AutoTokenizer.from_pretrained(base), 32)
    prompts = choose_prompts(heldout, 2, 64 - 20)
    assert len(prompts) == measured["prompts"]
    requests = tmp_path / "requests.jsonl"
    requests.write_text("".join(json.dumps({"input_ids": p}) + "\n" for p in prompts))
    record = read_acceptance(heads)
    assert record is not None
    assert read_acceptance(Path(engine)) == record
    assert record.about["num_prompts"] == len(prompts)
    stats = call_here(
        "run",
        ["--engine-dir", engine, "--tokenizer-dir", base, "--input-file", str(requests),
         "--max-output-len", "20", "--draft-budget", "fixed"],
    )["stats"]  # fmt: skip
    for name in ("num_output_tokens", "num_verify_steps", "acceptance_length"):
        assert stats[name] == measured[name]


Train = Callable[..., Finished]


@pytest.fixture
def train(run_train: Any, inputs: Any, tmp_path: Path) -> Train:
    """Train a kind of drafter into a folder, "" for none, without measuring engines."""

    def run(kind: str, out: str, *flags: object, ends: int = 0) -> Finished:
        output = ("--output-dir", tmp_path / out) if out else ()
        done: Finished = run_train(
            *inputs, *KINDS[kind], *output, "--eval-prompts", 0, *flags, ends=ends
        )
        return done

    return run


@pytest.mark.parametrize("kind", ["redrafter", "medusa", "eagle", "eagle3-all", "dflash"])
def test_a_training_goes_on_from_a_written_drafter(kind: str, train: Train, tmp_path: Path) -> None:
    """By a step that is too small to change a weight; without the flag all of them differ."""
    first, still = tmp_path / "first", ("--max-steps", 1, "--learning-rate", 1e-30, "--seed", 4)
    train(kind, "first", "--max-steps", 1)
    train(kind, "again", *still, "--start-from", first)
    train(kind, "fresh", *still)
    (name,) = (path.name for path in first.glob("*.safetensors"))
    written, again, fresh = (
        (tmp_path / f / name).read_bytes() for f in ("first", "again", "fresh")
    )
    assert again == written != fresh
    assert "* went on from the drafter `first`\n" in (tmp_path / "again/README.md").read_text()
    refused = train(kind, "first", "--max-steps", 1, "--start-from", first, "--force", ends=1)
    assert f"{first} is or holds {first}, which it would replace" in refused.err


@pytest.mark.parametrize(
    ("kind", "more", "new"),
    [("eagle3", ["--eagle-parallel"], "mask_hidden"),
     ("dflash", ["--dflash-markov-rank", 4], "markov_head.")],
)  # fmt: skip
def test_a_training_goes_on_with_a_new_part(
    kind: str, more: list[object], new: str, train: Train, tmp_path: Path
) -> None:
    """P-EAGLE from an EAGLE-3, a Markov head for a DFlash; the other way is an error."""
    first, second = tmp_path / "first", tmp_path / "second"
    still = ("--max-steps", 1, "--learning-rate", 1e-30, "--start-from")
    train(kind, "first", "--max-steps", 1)
    done = train(kind, "second", *more, *still, first)
    old, grown = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert set(grown) - set(old) == {name for name in grown if name.startswith(new)} != set()
    assert all(torch.equal(grown[name], tensor) for name, tensor in old.items())
    assert done.err.count("begins anew") == len(grown) - len(old)
    back = train(kind, "third", *still, second, ends=1)
    assert f"--start-from: {new}" in back.err
    assert "of this training missing" in back.err


@pytest.mark.parametrize(
    ("kind", "first_flags", "flags", "fact"),
    [
        ("eagle3", ["--eagle-norm-output"], [], "norm_output in {} is True,"),
        ("eagle3", ["--eagle-parallel", "--eagle-mask-token-id", 7],
         ["--eagle-parallel", "--eagle-mask-token-id", 8],
         "mask_token_id in {} is 7, of this training 8"),
    ],
)  # fmt: skip
def test_a_drafter_of_other_facts_is_no_start(
    kind: str, first_flags: list[object], flags: list[object], fact: str, train: Train,
    tmp_path: Path,
) -> None:  # fmt: skip
    first, one = tmp_path / "first", ("--max-steps", 1)
    train(kind, "first", *one, *first_flags)
    other = train(kind, "out", *one, *flags, "--start-from", first, ends=1)
    assert f"--start-from: {fact.format(first / 'config.json')}" in other.err
    assert not (tmp_path / "out").exists()


def test_a_published_drafter_goes_on_with_its_own_layers(train: Train, tmp_path: Path) -> None:
    """In others' names, and with heads and a rotary embedding that are not the target's."""
    first, still = tmp_path / "first", ("--max-steps", 1, "--learning-rate", 1e-30)
    train("eagle3", "first", "--max-steps", 1)
    config = json.loads((first / "config.json").read_text())
    heads, size = config["num_attention_heads"], config["head_dim"]
    own = {
        "num_attention_heads": 2 * heads, "head_dim": size // 2, "rms_norm_eps": 1e-4,
        "num_key_value_heads": 2 * config["num_key_value_heads"], "rope_theta": 777.0,
    }  # fmt: skip
    (first / "config.json").write_text(json.dumps(config | own))
    written = load_file(first / "model.safetensors")
    published = {name.replace("layers.0.", "midlayer."): x for name, x in written.items()}
    save_file({**published, "t2d": torch.ones(320, dtype=torch.bool)}, first / "model.safetensors")
    done = train("eagle3", "again", *still, "--start-from", first)
    again = tmp_path / "again"
    assert json.loads((again / "config.json").read_text()) == config | own
    weights = load_file(again / "model.safetensors")
    assert weights.keys() == written.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in written.items())
    assert f"{first} keeps its own num_attention_heads {2 * heads} (the target" in done.err


def test_a_drafter_of_other_sizes_is_no_start(train: Train, tmp_path: Path) -> None:
    first, one = tmp_path / "first", ("--max-steps", 1)
    train("redrafter", "first", *one)
    more = ("--redrafter-num-layers", 1, "--redrafter-exit-dim", 24)
    other = train("redrafter", "out", *one, *more, "--start-from", first, ends=1)
    path = first / "model.safetensors"
    assert f"lm_head.0.linear.bias in {path} is [64], of this training [24]" in other.err
    assert f"lm_head.2.weight in {path} is [320, 64], of this training missing" in other.err
    assert "hint: give the method and sizes" in other.err
    nothing = train("redrafter", "out", *one, "--start-from", tmp_path / "none", ends=1)
    assert f"--start-from {tmp_path / 'none'} is no folder" in nothing.last_lines[0]
    assert list(tmp_path.iterdir()) == [first], "nothing that the next command stumbles over"


@pytest.mark.parametrize(
    ("kind", "dtype", "recipe"),
    [
        ("medusa", "float32", ()), ("eagle", "bfloat16", ()),
        ("eagle3-all", "float32", ("--optimizer", "muon", "--loss", "lk_hybrid",
                                   "--depth-weighting", "dpace", "--muon-learning-rate", 0.01)),
    ],
)  # fmt: skip
def test_an_interrupted_training_resumes_to_the_same_bytes(
    kind: str,
    dtype: str,
    recipe: tuple[object, ...],
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = (
        "--max-steps", 10, "--save-steps", 3, "--gradient-accumulation-steps", 2, "--dtype", dtype,
        *recipe,
    )  # fmt: skip
    train(kind, "whole", *options)
    take_step: Callable[..., Any] = loop.Loop.take_step

    def stop_at_eight(self: loop.Loop, step: int, *, measure: bool) -> Any:
        if step == 8:
            raise KeyboardInterrupt
        return take_step(self, step, measure=measure)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "take_step", stop_at_eight)
        stopped = train(kind, "cut", *options, ends=130)
    assert stopped.last_lines[0] == "error: interrupted"
    assert "--resume goes on with what is in" in stopped.last_lines[1]
    assert "resumed at step 6" in train(kind, "cut", *options, "--resume").err
    (name,) = (path.name for path in (tmp_path / "whole").glob("*.safetensors"))
    for file in (name, "config.json"):
        assert (tmp_path / "cut" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["redrafter", "p-eagle", "dspark"])
def test_sanity_passes_where_one_row_can_be_learned(
    kind: str, train: Train, tmp_path: Path
) -> None:
    report = json.loads(train(kind, "", "--sanity", "--json").out)
    assert report["sanity"] is True
    assert report["steps"] < 400
    assert all(row[0] >= 0.9 for row in report["eval"]["top_k_accuracy"])
    assert list(tmp_path.iterdir()) == []


def test_sanity_fails_where_nothing_is_learned(train: Train) -> None:
    done = train("medusa", "", "--sanity", "--learning-rate", 1e-9, "--max-steps", 40, ends=1)
    assert done.last_lines[0].startswith("error: --sanity: after 40 steps on one row of 32 tokens")
    assert done.last_lines[1].startswith("hint: raise --max-steps or --learning-rate")
    assert done.out == ""


def test_training_stops_at_the_acceptance_that_was_asked_for(
    train: Train, stages_here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [1.2, 1.5, 9.0]
    monkeypatch.setattr(
        acceptance.AcceptanceMeter, "measure", lambda self, weights: {
            "prompts": 1, "max_output_len": 4, "dtype": "float32", "num_output_tokens": 4,
            "num_verify_steps": 2, "acceptance_length": lengths.pop(0), "acceptance_rate": 0.5,
        },
    )  # fmt: skip
    done = train(
        "medusa", "out", "--eval-prompts", 1, "--max-steps", 20, "--eval-steps", 4,
        "--stop-at-acceptance", 1.5, "--json",
    )  # fmt: skip
    report = json.loads(done.out)
    assert report["steps"] == 8
    assert report["eval"]["acceptance"]["acceptance_length"] == 1.5
    assert "step 8 of 20: good enough" in done.err


def test_a_measurement_that_fails_loses_nothing(
    train: Train, stages_here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, weights: Any) -> None:
        raise SpecDecError("no memory is left", "buy some")

    with monkeypatch.context() as patch:
        patch.setattr(acceptance.AcceptanceMeter, "measure", fail)
        failed = train("medusa", "out", "--max-steps", 6, "--eval-prompts", 16, ends=1)
    assert failed.last_lines == ["error: no memory is left", "hint: buy some"]
    assert "resumed at step 6" in train("medusa", "out", "--max-steps", 6, "--resume").err


def test_what_cannot_be_measured_is_said_before_training(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(stage: str, arguments: Sequence[str]) -> None:
        assert "--dry-run" in arguments
        raise SpecDecError("there is no such converter", "use another model")

    monkeypatch.setattr(acceptance, "call_stage", refuse)
    options = ("--max-steps", 6, "--eval-prompts", 16)
    done = train("medusa", "out", *options, ends=1)
    assert done.last_lines == [
        "error: --eval-prompts 16: the acceptance could not be measured: there is no such"
        " converter",
        "hint: use another model; or train with --eval-prompts 0",
    ]
    assert "step 1/6" not in done.err
    too_long = train("medusa", "out", *options, "--force", "--eval-output-len", 64, ends=1)
    assert "no held-out row leaves a prompt beside the" in too_long.last_lines[0]


def test_medusa_and_eagle_write_the_published_layouts(
    train: Train, target_dir: Path, tmp_path: Path
) -> None:
    for kind in ("medusa", "eagle", "eagle3", "eagle-bare"):
        train(kind, kind, "--max-steps", 1)
    heads = load_file(tmp_path / "medusa" / "medusa_lm_head.safetensors")
    names = ("0.linear.weight", "0.linear.bias", "1.weight")
    assert set(heads) == {f"{head}.{name}" for head in range(3) for name in names}
    assert json.loads((tmp_path / "medusa" / "config.json").read_text()) == {
        "base_model_name_or_path": target_dir.name, "medusa_num_heads": 3,
        "medusa_num_layers": 1, "dtype": "float32",
    }  # fmt: skip
    layer = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    layer |= {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    layer |= {"post_attention_layernorm.weight"}
    first, bare, third = (
        load_file(tmp_path / kind / "model.safetensors")
        for kind in ("eagle", "eagle-bare", "eagle3")
    )
    assert set(first) == {
        "embed_tokens.weight", "fc.weight", "fc.bias", *(f"layers.0.{name}" for name in layer)
    }  # fmt: skip
    assert set(first) - set(bare) == {"fc.bias"}
    assert json.loads((tmp_path / "eagle-bare" / "config.json").read_text())["bias"] is False
    own = load_file(target_dir / "model.safetensors")
    torch.testing.assert_close(first["embed_tokens.weight"], own["model.embed_tokens.weight"])
    layer |= {"input_layernorm.weight", "hidden_norm.weight"}
    assert set(third) == {
        "fc.weight", "norm.weight", "lm_head.weight", *(f"layers.0.{name}" for name in layer)
    }  # fmt: skip
    assert third["layers.0.self_attn.q_proj.weight"].shape == (32, 64)
    config = json.loads((tmp_path / "eagle3" / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0]


def test_a_target_that_does_something_else_to_its_logits_is_refused(
    train: Train, tmp_path: Path, tokenizer: Any
) -> None:
    from transformers import CohereConfig, CohereForCausalLM

    folder = tmp_path / "scaled"
    config = CohereConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=48, max_position_embeddings=64, logit_scale=0.05,
    )  # fmt: skip
    CohereForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    done = train("medusa", "out", "--model-dir", folder, ends=1)
    assert "how it changes them is not known" in done.last_lines[0]


def test_drafters_read_the_table_that_engines_give_them(tmp_path: Path) -> None:
    """Gemma 3's embedding multiplies; its rows are read as they are."""
    target_dir = make_model(tmp_path / "target", "Gemma3ForCausalLM-windows")
    config = load_config(str(target_dir))
    device = torch.device("cpu")
    target = load_target(str(target_dir), config, "float32", device, with_head=True)
    batch = make_batch(make_rows([(5, True), (9, True), (70, True)]), [0], device)
    features = target.read(batch)
    table = target.embedding.weight
    assert isinstance(table, torch.Tensor)
    assert torch.equal(features.embedded[0], table[torch.tensor([5, 9, 70])])
    assert not torch.equal(target.embedding(batch.tokens), features.embedded)
    assert target.shape.embedding_scale == target.shape.hidden_size**0.5
    layers = describe_layers(target, 1)  # which rotate as the target's full layers
    scaling = layers.rotary_scaling or {}
    assert (layers.rotary_base, scaling["rope_type"], scaling["factor"]) == (2e4, "linear", 4.0)
    sizes = {"num_hidden_layers": 1, "head_size": "head_dim", "norm_epsilon": "rms_norm_eps"}
    same = ("hidden_size", "intermediate_size", "num_key_value_heads", "max_position_embeddings")
    for ours, theirs in sizes.items() | {(name, name) for name in same}:
        wanted = getattr(config, theirs) if isinstance(theirs, str) else theirs
        assert getattr(layers, ours) == wanted, ours


# Scaled embeddings and capped logits; a head with a bias; learned positions and no rotary fields;
# norms of queries and keys; experts.
PAIRS = [
    ("GemmaForCausalLM-tied", "redrafter"), ("PhiForCausalLM-gelu_new", "eagle"),
    ("GPT2LMHeadModel-gelu_new", "eagle3"), ("OPTForCausalLM-350m", "eagle"),
    ("Qwen3MoeForCausalLM-renormalized", "redrafter"), ("Gemma3ForCausalLM-windows", "eagle3"),
    ("Gemma2ForCausalLM-caps", "medusa"), ("GraniteForCausalLM-multipliers", "medusa"),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_other_families_train_convert_and_run(
    name: str, kind: str, train: Train, stages_here: list[str], tokenizer: Any, tmp_path: Path
) -> None:
    """Two steps, from hidden states on disk; the engine gives a drafter what training gave it."""
    target = make_model(tmp_path / "target", name, vocab_size=320)
    tokenizer.save_pretrained(target)
    done = train(
        kind, "out", "--model-dir", target, "--max-steps", 2, "--eval-steps", 2, "--eval-prompts",
        1, "--eval-output-len", 8, "--self-distillation", 0.5, "--hidden-states-dir",
        tmp_path / "states", "--json",
    )  # fmt: skip
    assert stages_here[-3:] == ["convert", "build", "run"]
    assert json.loads(done.out)["eval"]["acceptance"]["num_verify_steps"] > 0
    stored = TensorFile(tmp_path / "states" / "target.safetensors").read("embedding")
    checkpoint = tmp_path / "checkpoint"
    call("convert", "--model-dir", target, "--output-dir", checkpoint)
    ours = TensorFile(checkpoint / "rank0.safetensors").read("transformer.vocab_embedding.weight")
    # OPT's is a product, whose sums torch takes in an order of its own.
    assert np.allclose(stored, ours, rtol=0, atol=1e-6 if "350m" in name else 0)


def make_rows(*rows: list[tuple[int, bool]]) -> TokenRows:
    tokens = [token for row in rows for token, _ in row]
    mask = [labelled for row in rows for _, labelled in row]
    bounds = np.cumsum([0, *map(len, rows)])
    return TokenRows(np.array(tokens, np.int64), np.array(mask, bool), bounds)


def test_prompts_are_a_texts_beginning_and_a_conversations_question() -> None:
    text = [(token, True) for token in range(10, 20)]
    chat = [(1, False), (2, False), (3, False), (4, True), (5, True)]
    assert choose_prompts(make_rows(text, chat), 2, 50) == [[10, 11, 12, 13, 14], [1, 2, 3]]
    # What is too long, or there already, makes place for the next.
    assert choose_prompts(make_rows(chat, text), 2, 2) == [[10, 11]]
    assert choose_prompts(make_rows(chat, chat, chat), 3, 50) == [[1, 2, 3]]
    long_text = [(token, True) for token in range(1000)]
    assert choose_prompts(make_rows(long_text), 4, 500) == [list(range(128))]


def make_fake_hub(calls: list[tuple[str, dict[str, Any]]]) -> type:
    """A stand-in for `HfApi`, whose calls are checked against the real signatures."""
    import huggingface_hub

    real = huggingface_hub.HfApi

    def note(self: Any, name: str, arguments: dict[str, Any]) -> None:
        inspect.signature(getattr(real, name)).bind(self, **arguments)
        calls.append((name, arguments))

    class FakeHub:
        def __init__(self, token: str) -> None:
            assert token == "hf_secret"

        def create_repo(self, **arguments: Any) -> None:
            note(self, "create_repo", arguments)

        def upload_folder(self, **arguments: Any) -> str:
            note(self, "upload_folder", arguments)
            folder = Path(arguments["folder_path"])
            arguments["names"] = sorted(path.name for path in folder.iterdir())
            return "https://hub/me/heads/commit/1"

    return FakeHub


def test_a_drafter_is_uploaded_once_it_is_complete(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    calls: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(huggingface_hub, "HfApi", make_fake_hub(calls))
    out = tmp_path / "out"
    done = train("medusa", "out", "--max-steps", 1, "--push-to-hub", "me/heads", "--json")
    assert json.loads(done.out)["hub"] == "https://hub/me/heads/commit/1"
    (made, created), (sent, uploaded) = calls
    assert (made, created["repo_id"], created["private"]) == ("create_repo", "me/heads", True)
    assert (sent, uploaded["repo_id"]) == ("upload_folder", "me/heads")
    assert uploaded["folder_path"] == out
    assert "medusa_lm_head.safetensors" in uploaded["names"]
    assert uploaded["ignore_patterns"] == ["manifest.json"]
    everything = done.out + done.err + "".join(
        path.read_text(errors="replace") for path in out.iterdir()
    )  # fmt: skip
    assert "hf_secret" not in everything


def test_a_hub_that_refuses_is_told_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    class Refusing:
        def __init__(self, token: str) -> None:
            pass

        def create_repo(self, **_: Any) -> None:
            raise OSError("403 Forbidden")

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(huggingface_hub, "HfApi", Refusing)
    with pytest.raises(SpecDecError, match=re.escape("me/heads: it cannot be written to")) as info:
        hub.open_hub("me/heads")
    assert "hf_secret" not in info.value.message + info.value.hint


def test_a_kind_of_launch_that_is_not_known_is_refused(
    run_train: Any, inputs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import accelerate
    from accelerate.utils import DistributedType

    class Launched:
        distributed_type = DistributedType.XLA

        def __init__(self, **_: Any) -> None:
            pass

    monkeypatch.setattr(accelerate, "Accelerator", Launched)
    done = run_train(*inputs, "--output-dir", tmp_path / "out", ends=1)
    assert done.last_lines[0].startswith("error: accelerate found devices of the kind XLA")
    assert list(tmp_path.iterdir()) == []


def test_defaults_are_the_methods_own() -> None:
    eagle = fill_defaults(TrainSettings(method="eagle"))
    assert (eagle.learning_rate, eagle.self_distillation) == (1e-4, 1.0)
    medusa = fill_defaults(TrainSettings(method="medusa", self_distillation=0.5))
    assert (medusa.learning_rate, medusa.self_distillation) == (1e-3, 0.5)


@pytest.mark.parametrize(
    ("num_layers", "layers"), [(32, (1, 15, 28)), (8, (1, 3, 4)), (6, (0, 2, 4)), (2, (0,))]
)
def test_eagle3_reads_low_middle_and_high_layers(num_layers: int, layers: tuple[int, ...]) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(num_hidden_layers=num_layers)
    assert choose_layers(TrainSettings(method="eagle", eagle_version="3"), config) == layers
    assert choose_layers(TrainSettings(method="eagle"), config) == ()
