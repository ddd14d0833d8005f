"""uvicorn's HTTP/1.1 protocol with a bound on headers that never end, and error objects for what is no HTTP.

ASGI middleware sees a request when all its headers have come, so neither can be done there. `coordinator.py` hands the
class to uvicorn.
"""

from __future__ import annotations

import http

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cluster.errors import BadRequest
from cluster.serve.middleware import MAX_HEADER_BYTES, error_response, headers_too_large, new_request_id, status_error

MAX_HEAD_BYTES = 2 * MAX_HEADER_BYTES  # with the path and what stands between; the middleware counts what is complete


class HttpProtocol(HttpToolsProtocol):
    """One connection. Refuses with status 400 in the OpenAI form, then closes."""

    _head_bytes: int | None = None  # received of a request whose headers are not complete; None between

    def data_received(self, data: bytes) -> None:
        cycle = self.cycle
        idle = cycle is None or (cycle.response_complete and not cycle.more_body)
        all_head = idle or self._head_bytes is not None  # else `data` begins with the body of the request before
        super().data_received(data)
        if all_head and self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(headers_too_large())

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what its parser does not take."""
        self._refuse(status_error(400, msg, "invalid_http"))

    def _refuse(self, error: BadRequest) -> None:
        self._head_bytes = None
        if self.cycle is None or self.cycle.response_complete:  # else it would end up in the middle of an answer
            response = error_response(error, {"connection": "close", "x-request-id": new_request_id()})
            lines = [b"HTTP/1.1 %d %s" % (error.status, http.HTTPStatus(error.status).phrase.encode())]
            lines += [b"%s: %s" % header for header in (*self.server_state.default_headers, *response.raw_headers)]
            self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        self.transport.close()
