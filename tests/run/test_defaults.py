"""Drafts without a flag: by suffixes, before an engine's drafter or alone, while they pay."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from specdec import Engine, Prompt
from specdec.decode import cost_keeping
from specdec.decode import engine as engine_module
from specdec.decode.drafters import Drafting
from specdec.decode.drafters.defaults import EXCLUSIONS, Situation, add_suffixes
from specdec.decode.drafters.paced import PacedDrafter
from specdec.decode.engine import SHORT_TEXT, TorchEngine, load_engine
from specdec.decode.requests import Request
from specdec.decode.sampling import SamplingParams
from specdec.engine.layout import read_engine_config
from specdec.errors import UsageError
from specdec.measure.engine import open_bench
from specdec.methods.budget import DraftBudget
from specdec.methods.suffix import DEFAULT_TOKENS
from specdec.run.settings import RunSettings
from specdec.verify.engine import draft_always
from specdec.verify.settings import VerifySettings
from tests.conftest import make_llama
from tests.costs import make_costs
from tests.engines import call, call_here, make_counter, run_cli_here
from tests.forks import fork, run_main
from tests.methods import build_methods

NO_ROOM = ("--max-batch-size", 8, "--max-num-tokens", 8)
COUNTED = [*range(3, 32), 0, 1, 2, *range(3, 9)]  # the counter goes on, and has done so before


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that counts, in engines without a drafter; another, with a ReDrafter's."""
    parent = tmp_path_factory.mktemp("defaults")
    make_counter(parent)
    call("convert", "--model-dir", parent / "counter", "--output-dir", parent / "ckpt")
    small = ("--max-batch-size", 8, "--max-num-tokens", 24)
    modes = {"lookahead": ("--speculative-decoding-mode", "lookahead_decoding"),
             "external": ("--speculative-decoding-mode", "draft_tokens_external")}  # fmt: skip
    for name, flags in {"plain": (), "narrow": NO_ROOM, "small": small, **modes}.items():
        if name in modes:
            flags = (*flags, "--max-draft-len", 5)
        call("build", "--checkpoint-dir", parent / "ckpt", "--output-dir", parent / name, *flags)
    build_methods(make_llama(parent, seed=3), "redrafter")
    return parent


def load(parent: Path, name: str, **options: Any) -> TorchEngine:
    speaks = RunSettings(engine_dir=parent / name, device="cpu", input_text=["a"], **options)
    return load_engine(speaks, None)


def make_requests(max_output_len: int = 40, **sampling: Any) -> list[Request]:
    return [
        Request(
            index=index, input_ids=[token % 32 for token in COUNTED[index:]],
            max_output_len=max_output_len, end_ids=frozenset(),
            sampling=SamplingParams(seed=index, **sampling),
        )
        for index in range(3)
    ]  # fmt: skip


# By the engine and the options: the method. Flags speak for themselves.
CASES: tuple[tuple[str, Mapping[str, Any], str], ...] = (
    ("plain", {}, "suffix"),
    ("external", {}, "suffix"),
    ("small", {}, "suffix"),
    ("redrafter-engine", {}, "suffix,redrafter"),
    ("plain", {"draft_budget": "auto"}, "suffix"),
    ("plain", {"draft_len": "auto"}, "suffix"),
    ("redrafter-engine", {"draft_len": "auto"}, "suffix,redrafter"),
    ("redrafter-engine", {"redrafter_tree_tokens": 9}, "redrafter"),
    ("redrafter-engine", {"draft_chain": "redrafter"}, "redrafter"),
    ("redrafter-engine", {"suffix_max_tokens": 4}, "suffix"),
    ("redrafter-engine", {"draft_chain": "suffix+redrafter", "suffix_max_tokens": 4},
     "suffix+redrafter"),
    ("plain", {"prompt_lookup_num_tokens": 4}, "prompt_lookup"),
    ("redrafter-engine", {"draft_budget": "fixed"}, "redrafter"),
    ("redrafter-engine", {"acceptance_output": Path("counts.json")}, "redrafter"),
    ("plain", {"acceptance_output": Path("counts.json")}, "plain"),
    ("lookahead", {}, "lookahead"),
    ("narrow", {}, "plain"),
    ("plain", {"no_speculation": True}, "plain"),
    ("redrafter-engine", {"no_speculation": True}, "plain"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "options", "method"), CASES)
