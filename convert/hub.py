"""Models of the Hugging Face Hub: the files that a conversion needs, and no others."""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from specdec.errors import SpecDecError
from specdec.files.folders import INDEX_SUFFIX, WEIGHT_NAMES
from specdec.files.hub import describe_answer, explain
from specdec.system import logs

from .hf import QUANTIZATION_NAME, read_index, refuse_folder

logger = logs.get_logger(__name__)

ATTEMPTS = 5  # of a download that is cut off
TIMEOUT = 10.0  # seconds for an answer about a repository or a file; downloads have the library's


def fetch_model(hub_id: str, flag: str, weight_files: Sequence[str]) -> Path:
    """Fetch a model, or find the cached copy where the Hub cannot be asked; return its folder."""
    import huggingface_hub

    # Only the environment's token: one that lies about in a home folder is not ours to send.
    token = os.environ.get("HF_TOKEN") or False
    fetch = functools.partial(_fetch_files, hub_id, token)
    with _show_progress_on_terminals():
        try:
            info = huggingface_hub.HfApi(token=token).model_info(hub_id, timeout=TIMEOUT)
        except Exception as error:  # noqa: BLE001 - the library raises many kinds, its HTTP client more
            return _find_cached(hub_id, flag, error, fetch)
        hub_files = [sibling.rfilename for sibling in info.siblings or ()]
        weights = [name for name in (*weight_files, *WEIGHT_NAMES) if name in hub_files][:1]
        if not weights:
            raise refuse_folder(f"{flag} {hub_id} on the Hub", hub_files)
        names = ["config.json", *{QUANTIZATION_NAME} & {*hub_files}, *weights]
        logger.info("fetching %s from the Hugging Face Hub", hub_id)
        try:
            folder = fetch(names)
            if weights[0].endswith(INDEX_SUFFIX):
                index_folder, folder = folder, fetch([*names, *read_index(folder / weights[0])])
                if folder != index_folder:
                    raise SpecDecError(
                        f"{flag} {hub_id} was changed on the Hub while it was fetched",
                        "run it again",
                    )
        except SpecDecError:
            raise
        except Exception as error:  # noqa: BLE001
            raise explain(hub_id, flag, error) from None
    return folder


def _fetch_files(hub_id: str, token: str | bool, names: Sequence[str], **options: Any) -> Path:
    """Fetch files of a repository, going on where a download was cut off; return their folder."""
    import huggingface_hub

    patterns = [glob.escape(name) for name in names]
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return Path(
                huggingface_hub.snapshot_download(
                    hub_id, allow_patterns=patterns, token=token, etag_timeout=TIMEOUT, **options
                )
            )
        except Exception as error:
            if attempt == ATTEMPTS or not _is_interruption(error):
                raise
            logger.warning(
                "%s: the Hub %s; going on where it stopped", hub_id, describe_answer(error)
            )
            time.sleep(attempt)
    raise AssertionError("the last attempt returns or raises")


def _find_cached(hub_id: str, flag: str, error: Exception, fetch: Callable[..., Path]) -> Path:
    """Return the folder of the cached copy, or raise the error for a Hub that cannot be asked."""
    try:
        folder = fetch([], local_files_only=True)
    except Exception:  # noqa: BLE001
        raise explain(hub_id, flag, error) from None
    logger.warning(
        "%s: using the cached copy in %s, since the Hub %s",
        hub_id, folder, describe_answer(error),
    )  # fmt: skip
    return folder


def _is_interruption(error: Exception) -> bool:
    """Return whether a connection broke, by the names of either HTTP client of the library."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"RequestException", "TransportError"}) and "HfHubHTTPError" not in kinds


@contextlib.contextmanager
def _show_progress_on_terminals() -> Iterator[None]:
    """Let the library show its bars, which go to stderr, where that is a terminal."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
