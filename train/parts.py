"""Parts of a target that are loaded without its layers: embedding, last norm and output layer."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.errors import SpecDecError, summarize
from specdec.files.reading import read_json
from specdec.files.tensor_file import TensorFile
from specdec.files.torch_tensors import TORCH_DTYPES, to_tensor
from specdec.model.wrappers import name_alone
from specdec.text import pretrained

from .features import OutputHead
from .target import compare_logits, get_name, make_head

INDEX = "model.safetensors.index.json"
FULL_HINT = "train without --hidden-states-from: then the target is loaded whole"


@dataclasses.dataclass(frozen=True)
class TargetParts:
    """Embedding, last norm and output layer of a target."""

    embedding: torch.nn.Embedding
    norm: torch.nn.Module
    head: OutputHead


class PartsPlan:
    """Plan of the parts' tensors: their names in the model and the files that hold them."""

    def __init__(self, model_dir: str, config: Any) -> None:
        """Find the parts; only headers of files are read."""
        self.name = get_name(model_dir)
        self.model = make_empty_model(model_dir, config)
        self.config = config
        self.norm_name, self.norm = find_last_norm(self.model, config)
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        names = {module: name for name, module in self.model.named_modules()}
        self._files = _list_tensor_files(Path(model_dir))
        self.embedding = self._find_tensor(f"{names[embedding]}.weight")
        self.norm_tensors = {
            name: self._find_tensor(f"{self.norm_name}.{name}") for name in self.norm.state_dict()
        }
        # A tied output layer is read where it is stored, as transformers does where the two differ.
        self.head = self._find_tensor(f"{names[head]}.weight", instead=self.embedding)
        self.head_bias = None if head.bias is None else self._find_tensor(f"{names[head]}.bias")

    def _find_tensor(self, name: str, instead: str | None = None) -> str:
        """Return a tensor's name in the files, where a base model's may lack their beginning."""
        stored_names = {name_alone(stored): stored for stored in self._files}
        prefix = f"{self.model.base_model_prefix}."
        for candidate in (name, name.removeprefix(prefix)):
            if candidate in stored_names:
                return stored_names[candidate]
        if instead is not None and self.config.tie_word_embeddings:
            return instead
        raise SpecDecError(
            f"{self.name} has no {name} among the {len(self._files)} tensors of its safetensors"
            " files, which --hidden-states-from needs",
            "download the folder's config.json, tokenizer, index and the safetensors files with"
            f" the embedding, the last norm and the output layer; or {FULL_HINT}",
        )

    @property
    def files(self) -> list[Path]:
        """Files that hold the parts."""
        names = {self.embedding, self.head, *self.norm_tensors.values()}
        return sorted({self._files[name] for name in (*names, self.head_bias or self.head)})

    def load(self, dtype: str, device: torch.device) -> TargetParts:
        """Load the parts in a type onto a device, and check what the model makes of its head."""
        weight = self._read(self.embedding, dtype)
        width = self.config.hidden_size
        if weight.shape[1] != width:
            raise SpecDecError(
                f"{self.name}: its embedding has {weight.shape[1]} columns, its states {width}",
                FULL_HINT,
            )
        head_weight = weight if self.head == self.embedding else self._read(self.head, dtype)
        bias = None if self.head_bias is None else self._read(self.head_bias, dtype)
        norm = self.norm.to_empty(device="cpu").to(TORCH_DTYPES[dtype])
        norm.load_state_dict({n: self._read(t, dtype) for n, t in self.norm_tensors.items()})
        self._check_head(make_head(self.config, head_weight, bias), TORCH_DTYPES[dtype])
        size = weight.shape[0]
        weight, head_weight = weight.to(device), head_weight.to(device)
        if self.head == self.embedding:
            head_weight = weight
        embedding = torch.nn.Embedding(size, width, _weight=weight)
        head = make_head(self.config, head_weight, None if bias is None else bias.to(device))
        for module in (embedding, norm):
            module.eval().requires_grad_(False)
        return TargetParts(embedding, norm.to(device), head)

    def _read(self, name: str, dtype: str) -> Tensor:
        file = TensorFile(self._files[name])
        info = file.tensors.get(name)
        if info is None or info.dtype not in TORCH_DTYPES:
            stored = "missing" if info is None else f"stored as {info.dtype}"
            raise SpecDecError(
                f"{file.path}: {name} is {stored}, not one of {', '.join(TORCH_DTYPES)}",
                "download the folder again, or use one of unquantized weights",
            )
        return to_tensor(file.read(name), info.dtype).to(TORCH_DTYPES[dtype])

    def _check_head(self, head: OutputHead, dtype: torch.dtype) -> None:
        """Raise SpecDecError where the model's class changes logits otherwise than `head`."""
        width = head.weight.shape[1]
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(1, 8, width, generator=generator).to(dtype)
        stack_owner = self.model.get_submodule(self.norm_name.rpartition(".")[0])
        for module in (pretrained.find_base(self.model), stack_owner):
            module.forward = lambda *_, **__: _make_output(hidden)
        layer = self.model.get_output_embeddings()
        layer.weight = torch.nn.Parameter(head.weight, requires_grad=False)
        if head.bias is not None:
            layer.bias = torch.nn.Parameter(head.bias, requires_grad=False)
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        with torch.no_grad():
            expected = self.model(input_ids=tokens, use_cache=False).logits.float()
            logits = head.compute_logits(hidden)
        compare_logits(self.name, logits, expected)


