"""--session-dir: a server that is started again has what the one before it read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from specdec import SpecDecError, UsageError
from specdec.serve.server import load
from specdec.serve.settings import ServeSettings
from tests.serve.servers import CLIENT, post, serve_here

PROMPT = [*range(5, 100), *range(100, 5, -1)]


def count(url: str, name: str) -> float:
    found = re.search(rf"^specdec:{name}\S* (\S+)$", CLIENT.get(url + "/metrics").text, re.M)
    assert found is not None, name
    return float(found[1])


def ask(url: str, prompt: list[int]) -> Any:
    body = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return post(url, "/v1/completions", prompt=prompt, **body)["choices"][0]


def test_a_restarted_server_goes_on(folder: Path, tmp_path: Path) -> None:
    """Its text is right, /metrics counts tokens, and a corpus of suffixes is there again."""
    kept: dict[str, Any] = {
        "session_dir": tmp_path / "kept", "suffix_max_tokens": 4, "suffix_share_requests": True,
    }  # fmt: skip
    with serve_here(folder, **kept) as (_, url):
        first = ask(url, PROMPT)
        assert count(url, "session_restored_tokens_total") == 0
        with pytest.raises(SpecDecError, match="is used by another server"):
            load(ServeSettings(engine_dir=folder, **kept))
    later = [*PROMPT, *first["token_ids"], 7, 8, 9]
    with serve_here(folder) as (_, url):
        expected = ask(url, later)
        assert count(url, "session_written_tokens_total") == 0
    assert len([*(tmp_path / "kept").glob("*.texts")]) == 1
    with serve_here(folder, **kept) as (_, url):
        found = ask(url, later)
        assert found["token_ids"] == expected["token_ids"]
        assert count(url, "session_restored_tokens_total") == 192
        assert count(url, "prefix_cache_hits_total") == 192
        assert count(url, "session_bytes") > 1000
        assert count(url, "session_damaged_blocks_total") == 0


def test_a_limit_without_a_folder_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="--max-session-gb without --session-dir"):
        load(ServeSettings(engine_dir=folder, max_session_gb=1.0))
