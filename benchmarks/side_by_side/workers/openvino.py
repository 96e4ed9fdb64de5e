"""OpenVINO GenAI: its pipeline, plain and with a draft model."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai

from ..wire import Calls, describe_texts, serve

DEVICE = "CPU"
PRECISIONS = {"bfloat16": "bf16", "float32": "f32"}


class Pipelines:
    """A pipeline for each way of decoding, loaded when it is first asked for."""

    def __init__(self, target: str, draft: str, threads: int, precision: str) -> None:
        self._target, self._draft = target, draft
        self._properties = {
            "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision,
        }  # fmt: skip
        self._loaded: dict[str, Any] = {}

    def get(self, way: str) -> Any:
        if way not in self._loaded:
            extra = dict(self._properties)
            if way != "plain":
                extra["draft_model"] = openvino_genai.draft_model(
                    self._draft, DEVICE, **self._properties
                )
            self._loaded[way] = openvino_genai.LLMPipeline(self._target, DEVICE, **extra)
        return self._loaded[way]

    def run(
        self, way: str, setting: dict[str, Any], prompts: list[list[int]], max_output_len: int,
        end_id: int,
    ) -> dict[str, Any]:  # fmt: skip
        """Decode each prompt by itself; loading a pipeline is not timed."""
        pipeline = self.get(way)
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_output_len
        config.do_sample = False
        config.eos_token_id = end_id
        config.stop_token_ids = {end_id}
        if way != "plain":
            config.num_assistant_tokens = setting["length"]
        texts, steps = [], 0
        began = time.perf_counter()
        for prompt in prompts:
            found = pipeline.generate(openvino.Tensor(np.array([prompt], np.int64)), config)
            texts.append([int(token) for token in found.tokens[0]])
            if way != "plain" and found.extended_perf_metrics is not None:
                # Passes of the target, less the prompt's, which yields a token too. Its count of
                # accepted tokens leaves out the last step of each text.
                passes = found.extended_perf_metrics.main_model_metrics.raw_metrics.m_durations
                steps += len(passes) - 1
        return describe_texts(texts, steps, time.perf_counter() - began, end_id)


def start(target: str, draft: str, threads: int, dtype: str) -> tuple[dict[str, Any], Calls]:
    able = openvino.Core().get_property(DEVICE, "OPTIMIZATION_CAPABILITIES")
    if dtype == "bfloat16" and "BF16" not in able:
        dtype = "float32"  # its paged attention refuses bfloat16 where the processor lacks it
    began = time.perf_counter()
    pipelines = Pipelines(target, draft, threads, PRECISIONS[dtype])
    pipelines.get("plain")
    about = {
        "load_seconds": time.perf_counter() - began,
        "versions": {
            "openvino-genai": openvino_genai.__version__, "openvino": openvino.__version__,
        },
        "computes_in": dtype,
    }  # fmt: skip
    return about, {"run": pipelines.run}


if __name__ == "__main__":
    serve(start)
