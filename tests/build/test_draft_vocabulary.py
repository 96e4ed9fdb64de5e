"""The tokens that a drafter may draft, and what a build records, alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from specdec.build.backends import embedded
from specdec.build.backends.torch_engine import plan_engine
from specdec.build.draft_vocabulary import choose_tokens, count_tokens, read_list
from specdec.build.settings import BuildSettings
from specdec.checkpoint.inventory import list_tensors
from specdec.errors import SpecDecError, UsageError
from specdec.files.reading import hash_file, read_json, write_json
from specdec.methods.medusa import MedusaParams
from tests.conftest import make_tokenizer
from tests.engine.models import make_model

MODEL = make_model(vocab_size=100)
HEADS = MedusaParams(max_draft_len=9, num_heads=2, num_layers=1)


def choose(path: Path | None, *, drafter: MedusaParams | None = HEADS, **settings: Any) -> Any:
    return choose_tokens(BuildSettings(draft_vocab_file=path, **settings), MODEL, drafter)


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_most_frequent_tokens_of_rows(tmp_path: Path) -> None:
    """Token n occurs 100 - n times, 90 and more never; of equals the first are taken."""
    rows = [{"input_ids": [token] * max(1, 100 - token)} for token in range(90)]
    path = write_rows(tmp_path / "rows.jsonl", *rows, {"input_ids": []})
    counts = count_tokens(path, None, 100)
    assert counts.tolist() == [*range(100, 10, -1), *[0] * 10]
    assert choose(path, draft_vocab_size=70).tolist() == [*range(70)]
    assert choose(path, draft_vocab_size=99).tolist() == [*range(90)], "no token that never occurs"
    equal = write_rows(tmp_path / "equal.jsonl", {"input_ids": [*range(99, 9, -1)]})
    tokens = choose(equal, draft_vocab_size=64)
    assert (tokens.tolist(), tokens.dtype) == ([*range(10, 74)], np.int64)


def test_a_list_is_taken_from_its_beginning_and_sorted(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    listed = [*range(99, 29, -1)]
    path.write_text(json.dumps(listed))
    assert read_list(path, 100) == listed
    assert choose(path).tolist() == listed[::-1]
    assert choose(path, draft_vocab_size=65).tolist() == [*range(35, 100)]
    assert choose(None) is None


def test_texts_are_counted_by_the_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = make_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = ["def main(): return 1", "return return"]
    expected = np.zeros(128, int)
    for text in texts:
        np.add.at(expected, tokenizer.encode(text, add_special_tokens=False).ids, 1)
    path = write_rows(tmp_path / "texts.jsonl", *({"text": text} for text in texts))
    assert count_tokens(path, str(folder), 128).tolist() == expected.tolist()
    plain = tmp_path / "texts.txt"
    plain.write_text("return return\n")  # a line of plain text has its end
    ids = tokenizer.encode("return return\n", add_special_tokens=False).ids
    assert count_tokens(plain, str(folder), 128).sum() == len(ids)


@pytest.mark.parametrize(
    ("name", "text", "settings", "fact", "hint"),
    [
        ("a.json", "{}", {}, "is not a JSON list of tokens", "write it as [11, 198, 257]"),
        ("a.json", "[1, true]", {}, "is not a JSON list of tokens", "write it as"),
        ("a.json", "[1, 100, -1]", {},
         "2 tokens are outside the vocabulary of 100, the first is 100", "list tokens of the"),
        ("a.json", "[1, 2, 1]", {}, "lists 3 tokens, 2 of them different", "list each once"),
        ("a.json", str([*range(63)]), {}, "makes 63 tokens of 100; the drafter needs 64 at least",
         "give more texts or another --draft-vocab-size"),
        ("a.json", str([*range(100)]), {}, "makes 100 tokens of 100", "give more texts"),
        ("a.jsonl", '{"input_ids": [1]}', {}, "holds texts", "add --draft-vocab-size, such as"),
        ("a.jsonl", '{"text": "a"}', {"draft_vocab_size": 70}, "holds text, and a tokenizer is",
         "add --tokenizer-dir, or give rows of input_ids"),
        ("a.jsonl", '{"input_ids": [1, 100]}', {"draft_vocab_size": 70},
         "line 1 cannot be used: input_ids holds what is no token below 100", "write JSON objects"),
        ("a.jsonl", '{"input_ids": [1]}\n{"input_ids": 5}', {"draft_vocab_size": 70},
         "line 2 cannot be used: input_ids is a int, not a list", "write JSON objects"),
        ("a.jsonl", '{"input_ids": {}}', {"draft_vocab_size": 70},
         "line 1 cannot be used: input_ids is a dict, not a list", "write JSON objects"),
        ("a.jsonl", "[1]", {"draft_vocab_size": 70}, "line 1 cannot be used: it is a list", ""),
    ],
)  # fmt: skip
def test_files_that_hold_no_vocabulary(
    name: str, text: str, settings: dict[str, Any], fact: str, hint: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecDecError) as caught:
        choose(tmp_path / name, **settings)
    assert fact in caught.value.message
    assert str(tmp_path / name) in caught.value.message
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(hint)


def test_options_without_what_they_are_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--draft-vocab-size 70 without --draft-vocab-file"):
        choose(None, draft_vocab_size=70)
    with pytest.raises(SpecDecError, match="--draft-vocab-file: the checkpoint has no drafter"):
        choose(tmp_path / "a.json", drafter=None)


# ---- What a build records.


def test_arguments_that_build_an_engine_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folders that are read from anywhere, and nothing of the one that is written."""
    monkeypatch.chdir(tmp_path)
    settings = BuildSettings(
        checkpoint_dir=Path("checkpoint"), output_dir=Path("engine"), force=True, json=True,
        max_batch_size=3, quantization="int8",
    )  # fmt: skip
    arguments = embedded.list_arguments(settings)
    assert f"--checkpoint-dir={tmp_path / 'checkpoint'}" in arguments
    assert {"--max-batch-size=3", "--quantization=int8"} <= set(arguments)
    names = {word.partition("=")[0] for word in arguments}
    assert not names & {"--output-dir", "--force", "--json"}


