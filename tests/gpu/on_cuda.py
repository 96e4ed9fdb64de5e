"""A plugin of pytest: engines that tests put on the CPU are put on the CUDA device instead.

    python -m pytest -p tests.gpu.on_cuda tests/run tests/parity/test_families.py \\
        tests/parity/test_pairs.py tests/decode tests/verify

What tests say of texts, drafts and logits holds on a GPU, too. What is about CPUs is skipped, with
the reason.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest

from specdec.decode.engine import TorchEngine

# Why tests are skipped, and parts of their names.
SKIPPED = {
    "is about the kernels for CPUs": (
        "test_packed_weights.py", "test_engine_folder.py::test_an_engines_own_kernels",
        "::test_kernels_are_made_anew_for_another_cpu", "::test_layers_of_several_types",
        "test_block_engine.py::test_text_with_drafts", "::test_other_text_with_drafts_is_a_fault",
        "::test_with_kernels_it_is_compared_with_itself",
    ),
    "is about what engines do by default on a CPU": (
        "::test_default_trees_on_a_cpu", "test_eagle.py::test_three_commands",
        "::test_random_heads_leave_the_text_unchanged", "::test_trees_of_redrafter",
        "::test_what_drafts_by_default", "test_mtp.py::test_how_many_tokens_are_drafted",
    ),
    "counts steps or tokens, of which graphs and steps begun ahead have others": (
        "::test_reused_prefixes_are_not_run_again", "::test_finished_rows_are_refilled",
        "::test_caches_are_rolled_back", "::test_one_tree_with_other_drafts_leaves_the_cache_true",
    ),
    "has graphs of its own, from a tape": (
        "run/test_graphs.py", "test_mixed_vocabularies.py::test_graphs",
    ),
    "needs two GPUs": (
        "::test_two_ranks", "::test_four_ranks", "::test_several_ranks", "test_verify_engine.py::"
        "test_an_engine_of_two_ranks", "test_draft_target.py::test_the_command",
        "::test_a_hybrid_drafts_for_a_hybrid[2",
        "::test_shared_prefixes_are_gone_on_behind_where_a_state_is_kept[2", "int4-2]", "int8-2]",
    ),
    "compares bits, or roundings that are others on a GPU": (
        "test_fp8_engine.py::test_bfloat16_engine", "test_fp8_engine.py::test_checkpoints_of",
        "test_fp8_engine.py::test_greedy_text", "::test_states_after_drafts_are_those_of_plain",
        "test_int4_engine.py::test_text_is_what", "test_int8_engine.py::test_text_is",
        "test_int8_engine.py::test_speculative_text", "::test_a_right_engine_is_lossy",
    ),
    "forks a process that has opened the device": (
        "::test_text_is_streamed_while_it_is_made", "::test_an_interrupted_stream", "::test_ctrl_c",
        "::test_two_processes_share_one_conversion",
    ),
}  # fmt: skip


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:
        for reason, names in SKIPPED.items():
            if any(name in item.nodeid for name in names):
                item.add_marker(pytest.mark.skip(reason=reason))


def _move(engine: TorchEngine, *args: Any, device: str = "auto", **options: Any) -> None:
    _make(engine, *args, device="cuda" if device == "cpu" else device, **options)


_make = TorchEngine.__init__
setattr(TorchEngine, "__init__", functools.wraps(_make)(_move))  # noqa: B010
