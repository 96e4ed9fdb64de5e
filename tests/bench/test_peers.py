"""benchmarks/peers.py without any peer: turns, texts, exports, and peers that fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import drafters
from benchmarks import peers as command
from benchmarks.side_by_side import install, models
from benchmarks.side_by_side.processes import PeerError, Worker, count_group_seconds, run_logged
from benchmarks.side_by_side.rounds import Work, compare, describe_ways, measure_ways
from benchmarks.side_by_side.ways import SearchShape, Way, list_ways, name_chain
from benchmarks.side_by_side.wire import cut_at_end
from benchmarks.side_by_side.workers import engine as engine_worker
from benchmarks.side_by_side.workers.transformers_models import Models as Transformers
from specdec.measure.measure import summarize
from tests.conftest import ROOT, make_llama, make_tokenizer
from tests.costs import make_costs

WORK = Work(
    prompts=[[1, 2], [3]], long_prompt=[1] * 9, max_output_len=16, end_id=0, rounds=3
)  # fmt: skip
WAYS = (
    Way("a", "a", "plain"),
    Way("b", "b", "plain"),
    Way("b", "b", "draft", ({}, {"length": 2}, {"length": 4})),
)


class FakeWorker:
    """Answers at once, as fast as its setting is long; dies at some call."""

    def __init__(self, labels: list[str], dies_at: int | None = None) -> None:
        self.labels, self.dies_at, self.num_calls = labels, dies_at, 0
        self.lengths: list[int] = []
        self.about = {
            "load_seconds": 0.5, "start_seconds": 1.0, "versions": {"x": "1"}, "computes_in": "y",
        }  # fmt: skip
        self.group = -1

    def call(self, name: str, **settings: Any) -> dict[str, Any]:
        self.num_calls += 1
        if self.dies_at is not None and self.num_calls >= self.dies_at:
            raise PeerError("ended with status -9: Killed")
        prompts, limit = settings["prompts"], settings["max_output_len"]
        self.labels.append(f"{settings['way']} {limit}")
        length = settings["setting"].get("length", 1)
        self.lengths.append(length)
        return {
            "seconds": 1.0 / (length if isinstance(length, int) else 2),
            "num_tokens": limit * len(prompts),
            "texts": [[7] * limit for _ in prompts],
            "acceptance_length": 2.0,
            "step_ms": {"draft": 0.1, "verify": 1.0, "accept": 0.05, "other": 0.05},
        }

    def end(self) -> None:
        pass


def test_all_take_turns_and_each_takes_its_fastest_setting() -> None:
    labels: list[str] = []
    worker = FakeWorker(labels)
    measured = measure_ways(WAYS, {"a": worker, "b": worker}, {}, WORK)
    assert [way.setting for way in measured] == [{}, {}, {"length": 4}]
    assert [row["tokens_per_second"] for row in measured[2].tuning] == [16.0, 32.0, 64.0]
    tuning, rounds = labels[:12], [call for call in labels[12:] if not call.endswith(" 1")]
    assert tuning == ["draft 8", "draft 16"] * 6, "each setting warms up, twice"
    assert worker.lengths[1:12:2] == [1, 2, 4, 4, 2, 1], "there and back"
    forth = ["plain 16", "plain 16", "draft 16"]
    assert rounds == [*forth, *forth, *forth[::-1], *forth], "one to warm up, then there and back"
    rows = describe_ways(measured)
    assert rows[2]["tokens_per_second"] == summarize([128.0] * 3)
    assert len(measured[0].first_token_seconds) == 3
    assert "first_token_seconds" in rows[0]
    assert "first_token_seconds" not in rows[2]


def test_a_peer_that_dies_has_its_reason_and_the_others_go_on() -> None:
    workers = {"a": FakeWorker([]), "b": FakeWorker([], dies_at=9)}
    rows = describe_ways(measure_ways(WAYS, workers, {}, WORK))
    assert rows[0]["error"] is None
    assert rows[0]["texts"]["of_own_plain"]["equal"] == 2
    assert [row["error"] for row in rows[1:]] == ["ended with status -9: Killed"] * 2
    assert "rates" not in rows[1]
    rows_of_one_peer = describe_ways(
        measure_ways(WAYS, {"a": workers["a"]}, {"b": "no wheel"}, WORK)
    )
    assert [row["error"] for row in rows_of_one_peer] == [None, "no wheel", "no wheel"]


def test_texts_are_compared() -> None:
    assert compare([[1, 2], [3]], [[1, 2], [3]]) == {"compared": 2, "equal": 2}
    comparison = compare([[1], [1, 2, 3]], [[1], [1, 2]])
    assert comparison == {"compared": 2, "equal": 1, "first_difference": {"prompt": 1, "token": 2}}
    assert compare([[1, 5, 3]], [[1, 2, 3]])["first_difference"] == {"prompt": 0, "token": 1}
    assert cut_at_end([4, 5, 0, 6], 0) == [4, 5]
    assert cut_at_end([4, 5], 0) == [4, 5]


SERVER = """
import sys
from side_by_side.wire import serve
def start(**settings):
    print("noise of a library")
    def double(number): return {"number": 2 * number}
    def die(): print("out of cheese", file=sys.stderr); sys.exit(3)
    def sleep(): __import__("time").sleep(60)
    def work(): return {"sum": sum(range(5_000_000))}
    if settings.get("fails"): raise RuntimeError("no such model")
    return {"settings": settings}, {"double": double, "die": die, "sleep": sleep, "work": work}
