"""Scenes of hints: tiny folders to convert, changes that spoil them, changes that follow a hint."""

from __future__ import annotations

import dataclasses
import json
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from specdec.convert.methods import FOLDERS
from specdec.convert.pipeline import convert_model
from specdec.convert.settings import ConvertSettings
from tests.assistants import make_mtp_assistant, make_target
from tests.blocks import LLAMA_NORMS, LLAMA_ROWS, begin_llama, finish, write_gguf
from tests.conftest import (
    make_dflash_drafter,
    make_drafter,
    make_eagle_drafter,
    make_llama,
    make_medusa_heads,
    make_mtp_head,
)
from tests.convert.checkpoints import set_config
from tests.convert.quantized import CASES as QUANTIZED
from tests.convert.quantized import make_quantized
from tests.families import CLASSES, make_family_model

FILE = "model.safetensors"


class Scene:
    """Folders below `root`, and the flags of a conversion that begins with them."""

    def __init__(self, root: Path, **flags: Any) -> None:
        self.root, self.flags = root, flags
        self.copy = root.with_name(root.name + ".copy")

    def __getitem__(self, name: str) -> Path:
        return self.root / name

    def convert(self, output: Path, **flags: Any) -> Path:
        """Convert with the scene's flags, in which a Path that is relative lies in the scene."""
        given = {
            name: self.root / value if isinstance(value, Path) else value
            for name, value in (self.flags | flags).items()
        }
        for name in ("model_dir", *FOLDERS):
            if given.get(name) is not None:
                given[name] = str(given[name])
        convert_model(ConvertSettings(**{"output_dir": output} | given))
        return output


