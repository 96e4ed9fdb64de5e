"""A tiny target with its tokenizer, a data file, and a way to run the command."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.train.rows import TokenRows
from tests.engines import reset_accelerator

PARAGRAPH = (
    "def add(first, second):\n    return first + second\n\n"
    "for number in range(10):\n    print(add(number, number))\n"
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclasses.dataclass
class Finished:
    """What a command left: exit status and the two streams."""

    status: int
    out: str
    err: str

    @property
    def last_lines(self) -> list[str]:
        return self.err.strip().splitlines()[-2:]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([PARAGRAPH], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>")


@pytest.fixture(scope="session")
def target_dir(lasting_dir: Path, tokenizer: Any) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
    )
    folder = lasting_dir / "train" / "target"
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def data_file(lasting_dir: Path) -> Path:
    path = lasting_dir / "train" / "data.jsonl"
    path.parent.mkdir(exist_ok=True)
    rows = [{"path": f"{i}.py", "text": PARAGRAPH.replace("10", str(i))} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(autouse=True, scope="session")
def use_one_thread() -> Iterator[None]:
    """On sizes like these, threads only wait for each other; on a busy machine, for long."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def run_here(words: Iterable[object], capsys: pytest.CaptureFixture[str], ends: int) -> Finished:
    """Run `specdec-train` in this process; `ends`: the status that it must end with."""
    from specdec.command.stages import run_command
    from specdec.train.cli import command

    with pytest.raises(SystemExit) as exit_info:
        run_command(command, [str(word) for word in words])
    captured = capsys.readouterr()
    done = Finished(int(exit_info.value.code or 0), captured.out, captured.err)
    assert done.status == ends, done.err
    return done


@pytest.fixture
def run_train(capsys: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    """Run `specdec-train` in this process, with an accelerator of its own."""

    def run(*args: object, ends: int = 0) -> Finished:
        reset_accelerator()
        return run_here(args, capsys, ends)

    return run


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write_lines(*rows: Any, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write_lines


@pytest.fixture
def with_template(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], Any]:
    def set_template(template: str | None) -> Any:
        monkeypatch.setattr(tokenizer, "chat_template", template)
        return tokenizer

    return set_template


def get_rows(rows: TokenRows) -> list[list[int]]:
    return [part.tolist() for part in np.split(rows.tokens, rows.bounds[1:-1])]


def get_labels(rows: TokenRows, tokenizer: Any) -> list[str]:
    """The label tokens of each row, as text."""
    pairs = zip(
        np.split(rows.tokens, rows.bounds[1:-1]),
        np.split(rows.mask, rows.bounds[1:-1]),
        strict=True,
    )
    return [tokenizer.decode(tokens[mask].tolist()) for tokens, mask in pairs]


@pytest.fixture
def few_inputs(target_dir: Path, data_file: Path, tmp_path: Path) -> tuple[object, ...]:
    """The target, and a file of the first five rows of data."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join(data_file.read_text().splitlines(keepends=True)[:5]))
    return ("--model-dir", target_dir, "--data", few)
