"""Sources of a cached engine, which is used again only while all of them are unchanged."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specdec import __version__
from specdec.engine.compiler import describe_cpu, find_compiler
from specdec.errors import SpecDecError
from specdec.files.folders import INDEX_SUFFIX, list_parts
from specdec.files.reading import is_inside, read_json
from specdec.text.tokenizer import list_templates

TIMEOUT = 10.0  # seconds for the Hub's answer
KEY_LENGTH = 16


def describe_model(model_dir: str) -> dict[str, Any]:
    """Identify a model: a folder by its files' names and status, a Hub id by its commit.

    A file that is replaced has another time of change, also where size and time of
    modification are kept, as `cp -p` and rsync keep them.
    """
    path = Path(model_dir)
    if not path.exists():
        return {"hub": model_dir, "commit": find_commit(model_dir)}
    path = path.resolve()
    folder = path if path.is_dir() else path.parent
    try:
        files = sorted(_list_files(path)) if path.is_dir() else list_parts(path)
        stats = {
            str(file.relative_to(folder)): file.stat() for file in files if os.path.isfile(file)
        }
    except OSError as error:
        raise SpecDecError(
            f"{error.filename} cannot be read: {error.strerror}", "wait until nothing changes it"
        ) from None
    return {
        "path": str(path),
        "files": {
            name: [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for name, stat in stats.items()
        },
    }


def _list_files(folder: Path) -> set[Path]:
    """Return a folder's files, and those in its subfolders that are read with them.

    These are shards, which an index of weights names, and further chat templates.
    """
    files = {*folder.iterdir(), *list_templates(folder)}
    indexes = [file for file in files if file.name.endswith(INDEX_SUFFIX)]
    return files.union(*(_list_shards(index) for index in indexes))


def _list_shards(index: Path) -> Iterator[Path]:
    """Yield the files that an index names; none where it is damaged, which the conversion tells."""
    with contextlib.suppress(SpecDecError):
        shards = read_json(index).get("weight_map")
        names = list(shards.values()) if isinstance(shards, dict) else []
        texts = {name for name in names if isinstance(name, str)}
        yield from (index.parent / name for name in texts if is_inside(name))


def find_commit(hub_id: str) -> str | None:
    """Return the commit that the Hub, or else its local cache, has of a model.

    None where neither has it; the conversion then says whether the model can be had at all.
    """
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return None
    try:
        token = os.environ.get("HF_TOKEN") or False
        commit = HfApi(token=token).model_info(hub_id, timeout=TIMEOUT).sha
        return None if commit is None else str(commit)
    except Exception:  # noqa: BLE001 - the library raises many kinds, its HTTP client more
        ref = Path(HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}" / "refs" / "main"
        return ref.read_text().strip() if ref.is_file() else None


@functools.cache
def describe_tool() -> dict[str, Any]:
    """Identify what converts and builds: specdec's own sources, the compiler and the processor."""
    digest = hashlib.sha256()
    for package in ("specdec", "specdec.convert", "specdec.build"):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        for path in sorted(Path(spec.origin).parent.rglob("*")):
            if path.suffix in (".py", ".cpp", ".h", ".json"):
                digest.update(path.name.encode() + path.read_bytes())
    return {
        "version": __version__,
        "sources": digest.hexdigest(),
        "compiler": find_compiler(),
        "cpu": describe_cpu(),
    }


def name_entry(model_dir: str, description: Mapping[str, Any]) -> str:
    """Return a folder's name for an engine: the model's, and a sum over what it was made from."""
    text = json.dumps(description, sort_keys=True, default=str)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model_dir).name).strip("-.")[:40] or "model"
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]}"
