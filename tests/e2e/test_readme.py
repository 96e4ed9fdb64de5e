"""The README's commands, run as typed, on the shipped pycode models."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.methods import METHODS
from tests.conftest import ROOT
from tests.forks import fork, run_main

README = ROOT / "README.md"
CONTENTS = ROOT / "docs" / "contents.md"
SHOWS_A_GAIN = 2.0  # tokens per verify step, in every example


def read_commands() -> list[str]:
    """The lines of the README's bash blocks, continuation lines joined."""
    blocks = re.findall(r"```bash\n(.*?)```", README.read_text(), flags=re.DOTALL)
    text = "\n".join(blocks).replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_readme_shows_the_one_command_and_the_three() -> None:
    stages = [shlex.split(command)[0] for command in read_commands()]
    assert stages == ["specdec", "specdec-convert", "specdec-build", "specdec-run"]


def test_readme_is_short_and_has_its_parts_in_order() -> None:
    """A reader has sixty seconds, and one page of contents after it."""
    lines = README.read_text().splitlines()
    words = " ".join(line for line in lines if not line.startswith("|")).split()
    assert len(words) <= 450
    titles = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
    assert titles == ["Start", "Use", "More"]
    assert "](docs/contents.md)" in README.read_text()


def test_the_contents_lead_to_every_method_and_page() -> None:
    text = CONTENTS.read_text()
    pages = [name.removeprefix("docs/") for name in PAGES if name != "docs/contents.md"]
    assert [name for name in pages if f"]({name}" not in text] == []
    table = text[text.index("## Which method") : text.index("## State")]
    assert [name for name in METHODS if f"](methods/{name}.md)" not in table] == []


def test_the_chart_has_the_measured_figures() -> None:
    """Those of a published model, beside the best of llama.cpp on the same file."""
    report = json.loads((ROOT / "benchmarks/results/field-qwen-1.5b-default-zen5.json").read_text())
    rows = {row["way"]: row for row in report["rows"]["0"]}
    peers = [way for way in rows if way.startswith("llama.cpp")]
    drafting = ["default, suffix+ngram"]  # beside llama.cpp, in the engine that needs no drafter
    tasks = {
        "all tasks": "all", "conversation": "mt_bench", "summaries": "summarization",
        "mathematics": "math_reasoning",
    }  # fmt: skip

    def find_best(ways: list[str], task: str) -> float:
        return max(float(rows[way][task]["tokens_per_second"]) for way in ways)

    figures = "; ".join(
        f"{label} {find_best(['plain'], task):.1f} and {find_best(drafting, task):.1f},"
        f" llama.cpp's best {find_best(peers, task):.1f}"
        for label, task in tasks.items()
    )
    assert figures in README.read_text()
    assert figures in (ROOT / "docs/published-model.svg").read_text()
    gain = find_best(drafting, "all") / find_best(peers, "all")
    assert f"{gain:.1f} times as fast as with llama.cpp" in README.read_text()
    assert all(
        row["all"]["like_plain"] == row["all"]["texts"]
        for way, row in rows.items()
        if way not in peers
    )


# The contents' methods -> the measured ways, with 1 and with 16 requests at once.
MEASURED = {
    "prompt_lookup": ("prompt lookup of 8", "prompt lookup of 8, budget auto"),
    "suffix": ("suffix of 8", "suffix of 8, budget auto"),
    "lookahead": ("lookahead [4,4,4]", "lookahead [4,4,4], budget auto"),
    "draft_target": ("draft model, tree of 8", "draft model, tree of 8, budget auto"),
    "medusa": ("Medusa", "Medusa, budget auto"),
    "eagle": ("EAGLE-3", "EAGLE-3, budget auto"),
    "dflash": ("DFlash", "DFlash, budget auto"),
    "redrafter": ("ReDrafter 1 x 5", "ReDrafter 1 x 5, budget auto"),
}


