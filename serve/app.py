"""Endpoints of OpenAI's, Anthropic's and Ollama's APIs; none waits for a step of the engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    MutableMapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from specdec import Engine, Event, SpecDecError, __version__
from specdec.decode.ranks.processes import list_stopped_ranks
from specdec.decode.requests import Request as InferenceRequest
from specdec.errors import summarize
from specdec.files.reading import parse_json
from specdec.system import logs
from specdec.text.answer_parser import Parser
from specdec.text.call_formats import NO_FORMATS, ChatFormats

from .answers import ChatAnswer, Choice, CompletionAnswer, EndpointAnswer
from .body_reading import check_model, read_body
from .errors import FailedRequest, answer_error, answer_http, explain
from .messages import CountBody, MessagesAnswer, MessagesBody
from .metrics import Metrics
from .ollama import (
    GenerateBody,
    ModelCard,
    OllamaAnswer,
    OllamaChatBody,
    ShowBody,
    describe_version,
)
from .protocol import EVENT_STREAM, EVENTS, BadRequest
from .requests import find_starts, find_tokens, make_requests
from .response_body import ResponseBody
from .responses import ResponseAnswer
from .scheduler import Job, JobScheduler
from .schema import (
    TEMPLATE,
    Body,
    ChatBody,
    CompletionBody,
    ConversationBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
)
from .tokens import TokenTable
from .tools import make_parser, read_calling

logger = logs.get_logger(__name__)
PAGE = Path(__file__).parent / "page.html"
BODY_SECONDS = 60.0  # time limit for receiving a body
# Memory of bodies that are being received, in bodies of the largest size.
MAX_BODIES = 32
LARGE_BODY = 64 * 1024
EMBEDDINGS = ("/v1/embeddings", "/api/embed", "/api/embeddings")  # OpenAI's and Ollama's paths
UNTYPED_PREFIX = "/api/"  # of paths that take a body without its type
BROWSER_HEADERS = ("origin", "sec-fetch-site")
MAX_IGNORED = 100  # parameters without effect that are logged
B = TypeVar("B", bound=Body)
T = TypeVar("T")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class PreparedChoice(NamedTuple):
    """Request of a choice, with the inputs of its answer.

    starts: where the prompt's tokens begin in its text, if their log-probabilities are asked for.
    parser: finds the parts of the answer; None where it has none.
    """

    request: InferenceRequest
    starts: list[int]
    parser: Parser | None


class Notifier:
    """Setter of asyncio's events from the engine's thread, in one call for each step."""

    def __init__(self) -> None:
        self._changed: deque[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = deque()

    def bind(self, changed: asyncio.Event) -> Callable[[], None]:
        """Return a function that sets an event of the running loop, soon."""
        entry = asyncio.get_running_loop(), changed

        def notify() -> None:
            self._changed.append(entry)
            if len(self._changed) == 1:  # for more events the loop is called already
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    entry[0].call_soon_threadsafe(self._set_all)

        return notify

    def _set_all(self) -> None:
        while self._changed:
            self._changed.popleft()[1].set()


class Endpoints:
    """HTTP endpoints over one scheduler."""

    def __init__(
        self, engine: Engine, scheduler: JobScheduler, metrics: Metrics, *, card: ModelCard,
        max_body_bytes: int, request_timeout: float, formats: ChatFormats = NO_FORMATS,
    ) -> None:  # fmt: skip
        self._engine, self._scheduler, self._metrics = engine, scheduler, metrics
        self._card, self._model_name, self._formats = card, card.name, formats
        self._max_body_bytes, self._timeout = max_body_bytes, request_timeout
        self._table = TokenTable(engine.tokenizer)
        self._notifier = Notifier()
        # Reading and tokenizing take a while, so they have threads of their own; large bodies have
        # a second one, so that small bodies do not wait for them.
        self._readers = ThreadPoolExecutor(1, "reader")
        self._large_readers = ThreadPoolExecutor(1, "large-reader")
        self._logged_paths: set[str] = set()  # of parameters without effect
        self._num_body_bytes = 0  # of bodies that are being received and parsed

    def make_app(self) -> Starlette:
        """Return the application, without its access control."""
        routes = [
            Route("/health", self._show_health),
            self._route("/v1/completions", CompletionBody, CompletionAnswer),
            self._route("/v1/chat/completions", ChatBody, ChatAnswer),
            self._route("/v1/responses", ResponseBody, ResponseAnswer),
            self._route("/v1/messages", MessagesBody, MessagesAnswer),
            Route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
            self._route("/api/chat", OllamaChatBody, OllamaAnswer),
            self._route("/api/generate", GenerateBody, OllamaAnswer),
            Route("/api/show", self._show_card, methods=["POST"]),
            Route("/api/tags", self._make_handler(self._card.list_models)),
            Route("/api/ps", self._make_handler(self._card.list_running)),
            Route("/api/version", self._make_handler(describe_version)),
            *(Route(path, self._refuse_embeddings, methods=["POST"]) for path in EMBEDDINGS),
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._show_model),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/metrics", self._show_metrics),
            Route("/version", self._show_version),
        ]
        if PAGE.is_file():
            routes.append(Route("/", self._show_page))
        kinds = (BadRequest, ClientDisconnect, FailedRequest, SpecDecError, Exception)
        handlers = {HTTPException: answer_http} | dict.fromkeys(kinds, answer_error)
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False  # a redirect would go to the host of the Host header
        return app

    def _route(
        self, path: str, body_class: type[GenerationBody], answer_class: type[EndpointAnswer]
    ) -> Route:
        async def generate(http: Request) -> Response:
            return await self._generate(http, body_class, answer_class)

        return Route(path, generate, methods=["POST"])

    def _make_handler(self, describe: Callable[[], dict[str, Any]]) -> Callable[[Request], Any]:
        async def answer(http: Request) -> Response:
            return JSONResponse(describe())

        return answer

    async def _show_card(self, http: Request) -> Response:
        def check_name(body: ShowBody) -> None:
            check_model(body.name, self._model_name)

        await self._read(http, ShowBody, check_name)
        return JSONResponse(self._card.show())

    async def _refuse_embeddings(self, request: Request) -> Response:
        raise BadRequest(
            f"the model {self._model_name!r} writes texts; it makes no embeddings", "model"
        )

    async def _generate(
        self, http: Request, body_class: type[GenerationBody], answer_class: type[EndpointAnswer]
    ) -> Response:
        body, (prepared, ignored) = await self._read(http, body_class, self._prepare)
        self._log_ignored(ignored)
        if not prepared:
            empty_answer = OllamaAnswer(body, self._model_name, [], self._table, ignored)
            return JSONResponse(empty_answer.load())
        most_choices = self._scheduler.max_queue + self._engine.max_batch_size
        if len(prepared) > most_choices:
            raise BadRequest(
                f"{len(prepared)} choices are more than this server ever holds, {most_choices}", "n"
            )
        changed = asyncio.Event()
        notify = self._notifier.bind(changed)
        choices = [
            Choice(
                index, choice.request, notify, has_output=body.max_tokens != 0,
                is_echoed=body.is_echoed, starts=choice.starts, parser=choice.parser,
                hides_reasoning=body.hides_reasoning,
            )
            for index, choice in enumerate(prepared)
        ]  # fmt: skip
        answer = answer_class(body, self._model_name, choices, self._table, ignored)
        self._scheduler.submit(choices)
        deadline = asyncio.get_running_loop().time() + self._timeout
        events = self._follow(answer, changed, deadline)
        if body.stream:
            return EventStream(_format_events(events, answer), answer, self._scheduler)
        following = asyncio.ensure_future(_exhaust(events))
        leaving = asyncio.ensure_future(_wait_for_leave(http.receive))
        try:
            await asyncio.wait({following, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                raise ClientDisconnect
            await following
        finally:
            following.cancel()
            leaving.cancel()
            cancel_all(self._scheduler, choices)
        return JSONResponse(answer.to_json())

    def _log_ignored(self, paths: Sequence[str]) -> None:
        """Log each parameter without effect once, up to a number of them."""
        for path in set(paths) - self._logged_paths:
            if len(self._logged_paths) < MAX_IGNORED:
                self._logged_paths.add(path)
                logger.info("parameter %s has no effect (said once)", ascii(path)[1:-1])

    def _prepare(self, body: GenerationBody) -> tuple[list[PreparedChoice], list[str]]:
        """Return a body's choices, and the paths of its parameters that have no effect."""
        if body.asks_for_load:
            return [], body.list_ignored()
        formats, calling = NO_FORMATS, None
        if isinstance(body, ConversationBody):
            formats = self._formats
            calling = read_calling(body, formats)
        has_starts = body.is_echoed and body.num_top_logprobs is not None
        requests, ignored = make_requests(self._engine, body, formats, calling)
        prepared = [
            PreparedChoice(
                request,
                find_starts(self._engine, request) if has_starts else [],
                make_parser(calling, formats, request),
            )
            for request in requests
        ]
        if (
            isinstance(body, ResponseBody)
            and body.num_top_logprobs is not None
            and prepared[0].parser is not None
        ):
            raise BadRequest(
                "log-probabilities are only told of answers without tools and reasoning",
                "top_logprobs" if body.top_logprobs is not None else "include",
            )
        return prepared, ignored

    async def _follow(
        self, answer: EndpointAnswer, changed: asyncio.Event, deadline: float
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of an answer as they come; raise the error that ended a request."""
        loop = asyncio.get_running_loop()
        timer = loop.call_at(deadline, changed.set)
        try:
            while not answer.is_over:
                await changed.wait()
                if loop.time() >= deadline:
                    raise BadRequest(
                        f"the request took more than {self._timeout:g} seconds", status=504,
                        code="timeout",
                    )  # fmt: skip
                changed.clear()
                for chunk in _take_chunks(answer):
                    yield chunk
        finally:
            timer.cancel()

    async def _count_tokens(self, http: Request) -> Response:
        _, ids = await self._read(http, CountBody, self._find_chat_tokens)
        return JSONResponse({"input_tokens": len(ids)})

    async def _tokenize(self, http: Request) -> Response:
        _, ids = await self._read(http, TokenizeBody, self._find_tokens)
        return JSONResponse(
            {"count": len(ids), "max_model_len": self._engine.max_seq_len, "tokens": ids}
        )

    def _find_tokens(self, body: TokenizeBody) -> list[int]:
        if (body.messages is None) == (body.prompt is None):
            raise BadRequest("give exactly one of prompt and messages", "prompt")
        if body.messages is not None:
            return self._find_chat_tokens(body.make_chat())
        for name in (*body.list_given(TEMPLATE), "tools"):
            if getattr(body, name):
                raise BadRequest(f"{name} has no place beside prompt: give messages", name)
        has_special = body.add_special_tokens is not False
        encoding = self._engine.tokenizer(
            body.prompt, add_special_tokens=has_special, verbose=False
        )
        return list(encoding["input_ids"])

    def _find_chat_tokens(self, body: ConversationBody) -> list[int]:
        calling = read_calling(body, self._formats)
        return find_tokens(self._engine, body, self._formats, calling)

    async def _detokenize(self, http: Request) -> Response:
        _, text = await self._read(http, DetokenizeBody, self._find_text)
        return JSONResponse({"prompt": text})

    def _find_text(self, body: DetokenizeBody) -> str:
        tokenizer, tokens = self._engine.tokenizer, body.tokens or []
        try:
            pieces = tokenizer.convert_ids_to_tokens(tokens)
            text = str(tokenizer.decode(tokens))
        except Exception as error:  # noqa: BLE001 - tokenizers raise any error for unknown ids
            raise BadRequest(f"the tokenizer cannot decode: {summarize(error)}", "tokens") from None
        if None in pieces:
            token = tokens[pieces.index(None)]
            raise BadRequest(f"the tokenizer has no token {token}", "tokens")
        return text

    async def _list_models(self, http: Request) -> Response:
        paging = {"first_id": self._model_name, "last_id": self._model_name, "has_more": False}
        return JSONResponse({"object": "list", "data": [self._describe_model()], **paging})

    async def _show_model(self, http: Request) -> Response:
        check_model(http.path_params["name"], self._model_name)
        return JSONResponse(self._describe_model())

    def _describe_model(self) -> dict[str, Any]:
        return {
            "id": self._model_name, "object": "model", "created": 0, "owned_by": "specdec",
            "type": "model", "display_name": self._model_name, "created_at": "1970-01-01T00:00:00Z",
            "max_model_len": self._engine.max_seq_len,
            "specdec": self._engine.describe() | {"is_chat": self._formats.use.marks_turns},
        }  # fmt: skip

    async def _show_health(self, http: Request) -> Response:
        if self._scheduler.is_ready:
            return JSONResponse({"status": "ok"})
        reasons = list_stopped_ranks() or ["the server is not ready, or about to end"]
        raise BadRequest(", ".join(reasons), status=503)

    async def _show_metrics(self, http: Request) -> Response:
        scheduler = self._scheduler
        text = self._metrics.render(scheduler.running, scheduler.num_waiting)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _show_version(self, http: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def _show_page(self, http: Request) -> Response:
        policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline';"
        policy += " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
        policy += " frame-ancestors 'none'"
        page = PAGE.read_text(encoding="utf-8")
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    async def _read(
        self, http: Request, body_class: type[B], prepare: Callable[[B], T]
    ) -> tuple[B, T]:
        """Read and check a body in another thread; return it and the result of `prepare`."""
        content = bytearray()

        def read() -> tuple[B, T]:
            try:
                document = parse_json(bytes(content))
            except ValueError as error:
                raise BadRequest(f"the body is not JSON: {summarize(error)}") from None
            body = read_body(body_class, document)
            check_model(body.model, self._model_name)
            return body, prepare(body)

        try:
            await asyncio.wait_for(self._receive(http, content), min(BODY_SECONDS, self._timeout))
            readers = self._large_readers if len(content) > LARGE_BODY else self._readers
            return await asyncio.get_running_loop().run_in_executor(readers, read)
        except asyncio.TimeoutError:
            raise BadRequest("the body did not come in time", status=408) from None
        finally:
            self._num_body_bytes -= len(content)

    async def _receive(self, http: Request, content: bytearray) -> None:
        """Receive a JSON body within the limits of size and time."""
        _check_type(http)
        encoding = http.headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity":
            raise BadRequest(f"Content-Encoding {encoding[:100]!r} is not taken", status=415)
        limit = self._max_body_bytes
        too_large = BadRequest(f"the body has more than {limit} bytes", status=413)
        length = http.headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > limit):
            raise too_large
        async for chunk in http.stream():
            content.extend(chunk)
            self._num_body_bytes += len(chunk)
            if len(content) > limit:
                raise too_large
            if self._num_body_bytes > MAX_BODIES * limit:
                raise BadRequest("too many bodies are being sent; try again", status=429)


def _check_type(http: Request) -> None:
    """Raise BadRequest for a body that another site's page may have sent without being allowed to.

    Browsers send bodies of some types, and of none, without asking the server first. With each they
    send the page's Origin, which may be "null", and newer ones Sec-Fetch-Site. Some of Ollama's
    clients, which are no browsers, send no type.
    """
    content_type = http.headers.get("content-type", "").split(";")[0].strip().lower()
    is_browser = any(name in http.headers for name in BROWSER_HEADERS)
    if content_type == "application/json":
        return
    if is_browser or not http.scope["path"].startswith(UNTYPED_PREFIX):
        raise BadRequest(
            f"Content-Type is {content_type[:100]!r}, not 'application/json'", status=415
        )  # fmt: skip


class EventStream(StreamingResponse):
    """Answer in parts, until it ends or the client leaves; a slow client gets fewer."""

    def __init__(
        self, events: AsyncIterator[bytes], answer: EndpointAnswer, scheduler: JobScheduler
    ) -> None:
        headers = {"Cache-Control": "no-cache"}
        super().__init__(events, media_type=answer.stream_type, headers=headers)
        self._jobs, self._scheduler = answer.choices, scheduler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[EVENTS] = self.media_type == EVENT_STREAM
        try:
            with contextlib.suppress(OSError):  # the client left during a write
                await super().__call__(scope, receive, send)
        finally:
            cancel_all(self._scheduler, self._jobs)


def cancel_all(scheduler: JobScheduler, jobs: Sequence[Job]) -> None:
    """End the requests that are not over."""
    for job in jobs:
        if not job.is_over:
            scheduler.cancel(job)


async def _wait_for_leave(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _take_chunks(answer: EndpointAnswer) -> Iterator[dict[str, Any]]:
    """Yield the chunks of the events that have come since the last call."""
    for choice in answer.choices:
        if choice.finish_reason is None and (events := _take(choice)):
            yield from answer.add(choice, events)


def _take(job: Job) -> list[Event]:
    try:
        return job.take()
    except Exception as error:  # noqa: BLE001 - the answer reports any error
        raise FailedRequest(error) from None


async def _exhaust(events: AsyncIterator[Any]) -> None:
    async for _ in events:
        pass


async def _format_events(
    events: AsyncIterator[dict[str, Any]], answer: EndpointAnswer
) -> AsyncIterator[bytes]:
    """Yield chunks as the answer's stream has them; an error in between is one, too."""
    for chunk in answer.open():
        yield answer.encode(chunk)
    try:
        async for chunk in events:
            yield answer.encode(chunk)
        for chunk in answer.close():
            yield answer.encode(chunk)
    except Exception as error:  # the status line is sent already
        if not isinstance(error, (FailedRequest, BadRequest)):
            logger.exception("a stream failed")
        yield answer.encode(answer.fail(explain(error)))
    yield answer.ending
