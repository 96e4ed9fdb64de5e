"""Records what other trainers' own code writes: `exporters.py TARGET OUTPUT.json`.

Runs where `pip install --no-deps speculators==0.9.0 specforge==0.2.0` and what they import are
installed; TARGET is a Llama of 131 tokens and 64 dimensions. OUTPUT has, for each folder that they
wrote, its config.json, and type and shape of each tensor. tests/golden/eagle/exporters.json is one.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

VOCAB, DRAFTED, HIDDEN = 131, 70, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
}  # fmt: skip
LAYERS = [2, 4, 5]  # as speculators counts them: 1, 3, 4 come out of the ones before
SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def fill(model: Any) -> None:
    """Random weights, and every other token drafted, then the first ones of the rest."""
    drafted = torch.cat((torch.arange(0, VOCAB, 2), torch.arange(1, VOCAB, 2)))[:DRAFTED].sort()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.2 * torch.randn(weight.shape))
        model.d2t.copy_(drafted.values - torch.arange(DRAFTED))
        model.t2d.zero_()
        model.t2d[drafted.values] = True


def write_speculators(folder: Path, target: str) -> None:
    """What its trainer saves, and what its converter makes of SpecForge's folder."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.convert.eagle.eagle3_converter import Eagle3Converter
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    for name, flags, layer in (
        ("saved", {}, {}),
        ("saved-residual", {"norm_before_residual": True}, {}),
        ("saved-3.1", {"norm_output": True, "fc_norm": True}, {}),
        ("saved-scaled", {"norm_before_fc": True}, {"rope_scaling": SCALING}),
    ):
        described = SpeculatorsConfig(
            algorithm="eagle3", default_proposal_method="greedy",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        )  # fmt: skip
        model = Eagle3DraftModel(
            Eagle3SpeculatorConfig(
                transformer_layer_config=LlamaConfig(**SIZES | layer), draft_vocab_size=DRAFTED,
                speculators_config=described, eagle_aux_hidden_state_layer_ids=LAYERS, **flags,
            )
        )  # fmt: skip
        fill(model)
        model.save_pretrained(str(folder / f"speculators-{name}"))
    Eagle3Converter().convert(
        folder / "specforge-hf", folder / "speculators-converted", target, validate=False,
        norm_before_residual=True, eagle_aux_hidden_state_layer_ids=LAYERS,
    )  # fmt: skip


def write_specforge(folder: Path, target: str) -> None:
    """What its two exporters make of a training state."""
    from specforge.export.to_hf import export_to_hf
    from specforge.export.to_sglang import export_to_sglang
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from transformers import LlamaConfig

    config = SIZES | {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu",
        "draft_vocab_size": DRAFTED, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in LAYERS],
            "use_aux_hidden_state": True,
        },
    }  # fmt: skip
    described, state = folder / "draft.json", folder / "training_state.pt"
    described.write_text(json.dumps(config))
    model = LlamaForCausalLMEagle3(LlamaConfig(**config)).to(torch.bfloat16)
    fill(model)
    kept = {name: value for name, value in model.state_dict().items() if "embed" not in name}
    torch.save({"strategy": "eagle3", "draft_state_dict": kept}, state)
    export_to_sglang(str(state), str(described), str(folder / "specforge-sglang"))
    export_to_hf(
        str(state), str(described), str(folder / "specforge-hf"), embedding_source=target
    )  # fmt: skip


def describe(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    if "speculators_config" in config:
        config["speculators_config"]["verifier"]["name_or_path"] = None
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_slice(name) for name in sorted(file.keys())}
        return {
            "config": config,
            "tensors": {name: [t.get_dtype(), t.get_shape()] for name, t in tensors.items()},
        }


def main() -> None:
    target, output = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_specforge(folder, target)
        write_speculators(folder, target)
        found = {
            place.name: describe(place) for place in sorted(folder.iterdir()) if place.is_dir()
        }
    Path(output).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
