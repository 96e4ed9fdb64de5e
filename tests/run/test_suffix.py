"""Suffix decoding: the tree of suffixes, what is drafted from it, and the options."""

from __future__ import annotations

import json
import multiprocessing
import random
import stat
from pathlib import Path
from typing import Any

import pytest

from specdec.decode.drafters.suffix import (
    CONTINUATION,
    END,
    NUM_BRANCHES,
    FinishedTexts,
    Node,
    ScoredDraft,
    SuffixDrafter,
    SuffixTree,
    grow,
)
from specdec.decode.requests import ActiveRequest, Request
from specdec.errors import SpecDecError, UsageError
from specdec.files.texts import add_texts, read_texts
from specdec.methods.suffix import SuffixOptions, read_options
from specdec.run.settings import RunSettings


def count(text: list[int], ngram: list[int]) -> int:
    size = len(ngram)
    return sum(text[at : at + size] == ngram for at in range(len(text) - size + 1))


def descend(tree: SuffixTree, ngram: list[int]) -> tuple[Node, int] | None:
    node, offset = tree.root, 0
    for token in ngram:
        if offset < node.length:
            at = node.start + offset
            if at >= len(tree.text) or tree.text[at] != token:
                return None
            offset += 1
        elif token in node.children:
            node, offset = node.children[token], 1
        else:
            return None
    return node, offset


