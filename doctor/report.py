"""Report of the doctor, as an object and as text."""

from __future__ import annotations

from typing import Any

from specdec.errors import SpecDecError, count

from .abilities import list_abilities, list_pins
from .cache import describe_cache, format_cache
from .engine import check_engine
from .machine import describe_machine
from .settings import DoctorSettings


def examine(settings: DoctorSettings) -> dict[str, Any]:
    """Look at the machine, and at an engine if one is given."""
    machine = describe_machine()
    tables = list_pins(machine)
    problems = [problem for table in tables for problem in table["problems"]]
    try:
        cache = describe_cache()
    except SpecDecError as error:
        cache = None
        problems.append(f"{error.message}: {error.hint}")
    report = {
        **machine,
        "cache": cache,
        "abilities": [
            {"what": ability, "can": not reasons, "reasons": reasons}
            for ability, reasons in list_abilities(machine).items()
        ],
        "pins": [row for table in tables for row in table["rows"]],
        "problems": problems,
    }
    if settings.engine_dir is not None:
        report["engine"] = check_engine(settings.engine_dir, machine)
    return report


def find_error(report: dict[str, Any]) -> SpecDecError | None:
    """Return the error that ends the command where an engine cannot run here."""
    engine = report.get("engine")
    if engine is None or engine["can_run"]:
        return None
    problem, num_more = engine["problems"][0], len(engine["problems"]) - 1
    also = f", and {count(num_more, 'more reason')}" if num_more else ""
    return SpecDecError(
        f"{engine['engine_dir']} cannot run here: {problem['fact']}{also}", problem["remedy"]
    )


def format_report(report: dict[str, Any]) -> str:
    """Return the report as lines of text."""
    lines = [*_format_software(report), *_format_hardware(report), "What can be done here:"]
    for ability in report["abilities"]:
        reasons = "" if ability["can"] else ": " + "; ".join(ability["reasons"])
        lines.append(f"  {'yes' if ability['can'] else 'no '} {ability['what']}{reasons}")
    for table in list_pins(report):
        lines += ["Versions that go together:", *_format_pins(table)]
        lines += [f"  {clash}" for clash in table["clashes"]]
    lines += [f"problem: {problem}" for problem in report["problems"]]
    return "\n".join(lines + _format_engine(report.get("engine")))


def _format_software(report: dict[str, Any]) -> list[str]:
    cuda, mpi = report["cuda"], report["mpi"]
    driver = f" ({cuda['driver_version']})" if cuda["driver_version"] else ""
    return [
        f"specdec {report['specdec']}, Python {report['python']}, {report['platform']}",
        *(
            f"  {name}: {version or 'not installed'}"
            for name, version in report["packages"].items()
        ),
        f"  CUDA: runtime {cuda['runtime'] or 'none'}, driver {cuda['driver'] or 'none'}{driver}",
        f"  MPI: {mpi['version'] or ', '.join(mpi['launchers']) or 'no launcher'}",
    ]


def _format_hardware(report: dict[str, Any]) -> list[str]:
    cpu, disk, kernels = report["cpu"], report["disk"], report["kernels"]
    memory, available = (
        f"{(cpu[key] or 0) / 2**30:.1f} GiB" for key in ("memory_bytes", "available_bytes")
    )
    lines = [
        f"  GPU {index}: {gpu['name']}, compute capability {gpu['compute_capability']},"
        f" {gpu['memory_bytes'] / 2**30:.0f} GiB"
        for index, gpu in enumerate(report["gpus"])
    ] or ["  GPU: none is visible"]
    lines.append(f"  CPU: {cpu['cores']} cores, {memory} memory, {available} available")
    lines.append(f"  C++ compiler: {report['compiler'] or 'none'}")
    if kernels:
        form = "{bfloat16} for bfloat16 weights, else {others}"
        arithmetic = kernels.get("error") or form.format_map(kernels)
        lines.append(f"  arithmetic of the native kernels: {arithmetic}")
    lines.append(f"  disk: {disk['free_bytes'] / 2**30:.1f} GiB free at {disk['path']}")
    return lines + (format_cache(report["cache"]) if report.get("cache") else [])


def _format_pins(table: dict[str, Any]) -> list[str]:
    columns = table["columns"]
    rows = [
        list(columns),
        *([str(row.get(name, "-")) for name in columns] for row in table["rows"]),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def _format_engine(engine: dict[str, Any] | None) -> list[str]:
    if engine is None:
        return []
    return [
        f"{engine['engine_dir']} ({engine['backend']}, {engine['method']}, {engine['dtype']},"
        f" tp_size {engine['tp_size']}): {'can' if engine['can_run'] else 'cannot'} run here",
        *(f"  {problem['fact']}: {problem['remedy']}" for problem in engine["problems"]),
        *(f"  note: {note}" for note in engine["notes"]),
    ]
