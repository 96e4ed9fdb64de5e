"""specdec-serve."""

from __future__ import annotations

import importlib.util

from specdec.command.stages import run_command, stage_command
from specdec.errors import SpecDecError, name_extra

from .settings import ServeSettings

NEEDED = ("starlette", "uvicorn", "pydantic", "prometheus_client")


@stage_command("serve", ServeSettings)
def command(settings: ServeSettings) -> None:
    """Serve an engine over HTTP, with the interface of OpenAI's."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SpecDecError(
            f"specdec-serve needs {', '.join(missing)}", f"install it: {name_extra('serve')}"
        )
    from .server import serve

    serve(settings)


def main() -> None:
    """Entry point of `specdec-serve`."""
    run_command(command)
