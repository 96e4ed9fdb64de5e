"""A contract double of `tensorrt_llm.runtime.ModelRunnerCpp`, with true tokens.

It takes what the recorded signatures of a line take, and refuses everything else: also what the
real one silently ignores (unknown keyword arguments of `generate`, a temperature of a greedy
ReDrafter, choices for an engine without heads) or bends (lengths that it cuts, block reuse that it
turns off). Its tokens are the torch engine's on the checkpoint that the engine file names.

What the real one does, and this does likewise:
* the package prints its banner and its logger's lines on stdout, through Python and from C++, in
  every rank and up to the end of the process;
* a runner has the attributes of the real one and its executor is `session`; fields of results that
  a line lacks are lacking here too, and answers to several ids come as lists in 0.14;
* the end id is not part of the output, which merely ends short of max_new_tokens;
* non-streaming responses hold prompt and output, rows are padded with the end id to max_seq_len;
* 1.x: responses come in another order than the requests;
* with drafts, generation logits are a list in the order of the responses, else a tensor, in 0.14
  of max_new_tokens rows;
* an engine with external drafts ends every request after one step, drafts or none;
* ranks other than 0 return nothing.
`SPECDEC_DOUBLE_KEEPS_END=1` makes the output hold the end id. Calls are appended to the file that
`SPECDEC_DOUBLE_LOG` names.
"""

from __future__ import annotations

import datetime
import inspect
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from specdec.decode.engine import TorchEngine
from specdec.decode.loop import Options
from specdec.decode.requests import ActiveRequest, Request
from specdec.decode.sampling import SamplingParams
from specdec.trtllm.facts import Facts, load_facts
from tests.engines import call
from tests.trtllm.double import Refusal, check_engine_config, read_engine_file

BANNER = """
import atexit, logging, os, sys
def mpi_rank():
    return int(os.environ.get('OMPI_COMM_WORLD_RANK', '0'))
def mpi_world_size():
    return int(os.environ.get('OMPI_COMM_WORLD_SIZE', '1'))
print(f"[TensorRT-LLM] TensorRT-LLM version: {__version__}")
sys.stdout.flush()
logger = logging.getLogger("TRT-LLM")
logger.propagate = False
logger.setLevel("INFO")
logger.handlers[:] = [logging.StreamHandler(sys.stdout)]
os.write(1, b"[TensorRT-LLM][INFO] Refreshed the MPI local session\\n")
if "pytest" not in sys.modules:
    atexit.register(os.write, 1, b"[TensorRT-LLM][INFO] Executor shutdown\\n")
"""
SIGNATURES = {"from_dir": "runner_from_dir", "generate": "runner_generate"}
TORCH_LOGITS = {"float16": torch.float16, "float32": torch.float32}
TYPES = {
    "rank": int, "device_ids": list, "kv_cache_enable_block_reuse": bool,
    "kv_cache_free_gpu_memory_fraction": float, "is_orchestrator_mode": bool,
    "gather_generation_logits": bool, "multi_block_mode": bool, "medusa_choices": list,
    "eagle_choices": list, "eagle_use_dynamic_tree": bool, "lookahead_config": list,
}  # fmt: skip
_free: dict[int, float] = {}  # by device: part of the memory that no KV cache has taken
_engines: dict[str, TorchEngine] = {}


def install_runtime(folder: Path, label: str) -> None:
    """Add the runtime to a double that `install_double` has written."""
    package = folder / "site" / "tensorrt_llm"
    root = Path(__file__).resolve().parents[2]
    with (package / "__init__.py").open("a") as file:
        file.write(BANNER)
    (package / "runtime.py").write_text(
        f"import sys\nsys.path.append({str(root)!r})\n"
        "from tests.trtllm.runtime_double import make_runner_class\n"
        f"ModelRunnerCpp = make_runner_class({label!r})\n"
    )
    (package / "bindings").mkdir()
    (package / "bindings" / "__init__.py").touch()
    (package / "bindings" / "executor.py").write_text(
        "from tests.real.bindings import OutputConfig, Request, SamplingConfig\n"
    )


def free_memory() -> None:
    """Another run begins, in a process of its own where the real one is."""
    _free.clear()


