"""What an engine is to the rest of specdec-run, whatever executes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from specdec.decode.loop import Options
    from specdec.decode.requests import Request, Result


class Engine(Protocol):
    """An engine folder that is ready to run, or that becomes so when it is asked to generate."""

    def describe(self) -> dict[str, Any]:
        """Return method, backend, device, dtype and tp_size, as statistics name them."""

    def check_requests(self, requests: Sequence[Request]) -> None:
        """Raise SpecDecError that lists every request that the engine cannot do."""

    def load(self) -> None:
        """Load what is not loaded yet."""

    def generate(self, requests: Sequence[Request], options: Options | None = None) -> list[Result]:
        """Decode all requests; results are in their order. Raises Interrupted on Ctrl-C."""

    def describe_profile(self) -> dict[str, float | None]:
        """Return the seconds of each part of a step, None where they are not known."""

    @property
    def tells_origins(self) -> bool:
        """Whether it is known of each token how it came."""

    @property
    def load_seconds(self) -> float:
        """Seconds that loading took."""

    @property
    def num_reused_tokens(self) -> int | None:
        """Prompt tokens taken from the cache, None where that is not known."""
