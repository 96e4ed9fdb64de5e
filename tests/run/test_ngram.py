"""The n-gram table: its counts, its file, what is drafted from it, and who drafts by default."""

from __future__ import annotations

import collections
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec import Engine, Prompt
from specdec.decode.drafters import defaults
from specdec.decode.drafters.ngram import LEAST_CHANCE, NgramDrafter
from specdec.decode.requests import ActiveRequest, Request
from specdec.errors import SpecDecError
from specdec.files.ngram_limits import MAX_ORDER
from specdec.files.ngrams import SHARE_STEPS, NgramTable, hash_tokens, read_ngrams
from specdec.methods.ngram import NgramOptions
from specdec.options import get_flags
from specdec.train.ngrams.counts import LEAST_SHARE, count_ngrams, join_texts, make_table
from specdec.train.ngrams.pipeline import read_texts
from specdec.train.ngrams.settings import NgramTableSettings
from tests.conftest import make_llama, make_tokenizer
from tests.engines import call, make_counter, run_cli_here
from tests.methods import count_table as count_table_of

VOCABULARY = 9


def make_corpus(seed: int, num_texts: int = 12) -> list[list[int]]:
    dice = random.Random(seed)
    return [
        [
            dice.choice((0, 0, 1, 2, dice.randrange(VOCABULARY)))
            for _ in range(dice.randrange(1, 60))
        ]
        for _ in range(num_texts)
    ]


def count_table(texts: Sequence[Sequence[int]], max_order: int, **options: Any) -> NgramTable:
    corpus = join_texts([np.array(text) for text in texts])
    settings = {"min_count": 1, "num_continuations": 20, "least_news": 0.0, **options}
    orders = count_ngrams(corpus, max_order=max_order, **settings)
    return make_table(orders, num_tokens=VOCABULARY, sha256="none")


def interpolate(texts: Sequence[Sequence[int]], context: tuple[int, ...]) -> dict[int, float]:
    """Witten and Bell's shares, by the definition."""
    size, followers = len(context), collections.Counter[int]()
    for text in texts:
        for end in range(size, len(text)):
            if tuple(text[end - size : end]) == context:
                followers[text[end]] += 1
    shorter = interpolate(texts, context[1:]) if size > 1 else {}
    total, kinds = followers.total(), len(followers)
    if not total:
        return shorter
    return {
        token: (followers[token] + kinds * shorter.get(token, 0.0)) / (total + kinds)
        for token in {*followers, *shorter}
    }


@pytest.mark.parametrize("seed", range(4))
def test_shares_are_those_of_the_definition(seed: int) -> None:
    """For every context of the corpus, and for some that it does not have."""
    texts, max_order = make_corpus(seed), 3
    table = count_table(texts, max_order)
    contexts = {
        tuple(text[max(0, end - max_order) : end]) for text in texts for end in range(1, len(text))
    } | {(8, 8, 8), (8,)}
    for context in contexts:
        expected = {
            token: share
            for token, share in interpolate(texts, context).items() if share >= LEAST_SHARE
        }  # fmt: skip
        shares = dict(table.find(context))
        assert shares.keys() == expected.keys(), context
        for token, share in shares.items():
            assert share == pytest.approx(expected[token], abs=0.5 / SHARE_STEPS + 1e-9)
        assert [*shares.values()] == sorted(shares.values(), reverse=True)


def test_what_tells_little_is_left_out() -> None:
    texts = make_corpus(1, 40)
    whole = count_table(texts, 3)
    frequent = count_table(texts, 3, min_count=3)
    newsworthy = count_table(texts, 3, least_news=0.2)
    short = count_table(texts, 3, num_continuations=2)
    assert len(frequent.keys) < len(whole.keys) > len(newsworthy.keys)
    assert short.counts.max() == 2 < whole.counts.max()
    assert {*newsworthy.keys.tolist()} < {*whole.keys.tolist()}
    assert newsworthy.find([8, 7, 0]) == newsworthy.find([7, 0]) or whole.find([7, 0])


def make_request(prompt: Sequence[int], output: Sequence[int], length: int = 40) -> ActiveRequest:
    request = Request(index=0, input_ids=[*prompt], max_output_len=length, end_ids=frozenset())
    active = ActiveRequest(request, 0, max_depth=8, text_stream=None)
    active.output_ids.extend(output)
    return active


@pytest.mark.parametrize("max_tokens", [1, 3, 12])
def test_the_likeliest_paths_are_drafted(max_tokens: int) -> None:
    """The nodes are the likeliest paths of all: none that was left out is likelier."""
    table = count_table(make_corpus(2, 30), 3)
    drafter = NgramDrafter(NgramOptions(path=Path("none"), max_tokens=max_tokens), table)
    (candidates,) = drafter.propose([make_request([5, 0, 1], [0])])
    tree, shares = candidates.tree, candidates.confidence
    assert shares is not None
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, tree.num_nodes):
        parent = paths[int(tree.parents[node])]
        path = (*parent, int(tree.tokens[node]))
        paths.append(path)
        chances[path] = chances[parent] * float(shares[node])
        follow = dict(table.find([0, 1, 0, *parent]))
        assert float(shares[node]) == pytest.approx(follow[path[-1]])
        assert int(tree.depths[node]) == len(path)
    assert 1 <= tree.num_draft_tokens <= max_tokens
    least = min(chances.values())
    assert least >= LEAST_CHANCE
    if tree.num_draft_tokens == max_tokens:
        for path, chance in chances.items():
            for token, share in table.find([0, 1, 0, *path]):
                if len(path) < 8 and (*path, token) not in chances:
                    assert chance * share <= least + 1e-9