def make_runner_class(label: str) -> type:
    """Return ModelRunnerCpp of a line, with the signatures that are recorded of it."""
    namespace: dict[str, Any] = {"facts": load_facts(label)}

    def from_dir(cls: type[RunnerDouble], engine_dir: str, **options: Any) -> RunnerDouble:
        return cls.load(engine_dir, options)

    def generate(self: RunnerDouble, batch_input_ids: Any, **options: Any) -> Any:
        return self.start(batch_input_ids, options)

    for function in (from_dir, generate):
        names = getattr(load_facts(label), SIGNATURES[function.__name__])
        first, *others = (name for name in names if not name.startswith("*"))
        parameters = [
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY),
            inspect.Parameter(first, inspect.Parameter.POSITIONAL_OR_KEYWORD),
            *(inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in others),
        ]
        if function is generate:
            parameters.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD))
        vars(function)["__signature__"] = inspect.Signature(parameters)
    namespace["from_dir"] = classmethod(from_dir)  # type: ignore[arg-type]
    namespace["generate"] = generate
    return type("ModelRunnerCpp", (RunnerDouble,), namespace)


def refuse_if(condition: object, why: str) -> None:
    if condition:
        raise Refusal(why)


def is_count(value: object, least: int = 0) -> bool:
    return type(value) is int and value >= least


def log_call(name: str, **details: Any) -> None:
    if path := os.environ.get("SPECDEC_DOUBLE_LOG"):
        with Path(path).open("a") as file:
            file.write(json.dumps({"call": name, "pid": os.getpid(), **details}) + "\n")


def say(text: str) -> None:
    """Log a line through the package's logger, and another from C++."""
    logging.getLogger("TRT-LLM").info("[TRT-LLM] [I] %s", text)
    os.write(1, f"[TensorRT-LLM][INFO] {text}\n".encode())


