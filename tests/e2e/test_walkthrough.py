"""docs/walkthrough.md: every command dry-run, every number computed again.

Conversions are planned on empty files of the real models' shapes; all else runs on small models
with the same kinds of configuration. Nothing is downloaded.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.command.stages import load_command
from specdec.files import staging
from tests.conftest import ROOT, make_drafter, make_medusa_heads, make_tokenizer
from tests.engines import call_here
from tests.sparse import write_sparse

PAGE = (ROOT / "docs" / "walkthrough.md").read_text()
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000}
# What each model's config.json says on the hub.
BASES: dict[str, dict[str, Any]] = {
    "vicuna-7b-v1.3": LLAMA | {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "torch_dtype": "float16",
    },
    "TinyLlama-1.1B-Chat-v1.0": LLAMA | {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
        "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
    },
    "Qwen2.5-7B-Instruct": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 152064,
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": 131072,
        "use_sliding_window": False, "max_window_layers": 28, "torch_dtype": "bfloat16",
    },
}  # fmt: skip
TYPES = {"float16": "F16", "bfloat16": "BF16"}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128}
HEAD_FOLDERS = {
    "drafter_model_dir": "redrafter", "medusa_model_dir": "medusa",
}  # fmt: skip


def read_commands() -> list[list[str]]:
    """The words of each line of the page's bash blocks."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines() if line.strip()]


def read_recipe(name: str) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "configs" / name).read_text())
    return sections


def read_tables() -> dict[str, list[str]]:
    """The rows of the page's tables, by their first cell; of equal ones in order."""
    rows: dict[str, list[str]] = {}
    for line in PAGE.splitlines():
        if line.startswith("|") and "---" not in line:
            first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            rows[first.strip("`")] = [*rows.get(first.strip("`"), []), *cells]
    return rows


RECIPES = sorted({words[3 if words[1] == "data" else 2] for words in read_commands()
                  if words[0].startswith("specdec-")})  # fmt: skip


# --- the real shapes ---


def list_shapes(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Every tensor's shape, from transformers' own model of a configuration, without weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **values)
        )
    return {name: list(weight.shape) for name, weight in model.named_parameters()}


def list_head_shapes(method: str, base: Mapping[str, Any], count: int) -> dict[str, list[int]]:
    """Of the drafter that specdec-train's defaults make for a target: one residual layer a Medusa
    head, two of ReDrafter, which is twice as wide as the target."""
    hidden, vocab = base["hidden_size"], base["vocab_size"]
    shapes: dict[str, list[int]] = {}
    if method == "medusa":
        for head in range(count):
            shapes[f"{head}.0.linear.weight"] = [hidden, hidden]
            shapes[f"{head}.0.linear.bias"] = [hidden]
            shapes[f"{head}.1.weight"] = [vocab, hidden]
        return shapes
    width = 2 * hidden
    for layer in range(2):
        shapes[f"lm_head.{layer}.linear.weight"] = [width, width]
        shapes[f"lm_head.{layer}.linear.bias"] = [width]
    shapes["lm_head.2.weight"] = [vocab, width]
    shapes |= {"rnn_u.weight": [hidden, hidden], "rnn_u.bias": [hidden]}
    return shapes | {"rnn_w.weight": [hidden, hidden]}


def count_parameters(shapes: Mapping[str, list[int]]) -> int:
    import math

    return sum(math.prod(shape) for shape in shapes.values())


@pytest.fixture(scope="module")
def shapes() -> dict[str, dict[str, list[int]]]:
    return {name: list_shapes(config) for name, config in BASES.items()}


