"""The Hugging Face folder of a GGUF file, without its weights: in the cache, made when it is asked.

It holds config.json, generation_config.json and the tokenizer's files, which transformers reads.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path

from specdec.errors import SpecDecError
from specdec.files.folders import find_gguf, list_parts
from specdec.files.reading import write_json
from specdec.system.cache import find_cache, use_download, use_entry

from .model import GgufModel
from .special import PREFIX, list_ends

KEY_LENGTH = 16


def localize(name: str | Path) -> str:
    """Return the folder that stands for a GGUF file, or for a folder with one; else the name.

    Neither is cleared from the cache while this process lives.
    """
    use_download(Path(name))
    path = find_gguf(name) if name else None
    if path is None:
        return str(name)
    digest = hashlib.sha256()
    for part_path in (part_path for part_path in list_parts(path) if part_path.exists()):
        stat = part_path.stat()
        facts = (str(part_path.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        digest.update(repr(facts).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-.")[:40] or "model"
    parent = _find_parent()
    folder = parent / f"{stem}-{digest.hexdigest()[:KEY_LENGTH]}"
    while not use_entry(folder):  # or it is cleared meanwhile
        _make_folder(path, folder)
    return str(folder)


def _make_folder(path: Path, folder: Path) -> None:
    """Make the folder that stands for a GGUF file."""
    model, parent = GgufModel(path), folder.parent
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=parent))
    try:
        write_files(model, partial)
        os.replace(partial, folder)
    except OSError as error:
        if not folder.is_dir():  # another process was as fast
            raise SpecDecError(
                f"the tokenizer of {path} cannot be written to {parent}: {error.strerror}",
                "free some space there, or name another folder with SPECDEC_CACHE_DIR",
            ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _find_parent() -> Path:
    """Return the cache's folder for GGUF, or a temporary one where that cannot be written."""
    if (cache := find_cache()) is not None:
        with contextlib.suppress(OSError):
            (cache / "gguf").mkdir(parents=True, exist_ok=True)
            if os.access(cache / "gguf", os.W_OK):
                return cache / "gguf"
    return _make_temporary()


@functools.cache
def _make_temporary() -> Path:
    temporary = Path(tempfile.mkdtemp(prefix="specdec-gguf-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary


def write_files(model: GgufModel, folder: Path) -> None:
    """Write config.json, generation_config.json and the tokenizer, where the file has one."""
    write_json(folder / "config.json", model.config)
    ends = list_ends(model.metadata)
    names = ["bos_token_id", "pad_token_id"]
    ids = {name: model.config[name] for name in names if model.config[name] is not None}
    if suppressed_ids := model.metadata.get(PREFIX + "suppress_tokens"):
        ids["suppress_tokens"] = suppressed_ids
    if ends:
        ids["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    write_json(folder / "generation_config.json", ids)
    if model.metadata.get(PREFIX + "model", "none") not in ("none", "no_vocab"):
        from .tokenizer import TokenizerMaker

        maker = TokenizerMaker(model.path, model.metadata)
        # Written by Python, whose errors tell of a full disk.
        text = maker.make().to_str(pretty=True)
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
        max_length = model.config["max_position_embeddings"]
        write_json(folder / "tokenizer_config.json", maker.describe(max_length))
