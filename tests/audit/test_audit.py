"""The audit of our own server: clean runs say nothing, and each planted fault is seen.

SPECDEC_AUDIT_RUNS=20 also audits the pycode engines so often, with other methods, prompts and
lengths each time, and once more with drafters that were made for another base; docs/audit.md has
the record.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.audit import drafter
from specdec.audit import server as audited
from specdec.audit.pipeline import audit_server
from specdec.audit.settings import CHECKS, AuditSettings
from specdec.errors import SpecDecError
from tests.audit.faults import FAULTS, Spoil, mix_columns
from tests.audit.test_doubles import find_wrong, get
from tests.conftest import ROOT, change_tensors, make_llama, make_tokenizer
from tests.engines import call, make_engine, make_knowing_drafter, make_tree_engine
from tests.serve.servers import MODEL, make_served_engine, serve_here

PYCODE = ROOT / "examples" / "pycode"
NUM_RUNS = int(os.environ.get("SPECDEC_AUDIT_RUNS", "0"))
# Way -> what is converted alongside the target, and the server's options.
WAYS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "medusa": (["--medusa-model-dir", "medusa"], {}),
    "redrafter": (["--drafter-model-dir", "redrafter"], {}),
    "eagle": (["--eagle-model-dir", "eagle"], {}),
    "eagle3": (["--eagle-model-dir", "eagle3"], {}),
    "prompt lookup": ([], {"prompt_lookup_num_tokens": 6}),
}
EXTERNAL = ("--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 6)


def shift_layers(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Other layers of the target are read: each one further, as if counted from another end."""
    layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    layers[:] = [layer + 1 for layer in layers]


def shift_tokens(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Every drafted token is that of the place before."""
    d2t = tensors["d2t"]
    tokens = d2t + torch.arange(len(d2t))
    tensors["d2t"] = tokens.roll(1) - torch.arange(len(d2t))


# Way and what is spoiled -> how, in the drafter's config.json and tensors.
SPOILED: dict[tuple[str, str], Spoil] = {
    ("redrafter", "another base"): mix_columns,
    ("eagle", "another base"): mix_columns,
    ("eagle3", "another base"): mix_columns,
    ("eagle3", "wrong aux layers"): shift_layers,
    ("eagle3", "d2t"): shift_tokens,
}
TEXT_CHECKS = [
    name for name in CHECKS if name not in ("acceptance", "drafter")
]  # a random drafter knows nothing


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audited, "SETTLING", 0.0)
    monkeypatch.delenv("SPECDEC_API_KEY", raising=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_served_engine(tmp_path_factory.mktemp("audit"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("hello ab\nThe\n")
    return path


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[str]:
    with serve_here(folder, draft_budget="fixed") as (_, url):
        yield url


def audit(url: str, **settings: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"device": "cpu", "max_tokens": 24, **settings}
    return audit_server(AuditSettings(base_url=url, model=MODEL, **options))


def test_nothing_is_wrong(served: str, folder: Path, prompts: Path) -> None:
    """Against an engine of ours and against the server itself; all checks but of the drafter."""
    report = audit(served, reference_engine=folder, checks=TEXT_CHECKS, prompts=prompts)
    assert find_wrong(report) == {}
    assert report["verdict"] == "ok"
    greedy = get(report, "greedy")["evidence"]
    assert (greedy["compared_by"], greedy["equal"], greedy["tokens"]) == ("token ids", 2, 2 * 24)
    assert len(get(report, "stops")["evidence"]["stops"]) >= 8
    assert get(report, "stream")["evidence"]["skipped"] == []
    again = audit(served, reference_url=served, checks=["greedy"], prompts=prompts)
    assert (again["verdict"], again["prompts"]) == ("ok", 2)


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_the_server(
    name: str, served: str, folder: Path, tmp_path: Path
) -> None:  # fmt: skip
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello ab\n")
    plant, checks = FAULTS[name]
    prior_checks = ["stops", "limits"] if checks == ("usage",) else []
    with plant():
        report = audit(
            served, reference_engine=folder if "greedy" in checks else None, prompts=prompts,
            checks=[*checks, *prior_checks], max_tokens=16,
        )  # fmt: skip
    verdicts = find_wrong(report)
    assert set(checks) <= set(verdicts), report["checks"]
    assert report["verdict"] == "failed"


# --- drafters: a target that counts upwards, and an EAGLE-3 drafter that knows it ---


@pytest.fixture(scope="module")
def knowing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    parent = tmp_path_factory.mktemp("knowing")
    drafter = make_knowing_drafter(parent, "layers", size=128)
    engine = make_tree_engine("eagle", parent, parent / "counter", drafter)
    make_tokenizer(parent / "counter")
    with serve_here(engine, tokenizer_dir=str(parent / "counter"), draft_budget="fixed") as served:
        yield served


def audit_drafter(url: str, max_tokens: int = 32) -> dict[str, Any]:
    return get(audit(url, checks=["acceptance"], max_tokens=max_tokens), "acceptance")


def test_a_drafter_that_knows(knowing: tuple[Any, str]) -> None:
    check = audit_drafter(knowing[1])
    assert check["verdict"] == "ok", check
    assert check["evidence"]["acceptance_length"] > 3


@pytest.mark.thorough
def test_drafts_that_are_spoiled_now_and_then(
    knowing: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acceptance alone looks well; the same drafter in the reference does better."""
    monkeypatch.setattr(drafter, "NUM_PIECES", 16)
    server, url = knowing
    engine_drafter = find_drafter(server)
    propose = engine_drafter.propose

    def spoil(requests: Any) -> list[Any]:
        trees = propose(requests)
        for candidates in trees:
            tokens = candidates.tree.tokens
            tokens[1:] += (tokens[0] % 3 == 0) * 7
            tokens %= 128
        return trees

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"{letter}\n" for letter in "abcdefghijklmnop"))
    options = {"reference_engine": server._settings.engine_dir, "same_drafter": True,
             "tokenizer_dir": server._settings.tokenizer_dir, "prompts": prompts}  # fmt: skip
    for is_spoiled in (False, True):
        with swap(engine_drafter, "propose", spoil if is_spoiled else propose):
            report = audit(url, checks=["acceptance", "drafter"], max_tokens=8, **options)
        assert get(report, "acceptance")["verdict"] == "ok", report["checks"]
        check = get(report, "drafter")
        assert check["verdict"] == ("failed" if is_spoiled else "ok"), check
    evidence = check["evidence"]
    assert evidence["tokens_per_step"] < evidence["least_tokens_per_step"]
    assert f"{evidence['steps']} verify steps" in check["faults"][0]


