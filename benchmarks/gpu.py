#!/usr/bin/env python3
"""Speed of the embedded engine on a GPU, compared with transformers: one machine, one run.

    python benchmarks/gpu.py [--shapes 1b 7b] [--repeat 5] [--output-len 256]
                             [--no-fused] [--output-dir benchmarks/results]
    python benchmarks/gpu.py --quick                 # toy sizes, any device: that the script works

Random weights in bfloat16, the same for every way, one request at a time, no network, no files but
the report. Measured: what the memory can be read at; plain decoding, with graphs and without, and
transformers' `generate` with its dynamic and its static cache, taking turns; what a verify step
costs by its tokens; the parts of a ReDrafter step; and where the time of a plain step goes, by
kernel. Prints a JSON object and writes gpu-SHAPES-DATE.json. A shape takes a few minutes, most of
them transformers compiling for its static cache: --shapes 1b, then --shapes 7b, where a command has
ten.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if __package__ in (None, ""):  # started as a file
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.side_by_side import models
from specdec.decode.drafters.base import DraftContext, Drafter
from specdec.decode.drafters.redrafter import make_drafter
from specdec.decode.loop import Options, generate
from specdec.decode.requests import Request
from specdec.decode.timing import Timing
from specdec.engine.decoder import Decoder
from specdec.engine.graphs import CudaRecorder, Graphs, StepGraphs
from specdec.engine.layout import list_engine_tensors
from specdec.engine.transfers import WAITS
from specdec.errors import summarize
from specdec.files.reading import write_json
from specdec.files.torch_tensors import TORCH_DTYPES
from specdec.measure.machine import LoadMeter, describe_machine
from specdec.measure.steps import make_step, take_turns, time_steps
from specdec.methods.redrafter import ReDrafterParams
from specdec.model.config import ModelConfig
from specdec.text.comparison import find_difference

SIZES = (1, 4, 8, 16, 32)
MAX_KERNELS = 15  # listed
# transformers' names of a layer's tensors: parts of two of ours, and those that both have.
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
SAME = {
    "self_attn.o_proj": "attention.dense", "mlp.down_proj": "mlp.proj",
    "input_layernorm": "input_layernorm", "post_attention_layernorm": "post_layernorm",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Shape:
    """A Llama, its ReDrafter drafter, and how much of it is run."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    exit_dim: int
    dtype: str = "bfloat16"
    prompt: int = 128
    output: int = 256
    past: int = 256


SHAPES = {
    "1b": Shape(16, 2048, 8192, 32, 8, 128256, 2048),  # Llama-3.2-1B, its head not tied
    "7b": Shape(32, 4096, 11008, 32, 32, 32000, 4096),  # Llama-2-7B
    "toy": Shape(2, 64, 96, 4, 2, 128, 96, dtype="float32", prompt=5, output=12, past=20),
}


def make_model(shape: Shape) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM", dtype=shape.dtype, vocab_size=shape.vocab,
        hidden_size=shape.hidden, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_size=shape.hidden // shape.heads, intermediate_size=shape.intermediate,
        norm_epsilon=1e-5, max_position_embeddings=2048,
    )  # fmt: skip