def test_no_more_is_drafted_than_may_be_emitted() -> None:
    drafter = NgramDrafter(NgramOptions(path=Path("none")), count_table(make_corpus(2), 2))
    for remaining, expected in ((1, 0), (2, 1), (3, 2)):
        (candidates,) = drafter.propose([make_request([0], [0], remaining + 1)])
        assert candidates.tree.num_draft_tokens == expected


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.safetensors"
    table = count_table(make_corpus(0), 2)
    table.write(path)
    assert read_ngrams(path).find([0, 1]) == table.find([0, 1])
    whole = path.read_bytes()
    changes: Mapping[str, bytes] = {
        "damaged": whole[:-3],
        "is no table of n-grams": whole.replace(b"specdec ngrams", b"another format"),
        "version": whole.replace(b'"version":"1"', b'"version":"7"'),
        "beyond the 3": whole.replace(b'"num_tokens":"9"', b'"num_tokens":"3"'),
        "max_order is 9": whole.replace(b'"max_order":"2"', b'"max_order":"9"'),
    }
    for fact, data in changes.items():
        assert data != whole
        path.write_bytes(data)
        with pytest.raises(SpecDecError, match=fact):
            read_ngrams(path)
    keys = table.keys.copy()
    keys[:2] = keys[1::-1]
    swapped = NgramTable(keys, table.counts, table.tokens, table.shares, 2, VOCABULARY, "none")
    swapped.write(path)
    with pytest.raises(SpecDecError, match="not in order"):
        read_ngrams(path)
    arrays = (table.keys[:0], table.counts[:0], table.tokens[:0], table.shares[:0])
    NgramTable(*arrays, 2, VOCABULARY, "none").write(path)
    with pytest.raises(SpecDecError, match="it has no contexts"):
        read_ngrams(path)


class Words:
    """A tokenizer of so many words."""

    def __init__(self, num_tokens: int, word: str = "w") -> None:
        self.words = [f"{word}{number}" for number in range(num_tokens)]

    def __len__(self) -> int:
        return len(self.words)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self.words[number] for number in ids]


def test_a_table_is_known_by_its_tokens() -> None:
    digest = hash_tokens(Words(100), 90)
    assert digest == hash_tokens(Words(300), 90), "more tokens after them change nothing"
    assert digest != hash_tokens(Words(100, "v"), 90)
    assert digest != hash_tokens(Words(70), 90), "some are absent"


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of a target that counts, and a table of a counting text."""
    parent = tmp_path_factory.mktemp("ngram")
    make_counter(parent)
    call("convert", "--model-dir", parent / "counter", "--output-dir", parent / "ckpt")
    call("build", "--checkpoint-dir", parent / "ckpt", "--output-dir", parent / "engine")
    text = [number % 32 for number in range(200)]
    count_table_of([text], 32).write(parent / "table.safetensors")
    return parent


def test_drafts_are_verified(counter: Path) -> None:
    """Texts are plain decoding's; what the table knows is accepted, and each step emits more."""
    prompts = [Prompt(token_ids=[3, 4, 5]), Prompt(token_ids=[30, 31])]
    with Engine.load(counter / "engine", device="cpu", speculation=False) as engine:
        plain = engine.generate(prompts, max_output_len=24, end_ids=[])
    table = counter / "table.safetensors"
    with Engine.load(
        counter / "engine", device="cpu", ngram_table=table, draft_budget="fixed"
    ) as engine:
        outputs = engine.generate(prompts, max_output_len=24, end_ids=[])
        assert engine.describe()["method"] == "ngram"
    for output, expected in zip(outputs, plain, strict=True):
        assert output.token_ids == expected.token_ids
        assert output.stats.acceptance_length > 5


def test_a_table_of_another_tokenizer_is_refused(counter: Path, tmp_path: Path) -> None:
    large = tmp_path / "large.safetensors"
    table = read_ngrams(counter / "table.safetensors")
    NgramTable(table.keys, table.counts, table.tokens, table.shares, 3, 10**6, "none").write(large)
    run = run_cli_here(
        "run", "--engine-dir", counter / "engine", "--input-file", write_ids(tmp_path),
        "--ngram-table", large,
    )  # fmt: skip
    assert run.returncode == 1
    assert "is of another tokenizer: its 1000000 tokens" in run.stderr
    assert "specdec-train ngrams" in run.stderr


