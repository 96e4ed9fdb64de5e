"""EAGLE's entry in the registry: how its drafters are made, begin, and are described."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.errors import SpecDecError
from specdec.files.torch_tensors import to_tensor
from specdec.methods.eagle import EAGLE3_FIXED, Eagle3Params, EagleTrain
from specdec.model.config import ModelConfig
from specdec.model.config_reader import ConfigReader, read_rotary
from specdec.model.rotary_scaling import STEADY_SCALINGS, get_kind
from specdec.options import as_options

from ..draft_vocabulary import choose_draft_tokens
from ..rows import TokenRows
from ..settings import TrainSettings
from ..start_config import follow_layers, open_start
from ..target import FrozenTarget
from .base import TrainingMethod, choose_mask_token
from .eagle_parts.least_squares import measure_sizes, start_from_least_squares
from .eagle_parts.nets import Eagle, Eagle1, Eagle3


def build_eagle(settings: TrainSettings, target: FrozenTarget) -> Eagle:
    """Make a drafter of the target's sizes; EAGLE-3's output layer begins as the target's.

    With --start-from, heads, MLP, norms and rotary embedding are that drafter's.
    """
    assert target.head is not None
    options = as_options(settings, EagleTrain)
    size = options.eagle_intermediate_size
    model = describe_layers(target, options.eagle_num_layers, size)
    model = follow_layers(settings.start_from, model, has_given_size=size is not None)
    if options.eagle_version == "1":
        return Eagle1(settings, model, embedding_scale=target.shape.embedding_scale)
    draft_tokens = choose_vocabulary(settings, target)
    mask_token_id, mask_row = None, None
    if options.eagle_parallel:
        requested_token = options.eagle_mask_token_id
        mask_token_id = choose_mask_token(
            "--eagle-mask-token-id", requested_token, target.config, target.table
        )
        mask_row = target.table[mask_token_id].detach().clone()
    params = Eagle3Params(
        aux_layers=target.aux_layers,
        draft_vocab_size=model.vocab_size if draft_tokens is None else len(draft_tokens),
        norm_before_residual=False,
        mask_token_id=mask_token_id,
        **{name: getattr(options, f"eagle_{name}") for name in Eagle3Params.NEWER},
    )
    return Eagle3(settings, model, target.head, params, draft_tokens, mask_row)


def choose_vocabulary(settings: TrainSettings, target: FrozenTarget) -> Tensor | None:
    """Return the tokens that an EAGLE-3 drafter drafts, rising; None for all."""
    option = as_options(settings, EagleTrain).eagle_draft_vocab_size
    if option == "auto" and settings.self_distillation != 1:
        return None  # the text's tokens are learned, too, and are to be drafted
    start_tokens = None
    if settings.start_from is not None:
        start_tokens = read_draft_tokens(settings.start_from, target.shape.vocab_size)
    assert target.token_counts is not None
    return choose_draft_tokens(option, target.token_counts, start_tokens)


def read_draft_tokens(folder: Path, vocab_size: int) -> Tensor:
    """Return the tokens that a written drafter drafts; SpecDecError beyond the vocabulary."""
    file = open_start(folder, METHOD.weights_name)
    if (info := file.tensors.get("d2t")) is None:
        return torch.arange(vocab_size)
    offsets = to_tensor(file.read("d2t"), info.dtype)
    tokens = offsets + torch.arange(len(offsets))
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise SpecDecError(
            f"--start-from: {file.path} drafts tokens from {int(tokens.min())} to"
            f" {int(tokens.max())}, the model has {vocab_size}",
            "give a drafter that was trained for this model",
        )
    return tokens


def describe_layers(
    target: FrozenTarget, num_layers: int, intermediate_size: int | None = None
) -> ModelConfig:
    """Describe the drafter's layers: a Llama's, of the target's sizes and rotary embedding.

    intermediate_size: the MLP's, where it is not the target's.
    """
    config, hidden_size = target.config, target.shape.hidden_size
    num_heads = int(config.num_attention_heads)
    sizes = [getattr(config, name, None) for name in ("intermediate_size", "ffn_dim", "n_inner")]
    rotary = read_rotary(ConfigReader(config.to_dict(), Path(target.name)))
    is_steady = get_kind(rotary.scaling or {}) in STEADY_SCALINGS
    return ModelConfig(
        architecture="LlamaForCausalLM",
        dtype="float32",
        vocab_size=target.shape.vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=int(getattr(config, "num_key_value_heads", None) or num_heads),
        head_size=int(getattr(config, "head_dim", None) or hidden_size // num_heads),
        intermediate_size=intermediate_size or next(filter(None, sizes), 4 * hidden_size),
        norm_epsilon=float(getattr(config, "rms_norm_eps", 1e-6)),
        max_position_embeddings=int(config.max_position_embeddings),
        rotary_base=rotary.base or 10000.0,
        rotary_scaling=rotary.scaling if is_steady else None,
    )


def choose_layers(settings: TrainSettings, config: Any) -> tuple[int, ...]:
    """Choose target layers that a drafter reads: EAGLE-3's usual ones, or evenly spread ones.

    The last layer is never one: transformers returns its output only after the final norm.
    """
    options = as_options(settings, EagleTrain)
    if options.eagle_version != "3":
        return ()
    num_layers = int(config.num_hidden_layers)
    layers = {1, num_layers // 2 - 1, num_layers - 4}
    if len(layers) < 3 or min(layers) < 0:
        layers = {0, (num_layers - 1) // 2, max(0, num_layers - 2)}
    return tuple(sorted(layers))


def describe_eagle(drafter: Eagle, target: FrozenTarget) -> Mapping[str, Any]:
    """Return the config.json of SafeAILab's EAGLE-1, or of EAGLE-3 as ModelOpt exports it."""
    model = drafter.model
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **model.describe_sizes(),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    if isinstance(drafter, Eagle1):
        return config | {"bias": drafter.options.eagle_bias}
    assert isinstance(drafter, Eagle3)
    if drafter.params.mask_token_id is not None:
        config |= {
            "parallel_drafting": True,
            # vLLM numbers a layer's output by the layer that reads it.
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in target.aux_layers],
            "mask_token_id": drafter.params.mask_token_id,
            "pard_token": drafter.params.mask_token_id,
        }
    return config | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": drafter.params.draft_vocab_size,
        **{name: getattr(drafter.params, name) for name in Eagle3Params.NEWER},
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(target.aux_layers),
            **EAGLE3_FIXED,
            "parallel_draft_heads_num_layers": 1,
        },
    }