def test_who_drafts(parent: Path, name: str, options: Mapping[str, Any], method: str) -> None:
    engine = load(parent, name, **options)
    assert engine.method == engine.describe()["method"] == method
    engine.close()


def test_every_reason_excludes_by_itself(parent: Path) -> None:
    """Those of other devices and backends too; and in no other situation."""
    plain, none = read_engine_config(parent / "plain"), Drafting(options={}, flags={})
    networks = dataclasses.replace(plain, has_fixed_drafts=True)
    situations = (
        Situation(plain, dataclasses.replace(none, options={"suffix": None}), "cpu"),
        Situation(plain, dataclasses.replace(none, budget=DraftBudget("fixed")), "cpu"),
        Situation(plain, dataclasses.replace(none, counts_own=True), "cpu"),
        Situation(networks, none, "cpu"),
        Situation(read_engine_config(parent / "lookahead"), none, "cpu"),
        Situation(read_engine_config(parent / "narrow"), none, "cpu"),
        Situation(plain, none, "cuda"),
    )
    for (reason, _), situation in zip(EXCLUSIONS, situations, strict=True):
        reasons = [name for name, excludes in EXCLUSIONS if excludes(situation)]
        assert reasons == [reason]
        assert add_suffixes(**vars(situation)) is situation.drafting
    chosen = add_suffixes(plain, none, "cpu")
    assert chosen.options["suffix"].max_tokens == DEFAULT_TOKENS
    assert chosen.chain is None, "nothing else drafts"
    small = add_suffixes(read_engine_config(parent / "small"), none, "cpu")
    assert small.options["suffix"].max_tokens == 2, "24 tokens a step for 8 requests"


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 3}], ids=str)
@pytest.mark.parametrize("name", ["plain", "redrafter-engine"])
def test_texts_are_plain_decodings(parent: Path, name: str, sampling: dict[str, Any]) -> None:
    """Sampled ones of equal seeds too: each token is the target's own choice."""
    requests, texts = make_requests(**sampling), {}
    for options in ({}, {"no_speculation": True}):
        engine = load(parent, name, **options)
        results = engine.generate(requests)
        texts[engine.method] = [result.output_ids for result in results]
        num_drafted = sum(result.stats.num_drafted_steps for result in results)
        assert (num_drafted > 0) == (not options)
        engine.close()
    first, second = texts.values()
    assert first == second


class Costs:
    """Counts of what was looked for and what was measured, of a machine that kept nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_measured = 0
        monkeypatch.setattr(engine_module, "find_costs", self.measure)
        monkeypatch.setattr(engine_module, "find_kept_costs", lambda *_: None)

    def measure(self, *given: Any) -> Any:
        self.num_measured += 1
        return make_costs(len(given[3]))


def test_short_texts_wait_for_no_measuring(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = Costs(monkeypatch)
    with Engine.load(parent / "plain", device="cpu") as engine:
        prompt = Prompt(token_ids=COUNTED)
        (short,) = engine.generate([prompt], max_output_len=SHORT_TEXT, end_ids=())
        assert (costs.num_measured, short.stats.num_drafted_steps) == (0, 0)
        list(engine.stream(prompt, max_output_len=SHORT_TEXT, end_ids=()))
        options: Any = {"max_output_len": 99, "end_ids": ()}
        engine.generate([Prompt(token_ids=COUNTED, speculation=False)], **options)
        assert costs.num_measured == 0, "nor does one for which nothing is to draft"
        origins = [o for e in engine.stream(prompt, **options) for o in e.origins]
        assert costs.num_measured == 1
        assert "draft" in origins
        (again,) = engine.generate([prompt], max_output_len=SHORT_TEXT, end_ids=())
        assert (costs.num_measured, again.stats.num_drafted_steps > 0) == (1, True)
        assert again.token_ids == short.token_ids
        assert engine.describe()["method"] == "suffix"
    with Engine.load(parent / "plain", device="cpu") as engine:
        engine.generate([prompt] * 3, max_output_len=SHORT_TEXT // 2, end_ids=())
        assert costs.num_measured == 2, "together they are long"
    with Engine.load(parent / "plain", device="cpu") as engine:
        drafted = Prompt(token_ids=COUNTED, speculation={"method": "suffix"})
        (named,) = engine.generate([drafted], max_output_len=20, end_ids=())
        assert (costs.num_measured, named.stats.num_drafted_steps > 0) == (3, True)


def test_all_others_measure_as_they_load(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter was asked for by the build, a method by its flag; a server and bench have time."""
    costs = Costs(monkeypatch)
    with Engine.load(parent / "redrafter-engine", device="cpu"):
        assert costs.num_measured == 1
    with Engine.load(parent / "plain", device="cpu", suffix_max_tokens=4):
        assert costs.num_measured == 2
    settings = RunSettings(engine_dir=parent / "plain", device="cpu")
    with Engine.open(settings):
        assert costs.num_measured == 3
    bench = open_bench(settings)
    assert isinstance(bench.engine.drafter, PacedDrafter)
    assert (costs.num_measured, bench.engine.method) == (4, "suffix")
    bench.engine.close()


