"""Cost table of an engine: kept beside it, or in the user's cache, or measured now.

A table is of one machine and one way to draft, which are written in it: on another machine, with
other kernels, threads or drafters, it is measured again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from specdec import __version__
from specdec.decode.cost_measuring import Measuring
from specdec.decode.cost_table import CostTable, read_table
from specdec.decode.drafters.base import Drafter
from specdec.engine.compiler import describe_cpu
from specdec.engine.decoder import Decoder
from specdec.engine.layout import EngineConfig
from specdec.errors import SpecDecError
from specdec.files.reading import read_json
from specdec.system import logs
from specdec.system.cache import find_cache
from specdec.system.machine import read_processor

logger = logs.get_logger(__name__)
FORMAT_VERSION = 4  # older tables are measured again
FOLDER_NAME = "costs"  # of an engine folder, and of the cache


def find_costs(
    folder: Path, config: EngineConfig, decoder: Decoder, groups: Sequence[Sequence[Drafter]],
    drafting: Mapping[str, str],
) -> CostTable:  # fmt: skip
    """Return the table of an engine and of those who draft for it; measure and keep a new one.

    groups: of `PacedDrafter`; none for plain steps alone. drafting: what else drafts depend on.
    """
    kept = find_kept_costs(folder, config, decoder, groups, drafting)
    if kept is not None:
        return kept
    key = describe_key(config, decoder, groups, drafting)
    start_time, build = time.monotonic(), config.build
    measuring = Measuring(
        decoder, [[drafter.make_twin() for drafter in group] for group in groups],
        max_batch_size=build.max_batch_size, max_seq_len=build.max_seq_len,
        max_num_tokens=build.max_num_tokens,
    )  # fmt: skip
    table, is_quiet = measuring.measure()
    logger.info("costs of steps and drafts: measured in %.1f s", time.monotonic() - start_time)
    if is_quiet:
        keep_table(table, folder, key)
    else:
        logger.info("other programs delayed them: they are measured again at the next load")
    return table


def find_kept_costs(
    folder: Path, config: EngineConfig, decoder: Decoder, groups: Sequence[Sequence[Drafter]],
    drafting: Mapping[str, str],
) -> CostTable | None:  # fmt: skip
    """Return the table that was kept, as `find_costs` does; None where nothing is measured yet."""
    key = describe_key(config, decoder, groups, drafting)
    tables = (read_kept_table(path, key) for path in list_paths(folder, key))
    return next((table for table in tables if table is not None), None)


def describe_key(
    config: EngineConfig, decoder: Decoder, groups: Sequence[Sequence[Drafter]],
    drafting: Mapping[str, str],
) -> dict[str, Any]:  # fmt: skip
    """Return all that a table depends on, as JSON has it."""
    device = decoder.device
    is_cuda = device.type == "cuda"
    return {
        "format_version": FORMAT_VERSION,
        "specdec": __version__,
        "torch": str(torch.__version__),
        "processor": read_processor(),
        "instructions": describe_cpu(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
        "kernels": config.kernels if decoder.kernels is not None else None,
        "build_id": config.build_id,
        "max_batch_size": config.build.max_batch_size,
        "drafters": [
            [[type(d).__name__, d.max_draft_tokens, d.max_draft_depth, d.is_planned] for d in group]
            for group in groups
        ],
        "drafting": dict(drafting),
    }


def list_paths(folder: Path, key: Mapping[str, Any]) -> Iterator[Path]:
    """Yield where a table may be kept: beside the engine, and in the user's cache."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32] + ".json"
    yield folder / FOLDER_NAME / name
    if (cache := find_cache()) is not None:
        yield cache / FOLDER_NAME / name


def read_kept_table(path: Path, key: Mapping[str, Any]) -> CostTable | None:
    """Read a table that was kept; None where there is none of this key, or a damaged one."""
    try:
        document = read_json(path)
        if document["key"] != key:
            return None
        return read_table(document["table"], len(key["drafters"]))
    except (SpecDecError, OSError, KeyError, TypeError, ValueError):
        return None


def keep_table(table: CostTable, folder: Path, key: Mapping[str, Any]) -> None:
    """Write a table aside and rename it, into the first place that can be written."""
    text = json.dumps({"key": key, "table": table.write()}, indent=1) + "\n"
    for path in list_paths(folder, key):
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=".partial-")
            try:
                with open(descriptor, "w", encoding="utf-8") as file:
                    file.write(text)
                os.chmod(partial, 0o644)
                os.replace(partial, path)
            except BaseException:  # Ctrl-C too
                with contextlib.suppress(OSError):
                    os.unlink(partial)
                raise
            return
    logger.info("costs cannot be kept: they are measured at each load; set SPECDEC_CACHE_DIR")
