"""Process of the server: an engine, the thread that runs it, and uvicorn, until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import uvicorn

from specdec import Engine, SpecDecError, UsageError
from specdec.decode.drafters import read_drafting
from specdec.decode.ranks.processes import end_ranks, leave_signals
from specdec.decode.settings import DecodeSettings
from specdec.engine.layout import read_engine_config
from specdec.errors import summarize
from specdec.files.session_files import SessionFolder
from specdec.options import get_flags
from specdec.system import logs
from specdec.system.http_client import SERVER_KEY_VARIABLE, read_key
from specdec.text.call_probe import choose_formats

from .access import MAX_HEADER_BYTES, AccessControl
from .app import Endpoints
from .cors import Cors, read_origins
from .metrics import Metrics
from .models import hold_engines, place_models
from .ollama import ModelCard
from .protocol import Connection
from .scheduler import JobScheduler
from .settings import DEFAULT_SESSION_GB, ServeSettings

logger = logs.get_logger(__name__)
SIGNALS = (signal.SIGTERM, signal.SIGINT)
SWITCH_SECONDS = 0.0005  # switch interval of threads; Python's default is 0.005


def serve(settings: ServeSettings) -> None:
    """Load the engine and serve until a signal; SpecDecError where either fails."""
    settings = place_models(settings)
    # Errors of options are raised before the engine is loaded.
    key = read_key(settings.api_key_file)
    check_address(settings, key)
    origins = read_origins(
        settings.cors_origin, has_key=key is not None, is_anonymous=settings.allow_anonymous
    )
    read_drafting(settings, None)
    with keep_signals(), open_socket(settings) as listener, contextlib.ExitStack() as stack:
        settings = hold_engines(stack, settings)
        engine = stack.enter_context(load(settings))
        EngineServer(settings, engine, key, origins).run_until_signal(listener)
        end_ranks(is_done=True)


@contextlib.contextmanager
def keep_signals() -> Iterator[None]:
    """Restore the handlers of signals, which a server takes from its first request to its end."""
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in SIGNALS if is_main}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_address(settings: ServeSettings, key: str | None) -> None:
    """Raise UsageError for a server that all could use without a key, or that has one in vain."""
    if key is not None and settings.allow_anonymous:
        raise UsageError(
            "--allow-anonymous beside a key, which every client has to send",
            f"leave out --allow-anonymous, or --api-key-file and {SERVER_KEY_VARIABLE}",
        )
    if key is None and not settings.allow_anonymous and not is_loopback(settings.host):
        raise UsageError(
            f"--host {settings.host} can be reached from elsewhere, and there is no key",
            f"give --api-key-file or {SERVER_KEY_VARIABLE}, or --allow-anonymous if all may use it",
        )


@contextlib.contextmanager
def open_socket(settings: ServeSettings) -> Iterator[socket.socket]:
    """Take the port before the engine is loaded."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # By its protocol asyncio knows that it is TCP, and turns Nagle's algorithm off. Left on, that
    # holds events and bodies back for 40 ms, until the client has acknowledged what came before.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
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
    names = [name for name in get_flags(DecodeSettings) if hasattr(settings, name)]
    values: dict[str, Any] = {name: getattr(settings, name) for name in names}
    limits: dict[str, Any] = {
        "max_batch_size": settings.max_batch_size, "max_seq_len": settings.max_seq_len,
        "prompt_chunk": settings.prompt_chunk or "auto",
    }  # fmt: skip
    sessions = open_sessions(settings)
    if sessions is not None and values["suffix_share_requests"] and not values["suffix_cache"]:
        # Texts of another engine are no error here: each has a file of its own.
        name = read_engine_config(settings.engine_dir).build_id
        values["suffix_cache"] = sessions.folder / f"{name}.texts"
    try:
        engine = Engine.open(
            DecodeSettings(kv_cache_enable_block_reuse=True, **values), **limits,
            session_folder=sessions,
        )  # fmt: skip
    except BaseException:
        if sessions is not None:
            sessions.close()
        raise
    if engine.tokenizer is None:
        engine.close()
        raise SpecDecError(
            "a server needs a tokenizer, and the engine holds none",
            "give the base model's folder as --tokenizer-dir, here or to specdec-build",
        )
    return engine


