"""The process: an engine, the thread that runs it, and uvicorn, until a signal or a lost rank."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
from collections.abc import Iterator
from types import FrameType

import uvicorn

from specdec import Engine, SpecDecError, UsageError, logs
from specdec.command.settings import get_flags, require
from specdec.decode.drafters import read_drafting
from specdec.errors import summarize
from specdec.methods import list_options

from .app import MAX_HEADER_BYTES, Front, Guard
from .metrics import Metrics
from .scheduler import Scheduler
from .settings import ServeSettings

logger = logs.get_logger(__name__)
KEY_VARIABLE = "SPECDEC_API_KEY"


def serve(settings: ServeSettings) -> None:
    """Load the engine and serve until told to end; SpecDecError where either fails."""
    require(settings)
    read_drafting(settings, None)  # what is written wrong is told before anything is loaded
    key = read_key(settings)
    check_address(settings, key)
    with open_socket(settings) as listener, load(settings) as engine:
        Server(settings, engine, key).run_until_told(listener)


def read_key(settings: ServeSettings) -> str | None:
    """The key that clients must send, from the file or the environment; None where there is none.

    It must be one line of printable ASCII, as a header can hold.
    """
    path, key = settings.api_key_file, os.environ.get(KEY_VARIABLE)
    source = KEY_VARIABLE
    if path is not None:
        source = f"--api-key-file {path}"
        try:
            key = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SpecDecError(
                f"{source} cannot be read: {summarize(error)}", "give a file that holds the key"
            ) from None
    if key is None:
        return None
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise SpecDecError(
            f"{source} holds no key", "write one word of ASCII characters, such as a random one"
        )
    return key


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_address(settings: ServeSettings, key: str | None) -> None:
    """Raise UsageError for a server that everybody could use without a key."""
    if key is None and not settings.allow_anonymous and not is_loopback(settings.host):
        raise UsageError(
            f"--host {settings.host} can be reached from elsewhere, and there is no key",
            f"give --api-key-file or {KEY_VARIABLE}, or --allow-anonymous if all may use it",
        )


@contextlib.contextmanager
def open_socket(settings: ServeSettings) -> Iterator[socket.socket]:
    """Take the port before the engine is loaded."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
        except OSError as error:
            raise SpecDecError(
                f"{settings.host}:{settings.port} cannot be listened on: {summarize(error)}",
                "give another --host or --port",
            ) from None
        yield listener


def load(settings: ServeSettings) -> Engine:
    """Load the engine that the settings name, for many short-lived requests."""
    names = [name for kind in list_options("draft") for name in get_flags(kind)]
    options = {name: getattr(settings, name) for name in names if name != "draft_engine_dir"}
    engine = Engine.load(
        settings.engine_dir,
        tokenizer=settings.tokenizer_dir,
        draft=getattr(settings, "draft_engine_dir", None),
        device=settings.device,
        speculation=not settings.no_speculation,
        max_batch_size=settings.max_batch_size,
        max_seq_len=settings.max_seq_len,
        prompt_chunk=settings.prompt_chunk,
        kv_cache_enable_block_reuse=True,
        **options,
    )
    if engine.tokenizer is None:
        engine.close()
        raise SpecDecError(
            "a server needs a tokenizer, and the engine holds none",
            "give the base model's folder as --tokenizer-dir, here or to specdec-build",
        )
    return engine


class Server:
    """An engine being served."""

    def __init__(self, settings: ServeSettings, engine: Engine, key: str | None) -> None:
        self._settings = settings
        model = settings.served_model_name or settings.engine_dir.resolve().name
        metrics = Metrics(settings.metrics_prefix, model, engine)
        self.scheduler = Scheduler(
            engine, max_queue=settings.max_queue, watcher=metrics, on_lost=self._end
        )
        front = Front(
            engine, self.scheduler, metrics, model=model,
            max_body_bytes=int(settings.max_body_mb * 2**20),
            request_timeout=settings.request_timeout,
        )  # fmt: skip
        names = None
        if key is None and is_loopback(settings.host):
            names = frozenset({"localhost", "127.0.0.1", "[::1]", settings.host})
        self.app = Guard(front.make_app(), key, names)
        self._model = model
        config = uvicorn.Config(
            self.app, log_config=None, access_log=False, lifespan="off", server_header=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES, http="h11", ws="none",
            proxy_headers=False,
        )  # fmt: skip
        self._http = Http(config, self.scheduler)

    def run_until_told(self, listener: socket.socket) -> None:
        """Serve until SIGTERM, SIGINT, or the engine is lost, which is raised."""
        self.scheduler.start()
        listener.listen()  # who connects now is answered as soon as uvicorn runs
        host, port = listener.getsockname()[:2]
        logger.info("%s at http://%s:%d", self._model, f"[{host}]" if ":" in host else host, port)
        try:
            asyncio.run(self._http.serve(sockets=[listener]))
        finally:
            self.scheduler.stop()
        if self.scheduler.lost is not None:
            raise self.scheduler.lost

    def _end(self, _: SpecDecError) -> None:
        self._http.should_exit = True


class Http(uvicorn.Server):
    """uvicorn; the first signal lets requests end, the second ends them."""

    def __init__(self, config: uvicorn.Config, scheduler: Scheduler) -> None:
        super().__init__(config)
        self._scheduler = scheduler

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal; the process then ends with status 0, since it did as it was told."""
        if self.should_exit:
            logger.warning("ending at once")
            self.force_exit = True
            for task in self.server_state.tasks:
                task.cancel()
            for connection in list(self.server_state.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            return
        logger.info("%s: no more requests; waiting for those that run", signal.Signals(sig).name)
        self.should_exit = True
        self._scheduler.close()
