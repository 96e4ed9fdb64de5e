"""A contract double of `trtllm-build`, and the layout that its engines share with the runtime's.

Nothing here is TensorRT-LLM. The double is generated from the facts that the package carries
(`specdec.trtllm.facts`), refuses what the real program refuses, and also what the real one
silently ignores or bends, so that a command which passes here has nothing that gets lost.

`install_double(folder, version, ...)` writes folder/bin/trtllm-build (this module's `main`),
folder/bin/nvidia-smi, which answers the query of `specdec.trtllm.environment`, the package
folder/site/tensorrt_llm, which has only a version until the runtime's double fills it, and METADATA
of it, TensorRT and mpi4py. It returns the environment of a process that is to see them. Labels of
versions are those of `--trtllm-version`; V is 1.2.0 or 0.14.0.

An engine folder has, as trtllm-build writes it:
  config.json       {"version": V, "pretrained_config": the checkpoint's, "build_config": the keys
                    of the version, with rewritten lengths; `speculative_decoding_mode` is 1 for
                    none, 2 external drafts, 4 Medusa, 8 lookahead, 16 explicit drafts, 32 EAGLE}
  rank{r}.engine    MAGIC, then a JSON object {"checkpoint_dir", "rank", "tp_size", "version",
                    "label"}: a runner's double builds a torch engine from that checkpoint
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec.files.tensor_file import TensorFile
from specdec.system.machine import Gpu, list_gpus
from specdec.trtllm.facts import BuildFlag, Facts, load_facts

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = {"1.2": "1.2.0", "0.14": "0.14.0"}
TENSORRT = {"1.2": "10.13.3.9", "0.14": "10.4.0"}
MAGIC = b"DOUBLE-ENGINE\n"
H100 = Gpu(name="NVIDIA H100 80GB HBM3", compute_capability="9.0", memory_bytes=81559 << 20)
DRIVER = "580.65.06"

# Keys of config.json without which trtllm-build fails, and the C++ reader throws.
REQUIRED = (
    "architecture", "dtype", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "vocab_size", "mapping", "quantization",
)  # fmt: skip
READ_PLUGINS = (
    "gpt_attention_plugin", "remove_input_padding", "paged_kv_cache", "tokens_per_block",
    "context_fmha", "use_paged_context_fmha", "lora_plugin",
)  # fmt: skip


class Refusal(Exception):
    """What the double does not take; the real one fails here, or goes on without a word."""


def install_double(
    folder: Path, label: str, *, version: str | None = None, gpus: Sequence[Gpu] = (H100,),
) -> dict[str, str]:  # fmt: skip
    """Write the double into `folder`; return the environment of a process that is to see it."""
    binaries, site = folder / "bin", folder / "site"
    binaries.mkdir(parents=True)
    version = version or VERSIONS[label]
    write_script(
        binaries / "trtllm-build",
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        f"from tests.trtllm.double import main\nmain({label!r}, {version!r})\n",
    )
    rows = "".join(
        f"{index}, {gpu.name}, {gpu.compute_capability}, {gpu.memory_bytes >> 20}, {DRIVER},"
        f" GPU-{index:08d}\n"
        for index, gpu in enumerate(gpus)
    )
    write_script(binaries / "nvidia-smi", f"#!/bin/sh\ncat <<'EOF'\n{rows}EOF\n")
    for name, own in (
        ("tensorrt_llm", version), ("tensorrt", TENSORRT[label]), ("mpi4py", "4.1.0"),
    ):  # fmt: skip
        folder = site / f"{name}-{own}.dist-info"
        folder.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {own}\n"
        (folder / "METADATA").write_text(text)
    package = site / "tensorrt_llm"
    package.mkdir()
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(len(gpus)))),  # `make test` hides all
        "PATH": os.pathsep.join([str(binaries), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
    }


def write_script(path: Path, text: str) -> None:
    """Write an executable file."""
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def read_engine_file(path: Path) -> dict[str, Any]:
    """Return what a rank's engine file of the double holds."""
    data = path.read_bytes()
    assert data.startswith(MAGIC), path
    document: dict[str, Any] = json.loads(data[len(MAGIC) :])
    return document


def parse_arguments(facts: Facts, words: Sequence[str]) -> tuple[dict[str, Any], set[str]]:
    """Return every flag's value, and the names of those that were given."""
    parser = argparse.ArgumentParser(prog="trtllm-build", allow_abbrev=False)
    for flag in facts.flags.values():
        names = [f"--{name}" for name in (flag.name, *flag.aliases)]
        parser.add_argument(*names, dest=flag.name, default=argparse.SUPPRESS, **_describe(flag))
    given = vars(parser.parse_args(list(words)))
    values = {name: flag.default for name, flag in facts.flags.items()} | given
    return values, set(given)


