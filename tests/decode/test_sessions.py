"""Sessions on disk: an engine that is opened again goes on where another one was, to the bit."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec import Engine, Output, Prompt, SpecDecError
from specdec.decode import sessions
from specdec.decode.sessions import BLOCK_TOKENS
from specdec.decode.settings import DecodeSettings
from specdec.engine.layout import read_engine_config
from specdec.files.session_files import BlockName, SessionFolder, read_name
from tests.conftest import (
    make_dflash_drafter,
    make_eagle_drafter,
    make_llama,
    make_mtp_head,
)
from tests.engine.kernels import needs_compiler
from tests.engines import make_engine, make_tree_engine
from tests.families import make_hybrid
from tests.forks import fork

GIB = 2**30
GENERATOR = random.Random(3)
PROMPT = [GENERATOR.randrange(3, 120) for _ in range(150)]
QUESTION = [GENERATOR.randrange(3, 120) for _ in range(9)]
ANSWER_LEN = 40


def make_dflash(parent: Path) -> Path:
    target = make_llama(parent, layers=3, seed=3, dtype="bfloat16")
    return make_tree_engine("dflash", parent, target, make_dflash_drafter(parent, scale=2.0))


def make_eagle3(parent: Path) -> Path:
    target = make_llama(parent, layers=3, seed=3)
    drafter = make_eagle_drafter(parent, scale=2.0, version=3, aux_layers=(0, 2))
    return make_tree_engine("eagle", parent, target, drafter)


def make_mtp(parent: Path) -> Path:
    target = make_hybrid(parent)
    return make_tree_engine("mtp", parent, target, make_mtp_head(parent, target))


def make_plain(parent: Path, **options: Any) -> Path:
    target = make_llama(parent, seed=5, dtype="bfloat16")
    return make_engine(parent, target, dtype="bfloat16", build=["--max-batch-size", 2], **options)


ENGINES: dict[str, Callable[[Path], Path]] = {
    "plain": make_plain, "eagle3": make_eagle3, "dflash": make_dflash, "hybrid, mtp": make_mtp,
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(lasting_dir: Path) -> Path:
    return make_plain(lasting_dir / "sessions")


def open_engine(engine_dir: Path, folder: Path | None, max_bytes: int = GIB) -> Engine:
    is_plain = read_engine_config(engine_dir).checkpoint.method is None
    drafting: dict[str, Any] = {"no_speculation": True} if is_plain else {"draft_budget": "fixed"}
    settings = DecodeSettings(
        engine_dir=engine_dir, kv_cache_enable_block_reuse=True, device="cpu", **drafting
    )
    kept = None if folder is None else SessionFolder(folder, max_bytes)
    return Engine.open(settings, prompt_chunk=48, session_folder=kept)


def ask(engine: Engine, ids: list[int]) -> Output:
    prompt = Prompt(
        token_ids=ids, max_output_len=ANSWER_LEN, logprobs=2, temperature=0.0, end_ids=frozenset()
    )
    with engine.stream(prompt) as stream:
        for _ in stream:
            pass
        return stream.output


def describe(output: Output) -> Any:
    """The text and all log-probabilities."""
    assert len(output.logprobs) == ANSWER_LEN
    return output.token_ids, [(t.logprob, t.top) for t in output.logprobs]


def continue_text(output: Output) -> list[int]:
    return [*PROMPT, *output.token_ids, *QUESTION]


def answer(engine_dir: Path, folder: Path | None, prompt: list[int]) -> tuple[Any, Any]:
    """A new engine's answer, and the sessions that it had."""
    with open_engine(engine_dir, folder) as engine:
        return describe(ask(engine, prompt)), engine.sessions


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("name", ENGINES)
def test_a_conversation_goes_on_after_a_restart(name: str, tmp_path: Path) -> None:
    """Its text, log-probabilities and drafts are those of an engine that was never closed."""
    engine_dir, folder = ENGINES[name](tmp_path), tmp_path / "kept"
    with open_engine(engine_dir, None) as engine:
        first = ask(engine, PROMPT)
        later = continue_text(first)
        second = ask(engine, later)
    cold, _ = answer(engine_dir, None, later)
    assert describe(second) == cold
    with open_engine(engine_dir, folder) as engine:
        assert describe(ask(engine, PROMPT)) == describe(first)
    with open_engine(engine_dir, folder) as engine:
        reopened = ask(engine, later)
        assert engine.sessions is not None
        num_restored, num_blocks = engine.sessions.num_restored_tokens, len(later) // BLOCK_TOKENS
    assert describe(reopened) == cold
    is_hybrid = name == "hybrid, mtp"  # whose state after the answer is kept
    assert num_restored >= (len(PROMPT) + ANSWER_LEN - 6 if is_hybrid else 2 * BLOCK_TOKENS)
    assert num_restored >= (num_blocks - 1) * BLOCK_TOKENS
    # Of the answer before, the file has whole blocks, and memory had all.
    stats, expected_stats = (dataclasses.asdict(output.stats) for output in (reopened, second))
    assert 0 < stats.pop("num_cached_tokens") <= expected_stats.pop("num_cached_tokens")
    assert stats == expected_stats
    # A third has the new turn, too, and for an equal prompt all but its last tokens.
    third, kept = answer(engine_dir, folder, later)
    assert third == cold
    assert kept.num_restored_tokens >= (len(later) - 1 if is_hybrid else num_blocks * BLOCK_TOKENS)