def read_measured(name: str = "batches-full-zen4") -> dict[str, Any]:
    """By way of decoding, rows by the number of requests, as benchmarks/batches.py wrote them."""
    report = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    methods: dict[str, Any] = report["methods"]
    return methods


@pytest.mark.parametrize("name", METHODS)
def test_the_contents_have_the_measured_figures(name: str) -> None:
    """Behind each method's link, with 1 and with 16 requests."""
    link = re.escape(f"](methods/{name}.md) ")
    shown = re.findall(link + r"(not measured|[\d.]+\d and [\d.]+\d)", CONTENTS.read_text())
    if name not in MEASURED:
        assert shown == ["not measured"]
        return
    rows = [
        next(row for row in read_measured()[label] if row["batch_size"] == size)
        for label, size in zip(MEASURED[name], (1, 16), strict=True)
    ]
    assert shown == [" and ".join(f"{row['ratio']['median']:.2f}" for row in rows)]


@pytest.mark.parametrize("name", [*MEASURED, "chain"])
def test_every_method_says_what_it_costs(name: str) -> None:
    """With rows of the same report; drafters that do not ship are in a table of another one's."""
    page = (ROOT / f"docs/methods/{name}.md").read_text()
    section = page.split("\n## Costs, and when to choose the method\n")[1].split("\n## ")[0]
    own, *others = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    check_costs(own, read_measured())
    for other in others:
        check_costs(other, read_measured("batches-full-zen3-one-pass"))


def check_costs(table: str, methods: dict[str, Any]) -> None:
    """Hold a table of a method's page to what was measured."""
    shown = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
    ][2:]  # fmt: skip
    assert shown
    # Within a budget a draft model's chain is a tree of as many tokens.
    bound = {"draft model, 8": "draft model, tree of 8"}
    called = {"P-EAGLE": "eagle-parallel", "DSpark": "dflash-markov"}
    for label, *cells in shown:
        own = called.get(label, label)
        one, parts = methods[own][0]["acceptance"], methods[own][0]["step_ms"]
        ratios = [
            ", ".join(
                f"{row['ratio']['median']:.2f}" for row in rows if row["batch_size"] in (1, 4, 16)
            )
            for rows in (methods[own], methods[f"{bound.get(own, own)}, budget auto"])
        ]
        assert cells == [
            f"{one['acceptance_length']:.2f}", f"{one['draft_tokens_per_step']:.1f}",
            f"{parts['draft']:.1f} of {parts['total']:.1f}", *ratios,
        ]  # fmt: skip


def list_anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    anchors: set[str] = set()
    for line in re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).splitlines():
        if line.startswith("#"):
            words = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower())
            anchors.add(words.replace(" ", "-"))
    return anchors


