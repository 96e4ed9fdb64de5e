"""What an interrupted training left behind, damaged: taken as it was, or refused in one message."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import SpecDecError
from specdec.files.staging import hold_lock
from specdec.train.loop import check_state
from specdec.train.rows import TokenRows
from specdec.train.state import TrainingState
from tests.convert.fuzzing import attempt, fuzz

LOG = [{"step": n, "mean_loss": 1.0 / n, "tokens": 10 * n} for n in (1, 2, 3)]


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def make_checkpoint() -> dict[str, Any]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {
        "step": 2, "num_tokens": 20, "drafter": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }  # fmt: skip


def make_state(parent: Path) -> TrainingState:
    """A training's folder after two steps."""
    state = TrainingState(parent / "out")
    state.open({"--seed": 0}, resume=False)
    state.data_folder.mkdir()
    rows = TokenRows(
        np.arange(12, dtype=np.uint16), np.ones(12, bool), np.array([0, 5, 12], np.int64)
    )
    for name in ("train", "heldout"):
        rows.save(state.data_folder, name)
    state.finish_rows()
    for line in LOG:
        state.add_log(line)
    state.save_checkpoint(make_checkpoint())
    return state


@pytest.fixture
def state(tmp_path: Path) -> TrainingState:
    return make_state(tmp_path)


def load(state: TrainingState) -> None:
    """What a resumed training reads."""
    state.open({"--seed": 0}, resume=True)
    for name in ("train", "heldout"):
        rows = TokenRows.load(state.data_folder, name)
        rows.check_tokens(100, state.data_folder)
        if len(rows):
            rows.make_batch(list(range(len(rows))))
    checkpoint = state.load_checkpoint()
    assert checkpoint is not None
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        check_state(checkpoint, model.state_dict(), {"optimizer": optimizer})
        model.load_state_dict(checkpoint["drafter"])
        fresh = optimizer.state_dict()
        optimizer.load_state_dict({**fresh, "state": checkpoint["optimizer"]["state"]})
    except (ValueError, KeyError, TypeError, RuntimeError, AttributeError):
        raise state.refuse_checkpoint() from None
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()  # what torch takes of another shape fails here
    state.cut_log(checkpoint["step"])


def test_a_good_state_loads(state: TrainingState) -> None:
    load(state)
    assert state.read_log() == LOG[:2]


def test_a_full_disk(state: TrainingState) -> None:
    """torch says "unexpected pos", and numpy how many numbers were written."""
    (state.folder / "checkpoint.pt.partial").symlink_to("/dev/full")
    with pytest.raises(SpecDecError, match=r"checkpoint\.pt cannot be written: ") as caught:
        state.save_checkpoint(make_checkpoint())
    assert "--resume" in caught.value.hint
    assert not (state.folder / "checkpoint.pt.partial").is_symlink()
    load(state)  # the one before
    path = state.data_folder / "train.tokens.npy"
    rows = TokenRows.load(state.data_folder, "train")
    tokens = np.zeros(100_000, rows.tokens.dtype)
    path.unlink()
    path.symlink_to("/dev/full")
    full = TokenRows(tokens, rows.mask, rows.bounds)
    with pytest.raises(SpecDecError, match="cannot be written"), state.writing(state.data_folder):
        full.save(state.data_folder, "train")


def list_files(state: TrainingState) -> list[Path]:
    return sorted(p for p in state.folder.rglob("*") if p.is_file() and p.name != "complete")


