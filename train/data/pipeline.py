"""Regeneration of answers by the target: read rows, ask the target, journal, write the output."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from specdec.command.settings import require
from specdec.errors import SpecDecError, UsageError
from specdec.files.folders import ENGINE, expect_folder
from specdec.files.manifest import describe_file
from specdec.files.staging import tell_full_disk
from specdec.options import Contradiction, refuse_contradictions
from specdec.system import logs
from specdec.text.tokenizer import find_tokenizer, lack_tokenizer

from .client import check_url
from .dialogues import DataSource, Dialogue, Row, RowError, open_source
from .journal import Journal
from .output import check_output, write_manifest
from .servers import Servers, TargetServer
from .settings import DataSettings
from .shards import SHARD_FACT, merge_shards, parse_shard

SERVER_FLAGS = ("base_url", "model")
ENGINE_FLAGS = ("engine_dir", "tokenizer_dir")
# Settings that the answers depend on; a resumed run must have equal ones.
FACT_SETTINGS = (
    "model", "completion", "max_tokens", "temperature", "top_p", "seed", "system_prompt",
    "max_rows", "drop_truncated",
)  # fmt: skip
# Rows in succession without an answer that end a run; at least as many as run concurrently.
MIN_LOST_ROWS = 8
LONGEST_WAIT = 0.5  # seconds between two checks for Ctrl-C
END_OF_TASKS = object()

logger = logs.get_logger(__name__)
T = TypeVar("T")
R = TypeVar("R")


def regenerate_data(settings: DataSettings) -> dict[str, Any]:
    """Let the target answer every row of the input; write the output and return the counts.

    With --merge, the answers are those in the files of shards.
    """
    refuse_contradictions(settings, CONTRADICTIONS)
    if settings.merge:
        require(dataclasses.replace(settings, input="-"))  # of which there is none
        return merge_shards(settings)
    if settings.shard is not None and settings.output is not None:
        output = parse_shard(settings.shard).name_output(settings.output)
        settings = dataclasses.replace(settings, output=output)
    check_settings(settings)
    source = open_source(settings)
    facts = {name: getattr(settings, name) for name in FACT_SETTINGS} | {
        "input": source.facts["sha256"]
    }
    if settings.shard is not None:
        facts[SHARD_FACT] = settings.shard
    if settings.engine_dir is not None:
        facts["engine"] = describe_file(settings.engine_dir / "config.json")["sha256"]
    journal = Journal(settings.output, facts, resume=settings.resume, force=settings.force)
    try:
        num_resumed = len(journal)
        if num_resumed:
            logger.info("%d of %d rows are done already", num_resumed, source.num_shard_rows)
        start_time = time.monotonic()
        make_rows(settings, source, journal)
        report = {
            "output": str(settings.output),
            "rows": source.num_shard_rows,
            "answered": len(journal),
            "resumed": num_resumed,
            "failed": len(journal.failures),
            "truncated": journal.num_truncated,
            "seconds": round(time.monotonic() - start_time, 2),
        }
        with tell_full_disk(settings.output, "free some space, and continue with --resume"):
            finish(settings, source, journal, report)
    except KeyboardInterrupt:
        raise SpecDecError(
            f"interrupted: {len(journal)} of {source.num_shard_rows} rows are done",
            "the same command with --resume goes on from there",
        ) from None
    finally:
        journal.close()
    return report


CONTRADICTIONS: tuple[Contradiction, ...] = (
    (
        lambda s: not 0 < s.top_p <= 1, "--top-p is {top_p:g}",
        "give a number above 0 and at most 1",
    ),
    (
        lambda s: s.resume and s.force, "--resume and --force are both given",
        "continue, or start over",
    ),
    (
        lambda s: s.merge and (s.input or s.base_url or s.engine_dir or s.shard or s.resume),
        "--merge puts files together, and nothing is answered",
        "give --merge and --output alone",
    ),
    (
        lambda s: len({url.rstrip("/") for url in s.base_url}) < len(s.base_url),
        "--base-url names a server twice", "name each server once",
    ),
    (
        lambda s: s.output is not None and s.output.suffix != ".jsonl", "--output is {output}",
        "name a .jsonl file, as specdec-train takes it",
    ),
)  # fmt: skip


def check_settings(settings: DataSettings) -> None:
    """Raise the errors of the settings that show before any data is read."""
    require(settings)
    target_flags = [n for n in (*SERVER_FLAGS, *ENGINE_FLAGS) if getattr(settings, n)]
    allowed_flags = SERVER_FLAGS if settings.engine_dir is None else ENGINE_FLAGS
    if not target_flags or set(target_flags) - set(allowed_flags):
        raise UsageError(
            "the target must be one server or one engine",
            "give --base-url and --model, or --engine-dir",
        )
    if settings.engine_dir is None:
        require(settings, *SERVER_FLAGS)
    else:
        expect_folder(settings.engine_dir, ENGINE, "--engine-dir")
        if find_tokenizer(settings.engine_dir, settings.tokenizer_dir) is None:
            raise lack_tokenizer("the data needs")
    for url in settings.base_url:
        check_url(url)
    check_output(settings.output, force=settings.force)
    if settings.output.resolve() == Path(settings.input).resolve():
        raise UsageError("--output is the input", "name another file")


def make_rows(settings: DataSettings, source: DataSource, journal: Journal) -> None:
    """Answer the rows that the journal lacks, and record each as soon as it ends."""
    num_remaining = source.num_shard_rows - len(journal)
    remaining_rows = (row for row in source.read() if row.index not in journal)
    num_lost = 0  # rows in succession that the server did not answer
    max_lost = max(MIN_LOST_ROWS, settings.concurrency * len(settings.base_url))
    with logs.track("rows", total=num_remaining) as advance:
        for index, row_number, result in answer_rows(settings, source, remaining_rows):
            if isinstance(result, RowError):
                journal.add_failure(
                    index, {"index": index, "row": row_number, "reason": result.reason}
                )
            else:
                journal.add_row(index, result)
            advance(1)
            num_lost = num_lost + 1 if isinstance(result, RowError) and result.is_transient else 0
            if num_lost >= max_lost:
                assert isinstance(result, RowError)
                raise SpecDecError(
                    f"{num_lost} rows in succession got no answer, the last one: {result.reason}",
                    "check the server, then run the same command with --resume",
                )


# A row's index, its number, and its answered form or the error.
Result = tuple[int, int, "dict[str, Any] | RowError"]


def answer_rows(
    settings: DataSettings, source: DataSource, rows: Iterable[Row]
) -> Iterator[Result]:
    """Yield every row's result, in the order in which the rows end."""
    if settings.engine_dir is None:
        with contextlib.closing(Servers(settings)) as servers:
            yield from map_concurrently(
                lambda row: answer_row(servers, settings, source, row), rows, servers.concurrency
            )
        return
    from .engine import DialogueEngine

    unreadable_rows: list[Result] = []

    def open_dialogues() -> Iterator[Dialogue]:
        for row in rows:
            try:
                yield Dialogue(row, settings, source)
            except RowError as error:
                unreadable_rows.append((row.index, row.number, error))

    with contextlib.closing(DialogueEngine(settings)) as runner:
        for dialogue, error in runner.answer(open_dialogues()):
            yield (dialogue.row.index, dialogue.row.number, error or finish_row(dialogue, settings))
    yield from unreadable_rows