serve(start)
"""


def start_worker(folder: Path, timeout: float = 300.0, **settings: Any) -> Worker:
    command = [sys.executable, "-c", SERVER]
    return Worker("x", command, settings, folder / "log", threads=1, timeout=timeout)


def test_workers(tmp_path: Path) -> None:
    """Calls are answered, failures told, and death is told with the log's last line."""
    worker = start_worker(tmp_path, size=3)
    assert worker.about["settings"] == {"size": 3}
    assert worker.call("double", number=4) == {"number": 8}
    with pytest.raises(PeerError, match="KeyError"):
        worker.call("halve")
    assert worker.call("double", number=1) == {"number": 2}
    worker.call("work")  # the system counts hundredths of a second
    assert count_group_seconds([worker.group]) > 0
    with pytest.raises(PeerError, match="ended with status 3: out of cheese"):
        worker.call("die")
    with pytest.raises(PeerError, match="ended with status 3"):
        worker.call("double", number=1)
    worker.end()
    assert count_group_seconds([worker.group]) == 0
    with pytest.raises(PeerError, match="no such model"):
        start_worker(tmp_path, fails=True)
    slow = start_worker(tmp_path)
    slow._timeout = 0.1
    with pytest.raises(PeerError, match="no answer within 0 s"):
        slow.call("sleep")
    slow._process.kill()
    slow.end()


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="installing x, status 1: no space left"):
        run_logged(
            [sys.executable, "-c", "exit('no space left')"], tmp_path / "log", "installing x"
        )
    with pytest.raises(PeerError, match="installing y: .*No such file"):
        run_logged([tmp_path / "nowhere"], tmp_path / "log", "installing y")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("peers")
    folder = make_llama(parent, seed=3, dtype="bfloat16", rope_theta=5000.0)
    make_tokenizer(folder)
    return folder


