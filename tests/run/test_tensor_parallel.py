"""Engines of several ranks: the text of one rank by every method, and how their processes end."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec.decode import engine as torch_engine
from specdec.decode.drafters.devices import check_devices
from specdec.decode.drafters.draft_target import attach_draft
from specdec.decode.drafters.redrafter import BeamDrafter, BeamTreeDrafter
from specdec.decode.engine import TorchEngine
from specdec.decode.loop import Interrupted, Options
from specdec.decode.ranks import follower
from specdec.decode.ranks import processes as ranks_module
from specdec.decode.ranks.part import choose_device
from specdec.decode.ranks.processes import LOST_STATUS, Ranks, end_ranks
from specdec.decode.requests import ActiveRequest, Request
from specdec.decode.sampling import SamplingParams
from specdec.errors import Problems, SpecDecError
from tests.conftest import (
    ROOT,
    make_dflash_drafter,
    make_drafter,
    make_eagle_drafter,
    make_llama,
    make_medusa_heads,
    make_mtp_head,
    read_error_lines,
)
from tests.engines import call, make_noisy_copy, run_cli_here, start_cli
from tests.forks import fork, fork_command, run_main
from tests.methods import use_method

EXTERNAL = ("--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 5)
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.8}, {"temperature": 1.2, "top_k": 9}]
METHODS = [
    "target", "redrafter", "redrafter, dynamic", "medusa", "eagle", "eagle, dynamic", "eagle3",
    "dflash", "mtp", "prompt_lookup", "suffix", "lookahead",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines NAME-tpN of a target by itself, with each drafter, and of a draft model."""
    parent = tmp_path_factory.mktemp("ranks")
    target = make_llama(parent, seed=3, vocab=131)
    drafter = make_drafter(parent, vocab=131, exit_dim=96, scale=3.0)
    heads = make_medusa_heads(parent, vocab=131, heads=3, scale=3.0)
    eagle = make_eagle_drafter(parent, vocab=131, heads=8, scale=2.0)
    eagle3 = make_eagle_drafter(
        parent, vocab=131, version=3, draft_vocab=70, own_embedding=False, name="eagle3"
    )
    dflash = make_dflash_drafter(
        parent, vocab=131, form="speculators", draft_vocab=70, heads=8, scale=2.0, markov_rank=6
    )
    make_noisy_copy(target, parent / "draft")
    flags: dict[str, tuple[object, ...]] = {
        "target": ("--model-dir", target),
        "redrafter": (
            "--model-dir", target, "--drafter-model-dir", drafter, "--use-parallel-embedding",
        ),
        "medusa": ("--model-dir", target, "--medusa-model-dir", heads),
        "eagle": (
            "--model-dir", target, "--eagle-model-dir", eagle, "--use-parallel-embedding",
        ),
        "eagle3": ("--model-dir", target, "--eagle-model-dir", eagle3),
        "dflash": (
            "--model-dir", target, "--dflash-model-dir", dflash, "--use-parallel-embedding",
        ),
        "mtp": (
            "--model-dir", target, "--mtp-model-dir", make_mtp_head(parent, target),
            "--use-parallel-embedding",
        ),
        "draft": ("--model-dir", parent / "draft"),
    }  # fmt: skip
    for name, sources in flags.items():
        for size in (1, 2, 4) if name in ("target", "redrafter", "eagle3") else (1, 2):
            checkpoint = parent / f"{name}-ckpt{size}"
            call("convert", *sources, "--output-dir", checkpoint, "--tp-size", size)
            built = parent / f"{name}-tp{size}"
            call(
                "build", "--checkpoint-dir", checkpoint, "--output-dir", built,
                "--optimize", "none", "--max-batch-size", 4,
                *(EXTERNAL if name == "target" else ()),
            )  # fmt: skip
    return parent