class Bench:
    """One shape on a device: its weights, decoder, drafter and transformers' model of it."""

    def __init__(
        self, shape: Shape, device: torch.device, recorder: CudaRecorder | None, fuses: bool
    ) -> None:
        self.shape, self.device = shape, device
        self.model = make_model(shape)
        self.params = ReDrafterParams(
            num_layers=2, hidden_size=shape.hidden, exit_dim=shape.exit_dim, is_rnn=True,
            num_beams=4, draft_len_per_beam=5, greedy_search=False,
        )  # fmt: skip
        generator = torch.Generator(device).manual_seed(0)
        dtype = TORCH_DTYPES[shape.dtype]

        def fill(size: tuple[int, ...]) -> Tensor:
            if len(size) == 1:
                return torch.ones(size, dtype=dtype, device=device)
            weight = torch.randn(size, dtype=dtype, device=device, generator=generator)
            return weight.mul_(size[-1] ** -0.5)

        names = list_engine_tensors(self.model, self.params)
        self.weights = {name: fill(size) for name, size in names.items()}
        self.decoder = Decoder(
            self.model, self.weights, num_positions=2048, device=device,
            prepack=fuses and device.type == "cuda",
        )  # fmt: skip
        self.graphs: Graphs | None = None
        if recorder is not None:
            self.graphs = Graphs(recorder)
            self.decoder.graphs = StepGraphs(self.graphs)
        target = list_engine_tensors(self.model, None)
        # An embedding is looked up, not read.
        self.step_bytes = sum(
            self.weights[name].numel() * self.weights[name].element_size()
            for name in target
            if name != "transformer.vocab_embedding.weight"
        )
        token = torch.Generator().manual_seed(1)
        self.prompt = torch.randint(0, shape.vocab, (shape.prompt,), generator=token).tolist()
        self.texts: dict[str, list[int]] = {}

    @property
    def cache_bytes(self) -> int:
        """Bytes that a step reads of the cache, at half of the output."""
        model, length = self.model, self.shape.prompt + self.shape.output // 2
        return 2 * model.num_hidden_layers * length * model.num_key_value_heads * (
            model.head_size * TORCH_DTYPES[model.dtype].itemsize
        )  # fmt: skip

    def use_graphs(self, is_used: bool) -> None:
        if self.graphs is not None:
            self.graphs.is_enabled = is_used

    def run(
        self, name: str, *, graphs: bool, drafter: Drafter | None = None, is_exact: bool = False
    ) -> Timing:
        """Decode the prompt; keep the text."""
        self.use_graphs(graphs)
        timing = Timing(is_exact=is_exact)
        request = Request(
            index=0, input_ids=self.prompt, max_output_len=self.shape.output, end_ids=frozenset()
        )
        found = generate(self.decoder, drafter or Drafter(), [request], Options(), timing)
        self.texts[name] = found[0].output_ids
        return timing

    def make_transformers(self) -> Any:
        """transformers' model over the same tensors."""
        from transformers import LlamaConfig, LlamaForCausalLM

        shape, size = self.shape, self.model.head_size
        config = LlamaConfig(
            hidden_size=shape.hidden, intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads, vocab_size=shape.vocab, rms_norm_eps=1e-5,
            max_position_embeddings=2048, tie_word_embeddings=False,
        )  # fmt: skip
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        state = {
            "model.embed_tokens.weight": self.weights["transformer.vocab_embedding.weight"],
            "model.norm.weight": self.weights["transformer.ln_f.weight"],
            "lm_head.weight": self.weights["lm_head.weight"],
        }
        rows = [shape.heads * size, shape.kv_heads * size, shape.kv_heads * size]
        for layer in range(shape.layers):

            def get(name: str, layer: int = layer) -> Tensor:
                return self.weights[f"transformer.layers.{layer}.{name}.weight"]

            theirs = dict(zip(QKV, torch.split(get("attention.qkv"), rows), strict=True))
            theirs |= dict(zip(GATE_UP, get("mlp.gate_up").chunk(2), strict=True))
            theirs |= {name: get(ours) for name, ours in SAME.items()}
            state |= {f"model.layers.{layer}.{name}.weight": own for name, own in theirs.items()}
        model.load_state_dict(state, assign=True, strict=True)
        rotary = model.model.rotary_emb
        model.model.rotary_emb = type(rotary)(config).to(self.device)  # was made without memory
        return model.eval()

    def run_transformers(self, name: str, model: Any, cache: str | None) -> None:
        ids = torch.tensor([self.prompt], device=self.device)
        options = {} if cache is None else {"cache_implementation": cache}
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=None,
            pad_token_id=0, max_new_tokens=self.shape.output, **options,
        )  # fmt: skip
        self.texts[name] = out[0, len(self.prompt) :].tolist()