@pytest.mark.thorough
def test_our_engine_and_transformers_as_workers(
    engine: Path, pair: tuple[Path, Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ways of both decode the same prompts to the same texts, in float32."""
    monkeypatch.setattr(drafters, "measure_costs", lambda _, groups: make_costs(len(groups)))
    prompts = [[5, 9, 20], [7, 3]]
    common: dict[str, Any] = {"prompts": prompts, "max_output_len": 12, "end_id": 0}
    about, calls = engine_worker.start(
        engine_dir=str(engine), draft_engine_dir=None, tokenizer_dir=str(folder / "target"),
        beams=[2], sizes=[4], max_length=3, threads=1,
    )  # fmt: skip
    assert about["computes_in"] == "float32"
    texts = calls["run"]("plain", {}, **common)["texts"]
    assert len(texts[1]) < len(texts[0]) == 12, "one ends by itself"
    shape = SearchShape(2, 3, 4)
    assert calls["run"]("redrafter", {"tree": str(shape)}, **common)["texts"] == texts
    tree = calls["run"]("redrafter", {"tree": "2 x 3"}, **common, batch_size=2)
    assert tree["texts"] == texts
    assert tree["num_tokens"] == sum(map(len, texts)) + 1, "the end is a token too"
    assert min(tree["step_ms"].values()) > 0
    about, calls = engine_worker.start(
        engine_dir=str(pair[0]), draft_engine_dir=str(pair[1]),
        tokenizer_dir=str(folder / "target"), beams=[], sizes=[3], max_length=3,
        threads=1,
    )  # fmt: skip
    for length in (2, "auto", "tree of 3"):
        answer = calls["run"]("draft-target", {"length": length}, **common)
        assert answer["texts"] == texts
    for name in ("3 tokens", "tree of 3"):
        chain = calls["run"]("chain", {"chain": name_chain(name)}, **common)
        assert chain["texts"] == texts
        assert chain["acceptance_length"] > (2.2 if name == "3 tokens" else 1.5)
    perfect = calls["run"]("draft-target", {"length": 2}, **common)
    assert perfect["acceptance_length"] > 2.2, "the target drafts for itself"
    transformers = Transformers(str(folder / "target"), str(folder / "target"), "float32")
    for way, setting in (
        ("plain", {}), ("assisted", {}), ("assisted", {"length": 2}),
        ("prompt lookup", {"length": 2}),
    ):  # fmt: skip
        answer = transformers.run(way, dict(setting), **common)
        assert answer["texts"] == texts, way
    assert transformers.run("assisted", {"length": 2}, **common)["acceptance_length"] > 2.2


def test_the_command(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From peers to JSON and tables: one has no wheel, one dies, and both are told."""

    def refuse(name: str, *_: Any) -> Path:
        if name == "openvino":
            raise PeerError("No matching distribution found")
        return Path(sys.executable)

    paths = models.Models(tmp_path, target, target, target)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def add(a, b): return a + b, and so on"}\n' * 4)
    monkeypatch.setattr(models, "prepare_models", lambda *_: paths)
    monkeypatch.setattr(models, "find_shortage", lambda *_: [])
    monkeypatch.setattr(install, "install_peer", refuse)
    monkeypatch.setattr(
        command, "list_settings", lambda peer, *_: {n: {} for n in command.MODULES if peer in n}
    )
    dies_at = {"llama.cpp": 4}
    monkeypatch.setattr(
        command, "make_starter", lambda name, *_: lambda: FakeWorker([], dies_at.get(name))
    )
    words = ["--size", "pycode", "--folder", str(tmp_path), "--prompt-file", str(prompts),
             "--long-prompt", "8", "--lengths", "2,4", "--prompts", "2",
             "--rounds", "2"]  # fmt: skip
    command.main(words)
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "peers-pycode.json").read_text())
    by_way = {f"{row['peer']}: {row['way']}": row for row in report["ways"]}
    assert len(by_way) == 11
    assert by_way["openvino: plain"]["error"] == "No matching distribution found"
    assert by_way["llama.cpp: plain"]["error"] == "ended with status -9: Killed"
    assert by_way["specdec: draft-target"]["setting"] == {"length": 4}
    assert report["peers"]["openvino"] == {"error": "No matching distribution found"}
    assert "No matching distribution found" in printed
    command.main(["--report", str(tmp_path / "peers-pycode.json")])
    assert capsys.readouterr().out == printed


def test_a_machine_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "read_memory", lambda _: 3 * 10**9)
    (shortage, *_) = models.find_shortage(models.SIZES["full"], tmp_path)
    assert shortage == "20 GB of free memory are needed, there are 3.0"
    with pytest.raises(SystemExit, match="error: 20 GB of free memory"):
        command.main(["--folder", str(tmp_path)])


def test_settings_of_the_command() -> None:
    assert command.read_trees("1x3, 8x5/15") == [SearchShape(1, 3), SearchShape(8, 5, 15)]
    for text in ("", "3", "0x1", "1x3,", "8x5/", "8x5/0"):
        with pytest.raises(Exception, match="is not of the form 1x3,8x5/15"):
            command.read_trees(text)
    for text in ("8x5/5", "8x5/40"):
        with pytest.raises(Exception, match="from 8 x 5: it has more than a beam and fewer"):
            command.read_trees(text)
    with pytest.raises(Exception, match="is not of the form 2,4"):
        command.read_lengths("2,,4")
    ways = list_ways(["specdec", "openvino"], [SearchShape(1, 3)], [2, 4], [7])
    assert ways[-1].settings == ({"length": 2}, {"length": 4}), "others have no trees"
    ways = ways[:4]
    assert [way.name for way in ways] == ["plain", "redrafter", "draft-target", "chain"]
    assert ways[2].settings == (
        {"length": 2}, {"length": 4}, {"length": "auto"}, {"length": "tree of 7"},
    )  # fmt: skip
    drafts = ("2 tokens", "4 tokens", "tree of 7")
    assert ways[3].settings == tuple({"chain": name_chain(name)} for name in drafts)
    assert (ROOT / "benchmarks" / "peers.py").is_file()