def write_ids(folder: Path) -> Path:
    path = folder / "ids.jsonl"
    path.write_text(json.dumps({"input_ids": [1, 2]}) + "\n", encoding="utf-8")
    return path


def test_a_table_of_the_tokenizer_drafts_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defaults, "TABLES", tmp_path)
    assert defaults.find_table(Words(100)) is None
    table = count_table(make_corpus(0), 2)
    table.write(tmp_path / "a.safetensors")
    assert defaults.find_table(Words(100)) is None, "it is of another"
    NgramTable(
        table.keys, table.counts, table.tokens, table.shares, 2, 90, hash_tokens(Words(95), 90)
    ).write(tmp_path / "b.safetensors")
    assert defaults.find_table(Words(100)) == tmp_path / "b.safetensors"
    assert defaults.find_table(Words(89)) is None
    assert defaults.find_table(None) is None


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_llama(tmp_path_factory.mktemp("tokenizer"), seed=3)
    make_tokenizer(folder)
    return folder


def write_rows(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_the_answers_of_data_are_counted(tokenizer: Path, tmp_path: Path) -> None:
    """Not what users ask, nor prompts, nor answers that are not to be learned."""
    answer, silent = {"role": "assistant"}, {"role": "user", "content": "asked"}
    rows = (
        {"text": "a b c"}, {"prompt": "never", "completion": " d e"},
        {"messages": [silent, {**answer, "content": "f g"}, silent,
                      {**answer, "content": "unlearned", "weight": 0}]},
    )  # fmt: skip
    texts: list[str] = []
    paths = [write_rows(tmp_path / "rows.jsonl", *rows), tmp_path / "plain.txt"]
    paths[1].write_text("h i", encoding="utf-8")
    texts.extend(read_texts(paths))
    assert texts == ["a b c", " d e", "f g", "h i"]
    output = tmp_path / "table.safetensors"
    run = run_cli_here(
        "train", "ngrams", "--data", *paths, "--tokenizer-dir", tokenizer, "--output", output,
        "--min-count", 1, "--min-difference", 0, "--json",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert (report["texts"], report["bytes"]) == (4, output.stat().st_size)
    table = read_ngrams(output)
    assert sum(report["contexts"]) == len(table.keys)


@pytest.mark.parametrize(("name", "content", "fact", "hint"), [
    ("absent.jsonl", None, "does not exist", "check the path"),
    ("empty.jsonl", "", "is empty", "give a file"),
    ("table.csv", "a,b", "is none of .jsonl", "unpack or rewrite"),
    ("bad.jsonl", "{", "line 1 cannot be used", "write JSON objects"),
    ("latin.txt", "a\nb \udce9", "latin.txt line 2 is not UTF-8", "iconv"),
    ("short.jsonl", '{"text": ""}\n', "no n-gram", "give files with answers"),
])  # fmt: skip
def test_data_without_ngrams_is_refused(
    tokenizer: Path, tmp_path: Path, name: str, content: str | None, fact: str, hint: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content, encoding="utf-8", errors="surrogateescape")
    output = tmp_path / "table.safetensors"
    flags = ("--data", path, "--tokenizer-dir", tokenizer, "--output", output)
    run = run_cli_here("train", "ngrams", *flags)
    assert run.returncode == 1
    assert fact in run.stderr
    assert hint in run.stderr
    assert not output.exists()


def test_a_table_is_not_replaced_unasked(tokenizer: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", {"text": "a b c a b c"})
    output = tmp_path / "table.safetensors"
    output.write_bytes(b"kept")
    words = ("train", "ngrams", "--data", path, "--tokenizer-dir", tokenizer)
    run = run_cli_here(*words, "--output", output)
    assert (run.returncode, output.read_bytes()) == (1, b"kept")
    assert f"{output} exists" in run.stderr
    assert "replace it with --force" in run.stderr
    assert run_cli_here(*words, "--output", output, "--force").returncode == 0
    assert len(read_ngrams(output).keys) > 0
    elsewhere = tmp_path / "new" / "table.safetensors"
    assert run_cli_here(*words, "--output", elsewhere).returncode == 0
    assert elsewhere.read_bytes() == output.read_bytes()
    run = run_cli_here(*words, "--output", output / "table.safetensors")
    assert run.returncode == 1
    assert f"{output} is a file" in run.stderr


def test_limits_of_a_table_are_those_of_the_option(tmp_path: Path) -> None:
    """A file takes what the options let through, and not a token more."""
    flags = get_flags(NgramTableSettings)
    most = [flags[name][0].maximum for name in ("max_order", "max_continuations")]
    assert most == [MAX_ORDER, np.iinfo(np.uint8).max] == [MAX_ORDER, SHARE_STEPS]
    table = count_table(make_corpus(0), MAX_ORDER)
    table.write(path := tmp_path / "table.safetensors")
    assert read_ngrams(path).max_order == MAX_ORDER
    with pytest.raises(SpecDecError, match="made since"):
        table.write(path, force=False)