@pytest.fixture
def kept(plain: Path, tmp_path: Path) -> tuple[Path, Any]:
    """A folder with the blocks of a prompt, and the answer to it."""
    folder = tmp_path / "kept"
    expected, _ = answer(plain, folder, PROMPT)
    return folder, expected


def list_blocks(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.block"))


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("damage", ["bit", "end", "empty", "foreign", "gone", "longer", "swapped"])
def test_damaged_blocks_are_read_again(
    damage: str, plain: Path, kept: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, expected = kept
    first, second = list_blocks(folder)[:2]
    data = second.read_bytes()
    if damage == "bit":
        place = len(data) // 2
        second.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    elif damage == "swapped":
        second.write_bytes(first.read_bytes())
    elif damage == "gone":
        second.unlink()
    else:
        second.write_bytes(
            {"end": data[:-9], "empty": b"", "foreign": b"x" * 700, "longer": data + b"x"}[damage]
        )
    found, kept_now = answer(plain, folder, PROMPT)
    assert found == expected
    assert kept_now.folder.num_damaged == (damage != "gone")
    assert kept_now.num_restored_tokens == BLOCK_TOKENS
    found, kept_now = answer(plain, folder, PROMPT)  # it was written again
    assert (found, kept_now.num_restored_tokens) == (expected, 2 * BLOCK_TOKENS)


def rewrite(path: Path, change: Callable[[dict[str, Any], list[memoryview]], Any]) -> None:
    """Let a block hold something else, with a sum that is right."""
    folder, name = SessionFolder(path.parent, GIB), read_name(path.name)
    assert name is not None
    fields, arrays = folder.read(name.key)
    path.unlink()
    folder.close()
    change(fields, arrays)
    folder = SessionFolder(path.parent, GIB)
    assert folder.write(name, fields, arrays, 1000.0)
    folder.close()


@needs_compiler
@pytest.mark.parametrize("change", [
    lambda _, arrays: arrays.append(arrays[0]), lambda _, arrays: arrays.clear(),
    lambda _, arrays: arrays.insert(0, arrays.pop()[:-64]),
], ids=["two", "none", "short"])  # fmt: skip
def test_blocks_of_other_sizes_are_read_again(
    change: Callable[..., Any], plain: Path, kept: tuple[Path, Any]
) -> None:
    """Whoever wrote them made their sums right, too; the text goes on without them."""
    folder, expected = kept
    rewrite(list_blocks(folder)[1], change)
    found, kept_now = answer(plain, folder, PROMPT)
    assert found == expected
    assert kept_now.folder.num_damaged == 1
    assert kept_now.num_restored_tokens == BLOCK_TOKENS


@pytest.mark.thorough
@needs_compiler
def test_ends_that_are_none_are_read_again(tmp_path: Path) -> None:
    """Of a hybrid's texts; one without its number of tokens was read again without end."""
    engine_dir, folder = make_mtp(tmp_path), tmp_path / "kept"
    expected, _ = answer(engine_dir, folder, PROMPT)
    for change in (
        lambda fields, _: fields.pop("num_state"),
        lambda fields, _: fields.update(num_state=-1),
        lambda fields, _: fields.update(num_state=10**12),
        lambda fields, _: fields.update(num_state=True),
        lambda _, arrays: arrays.pop(),
    ):
        ends = [path for path in list_blocks(folder) if path.name.count("-") > 1]
        for path in ends:
            rewrite(path, change)
        found, kept_now = answer(engine_dir, folder, PROMPT)
        assert found == expected
        assert 0 < kept_now.folder.num_damaged <= len(ends)


@pytest.mark.thorough
@needs_compiler
def test_no_engine_takes_blocks_of_another(
    plain: Path, kept: tuple[Path, Any], tmp_path: Path
) -> None:
    """Other weights, another type, torch's operators, the rounding of an adapter, a drafter."""
    folder, _ = kept
    (tmp_path / "other").mkdir()
    target = make_llama(tmp_path / "other", seed=6)
    build = ["--max-batch-size", 2]
    others = [
        make_plain(tmp_path, optimize="none"),
        make_engine(tmp_path / "other", target, dtype="bfloat16", build=build),
        make_engine(tmp_path, tmp_path / "target", dtype="float32", build=build),
        make_engine(
            tmp_path, tmp_path / "target", dtype="bfloat16", beams=3,
            build=[*build, "--quantization", "int8"],
        ),
    ]  # fmt: skip
    for other in others:
        expected, _ = answer(other, None, PROMPT)
        found, kept_now = answer(other, folder, PROMPT)
        assert (found, kept_now.num_restored_tokens) == (expected, 0)
    _, kept_now = answer(plain, folder, PROMPT)
    assert kept_now.num_restored_tokens == 2 * BLOCK_TOKENS


def measure_after_writes(folder: SessionFolder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the bytes of all blocks after each write, by its thread."""
    sizes: list[int] = []
    write = folder.write

    def write_and_measure(*words: Any) -> bool:
        is_written = write(*words)
        sizes.append(sum(path.stat().st_size for path in list_blocks(folder.folder)))
        return is_written

    monkeypatch.setattr(folder, "write", write_and_measure)
    return sizes


@needs_compiler
def test_the_limit_holds_and_what_is_old_goes_first(
    plain: Path, kept: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = kept
    size = list_blocks(folder)[0].stat().st_size
    for path in list_blocks(folder):  # of an hour ago
        os.utime(path, (path.stat().st_mtime - 3600,) * 2)
    limit = 4 * size + size // 2
    with open_engine(plain, folder, limit) as engine:
        assert engine.sessions is not None
        sizes = measure_after_writes(engine.sessions.folder, monkeypatch)
        for number in range(4):
            ask(engine, [number + 3] * 100)
        newest = describe(ask(engine, [9] * 130))
    assert len(sizes) > 5, "each text has whole blocks"
    assert 4 * size <= max(sizes) <= limit
    with open_engine(plain, folder, limit) as engine:
        assert engine.sessions is not None
        assert describe(ask(engine, PROMPT)) == expected
        assert engine.sessions.num_restored_tokens == 0, "it was the oldest"
        assert describe(ask(engine, [9] * 130)) == newest
        assert engine.sessions.num_restored_tokens > 0
    assert sum(path.stat().st_size for path in list_blocks(folder)) <= limit


@needs_compiler
def test_a_full_disk_costs_no_text(
    plain: Path, kept: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    folder, expected = kept
    for path in list_blocks(folder)[1:]:
        path.unlink()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "rename", fail)
    found, kept_now = answer(plain, folder, PROMPT)
    assert found == expected
    assert kept_now.folder.num_failures == 1
    assert "the disk is full" in caplog.text
    assert [path.name for path in folder.iterdir() if path.suffix == ".partial"] == []
    assert len(list_blocks(folder)) == 1


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    """Another server's, a file, one of other files, one that nobody may write to."""
    folder = SessionFolder(tmp_path / "kept", GIB)
    with pytest.raises(SpecDecError, match=f"is used by another server, process {os.getpid()}"):
        SessionFolder(tmp_path / "kept", GIB)
    folder.close()
    SessionFolder(tmp_path / "kept", GIB).close()
    (tmp_path / "file").touch()
    with pytest.raises(SpecDecError, match="cannot be used: .*(exists|Not a directory)"):
        SessionFolder(tmp_path / "file", GIB)
    (tmp_path / "model").mkdir()
    for name in (".hidden", "config.json", "weights.partial"):
        (tmp_path / "model" / name).touch()
    with pytest.raises(SpecDecError, match=r"holds other files: config.json, weights.partial"):
        SessionFolder(tmp_path / "model", GIB)
    assert len([*(tmp_path / "model").iterdir()]) == 3
    (tmp_path / "shut").mkdir(mode=0o500)
    if os.geteuid() != 0:
        with pytest.raises(SpecDecError, match="cannot be used: .*Permission denied"):
            SessionFolder(tmp_path / "shut", GIB)


def test_a_folder_lists_its_blocks_by_their_names(tmp_path: Path) -> None:
    """Of one key there is one block, halves of files go, and other files stay."""
    folder = SessionFolder(tmp_path, 10_000)
    block, end = BlockName("ab" * 20, 0), BlockName("cd" * 20, 1, "ef" * 20, 7)
    assert folder.write(block, {}, [b"numbers", b""], 1000.0)
    assert folder.write(end, {"num_state": 3}, [b"state"], 1000.0)
    assert not folder.write(BlockName("aa" * 20, 2), {}, [bytes(20_000)], 1000.0), "too large"
    folder.close()
    (tmp_path / "000000-half.partial").touch()
    (tmp_path / "notes.block").touch()
    (tmp_path / "film.partial").touch()
    folder = SessionFolder(tmp_path, 10_000)
    assert (tmp_path / "film.partial").exists()
    assert not (tmp_path / "000000-half.partial").exists()
    assert (tmp_path / "notes.block").exists()
    assert [*folder.list_ends("ef" * 20)] == [end]
    header, arrays = folder.read(block.key)
    assert ([bytes(a) for a in arrays], header["num_bytes"]) == ([b"numbers", b""], [7, 0])
    assert folder.read(end.key)[0]["num_state"] == 3
    folder.close()


POINTS = [("before", 0), ("half", 1), ("before rename", 2), ("after", 1)]


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize(("moment", "number"), POINTS)
def test_a_killed_process_loses_its_newest_turn_at_most(
    moment: str, number: int, plain: Path, tmp_path: Path
) -> None:
    """It is killed in the middle of a write of its second turn; the first one's are there."""
    folder = tmp_path / "kept"
    with open_engine(plain, folder) as engine:
        later = continue_text(ask(engine, PROMPT))
    num_before = len(list_blocks(folder))
    cold, _ = answer(plain, None, [*later, *PROMPT[:100]])

    def work() -> None:
        count, rename = 0, Path.rename

        def stop(path: Path, target: Path) -> Path:
            nonlocal count
            is_due, count = count == number, count + 1
            if is_due and moment == "half":
                os.truncate(path, path.stat().st_size // 2)
            if is_due and moment != "after":
                os.kill(os.getpid(), signal.SIGKILL)
            rename(path, target)
            if is_due:
                os.kill(os.getpid(), signal.SIGKILL)
            return target

        Path.rename = stop  # type: ignore[assignment, method-assign]
        with open_engine(plain, folder) as engine:
            ask(engine, [*later, *PROMPT[:100]])

    process = fork(work)
    assert process.wait(120) == -signal.SIGKILL
    assert len(list_blocks(folder)) == num_before + number + (moment == "after")
    found, kept_now = answer(plain, folder, [*later, *PROMPT[:100]])
    assert found == cold
    assert kept_now.num_restored_tokens >= num_before * BLOCK_TOKENS
    assert kept_now.folder.num_damaged == 0


@needs_compiler
def test_decoding_never_waits_for_the_disk(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts end while not a single block can be written; what waits is bounded."""
    gate, write = threading.Event(), SessionFolder.write

    def wait(self: SessionFolder, *arguments: Any) -> bool:
        assert gate.wait(120)
        return write(self, *arguments)

    monkeypatch.setattr(SessionFolder, "write", wait)
    monkeypatch.setattr(sessions, "WAITING_BYTES", 1)
    monkeypatch.setattr(sessions, "MOST_WAITING", 10**6)
    engine = open_engine(plain, tmp_path / "kept")
    expected = describe(ask(engine, PROMPT))
    assert engine.sessions is not None
    assert engine.sessions.num_written_tokens == 0
    gate.set()
    engine.close()
    found, kept_now = answer(plain, tmp_path / "kept", PROMPT)
    assert (found, kept_now.num_restored_tokens) == (expected, 2 * BLOCK_TOKENS)