def write_checkpoint(folder: Path) -> None:
    model = make_model(hidden_size=32, num_hidden_layers=1, head_size=8, intermediate_size=64)
    generator = np.random.default_rng(0)
    arrays = {
        name: generator.normal(size=spec.shape).astype(np.float32)
        for name, spec in list_tensors(model, None).items()
    }
    folder.mkdir()
    save_file(arrays, folder / "rank0.safetensors")
    write_json(folder / "config.json", {
        "architecture": "LlamaForCausalLM", "dtype": "float32", "vocab_size": 128,
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_size": 8,
        "num_key_value_heads": 4, "intermediate_size": 64, "norm_epsilon": 1e-5,
        "max_position_embeddings": 2048, "hidden_act": "silu", "position_embedding_type":
        "rope_gpt_neox", "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
    })  # fmt: skip


def test_a_build_is_planned_then_written_with_its_sources(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    settings = BuildSettings(
        checkpoint_dir=tmp_path / "checkpoint", output_dir=tmp_path / "engine", optimize="none",
        max_seq_len=64,
    )  # fmt: skip
    dry = embedded.build_embedded(
        dataclasses.replace(settings, dry_run=True), "some backend", plan_engine
    )
    assert not (tmp_path / "engine").exists()
    report = embedded.build_embedded(settings, "some backend", plan_engine)
    assert {**report, "dry_run": True} == dry | {
        "native_kernels": False, "build_seconds": report["build_seconds"]
    }  # fmt: skip
    assert (report["method"], report["backend"]) == ("plain", "some backend")
    assert report["build_config"]["max_seq_len"] == 64
    manifest = read_json(tmp_path / "engine" / "manifest.json")
    (source,) = [s for s in manifest["sources"] if s["path"].endswith("rank0.safetensors")]
    assert source["sha256"] == hash_file(tmp_path / "checkpoint" / "rank0.safetensors")
    assert manifest["build_arguments"] == embedded.list_arguments(settings)
    config = read_json(tmp_path / "engine" / "config.json")
    # Other weights make another engine; a copy of these makes the same one.
    embedded.build_embedded(
        dataclasses.replace(settings, output_dir=tmp_path / "copy"), "some backend", plan_engine
    )
    copied = read_json(tmp_path / "copy" / "config.json")
    assert copied["torch_config"]["build_id"] == config["torch_config"]["build_id"]
    embedded.build_embedded(
        dataclasses.replace(settings, output_dir=tmp_path / "int8", quantization="int8"),
        "some backend", plan_engine,
    )  # fmt: skip
    other = read_json(tmp_path / "int8" / "config.json")
    assert other["torch_config"]["build_id"] != config["torch_config"]["build_id"]