Change = Callable[[Scene], Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A hint, an input that raises it, and what the hint says to do.

    hint: as `list_hints` spells it. base: of `make_base`. follow: None where the hint says that
    there is no way on. error: where following leads to another error, words of it.
    """

    hint: str
    base: str
    spoil: Change | Sequence[Change]
    follow: Change | Sequence[Change] | None
    error: str = ""


def apply(changes: Change | Sequence[Change], scene: Scene) -> None:
    for change in [changes] if callable(changes) else changes:
        change(scene)


# ---- Bases.


def make_base(kind: str, root: Path) -> None:
    """Make the folders of a base: a model, and a drafter, an adapter or a checkpoint."""
    if kind in GGUF_TYPES:
        write_gguf(root / "model.gguf", dict.fromkeys(GGUF_MODULES, GGUF_TYPES[kind]))
    elif kind in QUANTIZED:
        make_quantized(root, QUANTIZED[kind], name="model", vocab=128)
    elif kind == "compressed-98":
        make_quantized(root, QUANTIZED["compressed-channel"], name="model", intermediate=98)
    elif kind == "mtp_assistant":
        make_target(root / "model")
    elif kind in CLASSES and kind != "llama":
        make_family_model(root, kind, name="model")
    else:
        make_llama(root, name="model", **MODELS.get(kind, {}))
    if kind == "lora":
        make_adapter(root)
    elif kind == "checkpoint":
        Scene(root, model_dir=Path("model")).convert(root / "checkpoint")
        make_drafter(root)
    elif kind in DRAFTERS:
        DRAFTERS[kind][1](root)


def make_flags(kind: str) -> dict[str, Any]:
    """Return the flags that convert the folders of a base."""
    if kind == "checkpoint":
        return {"base_model_checkpoint_dir": Path("checkpoint"), "drafter_model_dir": DRAFTER}
    flags: dict[str, Any] = {"model_dir": Path("model.gguf" if kind in GGUF_TYPES else "model")}
    if kind == "lora":
        flags["lora_dir"] = Path("adapter")
    elif kind in DRAFTERS:
        flags[f"{DRAFTERS[kind][0]}_model_dir"] = DRAFTER
    return flags


DRAFTER = Path("drafter")
GGUF_TYPES = {"gguf": 8, "gguf-k": 12}  # Q8_0 has blocks of 32 weights, Q4_K of 256
GGUF_MODULES = (
    "token_embd", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down",
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "eagle3": {"layers": 6}, "peagle": {"layers": 6}, "dflash": {"layers": 4},
    "spec-dflash": {"layers": 4}, "narrow": {"hidden": 32},
}  # fmt: skip
# Base -> the method of its drafter, and what makes it.
DRAFTERS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "redrafter": ("drafter", lambda root: make_drafter(root, exit_dim=96)),
    "redrafter67": ("drafter", lambda root: make_drafter(root, vocab=67)),
    "medusa": ("medusa", lambda root: make_medusa_heads(root, name="drafter")),
    "eagle1": ("eagle", lambda root: make_eagle_drafter(root, name="drafter")),
    "eagle3": (
        "eagle", lambda root: make_eagle_drafter(root, version=3, draft_vocab=64, name="drafter")
    ),
    "peagle": (
        "eagle", lambda root: make_eagle_drafter(root, version=3, mask_token_id=3, name="drafter")
    ),
    "dflash": ("dflash", lambda root: make_dflash_drafter(root, target_layers=4, name="drafter")),
    "spec-dflash": (
        "dflash", lambda root: make_dflash_drafter(root, form="speculators", name="drafter")
    ),
    "mtp_assistant": (
        "mtp_assistant", lambda root: make_mtp_assistant(root, root / "model", name="drafter")
    ),
    "mtp": ("mtp", lambda root: make_mtp_head(root, root / "model", name="drafter")),
}  # fmt: skip


def make_adapter(root: Path) -> Path:
    """Write a LoRA adapter of one matrix as PEFT saves it."""
    adapter = root / "adapter"
    adapter.mkdir()
    prefix = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    save_file(
        {f"{prefix}A.weight": torch.ones(4, 64), f"{prefix}B.weight": torch.ones(64, 4)},
        adapter / "adapter_model.safetensors",
    )
    section = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(section))
    return adapter


# ---- Changes.


def flags(**values: Any) -> Change:
    """Give flags; None leaves one out."""
    return lambda scene: scene.flags.update(values)


def keys(folder: str = "model", /, **values: Any) -> Change:
    """Set keys of a folder's config.json; "ABSENT" removes one."""
    return lambda scene: set_config(scene[folder], **values)


def section(
    folder: str = "model", /, *, name: str = "quantization_config", **values: Any
) -> Change:
    """Set keys of an object in a folder's config.json; "ABSENT" removes one."""

    def change(scene: Scene) -> None:
        inner = json.loads((scene[folder] / "config.json").read_text()).get(name, {}) | values
        set_config(scene[folder], **{name: {k: v for k, v in inner.items() if v != "ABSENT"}})

    return change


def document(path: str, **values: Any) -> Change:
    """Set keys of a JSON file; "ABSENT" removes one."""

    def change(scene: Scene) -> None:
        content = (json.loads(scene[path].read_text()) if scene[path].exists() else {}) | values
        scene[path].write_text(json.dumps({k: v for k, v in content.items() if v != "ABSENT"}))

    return change


def tensors(
    changed: Mapping[str, torch.Tensor | Callable[[torch.Tensor], torch.Tensor] | str | None],
    file: str = f"model/{FILE}",
) -> Change:
    """Change tensors of a file by name: None removes, a text is the tensor's new name."""

    def change(scene: Scene) -> None:
        stored = load_file(scene[file])
        for name, new in changed.items():
            if new is None:
                del stored[name]
            elif isinstance(new, str):
                stored[new] = stored.pop(name)
            else:
                value = new if isinstance(new, torch.Tensor) else new(stored[name])
                stored[name] = value.contiguous().clone()
        save_file(stored, scene[file], metadata={"format": "pt"})

    return change


def write(path: str, content: str | bytes) -> Change:
    """Write a file, in a folder that is made if there is none."""
    data = content.encode() if isinstance(content, str) else content

    def change(scene: Scene) -> None:
        scene[path].parent.mkdir(exist_ok=True)
        scene[path].write_bytes(data)

    return change


def move(path: str, target: str) -> Change:
    return lambda scene: scene[path].rename(scene[target])


def remove(path: str) -> Change:
    return lambda scene: scene[path].unlink()


def again(scene: Scene) -> None:
    """Get every folder again, as from its origin."""
    shutil.rmtree(scene.root)
    shutil.copytree(scene.copy, scene.root)


def save_again(scene: Scene) -> None:
    """Load the model with transformers and save it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(scene["model"])
    shutil.rmtree(scene["model"])
    model.save_pretrained(scene["model"])


def split(scene: Scene) -> None:
    """Write the model's weights as two shards with an index."""
    stored = load_file(scene[f"model/{FILE}"])
    weight_map: dict[str, str] = {}
    for number in (1, 2):
        shard = {name: stored[name] for name in sorted(stored)[number - 1 :: 2]}
        save_file(shard, scene[f"model/model-0000{number}-of-00002.safetensors"])
        weight_map |= dict.fromkeys(shard, f"model-0000{number}-of-00002.safetensors")
    scene[f"model/{FILE}"].unlink()
    document(f"model/{FILE}.index.json", weight_map=weight_map)(scene)


def take_entry(scene: Scene) -> None:
    """Take a tensor out of the index, which its shard still holds."""
    index = scene[f"model/{FILE}.index.json"]
    content = json.loads(index.read_text())
    del content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))