def answer_row(servers: Servers, settings: DataSettings, source: DataSource, row: Row) -> Result:
    """Let the servers answer a row, one turn after the other, best at one server."""
    server: TargetServer | None = None
    try:
        dialogue = Dialogue(row, settings, source)
        seed = None if settings.seed is None else settings.seed + row.index
        while (context := dialogue.ask()) is not None:
            answer, server = servers.ask(context, seed, server)
            dialogue.add(answer.message, is_truncated=answer.is_truncated)
        return row.index, row.number, finish_row(dialogue, settings)
    except RowError as error:
        return row.index, row.number, error


def finish_row(dialogue: Dialogue, settings: DataSettings) -> dict[str, Any] | RowError:
    """Return the output's row; RowError where its answer was cut and --drop-truncated is given."""
    if dialogue.is_truncated and settings.drop_truncated:
        return RowError(f"an answer was cut at {settings.max_tokens} tokens or the server's limit")
    return dialogue.to_json()


def map_concurrently(work: Callable[[T], R], items: Iterable[T], num_workers: int) -> Iterator[R]:
    """Yield `work(item)` of all items as the results come; twice the workers' items are queued.

    The workers do not outlive the process: Ctrl-C need not wait for a server.
    """
    tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for _ in range(num_workers):
        threading.Thread(target=_run_worker, args=(work, tasks, results), daemon=True).start()
    try:
        remaining_items = iter(items)
        num_pending = 0
        for item in islice(remaining_items, 2 * num_workers):
            tasks.put(item)
            num_pending += 1
        while num_pending:
            # A signal ends no wait where another thread takes it, or where it comes just before.
            try:
                result, error = results.get(timeout=LONGEST_WAIT)
            except queue.Empty:
                continue
            num_pending -= 1
            if error is not None:
                raise error
            for item in islice(remaining_items, 1):
                tasks.put(item)
                num_pending += 1
            yield result
    finally:
        with contextlib.suppress(queue.Empty):
            while True:
                tasks.get_nowait()
        for _ in range(num_workers):
            tasks.put(END_OF_TASKS)


def _run_worker(
    work: Callable[[T], R], tasks: queue.SimpleQueue[Any], results: queue.SimpleQueue[Any]
) -> None:
    """Put (result, None) or (None, error) of each task into `results`, until END_OF_TASKS."""
    while (item := tasks.get()) is not END_OF_TASKS:
        try:
            results.put((work(item), None))
        except BaseException as error:  # noqa: BLE001 - map_concurrently raises it again
            results.put((None, error))


def finish(
    settings: DataSettings, source: DataSource, journal: Journal, report: dict[str, Any]
) -> None:
    """Write failures, output and manifest.

    Raises SpecDecError where rows failed and --allow-failures is not given.
    """
    output = settings.output
    failed_path = output.with_suffix(".failed.jsonl")
    failed_path.unlink(missing_ok=True)
    failures = [journal.failures[index] for index in sorted(journal.failures)]
    if failures:
        lines = "".join(json.dumps(failure) + "\n" for failure in failures)
        failed_path.write_text(lines, encoding="utf-8")
        report["failures"] = str(failed_path)
    if failures and not (settings.allow_failures and len(journal)):
        raise SpecDecError(
            f"{len(failures)} of {source.num_shard_rows} rows failed, the first one (row"
            f" {failures[0]['row']}): {failures[0]['reason']}",
            f"{failed_path} has them all; --resume tries them again, and with --allow-failures"
            f" {output} is written without them",
        )
    if journal.num_truncated:
        logger.warning(
            "%d of %d rows end with an answer that was cut at %d tokens or the server's limit;"
            " --drop-truncated would treat them as failed",
            journal.num_truncated, len(journal), settings.max_tokens,
        )  # fmt: skip
    journal.write_output()
    write_manifest(settings, journal.facts, source.facts, report)
    journal.remove()
    logger.info("%d rows are in %s", len(journal), output)