def load(folder: Path, method: str, size: int) -> TorchEngine:
    """Load an engine of a folder's name, or a variant of one."""
    name, _, variant = method.partition(", ")
    source = "target" if name in ("prompt_lookup", "suffix", "lookahead") else name
    engine = TorchEngine(folder / f"{source}-tp{size}", device="cpu")
    use_method(engine, method)
    if name == "redrafter" and variant:
        assert isinstance(engine.drafter, BeamDrafter)
        engine.drafter = BeamTreeDrafter(engine.drafter.head, 9)
    return engine


def load_pair(
    folder: Path, size: int, draft_size: int, *, use_logits: bool, tree_tokens: int | None = None
) -> TorchEngine:
    engine = load(folder, "target", size)
    draft = load(folder, "draft", draft_size)
    attach_draft(engine, draft, draft_len=4, use_logits=use_logits, tree_tokens=tree_tokens)
    return engine


def make_requests(limit: int = 14) -> list[Request]:
    generator = torch.Generator().manual_seed(7)
    return [
        Request(
            index=index,
            input_ids=torch.randint(3, 131, (1 + index * 7 % 19,), generator=generator).tolist(),
            max_output_len=limit - index,
            end_ids=frozenset([17]) if index % 3 == 0 else frozenset(),
            sampling=SamplingParams(seed=index, **SAMPLINGS[index % 3]),
        )
        for index in range(9)
    ]


def list_outputs(results: list[ActiveRequest]) -> list[tuple[list[int], list[int]]]:
    return [(r.output_ids, r.stats.accepted_histogram) for r in results]


@functools.cache
def generate_alone(folder: Path, limit: int) -> list[list[int]]:
    results = load(folder, "target", 1).generate(make_requests(limit))
    return [r.output_ids for r in results]


# Four ranks are more than key/value heads, which are doubled; short, as two cores run all four.
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "size"),
    [*((method, 2) for method in METHODS), ("target", 4), ("redrafter", 4), ("eagle3", 4)],
)
def test_several_ranks_give_the_text_of_one(folder: Path, method: str, size: int) -> None:
    """Greedy and sampled rows in one batch, more requests than rows; the drafts are equal too."""
    one, several = load(folder, method, 1), load(folder, method, size)
    assert one.method == several.method
    limit = 14 if size == 2 else 10
    results = several.generate(make_requests(limit))
    assert list_outputs(results) == list_outputs(one.generate(make_requests(limit)))
    assert [r.output_ids for r in results] == generate_alone(folder, limit)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("size", "draft_size", "use_logits", "tree_tokens"),
    # Four ranks, which the tests before have started, then the two that those after use.
    [(4, 1, True, None), (2, 2, False, None), (2, 2, False, 4)],
)  # fmt: skip
def test_several_ranks_with_a_draft_model(
    folder: Path, size: int, draft_size: int, use_logits: bool, tree_tokens: int | None
) -> None:
    """The draft model is on rank 0, or split as the target is."""
    limit = 14 if size == 2 else 10
    requests = make_requests(limit)
    how: dict[str, Any] = {"use_logits": use_logits, "tree_tokens": tree_tokens}
    one = load_pair(folder, 1, 1, **how).generate(requests)
    several = load_pair(folder, size, draft_size, **how).generate(requests)
    assert list_outputs(several) == list_outputs(one)
    accepted = sum(r.stats.num_accepted for r in several)
    assert accepted > 10, "drafts are accepted, so that caches are cut back"
    if not use_logits:
        assert [r.output_ids for r in several] == generate_alone(folder, limit)


def test_prefixes_of_other_rows_are_reused_on_every_rank(folder: Path) -> None:
    start = list(range(3, 40))
    requests = [
        Request(index=i, input_ids=[*start, 50 + i], max_output_len=8, end_ids=frozenset())
        for i in range(6)
    ]
    engine = load(folder, "target", 2)
    expected = [r.output_ids for r in engine.generate(requests)]
    reused = [r.output_ids for r in engine.generate(requests, Options(reuse_blocks=True))]
    assert (
        reused == expected == [r.output_ids for r in load(folder, "target", 1).generate(requests)]
    )
    assert engine.timing.num_reused_tokens >= 5 * len(start)