def test_a_dry_run_measures_nothing(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with a drafter or without, a method that is asked for, and one in a line."""
    costs = Costs(monkeypatch)
    line = {"input_ids": COUNTED, "max_output_len": 99, "speculation": {"method": "suffix"}}
    (tmp_path / "p.jsonl").write_text(json.dumps(line))
    for name, flags, method in (
        ("plain", (), "suffix"), ("plain", ("--suffix-max-tokens", 4), "suffix"),
        ("redrafter-engine", (), "suffix,redrafter"),
    ):  # fmt: skip
        report = call_here("run", [
            "--engine-dir", parent / name, "--input-file", tmp_path / "p.jsonl", "--device", "cpu",
            "--dry-run", *flags,
        ])  # fmt: skip
        assert (report["dry_run"], report["method"]) == (True, method)
    assert costs.num_measured == 0


def test_the_command_says_what_was_drafted(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs are measured for a long text only; there in a process, which measures them really."""
    (tmp_path / "p.jsonl").write_text(json.dumps({"input_ids": COUNTED}))
    flags = ["--engine-dir", parent / "plain", "--input-file", tmp_path / "p.jsonl"]
    flags += ["--device", "cpu", "--max-output-len"]
    with monkeypatch.context() as patch:
        costs = Costs(patch)
        short = run_cli_here("run", *flags, 30)
    assert (short.returncode, costs.num_measured) == (0, 0)
    assert "nothing drafts for these short texts" in short.stderr
    assert "suffix on cpu" in short.stderr
    assert "nothing drafted: the speed is plain decoding's" in short.stderr

    def measure() -> None:
        for name in ("find_costs", "find_kept_costs"):
            setattr(engine_module, name, getattr(cost_keeping, name))
        run_main("run", *flags, 99, "--json")

    long, messages = fork(measure).communicate(timeout=600)
    assert "what drafts cost here is measured" in messages
    plain = run_cli_here("run", *flags, 99, "--json", "--no-speculation")
    drafted, plain = json.loads(long), json.loads(plain.stdout)
    assert drafted["outputs"][0]["output_ids"] == plain["outputs"][0]["output_ids"]
    stats = drafted["stats"]
    assert stats["load_seconds"] > stats["generate_seconds"], "measuring is a part of loading"


@pytest.mark.thorough
def test_verify_drafts_what_a_run_does(parent: Path) -> None:
    """In every step; a plain engine's suffixes, unless plain decoding is asked for."""
    flags: dict[str, Any] = {"engine_dir": parent / "plain", "model_dir": "m", "device": "cpu"}
    engine = read_engine_config(parent / "plain")
    drafting = draft_always(VerifySettings(**flags), engine)
    assert vars(drafting)["suffix_max_tokens"] == DEFAULT_TOKENS
    assert vars(drafting)["draft_budget"] == "fixed"
    plain = VerifySettings(**flags, no_speculation=True)
    assert draft_always(plain, engine) is plain
    narrow = read_engine_config(parent / "narrow")
    assert draft_always(drafted := VerifySettings(**flags), narrow) is drafted
    checked = ["--engine-dir", parent / "plain", "--model-dir", parent / "counter"]
    for more, method in (([], "suffix"), (["--no-speculation"], "plain")):
        report = call_here("verify", [*checked, *more, "--max-output-len", 40])
        assert (report["verdict"], report["method"]) == ("exact", method)
        assert bool(report["num_drafted_steps"]) == (method == "suffix")
    with pytest.raises(UsageError, match="--suffix-max-tokens has no effect with --no-specul"):
        call("verify", *checked, "--no-speculation", "--suffix-max-tokens", 3)
