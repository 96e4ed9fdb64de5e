"""Hidden states kept on disk: the same weights as without, and nothing foreign or torn is read."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specdec.errors import SpecDecError
from specdec.files.tensor_file import TensorFile
from specdec.train import fp8, hidden_states, setup, target
from specdec.train.methods import load_method
from specdec.train.rows import TokenRows
from specdec.train.settings import TrainSettings
from tests.conftest import ROOT

BASIC = (
    "--dtype", "float32", "--model-max-length", 32, "--batch-size", 2, "--seed", 3,
    "--learning-rate", 0.01, "--max-steps", 4, "--eval-prompts", 0,
)  # fmt: skip
KINDS = {
    "redrafter": ("--method", "redrafter", "--redrafter-predict-n-tokens", 3),
    "medusa": ("--method", "medusa", "--self-distillation", 0.5),
    "eagle": ("--method", "eagle"),
    "eagle3": ("--method", "eagle", "--eagle-version", 3),
    "dflash": ("--method", "dflash", "--dflash-block-size", 4, "--dflash-num-anchors", 3),
}


@pytest.fixture
def inputs(target_dir: Path, data_file: Path) -> tuple[object, ...]:
    return ("--model-dir", target_dir, "--data", data_file, *BASIC)


@pytest.fixture(autouse=True)
def make_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several files of states even of the little data here."""
    monkeypatch.setattr(hidden_states, "SHARD_BYTES", 1 << 15)


