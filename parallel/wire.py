"""Everything that crosses a process boundary: typed messages (msgspec) in length-framed MessagePack.

The coordinator and rank 0 exchange requests and tokens; rank 0 sends Steps to the other ranks. The same
framing serves both. No pickle. Imported by `cluster` and `parallel`; imports neither.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import zlib

import msgspec

MAX_FRAME_BYTES = 256 << 20  # a 1M-token prompt is 5 MB; more than this is a corrupt stream
_HEADER = struct.Struct("!I")
HEADER_BYTES = _HEADER.size


class Message(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Base of every message: a tagged array on the wire."""


# ---------------------------------------------------------------- the launch


class RankSpec(msgspec.Struct, frozen=True):
    """One rank of several: its host as the user calls it, and its layers [start, stop) in a pipeline.

    `model` and `secret_file` are set where that host keeps them elsewhere than the plan says.
    """

    host: str
    start: int = 0
    stop: int = 0
    model: str = ""
    secret_file: str = ""


class RankPlan(msgspec.Struct, frozen=True):
    """What a rank is told on its command line (`python -m parallel.rank JSON`). Sizes in bytes; 0 lets the rank choose.

    `model` is a local folder in MLX format. Rank 0 listens for the coordinator and the other ranks on `host`:`port`;
    who joins shows the secret in `secret_file` (mode 0600; the secret itself is never in argv). `parent` is the process
    whose end ends the rank when no coordinator is connected; 0 where there is none on this machine.

    With `ranks`, all ranks get this same plan and find their place in it by MLX_RANK; `strategy` is then "pipeline" or
    "tensor", and `backend` the one of MLX that joins them. `launch` makes a launch unlike any other; `owner` says who
    started it.
    """

    model: str
    host: str
    port: int
    secret_file: str
    parent: int = 0
    context: int = 0
    slots: int = 32
    kv_limit_bytes: int = 0
    prefix_bytes: int = 0
    chunk_tokens: int = 2048
    wired_limit: str = "auto"  # "auto" as mlx-lm sets it, or "off"
    launch: str = ""
    owner: str = ""
    strategy: str = "single"
    backend: str = ""
    ranks: list[RankSpec] = []
    check_tokens: int = 0  # several ranks only: so long a prompt, whole and in chunks, is compared before Ready

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return max(1, len(self.ranks))

    def of(self, rank: int) -> RankSpec:
        """The place of `rank`, with everything filled in that it shares with the others."""
        spec = self.ranks[rank] if self.ranks else RankSpec("this machine")
        return msgspec.structs.replace(
            spec, model=spec.model or self.model, secret_file=spec.secret_file or self.secret_file
        )


# ---------------------------------------------------------------- coordinator -> rank 0


