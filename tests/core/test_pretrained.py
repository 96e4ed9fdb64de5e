"""Models and tokenizers of folders that name Python of their own: it never runs."""

from __future__ import annotations

import ast
import json
import os
import pty
import shutil
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import SpecDecError
from specdec.model.config_reader import Rotary
from specdec.text.pretrained import load_config, load_model, load_tokenizer
from specdec.text.pretrained_config import adapt_config, check_rotary
from tests.conftest import ROOT, make_llama, make_tokenizer
from tests.convert.quantized import CASES, make_quantized
from tests.engines import make_engine, run_cli_here
from tests.families import make_family_model
from tests.forks import fork, run_main

# Where the library is told itself: this process of the benchmarks has none of our code.
ALONE = ("benchmarks/side_by_side/workers/transformers_models.py",)
LOADERS = ("specdec/text/pretrained.py", "specdec/text/pretrained_tokenizer.py")
CODE = "from pathlib import Path\nPath({mark!r}).touch()\nraise SystemExit(7)\n"


def list_bare_calls(source: str, *, may_say_no: bool = False) -> list[int]:
    """Lines of `from_pretrained` that are no words of text; those that say no may be let pass."""
    if "from_pretrained" not in source:  # parsing all of the product takes seconds
        return []
    tree = ast.parse(source)
    told = {
        id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)
        and "trust_remote_code=False" in map(ast.unparse, node.keywords)
    }  # fmt: skip
    return [
        node.lineno for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "from_pretrained"
        and not (may_say_no and id(node) in told)
    ]  # fmt: skip


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
                   "match", "recipe", "examples", "benchmarks", "configs")  # fmt: skip
        names = [str(p.relative_to(ROOT)) for f in folders for p in (ROOT / f).rglob("*.py")]
    found = {
        name: lines
        for name in names
        if not name.startswith("tests/") and name not in LOADERS
        if (ROOT / name).is_file()
        if (lines := list_bare_calls((ROOT / name).read_text("utf-8"), may_say_no=name in ALONE))
    }
    assert len(names) > 150
    assert not found, "load through specdec.text.pretrained"


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
    named = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "Model"}
    own = {name: f"own.{kind}" for name, kind in named.items()}
    config |= {"model_type": "own", "architectures": ["OwnModel"], "auto_map": own}
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
        process = fork(lambda: run_main(*arguments), stdin=follower)
        out, err = process.communicate(timeout=300)
    finally:
        os.close(leader)
        os.close(follower)
    assert out == ""
    return process.returncode, err


@pytest.mark.parametrize("stage", ["run", "train", "verify"])
def test_a_stage_asks_no_question_and_runs_no_code(
    hostile: Path, tmp_path: Path, stage: str
) -> None:
    data, engine = tmp_path / "data.jsonl", tmp_path
    data.write_text('{"text": "t1 t2 t3 t4"}\n' * 8)
    if stage != "train":
        engine = make_engine(tmp_path, make_llama(tmp_path, name="plain"), optimize="none")
    arguments = {
        "run": ["--engine-dir", engine, "--tokenizer-dir", hostile, "--input-text", "t1"],
        "train": ["--model-dir", hostile, "--data", data, "--output-dir", tmp_path / "o",
                  "--method", "redrafter", "--max-steps", 1],
        "verify": ["--engine-dir", engine, "--model-dir", hostile],
    }[stage]  # fmt: skip
    if stage == "run":
        status, stderr = run_with_terminal([stage, *map(str, arguments)], b"y\ny\ny\ny\n")
    else:
        done = run_cli_here(stage, *arguments, stdin="y\ny\ny\ny\n")
        status, stderr = done.returncode, done.stderr
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
        ("someone/model", "not a local folder, and at the Hub nothing was asked: HF_HUB_OFFLINE"),
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


