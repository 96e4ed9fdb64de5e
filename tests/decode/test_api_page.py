"""docs/api.md and examples/api.py are of the API that there is."""

from __future__ import annotations

import inspect
import runpy
from pathlib import Path

import pytest

import specdec
from specdec import Engine
from specdec.decode.call_settings import Settings
from tests.conftest import ROOT, make_drafter, make_llama, make_tokenizer
from tests.engines import make_engine

PAGE = (ROOT / "docs" / "api.md").read_text()


def list_parameters(method: str) -> str:
    """A method's signature as the page shows it."""
    parts, is_keyword = [], False
    for name, parameter in inspect.signature(getattr(Engine, method)).parameters.items():
        if name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            parts.append("*")
            is_keyword = True
        default = parameter.default
        shown = name if default is parameter.empty else f"{name}={default!r}".replace("'", '"')
        parts.append(("**" if parameter.kind is parameter.VAR_KEYWORD else "") + shown)
    return f"({', '.join(parts)})"


@pytest.mark.parametrize("method", ["load", "generate", "stream"])
def test_the_page_has_the_signatures(method: str) -> None:
    assert f"{method}{list_parameters(method)}" in PAGE


def test_stream_takes_what_generate_takes() -> None:
    generate, stream = (inspect.signature(getattr(Engine, n)) for n in ("generate", "stream"))
    annotations = [one.parameters["settings"].annotation for one in (generate, stream)]
    assert annotations == ["Unpack[Settings]"] * 2
    assert all(f"`{name}`" in PAGE for name in Settings.__annotations__)


@pytest.mark.parametrize("name", specdec.__all__)
def test_the_page_names_what_is_public(name: str) -> None:
    assert f"`{name}`" in PAGE
    value = getattr(specdec, name)
    members = [] if isinstance(value, str) else vars(value)
    assert isinstance(value, str) or value.__doc__
    for member in members:
        if not member.startswith("_") and callable(getattr(value, member)):
            assert getattr(value, member).__doc__ or name == "RequestStats", member


def test_the_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, drafter = make_llama(tmp_path, seed=5), make_drafter(tmp_path, exit_dim=96, scale=3.0)
    make_tokenizer(target)
    engine = make_engine(
        tmp_path, target, drafter, optimize="none", build=["--tokenizer-dir", target]
    )
    main = runpy.run_path(str(ROOT / "examples" / "api.py"))["main"]
    main(str(engine))
    shown = capsys.readouterr().out
    assert shown.startswith("suffix,redrafter, up to 512 tokens a request\n")
    assert "'def read(path):' -> '" in shown
    assert shown.count(" a verify step, ") == 2
