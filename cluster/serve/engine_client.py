"""The coordinator's asyncio connection to rank 0: submit, abort, token streams, and word of a lost engine.

It knows nothing of text or HTTP. `supervise.py` opens and closes it; `api.py` submits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from importlib.metadata import version
from pathlib import Path

import msgspec

from cluster.errors import BadRequest, ClusterError, EngineLost, StepFailed
from parallel import wire

VERSION = version("cluster")


class Generation:
    """One open request: iterate it for its `wire.Started` and `wire.Token` events, in order.

    Iteration ends after the last token of all samples and raises ClusterError when the request or the engine
    failed. Always call `cancel` when done with it (it costs nothing when the request has ended).
    """

    def __init__(self, client: EngineClient, request: wire.Submit) -> None:
        self.id = request.id
        self._client = client
        self._open = request.n
        self._stopped: set[int] = set()
        self._events: asyncio.Queue[wire.Started | wire.Token | ClusterError] = asyncio.Queue()

    def stop(self, index: int, keep: int) -> None:
        """End sample `index`; only its first `keep` tokens count. No event of that sample follows."""
        if index not in self._stopped:
            self._stopped.add(index)
            self._open -= 1
            self._client._send(wire.Abort(self.id, index, keep))
            if not self._open:
                self._client._forget(self.id)

    def cancel(self) -> None:
        """Free everything this request holds in the engine, at the engine's next step."""
        if self._open:
            self._open = 0
            self._client._send(wire.Abort(self.id))
            self._client._forget(self.id)

    def push(self, event: wire.Started | wire.Token | ClusterError) -> None:
        """Called by the client's reader for each event of this request."""
        self._events.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[wire.Started | wire.Token]:
        while self._open:
            event = await self._events.get()
            if isinstance(event, ClusterError):
                self._open = 0
                self._client._forget(self.id)
                raise event
            if isinstance(event, wire.Token):
                if event.index in self._stopped:
                    continue
                if event.finish:
                    self._stopped.add(event.index)
                    self._open -= 1
                    if not self._open:
                        self._client._forget(self.id)
            yield event


class EngineClient:
    """A connection to rank 0 after its Join was accepted.

    `on_message` receives what concerns the engine as a whole: Progress, Ready, Beat, Failed. `lost` is set to the
    reason when the connection ends; open requests then raise EngineLost.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_message: Callable[[wire.Message], None],
        host: str = "this machine",
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._on_message = on_message
        self._host = host
        self._next_id = 1
        self._open: dict[int, Generation] = {}
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._read(), name="engine-client")

    @classmethod
    async def connect(
        cls,
        host: str,
        port: int,
        secret_file: Path,
        on_message: Callable[[wire.Message], None],
        host_name: str = "this machine",
    ) -> EngineClient:
        """Join rank 0 at `host`:`port`. Raises OSError while nobody listens there, EngineLost when it refuses us."""
        secret = secret_file.read_text().strip()
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(wire.encode(wire.Join(secret, "coordinator", VERSION)))
        try:
            first = await wire.read_frame_async(reader)
        except BaseException:  # cancelled while waiting, too
            writer.close()
            raise
        if isinstance(first, wire.Progress):
            on_message(first)
            return cls(reader, writer, on_message, host_name)
        writer.close()
        reason = first.reason if isinstance(first, wire.Refused) else "it closed the connection"
        raise EngineLost(f"The engine on {host_name} refused the coordinator: {reason}.", hint="Run `cluster down`.")

    @property
    def open_requests(self) -> int:
        """Requests that have not ended: queued, in prefill or decoding."""
        return len(self._open)

    def submit(self, request: wire.Submit) -> Generation:
        """Send one request, under an id of its own. Raises EngineLost when the engine is gone."""
        if self.lost.done():
            raise EngineLost(self.lost.result(), hint="`cluster status` shows whether it is being restarted.")
        request = msgspec.structs.replace(request, id=self._next_id)
        self._next_id += 1
        generation = self._open[request.id] = Generation(self, request)
        self._send(request)
        return generation

    async def close(self, reason: str = "the engine was stopped") -> None:
        """Ask the rank to leave and close the connection; requests still open end with `reason`."""
        self._send(wire.Leave())
        self._end(reason)
        self._task.cancel()
        self._writer.close()

    def _send(self, message: wire.Message) -> None:
        if not self._writer.is_closing():
            self._writer.write(wire.encode(message))

    def _forget(self, id: int) -> None:
        self._open.pop(id, None)

    def _end(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)
        for generation in list(self._open.values()):
            generation.push(
                EngineLost(f"The engine on {self._host} was lost: {reason}.", hint="Send the request again.")
            )

    async def _read(self) -> None:
        try:
            while (message := await wire.read_frame_async(self._reader)) is not None:
                self._dispatch(message)
            self._end("its connection closed")
        except (OSError, wire.WireError) as error:
            self._end(str(error))

    def _dispatch(self, message: wire.Message) -> None:
        if isinstance(message, wire.Tokens):
            for token in message.rows:
                if (generation := self._open.get(token.id)) is not None:
                    generation.push(token)
        elif isinstance(message, wire.Started):
            if (generation := self._open.get(message.id)) is not None:
                generation.push(message)
        elif isinstance(message, wire.RequestFailed):
            if (generation := self._open.get(message.id)) is not None:
                failure = BadRequest(message.message) if message.kind == "bad" else StepFailed(message.message)
                generation.push(failure)
        else:
            self._on_message(message)