def list_written_copies(target: FrozenTarget) -> Mapping[str, Tensor]:
    """Return the target's embedding, which SafeAILab's EAGLE-1 repeats and EAGLE-3 does not."""
    return {} if target.aux_layers else {"embed_tokens.weight": target.table}


def list_accepted_copies(target: FrozenTarget) -> Mapping[str, Tensor]:
    """Return the target's embedding, which published drafters of both kinds may repeat."""
    return {"embed_tokens.weight": target.table}


def list_convert_flags(settings: TrainSettings) -> list[str]:
    """Return the flag for the number of a parallel pass's tokens, which config.json lacks."""
    options = as_options(settings, EagleTrain)
    return ["--num-eagle-layers", str(options.eagle_num_steps)] if options.eagle_parallel else []


def find_first_weights(
    settings: TrainSettings, drafter: Eagle, target: FrozenTarget, rows: TokenRows
) -> None:
    """Fit a fresh drafter's weights to the target's states of the first rows.

    Of another training's drafter, only the sizes of its inputs are made even.
    """
    if as_options(settings, EagleTrain).eagle_start != "least-squares":
        return
    if settings.start_from is None:
        start_from_least_squares(drafter, target, rows, settings.batch_size)
    else:
        drafter.fc.even_inputs(measure_sizes(drafter, target, rows, settings.batch_size))


METHOD = TrainingMethod(
    build=build_eagle,
    describe=describe_eagle,
    convert_folder="--eagle-model-dir",
    convert_flags=list_convert_flags,
    choose_layers=choose_layers,
    list_written_copies=list_written_copies,
    list_accepted_copies=list_accepted_copies,
    # A single layer's names and the mask of drafted tokens, as SafeAILab, ModelOpt and SpecForge
    # save them; the mask follows from d2t.
    published_prefixes={"midlayer.": "layers.0."},
    derived_tensors=("t2d",),
    optional_prefixes=("mask_hidden",),  # P-EAGLE may start from an EAGLE-3 drafter
    find_first_weights=find_first_weights,
    needs_head=True,
)