class RunnerDouble:
    """What the class of every line has in common; public attributes are those of the real one."""

    facts: Facts

    def __init__(self, engine: EngineDouble) -> None:
        self._engine = engine
        self.session = ExecutorDouble(engine)
        build = engine.build
        self.max_batch_size, self.max_input_len = build["max_batch_size"], build["max_input_len"]
        self.max_seq_len, self.max_beam_width = build["max_seq_len"], build["max_beam_width"]
        self.use_kv_cache, self.lora_manager = True, None

    @classmethod
    def load(cls, engine_dir: str, options: dict[str, Any]) -> RunnerDouble:
        refuse_if(type(engine_dir) is not str, "engine_dir is a str")
        unknown = set(options) - set(cls.facts.runner_from_dir)
        if unknown:
            raise TypeError(f"from_dir() got an unexpected keyword argument {unknown}")
        log_call("from_dir", engine_dir=engine_dir, options=options)
        engine = EngineDouble(Path(engine_dir), options, cls.facts)
        check_engine_config(engine.document)
        engine.check_types()
        engine.check_options()
        say("Load engine takes: 0.1 sec")
        return cls(engine)

    def start(self, texts: Any, options: dict[str, Any]) -> Any:
        known = {*self.facts.runner_generate, *self.facts.runner_generate_kwargs}
        known |= {"draft_tokens_list", "draft_logits_list"}
        refuse_if(set(options) - known, f"ignored in silence: {set(options) - known}")
        if not self.session.can_enqueue_requests():
            return []
        is_good = isinstance(texts, list) and all(
            isinstance(t, torch.Tensor) and t.dtype is torch.int32 and t.dim() == 1 for t in texts
        )
        refuse_if(not is_good, "batch_input_ids is a list of int32 tensors")
        prompts = [text.tolist() for text in texts]
        self._engine.check_call(prompts, options)
        log_call("generate", folder=self._engine.folder.name, prompts=prompts, options=options | {
            "draft_logits_list": options.get("draft_logits_list") is not None
        })  # fmt: skip
        say("Generating")
        ids = self.session.enqueue_requests([(prompt, options, at)
                                             for at, prompt in enumerate(prompts)])  # fmt: skip
        if options.get("streaming"):
            return self._fill(ids, prompts, options)
        return next(self._fill(ids, prompts, options))

    def _await(self, ids: list[int], is_streaming: bool) -> list[Any]:
        if self.facts.label == "0.14" and not is_streaming:
            return [one for part in self.session.await_responses(ids) for one in part]
        return self.session.await_responses()

    def _fill(
        self, ids: list[int], prompts: list[list[int]], options: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Collect responses; yield the output once, or after each group of them."""
        streaming = bool(options.get("streaming"))
        rows: list[list[int]] = [list(p) if streaming else [] for p in prompts]
        waiting, logits = set(ids), []
        while waiting:
            for response in self._await(ids, streaming):
                rows[ids.index(response.request_id)] += response.result.output_token_ids[0]
                if response.result.generation_logits is not None:
                    logits.append((ids.index(response.request_id), response.result))
                if response.result.is_final:
                    waiting.discard(response.request_id)
            if streaming or not waiting:
                yield self._pack(rows, logits, options)

    def _pack(
        self, rows: list[list[int]], logits: list[Any], options: dict[str, Any]
    ) -> dict[str, Any]:
        end_id, width = options["end_id"], self.max_seq_len
        padded = [[row + [end_id] * (width - len(row))] for row in rows]
        found: dict[str, Any] = {
            "output_ids": torch.tensor(padded, dtype=torch.int32),
            "sequence_lengths": torch.tensor([[len(row)] for row in rows], dtype=torch.int32),
        }
        if logits and options.get("draft_tokens_list") is not None:
            found["generation_logits"] = [result.generation_logits for _, result in logits]
        elif logits:
            longest = max(result.generation_logits.shape[1] for _, result in logits)
            if self.facts.label == "0.14":
                longest = options["max_new_tokens"]
            shape = (len(rows), 1, longest, logits[0][1].generation_logits.shape[2])
            tensor = torch.zeros(shape, dtype=self._engine.logits_dtype)
            for at, result in logits:
                tensor[at, 0, : result.generation_logits.shape[1]] = result.generation_logits[0]
            found["generation_logits"] = tensor
        return found


class EngineDouble:
    """A loaded engine, and what loading and calling it bends or refuses."""

    def __init__(self, engine_dir: Path, options: dict[str, Any], facts: Facts) -> None:
        self.folder, self.facts = engine_dir, facts
        self.document = json.loads((engine_dir / "config.json").read_text())
        self.build = self.document["build_config"]
        self.pretrained = self.document["pretrained_config"]
        self.mode = self.build["speculative_decoding_mode"]
        self.options = options
        beams = self.pretrained.get("redrafter_num_beams", 0)
        own = beams * self.pretrained.get("redrafter_draft_len_per_beam", 0)
        if self.mode == 4:
            own = self.pretrained["max_draft_len"]
        self.max_draft_len = own if self.mode in (4, 16) else self.build["max_draft_len"]
        self.logits_dtype = TORCH_LOGITS[self.pretrained.get("logits_dtype", "float32")]
        self.gathers = bool(
            self.build["gather_generation_logits"] or options.get("gather_generation_logits")
        )

    def check_options(self) -> None:
        options, mapping = self.options, self.pretrained["mapping"]
        size = mapping["tp_size"] * mapping.get("pp_size", 1)
        processes = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
        devices = options.get("device_ids")
        if options.get("is_orchestrator_mode"):
            refuse_if(processes != 1, "MPI world size must be 1 in orchestrator mode")
            refuse_if(devices is None or len(devices) != size, "device_ids for every rank")
        elif processes != size:
            raise RuntimeError(f"world size {processes} is not tp_size * pp_size {size}")
        rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
        assert options.get("rank", 0) == rank
        if options.get("kv_cache_enable_block_reuse"):
            paged = self.build["plugin_config"]["use_paged_context_fmha"]
            refuse_if(not paged, "block reuse is turned off without paged context FMHA")
        elif self.mode == 2:
            raise RuntimeError(
                "KV cache block reuse must be enabled for speculative decoding target model"
            )
        self.check_drafting()
        fraction = options.get("kv_cache_free_gpu_memory_fraction")
        refuse_if(
            fraction is not None and not (type(fraction) is float and 0 < fraction <= 1), "fraction"
        )
        for device in devices or [rank]:
            left = _free.get(device, 1.0)
            if left < 0.2:
                raise RuntimeError("[TensorRT-LLM][ERROR] CUDA out of memory")
            _free[device] = left * (1 - (0.9 if fraction is None else fraction))

    def check_drafting(self) -> None:
        """Trees and windows: forgotten by an engine of another mode, refused late by its own."""
        options = self.options
        refuse_if((options.get("medusa_choices") is not None) != (self.mode == 4), "choices")
        refuse_if((options.get("lookahead_config") is not None) != (self.mode == 8), "lookahead")
        blocks = options.get("multi_block_mode")
        refuse_if(self.mode in (4, 32) and blocks is not False, "multi-block mode stays on")
        if self.mode == 4:
            self.check_tree(options["medusa_choices"], self.pretrained["num_medusa_heads"])
        if self.mode == 8:
            window = options["lookahead_config"]
            is_window = isinstance(window, list) and len(window) == 3 and all(map(is_count, window))
            refuse_if(not is_window, "lookahead_config is a list of three")
            columns, ngram, verified = window
            room = (columns + verified) * (ngram - 1) - 1
            refuse_if(room != self.max_draft_len, f"{room + 1} != {self.max_draft_len + 1}")
        eagle = {name for name in options if name.startswith("eagle_")}
        refuse_if(self.mode != 32 and eagle, "a tree for an engine without EAGLE")
        if self.mode != 32:
            return
        refuse_if("eagle_posterior_threshold" in eagle, "typical acceptance changes the text")
        depth, width = (
            self.pretrained["num_eagle_layers"], self.pretrained["max_non_leaves_per_layer"],
        )  # fmt: skip
        if options.get("eagle_use_dynamic_tree"):
            top_k = options.get("eagle_dynamic_tree_max_top_k")
            refuse_if("eagle_choices" in eagle, "choices are dropped beside a dynamic tree")
            refuse_if(not is_count(top_k, 1), "the dynamic tree needs max_top_k > 0")
            refuse_if(top_k > width, "the dynamic tree is wider than the engine")
            return
        refuse_if(eagle != {"eagle_choices"}, "a default tree, four deep, with 63 tokens")
        choices = options["eagle_choices"]
        self.check_tree(choices, depth)
        refuse_if(max(map(len, choices)) != depth, "EAGLE-1 requires the depth of the engine")
        inner = {tuple(path[:-1]) for path in choices}
        levels = [len(path) for path in inner]
        refuse_if(max(map(levels.count, levels)) > width, "non leaf nodes of a level")

    def check_tree(self, choices: Any, depth: int) -> None:
        is_tree = isinstance(choices, list) and all(
            isinstance(path, list) and path and all(map(is_count, path)) for path in choices
        )
        refuse_if(not is_tree or not choices, "choices are lists of ranks")
        paths = {tuple(path) for path in choices}
        refuse_if(len(paths) < len(choices), "a path twice")
        refuse_if(any(p[:-1] and p[:-1] not in paths for p in paths), "a path without its parent")
        refuse_if(len(paths) > self.max_draft_len, "more paths than max_draft_len")
        refuse_if(max(map(len, paths)) > depth, "deeper than the engine")

    def check_types(self) -> None:
        """What the bindings would fail on, or take for something else."""
        for name, value in self.options.items():
            kind = TYPES.get(name)
            refuse_if(kind is not None and type(value) is not kind, f"{name} is {value!r}")

    def check_call(self, prompts: list[list[int]], options: dict[str, Any]) -> None:
        build, new = self.build, options.get("max_new_tokens")
        if len(prompts) > build["max_batch_size"]:
            raise RuntimeError(f"Input batch size ({len(prompts)}) exceeds the engine's limit")
        refuse_if(not is_count(new, 1), "max_new_tokens")
        assert type(new) is int
        drafts = options.get("draft_tokens_list")
        for at, prompt in enumerate(prompts):
            longest = len(drafts[at]) if drafts is not None else self.max_draft_len
            if len(prompt) > build["max_input_len"]:
                raise RuntimeError(f"Prompt length ({len(prompt)}) exceeds maximum input length")
            refuse_if(
                drafts is not None and len(prompt) + longest > build["max_input_len"],
                "the draft is cut to max_input_len",
            )
            refuse_if(
                len(prompt) + new + longest > build["max_seq_len"],
                f"{new} new tokens are cut to max_seq_len",
            )
        for name in ("streaming", "output_generation_logits"):
            refuse_if(type(options.get(name, False)) is not bool, f"{name} is a bool")
        for name in ("lookahead_config", "prompt_table", "lora_uids", "sampling_config"):
            refuse_if(options.get(name) is not None, f"{name} is of no use here")
        refuse_if(type(options.get("end_id")) is not int, "rows are padded with end_id")
        refuse_if(not is_count(options.get("pad_id")), "pad_id")
        refuse_if(options.get("num_beams", 1) != 1, "beams and drafts")
        refuse_if(options.get("return_dict") is not True, "return_dict")
        refuse_if(options.get("output_sequence_lengths") is not True, "output_sequence_lengths")
        self.check_sampling(options)
        for row in options.get("stop_words_list") or []:
            is_row = isinstance(row, list) and all(
                isinstance(ids, list) and ids and all(is_count(i) for i in ids) for ids in row
            )
            refuse_if(not is_row, "stop_words_list holds token sequences for each request")
        if options.get("output_generation_logits"):
            refuse_if(not self.gathers, "generation logits are not gathered")
        self.check_drafts(prompts, options)

    def check_sampling(self, options: dict[str, Any]) -> None:
        top_k, top_p = options.get("top_k"), options.get("top_p")
        temperature, seed = options.get("temperature"), options.get("random_seed")
        refuse_if(not is_count(top_k), "top_k is one number a call")
        refuse_if(top_k is not None and top_k > 1024, "top_k is cut to 1024")
        refuse_if(top_p is not None and not 0 < top_p <= 1, "top_p")
        refuse_if(type(temperature) is not float or temperature <= 0, "one temperature a call")
        refuse_if(seed is not None and not 0 <= seed < 2**64, "seed")
        is_greedy = top_k == 1
        refuse_if(is_greedy and seed is not None, "a seed without sampling")
        if self.mode == 16:
            greedy_engine = self.pretrained["redrafter_greedy_search"]
            refuse_if(greedy_engine != is_greedy, "the engine decides whether to sample")
            refuse_if(not is_greedy and (top_k or top_p != 1), "ReDrafter has no top_k or top_p")
        if self.mode == 4:
            refuse_if(temperature != 1, "Medusa: temperature must be 1.0")
        if self.mode == 32:
            refuse_if(not is_greedy, "EAGLE decodes greedily without a posterior threshold")

    def check_drafts(self, prompts: list[list[int]], options: dict[str, Any]) -> None:
        drafts, logits = options.get("draft_tokens_list"), options.get("draft_logits_list")
        refuse_if(logits is not None and drafts is None, "draft logits without drafts")
        if drafts is None:
            return
        refuse_if(self.mode != 2, "drafts for an engine that takes none")
        refuse_if(len(drafts) != len(prompts), "drafts are cut to the shorter list")
        for draft in drafts:
            refuse_if(not draft, "TLLM_CHECK: draft tokens must not be empty")
            refuse_if(not all(is_count(t) for t in draft), "draft tokens are numbers")
            if len(draft) > self.max_draft_len:
                raise RuntimeError(
                    f"Draft tokens length ({len(draft)}) exceeds maximum draft tokens length"
                )
        if logits is not None:
            refuse_if(len(logits) != len(drafts), "logits for every draft")
            refuse_if(not self.gathers, "the target was built without generation logits")
            for draft, rows in zip(drafts, logits, strict=True):
                wanted = (len(draft), self.pretrained["vocab_size"])
                refuse_if(tuple(rows.shape) != wanted, f"draft logits {tuple(rows.shape)}")
                refuse_if(rows.dtype is not self.logits_dtype, "draft logits of another dtype")


class ResultDouble:
    """Fields of tensorrt_llm.bindings.executor.Result in 0.14; like it, it takes no others."""

    __slots__ = (
        "context_logits", "cum_log_probs", "encoder_output", "finish_reasons", "generation_logits",
        "is_final", "is_sequence_final", "log_probs", "output_token_ids", "sequence_index",
    )  # fmt: skip

    def __init__(
        self, tokens: list[int], is_final: bool, num_steps: int, logits: torch.Tensor | None
    ) -> None:
        self.output_token_ids = [tokens]
        self.is_final = self.is_sequence_final = is_final
        self.sequence_index = 0
        self.generation_logits = logits


class CountedResult(ResultDouble):
    """Fields that 1.x adds."""

    __slots__ = ("avg_decoded_tokens_per_iter", "decoding_iter")

    def __init__(
        self, tokens: list[int], is_final: bool, num_steps: int, logits: torch.Tensor | None
    ) -> None:
        super().__init__(tokens, is_final, num_steps, logits)
        self.decoding_iter = num_steps
        self.avg_decoded_tokens_per_iter = len(tokens) / num_steps


RESULTS = {"0.14": ResultDouble, "1.2": CountedResult}


class ResponseDouble:
    """One of tensorrt_llm.bindings.executor's Responses."""

    __slots__ = ("request_id", "result")

    def __init__(self, request_id: int, result: ResultDouble) -> None:
        self.request_id, self.result = request_id, result

    def has_error(self) -> bool:
        return False


class ExecutorDouble:
    """Computes at once what is enqueued, then answers; 1.x's in another order.

    Requests that come one by one are answered step by step, whatever else there is.
    """

    __slots__ = ("_engine", "_groups", "_next_id", "_running")

    def __init__(self, engine: EngineDouble) -> None:
        self._engine = engine
        self._next_id = 1
        self._groups: list[list[ResponseDouble]] = []
        self._running: dict[int, list[list[ResponseDouble]]] = {}

    def can_enqueue_requests(self) -> bool:
        return not self._engine.options.get("rank")

    def enqueue_requests(self, requests: list[Any]) -> list[int]:
        ids = list(range(self._next_id, self._next_id + len(requests)))
        self._next_id += len(requests)
        options = requests[0][1]
        run = Run(self._engine, [prompt for prompt, _, _ in requests], options)
        self._groups = run.answer(ids)
        return ids

    def enqueue_request(self, request: Any) -> int:
        sampling, prompt = request.sampling_config, request.input_token_ids
        refuse_if(not request.streaming or request.return_all_generated_tokens, "for a stream")
        refuse_if(request.external_draft_tokens_config is not None, "drafts from outside")
        refuse_if(len(self._running) >= self._engine.build["max_batch_size"], "it would wait")
        options = {
            "max_new_tokens": request.max_tokens, "end_id": request.end_id, "streaming": True,
            "pad_id": request.pad_id, "num_beams": sampling.beam_width, "top_k": sampling.top_k,
            "top_p": sampling.top_p, "temperature": sampling.temperature,
            "random_seed": sampling.seed, "stop_words_list": [request.stop_words or []],
            "return_dict": True, "output_sequence_lengths": True,
        }  # fmt: skip
        self._engine.check_call([prompt], options)
        log_call("enqueue_request", prompt=prompt, options=options)
        number = self._next_id
        self._next_id += 1
        self._running[number] = Run(self._engine, [prompt], options).answer([number])
        return number

    def cancel_request(self, number: int) -> None:
        log_call("cancel_request", number=number)
        refuse_if(number not in self._running, "no such request runs")
        del self._running[number]

    def await_responses(self, ids: list[int] | None = None, *, timeout: Any = None) -> list[Any]:
        """The responses that are there; of several ids, a list for each."""
        if timeout is not None:
            refuse_if(not isinstance(timeout, datetime.timedelta), "timeout is a duration")
            found = []
            for number in list(self._running)[::-1]:
                found += self._running[number].pop(0)
                if not self._running[number]:
                    del self._running[number]
            return found
        group = self._groups.pop(0)
        if ids is None:
            return group
        return [[one for one in group if one.request_id == number] for number in ids]


class Run:
    """The requests of one call, decoded by the torch engine."""

    def __init__(
        self, engine: EngineDouble, prompts: list[list[int]], options: dict[str, Any]
    ) -> None:
        self.engine, self.prompts, self.options = engine, prompts, options
        self.is_external = engine.mode == 2
        self.drafts = options.get("draft_tokens_list")
        self.keeps_end = os.environ.get("SPECDEC_DOUBLE_KEEPS_END") == "1"
        self.wants_logits = bool(options.get("output_generation_logits")) or bool(
            engine.build["gather_generation_logits"]
        )

    def answer(self, ids: list[int]) -> list[list[ResponseDouble]]:
        decoder = get_engine(self.engine)
        end_id, top_k = self.options["end_id"], self.options["top_k"]
        sampling = SamplingParams(
            temperature=0.0 if top_k == 1 else self.options["temperature"],
            top_k=top_k, top_p=self.options.get("top_p") or 1.0,
            seed=self.options.get("random_seed") or 0,
        )  # fmt: skip
        requests = [
            Request(
                index=at, input_ids=prompt, max_output_len=self.count_new(at),
                end_ids=frozenset([end_id] if end_id >= 0 else []), sampling=sampling,
            )
            for at, prompt in enumerate(self.prompts)
        ]  # fmt: skip
        shown: list[list[tuple[int, int]]] = []  # groups of (row, length) as steps bring them

        def watch(active: Sequence[ActiveRequest]) -> None:
            shown.append([(r.request.index, len(r.output_ids)) for r in active])

        results = decoder.generate(requests, Options(on_progress=watch, keep_logits=True))
        rows = [self.cut(at, result) for at, result in enumerate(results)]
        if not self.options.get("streaming"):
            final = [
                self.respond(ids[at], self.prompts[at] + tokens, True, results[at], len(tokens))
                for at, tokens in enumerate(rows)
            ]
            return [final if self.engine.facts.label == "0.14" else final[::-1]]
        groups, sent = [], [0] * len(rows)
        for group in shown:
            responses = []
            for at, length in reversed(group):
                end = min(length, len(rows[at]))
                if end > sent[at]:
                    new = rows[at][sent[at] : end]
                    responses.append(self.respond(ids[at], new, False, results[at], 0))
                    sent[at] = end
            if responses:
                groups.append(responses)
        groups.append(
            [self.respond(number, [], True, results[at], 0) for at, number in enumerate(ids)]
        )
        return groups

    def count_new(self, at: int) -> int:
        if not self.is_external:
            return int(self.options["max_new_tokens"])
        return len(self.drafts[at]) + 1 if self.drafts is not None else 1

    def cut(self, at: int, result: ActiveRequest) -> list[int]:
        """A row's new tokens: up to a stop sequence, or what agrees with the draft and one more."""
        tokens = list(result.output_ids)
        if result.finish_reason == "eos" and not self.keeps_end:
            tokens.pop()
        if self.is_external and self.drafts is not None:
            draft = self.drafts[at]
            agreeing = next((n for n, (a, b) in enumerate(zip(draft, tokens, strict=False))
                             if a != b), len(draft))  # fmt: skip
            tokens = tokens[: agreeing + 1]
        stops = (self.options.get("stop_words_list") or [[]] * len(self.prompts))[at]
        for end in range(1, len(tokens) + 1):
            if any(tokens[:end][-len(ids) :] == ids for ids in stops):
                return tokens[:end]
        return tokens

    def respond(
        self, number: int, tokens: list[int], is_final: bool, result: ActiveRequest, num_logits: int
    ) -> ResponseDouble:
        logits = None
        if self.wants_logits and num_logits and result.logits is not None:
            kept = num_logits + (result.finish_reason == "eos" and not self.is_external)
            logits = result.logits[None, :kept].to(self.engine.logits_dtype)
        # The prompt's own step is one of those counted.
        count = result.stats.num_verify_steps + 1
        make = RESULTS[self.engine.facts.label]
        return ResponseDouble(number, make(tokens, is_final, count, logits))


def get_engine(engine: EngineDouble) -> TorchEngine:
    """The torch engine of an engine file's checkpoint, built alongside it when first needed.

    One of several ranks is represented by the checkpoint of one rank that lies alongside it.
    """
    content = read_engine_file(engine.folder / "rank0.engine")
    checkpoint = Path(content["checkpoint_dir"])
    if content["tp_size"] > 1:
        checkpoint = checkpoint.with_name(checkpoint.name + "-whole")
    folder = checkpoint.with_name(checkpoint.name + "-torch")
    if str(folder) not in _engines:
        if not folder.exists():
            call(
                "build", "--backend", "torch", "--checkpoint-dir", checkpoint, "--output-dir",
                folder, "--max-batch-size", 16,
            )  # fmt: skip
        _engines[str(folder)] = TorchEngine(folder, device="cpu")
    return _engines[str(folder)]