def open_sessions(settings: ServeSettings) -> SessionFolder | None:
    """Take the folder of sessions, if there is one, before the engine is loaded."""
    if settings.session_dir is None:
        if settings.max_session_gb is not None:
            raise UsageError("--max-session-gb without --session-dir", "give both, or leave it out")
        return None
    max_gb = settings.max_session_gb or DEFAULT_SESSION_GB
    return SessionFolder(settings.session_dir, int(max_gb * 2**30))


class EngineServer:
    """Server of one engine."""

    def __init__(
        self, settings: ServeSettings, engine: Engine, key: str | None, origins: Sequence[str]
    ) -> None:
        """Make the server; origins: of the pages that may call it, checked."""
        self._settings = settings
        model = settings.served_model_name or settings.engine_dir.resolve().name
        metrics = self._metrics = Metrics(settings.metrics_prefix, model, engine)
        self.scheduler = JobScheduler(
            engine, max_queue=settings.max_queue, watcher=metrics, on_lost=self._end
        )
        formats = choose_formats(
            settings.tool_call_parser, settings.reasoning_parser, engine.tokenizer
        )
        abilities = ["completion", *(["tools"] if formats.can_call else []),
                     *(["thinking"] if formats.reasoning is not None else [])]  # fmt: skip
        endpoints = Endpoints(
            engine, self.scheduler, metrics, max_body_bytes=int(settings.max_body_mb * 2**20),
            card=ModelCard(model, settings.engine_dir, engine, abilities),
            request_timeout=settings.request_timeout, formats=formats,
        )  # fmt: skip
        names = None
        if key is None and is_loopback(settings.host):
            names = frozenset({"localhost", "127.0.0.1", "[::1]", settings.host})
        self.app = AccessControl(endpoints.make_app(), key, names, Cors(origins))
        self._model = model
        config = uvicorn.Config(
            self.app, log_config=None, access_log=False, lifespan="off", server_header=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES, http=Connection, ws="none",
            proxy_headers=False,
        )  # fmt: skip
        self._http = Http(config, self.scheduler)

    def run_until_signal(self, listener: socket.socket) -> None:
        """Serve until SIGTERM, SIGINT, or the engine is lost, which is raised."""
        self.scheduler.start()
        self._metrics.note_start()
        leave_signals()  # a first signal lets requests end, which needs the ranks
        self._http.take_signals()
        listener.listen()  # connections from now on are answered as soon as uvicorn runs
        host, port = listener.getsockname()[:2]
        logger.info("%s at http://%s:%d", self._model, f"[{host}]" if ":" in host else host, port)
        # The engine's thread lets go of the interpreter in every kernel, and must get it back soon.
        switch_seconds = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            asyncio.run(self._http.serve(sockets=[listener]))
        finally:
            sys.setswitchinterval(switch_seconds)
            self.scheduler.stop()
        if self.scheduler.lost_error is not None:
            raise self.scheduler.lost_error

    def _end(self, _: SpecDecError) -> None:
        self._http.should_exit = True


class Http(uvicorn.Server):
    """uvicorn with two signals: the first lets requests end, the second ends them."""

    _loop: asyncio.AbstractEventLoop

    def __init__(self, config: uvicorn.Config, scheduler: JobScheduler) -> None:
        super().__init__(config)
        self._scheduler = scheduler

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `should_exit`."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `take_signals`: uvicorn would give them back before the engine ends."""
        yield

    def take_signals(self) -> None:
        """Take all signals from now on, where this is the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self.handle_exit)
            hangup = getattr(signal, "SIGHUP", None)  # which Windows has not
            if hangup is not None and callable(signal.getsignal(hangup)):  # nohup ignores it
                signal.signal(hangup, self.handle_exit)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal; the process then ends with status 0, as the signal asked."""
        if not self.should_exit:
            name = signal.Signals(sig).name
            logger.info("%s: no more requests; waiting for those that run", name)
            self.should_exit = True
            self._scheduler.close()
        elif not self.force_exit:
            logger.warning("ending at once")
            self.force_exit = True
            self._scheduler.hurry()
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._end_requests)

    def _end_requests(self) -> None:
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        for task in self.server_state.tasks:
            task.cancel()
