"""The compiled bindings of TensorRT-LLM 0.14, as far as its Python and our calls reach.

Constructors take the arguments, and objects have the fields, that the bindings' source lists: any
other is an error, as it is with the real ones. The executor answers with the tokens of the torch
engine, through the same code as the runtime's double.
"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from specdec.trtllm.facts import load_facts
from tests.trtllm.double import check_engine_config
from tests.trtllm.runtime_double import EngineDouble, ExecutorDouble

REQUIRED = object()


class Bound:
    """An object of the bindings: `fields` and their defaults, the first ones by position."""

    fields: dict[str, Any]
    read_only: frozenset[str] = frozenset()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(self.fields, args, strict=False)) | kwargs
        for name in given:
            if name not in self.fields:
                raise TypeError(f"{type(self).__name__} has no argument {name}")
        for name, default in self.fields.items():
            value = given.get(name, default)
            if value is REQUIRED:
                raise TypeError(f"{type(self).__name__} lacks {name}")
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.fields:
            raise AttributeError(f"{type(self).__name__} has no field {name}")
        object.__setattr__(self, name, value)


def bind(class_name: str, *required: str, **defaults: Any) -> type[Bound]:
    return type(class_name, (Bound,), {"fields": dict.fromkeys(required, REQUIRED) | defaults})


class KVCacheType(enum.Enum):
    CONTINUOUS = 0
    PAGED = 1
    DISABLED = 2

    @classmethod
    def _missing_(cls, value: object) -> KVCacheType | None:
        return cls.__members__.get(str(value).upper())


DataType = enum.Enum("DataType", "FLOAT HALF INT8 INT32 BOOL UINT8 FP8 BF16 INT64")
ModelType = enum.Enum("ModelType", "DECODER_ONLY ENCODER_ONLY ENCODER_DECODER")
CommunicationType = enum.Enum("CommunicationType", "MPI")
CommunicationMode = enum.Enum("CommunicationMode", "LEADER ORCHESTRATOR")
CapacitySchedulerPolicy = enum.Enum(
    "CapacitySchedulerPolicy", "MAX_UTILIZATION GUARANTEED_NO_EVICT STATIC_BATCH"
)
BatchingType = enum.Enum("BatchingType", "STATIC INFLIGHT")
ContextChunkingPolicy = enum.Enum("ContextChunkingPolicy", "FIRST_COME_FIRST_SERVED EQUAL_PROGRESS")
TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16"}

KvCacheConfig = bind(
    "KvCacheConfig", enable_block_reuse=False, max_tokens=None, max_attention_window=None,
    sink_token_length=None, free_gpu_memory_fraction=None, host_cache_size=None,
    onboard_blocks=True,
)  # fmt: skip
ParallelConfig = bind(
    "ParallelConfig", communication_type=CommunicationType.MPI,
    communication_mode=CommunicationMode.LEADER, device_ids=None,
    participant_ids=None, orchestrator_config=None,
)  # fmt: skip
PeftCacheConfig = bind("PeftCacheConfig", num_host_module_layer=0, num_device_module_layer=0)
LookaheadDecodingConfig = bind(
    "LookaheadDecodingConfig", "max_window_size", "max_ngram_size", "max_verification_set_size"
)
DecodingConfig = bind(
    "DecodingConfig", decoding_mode=None, lookahead_decoding_config=None, medusa_choices=None
)
DebugConfig = bind(
    "DebugConfig", debug_input_tensors=False, debug_output_tensors=False, debug_tensor_names=None
)
LogitsPostProcessorConfig = bind(
    "LogitsPostProcessorConfig", processor_map=None, processor_batched=None, replicate=True
)
PerfKnobs = bind(
    "ExtendedRuntimePerfKnobConfig", multi_block_mode=True, enable_context_fmha_fp32_acc=False,
    cuda_graph_mode=False, cuda_graph_cache_size=0,
)  # fmt: skip
ExecutorConfig = bind(
    "ExecutorConfig", max_beam_width=1, scheduler_config=None, kv_cache_config=None,
    enable_chunked_context=False, normalize_log_probs=True, iter_stats_max_iterations=1000,
    request_stats_max_iterations=0, batching_type=None, max_batch_size=None, max_num_tokens=None,
    parallel_config=None, peft_cache_config=None, logits_post_processor_config=None,
    decoding_config=None, gpu_weights_percent=1.0, max_queue_size=None,
    extended_runtime_perf_knob_config=None, debug_config=None, recv_poll_period_ms=0,
    max_seq_idle_microseconds=180000000,
)  # fmt: skip
SamplingConfig = bind(
    "SamplingConfig", beam_width=1, top_k=None, top_p=None, top_p_min=None, top_p_reset_ids=None,
    top_p_decay=None, seed=None, random_seed=None, temperature=None, min_tokens=None,
    min_length=None, beam_search_diversity_rate=None, repetition_penalty=None,
    presence_penalty=None, frequency_penalty=None, length_penalty=None, early_stopping=None,
    no_repeat_ngram_size=None,
)  # fmt: skip
OutputConfig = bind(
    "OutputConfig", return_log_probs=False, return_context_logits=False,
    return_generation_logits=False, exclude_input_from_output=False, return_encoder_output=False,
)  # fmt: skip
ExternalDraftTokensConfig = bind(
    "ExternalDraftTokensConfig", "tokens", logits=None, acceptance_threshold=None
)
Request = bind(
    "Request", "input_token_ids", max_tokens=None, max_new_tokens=None, streaming=False,
    sampling_config=None, output_config=None, end_id=None, pad_id=None, position_ids=None,
    bad_words=None, stop_words=None, embedding_bias=None, external_draft_tokens_config=None,
    prompt_tuning_config=None, lora_config=None, lookahead_config=None,
    logits_post_processor_name=None, encoder_input_token_ids=None, client_id=None,
    return_all_generated_tokens=False, priority=0.5, type=None, context_phase_params=None,
    encoder_input_features=None, encoder_output_length=None, num_return_sequences=1,
)  # fmt: skip


class ModelConfig:
    """What an engine's config.json says of the model, as the C++ reader has it."""

    def __init__(self, document: dict[str, Any]) -> None:
        check_engine_config(document)
        model, build = document["pretrained_config"], document["build_config"]
        plugins = build["plugin_config"]
        self.vocab_size, self.hidden_size = model["vocab_size"], model["hidden_size"]
        self.num_heads = model["num_attention_heads"]
        self.data_type = DataType[TYPES[model["dtype"]]]
        self.kv_cache_type = KVCacheType(build["kv_cache_type"])
        self.use_lora_plugin = bool(plugins["lora_plugin"])
        self.use_packed_input = plugins["remove_input_padding"]
        for name in ("max_batch_size", "max_input_len", "max_seq_len", "max_beam_width",
                     "max_num_tokens", "max_prompt_embedding_table_size"):  # fmt: skip
            setattr(self, name, build[name])
        self.compute_context_logits = build["gather_context_logits"]
        self.compute_generation_logits = build["gather_generation_logits"]