def hide_the_layers(patch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("the target was loaded")

    patch.setattr(target, "load_target", fail)


def read_bytes(folder: Path) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    assert len(files) == 1
    return files


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_the_bytes_of_a_run_with_the_target(
    kind: str, run_train: Any, inputs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the run that writes the states, and in one that has them and no target any more."""
    options, states = (*inputs, *KINDS[kind]), tmp_path / "states"
    run_train(*options, "--output-dir", tmp_path / "live")
    options = (*options, "--hidden-states-dir", states)
    first = run_train(*options, "--output-dir", tmp_path / "first")
    assert f"hidden states: they are in {states}" in first.err
    kept = {path.name: path.stat().st_mtime_ns for path in states.iterdir()}
    assert len([name for name in kept if name.startswith("train-")]) > 2
    check_sizes(states)
    with monkeypatch.context() as patch:
        hide_the_layers(patch)
        run_train(*options, "--output-dir", tmp_path / "second")
    wanted = read_bytes(tmp_path / "live")
    assert read_bytes(tmp_path / "first") == wanted
    assert read_bytes(tmp_path / "second") == wanted
    assert {path.name: path.stat().st_mtime_ns for path in states.iterdir()} == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "live", "second", "states"]


def check_sizes(states: Path) -> None:
    """Compare the bytes of real files with those of a token, of which the page has a table."""
    manifest = json.loads((states / "manifest.json").read_text())
    files = [TensorFile(path) for path in states.glob("*-0*.safetensors")]
    plan = hidden_states.StatesPlan(
        facts={}, splits={}, layers=tuple(manifest["layers"]), vocab_size=320, hidden_size=32,
        dtype=manifest["dtype"], compute_dtype="float32",
    )  # fmt: skip
    num_tokens = sum(file.tensors["hidden"].shape[0] for file in files)
    num_bytes = sum(info.num_bytes for file in files for info in file.tensors.values())
    assert num_bytes == num_tokens * plan.token_bytes


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-64])


def exchange(path: Path) -> None:
    """Put another file's rows there, in number and shape like those of this one."""
    other = path.parent / "train-00002.safetensors"
    assert other.stat().st_size == path.stat().st_size
    path.write_bytes(other.read_bytes())


def flip(path: Path) -> None:
    """Change a number of the last tensor, which is as good as any other."""
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)


def test_other_torn_and_poor_states_are_refused(
    run_train: Any, inputs: Any, target_dir: Path, data_file: Path, tmp_path: Path
) -> None:
    """Of another target, of other data, damaged, or without what a method reads."""
    from transformers import AutoModelForCausalLM

    states = tmp_path / "states"
    options = (
        *inputs, "--output-dir", tmp_path / "out", "--hidden-states-dir", states, "--max-steps", 1,
        "--force",
    )  # fmt: skip
    run_train(*options)
    manifest = json.loads((states / "manifest.json").read_text())
    assert [set(shard) for shard in manifest["shards"][:1]] == [{"part", "number", "first", "stop"}]
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    kept = TensorFile(states / "target.safetensors")
    table = torch.from_numpy(kept.read("embedding").copy())
    assert torch.equal(table, model.get_input_embeddings().weight)
    assert kept.metadata == {"head": "none"}
    assert {entry["path"] for entry in manifest["outputs"]} == {
        path.name for path in states.iterdir() if path.name != "manifest.json"
    }
    named = {Path(entry["path"]).name for entry in manifest["sources"]}
    assert {"model.safetensors", data_file.name} < named

    other_target, other_data = tmp_path / "target", tmp_path / "other.jsonl"
    shutil.copytree(target_dir, other_target)
    config = json.loads((other_target / "config.json").read_text())
    (other_target / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    other_data.write_text(data_file.read_text() + json.dumps({"text": "more"}) + "\n")
    for change, words in (
        (("--model-dir", other_target), "is not of the same: sha256 of the target's config.json"),
        (("--data", other_data), "is not of the same: sha256 of --data is"),
        (("--model-max-length", 16), "is not of the same: sha256 of the train rows is"),
        (("--dtype", "bfloat16"), "is not of the same: --dtype is 'bfloat16', was 'float32'"),
        (KINDS["medusa"], "lacks the target's output layer"),
        (KINDS["eagle3"], "lacks the outputs of the target's layers 0,"),
    ):
        done = run_train(*options, *change, ends=1)
        assert done.last_lines[0].startswith(f"error: {states} {words}")
        assert done.last_lines[1] == f"hint: {hidden_states.REMAKE_HINT}"

    damages: tuple[tuple[str, Callable[[Path], None], str], ...] = (
        ("train-00001", cut, "describes"),
        ("train-00001", Path.unlink, "does not exist"),
        ("train-00001", exchange, "does not hold the rows that manifest.json says"),
        ("heldout-00000", flip, "is damaged: it has another sha256 than when it was written"),
        ("target", flip, "is damaged: it has another sha256 than when it was written"),
    )
    for name, damage, words in damages:
        path = states / f"{name}.safetensors"
        whole = path.read_bytes()
        damage(path)
        done = run_train(*options, ends=1)
        assert done.last_lines[0].startswith(f"error: {path} {words}")
        assert done.last_lines[1] == f"hint: {hidden_states.REMAKE_HINT}"
        path.write_bytes(whole)
    run_train(*options)


def test_a_killed_run_goes_on_with_the_next_file(
    run_train: Any, inputs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "states"
    options = (
        *inputs, *KINDS["eagle3"], "--output-dir", tmp_path / "out", "--hidden-states-dir", folder,
    )  # fmt: skip
    write = hidden_states.write_tensor_file
    written: list[str] = []

    def write_torn(path: Path, *arguments: Any, **others: Any) -> str:
        if len(written) == 2:
            path.write_bytes(b"half of")
            raise KeyboardInterrupt
        written.append(path.name)
        return write(path, *arguments, **others)

    with monkeypatch.context() as patch:
        patch.setattr(hidden_states, "write_tensor_file", write_torn)
        run_train(*options, ends=130)
    assert not folder.exists()
    partial = tmp_path / ".states.partial"
    assert (partial / "train-00002.safetensors.partial").read_bytes() == b"half of"
    changed = run_train(*options, "--output-dir", tmp_path / "other", "--dtype", "bfloat16", ends=1)
    assert f"{partial} was started with something else: --dtype is" in changed.last_lines[0]

    resumed: list[str] = []

    def note(path: Path, *arguments: Any, **others: Any) -> str:
        resumed.append(path.name)
        return write(path, *arguments, **others)

    with monkeypatch.context() as patch:
        patch.setattr(hidden_states, "write_tensor_file", note)
        done = run_train(*options, "--resume")
    assert "hidden states: 2 of " in done.err
    assert not set(resumed) & set(written)
    assert not list(folder.glob("*.partial"))
    # They hold what every method reads.
    states = ("--hidden-states-dir", folder)
    for kind in ("eagle3", "redrafter"):
        for name, more in ((f"live-{kind}", ()), (f"stored-{kind}", states)):
            done = run_train(*inputs, *KINDS[kind], "--output-dir", tmp_path / name, *more)
        assert read_bytes(tmp_path / f"live-{kind}") == read_bytes(tmp_path / f"stored-{kind}")


def make_states(num_tokens: int = 64) -> torch.Tensor:
    """States whose channels differ by ten orders of magnitude, and a token of zeros."""
    generator = torch.Generator().manual_seed(2)
    sizes = 10 ** torch.linspace(-6, 4, 40)
    states = torch.randn(num_tokens, 40, generator=generator) * sizes
    return (
        states
        * 10 ** torch.randn(num_tokens, 1, generator=generator)
        * (torch.arange(num_tokens)[:, None] > 0)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_in_fp8_are_as_near_as_documented(dtype: torch.dtype) -> None:
    states = make_states().to(dtype)
    numbers, scales = fp8.quantize_states(states)
    assert (numbers.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    restored = fp8.restore_states(numbers, scales, torch.float32)
    largest = states.float().abs().amax(1, keepdim=True)
    bounds = torch.maximum(states.float().abs() / 16, largest / 458_752) * (1 + 1e-5)
    assert ((restored - states.float()).abs() <= bounds).all()
    torch.testing.assert_close(restored.abs().amax(1), largest[:, 0], rtol=1e-6, atol=0)
    assert not restored[0].any()
    assert fp8.restore_states(numbers, scales, dtype).dtype == dtype
    again = fp8.quantize_states(restored)
    assert torch.equal(fp8.restore_states(*again, torch.float32), restored)


def test_all_numbers_of_e4m3_are_read_as_documented() -> None:
    """Sign, four bits of exponent less 7, three of fraction; scale x number in float32."""
    codes = np.array([c for c in range(256) if c & 127 != 127], np.uint8)  # without NaN
    signs, exponents, fractions = 1 - 2.0 * (codes >> 7), (codes >> 3) & 15, codes & 7
    values = signs * np.where(
        exponents, 2.0 ** (exponents - 7.0) * (1 + fractions / 8), 2.0**-6 * fractions / 8
    )
    numbers = torch.from_numpy(codes).view(torch.float8_e4m3fn)[None]
    scale = torch.tensor([0.3])
    found = fp8.restore_states(numbers, scale, torch.float32)
    assert np.array_equal(found[0].numpy(), values.astype(np.float32) * np.float32(0.3))
    states = torch.from_numpy(values)[None]
    assert torch.equal(fp8.quantize_states(states)[0].float().double(), states)


def test_states_in_fp8_take_half_the_disk_and_are_not_mixed(
    run_train: Any, inputs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made in two runs, the first one killed; the same weights as in one run; no other type."""

    def train(name: str, states: str, *flags: object, ends: int = 0) -> Any:
        return run_train(
            *inputs, *KINDS["eagle3"], "--dtype", "bfloat16", "--output-dir", tmp_path / name,
            "--hidden-states-dir", tmp_path / states, *flags, "--force", ends=ends,
        )  # fmt: skip

    fp8_flags = ("--hidden-states-dtype", "fp8")
    train("whole", "states", *fp8_flags)
    train("wide", "wide-states")
    sizes = {
        folder: sum(
            info.num_bytes
            for file in (tmp_path / folder).glob("*-0*.safetensors")
            for info in TensorFile(file).tensors.values()
        )
        for folder in ("states", "wide-states")
    }
    assert sizes["states"] / sizes["wide-states"] == (32 + 4) / 64  # of 32 channels and a scale
    assert read_bytes(tmp_path / "whole") != read_bytes(tmp_path / "wide")
    for states, flags, words in (
        ("wide-states", fp8_flags, "is 'fp8', was 'auto'"),
        ("states", (), "is 'auto', was 'fp8'"),
    ):
        done = train("mixed", states, *flags, ends=1)
        assert done.last_lines == [
            f"error: {tmp_path / states} is not of the same: --hidden-states-dtype {words}",
            f"hint: {hidden_states.REMAKE_HINT}",
        ]

    store = hidden_states._store_states
    calls = []

    def stop(*arguments: Any) -> None:
        calls.append(arguments[1])
        if len(calls) == 60:
            raise KeyboardInterrupt
        store(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(hidden_states, "_store_states", stop)
        train("resumed", "more-states", *fp8_flags, ends=130)
    mixed = train("resumed", "more-states", ends=1)
    assert "was started with something else: --hidden-states-dtype is 'auto'" in mixed.last_lines[0]
    assert "files are there already" in train("resumed", "more-states", *fp8_flags).err
    assert read_bytes(tmp_path / "resumed") == read_bytes(tmp_path / "whole")
    for path in (tmp_path / "states").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "more-states" / path.name).read_bytes()


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_rows_beyond_the_budget_are_computed(
    dtype: str, run_train: Any, inputs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the weights of a run that keeps all; a folder takes no more than it may."""
    options = (*inputs, *KINDS["eagle3"], "--hidden-states-dtype", dtype)
    whole, part = ("--hidden-states-dir", tmp_path / "whole"), tmp_path / "part"
    run_train(*options, *whole, "--output-dir", tmp_path / "kept")
    computed: list[int] = []
    find_states = target.LiveTarget.find_states

    def note(self: Any, batch: Any) -> Any:
        computed.extend(batch.indices)
        return find_states(self, batch)

    monkeypatch.setattr(target.LiveTarget, "find_states", note)
    budget = 300_000 if dtype == "auto" else 150_000
    options = (*options, "--hidden-states-dir", part)
    done = run_train(*options, "--max-disk", f"{budget / 1000}KB", "--output-dir", tmp_path / "a")
    assert "rows are in" in done.err
    sizes = [path.stat().st_size for path in part.glob("*.safetensors")]
    assert budget - hidden_states.SHARD_BYTES * 1.5 < sum(sizes) <= budget
    num_rows = len(set(computed))
    computed.clear()
    run_train(*options, "--output-dir", tmp_path / "b")  # and what was kept is read again
    assert 0 < len(set(computed)) < num_rows
    expected = read_bytes(tmp_path / "kept")
    assert read_bytes(tmp_path / "a") == read_bytes(tmp_path / "b") == expected
    other = (*options[:-1], tmp_path / "c", "--output-dir", tmp_path / "d")
    done = run_train(*other, "--max-disk", "1KB", ends=1)
    assert "--max-disk leaves 1000 bytes, but the target's tables take 81920 and" in done.err


@pytest.mark.parametrize(
    ("text", "size"),
    [("500", 500), ("1.5TB", 1_500_000_000_000), ("64GiB", 1 << 36), ("2 KB", 2000), ("7B", 7),
     ("", None), ("-1", None), ("1e9", None), ("5iB", None), ("5G", None), ("GB", None)],
)  # fmt: skip
def test_sizes(text: str, size: int | None) -> None:
    assert setup.read_bytes(text) == size


def test_the_page_has_the_bytes_of_a_token() -> None:
    """By the plan of a folder, whose files have these sizes."""
    config: Any = SimpleNamespace(num_hidden_layers=32, hidden_size=4096, vocab_size=9)
    flags: dict[str, dict[str, Any]] = {
        "ReDrafter": {"method": "redrafter"}, "Medusa": {"method": "medusa"},
        "EAGLE-1": {"method": "eagle"}, "MTP": {"method": "mtp"}, "DFlash": {"method": "dflash"},
        "EAGLE-3": {"method": "eagle", "eagle_version": "3"},
        "P-EAGLE": {"method": "eagle", "eagle_version": "3", "eagle_parallel": True},
    }  # fmt: skip
    text = (ROOT / "docs" / "train.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| ([^|]+) \| (\d+) \| ([\d,]+) \| ([\d,]+) \|$", text, re.MULTILINE)
    rows = {name: cells for names, *cells in table for name in names.split(", ")}
    assert set(rows) == set(flags)
    for name, options in flags.items():
        settings = TrainSettings(model_dir="m", data=Path("d"), **options)
        prepared: Any = SimpleNamespace(
            settings=settings, config=config, dtype="bfloat16", method=load_method(settings.method)
        )
        plans = [
            hidden_states.make_plan(prepared, {}, 9, dtype) for dtype in ("bfloat16", fp8.DTYPE)
        ]
        expected = [len(plans[0].names), *(plan.token_bytes for plan in plans)]
        assert [int(cell.replace(",", "")) for cell in rows[name]] == expected


def test_a_full_disk_is_seen_before_the_target_is_loaded(
    run_train: Any, inputs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_states, "measure_free_space", lambda folder: (folder.parent, 1000))
    hide_the_layers(monkeypatch)
    done = run_train(
        *inputs, *KINDS["redrafter"], "--output-dir", tmp_path / "out", "--hidden-states-dir",
        tmp_path / "states", ends=1,
    )  # fmt: skip
    assert "bytes are needed, 1000 are free in" in done.last_lines[0]


def test_folders_that_cannot_be_are_refused(run_train: Any, inputs: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    for states, status, words in (
        (tmp_path / "out" / "states", 2, "are one folder, or one lies in the other"),
        (tmp_path / "out", 2, "are one folder, or one lies in the other"),
        (tmp_path / "mine", 1, f"{tmp_path / 'mine'} holds no hidden states"),
    ):
        done = run_train(
            *inputs, *KINDS["redrafter"], "--output-dir", tmp_path / "out",
            "--hidden-states-dir", states, ends=status,
        )  # fmt: skip
        assert words in done.last_lines[0]
    assert (tmp_path / "mine" / "file").exists()


def test_a_tied_output_layer_is_kept_once(
    run_train: Any, inputs: Any, target_dir: Path, tmp_path: Path
) -> None:
    """And so are numbers of 16 bits."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(target_dir, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tied")
    AutoTokenizer.from_pretrained(target_dir).save_pretrained(tmp_path / "tied")
    options = (*inputs, *KINDS["eagle"], "--model-dir", tmp_path / "tied", "--dtype", "bfloat16")
    states = ("--hidden-states-dir", tmp_path / "states")
    for name, more in (("live", ()), ("stored", states)):
        run_train(*options, "--output-dir", tmp_path / name, *more)
    assert read_bytes(tmp_path / "live") == read_bytes(tmp_path / "stored")
    kept = TensorFile(tmp_path / "states" / "target.safetensors")
    assert kept.metadata == {"head": "embedding"}
    assert set(kept.tensors) == {"embedding"}
    assert kept.tensors["embedding"].dtype == "bfloat16"


class NotingModel(torch.nn.Module):
    """A model whose states are its tokens, and which notes how many it is given at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(100, 2)
        self.shapes: list[tuple[int, ...]] = []

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.table

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        self.shapes.append(tuple(input_ids.shape))
        state = input_ids[..., None].float().expand(-1, -1, 2)
        return SimpleNamespace(last_hidden_state=state, hidden_states=[None, state, state + 0.5])


def test_a_processor_reads_each_row_alone() -> None:
    """So that its bits depend on no other row: those of the first pass had other neighbours."""
    model = NotingModel()
    live = target.LiveTarget(model, None, name="noting", head=None, aux_layers=(1,))
    bounds = np.array([0, 3, 8, 10])
    rows = TokenRows(np.arange(1, 11), np.ones(10, bool), bounds)
    batch = target.make_batch(rows, [2, 1], torch.device("cpu"))
    features = live.read(batch)
    assert model.shapes == [(1, 2), (1, 5)]
    assert features.hidden[..., 0].tolist() == [[9, 10, 0, 0, 0], [4, 5, 6, 7, 8]]
    assert features.auxiliary is not None
    assert features.auxiliary[..., 1].tolist() == [[9.5, 10.5, 0, 0, 0], [4.5, 5.5, 6.5, 7.5, 8.5]]


def test_layer_ids_are_compared_where_they_say_something(tmp_path: Path) -> None:
    """Ids that were not given are those that a drafter needs, of a folder that has more."""
    flag = "--hidden-states-layers"

    def check(layers: tuple[int, ...], layer_ids: str, *, is_typed: bool) -> None:
        plan = hidden_states.StatesPlan(
            facts={hidden_states.DTYPE_FACT: "auto", flag: layer_ids}, splits={},
            layers=layers, vocab_size=9, hidden_size=2,
            dtype="float32", compute_dtype="float32",
        )  # fmt: skip
        hidden_states.check_states(tmp_path, plan, compares_layer_ids=is_typed)

    manifest: dict[str, Any] = {"kind": hidden_states.KIND, "layers": [0, 1], "facts": {}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    check((0, 1), "1,3,4", is_typed=True)  # an early folder does not say which it has
    manifest["facts"][flag] = "1,2,4"
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    check((0, 1), "1,2,4", is_typed=False)
    check((), "4", is_typed=False)
    for layers, layer_ids, is_typed in (((0, 1), "1,3,4", False), ((), "4", True)):
        with pytest.raises(SpecDecError, match=f"{flag} is '{layer_ids}', was '1,2,4'"):
            check(layers, layer_ids, is_typed=is_typed)
