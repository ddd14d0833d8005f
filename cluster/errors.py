"""Expected failures, as values: what was seen, what to type next, the exit code and the HTTP status.

Raised where the fact is known, printed only by `cli.py`, turned into JSON only by `api.py`. Every class
here has its section in docs/failures.md; a test keeps that list complete.
"""

from __future__ import annotations


class ClusterError(Exception):
    """An expected failure. `message` names the host, file or field; `hint` is what to type or plug next."""

    exit_code = 1
    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class BadRequest(ClusterError):
    """A request that can never be served as it is. `param` names the field."""

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.param = param
        self.code = code


class QueueFull(ClusterError):
    """More requests wait than the queue holds; the client should come back after `retry_after_s` seconds."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"
    retry_after_s = 5


class NotReady(ClusterError):
    """The engine is still loading, or is being relaunched; the client should come back."""

    status = 503
    type = "server_error"
    code = "not_ready"
    retry_after_s = 5


class EngineLost(ClusterError):
    """The engine process died or stopped answering while the request was open."""

    status = 503
    type = "server_error"
    code = "engine_lost"
    retry_after_s = 5


class StepFailed(ClusterError):
    """A step of the engine raised; the requests in it failed, the engine goes on."""

    status = 500
    type = "server_error"
    code = "step_failed"
