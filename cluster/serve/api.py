"""The HTTP API: routes, server-sent events, and every failure as an OpenAI error object.

`create_app` is called by the coordinator, which gives it the Service (the supervisor) and runs it under uvicorn in
the same event loop. Bodies are understood by `openai.py`, answers written by `openai_answers.py`, the work between
is `generate.Run`; another dialect adds a pair of such files and one route here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.errors import ClusterError, NotReady, QueueFull
from cluster.serve.chat import ChatModel
from cluster.serve.generate import Engine, Run, TextRequest, check_queue
from cluster.serve.metrics import Metrics
from cluster.serve.middleware import RequireKey, TraceRequests, error_response, read_body, status_error
from cluster.serve.openai import ChatBody, CompletionBody, chat_request, completion_request, parse_body
from cluster.serve.openai_answers import ChatWriter, TextWriter, Writer
from parallel import wire

logger = logging.getLogger("cluster.api")
READ = ["GET", "HEAD"]  # probes often ask by HEAD
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; it marks the log line


class Service(Protocol):
    """What the API asks of the supervisor. `engine`, `ready` and `chat` are None until there is one to ask."""

    @property
    def model(self) -> str: ...
    @property
    def created(self) -> int: ...
    @property
    def chat(self) -> ChatModel | None: ...
    @property
    def engine(self) -> Engine | None: ...
    @property
    def ready(self) -> wire.Ready | None: ...
    @property
    def stats(self) -> wire.Stats: ...

    @property
    def rank_stats(self) -> list[tuple[str, wire.Stats]]: ...
    def health(self) -> dict[str, Any]:
        """Phase, progress, age of the last token and reason, for people and for probes."""
        ...


@dataclass(frozen=True, slots=True)
class Settings:
    """`queue_limit`: requests that may wait beyond the slots. `keepalive_s`: how long a stream may be silent."""

    api_key: str = ""
    cors_origin: tuple[str, ...] = ()
    queue_limit: int = 256
    max_body_bytes: int = 32 << 20
    log_prompts: bool = False
    keepalive_s: float = 10.0


def create_app(service: Service, settings: Settings) -> FastAPI:
    """The ASGI application."""
    app = FastAPI(title="cluster", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    api = _Api(service, settings)
    app.add_exception_handler(ClusterError, _cluster_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_api_route("/v1/chat/completions", api.chat_completions, methods=["POST"])
    app.add_api_route("/v1/completions", api.completions, methods=["POST"])
    app.add_api_route("/v1/models", api.models, methods=READ)
    app.add_api_route("/v1/models/{name:path}", api.one_model, methods=READ)
    app.add_api_route("/health", api.health, methods=READ)
    app.add_api_route("/metrics", api.metrics_text, methods=READ)
    if settings.api_key:
        app.add_middleware(RequireKey, key=settings.api_key)
    if settings.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origin),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(TraceRequests)  # added last: outermost
    return app


class _Api:
    """The routes, over one Service."""

    def __init__(self, service: Service, settings: Settings) -> None:
        self._service = service
        self._settings = settings
        self._metrics = Metrics(lambda: (service.stats, service.ready), lambda: service.rank_stats)

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, ChatBody, chat_request, ChatWriter)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionBody, completion_request, TextWriter)

    async def models(self) -> Response:
        return _json({"object": "list", "data": [self._model_object()]})

    async def one_model(self, name: str) -> Response:
        self._check_model(name)
        return _json(self._model_object())

    async def health(self) -> Response:
        serving = self._service.engine is not None and self._service.ready is not None
        return _json(self._service.health(), 200 if serving else 503)

    async def metrics_text(self) -> Response:
        return Response(self._metrics.render(), media_type=CONTENT_TYPE_LATEST)

    # ------------------------------------------------------------ generation

    async def _generate(
        self,
        request: Request,
        shape: type[Any],
        build: Callable[[Any, ChatModel, wire.Ready], Awaitable[TextRequest]],
        writer_class: type[Writer],
    ) -> Response:
        """From a body to its answer, for any route that continues text. Counts the request once, however it ends."""
        route = request.url.path
        try:
            body = parse_body(await read_body(request, self._settings.max_body_bytes), shape)
            if body.model is not None:
                self._check_model(body.model)
            engine, ready, chat = self._serving()
            check_queue(engine, ready, self._settings.queue_limit)
            text_request = await build(body, chat, ready)
            engine, ready, chat = self._serving()  # it may have been lost while a long prompt was tokenised
            run = Run(engine, ready, chat, text_request, self._settings.queue_limit, self._metrics)
        except ClientDisconnect:
            self._metrics.request_ended(route, "cancelled")
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except ClusterError as error:
            self._metrics.request_ended(route, _outcome(error))
            raise
        if self._settings.log_prompts:
            logger.info("request %s: %s", request.scope["trace"].id, body)
        writer = writer_class(
            self._service.model, chat.vocabulary, include_usage=body.stream and body.stream_options.include_usage
        )
        if body.stream:
            return EventStream(run, writer, self._settings.keepalive_s, lambda: self._ended(request, run))
        return await self._whole(request, run, writer)

    async def _whole(self, request: Request, run: Run, writer: Writer) -> Response:
        try:
            async with _watch_for_disconnect(request.receive, run):
                await run.finish()
            if run.cancelled:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            return Response(writer.whole(run), media_type="application/json")
        finally:
            run.cancel()
            self._ended(request, run)

    def _ended(self, request: Request, run: Run) -> None:
        outcome = "cancelled" if run.cancelled else _outcome(run.error)
        self._metrics.request_ended(request.url.path, outcome, run)
        begin, first = run.timing.begin_s, run.timing.first_token_s
        request.scope["trace"].note = (
            f"{run.prompt_tokens} prompt ({run.cached_tokens} cached) + {run.output_tokens} output tokens"
            f"{f', first after {first - begin:.2f} s' if first else ''}{'' if outcome == 'ok' else f', {outcome}'}"
        )

    def _serving(self) -> tuple[Engine, wire.Ready, ChatModel]:
        service = self._service
        if service.engine is None or service.ready is None or service.chat is None:
            raise NotReady("The model is not ready.", hint="GET /health tells how far it is; try again.")
        return service.engine, service.ready, service.chat

    def _check_model(self, name: str) -> None:
        served = self._service.model
        if name not in (served, served.rstrip("/").rpartition("/")[2], "default", "default_model"):
            error = status_error(
                404, f"There is no model {name[:200]!r} here; {served!r} is served.", "model_not_found"
            )
            error.param = "model"
            raise error

    def _model_object(self) -> dict[str, Any]:
        service = self._service
        body = {"id": service.model, "object": "model", "created": service.created, "owned_by": "cluster"}
        return body if service.ready is None else {**body, "max_model_len": service.ready.context}


class EventStream(Response):
    """A run as server-sent events.

    The headers go out at once; a comment line whenever nothing was sent for `keepalive_s`; tokens that are there
    together leave in one write; a failure becomes the last event. When the client leaves, the run is cancelled.
    """

    def __init__(self, run: Run, writer: Writer, keepalive_s: float, ended: Callable[[], None]) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._run = run
        self._writer = writer
        self._keepalive_s = keepalive_s
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with _watch_for_disconnect(receive, self._run):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for part in self._parts():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._run.cancel()
            self._ended()

    async def _parts(self) -> AsyncIterator[bytes]:
        run, writer = self._run, self._writer
        while not run.settled:
            if not await run.news(self._keepalive_s):
                yield b": waiting\n\n"
            elif part := b"".join(writer.events(choice, answer.take()) for choice, answer in run.fresh()):
                yield part
        if run.error is not None:
            yield writer.failure(run.error)
        elif not run.cancelled:
            yield writer.last(run)


@contextlib.asynccontextmanager
async def _watch_for_disconnect(receive: Receive, run: Run) -> AsyncIterator[None]:
    """Cancels the run when its client leaves. The request's body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        run.cancel()

    task = asyncio.create_task(watch(), name="watch-for-disconnect")
    try:
        yield
    finally:
        task.cancel()


def _outcome(error: ClusterError | None) -> str:
    if error is None:
        return "ok"
    if isinstance(error, QueueFull):
        return "full"
    return "refused" if error.status < 500 else "failed"


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def _cluster_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ClusterError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        failure = status_error(404, f"There is no route {where}.", "unknown_url")
    elif error.status_code == 405:
        failure = status_error(405, f"{where}: the route does not take this method.", "method_not_allowed")
    else:
        failure = status_error(error.status_code, str(error.detail), "http_error")
    return error_response(failure, dict(error.headers or {}))
