"""Hidden states of vLLM: the drafters of a run with the target; nothing foreign is learned from."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.errors import SpecDecError
from specdec.files.tensor_file import TensorFile
from specdec.system import http_client
from specdec.train import extracted, parts, state_files, target
from specdec.train.rows import TokenRows
from tests.families import make_family_model
from tests.train.states_server import Extractor, StatesServer
from tests.train.test_hidden_states import hide_the_layers, read_bytes

BASIC = (
    "--dtype", "float32", "--model-max-length", 32, "--batch-size", 2, "--seed", 3,
    "--learning-rate", 0.01, "--max-steps", 3, "--eval-prompts", 0, "--eval-rows", 2,
)  # fmt: skip
EAGLE3 = ("--method", "eagle", "--eagle-version", 3)  # reads layer 0 of the two of the target
KINDS = {"eagle3": EAGLE3, "medusa": ("--method", "medusa", "--self-distillation", 0.5)}


@pytest.fixture(scope="module")
def extractor(target_dir: Path) -> Extractor:
    return Extractor(target_dir, [1, 2])


@pytest.fixture
def inputs(few_inputs: tuple[object, ...]) -> tuple[object, ...]:
    return (*few_inputs, *BASIC)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """The server's folder."""
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_gives_the_drafter_of_a_run_with_the_target(
    kind: str, run_train: Any, inputs: Any, tmp_path: Path, shared: Path, extractor: Extractor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Asked in every epoch, asked once and kept, and read from what was kept."""
    options = (*inputs, *KINDS[kind])
    run_train(*options, "--output-dir", tmp_path / "live")
    expected = read_bytes(tmp_path / "live")
    hide_the_layers(monkeypatch)
    layers = ("--hidden-states-layers", "1,2")
    kept = ("--hidden-states-dir", tmp_path / "kept")
    with StatesServer(extractor, shared, statuses=[503]) as server:
        monkeypatch.setattr(http_client, "FIRST_WAIT", 0.0)
        given = ("--hidden-states-from", server.url, *layers)
        for name, more in (("online", ()), ("kept-first", kept)):
            run_train(*options, *given, *more, "--output-dir", tmp_path / name)
            assert read_bytes(tmp_path / name) == expected
        num_prompts = server.num_prompts
        run_train(*options, *given, *kept, "--output-dir", tmp_path / "again")
        assert server.num_prompts == num_prompts
        other = (*given[:2], "--hidden-states-layers", "1,2,3")
        refused = run_train(*options, *other, *kept, "--output-dir", tmp_path / "other", ends=1)
        assert "--hidden-states-layers is '1,2,3', was '1,2'" in refused.last_lines[0]
    assert read_bytes(tmp_path / "again") == expected
    # The first answer was a failure, whose file nobody read; all others are gone.
    assert {path.name.partition("-0.")[0] for path in shared.iterdir()} == {"cmpl-0"}
    own = run_train(*options, *kept, "--output-dir", tmp_path / "own", ends=1)
    assert "--hidden-states-from is None, was 'given'" in own.last_lines[0]


def write_folder(folder: Path, extractor: Extractor, rows: list[list[int]]) -> None:
    """Write files as speculators does, which go on after the rows."""
    folder.mkdir()
    for number, row in enumerate(rows):
        tensors, _ = extractor.extract([*row, 1, 7])
        save_file(tensors, folder / f"hs_{number}.safetensors")


@pytest.fixture
def folder(run_train: Any, inputs: Any, tmp_path: Path, shared: Path, extractor: Extractor) -> Path:
    """A folder of the states of all rows of the data."""
    prompts: list[list[int]] = []

    def note(tensors: Any, answer: Any) -> None:
        prompts.append(tensors["token_ids"].tolist())

    with StatesServer(extractor, shared, note) as server:
        run_train(
            *inputs, *EAGLE3, "--hidden-states-from", server.url, "--hidden-states-dir",
            tmp_path / "noted", "--output-dir", tmp_path / "noting",
        )  # fmt: skip
    write_folder(tmp_path / "speculators", extractor, prompts)
    return tmp_path / "speculators"


def test_a_folder_gives_the_drafter_of_a_run_with_the_target(
    run_train: Any, inputs: Any, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are left alone; in FP8 they are the values of hs-connectors' own reader."""
    options = (*inputs, *EAGLE3)
    run_train(*options, "--output-dir", tmp_path / "live")
    hide_the_layers(monkeypatch)
    given = (*options, "--hidden-states-from", folder)
    names = sorted(path.name for path in folder.iterdir())
    run_train(*given, "--output-dir", tmp_path / "drafter")
    # Of a longer row, matrix products round otherwise.
    weights, expected = (
        load_file(tmp_path / name / "model.safetensors") for name in ("drafter", "live")
    )
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-5)
    assert sorted(path.name for path in folder.iterdir()) == names
    for name in names[1:]:
        (folder / name).unlink()
    done = run_train(*given, "--output-dir", tmp_path / "poor", ends=1)
    assert "train rows have no states in its 1 files; row" in done.last_lines[0]


