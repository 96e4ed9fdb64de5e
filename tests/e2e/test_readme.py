"""The README's commands, run as typed, on the shipped pycode models."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

README = ROOT / "README.md"


def read_commands() -> list[str]:
    """The lines of the README's bash blocks, continuation lines joined."""
    blocks = re.findall(r"```bash\n(.*?)```", README.read_text(), flags=re.DOTALL)
    text = "\n".join(blocks).replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_readme_shows_the_three_commands() -> None:
    stages = [shlex.split(command)[0] for command in read_commands()]
    assert stages == ["specdec-convert", "specdec-build", "specdec-run"]


def test_readme_commands_work_as_typed(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for stage in ("convert", "build", "run"):
        script = bin_dir / f"specdec-{stage}"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m specdec {stage} "$@"\n')
        script.chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    outputs = []
    for command in read_commands():
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        outputs.append(done)
    run = outputs[-1]
    assert 'Input [Text 0]: "def read_lines(path):"' in run.stdout
    assert 'Output [Text 1 Beam 0]: "' in run.stdout
    per_step = re.search(r"([0-9.]+) tokens per verify step", run.stderr)
    assert per_step is not None
    assert float(per_step[1]) > 1.2, "the shipped drafter is accepted"


# flags.md is about TensorRT-LLM's flags, and has a test of its own.
PAGES = sorted(
    str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md") if page.name != "flags.md"
)
# Of torchrun, accelerate, Slurm, pip, hf, vllm and benchmarks/grow.py.
OTHERS_FLAGS = {
    "--local-dir", "--repo-type", "--port",
    "--nproc-per-node", "--num-processes", "--no-python", "--no-deps", "--drafter-output-dir",
    "--use-fsdp", "--fsdp-version", "--use-deepspeed", "--zero-stage", "--multi-gpu",
    "--config-file", "--gradient-clipping", "--mixed-precision", "--dynamo-backend",
    "--quick", "--shapes",
}  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_pages_name_only_flags_that_exist(name: str) -> None:
    import importlib

    from benchmarks.side_by_side.command import make_parser
    from specdec.command.settings import get_flags
    from specdec.command.stages import STAGES
    from specdec.trtllm.facts import LABELS, load_facts

    known = {"--config", "--debug", "--version", "--help", *OTHERS_FLAGS}
    known |= {flag for action in make_parser("")._actions for flag in action.option_strings}
    for label in LABELS:
        known |= {f"--{flag.replace('_', '-')}" for flag in load_facts(label).flags}
    modules = [module for module, _ in STAGES.values()] + ["specdec.train.data.settings"]
    for module in modules:
        settings = importlib.import_module(module.rpartition(".")[0] + ".settings")
        for value in vars(settings).values():
            if isinstance(value, type) and value.__name__.endswith("Settings"):
                for flag, (_, default) in get_flags(value).items():
                    known.add("--" + flag.replace("_", "-"))
                    if default is True:
                        known.add("--no-" + flag.replace("_", "-"))
    text = (ROOT / name).read_text()
    used = {flag.replace("_", "-") for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", text)}
    assert used, "a page that names no flag"
    assert used - known == set()