def settle(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_call(bench: Bench, call: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        call()
        settle(bench.device)

    return run


def measure_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes a second of reading, the best of several: a sum, and a product with one token."""
    height = num_bytes // 2 // 8192
    matrix = torch.ones(height, 8192, dtype=torch.bfloat16, device=device)
    row = torch.ones(1, 8192, dtype=torch.bfloat16, device=device)
    best = float("inf")
    calls: list[Callable[[], Tensor]] = [
        lambda: torch.sum(matrix.view(torch.int32), dtype=torch.int64),
        lambda: torch.nn.functional.linear(row, matrix),
    ]
    for call in calls:
        for _ in range(6):
            settle(device)
            began = time.perf_counter()
            call()
            settle(device)
            best = min(best, time.perf_counter() - began)
    return height * 8192 * 2 / best


def measure_plain(bench: Bench, repeat: int, *, static: bool) -> dict[str, Any]:
    """Tokens a second of every way in turn, prompt included; of a step, by our own clock."""
    steps: dict[str, list[float]] = {}

    def run_ours(name: str, graphs: bool) -> None:
        timing = bench.run(name, graphs=graphs)
        seconds = timing.draft + timing.verify + timing.accept + timing.other
        steps.setdefault(name, []).append(seconds / timing.num_steps)

    ways: dict[str, Callable[[], object]] = {"eager": functools.partial(run_ours, "eager", False)}
    if bench.graphs is not None:
        ways["graphs"] = functools.partial(run_ours, "graphs", True)
    problems: dict[str, str] = {}
    if importlib.util.find_spec("transformers") is None:
        problems["transformers"] = "not installed"
    else:
        model = bench.make_transformers()
        for name, cache in (("transformers", None), ("transformers static", "static")):
            way = functools.partial(bench.run_transformers, name, model, cache)
            if cache is not None and not static:
                problems[name] = "left out"
                continue
            try:
                way()  # with a static cache transformers compiles, which needs a compiler here
            except (RuntimeError, ImportError, OSError, ValueError) as error:
                problems[name] = summarize(error)
            else:
                ways[name] = way
    seconds = take_turns({name: time_call(bench, way) for name, way in ways.items()}, repeat)
    first = next(iter(ways))
    return {
        "tokens_per_second": {
            name: round(bench.shape.output / value, 1) for name, value in seconds.items()
        },
        "step_ms": {
            name: round(1000 * statistics.median(values[2:]), 4) for name, values in steps.items()
        },
        # In half precision ways may part where two tokens nearly tie.
        "equal_leading_tokens": {
            name: len(text) if at is None else at
            for name, text in bench.texts.items()
            for at in [find_difference(bench.texts[first], text)]
        },
        "not_run": problems,
    }


def measure_redrafter(bench: Bench, repeat: int) -> dict[str, Any]:
    """The parts of a step, the device waited for after each; random drafts are not accepted."""
    names = ["graphs", "eager"] if bench.graphs is not None else ["eager"]
    report = {}
    for name in names:
        context = DraftContext(decoder=bench.decoder, params=bench.params, weights=bench.weights)
        drafter = make_drafter(context)
        run = functools.partial(
            bench.run, f"redrafter {name}", graphs=name == "graphs", drafter=drafter
        )
        timings = [run(is_exact=True) for _ in range(repeat + 1)]
        waits = WAITS.count
        timings.append(run(is_exact=True))
        waits = WAITS.count - waits
        whole = []
        for _ in range(repeat):
            timing = run(is_exact=False)
            whole.append(sum(timing.list_seconds().values()) - timing.prefill)
        parts = {
            part: statistics.median(getattr(t, part) / t.num_steps for t in timings[2:])
            for part in ("draft", "verify", "accept", "other")
        }
        report[name] = {
            "step_ms": round(1000 * statistics.median(whole) / timing.num_steps, 4),
            "part_ms": {part: round(1000 * value, 4) for part, value in parts.items()},
            "overhead": round(1 - parts["verify"] / sum(parts.values()), 3),
            "waits_per_step": round(waits / timings[-1].num_steps, 2),
        }
    return report


@torch.inference_mode()
def list_kernels(bench: Bench) -> dict[str, Any]:
    """Kernels of a plain step without graphs: how many, and where the device's time goes."""
    if bench.device.type != "cuda":
        return {"not_run": "there are no kernels to see on a CPU"}
    from torch.profiler import ProfilerActivity, profile

    bench.use_graphs(False)
    cache = bench.decoder.make_cache(1, bench.shape.past + 1)
    cache.past_lens[:] = bench.shape.past
    step = make_step(bench.shape.past, 1)
    for _ in range(3):
        bench.decoder.forward(step, cache)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        bench.decoder.compute_logits(bench.decoder.forward(step, cache)).argmax(-1)
        settle(bench.device)
    found: dict[str, list[float]] = {}
    for event in profiler.events():
        if str(event.device_type).endswith("CUDA"):
            found.setdefault(event.name[:90], []).append(event.time_range.elapsed_us())
    totals = sorted(found.items(), key=lambda item: -sum(item[1]))
    return {
        "num_kernels": sum(map(len, found.values())),
        "device_us": round(sum(map(sum, found.values())), 1),
        "longest": [
            {"kernel": name, "calls": len(times), "us": round(sum(times), 1)}
            for name, times in totals[:MAX_KERNELS]
        ],
    }


def measure_shape(
    shape: Shape, device: torch.device, recorder: CudaRecorder | None, args: argparse.Namespace
) -> dict[str, Any]:
    """Everything of one shape."""
    bench, repeat = Bench(shape, device, recorder, not args.no_fused), args.repeat
    bandwidth = measure_bandwidth(device, 1 << (32 if device.type == "cuda" else 24))
    plain = measure_plain(bench, repeat, static=not args.no_static)
    num_bytes = bench.step_bytes + bench.cache_bytes
    verify = {}
    for name, is_used in (("graphs", True), ("eager", False)):
        if is_used and bench.graphs is None:
            continue
        bench.use_graphs(is_used)
        costs = time_steps(bench.decoder, SIZES, past_len=shape.past, repeat=4 * repeat)
        verify[name] = {
            "ms": {size: round(1000 * value, 4) for size, value in costs.items()},
            "relative": {size: round(value / costs[1], 3) for size, value in costs.items()},
        }
    return {
        "shape": dataclasses.asdict(shape),
        "fused": bench.decoder.is_fused,
        "read_gb_per_second": round(bandwidth / 1e9, 1),
        "step_gb": round(num_bytes / 1e9, 4),
        "share_of_limit": {
            name: round(num_bytes / bandwidth / (ms / 1000), 3)
            for name, ms in plain["step_ms"].items()
        },
        "plain": plain,
        "verify": verify,
        "redrafter": measure_redrafter(bench, repeat),
        "kernels": list_kernels(bench),
        "graphs": bench.graphs.describe() if bench.graphs is not None else None,
    }


def measure(args: argparse.Namespace, recorder: CudaRecorder | None = None) -> dict[str, Any]:
    """Run what was asked for; recorder: of graphs, on a device that has none of its own."""
    name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if name == "cpu" and not args.quick:
        raise SystemExit("torch sees no GPU: --quick runs toy sizes on a CPU")
    if recorder is None and name == "cuda":
        recorder = CudaRecorder(device)
    meter = LoadMeter()
    shapes = {}
    for label in ["toy"] if args.quick else args.shapes:
        shape = dataclasses.replace(SHAPES[label], output=args.output_len or SHAPES[label].output)
        shapes[label] = measure_shape(shape, device, recorder, args)
        print(f"{label}: {json.dumps(shapes[label])}", file=sys.stderr, flush=True)
    machine = describe_machine()
    if name == "cuda":
        machine |= {
            "cuda": torch.version.cuda,
            "compute_capability": ".".join(map(str, torch.cuda.get_device_capability())),
        }
    if importlib.util.find_spec("transformers") is not None:
        import transformers

        machine["transformers"] = transformers.__version__
    return {
        "machine": machine | {"processors_used_by_others": meter.measure()},
        "repeat": args.repeat,
        "shapes": shapes,
        "not_measured": {
            "Apple's PyTorch ReDrafter": "not run: it is no package of the index, and nothing here"
            " fetches it"
        },
    }


def make_parser() -> argparse.ArgumentParser:
    parser = models.make_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["1b", "7b"], choices=["1b", "7b"])
    parser.add_argument("--quick", action="store_true", help="a toy shape, on any device")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--output-len", type=int, metavar="N", help="tokens of a text, if not the shape's"
    )
    parser.add_argument("--no-static", action="store_true", help="leave out what compiles")
    parser.add_argument("--no-fused", action="store_true", help="layers by torch's operators")
    parser.add_argument("--output-dir", type=Path)
    return parser


def main(words: list[str] | None = None, recorder: CudaRecorder | None = None) -> dict[str, Any]:
    args = make_parser().parse_args(words)
    report = measure(args, recorder)
    print(json.dumps(report, indent=2))
    if args.output_dir is not None:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        parts = ["gpu", *report["shapes"], *["unfused"] * args.no_fused, report["machine"]["date"]]
        name = f"{'-'.join(parts)}.json"
        write_json(args.output_dir / name, report)
    return report


if __name__ == "__main__":
    main()