class ConnectTimeout(Exception):
    """As both HTTP clients call it."""


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        (socket.gaierror(-2, "Name or service not known"), "cannot be reached: there is no networ"),
        (ConnectionRefusedError(111, "x"), "cannot be reached: connection refused"),
        (ConnectTimeout("read"), "did not answer in time"),
        (ssl.SSLError("bad"), "cannot be reached: its certificate is not trusted here"),
        (None, "cannot be reached"),
    ],
)
def test_a_hub_that_is_not_reached_is_asked_once(
    cause: Exception | None, told: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """And it is told in a sentence, with the folder that may have been meant."""
    (tmp_path / "examples" / "target").mkdir(parents=True)
    (tmp_path / "exampls").mkdir()
    monkeypatch.chdir(tmp_path)
    import huggingface_hub
    import transformers

    calls: list[str] = []

    def refuse(self: object, name: str, **_: object) -> None:
        calls.append(name)
        raise ConnectionError("Max retries exceeded with url: " + "x" * 5000) from cause

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: pytest.fail("asked again")
    )
    with pytest.raises(SpecDecError) as caught:
        load_tokenizer("exmples/target")
    assert calls == ["exmples/target"]
    absent = "--tokenizer-dir exmples/target is not a local folder (did you mean examples/target?)"
    assert caught.value.message.startswith(f"{absent}, and the Hugging Face Hub {told}")
    assert len(caught.value.message) < 200
    assert capfd.readouterr() == ("", "")


