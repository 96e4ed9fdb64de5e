"""The reference of a verification and the comparison of readings, alone."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec.checkpoint.config import CheckpointConfig
from specdec.errors import SpecDecError
from specdec.model.quantization import Quantization
from specdec.text.prompts import Prompt
from specdec.verify import cli, readings, reference
from specdec.verify.greedy import Text
from specdec.verify.reference import Reference
from specdec.verify.report import CAUSES, describe_divergence
from tests.engine.models import make_model

SIZE = 7


class Counting(torch.nn.Module):
    """Prefers the sum of all tokens before, modulo seven; keeps that sum in the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        self.config, self.lengths = SimpleNamespace(), list[int]()

    def forward(
        self, input_ids: Any, use_cache: bool, past_key_values: Any = None, logits_to_keep: int = 0
    ) -> Any:
        self.lengths.append(input_ids.shape[1])
        sums = input_ids.cumsum(1)
        if past_key_values is not None:
            past_key_values.total = getattr(past_key_values, "total", 0) + sums[:, -1:]
            sums = past_key_values.total - sums[:, -1:] + sums
        logits = torch.nn.functional.one_hot(sums % SIZE, SIZE).to(self.weight.dtype)
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    import transformers

    monkeypatch.setattr(transformers, "DynamicCache", lambda config: SimpleNamespace())
    return Counting()


def test_a_text_is_continued_token_by_token(counting: Counting) -> None:
    """1 and 2 are 3; with that 6, then 12 - 7 = 5, and so on. Computed sums are kept."""
    opened = Reference(counting, torch.device("cpu"))
    assert opened.continue_greedily([1, 2], 4) == [3, 6, 5, 3]
    assert counting.lengths == [2, 1, 1, 1]
    assert opened.continue_greedily([1, 2], 3) == [3, 6, 5]
    assert len(counting.lengths) == 4
    assert opened.continue_greedily([1, 2], 5) == [3, 6, 5, 3, 6]
    assert not counting.weight.requires_grad
    opened.widen()
    assert counting.weight.dtype is torch.float32
    assert opened.continue_greedily([1, 2], 1) == [3]
    assert len(counting.lengths) == 10, "computed again, in float32"


def test_logits_are_those_by_which_each_token_is_chosen(counting: Counting) -> None:
    opened = Reference(counting, torch.device("cpu"))
    logits = opened.score([1, 2], [3, 5, 0])
    assert (logits.shape, logits.dtype) == ((3, SIZE), torch.float32)
    assert logits.argmax(1).tolist() == [3, 6, 11 % SIZE]
    assert opened.score_next([[1, 1], [4, 2]]).argmax(1).tolist() == [2, 6]


def make_engine(algorithm: str | None = None, **fields: Any) -> Any:
    checkpoint = CheckpointConfig(
        model=make_model(), method=None, drafter=None, raw={},
        quantization=Quantization(quant_algo=algorithm),
    )  # fmt: skip
    values = {"checkpoint": checkpoint, "kernels": {}, "quantization": None}
    return SimpleNamespace(**values | fields)


def test_an_engine_of_another_model() -> None:
    config = SimpleNamespace(**{name: getattr(make_model(), name) for name in reference.SIZES})
    reference.check_pair(make_engine(), Path("e"), config, "m")
    reference.check_pair(make_engine("GGUF"), Path("e"), SimpleNamespace(vocab_size=128), "m")
    config.vocab_size, config.hidden_size = 129, 257
    with pytest.raises(SpecDecError) as caught:
        reference.check_pair(make_engine(), Path("e"), config, "m")
    assert caught.value.message == (
        "e was not made from m: vocab_size is 128 and 129; hidden_size is 256 and 257"
    )
    with pytest.raises(SpecDecError, match=r"the weights of e are quantized \(FP8\)"):
        reference.check_pair(make_engine("FP8"), Path("e"), config, "m")


def test_whose_arithmetic_nobody_else_has() -> None:
    for engine, device, kind in (
        (make_engine(), "cpu", None), (make_engine(quantization="int8"), "cuda", "int8"),
        (make_engine("GGUF"), "cpu", "GGUF"), (make_engine("GGUF"), "cuda", None),
        (make_engine("GGUF", kernels=None), "cpu", None),
    ):  # fmt: skip
        assert reference.find_own_arithmetic(engine, device) == kind


def test_tokens_that_end_a_text(tmp_path: Path) -> None:
    config, tokenizer = SimpleNamespace(eos_token_id=3), SimpleNamespace(eos_token_id=4)
    assert reference.read_end_ids(str(tmp_path), config, tokenizer) == (set(), {3, 4})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert reference.read_end_ids(str(tmp_path), config, tokenizer) == ({5, 6}, {3, 4, 5, 6})
    assert reference.read_end_ids(str(tmp_path), config, None) == (set(), {3})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert reference.read_end_ids(str(tmp_path), SimpleNamespace(), tokenizer)[0] == {0}