class GptJsonConfig:
    """config.json of an engine."""

    def __init__(self, document: dict[str, Any]) -> None:
        mapping = document["pretrained_config"]["mapping"]
        self.model_config = ModelConfig(document)
        self.tensor_parallelism = mapping["tp_size"]
        self.pipeline_parallelism = mapping.get("pp_size", 1)
        self.gpus_per_node = mapping.get("gpus_per_node", 8)

    @staticmethod
    def parse_file(path: Path) -> GptJsonConfig:
        return GptJsonConfig(json.loads(Path(path).read_text()))


class WorldConfig:
    """One of the processes that MPI has started."""

    def __init__(self, tensor: int, pipeline: int, gpus_per_node: int) -> None:
        self.tensor_parallelism, self.pipeline_parallelism = tensor, pipeline
        self.gpus_per_node = gpus_per_node
        self.size = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
        if self.size != tensor * pipeline:
            raise RuntimeError(f"world size {self.size} is not {tensor} * {pipeline}")

    @staticmethod
    def mpi(
        *, gpus_per_node: int = 8, tensor_parallelism: int = 1, pipeline_parallelism: int = 1
    ) -> WorldConfig:
        return WorldConfig(tensor_parallelism, pipeline_parallelism, gpus_per_node)


class Executor:
    """Reads an engine's config.json, checks what it is to be run with, answers requests."""

    __slots__ = ("_double",)

    def __init__(self, model_path: Any, model_type: Any, executor_config: Any) -> None:
        options = {
            name: value
            for name, value in read_options(executor_config).items()
            if value is not None
        }
        engine = EngineDouble(Path(model_path), options, load_facts("0.14"))
        engine.check_types()
        engine.check_options()
        self._double = ExecutorDouble(engine)

    def can_enqueue_requests(self) -> bool:
        return self._double.can_enqueue_requests()

    def enqueue_requests(self, requests: Sequence[Any]) -> list[int]:
        first = requests[0]
        sampling, drafts = first.sampling_config, [r.external_draft_tokens_config for r in requests]
        assert all(r.sampling_config is sampling for r in requests)
        options = {
            "max_new_tokens": first.max_tokens, "end_id": first.end_id, "pad_id": first.pad_id,
            "streaming": first.streaming, "num_beams": sampling.beam_width,
            "top_k": sampling.top_k, "top_p": sampling.top_p, "temperature": sampling.temperature,
            "random_seed": sampling.seed, "stop_words_list": [r.stop_words or [] for r in requests],
            "return_dict": True, "output_sequence_lengths": True,
        }  # fmt: skip
        if drafts[0] is not None:
            options["draft_tokens_list"] = [draft.tokens for draft in drafts]
            if drafts[0].logits is not None:
                options["draft_logits_list"] = [draft.logits for draft in drafts]
        prompts = [r.input_token_ids for r in requests]
        self._double._engine.check_call(prompts, options)
        return self._double.enqueue_requests([(p, options, at) for at, p in enumerate(prompts)])

    def await_responses(self, ids: list[int] | None = None) -> list[Any]:
        return self._double.await_responses(ids)