def test_tokenizer_json_is_loaded_without_the_class_that_chooses_one(tmp_path: Path) -> None:
    """The other's imports take more than a second."""
    folder = make_tokenizer(tmp_path / "tokenizer")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    code = (
        "import sys\nfrom specdec.text.pretrained import load_tokenizer\n"
        f"load_tokenizer({str(folder)!r})\n"
        "sys.exit('transformers.models.auto.tokenization_auto' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("value", ["many", ["2048"]])
def test_a_longest_text_that_is_no_number(value: Any, tmp_path: Path) -> None:
    """Which transformers compares with the number of tokens of each text."""
    folder = make_tokenizer(tmp_path / "tokenizer")
    path = folder / "tokenizer_config.json"
    keys = json.loads(path.read_text())
    path.write_text(json.dumps(keys | {"model_max_length": value}))
    with pytest.raises(SpecDecError, match="model_max_length in .* is .*, not a number") as caught:
        load_tokenizer(folder)
    assert caught.value.hint == "correct it, or take it out"
    for number in (1e30, 5, None):
        path.write_text(json.dumps(keys | {"model_max_length": number}))
        assert len(load_tokenizer(folder)("a b c d e f g h")["input_ids"]) > 5


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LONGROPE = {
    "type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 2.1, 2.2, 2.3],
}  # fmt: skip
# Family, fields in the words of transformers 4.57, and the name of the file that has 5's.
SPELLINGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_theta": 500.0}),
    ("llama", {"rope_theta": 500.0, "rope_scaling": LLAMA3}),
    ("llama", {"rope_theta": 500.0, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    ("mistral", {"rope_theta": 500.0}),
    ("llama", {"rope_theta": 500.0, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    ("qwen3", {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ("phi3", {"rope_theta": 500.0, "partial_rotary_factor": 0.5}),
    ("phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 12}),
    ("stablelm", {"rope_theta": 500.0, "partial_rotary_factor": 0.75}),
    ("gemma", {"rope_theta": 500.0}),
    ("gemma3", {
        "rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "rope_local_base_freq": 50.0, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    }),
    ("qwen3_moe", {"rope_theta": 500.0, "num_experts": 4}),
]  # fmt: skip


def respell(fields: dict[str, Any]) -> dict[str, Any]:
    """The same fields of a config.json as transformers 5 writes them."""
    new = dict(fields)
    parameters = {
        "rope_type": "default", "rope_theta": new.pop("rope_theta", 10000.0),
        **(new.pop("rope_scaling", None) or {}),
    }  # fmt: skip
    parameters["rope_type"] = parameters.get("type", parameters["rope_type"])
    if "partial_rotary_factor" in new:
        parameters["partial_rotary_factor"] = new.pop("partial_rotary_factor")
    if "rope_local_base_freq" in new:
        local = {"rope_type": "default", "rope_theta": new.pop("rope_local_base_freq")}
        parameters = {"full_attention": parameters, "sliding_attention": local}
    if "num_experts" in new:
        new["num_local_experts"] = new.pop("num_experts")
    return new | {"rope_parameters": parameters}


def compute_logits(folder: Path) -> Any:
    import torch

    model = load_model(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(40)[None] * 7 % 61, use_cache=False).logits


@pytest.mark.parametrize(("family", "fields"), SPELLINGS)
def test_either_version_reads_what_the_other_wrote(
    tmp_path: Path, family: str, fields: dict[str, Any]
) -> None:
    """4.57 took its own rotary base for 5's without a word, and 128 experts for 4."""
    import torch

    folder = make_family_model(tmp_path, family)
    path = folder / "config.json"
    names = {
        *fields, "rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor",
        "num_experts", "num_local_experts",
    }  # fmt: skip
    kept = {k: v for k, v in json.loads(path.read_text()).items() if k not in names}
    found = []
    for spelled in (fields, respell(fields), {k: fields[k] for k in fields if "rope" not in k}):
        path.write_text(json.dumps(kept | spelled))
        found.append(compute_logits(folder))
    assert torch.equal(found[0], found[1])
    assert float((found[0] - found[2]).abs().max()) > 0.01
    if "rope_theta" not in fields:
        return
    path.write_text(json.dumps(kept | respell(fields) | {"rope_theta": 777.0}))
    with pytest.raises(SpecDecError, match="rope_theta is 777.0 and in rope_parameters 500.0"):
        load_config(folder)


def test_a_model_that_rotates_otherwise_is_refused(tmp_path: Path) -> None:
    folder = make_llama(tmp_path, head_dim=16)
    config, model = load_config(folder), load_model(folder)
    check_rotary(model, config, Rotary(base=10000.0), str(folder))
    for rotary in (Rotary(base=500.0), Rotary(scaling={"rope_type": "linear", "factor": 2.0})):
        with pytest.raises(SpecDecError, match="rotates by frequencies, or") as caught:
            check_rotary(model, config, rotary, str(folder))
        assert "transformers>=5" in caught.value.hint


@pytest.mark.parametrize(
    ("family", "fields", "fact"),
    [
        ("gpt2", {"rope_parameters": {"rope_theta": 500.0}}, "rope_theta 500 in a gpt2"),
        ("llama", {"rope_parameters": {"rope_theta": 5.0, "partial_rotary_factor": 0.5}},
         "partial_rotary_factor 0.5 in a llama"),
        ("mistral", respell(SPELLINGS[10][1]), "rope_local_base_freq 50"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("qwen2_moe", {"layer_types": ["sliding_attention"]}, "layer_types ['sliding_attention']"),
    ],
)  # fmt: skip
def test_what_an_old_transformers_cannot_be_told_is_refused(
    family: str, fields: dict[str, Any], fact: str
) -> None:
    import transformers

    from tests.families import CLASSES

    base = getattr(transformers, CLASSES[family][0])
    if not transformers.__version__.startswith("4."):
        pytest.skip("transformers 5 knows all of it")
    with pytest.raises(SpecDecError) as caught:
        adapt_config(base(**fields), fields, Path("config.json"))
    assert fact in caught.value.message
    assert "transformers>=5" in caught.value.hint


def test_a_head_that_is_stored_is_the_head(tmp_path: Path) -> None:
    """config.json says tied: so it is where the head lacks or is equal, and where it alone is."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = make_llama(tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    for stored, expected in (
        ((embedding, head), (embedding, head)), ((embedding, None), (embedding, embedding)),
        ((None, head), (head, head)), ((embedding, embedding.clone()), (embedding, embedding)),
    ):  # fmt: skip
        names = zip(("model.embed_tokens.weight", "lm_head.weight"), stored, strict=True)
        kept = {name: t for name, t in tensors.items() if "embed" not in name and "lm_" not in name}
        kept |= {name: tensor for name, tensor in names if tensor is not None}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        model = load_model(folder)
        assert torch.equal(model.get_input_embeddings().weight, expected[0])
        assert torch.equal(model.get_output_embeddings().weight, expected[1])


def test_a_model_without_all_its_weights_is_refused(tmp_path: Path) -> None:
    """transformers draws what lacks at random, and a drafter would learn from that."""
    from safetensors.torch import load_file, save_file

    folder = make_llama(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for kind in ("AutoModelForCausalLM", "AutoModel"):
        with pytest.raises(SpecDecError, match="finds no weights in .*1.mlp.up_proj.weight"):
            load_model(folder, kind)


def test_a_quantization_that_transformers_has_not_is_named(tmp_path: Path) -> None:
    folder, _ = make_quantized(tmp_path, CASES["modelopt-int4"])
    with pytest.raises(SpecDecError, match=r"is quantized \('modelopt'\), and transf") as info:
        load_model(folder)
    assert info.value.hint.startswith("give the model that it was quantized from")


@pytest.mark.parametrize("name", ["fp8-static", "fp8-dynamic"])
def test_quantized_weights_without_their_scales_are_refused(name: str, tmp_path: Path) -> None:
    """As AutoFP8 names them, whose codes transformers 5.24 takes for the weights on a CPU."""
    import transformers

    if transformers.__version__.startswith("4."):
        pytest.skip("transformers 4 loads no float8 on a CPU")
    folder, _ = make_quantized(tmp_path, CASES[name])
    with pytest.raises(SpecDecError, match="without their scales: .*0.mlp.down_proj.weight_scale"):
        load_model(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["etao", "inoi"]},
        {"tokenizer_class": "Qwen2Tokenizer", "extra_special_tokens": ["etao", "inoi"]},
        {"tokenizer_class": "TokenizersBackend", "image_token": "etao",
         "model_specific_special_tokens": {"image_token": "etao"},
         "extra_special_tokens": ["inoi"]},
    ],
)  # fmt: skip
def test_a_tokenizer_in_the_words_of_transformers_5(tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = make_tokenizer(tmp_path / "tokenizer")
    plain = load_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    kept = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "backend": "tokenizers"}
    path.write_text(json.dumps(kept | fields))
    loaded = load_tokenizer(folder)
    assert loaded("def f(x):").input_ids == plain("def f(x):").input_ids
    assert {"etao", "inoi"} < set(loaded.all_special_tokens)
    assert loaded.eos_token_id == plain.eos_token_id
    assert loaded.decode(loaded("xetao").input_ids, skip_special_tokens=True) == "x"
    document = json.loads((folder / "tokenizer.json").read_text())
    document["model"]["type"] = "ANewOne"
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(SpecDecError, match="cannot load its tokenizer") as caught:
        load_tokenizer(folder)
    import transformers

    assert transformers.__version__[0] != "4" or "transformers>=5" in caught.value.hint


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizers_file_that_is_not_json(name: str, tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path)
    (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    with pytest.raises(SpecDecError, match=f"{name} is not JSON: it begins with a byte order"):
        load_tokenizer(folder)


def test_a_tokenizer_without_its_vocabulary_is_refused(tmp_path: Path) -> None:
    """transformers 5 made one of three special tokens, to which every prompt is empty."""
    fields = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    with pytest.raises(SpecDecError, match="special tokens alone|cannot load its tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer.json", "merges.txt", "tokenizer_config.json"])
def test_a_pointer_of_git_lfs_is_called_what_it_is(file: str, tmp_path: Path) -> None:
    """transformers says "Expecting value", or names a token that its lines do not have."""
    folder = make_tokenizer(tmp_path / "tokenizer")
    if file == "merges.txt":
        names = {chr(97 + place): place for place in range(26)}
        (folder / "vocab.json").write_text(json.dumps(names))
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 9085657\n"
    (folder / file).write_text(pointer)
    with pytest.raises(SpecDecError, match=f"{file} is a pointer of Git LFS"):
        load_tokenizer(folder)