def _make_output(hidden: Tensor) -> Any:
    """Make a base model's output of these last hidden states, and of None for all else."""
    from transformers.modeling_outputs import MoeModelOutputWithPast

    class StatesOutput(MoeModelOutputWithPast):  # type: ignore[misc]
        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    return StatesOutput(last_hidden_state=hidden)


def make_empty_model(model_dir: str, config: Any) -> Any:
    """Make a target's model of transformers without memory for its weights."""
    from transformers import AutoModelForCausalLM

    if not Path(model_dir).is_dir():
        raise SpecDecError(
            f"--hidden-states-from with --model-dir {model_dir}, which is no folder",
            f"download it with `hf download {model_dir} --local-dir FOLDER`; of the safetensors"
            " files those with the embedding, the last norm and the output layer are enough",
        )
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the parts are not quantized; `PartsPlan` sees to it
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecDecError(
            f"{model_dir}: transformers makes no text model of its configuration:"
            f" {summarize(error)}",
            FULL_HINT,
        ) from None


def find_last_norm(model: Any, config: Any) -> tuple[str, torch.nn.Module]:
    """Return the name and module of the norm after a model's stack of layers."""
    width, num_layers = int(config.hidden_size), int(config.num_hidden_layers)
    norms = [
        (f"{name}.{child_name}" if name else child_name, child)
        for name, module in model.named_modules()
        if any(_is_stack(child, num_layers) for child in module.children())
        for child_name, child in module.named_children()
        if _is_norm(child, width)
    ]
    if len(norms) != 1:
        raise SpecDecError(
            f"{config.model_type}: {len(norms)} norms of {width} channels are beside its"
            f" {num_layers} layers, not one",
            FULL_HINT,
        )
    return norms[0]


def _is_stack(module: Any, num_layers: int) -> bool:
    return isinstance(module, torch.nn.ModuleList) and len(module) == num_layers


def _is_norm(module: Any, width: int) -> bool:
    shapes = {tuple(parameter.shape) for parameter in module.parameters()}
    return shapes == {(width,)}


def _list_tensor_files(folder: Path) -> dict[str, Path]:
    """Map the names of a folder's tensors to their files, which need not be there."""
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map", {})
        return {str(name): folder / str(file) for name, file in weight_map.items()}
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise SpecDecError(
            f"{folder} has neither {INDEX} nor a model.safetensors",
            "--hidden-states-from reads embedding, last norm and output layer from one of them",
        )
    return {name: file for file in files for name in TensorFile(file).tensors}
