"""What the conversion tests share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.convert.pipeline import convert_model
from specdec.convert.settings import ConvertSettings
from specdec.errors import SpecDecError
from tests.convert.golden_models import make_source

Source = Callable[[str], Path]


@pytest.fixture(scope="session")
def source(lasting_dir: Path) -> Source:
    """Golden input folders by name, each made once; tests must not change them."""
    folder = lasting_dir / "sources"

    def make(name: str) -> Path:
        path = folder / name
        return path if path.exists() else make_source(name, path)

    return make


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """The log, each line once, also after a command of another test has set it up."""
    logger = logging.getLogger("specdec")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


class Converter:
    """Converts into a folder of the test's own."""

    def __init__(self, output: Path) -> None:
        self.output = output

    def __call__(self, **flags: Any) -> Path:
        for name in ("model_dir", "drafter_model_dir"):
            if flags.get(name) is not None:
                flags[name] = str(flags[name])
        self.report = convert_model(ConvertSettings(**{"output_dir": self.output} | flags))
        return Path(self.report["output_dir"])

    def fail(self, **flags: Any) -> SpecDecError:
        """Return the error; check that nothing was written."""
        output = flags.get("output_dir", self.output)
        before = sorted(output.rglob("*")) if output.exists() else None
        with pytest.raises(SpecDecError) as caught:
            self(**flags)
        assert (sorted(output.rglob("*")) if output.exists() else None) == before
        assert not list(output.parent.glob(f".{output.name}.*")), "no partial folder, no lock"
        assert caught.value.hint
        return caught.value


@pytest.fixture
def convert(tmp_path: Path) -> Converter:
    return Converter(tmp_path / "out")