def quantize(states: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return tensors in FP8 as hs-connectors 0.9 writes them."""
    scale = (states.float().abs().amax((1, 2), keepdim=True) / 448).clamp(min=1e-12)
    return {
        "hidden_states": (states.float() / scale).to(torch.float8_e4m3fn),
        "hidden_states_scales": scale,
    }


def test_states_in_fp8(tmp_path: Path, extractor: Extractor) -> None:
    tensors, _ = extractor.extract([3, 4, 5, 6])
    quantized = quantize(tensors["hidden_states"])
    save_file({**quantized, "token_ids": tensors["token_ids"]}, tmp_path / "a.safetensors")
    file = TensorFile(tmp_path / "a.safetensors")
    state_files.StatesForm((1, 2), 32).check(file)
    found = state_files.read_states(file, 3, [1, 0], "float32")
    numbers = quantized["hidden_states"].float() * quantized["hidden_states_scales"]
    assert torch.equal(torch.stack(found, 1), numbers[:3].flip(1))
    del quantized["hidden_states_scales"]
    save_file({**quantized, "token_ids": tensors["token_ids"]}, tmp_path / "b.safetensors")
    with pytest.raises(SpecDecError, match="is float8_e4m3fn without hidden_states_scales, not"):
        state_files.StatesForm((1, 2), 32).check(TensorFile(tmp_path / "b.safetensors"))


def alter(name: str, value: Any) -> Any:
    """Return a change of a server's answers, by a key of tensors or of the answer."""

    def change(tensors: dict[str, torch.Tensor], answer: dict[str, Any]) -> None:
        chosen: dict[str, Any] = tensors if name in tensors else answer
        chosen[name] = value(chosen[name])

    return change


def spoil(states: torch.Tensor) -> torch.Tensor:
    states = states.clone()
    states[3, 0, 5] = torch.inf
    return states


REFUSED: dict[str, tuple[Any, str]] = {
    "tokens": (alter("token_ids", lambda t: t + (torch.arange(len(t)) == 2)), ": token 2 of "),
    "count": (
        alter("token_ids", lambda t: t[:-1]), "is [32, 2, 32], not [31, 2, 32]: 31 tokens",
    ),
    "layers": (
        alter("hidden_states", lambda t: t[:, :1].contiguous()),
        "is [32, 1, 32], not [32, 2, 32]: 32 tokens, the 2 layers 1,2, 32 channels",
    ),
    "dtype": (alter("hidden_states", lambda t: t.to(torch.int8)), "is int8 without hidden_st"),
    "numbers": (
        alter("hidden_states", spoil), "tokens have states that are no numbers, the first at 3",
    ),
    "order": (
        alter("hidden_states", lambda t: t.flip(1).neg()), ": the server's next token is ",
    ),
    "plain": (alter("kv_transfer_params", lambda _: None), "answers without kv_transfer_params"),
    "store": (
        alter("kv_transfer_params", lambda _: {"handle": "k1"}), "with the handle 'k1' of a store",
    ),
    "elsewhere": (
        alter("kv_transfer_params", lambda _: {"hidden_states_path": "/none/x.safetensors"}),
        "wrote hidden states to /none/x.safetensors, which is not on this machine",
    ),
    "prompt": (
        alter("choices", lambda c: [c[0] | {"prompt_token_ids": [1, 2]}]),
        "answers for other token ids: 2 of them, 32 were sent",
    ),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("fault", REFUSED)
def test_other_states_are_refused(
    fault: str, run_train: Any, inputs: Any, tmp_path: Path, shared: Path, extractor: Extractor
) -> None:
    change, words = REFUSED[fault]
    with StatesServer(extractor, shared, change) as server:
        done = run_train(
            *inputs, *EAGLE3, "--hidden-states-from", server.url, "--output-dir", tmp_path / "out",
            ends=1,
        )  # fmt: skip
    assert words in done.last_lines[0]
    assert done.last_lines[1].startswith("hint: ")
    assert not (tmp_path / "out").exists()


def test_servers_that_refuse_or_are_not_there(
    run_train: Any, inputs: Any, tmp_path: Path, shared: Path, extractor: Extractor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(http_client, "FIRST_WAIT", 0.0)
    options = (*inputs, *EAGLE3, "--output-dir", tmp_path / "out", "--hidden-states-from")
    with StatesServer(extractor, shared, statuses=[400]) as server:
        done = run_train(*options, server.url, ends=1)
        assert "refuses the request: HTTP 400, 'no'" in done.last_lines[0]
    with StatesServer(extractor, shared, statuses=[500] * 4) as server:
        done = run_train(*options, server.url, "--force", ends=1)
        assert "HTTP 500, 'no' (after 4 tries)" in done.last_lines[0]
    done = run_train(*options, server.url, "--force", ends=1)
    assert "no server answers at " in done.last_lines[0]
    done = run_train(*options, tmp_path / "absent", "--force", ends=1)
    assert "absent is neither a folder nor a URL" in done.last_lines[0]


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (("--hidden-states-layers", "2,1"), 2, "--hidden-states-layers is '2,1'"),
        (("--hidden-states-layers", "0,2"), 1, "--hidden-states-layers 0,2 lacks 1 of the 2"),
        (("--eval-prompts", 4), 2, "--hidden-states-from with --eval-prompts 4"),
        (("--shard-target",), 2, "--shard-target with --hidden-states-from"),
    ],
)
def test_options_that_cannot_be(
    flags: Any, status: int, words: str, run_train: Any, inputs: Any, tmp_path: Path, shared: Path
) -> None:
    done = run_train(
        *inputs, *EAGLE3, "--hidden-states-from", shared, "--output-dir", tmp_path / "out", *flags,
        ends=status,
    )  # fmt: skip
    assert words in done.last_lines[0]


def test_a_file_is_read_once_its_lock_is_free(tmp_path: Path, extractor: Extractor) -> None:
    path = tmp_path / "a.safetensors"
    lock = path.with_name("a.safetensors.lock")
    save_file(extractor.extract([3, 4])[0], path)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SpecDecError, match=r"still locked by its writer after 0\.02 s"):
            state_files.open_when_written(path, seconds=0.02)
    assert state_files.open_when_written(path).tensors["token_ids"].shape == (2,)


