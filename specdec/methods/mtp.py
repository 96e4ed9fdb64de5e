"""MTP: the target's own head for multi-token prediction, which some models are published with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from specdec.errors import Problems
from specdec.model.bounds import MAX_DRAFT_TOKENS
from specdec.model.config import FULL, ModelConfig
from specdec.model.tensors import HEAD_BIAS, MTP_NET, Shard, TensorSpec, list_norm
from specdec.options import as_options, setting

from .base import Method, bounds, count, read_length, share
from .net import NetParams

ARCHITECTURE = "SpecDecMtpForCausalLM"
# Norms of what `fc` reads: the embedding of a token, and the state before it.
NORMS = ("embedding_norm", "hidden_norm")


@dataclasses.dataclass(frozen=True)
class Form:
    """How published folders name a head's tensors.

    prefix: of all their names; {layer}: the number of the target's layers. layer: what follows it
    in those of the decoder layer. names: of the other modules, by ours. A folder has an embedding
    and a head only where they are not the target's. is_reversed: `fc` reads the state first, and
    the first pair of a text has no embedding.
    """

    prefix: str
    layer: str
    names: Mapping[str, str]
    is_reversed: bool = False


MODULES = ("fc", *NORMS, "ln_f", "vocab_embedding", "lm_head")
# Qwen3-Next, 3.5 and 3.6; GLM-4.5 and DeepSeek-V3; MiMo.
FORMS = {
    name: Form(prefix, layer, dict(zip(MODULES, names.split())), name == "mimo")  # noqa: B905
    for name, prefix, layer, names in (
        ("qwen", "mtp.", "layers.0.",
         "fc pre_fc_norm_embedding pre_fc_norm_hidden norm embed_tokens"),
        ("glm", "model.layers.{layer}.", "",
         "eh_proj enorm hnorm shared_head.norm embed_tokens shared_head.head"),
        ("mimo", "model.mtp_layers.0.", "",
         "input_proj token_layernorm hidden_layernorm final_layernorm"),
    )
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpParams(NetParams):
    """A layer of the target's own kind, applied again and again (https://arxiv.org/abs/2412.19437).

    Its sizes are the target's. max_draft_len: most draft tokens of a chain. is_reversed: as in
    MiMo zeros stand for the embedding in the first pair of a text, and `fc` reads the state first.
    """

    max_draft_len: int = count(1, MAX_DRAFT_TOKENS)
    is_reversed: bool = False

    TITLE: ClassVar[str] = "MTP"
    WORD: ClassVar[str] = "mtp"
    KEYS: ClassVar[dict[str, str]] = {"is_reversed": "mtp_is_reversed"}

    @property
    def max_draft_depth(self) -> int:
        return self.max_draft_len

    def find_problems(self, *, hidden_size: int, vocab_size: int, tp_size: int) -> Problems:
        return Problems()  # its sizes are the target's

    def make_net_model(self, model: ModelConfig) -> ModelConfig:
        """Return one layer of the target that attends to all tokens, as a model of its own.

        Its logits are multiplied as every drafter's are.
        """
        return dataclasses.replace(
            model, num_hidden_layers=1, linear_attention=None, short_conv=None, mamba2=None,
            layer_types=None if model.layer_types is None else (FULL,), share_embedding_table=False,
            output_multiplier_scale=1.0,
        )  # fmt: skip

    def list_tensors(self, model: ModelConfig) -> dict[str, TensorSpec]:
        tensors = self.list_net_tensors(model, 2 * model.hidden_size)
        for name in NORMS:
            tensors |= list_norm(model, f"drafter.{name}")
        if model.arithmetic.head_bias:
            tensors[HEAD_BIAS] = TensorSpec((model.vocab_size,), Shard.VOCAB)
        return {f"{MTP_NET}{name}": spec for name, spec in tensors.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpConvert:
    """Options of specdec-convert."""

    mtp_model_dir: str | None = setting(
        metavar="DRAFTER",
        help="Where the target's own head for multi-token prediction is: its folder or Hub id"
        " again, or that of a head alone.",
    )
    mtp_max_draft_len: int | None = setting(
        **bounds(MtpParams, "max_draft_len"), metavar="N",
        help="Most draft tokens in a step of an MTP engine; 8 if not given.",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpDraft:
    """Options of every command that decodes."""

    mtp_num_draft_tokens: str | None = setting(
        metavar="N|auto",
        help="Draft tokens in a step of an MTP engine, at most; auto: as many as pay, up to what"
        " the engine has room for.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpTrain:
    """Options of specdec-train."""

    mtp_num_steps: int = setting(
        3, help="Draft steps in a row that an MTP head is trained for.", minimum=1,
        maximum=MAX_DRAFT_TOKENS,
    )  # fmt: skip
    mtp_loss_decay: float = share(
        0.9, help="Weight of each MTP draft step relative to the one before."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpOptions:
    """Most draft tokens of a step; None: what pays, on any device."""

    num_tokens: int | None


def read_options(settings: Any) -> MtpOptions | None:
    """Return how many tokens are asked for, None where nothing is; raise UsageError."""
    text = as_options(settings, MtpDraft).mtp_num_draft_tokens
    if text is None:
        return None
    return MtpOptions(num_tokens=read_length("--mtp-num-draft-tokens", text))


METHOD = Method(
    name="mtp",
    title="MTP",
    paper="https://arxiv.org/abs/2412.19437",
    mode="mtp",
    source="checkpoint",
    params=MtpParams,
    architectures=(ARCHITECTURE,),
    own_architectures={ARCHITECTURE: "MTP"},
    folder="mtp_model_dir",
    read=read_options,
    options={"convert": MtpConvert, "draft": MtpDraft, "train": MtpTrain},
    training={"learning_rate": 5e-4, "self_distillation": 1.0},
)
