"""Command specdec-serve: the HTTP server."""

from __future__ import annotations

import importlib.util
import signal

from specdec.command.stages import stage_command
from specdec.errors import SpecDecError, name_extra
from specdec.system import logs

from .settings import ServeSettings

PACKAGES = ("starlette", "uvicorn", "prometheus_client")


@stage_command("serve", ServeSettings)
def command(settings: ServeSettings) -> None:
    """Serve a model over HTTP, with the APIs of OpenAI, Anthropic and Ollama."""
    missing_packages = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing_packages:
        raise SpecDecError(
            f"specdec-serve needs {', '.join(missing_packages)}",
            f"install it: {name_extra('serve')}",
        )
    if logs.get_launched_rank():  # rank 0 serves; this rank computes with it
        from specdec.decode.ranks.follower import follow_launcher

        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 ends it when all is done
        return follow_launcher()
    from .server import serve

    serve(settings)
