"""The frozen target: loaded once, read without gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.errors import SpecDecError, summarize
from specdec.storage import describe_file
from specdec.torch_tensors import TORCH_DTYPES

from .methods.base import Features, OutputHead, TargetShape


class Target:
    """A transformers model, frozen; `head` is its output layer where one was asked for.

    Legend as in methods/base.py.
    """

    def __init__(
        self, model: Any, config: Any, *, name: str, head: OutputHead | None,
        aux_layers: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.model = model.eval().requires_grad_(False)
        self.config = config
        self.name = name
        self.head = head
        self.aux_layers = aux_layers
        embedding = model.get_input_embeddings()
        self.embedding: torch.nn.Module = embedding
        self.shape = TargetShape(
            hidden_size=int(embedding.weight.shape[1]), vocab_size=int(embedding.weight.shape[0])
        )

    def read(self, tokens: Tensor) -> Features:
        """Run the target over rows [B, T].

        Rows are padded at their ends, where causal attention hides the padding from the tokens, so
        no attention mask is needed.
        """
        with torch.no_grad():
            output = self.model(
                input_ids=tokens, use_cache=False, return_dict=True,
                output_hidden_states=bool(self.aux_layers),
            )  # fmt: skip
            embedded = self.embedding(tokens)
        auxiliary = None
        if self.aux_layers:  # the first of these states is the embedding
            auxiliary = torch.cat([output.hidden_states[i + 1] for i in self.aux_layers], dim=-1)
        return Features(
            tokens=tokens,
            hidden=output.last_hidden_state,
            embedded=embedded,
            head=self.head,
            auxiliary=auxiliary,
        )


def load_config(model_dir: str) -> Any:
    """Read the target's configuration; a multimodal target's text part."""
    from transformers import AutoConfig

    folder = Path(model_dir)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise SpecDecError(
            f"{folder} has no config.json", "--model-dir takes a Hugging Face model folder"
        )
    # A Hub id is `name` or `owner/name`; anything else that is absent can only be a wrong path.
    if not folder.is_dir() and (len(folder.parts) > 2 or model_dir.startswith((".", "/", "~"))):
        raise SpecDecError(
            f"{folder} does not exist", "--model-dir takes a Hugging Face model folder or a Hub id"
        )
    try:
        config = AutoConfig.from_pretrained(model_dir)
    except (OSError, ValueError, KeyError) as error:
        raise _cannot_load(model_dir, error) from None
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _cannot_load(model_dir: str, error: Exception) -> SpecDecError:
    return SpecDecError(
        f"cannot load the target {model_dir}: {summarize(error)}",
        "check --model-dir: a folder made by save_pretrained, or a Hub id and a connection",
    )


def get_stored_dtype(config: Any) -> str:
    """Name the type in which the target's weights are stored."""
    return str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")


def get_max_length(config: Any) -> int | None:
    """Most tokens that the target can read, or None where its configuration does not say."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def load_target(
    model_dir: str,
    config: Any,
    dtype: str,
    device: torch.device,
    *,
    with_head: bool,
    aux_layers: tuple[int, ...] = (),
    num_shards: int = 1,
) -> Target:
    """Load the target's weights in `dtype` onto `device`; its output layer only `with_head`.

    num_shards: processes that its layers are split over; all call this, and `read` afterwards,
    equally often.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    loader = transformers.AutoModelForCausalLM if with_head else transformers.AutoModel
    try:
        model = loader.from_pretrained(model_dir, dtype=TORCH_DTYPES[dtype])
        if num_shards > 1:
            shard_layers(model, config, device, num_shards)
        model = model.to(device)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise _cannot_load(model_dir, error) from None
    name = Path(model_dir).resolve().name if Path(model_dir).is_dir() else model_dir
    if not with_head:
        return Target(model, config, name=name, head=None, aux_layers=aux_layers)
    layer = model.eval().requires_grad_(False).get_output_embeddings()
    head = OutputHead(layer.weight, getattr(layer, "bias", None))
    _check_head(model, head, name)
    return Target(model.base_model, config, name=name, head=head, aux_layers=aux_layers)


def shard_layers(model: Any, config: Any, device: torch.device, num_shards: int) -> None:
    """Let every process hold its part of each decoder layer, which is put together while it runs.

    Embedding, last norm and output layer stay whole: drafters read them too.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model.eval().requires_grad_(False)
    stacks = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == config.num_hidden_layers
    ]
    if len(stacks) != 1:
        raise SpecDecError(
            f"--shard-target: the target has {len(stacks)} stacks of"
            f" {config.num_hidden_layers} layers, not one",
            "train without it",
        )
    mesh = init_device_mesh(device.type, (num_shards,))
    for layer in stacks[0]:
        fully_shard(layer, mesh=mesh)
        # Each layer is a root to torch, which would leave it put together.
        layer.register_forward_hook(lambda module, *_: module.reshard())


def _check_head(model: Any, head: OutputHead, name: str) -> None:
    """Raise SpecDecError where the logits are more than a matrix times the last hidden state.

    Some targets scale them, or cap them; a drafter would learn from what the target never says.
    """
    tokens = torch.arange(min(8, len(head.weight)), device=head.weight.device)[None]
    with torch.no_grad():
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        expected = model(input_ids=tokens, use_cache=False).logits.float()
        found = torch.nn.functional.linear(hidden, head.weight, head.bias).float()
    error = float((found - expected).abs().max())
    if error > 0.02 * float(expected.abs().max()):
        raise SpecDecError(
            f"{name}: its logits differ by up to {error:.3g} from its output layer's of the last"
            " hidden state: it scales or caps them",
            "train a drafter that does without the target's output layer: --method redrafter with"
            " --self-distillation 0",
        )


def load_tokenizer(model_dir: str, vocab_size: int) -> Any:
    """Load the target's tokenizer and check that the target knows all of its tokens."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise SpecDecError(
            f"cannot load the tokenizer of {model_dir}: {summarize(error)}",
            "save the tokenizer beside the target's weights (tokenizer.json)",
        ) from None
    if len(tokenizer) > vocab_size:
        raise SpecDecError(
            f"the tokenizer has {len(tokenizer)} tokens, the target's vocabulary only {vocab_size}",
            "use the tokenizer that the target was trained with",
        )
    return tokenizer


def describe_target(model_dir: str) -> list[dict[str, Any]]:
    """List the files of a target that has been loaded, with their sha256; a Hub id's are cached."""
    folder = Path(model_dir)
    if not folder.is_dir():
        from transformers.utils import cached_file

        folder = Path(str(cached_file(model_dir, "config.json"))).parent
    names = {"config.json", "tokenizer.json", "tokenizer.model"}
    for index in folder.glob("*.index.json"):
        weights = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {})
        names.update(weights.values())
    names.update(p.name for p in folder.glob("model*.safetensors"))
    if not any(name.endswith(".safetensors") for name in names):
        names.update(p.name for p in folder.glob("pytorch_model*.bin"))
    return [describe_file(folder / n) for n in sorted(names) if (folder / n).is_file()]
