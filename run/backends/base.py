"""Interface of an opened engine to specdec-run, the same for every backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from specdec.decode.requests import ActiveRequest, Request


class EngineCore(Protocol):
    """Description of an engine, and checks and counts of its runs."""

    @property
    def counts_drafts(self) -> bool: ...

    @property
    def tells_origins(self) -> bool: ...

    @property
    def load_seconds(self) -> float: ...

    @property
    def num_reused_tokens(self) -> int | None: ...

    def describe(self) -> dict[str, Any]: ...

    def describe_profile(self) -> dict[str, float | None]: ...

    def check_requests(self, requests: Sequence[Request]) -> None: ...


class RequestRunner(Protocol):
    """Engine that runs requests to their ends."""

    def run(self, requests: Sequence[Request], **loop_options: Any) -> list[ActiveRequest]: ...


@dataclasses.dataclass(frozen=True)
class OpenedEngine:
    """Engine folder that was opened: what runs it, what describes it.

    load: what is to be done before requests run, for these, and not for a dry run.
    """

    runner: RequestRunner
    core: EngineCore
    load: Callable[[Sequence[Request]], object]