@fuzz(400)
@given(data=st.data())
def test_damaged_files(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    state = make_state(tmp_path_factory.mktemp("state"))
    path = data.draw(st.sampled_from(list_files(state)))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        how = data.draw(st.sampled_from(["cut", "flip", "double", "insert"]))
        at = data.draw(st.integers(0, max(0, len(content) - 1)))
        if how == "cut":
            del content[at:]
        elif how == "double":
            content += content[at:]
        elif how == "insert":
            content[at:at] = data.draw(st.binary(max_size=5))
        elif content:
            content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    attempt(lambda: load(state))


def halve(path: Path) -> None:
    array = np.load(path)
    np.save(path, array[: len(array) // 2])


def save_array(path: Path, array: Any) -> None:
    np.save(path, array)


ARRAYS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "half of the tokens": ("train.tokens", halve, "has 6 entries, its rows 12"),
    "half of the mask": ("heldout.mask", halve, "has 6 entries, its rows 12"),
    "half of the bounds": ("train.bounds", halve, "entries, its rows 0"),
    "half of the file": ("train.tokens", lambda p: p.write_bytes(p.read_bytes()[:-8]), "damaged"),
    "no array": ("train.mask", lambda p: p.write_bytes(b"x"), "damaged"),
    "bounds that fall": (
        "train.bounds", lambda p: save_array(p, np.array([0, 9, 5, 12])), "do not rise",
    ),
    "numbers with a point": (
        "train.tokens", lambda p: save_array(p, np.ones(12)), "it is float64 [12]",
    ),
    "a matrix": ("train.mask", lambda p: save_array(p, np.ones((3, 4), bool)), "bool [3, 4]"),
    "a token beyond the vocabulary": (
        "train.tokens", lambda p: save_array(p, np.full(12, 100, np.uint16)), "the target has 100",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARRAYS)
def test_damaged_arrays(name: str, state: TrainingState) -> None:
    file, damage, fact = ARRAYS[name]
    damage(state.data_folder / f"{file}.npy")
    with pytest.raises(SpecDecError) as caught:
        load(state)
    assert fact in caught.value.message
    assert str(state.data_folder) in caught.value.message
    assert "--force" in caught.value.hint


def test_changed_numbers_are_not_resumed_from(state: TrainingState) -> None:
    """A bit of a token, and one of a weight, which leave sizes and names as they are."""
    state.check_rows()
    checkpoint = state.load_checkpoint()
    assert checkpoint is not None
    weight = checkpoint["drafter"]["0.weight"].numpy().tobytes()
    for path, value in (
        (state.data_folder / "train.tokens.npy", np.arange(12, dtype=np.uint16).tobytes()),
        (state.folder / "checkpoint.pt", weight),
    ):
        content = bytearray(path.read_bytes())
        content[content.index(value)] ^= 1
        path.write_bytes(content)
    with pytest.raises(SpecDecError, match=r"train\.tokens\.npy are damaged") as caught:
        state.check_rows()
    assert "--force" in caught.value.hint
    with pytest.raises(SpecDecError, match=r"checkpoint\.pt is damaged"):
        state.load_checkpoint()
    (state.data_folder / "complete").write_bytes(b"")  # as an earlier specdec left it
    state.check_rows()


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        (b"no JSON", "line 2 does not belong to this training"),
        (b"[1]", "line 2 does not belong to this training: it has no step"),
        (b'{"steps": 3}', "it has no step"),
        (b'{"step": "3"}', "it has no step"),
        (b'{"step": 3, "mean_loss": "low"}', "it has no step"),
        (b'{"step": 3, "x": "\xff"}', "line 2 does not belong to this training"),
        (b"", "line 2 does not belong to this training"),
    ],
)
def test_foreign_lines_of_the_log(line: bytes, fact: str, state: TrainingState) -> None:
    path = state.folder / "log.jsonl"
    first, *others = path.read_bytes().splitlines(keepends=True)
    before = first + line + b"\n" + b"".join(others)
    path.write_bytes(before)
    with pytest.raises(SpecDecError) as caught:
        load(state)
    assert fact in caught.value.message
    assert path.read_bytes() == before, "nothing of it is thrown away"
    path.write_bytes(first + b'{"step": 2, "me')  # the line that a kill cut off
    assert state.read_log() == LOG[:1]


def change(edit: Callable[[dict[str, Any]], object]) -> bytes:
    checkpoint = make_checkpoint()
    edit(checkpoint)
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    return buffer.getvalue()


CHECKPOINTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a step that is a text": lambda c: c.update(step="2"),
    "a step below 0": lambda c: c.update(step=-1),
    "no tokens": lambda c: c.pop("num_tokens"),
    "weights of half the size": lambda c: c["drafter"].update({"0.weight": torch.ones(2, 3)}),
    "a weight too many": lambda c: c["drafter"].update({"9.weight": torch.ones(2)}),
    "a weight too few": lambda c: c["drafter"].pop("0.weight"),
    "a list of weights": lambda c: c.update(drafter=[1]),
    "averages of half the size": lambda c: c["optimizer"]["state"][0].update(
        exp_avg=torch.ones(2, 3)
    ),
    "averages that would spread": lambda c: c["optimizer"]["state"][0].update(
        exp_avg_sq=torch.ones(1)
    ),
    "no averages": lambda c: c["optimizer"]["state"][0].clear(),
    "averages of another weight": lambda c: c["optimizer"]["state"].update({9: {}}),
    "averages of Muon": lambda c: c.update(muon=c["optimizer"]),
    "a list for an optimizer": lambda c: c.update(optimizer=[]),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_damaged_checkpoints(name: str, state: TrainingState) -> None:
    (state.folder / "checkpoint.pt").write_bytes(change(CHECKPOINTS[name]))
    with pytest.raises(SpecDecError, match="is damaged"):
        load(state)


def test_groups_of_the_optimizer_are_the_settings_own(state: TrainingState) -> None:
    edit: Callable[[dict[str, Any]], object] = lambda c: c["optimizer"].update(param_groups=[])  # noqa: E731
    (state.folder / "checkpoint.pt").write_bytes(change(edit))
    load(state)
    assert json.loads((state.folder / "settings.json").read_text()) == {"--seed": 0}


def test_what_a_finished_training_left_goes(state: TrainingState, tmp_path: Path) -> None:
    """A kill after the drafter had its name; another drafter of that name tells nothing."""
    manifest = tmp_path / "out" / "manifest.json"
    manifest.parent.mkdir()
    manifest.write_text("this one's")
    state.mark_finished(manifest.parent)
    manifest.write_text("another's")
    with pytest.raises(SpecDecError, match="an unfinished training is in"):
        state.refuse_unfinished(resume=False, force=False)
    with hold_lock(tmp_path / "out"), pytest.raises(SpecDecError, match="another process is writ"):
        state.refuse_unfinished(resume=False, force=False)
    assert state.has_rows()
    manifest.write_text("this one's")
    state.refuse_unfinished(resume=False, force=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