def test_dropped_engines_and_caches_are_dropped_everywhere(folder: Path) -> None:
    import gc

    engine = load(folder, "target", 2)
    ranks = ranks_module._ranks
    assert ranks is not None
    decoder: Any = engine.decoder
    handle = decoder._handle
    del decoder
    engine.generate(make_requests(10)[:1])
    del engine
    gc.collect()
    assert handle in ranks._dropped
    load(folder, "target", 2)
    assert handle not in ranks._dropped, "the others were told"


def test_two_ranks_in_bfloat16(folder: Path) -> None:
    """What is exchanged in half precision: logits differ from one rank's by rounding only."""
    requests = [
        Request(index=n, input_ids=[5 + n, 9, 40], max_output_len=4, end_ids=frozenset())
        for n in range(5)
    ]
    logits = []
    for size in (1, 2):
        checkpoint, built = folder / f"bf16-ckpt{size}", folder / f"bf16-tp{size}"
        call(
            "convert", "--model-dir", folder / "target", "--output-dir", checkpoint,
            "--dtype", "bfloat16", "--tp-size", size,
        )  # fmt: skip
        call("build", "--checkpoint-dir", checkpoint, "--output-dir", built, "--optimize", "none")
        results = load(folder, "bf16", size).generate(requests, Options(keep_logits=True))
        assert [len(r.output_ids) for r in results] == [4] * 5
        logits.append(torch.stack([r.logits[0] for r in results if r.logits is not None]))
    error = (logits[1] - logits[0]).abs().max() / logits[0].abs().max()
    assert 0 < error < 0.02, f"{error:.2e} of the largest logit"


def write_prompts(path: Path, number: int) -> Path:
    lines = [json.dumps({"input_ids": [5, 6, 7 + i % 100]}) for i in range(number)]
    path.write_text("\n".join(lines) + "\n")
    return path


def list_texts(report: dict[str, Any]) -> list[list[int]]:
    return [output["output_ids"] for output in report["outputs"]]