# ---- Readings.


class Letters:
    """A tokenizer of characters: token n is character n, shifted; names are of special tokens."""

    all_special_tokens = ("<s>",)

    def __init__(self, shift: int = 0, only: str = "") -> None:
        self.shift, self.only = shift, only

    def read(self, text: str) -> list[int]:
        return [ord(c) + self.shift * (c in self.only if self.only else 1) for c in text]

    def __call__(self, text: str, **_: Any) -> Any:
        return {"input_ids": self.read(text)}

    def encode(self, text: str, **_: Any) -> Any:
        return SimpleNamespace(ids=self.read(text))

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(i - self.shift) for i in ids)


def make_text(ids: list[int], output_ids: list[int]) -> Text:
    return Text(run="batch", prompt=0, input_ids=ids, output_ids=output_ids, logits=torch.zeros(1))


def list_wrong(engine: Letters, text: Text, prompt: Prompt, **model: Any) -> list[str]:
    return readings.find_wrong_readings(Letters(**model), Letters(), engine, [prompt], [text])


def test_an_engine_that_reads_texts_differently() -> None:
    prompt, text = Prompt(text="ab"), make_text([97, 98], [99])
    assert list_wrong(Letters(), text, prompt) == []
    assert readings.find_wrong_readings(None, None, None, [prompt], [text]) == []
    (fact,) = list_wrong(Letters(), make_text([97, 99], [99]), prompt)
    assert fact == "prompt 0 is [97, 99] to the engine, [97, 98] to the model"
    facts = list_wrong(Letters(1), text, prompt)
    assert "to the engine" in facts[0]
    assert facts[1] == "tokens after prompt 0 are 'b' to the engine, 'c' to the model"
    assert len(facts) == 2
    # A prompt of tokens has no text; names of special tokens in a message are the engine's choice.
    assert list_wrong(Letters(), make_text([1], [99]), Prompt(token_ids=[97])) == []
    told = Prompt(messages=[{"role": "user", "content": "<s>"}])
    assert list_wrong(Letters(), make_text([1], [99]), told) == []


def test_the_tokenizer_that_the_model_has(tmp_path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, models

    backend = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = SimpleNamespace(
        added_tokens_decoder={3: AddedToken("<y>"), 2: AddedToken("<x>")}, bos_token=None,
        eos_token=None,
    )  # fmt: skip
    opened = readings.open_reference(str(tmp_path), tokenizer)
    assert opened.encode("<x>a<y>").ids == [2, 0, 3]
    assert readings.open_reference(str(tmp_path), None) is None
    (tmp_path / "tokenizer.json").unlink()
    assert readings.open_reference(str(tmp_path), tokenizer) is None


def test_each_cause_of_a_divergence_has_its_words() -> None:
    """The causes that the comparison tells are those that the report can word."""
    from specdec.verify import greedy

    source = Path(greedy.__file__).read_text(encoding="utf-8")
    divergence = {
        "prompt": 2, "run": "alone", "position": 4, "is_first": False, "engine_token": 7,
        "engine_text": "a", "model_token": 8, "model_text": None, "margin": 0.25, "bound": 0.125,
    }  # fmt: skip
    words = set()
    for cause, fact in CAUSES.items():
        assert f'"{cause}"' in source
        line = describe_divergence(divergence | {"cause": cause})
        assert line == (
            "prompt 2 alone, position 4 (after the first difference): the engine wrote 7 'a', the"
            f" model 8; margin 0.25, bound 0.125: {fact}"
        )
        words.add(line)
    assert len(words) == 3
    first = describe_divergence(divergence | {"cause": "logits", "run": "batch", "is_first": True})
    assert first.startswith("prompt 2, position 4: the engine wrote")


def test_a_checkpoint_s_report_in_words() -> None:
    contents = {"architecture": "LlamaForCausalLM", "method": "none", "dtype": "float32",
                "tp_size": 2, "pp_size": 1, "num_tensors": 21}  # fmt: skip
    report: dict[str, Any] = {
        "checkpoint_dir": "c", "verdict": "intact", "contents": contents, "files": 3,
        "manifest": {"bytes": 1234567, "tool": "specdec", "tool_version": "1", "unhashed": ["x"]},
        "sources": {"unchanged": [], "changed": ["config.json"]}, "problems": [],
    }  # fmt: skip
    assert cli.format_report(report).splitlines() == [
        "PASS: c: intact",
        "  LlamaForCausalLM (none), float32, tp_size 2, pp_size 1, 21 tensors",
        "  3 files, 1.2 MB, written by specdec 1",
        "  without a sha256 to compare: x",
        "  sources: 0 unchanged, 1 changed",
        "  changed since: config.json",
    ]
    bare = report | {"manifest": None, "contents": None, "problems": ["a is short"]}
    assert cli.format_report(bare).splitlines() == [
        "FAIL: c: intact",
        "  no manifest.json: names, shapes and types were checked, the weights could not be",
        "  problem: a is short",
    ]
