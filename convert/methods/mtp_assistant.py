"""MTP assistant: a Gemma 4 assistant's folder -> the `mtp_assistant.*` tensors of a checkpoint.

transformers' own layout is read: Gemma4AssistantForCausalLM and Gemma4UnifiedAssistantForCausalLM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from specdec.errors import SpecDecError
from specdec.methods.mtp_assistant import (
    ARITHMETIC,
    METHOD,
    MtpAssistantConvert,
    MtpAssistantParams,
)
from specdec.model.config import ModelConfig
from specdec.model.config_reader import ConfigReader
from specdec.model.layer_sizes import LayerSizes
from specdec.model.tensors import ASSISTANT_NET, CENTROIDS, HEAD, TOKEN_ORDER, TOKEN_ROWS
from specdec.options import as_options

from ..families.base import ROTARY_BUFFERS, Layout
from ..families.gemma4 import GEMMA4, UNREAD, read_gemma4
from ..plan import SourceRows
from ..wrappers import DEFAULTS
from .base import NetConverter, check_layouts

EMBEDDED, ORDERING = "model.embed_tokens.weight", "masked_embedding.token_ordering"
TYPES = ("gemma4_text", "gemma4_unified_text")
SCALAR = ".layer_scalar"
DEFAULT_DRAFT_LEN = 8


class MtpAssistantConverter(NetConverter):
    """Converter of the folders that transformers calls assistants."""

    METHOD, NET = METHOD, ASSISTANT_NET

    def read_params(self) -> MtpAssistantParams:
        """Return the assistant's parameters; raise SpecDecError where it is another target's."""
        folder, model = self.folder, self.model
        reader = ConfigReader(folder.config, folder.path)
        check_layouts(reader)
        net = self._read_net(reader)
        has_centroids = reader.get_bool("use_ordered_embeddings", False)
        params = MtpAssistantParams(
            net=net,
            target_hidden_size=reader.get_int("backbone_hidden_size", 1536),
            num_centroids=reader.get_int("num_centroids", 2048) if has_centroids else 0,
            num_best_centroids=reader.get_int("centroid_intermediate_top_k", 32)
            if has_centroids else 0,
            max_draft_len=as_options(
                self.settings, MtpAssistantConvert
            ).mtp_assistant_max_draft_len or DEFAULT_DRAFT_LEN,
        )  # fmt: skip
        self.check_net(reader, net, "text_config: ")
        problems = params.find_problems(
            hidden_size=model.hidden_size, vocab_size=model.vocab_size, tp_size=model.tp_size
        )
        (problems or params.find_reading_problems(model)).raise_all()
        if has_centroids:
            self._check_order(net.vocab_size)
        return params

    def _read_net(self, reader: ConfigReader) -> ModelConfig:
        """Read the layers, which are a Gemma 4's that reads no tables and has no experts."""
        config = reader.get_object("text_config")
        kind = config.get("model_type", TYPES[0])
        if kind not in TYPES:
            reader.refuse(
                f"text_config has model_type {kind!r}",
                f"assistants are supported whose layers are of {' or '.join(TYPES)}",
            )
            reader.finish()
        text_reader = reader.enter({**DEFAULTS[kind], **config})
        layout = Layout(
            dtype=self.model.dtype, tp_size=1, pp_size=1, use_parallel_embedding=False,
            embedding_sharding_dim=0, share_embedding_table=True,
        )  # fmt: skip
        values = read_gemma4(text_reader, layout)
        reader.finish()
        sizes: LayerSizes = values["layer_sizes"]
        num_layers = values["num_hidden_layers"]
        is_wide = text_reader.get_bool("use_double_wide_mlp", False)
        for is_wrong, fact in (
            (values["experts"] is not None, "enable_moe_block is true"),
            (is_wide, "use_double_wide_mlp is true"),
            (sizes.input_size, f"hidden_size_per_layer_input is {sizes.input_size}"),
            (sizes.num_reusing not in (0, num_layers),
             f"num_kv_shared_layers is {sizes.num_reusing} of {num_layers} layers"),
        ):  # fmt: skip
            if is_wrong:
                reader.refuse(
                    f"text_config: {fact}, and no assistant has that",
                    "copy or download the folder again",
                )
        reader.finish()
        alike = LayerSizes(
            full_head_size=sizes.full_head_size, full_num_kv_heads=sizes.full_num_kv_heads
        )
        # Its embedding is the target's, scaled as that is; its logits are as the head has them.
        values |= {
            "layer_sizes": alike, "own_arithmetic": ARITHMETIC, "final_logit_softcapping": None,
        }  # fmt: skip
        return ModelConfig(
            architecture=MtpAssistantParams.NET_ARCHITECTURE, dtype=self.model.dtype,
            share_embedding_table=True, **values,
        )  # fmt: skip

    def _check_order(self, vocab_size: int) -> None:
        """Raise SpecDecError where the order of tokens is not one of all of them."""
        info = self.folder.tensors.get(ORDERING)
        if info is None or (info.dtype, info.shape) != ("int64", (vocab_size,)):
            return  # which the plan tells
        order = self.folder.read(ORDERING)
        num_tokens = len(np.unique(order))
        if num_tokens != vocab_size or order.min() < 0 or order.max() >= vocab_size:
            raise SpecDecError(
                f"{self.folder.path}: {ORDERING} names {num_tokens} tokens from {order.min()} to"
                f" {order.max()}, not each of {vocab_size} once",
                "copy or download the folder again",
            )

    def find_source_rows(self, canonical: Sequence[str]) -> dict[str, tuple[SourceRows, ...]]:
        """Map canonical tensor names to the folder's; those of the layers are a Gemma 4's."""
        names = self.name_bare(canonical)
        # The head is the embedding, of whose rows nothing else is read.
        table = EMBEDDED if self._is_tied and EMBEDDED in self.folder.tensors else HEAD
        extras = {
            "drafter.pre_projection.weight": "pre_projection.weight",
            "drafter.post_projection.weight": "post_projection.weight",
            CENTROIDS: "masked_embedding.centroids.weight", TOKEN_ORDER: ORDERING,
            TOKEN_ROWS: table, HEAD: table,
        }  # fmt: skip
        inner = {
            name: f"transformer.{bare.removeprefix('drafter.')}"
            for name, bare in names.items() if bare not in extras
        }  # fmt: skip
        decoder_rows = GEMMA4.find_source_rows(inner.values())
        sources: dict[str, tuple[SourceRows, ...]] = {
            name: (SourceRows(extras[bare]),) for name, bare in names.items() if bare in extras
        }
        for name, inner_name in inner.items():
            (rows,) = decoder_rows[inner_name]
            stored = rows.name.replace(f"{SCALAR}.weight", SCALAR)
            sources[name] = (dataclasses.replace(rows, name=stored),)
        return sources

    def share_tensors(self, canonical: Sequence[str]) -> dict[str, str | None]:
        """Return nothing: an assistant has a head of its own."""
        return {}

    def list_ignored(self) -> Sequence[str]:
        """Return patterns of what no assistant reads: keys of its own, and a second head."""
        unread = [f"model.layers.*.self_attn.{name}.*" for name in UNREAD]
        return (*ROTARY_BUFFERS, *unread, *self._list_second_tables())

    def _list_second_tables(self) -> list[str]:
        """Name the one of embedding and head that is not read; SpecDecError for two that differ."""
        if not self._is_tied:
            return [EMBEDDED]
        if not {HEAD, EMBEDDED} <= self.folder.tensors.keys():
            return []
        if not np.array_equal(self.folder.read(HEAD), self.folder.read(EMBEDDED)):
            raise SpecDecError(
                f"{self.folder.path}: {HEAD} and {EMBEDDED} differ, and config.json says that they"
                " are one",
                "copy or download the folder again",
            )
        return [HEAD]

    @property
    def _is_tied(self) -> bool:
        return self.folder.config.get("tie_word_embeddings", True) is not False


CONVERTER = MtpAssistantConverter
