"""Models and tokenizers of folders that name Python of their own: it never runs."""

from __future__ import annotations

import ast
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.errors import SpecDecError
from specdec.pretrained import load_config, load_model, load_tokenizer
from tests.conftest import ROOT, make_llama, make_tokenizer

# Where the library is told itself: this process of the benchmarks has none of our code.
ALONE = ("benchmarks/side_by_side/workers/transformers_models.py",)
CODE = "from pathlib import Path\nPath({mark!r}).touch()\nraise SystemExit(7)\n"


def list_bare_calls(source: str, *, may_say_no: bool = False) -> list[int]:
    """Lines of `from_pretrained` that are no words of text; those that say no may be let pass."""
    tree = ast.parse(source)
    told = {
        id(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and any(
            word.arg == "trust_remote_code"
            and isinstance(word.value, ast.Constant)
            and word.value.value is False
            for word in node.keywords
        )
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "from_pretrained"
        and not (may_say_no and id(node) in told)
    ]


def test_the_check_sees_a_bare_call() -> None:
    assert list_bare_calls("a = 1\nx = AutoTokenizer.from_pretrained(d)") == [2]
    told = "x = A.from_pretrained(d, trust_remote_code=False)"
    assert list_bare_calls(told) == [1]
    assert list_bare_calls(told, may_say_no=True) == []
    assert list_bare_calls(told.replace("False", "None"), may_say_no=True) == [1]


def test_nothing_but_the_loader_calls_from_pretrained() -> None:
    done = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    names = done.stdout.split() if done.returncode == 0 else []
    if not names:  # a copy without its history
        folders = ("specdec", "convert", "build", "run", "train", "verify", "bench", "doctor",
                   "examples", "benchmarks", "configs")  # fmt: skip
        names = [str(p.relative_to(ROOT)) for f in folders for p in (ROOT / f).rglob("*.py")]
    found = {
        name: lines
        for name in names
        if not name.startswith("tests/") and name != "specdec/pretrained.py"
        if (ROOT / name).is_file()
        if (lines := list_bare_calls((ROOT / name).read_text("utf-8"), may_say_no=name in ALONE))
    }
    assert len(names) > 150
    assert not found, "load through specdec.pretrained"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A Llama whose configuration, model and tokenizer name Python of their own."""
    folder = make_llama(tmp_path, vocab=128)
    make_tokenizer(tmp_path / "t")
    for path in (tmp_path / "t").iterdir():
        shutil.copy(path, folder)
    code = CODE.format(mark=str(tmp_path / "ran"))
    (folder / "own.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own",
        "architectures": ["OwnModel"],
        "auto_map": {
            "AutoConfig": "own.Config", "AutoModel": "own.Model",
            "AutoModelForCausalLM": "own.Model",
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text())
    tokenizer |= {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": ["own.Tokenizer", "own.Fast"]},
    }
    path.write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.parametrize("load", [load_tokenizer, load_config, load_model])
def test_code_of_a_folder_is_refused_by_name(hostile: Path, load: object) -> None:
    assert callable(load)
    with pytest.raises(SpecDecError, match="asks to run its own Python code .*own") as caught:
        load(hostile)
    assert str(hostile) in caught.value.message
    assert "trust_remote_code" not in caught.value.message
    assert "transformers has itself" in caught.value.hint
    assert not (hostile.parent / "ran").exists()


def run_with_terminal(arguments: list[str], answer: bytes) -> tuple[int, str]:
    """Run `specdec ARGUMENTS` with a terminal as stdin, in which `answer` has been typed."""
    leader, follower = pty.openpty()
    try:
        os.write(leader, answer)
        done = subprocess.run(
            [sys.executable, "-m", "specdec", *arguments],
            cwd=ROOT, stdin=follower, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    finally:
        os.close(leader)
        os.close(follower)
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.parametrize("stage", ["run", "train", "verify"])
def test_a_stage_asks_no_question_and_runs_no_code(
    hostile: Path, tmp_path: Path, stage: str
) -> None:
    plain = make_llama(tmp_path, name="plain")
    checkpoint, engine, data = tmp_path / "ck", tmp_path / "en", tmp_path / "data.jsonl"
    data.write_text('{"text": "t1 t2 t3 t4"}\n' * 8)
    if stage != "train":
        from specdec.build.pipeline import build_engine
        from specdec.build.settings import BuildSettings
        from specdec.convert.pipeline import convert_model
        from specdec.convert.settings import ConvertSettings

        convert_model(ConvertSettings(model_dir=str(plain), output_dir=checkpoint))
        build_engine(BuildSettings(checkpoint_dir=checkpoint, output_dir=engine, backend="torch"))
    arguments = {
        "run": ["--engine-dir", engine, "--tokenizer-dir", hostile, "--input-text", "t1"],
        "train": ["--model-dir", hostile, "--data", data, "--output-dir", tmp_path / "o",
                  "--method", "redrafter", "--max-steps", 1],
        "verify": ["--engine-dir", engine, "--model-dir", hostile],
    }[stage]  # fmt: skip
    status, stderr = run_with_terminal([stage, *map(str, arguments)], b"y\ny\ny\ny\n")
    assert status == 1, stderr
    *_, error, hint = stderr.strip().splitlines()
    assert "asks to run its own Python code" in error, stderr
    assert hint.startswith("hint: ")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "o").exists()


def test_attention_code_of_the_hub_is_refused(tmp_path: Path) -> None:
    folder = make_llama(tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attn_implementation": "a/kernel"}))
    with pytest.raises(SpecDecError, match="attn_implementation in config.json is 'a/kernel'"):
        load_model(folder)


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("no/such/folder", "no/such/folder does not exist, nor does no"),
        ("./nothere", "./nothere does not exist"),
        (
            "someone/model",
            "is not a local folder, and at the Hub nothing was asked: HF_HUB_OFFLINE",
        ),
        ("", "--tokenizer-dir is empty"),
    ],
)
def test_an_absent_folder_is_said_in_one_line(
    name: str, fact: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SpecDecError) as caught:
        load_tokenizer(name)
    assert fact in caught.value.message
    assert capfd.readouterr() == ("", "")


def test_a_hub_that_is_not_reached_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub
    import transformers

    calls: list[str] = []

    def refuse(self: object, name: str, **_: object) -> None:
        calls.append(name)
        raise ConnectionError("Max retries exceeded with url: " + "x" * 5000)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: pytest.fail("asked again")
    )
    with pytest.raises(SpecDecError, match="the Hub gave ConnectionError: Max retries") as caught:
        load_tokenizer("someone/model")
    assert calls == ["someone/model"]
    assert len(caught.value.message) < 400
    assert capfd.readouterr() == ("", "")


def test_a_plain_tokenizer_is_loaded_without_the_class_that_chooses_one(tmp_path: Path) -> None:
    """It is the same one; the other's imports take a second."""
    import transformers

    folder = make_tokenizer(tmp_path / "tokenizer")
    chosen = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    loaded = load_tokenizer(folder)
    assert type(loaded) is type(chosen)
    assert loaded.init_kwargs == chosen.init_kwargs
    assert loaded("def f(x):").input_ids == chosen("def f(x):").input_ids
    if not transformers.__version__.startswith("4."):
        return
    code = (
        "import sys\nfrom specdec.pretrained import load_tokenizer\n"
        f"load_tokenizer({str(folder)!r})\n"
        "sys.exit('transformers.models.auto.tokenization_auto' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