class Sampling(msgspec.Struct, array_like=True, frozen=True):
    """How one row chooses its tokens. Temperature 0 is greedy.

    `seed` None lets the engine draw one. `logprobs` is -1 for none, else how many alternatives (0-20) go with the
    chosen token's log-probability. `repetition` counts prompt and output, `presence` and `frequency` the output.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: dict[int, float] = {}
    seed: int | None = None
    logprobs: int = -1


class Submit(Message, frozen=True):
    """One request: `n` samples of at most `max_tokens` tokens after `prompt`, each ended by any of `stop_ids`."""

    id: int
    prompt: list[int]
    max_tokens: int
    n: int = 1
    sampling: Sampling = Sampling()
    stop_ids: list[int] = []
    needs_host: bool = False


class Abort(Message, frozen=True):
    """End a request (`index` -1) or one of its samples.

    `keep` is the number of output tokens that count: a stop string was found in the text, what came after it is
    neither answer nor reusable prefix. None: the client is gone.
    """

    id: int
    index: int = -1
    keep: int | None = None


class Leave(Message, frozen=True):
    """The coordinator asks the rank to finish and exit."""


# ---------------------------------------------------------------- rank 0 -> coordinator


class Progress(Message, frozen=True):
    """How far start-up of `rank` has come; `done` of `total` in bytes or steps.

    `phase`: starting, joining, connecting, loading, warming, checking.
    """

    rank: int
    phase: str
    done: int = 0
    total: int = 0


class Ready(Message, frozen=True):
    """The engine takes requests. Bytes are per rank; `kv_tokens` is the longest single sequence within the KV limit."""

    rank: int
    pid: int
    model: str
    context: int
    slots: int
    kv_limit_bytes: int
    kv_tokens: int
    weights_bytes: int
    prefix_reuse: str  # "any", "boundary" or "off"
    facts: list[Fact] = []  # of every rank, in order


class Failed(Message, frozen=True):
    """Start-up or the engine as a whole failed; `message` is for a person."""

    rank: int
    message: str


class Joined(Message, frozen=True):
    """Rank `rank` is there: its process by pid and start time (seconds since the epoch), and what it runs on."""

    rank: int
    pid: int
    started: float
    versions: dict[str, str]


class Lost(Message, frozen=True):
    """Rank 0 has lost the connection of `rank`."""

    rank: int
    reason: str


class HungUp(Message, frozen=True):
    """The ssh session that `rank` was started in has ended; the rank lives on."""

    rank: int


class Started(Message, frozen=True):
    """A request left the queue: its prefill begins, `cached` prompt tokens come from the prefix cache."""

    id: int
    cached: int


class Token(msgspec.Struct, array_like=True, frozen=True):
    """One sampled token of sample `index` of request `id`.

    `top` is None without logprobs, else [(token, logprob), ...]: the chosen token first, then the alternatives.
    `finish`: "" goes on, "stop" (a stop id; `token` is that id and is not part of the answer), "length".
    """

    id: int
    index: int
    token: int
    finish: str = ""
    top: list[tuple[int, float]] | None = None


class Tokens(Message, frozen=True):
    """All tokens that one step made."""

    step: int
    rows: list[Token]


class RequestFailed(Message, frozen=True):
    """One request failed; the engine goes on. `kind`: "step" (an exception in its step) or "bad" (can never fit)."""

    id: int
    message: str
    kind: str = "step"


class Beat(Message, frozen=True):
    """Sent every second by a thread of each rank, so it also comes while the main thread is busy or stuck.

    `phase` is what the main thread does; `step` the oldest unfinished step, `since_s` how long it has run (0 when idle)
    and `expected_s` how long rank 0 had thought it would. `digest` folds in all steps up to `last`, on all ranks alike.
    """

    rank: int
    phase: str
    step: int
    since_s: float
    stats: Stats
    expected_s: float = 0.0
    last: int = 0
    digest: int = 0


class Stats(msgspec.Struct, array_like=True, frozen=True):
    """Counters and gauges of the engine since its start; sizes in bytes, times in seconds."""

    waiting: int = 0
    prefilling: int = 0
    running: int = 0
    buckets: int = 0
    kv_bytes: int = 0
    prefix_bytes: int = 0
    prefix_entries: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    step_s: float = 0.0
    preempted: int = 0
    active_bytes: int = 0
    peak_bytes: int = 0
    busy_s: float = 0.0  # of this rank, in steps; the rest of the time it waited for others or for work


# ---------------------------------------------------------------- rank 0 -> every rank: what to execute


class Order(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A change to the KV cache that goes before a step, decided by rank 0 and executed by every rank in order."""


class Open(Order, frozen=True):
    """Sequence `seq` gets a cache of its own: the first `length` tokens of prefix entry `entry`, or empty (-1)."""

    seq: int
    entry: int = -1
    length: int = 0


class Keep(Order, frozen=True):
    """The cache of `seq` as it is now becomes prefix entry `entry`; `seq` goes on with it."""

    seq: int
    entry: int


class NewRow(msgspec.Struct, array_like=True, frozen=True):
    """A row that enters a bucket with the cache that belongs to `source` (shared by the n samples of a request).

    `prompt` and `output` are given only where penalties need them. `seed` is drawn by rank 0 when the request has none.
    """

    seq: int
    source: int
    sampling: Sampling
    seed: int
    prompt: list[int] = []
    output: list[int] = []


class Enter(Order, frozen=True):
    """Rows enter `bucket` (made if it does not exist); their sources' own caches end."""

    bucket: int
    rows: list[NewRow]


class Exit(Order, frozen=True):
    """Row `seq` leaves `bucket`; its first `length` tokens become prefix entry `entry` unless that is -1."""

    bucket: int
    seq: int
    entry: int = -1
    length: int = 0


