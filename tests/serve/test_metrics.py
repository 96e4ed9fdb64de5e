"""/metrics: what belongs together is counted at one time, and of the same requests."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from specdec import Engine, Event, Prompt
from specdec.serve.metrics import Metrics
from specdec.serve.scheduler import Job, JobScheduler
from specdec.serve.server import load
from specdec.serve.settings import ServeSettings
from tests.conftest import ROOT
from tests.serve.servers import post, serve_here, wait_until

HITS, QUERIES = "prefix_cache_hits_total", "prefix_cache_queries_total"
FIRSTS, GAPS = "time_to_first_token_seconds_count", "inter_token_latency_seconds_count"
WHOLE = ("e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens")
ENDED = ("stop", "length", "abort", "error")


class Record:
    """Metrics, and what they tell after every step."""

    def __init__(self, engine: Engine) -> None:
        self.metrics = Metrics("vllm", "toy", engine)
        self.seen: list[dict[str, float]] = []

    def note_step(self, jobs: Sequence[tuple[Job, Event]]) -> None:
        self.metrics.note_step(jobs)
        self.seen.append({name: self.read(name) for name in (HITS, QUERIES, FIRSTS, GAPS)})

    def note_end(self, job: Job, reason: str) -> None:
        self.metrics.note_end(job, reason)

    def read(self, name: str, **labels: str) -> float:
        labels["model_name"] = "toy"
        return float(self.metrics.registry.get_sample_value(f"vllm:{name}", labels))


def test_counters_that_are_compared_are_counted_at_one_time(folder: Path) -> None:
    """Of requests that run, that have left while they waited or were decoded, and that ended."""
    beginning = [*range(3, 103)]
    settings = ServeSettings(engine_dir=folder, device="cpu", prompt_chunk=16)
    with load(settings) as engine:
        record = Record(engine)
        metrics, scheduler = record.metrics, JobScheduler(engine, max_queue=9, watcher=record)
        scheduler.start()
        metrics.note_start()

        def submit(ids: list[int], length: int) -> Job:
            prompt = Prompt(token_ids=ids, end_ids=(), temperature=0, max_output_len=length)
            job = Job(engine.prepare(prompt), lambda: None)
            scheduler.submit([job])
            return job

        first = submit(beginning, 3)
        wait_until(lambda: first.is_over)
        assert record.read(HITS) == 0
        jobs = [submit([*beginning[: 20 * at], *[at] * 40], 90) for at in range(1, 5)]
        waiting = submit(beginning, 9)
        wait_until(lambda: all(job.num_new_tokens > 2 for job in jobs))
        scheduler.cancel(jobs[0])
        scheduler.cancel(waiting)
        wait_until(lambda: all(job.is_over for job in jobs[1:]) and not scheduler.num_running)
        metrics.render(scheduler.running, scheduler.num_waiting)
        assert record.read("kv_cache_usage_perc") == 0, "nothing runs any more"
        scheduler.stop()
    for before, seen in itertools.pairwise(record.seen):
        assert seen[HITS] - before[HITS] <= seen[QUERIES] - before[QUERIES]
        assert seen[GAPS] == before[GAPS] or before[FIRSTS] > 0
    assert record.seen[-1][HITS] > 100
    assert sum(record.read("request_success_total", finished_reason=name) for name in ENDED) == 6
    assert [record.read(f"{name}_count") for name in WHOLE] == [6, 6, 6]
    generated = record.read("request_generation_tokens_sum")
    assert generated == record.read("generation_tokens_total") > 270


def test_the_dashboard_names_metrics_and_labels_that_exist() -> None:
    engine: Any = SimpleNamespace(
        num_sought_tokens=0, num_reused_tokens=0, max_batch_size=1, max_seq_len=9, sessions=None
    )
    metrics = Metrics("specdec", "toy", engine)
    metrics._per_position.labels("toy", "0")
    metrics.render([], 0)
    labels: dict[str, set[str]] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    dashboard = json.loads((ROOT / "configs" / "grafana-serve.json").read_text())
    panels = dashboard["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    expressions += [variable["query"] for variable in dashboard["templating"]["list"]]
    named = {name for text in expressions for name in re.findall(r"specdec:\w+", text)}
    assert len(named) > 15
    assert named <= labels.keys()
    for text in expressions:
        for name, matchers in re.findall(r"(specdec:\w+)\{(.*?)\}", text):
            assert set(re.findall(r"(\w+)=", matchers)) <= labels[name], text
        for group in re.findall(r"by \((\w+)\)", text):
            names = re.findall(r"specdec:\w+", text)
            assert any(group in labels[name] for name in names), text
        assert text.count("(") == text.count(")")
    places = [panel["gridPos"] for panel in panels]
    for one, other in itertools.combinations(places, 2):
        assert one["x"] + one["w"] <= 24
        assert (
            one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        )  # fmt: skip


def test_an_answer_tells_of_prompt_tokens_from_the_cache(folder: Path) -> None:
    with serve_here(folder) as (_, url):
        first, again = (
            post(url, "/v1/completions", prompt=[*range(3, 83)], max_tokens=2, n=n)["metrics"]
            for n in (1, 2)
        )
    assert first["num_prompt_tokens"] == again["num_prompt_tokens"] == 80, "once, as in `usage`"
    assert first["num_cached_prompt_tokens"] == 0
    assert 60 < again["num_cached_prompt_tokens"] < 80