def use_torch(change: Callable[[dict[str, Any]], Any] = lambda state: state) -> Change:
    """Write the weights by torch.save, changed before."""

    def save(scene: Scene) -> None:
        state = load_file(scene[f"model/{FILE}"])
        scene[f"model/{FILE}"].unlink()
        torch.save(change(state), scene["model/pytorch_model.bin"])

    return save


def remake(make: Callable[[Path], Any]) -> Change:
    """Make another model in the place of the scene's."""

    def change(scene: Scene) -> None:
        shutil.rmtree(scene["model"])
        make(scene.root)

    return change


def put(kind: str, name: str, *, converts: bool = False, **values: Any) -> Change:
    """Put a folder in the place of the scene's, of a base; or what a base is converted to."""

    def change(scene: Scene) -> None:
        root = scene.root / ".put"
        make_base(kind, root)
        source = Scene(root, **make_flags(kind))
        if converts:
            source.convert(root / name, **values)
        shutil.rmtree(scene[name], ignore_errors=True)
        shutil.move(root / name, scene[name])
        shutil.rmtree(root)

    return change


def copy_in(source: str, target: str, prefix: str = "") -> Change:
    """Copy a file, the files of a folder into another, or its tensors by other beginnings."""

    def change(scene: Scene) -> None:
        if scene[source].is_file():
            shutil.copy(scene[source], scene[target])
            return
        if not prefix:
            shutil.copytree(scene[source], scene[target], dirs_exist_ok=True)
            return
        (file,) = scene[source].glob("*.safetensors")
        stored = {prefix + name: value for name, value in load_file(file).items()}
        tensors(dict(stored), f"{target}/{FILE}")(scene)

    return change


def lose_record(scene: Scene) -> None:
    """Overwrite the beginning of a record of a file of torch.save."""
    content = scene["model/pytorch_model.bin"].read_bytes()
    position = content.index(b"PK\3\4", 4)
    content = content[:position] + bytes(4) + content[position + 4 :]
    scene["model/pytorch_model.bin"].write_bytes(content)


def swell(scene: Scene) -> None:
    """Write an archive whose records unpack to many times their bytes."""
    with zipfile.ZipFile(scene["model/pytorch_model.bin"], "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(100_000))


def cut(path: str) -> Change:
    """Leave the last bytes of a file out."""
    return lambda scene: scene[path].write_bytes(scene[path].read_bytes()[:-100])


def patch(path: str, offset: int, content: bytes) -> Change:
    """Overwrite bytes of a file."""

    def change(scene: Scene) -> None:
        stored = bytearray(scene[path].read_bytes())
        stored[offset : offset + len(content)] = content
        scene[path].write_bytes(stored)

    return change


def put_gguf(
    *, name: str = "model.gguf", kind: str = "F32", architecture: str = "llama", without: str = "",
    **metadata: Any,
) -> Change:  # fmt: skip
    """Write a GGUF file of a tiny Llama; without: a tensor that is left out, or all of them."""

    def change(scene: Scene) -> None:
        writer = begin_llama(scene[name], architecture, **metadata)
        chosen = gguf.GGMLQuantizationType[kind]
        for module, num_rows in LLAMA_ROWS.items():
            values = np.random.default_rng(num_rows).normal(0, 0.06, (num_rows, 256))
            if without not in (f"{module}.weight", "all"):
                data = gguf.quants.quantize(values.astype(np.float32), chosen)
                writer.add_tensor(f"{module}.weight", data, raw_dtype=chosen)
        for norm in LLAMA_NORMS:
            if without != "all":
                writer.add_tensor(f"{norm}.weight", np.ones(256, np.float32))
        finish(writer)

    return change


def put_tensors(path: str, *names: str) -> Change:
    """Write a file of tensors of these names."""
    return lambda scene: save_file({name: torch.ones(2, 2) for name in names}, scene[path])
