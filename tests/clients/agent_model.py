"""Make a tiny model with room for an agent's prompts: pycode's tokenizer, random weights."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

MAX_TOKENS = 131072


def main() -> None:
    """Write the model's folder, the first argument; the second one has the tokenizer."""
    folder, source = Path(sys.argv[1]), Path(sys.argv[2])
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=4096, max_position_embeddings=MAX_TOKENS,
        bos_token_id=0, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    for path in source.glob("*token*"):
        shutil.copy(path, folder)


main()