def make_text(kind: str, length: int = 120) -> list[int]:
    dice = random.Random(kind)
    if kind == "loop":
        return [n % 7 for n in range(length)]
    if kind == "one token":
        return [3] * length
    if kind == "passages":
        passages = [[dice.randrange(5) for _ in range(9)] for _ in range(4)]
        return [t for _ in range(length // 9) for t in dice.choice(passages)]
    return [dice.randrange(3) for _ in range(length)]


KINDS = ["random", "loop", "one token", "passages"]


@pytest.mark.parametrize("depth", [1, 4, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_counts_and_places_are_those_of_the_text(kind: str, depth: int) -> None:
    """Against a search through the text, after every token."""
    text, tree = make_text(kind), SuffixTree(depth)
    for end in range(1, len(text) + 1):
        tree.extend(text[end - 1 : end])
        known = text[:end]
        matched = [n for n in range(1, depth + 1) if n < end and count(known, known[-n:]) > 1]
        assert len(tree.text_ends) - 1 == len(matched) == max(matched, default=0)
        for at, place in enumerate(tree.text_ends):
            size = len(tree.text_ends) - 1 - at
            assert descend(tree, known[end - size :]) == place
    ngrams = {tuple(text[a : a + n]) for n in range(1, depth + 1) for a in range(len(text) - n + 1)}
    for ngram in ngrams:
        found = descend(tree, list(ngram))
        assert found is not None
        node, offset = found
        if offset == 1:  # an edge is entered by every suffix that begins so
            assert node.count == count(text, list(ngram))
        if offset == node.length and len(ngram) < depth:
            followers = [t for t in range(8) if count(text, [*ngram, t])]
            assert sorted(node.children) == followers
            assert node.total == sum(count(text, [*ngram, t]) for t in followers)
            assert len(node.top) == min(NUM_BRANCHES, len(followers))
            least = min(child.count for child in node.top)
            assert all(c.count <= least for c in node.children.values() if c not in node.top)


def draft(text: list[int], size: int, probability: float = 0.0) -> ScoredDraft:
    tree = SuffixTree(8)
    tree.extend(text)
    return grow(tree, tree.text_ends[0], size, probability, text[-1])


def list_paths(found: ScoredDraft) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(found.tokens[1:], found.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    assert [len(path) for path in paths] == found.depths
    return paths[1:]


def test_the_likeliest_branches_are_drafted_first() -> None:
    """After 1 2 came 4 once and 3 three times: before 8 twice, before 9 once."""
    text = [1, 2, 4, 7, 1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3, 8, 5, 1, 2]
    found = draft(text, 3)
    assert list_paths(found) == [(3,), (3, 8), (4,)]
    assert found.score == pytest.approx(3 / 4 + 3 / 4 * CONTINUATION * 2 / 3 + 1 / 4)
    assert list_paths(draft(text, 8, 0.4)) == [(3,), (3, 8)], "no other is as likely"


def test_the_newest_of_equals_comes_first() -> None:
    text = [1, 2, 3, 5, 1, 2, 4, 6, 1, 2]
    assert list_paths(draft(text, 2)) == [(4,), (3,)]


def test_a_text_that_repeats_itself_is_drafted_in_full() -> None:
    assert list_paths(draft([5, 1, 2, 3, 1, 2, 3], 7))[-1] == (1, 2, 3, 1, 2, 3, 1)
    assert list_paths(draft([4, 4], 3))[-1] == (4, 4, 4)


def test_texts_one_after_another_do_not_run_into_each_other() -> None:
    tree = SuffixTree(4)
    for text in ([1, 2, 3], [3, 1, 2]):
        tree.extend(text)
        tree.end()
    places = tree.find([9, 1, 2])
    assert len(places) == 3
    found = grow(tree, places[0], 5, 0.0, 2)
    assert list_paths(found) == [(3,)]
    assert len(tree.find([2, 3, 3])) == 2, "3 3 is in neither"
    assert END not in found.tokens


def test_finished_requests_are_bounded() -> None:
    finished = FinishedTexts(40, 4)
    for number in range(30):
        finished.add([number] * (number % 12))
        assert sum(len(tree.text) for tree in finished.trees) <= 40
        assert len(finished.trees) <= 2
    finished.add(list(range(100, 200)))
    assert finished.trees[-1].text == [*range(181, 200), END], "of a long text, its end"
    FinishedTexts(2, 4).add([1, 2, 3])


def make_active(prompt: list[int], row: int, limit: int = 20) -> ActiveRequest:
    request = Request(index=row, input_ids=prompt, max_output_len=limit, end_ids=frozenset())
    return ActiveRequest(request, row, max_depth=8, text_stream=None)


@pytest.mark.parametrize("is_shared", [False, True])
def test_requests_share_only_if_asked(is_shared: bool) -> None:
    options = SuffixOptions(max_tokens=4, max_cached_tokens=100 if is_shared else 0)
    drafter = SuffixDrafter(options)
    drafter.allocate(2, 64)
    first, second = make_active([1, 2, 3, 4, 5, 6], 0), make_active([9, 8, 7], 1)
    drafter.start([first, second])
    for request in (first, second):
        request.emit([30])
    assert [c.tree.num_draft_tokens for c in drafter.propose([first, second])] == [0, 0]
    second.emit([2, 3])  # `first` is not finished, whoever drafts for it
    assert drafter.propose([first, second])[1].tree.num_draft_tokens == 0
    first.finish_reason = "length"
    (found,) = drafter.propose([second])
    assert found.tree.tokens[1:].tolist() == ([4, 5, 6, 30] if is_shared else [])
    third = make_active([50, 2], 1)
    drafter.start([third])
    third.emit([3, 4])
    (found,) = drafter.propose([third])
    assert found.tree.tokens[1:].tolist() == ([5, 6, 30] if is_shared else [])
    third.emit([5])
    (found,) = drafter.propose([third])
    assert found.tree.tokens[1:].tolist() == ([6, 30] if is_shared else [])
    drafter.allocate(2, 64)
    drafter.start([third])
    assert drafter.propose([third])[0].tree.num_draft_tokens == 0, "another run has begun"


def test_a_prompt_is_read_by_the_first_draft() -> None:
    """A long one takes a while, and drafts may never pay; then all of the text is read at once."""
    drafter = SuffixDrafter(SuffixOptions(max_tokens=4))
    prompt = make_text("passages")
    request = make_active(prompt, 0)
    drafter.start([request])
    text = drafter._texts[0]
    request.emit([9, 9])
    assert text.tree.text == []
    request.emit(prompt[:3])
    for _ in range(2):
        (found,) = drafter.propose([request])
        assert text.tree.text == [*prompt, *request.output_ids]
        assert found.tree.tokens[0] == request.output_ids[-1]
        request.emit([prompt[3]])


def test_drafts_grow_with_what_was_found_and_end_with_the_request() -> None:
    for factor, limit, expected in ((1.0, 20, 2), (2.0, 20, 4), (0.2, 20, 0), (2.0, 5, 2)):
        drafter = SuffixDrafter(SuffixOptions(max_tokens=6, max_factor=factor))
        drafter.allocate(1, 64)
        request = make_active([1, 2, 3, 4, 5, 6, 7, 8], 0, limit)
        drafter.start([request])
        request.emit([2, 3])
        (found,) = drafter.propose([request])
        assert found.tree.num_draft_tokens == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"suffix_max_depth": 4}, "without --suffix-max-tokens"),
        ({"suffix_share_requests": True}, "without --suffix-max-tokens"),
        ({"suffix_max_tokens": 4, "suffix_max_cached_tokens": 9}, "without --suffix-share"),
        ({"suffix_max_tokens": 4, "suffix_max_factor": 0.0}, "--suffix-max-factor is 0"),
        ({"suffix_max_tokens": 4, "suffix_max_factor": float("nan")}, "--suffix-max-factor is"),
        ({"suffix_max_tokens": 4, "suffix_min_probability": 1.5}, "--suffix-min-probability is"),
    ],
)
def test_what_is_written_wrong(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_options(RunSettings(engine_dir=Path("e"), **flags))
    assert message in caught.value.message


def test_options_are_read() -> None:
    assert read_options(RunSettings(engine_dir=Path("e"))) is None
    given = RunSettings(
        engine_dir=Path("e"), suffix_max_tokens=7, suffix_min_probability=0.0,
        suffix_share_requests=True,
    )  # fmt: skip
    assert read_options(given) == SuffixOptions(
        max_tokens=7, min_probability=0.0, max_cached_tokens=100_000
    )


# ---- The file that keeps texts between runs.

VOCABULARY = {"vocab_size": 100}


def finish(drafter: SuffixDrafter, tokens: list[int], output: list[int]) -> None:
    request = Request(
        index=0, input_ids=tokens, max_output_len=len(output) + 1, end_ids=frozenset()
    )
    active = ActiveRequest(request, 0, max_depth=4, text_stream=None)
    drafter.start([active])
    active.emit(output)
    active.finish_reason = "length"


def test_texts_are_kept_between_runs(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    options = SuffixOptions(max_tokens=4, max_cached_tokens=100, cache=path)
    first = SuffixDrafter(options, VOCABULARY)
    first.allocate(1, 100)
    finish(first, [7, 8, 9], [10, 11, 12])
    first.keep()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    second = SuffixDrafter(options, VOCABULARY)
    for _ in range(2):  # another batch forgets nothing
        second.allocate(1, 100)
        request = Request(index=0, input_ids=[1, 8, 9], max_output_len=9, end_ids=frozenset())
        active = ActiveRequest(request, 0, max_depth=4, text_stream=None)
        second.start([active])
        active.emit([10])
        (found,) = second.propose([active])
        assert found.tree.tokens.tolist() == [10, 11, 12]
    second.keep()
    assert read_texts(path, VOCABULARY, 100) == [[7, 8, 9, 10, 11, 12]]
    assert [p.name for p in tmp_path.iterdir()] == ["cache"]


def test_the_oldest_texts_leave_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    for first in range(6):
        add_texts(path, [[first] * 9], VOCABULARY, 30)
    assert read_texts(path, VOCABULARY, 30) == [[n] * 9 for n in (3, 4, 5)]
    assert read_texts(path, VOCABULARY, 12) == [[5] * 9]
    add_texts(path, [list(range(90))], VOCABULARY, 30)
    assert read_texts(path, VOCABULARY, 30) == [list(range(61, 90))]


def add_many(path: Path, first: int) -> None:
    for number in range(20):
        add_texts(path, [[first, number]], VOCABULARY, 1000)


def test_two_processes_add_at_once(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=add_many, args=(path, first)) for first in (1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert sorted(read_texts(path, VOCABULARY, 1000)) == [[f, n] for f in (1, 2) for n in range(20)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header, data: (None, b"some text"), "is not a file of texts"),
        (lambda header, data: (header | {"version": 2}, data), "is of version 2"),
        (lambda header, data: (header | {"vocabulary": {}}, data), "of another tokenizer"),
        (lambda header, data: (header, data[:-4]), "checksum is another"),
        (lambda header, data: (header, data + data), "checksum is another"),
    ],
)
def test_a_file_is_checked(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "cache"
    add_texts(path, [[1, 2, 3]], VOCABULARY, 100)
    line, _, data = path.read_bytes().partition(b"\n")
    header, data = change(json.loads(line), data)
    path.write_bytes((json.dumps(header).encode() + b"\n" if header else b"") + data)
    with pytest.raises(SpecDecError, match=message):
        SuffixDrafter(SuffixOptions(max_tokens=4, max_cached_tokens=9, cache=path), VOCABULARY)
    with pytest.raises(SpecDecError, match=message):
        add_texts(path, [[1]], VOCABULARY, 100)


def test_tokens_beyond_the_vocabulary_are_no_texts(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    add_texts(path, [[1, 2, 300]], VOCABULARY, 100)
    with pytest.raises(SpecDecError, match="not texts"):
        read_texts(path, VOCABULARY, 100)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "cache"
    with pytest.raises(SpecDecError, match="cannot be written"):
        SuffixDrafter(SuffixOptions(max_tokens=4, max_cached_tokens=9, cache=path), VOCABULARY)