def _describe(flag: BuildFlag) -> dict[str, Any]:
    if flag.kind == "switch":
        return {"action": "store_true"}
    options: dict[str, Any] = {"type": int if flag.kind == "int" else str}
    if flag.choices:
        options["choices"] = flag.choices
    if flag.is_list:
        options["nargs"] = "+"
    return options


@dataclasses.dataclass
class Command:
    """A parsed command and the checkpoint that it is for; `values` are rewritten on the way."""

    facts: Facts
    values: dict[str, Any]
    given: set[str]
    config: dict[str, Any]

    @property
    def mode(self) -> str | None:
        mode: str | None = self.values["speculative_decoding_mode"]
        return mode

    @property
    def tp_size(self) -> int:
        return int(self.config["mapping"].get("tp_size", 1))

    @property
    def world_size(self) -> int:
        return self.tp_size * int(self.config["mapping"].get("pp_size", 1))

    def refuse_if(self, condition: object, why: str) -> None:
        if condition:
            raise Refusal(why)

    def refuse(self, *rows: tuple[object, str]) -> None:
        """Refuse for the first of some reasons that holds."""
        for row in rows:
            self.refuse_if(*row)

    def rewrite(self, name: str, value: Any) -> None:
        """What the real one does without a word; here only to what was not asked for."""
        if self.values[name] != value and name in self.given:
            raise Refusal(f"--{name} {self.values[name]} would silently become {value}")
        self.values[name] = value


def check_checkpoint(command: Command) -> None:
    """What PretrainedConfig, Mapping and QuantConfig of the line do with config.json."""
    facts, config = command.facts, command.config
    missing = [key for key in REQUIRED if key not in config]
    command.refuse_if(missing, f"KeyError: {missing}")
    name = config["architecture"]
    command.refuse(
        (name not in facts.architectures,
         f"AssertionError: Unsupported model architecture: {name}"),
        *((key not in (*known, "rank"),
           f"TypeError: {kind}.__init__() got an unexpected keyword argument '{key}'")
          for section, kind, known in (("mapping", "Mapping", facts.mapping_keys),
                                       ("quantization", "QuantConfig", facts.quantization_keys),
                                       ("moe", "MoeConfig", facts.moe_keys))
          for key in config.get(section) or {}),
        ("qwen" in name.lower() and "qwen_type" not in config,
         "the runtime cannot name a qwen model without qwen_type"),
    )  # fmt: skip