class Fuse(Order, frozen=True):
    """All rows of bucket `other` move into `bucket`."""

    bucket: int
    other: int


class Close(Order, frozen=True):
    """The own cache of `seq` ends."""

    seq: int


class Forget(Order, frozen=True):
    """Prefix entry `entry` ends."""

    entry: int


class Row(msgspec.Struct, array_like=True, frozen=True):
    """One row of a decode step: feed `token` (-1: what this row sampled last, still on the device) at `position`."""

    seq: int
    token: int
    position: int


class Chunk(msgspec.Struct, array_like=True, frozen=True):
    """Tokens of sequence `seq`'s prompt to prefill."""

    seq: int
    tokens: list[int]


class Step(Message, frozen=True):
    """One micro-batch: `orders`, then a decode of `bucket` ([B, 1]), or a prefill of `chunks`, or nothing.

    All chunks of a step begin at token `start` of their sequences; shorter ones are padded on the right.
    """

    id: int
    orders: list[Open | Keep | Enter | Exit | Fuse | Close | Forget] = []
    bucket: int = -1
    rows: list[Row] = []
    start: int = 0
    chunks: list[Chunk] = []

    @property
    def kind(self) -> str:
        """ "decode", "prefill" or "orders" (nothing to compute)."""
        return "decode" if self.rows else "prefill" if self.chunks else "orders"

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and tokens of each that the model computes."""
        if self.rows:
            return len(self.rows), 1
        return len(self.chunks), max((len(chunk.tokens) for chunk in self.chunks), default=0)

    @property
    def computed(self) -> int:
        """Tokens that the model computes, padding included."""
        rows, tokens = self.shape
        return rows * tokens


# ---------------------------------------------------------------- joining


class Join(Message, frozen=True):
    """First frame of whoever connects: `secret` of the launch, who it is and its version of this project.

    A rank also says which process it is (pid, start time), what it runs on, and a hash of the plan that it was given.
    """

    secret: str
    role: str  # "coordinator" or "rank"
    version: str
    rank: int = -1
    pid: int = 0
    started: float = 0.0
    versions: dict[str, str] = {}
    plan: str = ""


class Go(Message, frozen=True):
    """Rank 0 releases a rank into the next thing that all do together."""


class At(Message, frozen=True):
    """A rank has come to `point` and waits there for Go; `fact` is what rank 0 needs to know from it."""

    rank: int
    point: str
    fact: Fact


class Fact(msgspec.Struct, array_like=True, frozen=True):
    """What a rank found: its KV cache's shape and limit, its weights' bytes, the token it would choose, with margin.

    `layers` are (bytes per token, window), as in sequence.CacheShape; `device` is the name that MLX gives its device.
    """

    fixed_bytes: int = 0
    layers: list[tuple[int, int]] = []
    kv_bytes: int = 0
    weights_bytes: int = 0
    token: int = -1
    margin: float = 0.0
    device: str = ""


class Refused(Message, frozen=True):
    """Answer to a Join that is not accepted; the connection closes after it."""

    reason: str


# ---------------------------------------------------------------- whose ranks run (parallel/reap.py)


class Running(msgspec.Struct, frozen=True):
    """One rank's process, its launch, and the coordinator that started that ("user@host: state folder")."""

    pid: int
    launch: str
    owner: str


class Reaped(msgspec.Struct, frozen=True):
    """The ranks that ended and those that did not, by pid, and the memory that is available after it, in bytes."""

    ended: list[int]
    stuck: list[int]
    available_bytes: int


# ---------------------------------------------------------------- what a model needs (parallel/model_info.py)


