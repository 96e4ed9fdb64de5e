"""Models in the place of engine folders: `specdec-serve --model-dir`."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from specdec import Engine, UsageError
from specdec.serve.models import hold_engines, place_models
from specdec.serve.settings import ServeSettings
from specdec.system.cache import find_cache
from tests.conftest import make_llama, make_tokenizer
from tests.serve.servers import CLIENT, post, serve_here


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = make_llama(tmp_path_factory.mktemp("served"), seed=5)
    make_tokenizer(target)
    return target


def test_a_model_is_served_as_python_loads_it(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = find_cache()
    assert cache is not None
    if (cache / "kernels").exists():  # compiled already, unlike all else
        shutil.copytree(cache / "kernels", tmp_path / "kernels")
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path))
    asked = ServeSettings(model_dir=str(model_dir), max_batch_size=2, max_seq_len=64, device="cpu")
    with contextlib.ExitStack() as stack:
        settings = hold_engines(stack, place_models(asked))
        with serve_here(
            settings.engine_dir, tokenizer_dir=settings.tokenizer_dir, max_batch_size=2,
            served_model_name=settings.served_model_name,
        ) as (_, url):  # fmt: skip
            (card,) = CLIENT.get(f"{url}/v1/models").json()["data"]
            told = post(url, "/v1/completions", prompt="abc", max_tokens=8, temperature=0)
        assert (card["id"], card["max_model_len"]) == (model_dir.name, 64)
        engine = stack.enter_context(Engine.load(model_dir, max_batch_size=2, max_seq_len=64))
        (expected,) = engine.generate(["abc"], max_output_len=8)
    assert told["choices"][0]["text"] == expected.text
    assert len(list(tmp_path.glob("**/engine/config.json"))) == 1  # both took the kept one


@pytest.mark.parametrize("option", ["model_dir", "draft_model_dir"])
def test_what_is_no_model_is_refused(option: str, model_dir: Path) -> None:
    values: dict[str, Any] = {"model_dir": str(model_dir), option: "/nowhere"}
    flag = option.replace("_", "-")
    with pytest.raises(UsageError, match=f"--{flag} /nowhere is no model's folder"):
        place_models(ServeSettings(**values))


@pytest.mark.parametrize("name", ["gpt2", "owner/name"])
def test_a_name_on_the_hub_is_a_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an owner or without one, as for generate."""
    held: list[dict[str, Any]] = []

    def hold_models(stack: Any, fixed: dict[str, Any], options: Any) -> tuple[Path, Path]:
        held.append(fixed)
        return tmp_path / "engine", tmp_path / "draft"

    monkeypatch.setattr("specdec.generate.library.hold_models", hold_models)
    asked = ServeSettings(model_dir=name, draft_model_dir=name, device="cpu")
    with contextlib.ExitStack() as stack:
        settings = hold_engines(stack, place_models(asked))
    assert (settings.engine_dir, settings.draft_engine_dir) == (
        tmp_path / "engine",
        tmp_path / "draft",
    )
    assert settings.served_model_name == Path(name).name
    assert [(fixed["model_dir"], fixed["draft_model_dir"]) for fixed in held] == [(name, name)]


def test_ranks_of_a_launcher_need_an_engine(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.system.logs.get_launched_rank", lambda: 1)
    with pytest.raises(UsageError, match="--model-dir under a launcher"):
        place_models(ServeSettings(model_dir=str(model_dir)))