def test_links_lead_somewhere() -> None:
    """Files, and headings in them, that README and pages link to."""
    pages = [README, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    pages += [*(ROOT / "benchmarks").glob("*.md"), ROOT / "examples/pycode/README.md"]
    broken = []
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if link.startswith(("http:", "https:")):
                continue
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            if not target.exists() or (anchor and anchor not in list_anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_readme_commands_work_as_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    script = bin_dir / "specdec"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m specdec "$@"\n')
    script.chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    one, *three = read_commands()
    outputs = [
        subprocess.run(
            one, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True,
            check=False,
        )
    ]  # fmt: skip
    for command in three:  # whose starts are spared
        name, *words = shlex.split(command)
        stage = name.removeprefix("specdec-")
        process = fork(functools.partial(run_main, stage, *words), cwd=tmp_path)
        out, err = process.communicate()
        outputs.append(subprocess.CompletedProcess(command, process.returncode, out, err))
    for done in outputs:
        assert done.returncode == 0, f"{done.args}\n{done.stderr}"
    generated, *_, run = outputs
    assert 'Input [Text 0]: "def __eq__(self, other):"' in generated.stdout
    assert "{+" in generated.stdout, "no accepted draft is marked"
    assert 'Output [Text 1 Beam 0]: "' in run.stdout
    for done in (generated, run):
        assert "nothing drafted" not in done.stderr
        (length,) = re.findall(r"([0-9.]+) tokens per verify step", done.stderr)
        assert float(length) >= SHOWS_A_GAIN

    page = (ROOT / "docs" / "api.md").read_text()
    program = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0]
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    (told,) = re.findall(r"# ([0-9.]+) and ([0-9.]+) tokens per verify step", program)
    lengths = re.findall(r" ([0-9.]+)$", capsys.readouterr().out, re.MULTILINE)
    # Of two tokens that nearly tie in bfloat16, another processor may choose the other.
    assert [float(length) for length in lengths] == pytest.approx(
        [float(length) for length in told], rel=0.25
    )
    assert min(map(float, told)) >= SHOWS_A_GAIN


# flags.md is about TensorRT-LLM's flags, and has a test of its own.
PAGES = sorted(
    str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md") if page.name != "flags.md"
)
# Of torchrun, accelerate, Slurm, pip, apt, useradd, docker, hf, vllm, llama.cpp, g++,
# tests/engine/matrix.py and benchmarks/.
OTHERS_FLAGS = {
    "--local-dir", "--repo-type", "--port",
    "--nproc-per-node", "--num-processes", "--no-python", "--no-deps", "--drafter-output-dir",
    "--use-fsdp", "--use-deepspeed", "--mixed-precision",
    "--quick", "--prepare", "--shapes", "--param", "--only", "--compilers", "--full", "--more",
    "--chat-template", "--enforce-eager", "--max-model-len", "--max-num-seqs",
    "--speculative-config", "--create-home", "--index-url", "--no-cache-dir",
    "--no-install-recommends", "--build-arg",
    "--no-repack", "--random-input-len", "--random-output-len", "--stop-timeout",
    "--max-concurrency", "--tokenizer", "--target", "--nnodes", "--rdzv-backend",
    "--rdzv-endpoint", "--start-period", "--llama-server", "--vllm-python", "--dataset-name",
    "--llama-bin", "--llama-source", "--flash-attn", "--max-num-batched-tokens",
    "--endpoint", "--num-prompts", "--no-compile", "--spec-draft-p-min", "--model-args", "--tasks",
    "--spec-type", "--spec-draft-model", "--mtp", "--kv-transfer-config",
    "--no-enable-chunked-prefill", "--no-enable-prefix-caching",
    "--check", "--strict", "--requeue", "--dependency", "--test-only", "--tensor-parallel-size",
}  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_pages_name_only_flags_that_exist(name: str) -> None:
    import importlib

    from benchmarks import field, gpu, peers, run_all, training_study, verify_cost
    from specdec.command.stages import STAGES
    from specdec.options import get_flags
    from specdec.trtllm.facts import LABELS, load_facts

    known = {"--all", "--config", "--debug", "--version", "--help", *OTHERS_FLAGS}
    for script in (field, gpu, peers, run_all, training_study, verify_cost):
        for action in script.make_parser()._actions:
            known |= {*action.option_strings}
    for label in LABELS:
        known |= {f"--{flag.replace('_', '-')}" for flag in load_facts(label).flags}
    modules = [module for module, _ in STAGES.values()] + [
        "specdec.train.data.settings", "specdec.train.ngrams.settings"
    ]  # fmt: skip
    for module in modules:
        settings = importlib.import_module(module.rpartition(".")[0] + ".settings")
        for value in vars(settings).values():
            if isinstance(value, type) and value.__name__.endswith("Settings"):
                for flag, (option, default) in get_flags(value).items():
                    known.add("--" + flag.replace("_", "-"))
                    if default is True or option.is_switch:
                        known.add("--no-" + flag.replace("_", "-"))
    text = (ROOT / name).read_text()
    used = {flag.replace("_", "-") for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", text)}
    without_flags = ("docs/how-it-works.md", "docs/structure.md")
    assert used or name in without_flags, "a page that names no flag"
    assert used - known == set()
