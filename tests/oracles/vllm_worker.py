"""Runs in vLLM's own environment: `vllm_worker.py JOB.json RESULT.json`, one way of decoding.

JOB has `model`, `speculative_config` or null, `prompts` (lists of token ids), `max_tokens`. RESULT
has the `texts` (token ids) and vLLM's own counters of speculation, summed over all requests.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip


def main() -> None:
    from vllm import LLM, SamplingParams, __version__

    job = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(
        model=job["model"], dtype="float32", enforce_eager=True, max_model_len=512,
        max_num_seqs=1, speculative_config=job["speculative_config"], disable_log_stats=False,
        enable_prefix_caching=False, skip_tokenizer_init=True,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=job["max_tokens"], detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    counters = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode_"):
            values = getattr(metric, "values", None)
            name = metric.name.removeprefix("vllm:spec_decode_")
            counters[name] = metric.value if values is None else list(values)
    found = {
        "version": __version__, "counters": counters,
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
    }  # fmt: skip
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