class LayerInfo(msgspec.Struct, array_like=True, frozen=True):
    """One layer. `weights` in bytes; `active` are those of them that one token reads (experts not chosen are not read).

    `kv` is its KV cache as (bytes per token, window) pairs, window 0 unlimited; `fixed` the bytes per sequence of
    recurrent state. `kv_heads` is into how many equal parts tensor parallel may cut that KV (0: every rank holds all).
    """

    weights: int
    active: int
    kv: list[tuple[int, int]] = []
    fixed: int = 0
    kv_heads: int = 0

    def kv_bytes(self, tokens: int, ranks: int = 1) -> int:
        """Bytes that a sequence of `tokens` tokens takes in this layer on one of `ranks` tensor ranks."""
        whole = self.fixed + sum(
            per_token * (min(tokens, window) if window else tokens) for per_token, window in self.kv
        )
        if ranks == 1 or not self.kv_heads:
            return whole
        return whole * max(1, self.kv_heads // ranks) // self.kv_heads


class TensorSize(msgspec.Struct, array_like=True, frozen=True):
    """Tensor parallel on `ranks` ranks: `why_not` is empty where it may be; `weights` is then what a rank holds."""

    ranks: int
    why_not: list[str] = []
    weights: int = 0


class ModelInfo(msgspec.Struct, frozen=True):
    """What a planner must know of a model. Sizes in bytes.

    `model_type` is as config.json says, `family` the file of mlx-lm that runs it. `head` is 0 when the embedding is
    also the head (`tied`); `outside` is what else lies outside the layers: the final norm, above all. `wire` is what
    one token sends across a stage boundary. `widest` is the widest activation of one token, in elements. `pipeline` is
    why it cannot run as stages, "" if it can. `measured` tells that the weights were there: sizes are from their
    headers; else they follow from config.json. `parameters` counts weights, however many bits each has.
    """

    model_type: str
    family: str
    dtype: str
    layers: list[LayerInfo]
    embedding: int
    head: int
    outside: int
    tied: bool
    hidden: int
    vocabulary: int
    widest: int
    wire: int
    context: int
    tensor: list[TensorSize]
    pipeline: str
    measured: bool
    parameters: int = 0

    @property
    def weights(self) -> int:
        """All weights, in bytes."""
        return sum(layer.weights for layer in self.layers) + self.embedding + self.head + self.outside

    def kv_bytes(self, tokens: int) -> int:
        """The KV cache of one sequence of `tokens` tokens, in bytes, over all layers."""
        return sum(layer.kv_bytes(tokens) for layer in self.layers)

    def why_not_tensor(self, ranks: int) -> list[str]:
        """Why tensor parallel on `ranks` ranks is refused; empty when it is not."""
        for size in self.tensor:
            if size.ranks == ranks:
                return size.why_not
        return [f"tensor parallel is for 2 to 8 ranks, not {ranks}"]

    @property
    def tensor_sizes(self) -> list[int]:
        """The numbers of ranks, 2 to 8, that tensor parallel may have."""
        return [size.ranks for size in self.tensor if not size.why_not]


AnyMessage = (
    Submit
    | Abort
    | Leave
    | Progress
    | Ready
    | Failed
    | Joined
    | Lost
    | HungUp
    | Started
    | Tokens
    | RequestFailed
    | Beat
    | Join
    | Refused
    | Go
    | At
    | Step
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


class WireError(Exception):
    """The byte stream is not ours: a frame is too long or does not decode."""


def encode(message: Message) -> bytes:
    """One frame: a big-endian uint32 length, then MessagePack."""
    body = _encoder.encode(message)
    return _HEADER.pack(len(body)) + body


def fold(digest: int, body: bytes | memoryview) -> int:
    """A running digest (CRC-32) with one more message's body in it."""
    return zlib.crc32(body, digest)


def decode(body: bytes) -> AnyMessage:
    """The message in one frame's body. Raises WireError."""
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"undecodable frame of {len(body)} bytes: {error}") from error


def _length(header: bytes) -> int:
    (length,) = _HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {length} bytes; the peer does not speak this protocol")
    return int(length)


def read_frame(connection: socket.socket) -> AnyMessage | None:
    """Block for the next message; None when the peer closed. Raises WireError, OSError."""
    body = read_body(connection)
    return None if body is None else decode(body)


def read_body(connection: socket.socket) -> bytes | None:
    """As `read_frame`, the body undecoded."""
    header = _read_exactly(connection, _HEADER.size)
    return None if header is None else _read_exactly(connection, _length(header))


def _read_exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


async def read_frame_async(reader: asyncio.StreamReader) -> AnyMessage | None:
    """As `read_frame`, on asyncio streams."""
    try:
        header = await reader.readexactly(_HEADER.size)
        return decode(await reader.readexactly(_length(header)))
    except asyncio.IncompleteReadError:
        return None