def test_the_command_starts_the_other_rank(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one begins anew, which the other tests spare."""
    monkeypatch.setattr(ranks_module, "subprocess", subprocess)
    flags = ["--input-file", write_prompts(tmp_path / "p.jsonl", 3), "--json"]
    flags += ["--max-output-len", 12, "--device", "cpu", "--draft-engine-dir", folder / "draft-tp1"]
    joined = ["--draft-target-model-config", "[4,[0],[0,1],True]"]
    command = ["run", "--engine-dir", folder / "target-tp2", *flags]
    process = fork(lambda: run_main(*command, *joined))
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert "target devices [0, 1]: running on the CPU" in err
    report = json.loads(out)
    assert report["stats"]["tp_size"] == 2
    assert err.splitlines().count("2 ranks") == 1, "rank 0 alone logs"
    expected = load(folder, "target", 1).generate(
        [
            Request(index=i, input_ids=[5, 6, 7 + i], max_output_len=12, end_ids=frozenset())
            for i in range(3)
        ]
    )
    assert list_texts(report) == [r.output_ids for r in expected]
    joined[1] = "[4,[0],[0],True]"
    failed = run_cli_here(*command, *joined)
    assert failed.returncode == 1
    assert (
        "the target's device list [0] has 1 entries, its engine's tp_size is 2"
        in (read_error_lines(failed.stderr)[0])
    )


def test_torchrun(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 alone speaks, and both end well; what torchrun starts are copies of it."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    def start(*, args: Sequence[str], env: dict[str, str], **_: object) -> subprocess.Popen[str]:
        assert [*args][1:4] == ["-u", "-m", "specdec"]
        return fork_command(args, env=env, stdout=None, stderr=None)

    monkeypatch.setattr(subprocess_handler, "Popen", start)
    words = [
        "--nproc-per-node", "2", "-m", "specdec", "run", "--engine-dir", folder / "redrafter-tp2",
        "--device", "cpu", "--input-file", write_prompts(tmp_path / "p.jsonl", 2),
        "--max-output-len", "9", "--json",
    ]  # fmt: skip
    process = fork(lambda: torchrun.main([*map(str, words)]), {"PYTHONPATH": str(ROOT)})
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    report = json.loads(out)
    assert report["stats"]["tp_size"] == 2
    assert [len(text) for text in list_texts(report)] == [9, 9]
    assert "rank 1" not in err


def start_command(
    folder: Path, tmp_path: Path, size: int
) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a long run; once it has made tokens, return it with the other ranks' processes."""
    prompts = write_prompts(tmp_path / "p.jsonl", 200)
    process = start_cli(
        "run", "--engine-dir", folder / f"target-tp{size}", "--input-file", prompts,
        "--max-output-len", "300", "--no-speculation", "--json", "--device", "cpu",
    )  # fmt: skip
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == size - 1
    return process, [int(child) for child in children]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 300
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "a rank was left behind"
        time.sleep(0.05)


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds ranks in /proc")


@needs_proc
def test_a_killed_rank_ends_all(folder: Path, tmp_path: Path) -> None:
    process, others = start_command(folder, tmp_path, 4)
    os.kill(others[1], signal.SIGKILL)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 1
    assert out == ""
    error, hint = read_error_lines(err)
    assert error == "rank 2 of 4 was killed by signal 9; the other ranks were stopped"
    assert "memory" in hint
    wait_for_end(others)


def test_the_rank_that_ended_first_is_named_though_it_is_seen_last() -> None:
    ranks = Ranks(1)
    for program in (f"exit {LOST_STATUS}", "sleep 0.3; kill -9 $$"):
        ranks._children.append(subprocess.Popen(["sh", "-c", program], stdin=subprocess.PIPE))
    ranks._children[0].wait()
    try:
        assert "rank 2 of 1 was killed by signal 9" in str(ranks._explain(None))
    finally:
        ranks.end()


@needs_proc
def test_ranks_end_with_rank_0(folder: Path, tmp_path: Path) -> None:
    process, others = start_command(folder, tmp_path, 2)
    process.kill()
    process.communicate(timeout=600)
    wait_for_end(others)


@needs_proc
def test_ctrl_c_ends_with_what_was_done(folder: Path, tmp_path: Path) -> None:
    process, others = start_command(folder, tmp_path, 2)
    for pid in (process.pid, *others):
        os.kill(pid, signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 1
    assert read_error_lines(err)[0].startswith("interrupted: ")
    report = json.loads(out)
    assert report["interrupted"] is True
    assert any(list_texts(report)), "there are tokens"
    wait_for_end(others)


@needs_proc
def test_ctrl_c_while_a_rank_is_stuck(folder: Path, tmp_path: Path) -> None:
    """Rank 0 waits for it in a library, where Python's handler of Ctrl-C does not run."""
    process, others = start_command(folder, tmp_path, 2)
    os.kill(others[0], signal.SIGSTOP)
    time.sleep(0.5)  # so that all others wait for it
    os.kill(process.pid, signal.SIGINT)
    try:
        out, err = process.communicate(timeout=600)
    finally:
        for pid in (process.pid, *filter(is_running, others)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert process.returncode == 1
    assert read_error_lines(err)[0].startswith("interrupted: ")
    assert any(list_texts(json.loads(out))), "there are tokens"
    assert not any(map(is_running, others))


@needs_proc
def test_ctrl_c_while_a_rank_never_comes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a second Ctrl-C, while the ranks are given time to end, leave one behind."""
    monkeypatch.setattr(ranks_module, "END_SECONDS", 3600.0)
    monkeypatch.setattr(follower, "_follow", lambda path: time.sleep(3600))
    children: list[subprocess.Popen[bytes]] = []
    calls = 0

    def interrupt() -> None:
        os.kill(children[0].pid, signal.SIGSTOP)
        stat = Path(f"/proc/{children[0].pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":  # its threads stop one by one
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)
        while not all(child.stdin is None or child.stdin.closed for child in children):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    def watch_children(self: ranks_module.Ranks) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:  # of the loop that waits for the others
            children.extend(self._children)
            threading.Thread(target=interrupt).start()

    monkeypatch.setattr(ranks_module.Ranks, "_check_children", watch_children)
    with pytest.raises(KeyboardInterrupt):
        load(folder, "target", 4)
    assert children[0].poll() == -signal.SIGKILL
    assert None not in [child.poll() for child in children]


def test_ctrl_c_amid_an_exchange(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 stops where the others go on: they are ended, and the next engine gets new ones."""
    engine = load(folder, "target", 2)
    expected = list_outputs(engine.generate(make_requests()))
    group, calls = engine.decoder.group, 0
    assert group is not None
    whole_sum = group.sum

    def interrupt(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 21:
            raise KeyboardInterrupt
        return whole_sum(x)

    monkeypatch.setattr(group, "sum", interrupt)
    with pytest.raises(Interrupted) as caught:
        engine.generate(make_requests())
    assert any(result.output_ids for result in caught.value.results)
    with pytest.raises(SpecDecError, match="the other ranks of this engine have ended"):
        engine.generate(make_requests())
    assert list_outputs(load(folder, "target", 2).generate(make_requests())) == expected


@pytest.mark.parametrize("is_seen_by_rank_0", [True, False])
def test_a_rank_tells_what_is_wrong_with_its_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_seen_by_rank_0: bool
) -> None:
    """Rank 0 looks at all files, which on another machine may be others."""
    if not is_seen_by_rank_0:
        monkeypatch.setattr(torch_engine, "find_engine_problems", lambda *_: Problems())
    engine = tmp_path / "engine"
    engine.mkdir()
    for path in (folder / "target-tp2").glob("*.*"):
        (engine / path.name).write_bytes(path.read_bytes())
    damaged = engine / "rank1.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-64])
    with pytest.raises(SpecDecError, match=r"rank1\.safetensors"):
        TorchEngine(engine, device="cpu")
    damaged.unlink()
    with pytest.raises(SpecDecError, match=r"rank1\.safetensors"):
        TorchEngine(engine, device="cpu")


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_launcher_of_another_size(
    folder: Path, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    message = f"WORLD_SIZE is {world_size}, the engine's tp_size is 2"
    with pytest.raises(SpecDecError, match=message):
        load(folder, "target", 2)
    end_ranks()
    if world_size > 1:
        with pytest.raises(SpecDecError, match="WORLD_SIZE is 3, the engine's tp_size is 1"):
            load(folder, "target", 1)


def test_named_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU for each rank; an engine of one rank runs on the one that its list names."""
    assert choose_device("cpu", 1, [1]) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cpu", 4) == torch.device("cpu")
    assert choose_device("auto", 1) == choose_device("auto", 2) == torch.device("cuda")
    assert choose_device("auto", 1, [1]) == torch.device("cuda", 1)
    for name in ("auto", "cuda"):
        with pytest.raises(SpecDecError, match=f"{name}: 4 ranks need a GPU each.* sees 2"):
            choose_device(name, 4)
    with pytest.raises(SpecDecError, match="device 2 is asked for, torch sees 2"):
        choose_device("cuda", 1, [2])
    engine: Any = SimpleNamespace(
        device=torch.device("cuda"),
        config=SimpleNamespace(checkpoint=SimpleNamespace(model=SimpleNamespace(tp_size=2))),
    )
    check_devices("target", [0, 1], engine)
    with pytest.raises(
        SpecDecError, match=r"target's devices are \[1, 0\], but its engine runs on"
    ):
        check_devices("target", [1, 0], engine)
