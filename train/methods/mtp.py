"""MTP: a drafting layer of the target's architecture (https://arxiv.org/abs/2412.19437).

With s_t the target's last hidden state after its final norm and e its embedding, the head reads at
place t the pair of e(x_{t+1}) and s_t: h_t = norm(layer(F [norm(e) ; norm(s)])), from which the
target's own output layer makes the distribution of token t+2. Draft step i at place t reads
e(x_{t+1+i}) and step i-1's h_t, as the engine does (`specdec.engine.mtp`), and attends as EAGLE's.

Legend: B rows, T tokens, D hidden.
"""

from __future__ import annotations

import copy
import inspect
import json
from typing import Any

import torch
from torch import Tensor

from specdec.errors import SpecDecError
from specdec.methods.mtp import MtpTrain
from specdec.options import as_options
from specdec.text import pretrained

from ..settings import TrainSettings
from ..target import FrozenTarget
from .base import TrainingMethod
from .eagle_parts.nets import TrainablePairDrafter, make_linear, make_mask


def make_layer(target: FrozenTarget) -> Any:
    """Make transformers' model of one layer of the target's kind, which attends to all tokens."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(target.config)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
    config.vocab_size, config.pad_token_id = 2, None  # embedding and head are the target's
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    base_model = pretrained.find_base(model.float())
    if not all(hasattr(base_model, name) for name in ("layers", "norm", "rotary_emb")):
        raise SpecDecError(
            f"{target.name} has learned positions, or is built otherwise than a Llama, and no head"
            " for multi-token prediction is known for it",
            "train a drafter of another --method",
        )
    return base_model


class Mtp(TrainablePairDrafter):
    """MTP head and its loss."""

    def __init__(self, settings: TrainSettings, target: FrozenTarget) -> None:
        self.options = as_options(settings, MtpTrain)
        super().__init__(
            settings, num_positions=self.options.mtp_num_steps,
            loss_decay=self.options.mtp_loss_decay, vocab_size=target.shape.vocab_size,
        )  # fmt: skip
        base_model, width = make_layer(target), target.shape.hidden_size
        self._rotary, self._scale = [base_model.rotary_emb], target.shape.embedding_scale
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")  # by Qwen's names
        self.mtp = torch.nn.ModuleDict({
            "fc": make_linear(2 * width, width),
            **{name: copy.deepcopy(base_model.norm) for name in norms},
            "layers": base_model.layers,
        })  # fmt: skip
        layer_parameters = inspect.signature(base_model.layers[0].forward).parameters
        self._cache_name = "cache" if "cache" in layer_parameters else "past_key_values"

    def make_history(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache()

    def join_pair(self, embedded: Tensor, state: Tensor) -> Tensor:
        embedded = self.mtp["pre_fc_norm_embedding"](embedded * self._scale)
        state = self.mtp["pre_fc_norm_hidden"](state)
        layer_input: Tensor = self.mtp["fc"](torch.cat((embedded, state), dim=-1))
        return layer_input

    def run_layers(self, x: Tensor, embedded: Tensor, history: Any, step: int) -> Tensor:
        size = x.shape[1]
        positions = torch.arange(step, step + size, device=x.device)[None]
        is_hidden = ~make_mask(
            [size + step - earlier_step for earlier_step in range(step + 1)], x.device
        )
        mask = torch.zeros(is_hidden.shape, dtype=x.dtype, device=x.device)
        output = self.mtp.get_submodule("layers.0")(
            x, attention_mask=mask.masked_fill(is_hidden, torch.finfo(x.dtype).min),
            position_ids=positions, position_embeddings=self._rotary[0](x, positions),
            **{self._cache_name: history},
        )  # fmt: skip
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result

    def finish_state(self, state: Tensor) -> Tensor:
        normed: Tensor = self.mtp["norm"](state)
        return normed


METHOD = TrainingMethod(
    build=Mtp,
    # The layer's config.json is the target's.
    describe=lambda drafter, target: json.loads(target.config.to_json_string(use_diff=False)),
    convert_folder="--mtp-model-dir",
    needs_head=True,
)