def test_a_reference_without_a_drafter(knowing: tuple[Any, str], tmp_path: Path) -> None:
    target = make_llama(tmp_path)
    make_tokenizer(target)
    plain = make_engine(tmp_path, target, build=["--tokenizer-dir", target])
    with pytest.raises(SpecDecError, match="holds no drafter"):
        audit(knowing[1], checks=["drafter"], reference_engine=plain, same_drafter=True)


def find_drafter(server: Any) -> Any:
    """The drafter itself, after what the server's budget puts before it."""
    drafter = server.scheduler.engine._core.drafter
    return drafter.members[0] if drafter.members else drafter


@contextlib.contextmanager
def swap(thing: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(thing, name)
    setattr(thing, name, value)
    try:
        yield
    finally:
        setattr(thing, name, original)


@pytest.mark.thorough
def test_drafters_that_know_nothing(knowing: tuple[Any, str]) -> None:
    """A d2t one off, features of another base: the text is right, and slow.

    Drafts go pass by pass, since the one call of the kernels reads neither of Python.
    """
    server, url = knowing
    drafter = find_drafter(server)
    net = drafter.net
    off = torch.ones(128, dtype=torch.int64)
    off[-1] = -127
    original = net.make_features
    mixed = torch.randperm(256, generator=torch.Generator().manual_seed(3))
    faults: dict[str, Any] = {
        "d2t": (net, "offsets", off),
        "another base": (net, "make_features", lambda states: original(states[..., mixed])),
    }
    for name, fault in faults.items():
        with swap(drafter, "_packed", None), swap(*fault):
            check = audit_drafter(url)
        assert check["verdict"] in ("failed", "suspect"), (name, check)
        assert "accept" in check["faults"][0], name


def test_a_drafter_that_forgets(knowing: tuple[Any, str]) -> None:
    """Acceptance that collapses under way, and a position of the draft that is never right."""
    server, url = knowing
    drafter = find_drafter(server)
    propose, num_calls = drafter.propose, 0

    def spoil(trees: list[Any], depth: int) -> list[Any]:
        for candidates in trees:
            tree = candidates.tree
            deep = np.array([tree.depths[node] >= depth for node in range(tree.num_nodes)])
            tree.tokens[deep] = (tree.tokens[deep] + 7) % 128
        return trees

    def forget(requests: Any) -> list[Any]:
        nonlocal num_calls
        num_calls += 1
        return spoil(propose(requests), 1 if num_calls > 80 else 99)

    with swap(drafter, "propose", forget):
        check = audit_drafter(url)
    assert (check["verdict"], "collapses" in check["faults"][0]) == ("suspect", True), check
    with swap(drafter, "propose", lambda requests: spoil(propose(requests), 2)):
        check = audit_drafter(url)
    assert check["verdict"] == "suspect", check
    assert "position 1 accepts nothing" in check["faults"][0]


def test_a_server_without_speculation(folder: Path) -> None:
    with serve_here(folder, no_speculation=True) as (_, url):
        check = audit_drafter(url, 8)
    assert check["verdict"] == "failed"
    assert "the server does not speculate" in check["faults"][0]


# --- real drafters, when asked for ---

when_asked = pytest.mark.skipif(NUM_RUNS == 0, reason="SPECDEC_AUDIT_RUNS says how many runs")


def make_pycode_engine(
    folder: Path, options: list[str], parent: Path = PYCODE, build: tuple[object, ...] = ()
) -> Path:
    words = [parent / word if index % 2 else word for index, word in enumerate(options)]
    call(
        "convert", "--model-dir", PYCODE / "target", "--dtype", "float32", "--output-dir",
        folder / "checkpoint", *words,
    )  # fmt: skip
    call(
        "build", "--checkpoint-dir", folder / "checkpoint", "--output-dir", folder / "engine",
        "--max-batch-size", 4, "--max-seq-len", 512, "--tokenizer-dir", PYCODE / "target",
        *build,
    )  # fmt: skip
    return folder / "engine"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pycode_engine(tmp_path_factory.mktemp("plain"), [])


def choose_prompts(path: Path, seed: int) -> Path:
    lines = (PYCODE / "prompts.jsonl").read_text().splitlines()
    sample = random.Random(seed).sample(lines, 6)
    texts = [{"prompt": json.loads(line)["prompt"]} for line in sample]
    path.write_text("".join(json.dumps(text) + "\n" for text in texts))
    return path


@when_asked
@pytest.mark.parametrize("way", WAYS)
def test_clean_runs(way: str, plain: Path, tmp_path: Path) -> None:
    """No false alarm: nothing but ok, in all checks of all runs."""
    options, settings = WAYS[way]
    engine = make_pycode_engine(tmp_path, options, build=() if options else EXTERNAL)
    # An engine of the server's drafter is the reference of its drafts too.
    reference = {"reference_engine": engine, "same_drafter": True, "near_tie": 0.001}
    first_run = list(WAYS).index(way)
    with serve_here(engine, draft_budget="fixed", **settings) as (_, url):
        for run in range(first_run, NUM_RUNS, len(WAYS)):
            prompts = choose_prompts(tmp_path / "prompts.jsonl", run)
            length = (32, 48, 64)[run % 3]
            reference_options = reference if options else {"reference_engine": plain}
            report = audit(url, prompts=prompts, max_tokens=length, **reference_options)
            print(way, run, length, report["verdict"], report["requests"])
            print(*(get(report, name)["summary"] for name in ("acceptance", "drafter")), sep="\n")
            assert find_wrong(report) == {}, report["checks"]
            assert (get(report, "drafter")["verdict"] == "ok") == bool(options)


@when_asked
@pytest.mark.parametrize(("way", "name"), SPOILED)
def test_spoiled_drafters(way: str, name: str, tmp_path: Path) -> None:
    """The text stays right, acceptance does not, and the same drafter as it was tells so."""
    option = WAYS[way][0]
    reference = make_pycode_engine(tmp_path / "reference", option)
    shutil.copytree(PYCODE / way, tmp_path / way)
    config = json.loads((tmp_path / way / "config.json").read_text())
    with change_tensors(tmp_path / way) as tensors:
        SPOILED[way, name](config, tensors)
    (tmp_path / way / "config.json").write_text(json.dumps(config))
    engine = make_pycode_engine(tmp_path, option, tmp_path)
    with serve_here(engine, draft_budget="fixed") as (_, url):
        options = {"reference_engine": reference, "same_drafter": True, "near_tie": 0.001}
        report = audit(url, max_tokens=48, **options)
    print(way, name, find_wrong(report))
    print(*(get(report, name)["summary"] for name in ("acceptance", "drafter")), sep="\n")
    verdicts = find_wrong(report)
    assert verdicts["drafter"] == "failed", report["checks"]
    assert set(verdicts) <= {"acceptance", "drafter"}
