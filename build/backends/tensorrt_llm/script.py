"""The build as a shell script, for machines that specdec is not on."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from specdec.errors import Problems
from specdec.files.staging import check_output_file, write_whole

from .plan import TensorRTPlan

HEADER = """#!/usr/bin/env bash
{directives}# Builds a TensorRT-LLM engine: {what}.
# Written by specdec {version} for the line {label} of TensorRT-LLM.
set -euo pipefail

# Usage: {usage} [CHECKPOINT [ENGINE]]
checkpoint=${{1:-{checkpoint}}}
engine=${{2:-{engine}}}
partial="$engine.partial"

command -v trtllm-build > /dev/null || {{ echo "error: trtllm-build is not on PATH" >&2; exit 1; }}
for rank in $(seq 0 {last_rank}); do
  [ -f "$checkpoint/rank$rank.safetensors" ] || \\
    {{ echo "error: $checkpoint lacks rank$rank.safetensors" >&2; exit 1; }}
done
[ ! -e "$engine" ] || {{ echo "error: $engine exists" >&2; exit 1; }}
rm -rf "$partial"
mkdir -p "$partial"
trap 'rm -rf "$partial"' EXIT
{exports}
{command}
rm -f "$partial/model.cache"

for rank in $(seq 0 {last_rank}); do
  [ -s "$partial/rank$rank.engine" ] || \\
    {{ echo "error: rank$rank.engine was not written" >&2; exit 1; }}
done
mv -T "$partial" "$engine"
trap - EXIT
echo "engine: $engine" >&2
"""


def find_launcher_problems(plan: TensorRTPlan, launcher: str) -> Problems:
    """Return whether trtllm-build of the line can be started by a launcher."""
    is_old, workers = plan.label == "0.14", plan.given_flags.get("workers")
    if launcher == "local":
        return Problems()
    return Problems.from_table(
        (is_old and not (launcher == "srun" and count_nodes(plan) == 1),
         f"--launcher {launcher}: trtllm-build of 0.14 does not use MPI, every process would build"
         " every rank", "use --launcher local with --workers, on one node"),
        (not is_old and workers is not None,
         f"--workers {workers} has no effect under {launcher}: each process builds its own ranks",
         "leave --workers out"),
        (not is_old and plan.num_ranks == 1,
         f"--launcher {launcher} for one rank", "use --launcher local"),
    )  # fmt: skip


def count_nodes(plan: TensorRTPlan) -> int:
    """Return how many machines the ranks need, by the checkpoint's own number of GPUs a node."""
    return math.ceil(plan.num_ranks / plan.gpus_per_node)


def format_script(plan: TensorRTPlan, launcher: str) -> str:
    """Return the script's text."""
    from specdec import __version__

    words = plan.make_argv(Path("$checkpoint"), Path("$partial"))
    if (
        "output_timing_cache" not in plan.given_flags
    ):  # else it would be left where the script is called
        words += ["--output_timing_cache", "$partial/model.cache"]
    command = " ".join(
        f'"{word}"' if word.startswith(("$checkpoint", "$partial")) else shlex.quote(word)
        for word in words
    )
    nodes = count_nodes(plan)
    per_node = math.ceil(plan.num_ranks / nodes)
    directives, environment = "", dict(plan.environment)
    if launcher == "mpirun":
        command = f"mpirun -n {plan.num_ranks} {command}"
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    elif launcher == "srun":
        tasks, tasks_per_node = (1, 1) if plan.label == "0.14" else (plan.num_ranks, per_node)
        directives = (
            f"#SBATCH --job-name=trtllm-build\n#SBATCH --nodes={nodes}\n#SBATCH --ntasks={tasks}\n"
            f"#SBATCH --ntasks-per-node={tasks_per_node}\n#SBATCH --gpus-per-node={per_node}\n"
        )
        command = (
            f"srun --mpi=pmix --nodes={nodes} --ntasks={tasks}"
            f" --ntasks-per-node={tasks_per_node} {command}"
        )
    exports = "".join(
        f"export {name}={shlex.quote(value)}\n" for name, value in environment.items()
    )
    return HEADER.format(
        directives=directives,
        usage="sbatch SCRIPT" if launcher == "srun" else "bash SCRIPT",
        what=f"{plan.method}, {plan.num_ranks} rank(s)",
        version=__version__,
        label=plan.label,
        checkpoint=shlex.quote(str(plan.checkpoint_dir.resolve())),
        engine=shlex.quote(str(plan.output_dir.resolve())),
        last_rank=plan.num_ranks - 1,
        exports=exports,
        command=command,
    )


def write_script(path: Path, text: str, *, force: bool) -> None:
    """Write the script aside, then give it its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    check_output_file(path, force=force)
    write_whole(path, text, force=force, mode=0o755)