@pytest.mark.parametrize("family", ["gpt2", "opt", "gemma3", "granite", "qwen3_moe"])
def test_the_parts_are_those_of_the_whole_target(family: str, tmp_path: Path) -> None:
    """The last norm of what the last layer gives is the model's last hidden state."""
    folder = make_family_model(tmp_path, family)
    config = target.load_config(str(folder))
    device = torch.device("cpu")
    plan = parts.PartsPlan(str(folder), config)
    found = plan.load("float32", device)
    live = target.load_target(str(folder), config, "float32", device, with_head=True)
    stack = next(m for m in live.model.modules() if parts._is_stack(m, config.num_hidden_layers))
    seen = []
    stack[-1].register_forward_hook(
        lambda _, inputs, output: seen.append(output[0] if isinstance(output, tuple) else output)
    )
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        hidden = live.model(input_ids=tokens).last_hidden_state
        assert torch.equal(found.norm(seen[0]).reshape(hidden.shape), hidden)
        logits = live.whole_model(input_ids=tokens).logits
        torch.testing.assert_close(found.head.compute_logits(hidden), logits)
    assert torch.equal(found.embedding.weight, live.table)
    assert plan.files == [folder / "model.safetensors"]


def test_files_without_the_parts_are_enough_but_for_those(
    target_dir: Path, tmp_path: Path, extractor: Extractor
) -> None:
    """An index may name files that are not here."""
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "config.json").write_text((target_dir / "config.json").read_text())
    tensors = load_file(target_dir / "model.safetensors")
    names = {name: "model-2.safetensors" for name in tensors if ".layers." in name}
    here = {name: tensor for name, tensor in tensors.items() if name not in names}
    save_file(here, folder / "model-1.safetensors", metadata={"format": "pt"})
    weight_map = {**names, **dict.fromkeys(here, "model-1.safetensors")}
    (folder / parts.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    config = target.load_config(str(folder))
    found = parts.PartsPlan(str(folder), config).load("float32", torch.device("cpu"))
    assert torch.equal(found.embedding.weight, extractor.model.get_input_embeddings().weight)
    del weight_map["model.norm.weight"]
    (folder / parts.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(SpecDecError, match=r"has no model\.norm\.weight among the"):
        parts.PartsPlan(str(folder), config)


def test_rows_are_found_by_their_beginnings(tmp_path: Path, extractor: Extractor) -> None:
    write_folder(tmp_path / "states", extractor, [[3, 300, 5], [3, 300, 5, 9], [2]])
    states = state_files.StatesFolder(
        tmp_path / "states", state_files.StatesForm((1, 2), 32)
    )  # fmt: skip
    for tokens, number in (([3, 300, 5, 9], 1), ([3, 300, 5, 1], 0), ([2, 1], 2), ([3, 301], None)):
        path = states.find(np.array(tokens, np.uint16))
        assert (path and path.name) == (None if number is None else f"hs_{number}.safetensors")
    rows = TokenRows(np.array([2, 1, 3, 300, 6]), np.ones(5, bool), np.array([0, 2, 5]))
    with pytest.raises(SpecDecError, match="1 of 2 train rows .* row 1 has 3 .* the first 2$"):
        states.check_rows("train", rows)
    assert extracted.CONCURRENCY > 1