def read_options(config: Any) -> dict[str, Any]:
    """Return an executor's configuration as the arguments of from_dir that it came from."""
    cache, decoding, window = config.kv_cache_config, config.decoding_config, None
    if decoding.lookahead_decoding_config is not None:
        look = decoding.lookahead_decoding_config
        window = [look.max_window_size, look.max_ngram_size, look.max_verification_set_size]
    return {
        "rank": int(os.environ.get("OMPI_COMM_WORLD_RANK", "0")),
        "kv_cache_enable_block_reuse": cache.enable_block_reuse,
        "kv_cache_free_gpu_memory_fraction": cache.free_gpu_memory_fraction,
        "device_ids": config.parallel_config.device_ids,
        "medusa_choices": decoding.medusa_choices,
        "lookahead_config": window,
        "multi_block_mode": config.extended_runtime_perf_knob_config.multi_block_mode,
    }


def make_modules(make: Any) -> dict[str, ModuleType]:
    """Return the modules of the bindings; what is not written here is some class, by `make`."""
    bindings, executor, info = (
        make(f"tensorrt_llm.bindings{name}") for name in ("", ".executor", ".BuildInfo")
    )
    here = globals()
    for name in ("KVCacheType", "DataType", "GptJsonConfig", "ModelConfig", "WorldConfig"):
        setattr(bindings, name, here[name])
    for found in here.values():
        if isinstance(found, type) and issubclass(found, (Bound, enum.Enum, Executor)):
            setattr(executor, found.__name__, found)
    info.ENABLE_MULTI_DEVICE = True
    bindings.executor, bindings.BuildInfo = executor, info
    return {module.__name__: module for module in (bindings, executor, info)}
