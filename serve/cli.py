"""specdec-serve."""

from __future__ import annotations

import importlib.util
import signal

from specdec.command.stages import stage_command
from specdec.errors import SpecDecError, name_extra
from specdec.system import logs

from .settings import ServeSettings

NEEDED = ("starlette", "uvicorn", "prometheus_client")


@stage_command("serve", ServeSettings)
def command(settings: ServeSettings) -> None:
    """Serve an engine over HTTP, with the interface of OpenAI's."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SpecDecError(
            f"specdec-serve needs {', '.join(missing)}", f"install it: {name_extra('serve')}"
        )
    if logs.get_launched_rank():  # rank 0 serves; this one computes with it
        from specdec.decode.ranks.follower import follow_launcher

        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 ends it when all is done
        return follow_launcher()
    from .server import serve

    serve(settings)