def check_matrices(command: Command) -> None:
    """Whether the layers that the line makes take the tensors of the first rank.

    Its int4 layers round their sizes up to whole tiles, and its kernels have two group sizes.
    """
    section, mapping = command.config["quantization"], command.config["mapping"]
    algorithm, tp_size = section.get("quant_algo"), mapping["tp_size"]
    if algorithm is None:
        return
    command.refuse_if(
        command.facts.quant_algos.get(algorithm, "unknown") is not None,
        f"ValueError: '{algorithm}' is not a valid QuantAlgo of this model",
    )
    if algorithm not in ("W4A16_AWQ", "W4A8_AWQ"):
        return
    group_size = section["group_size"]
    command.refuse_if(group_size not in (64, 128), f"Invalid group size {group_size}")
    command.refuse_if(not section["pre_quant_scale"], "no parameter prequant_scaling_factor")
    tile = max(64 if algorithm == "W4A16_AWQ" else 128, group_size) * tp_size
    tensors = TensorFile(Path(command.values["checkpoint_dir"], "rank0.safetensors")).tensors
    for name, info in tensors.items():
        if name.endswith(".weight") and info.dtype == "int8":
            is_row = name.endswith(("dense.weight", "proj.weight"))
            sizes = [2 * info.shape[0], info.shape[1]]
            sizes[is_row] *= tp_size
            module = name.removesuffix("weight")
            groups = (2 * info.shape[0], info.shape[1] // group_size)
            command.refuse(
                (any(size % tile for size in sizes), f"{name} {sizes} is not of whole tiles"),
                (tensors[module + "weights_scaling_factor"].shape != groups
                 or tensors[module + "prequant_scaling_factor"].shape != info.shape[1:],
                 f"{module} has scales of other shapes"),
            )  # fmt: skip


def check_mode(command: Command) -> None:
    """Mode, draft length and checkpoint; the real one checks next to nothing of it."""
    config, values, mode = command.config, command.values, command.mode
    beams, length = (
        config.get("redrafter_num_beams"), config.get("redrafter_draft_len_per_beam"),
    )  # fmt: skip
    own = None
    if beams and length:
        own = "explicit_draft_tokens"
        command.rewrite("max_draft_len", beams * length)
        command.refuse_if(
            config["vocab_size"] % command.tp_size, "the vocabulary does not divide by tp_size"
        )
    elif "Medusa" in config["architecture"]:
        own = "medusa"
        for key in ("max_draft_len", "num_medusa_heads"):
            command.refuse_if(not config.get(key), f"the engine's reader wants {key}")
        command.rewrite("max_draft_len", config["max_draft_len"])
    elif "Eagle" in config["architecture"]:
        own = "eagle"
        for key in ("num_eagle_layers", "max_non_leaves_per_layer", "eagle_net_config"):
            command.refuse_if(not config.get(key), f"the engine's reader wants {key}")
        command.rewrite("max_draft_len", config["max_draft_len"])
        command.refuse_if(values["max_batch_size"] > 512, "AssertionError: Max batch size > 512")
        command.refuse_if(values["max_draft_len"] > 256, "Max draft len > 256")
    gathers = values["gather_context_logits"] or values["gather_all_token_logits"]
    command.refuse_if(
        values["multiple_profiles"] == "enable" and values["opt_num_tokens"] is not None,
        "RuntimeError: multiple_profiles is enabled, while opt_num_tokens is set.",
    )
    command.refuse(
        (own is not None and mode != own, f"a checkpoint of mode {own} is built as {mode}"),
        (own is None and mode not in (None, "draft_tokens_external", "lookahead_decoding"),
         f"mode {mode} for a checkpoint without a drafter"),
        (own is None and bool(mode) != bool(values["max_draft_len"]),
         f"mode {mode} with max_draft_len {values['max_draft_len']}"),
        (mode and values["max_beam_width"] > 1, "beams and drafts"),
        (mode and gathers,
         "RuntimeError: Gather context logits is not support with draft len > 0."),
    )  # fmt: skip


def rewrite_lengths(command: Command) -> None:
    """Lengths and token counts, as `_init_max_seq_len` and `build` make them."""
    values, config = command.values, command.config
    scaling = config.get("rotary_scaling") or {}
    factor = scaling.get("factor", 1) if scaling.get("rope_type") in ("linear", "dynamic") else 1
    positions = math.ceil(config.get("max_position_embeddings", 2048) * factor)
    if values["max_seq_len"] is None:
        values["max_seq_len"] = positions
    command.refuse_if(values["max_seq_len"] > positions, "max_seq_len is larger than positions")
    if values["max_input_len"] > values["max_seq_len"]:
        command.rewrite("max_input_len", values["max_seq_len"])
    most = values["max_seq_len"] * values["max_batch_size"]
    if values["max_num_tokens"] > most:
        command.rewrite("max_num_tokens", most)
    if values["max_num_tokens"] < values["tokens_per_block"]:
        command.rewrite("max_num_tokens", values["tokens_per_block"])
    if command.mode:
        values["max_seq_len"] += values["max_draft_len"]
        if command.mode == "eagle":
            values["max_seq_len"] += config["num_eagle_layers"]
        tokens = values["max_batch_size"] * (values["max_draft_len"] + 1)
        if values["max_num_tokens"] < tokens:
            command.rewrite("max_num_tokens", tokens)


def rewrite_plugins(command: Command) -> None:
    """Attention and fusions; each would be turned off or on without an error."""
    values, section = command.values, command.config["quantization"]
    weights, cache = section.get("quant_algo"), section.get("kv_cache_quant_algo")
    paged, fp8 = "use_paged_context_fmha", "use_fp8_context_fmha"
    if weights != "FP8":
        command.rewrite(fp8, "disable")
    elif values[paged] == "enable":
        if command.facts.label != "0.14" or cache == "FP8":
            command.rewrite(fp8, "enable" if cache == "FP8" else "disable")
    if cache is not None and weights != "FP8":
        command.refuse_if(
            values[paged] == "enable", f"RuntimeError: {cache} KV cache with {weights} weights"
        )
    is_off = values[paged] != "enable"
    command.refuse(
        (command.mode == "draft_tokens_external" and is_off,
         "external drafts without paged context FMHA cannot reuse the cache"),
        (command.mode == "eagle" and is_off, "EAGLE turns paged context FMHA on"),
    )  # fmt: skip
    if values["context_fmha"] != "enable":
        command.rewrite(paged, "disable")
    if command.tp_size == 1 or "ReDrafter" in command.config["architecture"]:
        command.rewrite("reduce_fusion", "disable")


def make_engine_config(command: Command, version: str) -> dict[str, Any]:
    """Return config.json as the line lays it out."""
    facts, values = command.facts, command.values
    plugins: dict[str, Any] = {"dtype": command.config["dtype"], "paged_kv_cache": True}
    for name, flag in facts.flags.items():
        if flag.is_plugin:
            own = None if values[name] == "disable" else values[name]
            plugins[name] = values[name] == "enable" if flag.is_toggle else own
    plugins["nccl_plugin"] = command.config["dtype"] if command.world_size > 1 else None
    plugins["paged_state"] = False
    build: dict[str, Any] = {name: values.get(name) for name in facts.build_config_keys}
    if build["opt_num_tokens"] is None:
        build["opt_num_tokens"] = values["max_batch_size"] * values["max_beam_width"]
    build |= {
        "kv_cache_type": "PAGED",
        "speculative_decoding_mode": facts.modes[command.mode or "none"],
        "plugin_config": plugins,
        "lora_config": {"lora_dir": values["lora_dir"] or [], "lora_ckpt_source": "hf"},
        "opt_batch_size": None, "strongly_typed": True, "use_refit": False,
        "use_strip_plan": False,
    }  # fmt: skip
    return {"version": version, "pretrained_config": command.config, "build_config": build}


def check_engine_config(document: dict[str, Any]) -> None:
    """Read an engine's config.json as the C++ runtime does; raise Refusal where it throws."""
    for key in ("version", "pretrained_config", "build_config"):
        if key not in document:
            raise Refusal(f"config.json lacks {key}")
    pretrained, build = document["pretrained_config"], document["build_config"]
    missing = [key for key in REQUIRED if key not in pretrained]
    missing += [key for key in READ_PLUGINS if key not in build["plugin_config"]]
    missing += [key for key in ("lora_config", "max_num_tokens") if not build.get(key)]
    if missing:
        raise Refusal(f"config.json lacks {missing}")
    mode = build["speculative_decoding_mode"]
    has_heads = pretrained.get("max_draft_len") and pretrained.get("num_medusa_heads")
    for is_wrong, why in (
        (mode == 4 and not has_heads, "Medusa without max_draft_len or num_medusa_heads"),
        (mode in (2, 8, 32) and not build["max_draft_len"], "max_draft_len must be larger than 0"),
        (mode == 16 and not pretrained.get("redrafter_num_beams"), "ReDrafter without beams"),
    ):
        if is_wrong:
            raise Refusal(why)


def build_engine(facts: Facts, version: str, words: Sequence[str]) -> None:
    """Do what trtllm-build does; raise Refusal for what it must not be asked."""
    values, given = parse_arguments(facts, words)
    if values["checkpoint_dir"] is None:
        raise Refusal("no --checkpoint_dir")
    checkpoint = Path(values["checkpoint_dir"])
    config = json.loads((checkpoint / "config.json").read_text())
    config.get("mapping", {}).pop("rank", None)
    command = Command(facts, values, given, config)
    gpus, _ = list_gpus()
    command.refuse_if(not gpus, "ValueError: max_workers must be greater than 0")
    command.refuse_if(values["workers"] > len(gpus), "workers are cut to the GPUs that are there")
    command.refuse_if(
        gpus and gpus[0].capability < (8, 0), "compute capability 8.0 is the least there is"
    )
    check_checkpoint(command)
    check_matrices(command)
    check_mode(command)
    rewrite_lengths(command)
    rewrite_plugins(command)
    document = make_engine_config(command, version)
    check_engine_config(document)
    output = Path(values["output_dir"])
    output.mkdir(parents=True, exist_ok=True)
    size, own = 1, 0
    if facts.label != "0.14":
        size = int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1")))
        own = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("SLURM_PROCID", "0")))
    for rank in range(command.world_size):
        weights = checkpoint / f"rank{rank}.safetensors"
        command.refuse_if(not weights.is_file(), f"FileNotFoundError: {weights}")
        if rank % size != own:
            continue
        print(f"[TRT-LLM] [I] Build TensorRT engine Unnamed Network {rank}", flush=True)
        content = {
            "checkpoint_dir": str(checkpoint.resolve()), "rank": rank,
            "tp_size": command.tp_size, "version": version, "label": facts.label,
        }  # fmt: skip
        (output / f"rank{rank}.engine").write_bytes(MAGIC + json.dumps(content).encode())
        if rank == 0:
            (output / "config.json").write_text(json.dumps(document, indent=4))
            Path(values["output_timing_cache"]).write_bytes(b"timing")
    print("[TRT-LLM] [I] Total time of building all engines: 00:00:00", flush=True)


def main(label: str, version: str) -> None:
    """Be the executable `trtllm-build` of a line."""
    try:
        build_engine(load_facts(label), version, sys.argv[1:])
    except Refusal as refusal:
        print(f"[TRT-LLM] [E] double: {refusal}", file=sys.stderr)
        sys.exit(1)
