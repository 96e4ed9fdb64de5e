"""The doctor's findings, as an object and as text."""

from __future__ import annotations

from typing import Any

from specdec.errors import SpecDecError, count

from .abilities import find_pin_problems, list_abilities, list_clashes, list_pins
from .engine import check_engine
from .machine import describe_machine
from .settings import DoctorSettings

COLUMNS = ("tensorrt_llm", "python", "tensorrt", "cuda", "torch", "transformers", "modelopt")


def examine(settings: DoctorSettings) -> dict[str, Any]:
    """Look at the machine, and at an engine if one is given."""
    machine, here = describe_machine()
    report = {
        **machine,
        "abilities": [
            {"what": what, "can": not reasons, "reasons": reasons}
            for what, reasons in list_abilities(machine, here).items()
        ],
        "pins": list_pins(),
        "problems": find_pin_problems(machine, here),
    }
    if settings.engine_dir is not None:
        report["engine"] = check_engine(settings.engine_dir, machine, here)
    return report


def find_error(report: dict[str, Any]) -> SpecDecError | None:
    """Return the error that ends the command where an engine cannot run here."""
    engine = report.get("engine")
    if engine is None or engine["can_run"]:
        return None
    first, *others = engine["problems"]
    more = len(others)
    also = f", and {count(more, 'more reason')}" if more else ""
    return SpecDecError(
        f"{engine['engine_dir']} cannot run here: {first['fact']}{also}", first["remedy"]
    )


def format_report(report: dict[str, Any]) -> str:
    """Return the findings as lines of text."""
    packages, cuda, mpi, kernels = (report[key] for key in ("packages", "cuda", "mpi", "kernels"))
    cpu, disk = report["cpu"], report["disk"]
    memory, available = (
        f"{(cpu[key] or 0) / 2**30:.1f} GiB" for key in ("memory_bytes", "available_bytes")
    )
    lines = [
        f"specdec {report['specdec']}, Python {report['python']}, {report['platform']}",
        *(f"  {name}: {version or 'not installed'}" for name, version in packages.items()),
        f"  CUDA: runtime {cuda['runtime'] or 'none'}, driver {cuda['driver'] or 'none'}"
        + (f" ({cuda['driver_version']})" if cuda["driver_version"] else ""),
        f"  MPI: {mpi['version'] or ', '.join(mpi['launchers']) or 'no launcher'}",
        *(f"  GPU {index}: {gpu['name']}, compute capability {gpu['compute_capability']},"
          f" {gpu['memory_bytes'] / 2**30:.0f} GiB" for index, gpu in enumerate(report["gpus"])),
        *([] if report["gpus"] else ["  GPU: none is visible"]),
        f"  CPU: {cpu['cores']} cores, {memory} memory, {available} available",
        f"  C++ compiler: {report['compiler'] or 'none'}",
    ]  # fmt: skip
    if kernels:
        form = "{bfloat16} for bfloat16 weights, else {others}"
        told = kernels.get("error") or form.format_map(kernels)
        lines.append(f"  arithmetic of the native kernels: {told}")
    lines.append(f"  disk: {disk['free_bytes'] / 2**30:.1f} GiB free at {disk['path']}")
    lines.append("What can be done here:")
    for ability in report["abilities"]:
        because = "" if ability["can"] else ": " + "; ".join(ability["reasons"])
        lines.append(f"  {'yes' if ability['can'] else 'no '} {ability['what']}{because}")
    lines.append("Versions that go together:")
    rows = [list(COLUMNS), *([str(row.get(c, "-")) for c in COLUMNS] for row in report["pins"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  " + "  ".join(cells).rstrip())
    lines += [f"  {clash}" for clash in list_clashes()]
    lines += [f"problem: {problem}" for problem in report["problems"]]
    if engine := report.get("engine"):
        lines.append(
            f"{engine['engine_dir']} ({engine['backend']}, {engine['method']}, {engine['dtype']},"
            f" tp_size {engine['tp_size']}): {'can' if engine['can_run'] else 'cannot'} run here"
        )
        lines += [f"  {problem['fact']}: {problem['remedy']}" for problem in engine["problems"]]
        lines += [f"  note: {note}" for note in engine["notes"]]
    return "\n".join(lines)