@pytest.fixture
def real(
    shapes: dict[str, dict[str, list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder with every model that the page names, of its real size and without its bytes."""
    for name, config in BASES.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        write_sparse(folder / "model.safetensors", shapes[name], TYPES[config["torch_dtype"]])
    for recipe in RECIPES:
        convert = read_recipe(Path(recipe).name)["convert"]
        base = BASES[convert["model_dir"]]
        for key in set(convert) & set(HEAD_FOLDERS):
            folder = tmp_path / convert[key]
            folder.mkdir()
            method = HEAD_FOLDERS[key]
            count = 5 if "vicuna" in convert[key] else 3  # as published; as the recipe trains
            own = list_head_shapes(method, base, count)
            name = "medusa_lm_head.safetensors" if method == "medusa" else "model.safetensors"
            write_sparse(folder / name, own, TYPES[base["torch_dtype"]])
            medusa = {"medusa_num_heads": count, "medusa_num_layers": 1}
            redrafter = {
                "architectures": ["DrafterModel"], "model_type": "recurrent_drafter", "rnn": True,
                "hidden_size": base["hidden_size"], "exit_dim": 2 * base["hidden_size"],
                "num_draft_layers": 2, "vocab_size": base["vocab_size"],
            }  # fmt: skip
            document = medusa if method == "medusa" else redrafter
            (folder / "config.json").write_text(json.dumps(document))
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(staging, "measure_free_space", lambda path: (path, 10**12))
    return tmp_path


def test_the_numbers_are_those_of_the_shapes(
    real: Path, shapes: dict[str, dict[str, list[int]]]
) -> None:
    """Parameters, bytes and memory, by the formulas that the page gives."""
    table = read_tables()
    planned = {
        recipe: call_here("convert", ["--config", recipe, "--dry-run"]) for recipe in RECIPES
    }
    sizes = {Path(recipe).stem: report["total_bytes"] for recipe, report in planned.items()}
    caches, parameters = {}, {}
    short = {"vicuna-7b-v1.3": "Vicuna 7B", "Qwen2.5-7B-Instruct": "Qwen2.5 7B"}
    for name, config in BASES.items():
        heads = config["num_attention_heads"]
        kv_size = config["hidden_size"] // heads * config.get("num_key_value_heads", heads)
        caches[name] = config["num_hidden_layers"] * 2 * kv_size * 2
        parameters[name] = count_parameters(shapes[name])
        row = table[short.get(name, "TinyLlama")]
        dtype = config["torch_dtype"]
        assert row[-3:] == [
            f"{parameters[name]:,}",
            f"{2 * parameters[name] / 1e9:.2f} GB {dtype}",
            f"{caches[name]:,} bytes",
        ]
    for recipe in map(Path, RECIPES):
        if recipe.stem.endswith("-draft"):
            continue
        sections = read_recipe(recipe.name)
        base = sections["convert"]["model_dir"]
        config, target = BASES[base], parameters[base]
        stored, cache = sizes[recipe.stem], caches[base]
        if recipe.stem.startswith("draft_target"):
            draft = read_recipe(f"{recipe.stem}-draft.yaml")["convert"]["model_dir"]
            drafter = parameters[draft]
            stored += sizes[f"{recipe.stem}-draft"]
            cache += caches[draft]
        else:
            method = recipe.stem.split("-")[0]
            heads = sections["convert"].get("num_medusa_heads", 3)
            drafter = count_parameters(list_head_shapes(method, config, heads))
        is_trained = "train" in sections
        memory = (2 * target + 16 * drafter) / 1e9
        running = (stored + 4 * 2048 * cache) / 1e9
        expected = [
            f"{drafter:,}", f"{stored / 1e9:.2f} GB", f"{memory:.2f} GB", f"{running:.2f} GB",
        ]  # fmt: skip
        row = table[recipe.stem]
        found = [row[0], row[1].removesuffix(", both"), row[2], row[4].split(":")[0]]
        if not is_trained:
            expected[2] = row[2]
            assert not re.search(r"\d", row[2] + row[3])
        else:
            # The GPU has a third more than the weights, their gradients and moments take.
            assert float(row[3].split()[0]) > 4 / 3 * memory
        assert found == expected, recipe.stem
        assert float(row[4].split()[-2]) > running


# --- the commands ---


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the downloads leave it, with small models; `trained` is what training makes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for name, config in BASES.items():
        ratio = config["num_attention_heads"] // config.get("num_key_value_heads", 1)
        is_grouped = "num_key_value_heads" in config
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2 if is_grouped else 4}
        assert ratio > 1
        values = config | SMALL | heads
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(values.pop("model_type"), **values)
        )
        dtype = getattr(torch, config["torch_dtype"])
        model.to(dtype).save_pretrained(tmp_path / name)
        make_tokenizer(tmp_path / name)
    make_medusa_heads(tmp_path, heads=5, name="medusa-vicuna-7b-v1.3")
    make_medusa_heads(tmp_path / "trained", heads=3, name="qwen2.5-7b-medusa")
    for name in ("vicuna-7b-drafter", "tinyllama-drafter"):
        make_drafter(tmp_path / "trained", name=name)
    (tmp_path / "Daring-Anteater").mkdir()
    row = {"conversations": [{"from": "User", "value": "a"}, {"from": "Assistant", "value": "b"}]}
    (tmp_path / "Daring-Anteater" / "train.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "out").mkdir()
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check_download(words: list[str]) -> None:
    """A hub id is kept in the folder of its own name, which the recipes read."""
    assert words[:2] == ["hf", "download"]
    assert words[words.index("--local-dir") + 1] == words[2].split("/")[1]


def check_server(words: list[str]) -> None:
    """The server's name for the model is what a recipe's data section asks for, as it is typed."""
    assert words[:2] == ["vllm", "serve"]
    asked = [read_recipe(Path(recipe).name).get("data", {}) for recipe in RECIPES]
    port = words[words.index("--port") + 1]
    matching = [data for data in asked if data.get("model") == words[2]]
    assert matching
    assert all(data["base_url"] == f"http://127.0.0.1:{port}/v1" for data in matching)


def resolve(name: str, arguments: list[str], where: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a command hands to the function that does its work, which is not called."""
    module, function = where.rsplit(".", 1)
    taken: list[Any] = []

    class Taken(Exception):
        pass

    def take(settings: Any) -> None:
        taken.append(settings)
        raise Taken

    command = load_command(name)
    with monkeypatch.context() as patch:
        patch.setattr(importlib.import_module(f"specdec.{module}"), function, take)
        with pytest.raises(Taken):
            command.main(arguments, standalone_mode=False)
    return taken[0]


def test_every_command_of_the_page(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the page's order: what can be dry-run is, and the rest has its settings checked."""
    from specdec.decode.drafters import read_drafting
    from specdec.measure.settings import read_counts
    from specdec.train.data.pipeline import check_settings as check_data
    from specdec.train.flags import check_settings as check_training
    from specdec.train.pipeline import fill_defaults
    from specdec.verify.settings import check_settings as check_verify_flags

    seen = set()
    for name, *arguments in read_commands():
        if name in ("hf", "vllm"):
            {"hf": check_download, "vllm": check_server}[name]([name, *arguments])
            continue
        if name == "mkdir":
            assert arguments == ["-p", "out"]
            continue
        stage = name.removeprefix("specdec-")
        seen.add(stage if arguments[0] != "data" else "data")
        if stage in ("convert", "build"):
            planned = call_here(stage, [*arguments, "--dry-run"])
            assert planned["dry_run"] is True
            # For what comes after; kernels would take seconds each.
            optimize = ["--optimize", "none"] if stage == "build" else []
            call_here(stage, [*arguments, *optimize])
        elif stage == "run":
            found = call_here("run", [*arguments, "--dry-run"])
            method = Path(arguments[1]).stem.split("-")[0]
            assert found["method"] in (method, f"suffix,{method}")
        elif arguments[0] == "data":
            settings = resolve(
                "train", arguments, "train.data.pipeline.regenerate_data", monkeypatch
            )
            check_data(settings)
            settings.output.write_text('{"text": "which the training reads"}\n')
        elif stage == "train":
            settings = resolve("train", arguments, "train.pipeline.train_drafter", monkeypatch)
            check_training(fill_defaults(settings))
            if not settings.sanity:
                (small / "trained" / settings.output_dir).rename(settings.output_dir)
        elif stage == "verify":
            settings = resolve("verify", arguments, "verify.engine.verify_engine", monkeypatch)
            check_verify_flags(settings)
            assert settings.engine_dir.is_dir()
            assert Path(settings.model_dir).is_dir()
        else:
            assert stage == "bench"
            settings = resolve("bench", arguments, "measure.pipeline.run_bench", monkeypatch)
            read_drafting(settings.to_decode(), None)
            assert read_counts("--batch-sizes", settings.batch_sizes) == [1]
            assert settings.engine_dir.is_dir()
    assert seen == {"data", "train", "convert", "build", "verify", "bench", "run"}


def test_downloads_are_what_the_recipes_read() -> None:
    downloads = {w[2]: w[w.index("--local-dir") + 1] for w in read_commands() if w[0] == "hf"}
    needed: set[str] = set()
    made: set[str] = set()
    for recipe in RECIPES:
        sections = read_recipe(Path(recipe).name)
        convert = sections["convert"]
        needed |= {convert[key] for key in ("model_dir", *HEAD_FOLDERS) if key in convert}
        made.add(sections.get("train", {}).get("output_dir", ""))
        if "data" in sections:
            needed.add(sections["data"]["input"].split("/")[0])
            assert sections["data"]["model"] in downloads
    assert needed - made == set(downloads.values())
