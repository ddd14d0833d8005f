"""What wraps every route, as pure ASGI: request ids and the log line, the key, and errors as OpenAI objects.

Starlette's BaseHTTPMiddleware would put a queue between a stream and its client. Installed by `api.py`.
"""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.errors import BadRequest, ClusterError
from cluster.serve.openai_answers import error_body

logger = logging.getLogger("cluster.api")
MAX_HEADER_BYTES = 64 << 10
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_QUIET = ("/health", "/metrics")  # polled all the time


@dataclass(slots=True)
class Trace:
    """What is known of one HTTP request, for its log line. In `scope["trace"]`."""

    id: str
    status: int = 0
    note: str = ""


def error_response(error: ClusterError, headers: dict[str, str] | None = None) -> Response:
    """An expected failure as a response with its status; Retry-After where coming back helps."""
    headers = dict(headers or {})
    if (retry := getattr(error, "retry_after_s", None)) is not None:
        headers["retry-after"] = str(retry)
    return Response(msgspec.json.encode(error_body(error)), error.status, headers, "application/json")


def status_error(status: int, message: str, code: str) -> BadRequest:
    """A failure that is about HTTP itself."""
    error = BadRequest(message, code=code)
    error.status = status
    return error


def new_request_id() -> str:
    """An x-request-id for a request that brought none."""
    return f"req_{uuid.uuid4().hex}"


def headers_too_large() -> BadRequest:
    """What a request with more than MAX_HEADER_BYTES of headers gets."""
    return status_error(400, "The request's headers are too large.", "headers_too_large")


class TraceRequests:
    """Outermost: an id on every response, one log line, and a 500 object where a bug got through."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        trace = scope["trace"] = Trace(_request_id(scope))
        begin = time.monotonic()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                trace.status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", trace.id.encode())]
            await send(message)

        try:
            if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
                await error_response(headers_too_large())(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s failed", trace.id)
            if trace.status:
                raise  # the response has begun: only closing the connection tells the client
            await error_response(ClusterError("Internal error.", hint="The server's log has the details."))(
                scope, receive, send_with_id
            )
        finally:
            level = logging.DEBUG if scope["path"] in _QUIET else logging.INFO
            if logger.isEnabledFor(level):
                logger.log(
                    level,
                    "%s %s %d %s | %.2f s%s",
                    scope["method"],
                    scope["path"],
                    trace.status,
                    trace.id,
                    time.monotonic() - begin,
                    f", {trace.note}" if trace.note else "",
                )


class RequireKey:
    """Refuses requests without the key, except for /health. Compares in constant time."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health" or self._shown(scope):
            await self._app(scope, receive, send)
            return
        error = status_error(401, "The API key is missing or wrong.", "invalid_api_key")
        error.hint = "Send it as `Authorization: Bearer KEY`."
        await error_response(error, {"www-authenticate": "Bearer"})(scope, receive, send)

    def _shown(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        shown = bearer.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        return hmac.compare_digest(shown, self._key)


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The request's body. Raises a 413 when it is longer than `limit_bytes`, before it is held in memory."""
    too_large = status_error(413, f"The body is larger than {limit_bytes} bytes.", "body_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced[:20]) > limit_bytes:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit_bytes:
            raise too_large
    return bytes(body)


def _request_id(scope: Scope) -> str:
    headers: dict[bytes, Any] = dict(scope["headers"])
    theirs = headers.get(b"x-request-id", b"").decode("latin-1")
    return theirs if _SANE_ID.fullmatch(theirs) else new_request_id()
