"""vLLM's connector of hidden states for its CPU runner, which has no streams and events of CUDA.

Runs in vLLM's own environment. All but the moment of the copy is vLLM's: its runner extracts the
states, and its code names, locks and writes the files.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import (
    example_hidden_states_connector as example,
)


class CpuHiddenStatesConnector(example.ExampleHiddenStatesConnector):  # type: ignore[misc]
    """Writes a request's states at once instead of on another stream."""

    def _submit_async_write(self, pending: Any) -> None:
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (
            torch.arange(self._block_size)[None] + blocks[:, None] * self._block_size
        ).flatten()
        states = example.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}
        done = SimpleNamespace(synchronize=lambda: None, query=lambda: True)
        lock = self._lock_fds.pop(pending.req_id, None)
        self._req_copy_events[pending.req_id] = done
        self._write_tensors(tensors, done, pending.filename, lock)
