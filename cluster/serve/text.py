"""Token ids to text, one token at a time, and the search for strings in text that is still being written.

Knows tokenizers and bytes; nothing of chat, tools or HTTP. `chat.py` builds a Vocabulary once per model,
`answer.py` opens one decoder for each sample and cuts what it yields at stop strings and markers.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Decoder(Protocol):
    """Turns the tokens of one sample into text.

    `push` returns the text that is complete with this token, maybe "". `pending` is true while a character's
    bytes have not all arrived: the latest token then belongs to text that comes later.
    """

    pending: bool

    def push(self, token: int) -> str: ...


class BytesDecoder:
    """For vocabularies whose tokens are bytes: exact at any split of a character, and immediate."""

    def __init__(self, vocabulary: Vocabulary, keep: frozenset[int], strip: bool) -> None:
        self._vocabulary = vocabulary
        self._hidden = vocabulary.special - keep
        self._strip = strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.pending = False

    def push(self, token: int) -> str:
        if token in self._hidden:
            return ""
        text = self._utf8.decode(self._vocabulary.token_bytes(token))
        self.pending = bool(self._utf8.getstate()[0])
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class StreamDecoder:
    """For every other fast tokenizer: the tokenizers library's own incremental decoding."""

    def __init__(self, backend: Tokenizer, hidden: frozenset[int]) -> None:
        self._backend = backend
        self._hidden = hidden
        self._stream = DecodeStream(skip_special_tokens=False)
        self.pending = False

    def push(self, token: int) -> str:
        if token in self._hidden:
            return ""
        try:
            text = self._stream.step(self._backend, token)
        except Exception as error:  # the library raises a bare Exception when a decoder rewrites earlier text
            if "prefix" not in str(error):
                raise
            self._stream = DecodeStream(skip_special_tokens=False)
            text = self._stream.step(self._backend, token)
        self.pending = text is None
        return text or ""


class SlowDecoder:
    """For tokenizers without a fast backend: decode a short window twice and take the difference."""

    def __init__(self, tokenizer: Any, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._ids: list[int] = []
        self._shown = 0  # how many of _ids are already text; they stay as context for spaces
        self.pending = False

    def push(self, token: int) -> str:
        if token in self._hidden:
            return ""
        self._ids.append(token)
        before = self._decode(self._ids[: self._shown])
        after = self._decode(self._ids)
        self.pending = after.endswith("\ufffd") and len(self._ids) - self._shown < 8
        if self.pending:
            return ""
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)) if ids else ""


class Vocabulary:
    """What each token id stands for. Built once per model from a transformers tokenizer.

    `special` are ids of control tokens: they are no text unless a marker or a stop string names them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        self.size = len(tokenizer)
        self._added = {int(id): str(token.content) for id, token in tokenizer.added_tokens_decoder.items()}
        self.special = frozenset(tokenizer.all_special_ids) | frozenset(
            int(id) for id, token in tokenizer.added_tokens_decoder.items() if token.special
        )
        self._special_names = {id: self._added.get(id) or str(self._piece(id)) for id in self.special}
        self._kind, self._strips = _decoder_kind(self.backend)
        self._bytes: dict[int, bytes] = {}

    def ids_within(self, texts: Iterable[str]) -> frozenset[int]:
        """The special ids whose text is part of any of `texts`: these must stay visible to be found."""
        found = [text for text in texts if text]
        return frozenset(id for id, name in self._special_names.items() if any(name in text for text in found))

    def decoder(self, keep: frozenset[int] = frozenset(), *, strip: bool = True) -> Decoder:
        """A decoder for one sample. `keep`: special ids that are text here. `strip`: drop the space that
        SentencePiece puts before the first word (a chat answer), or keep it (the continuation of a text)."""
        if self._kind:
            return BytesDecoder(self, keep, strip and self._strips)
        if self.backend is not None:
            return StreamDecoder(self.backend, self.special - keep)
        return SlowDecoder(self._tokenizer, self.special - keep)

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of one token; a part of a character where the token is one. Empty for an unknown id."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._find_bytes(token)
        return known

    def token_text(self, token: int) -> str:
        """The token for a person: its text, or "bytes:" and escapes when it is a part of a character."""
        raw = self.token_bytes(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _piece(self, token: int) -> str | None:
        if not 0 <= token < self.size:
            return None
        if self.backend is not None:
            return self.backend.id_to_token(token)
        piece = self._tokenizer.convert_ids_to_tokens(token)
        return None if piece is None else str(piece)

    def _find_bytes(self, token: int) -> bytes:
        if (added := self._added.get(token)) is not None:
            return added.encode()
        piece = self._piece(token)
        if piece is None:
            return b""
        if self._kind == "byte-level":
            try:
                return bytes(_BYTE_OF[character] for character in piece)
            except KeyError:
                return piece.encode()
        if self._kind == "byte-fallback":
            if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                return bytes([int(piece[3:5], 16)])
            return piece.replace("\u2581", " ").encode()
        return str(self._tokenizer.decode([token])).encode()


def _byte_level_alphabet() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary (GPT-2's table: printable bytes stand for
    themselves, the others follow from U+0100 in order)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


def _decoder_kind(backend: Tokenizer | None) -> tuple[str, bool]:
    """("byte-level" | "byte-fallback" | "", whether it strips the first space), read from the decoder's own JSON."""
    if backend is None or backend.decoder is None:
        return "", False
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return "byte-level", False
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        return "byte-fallback", "Strip" in kinds
    return "", False


# ---------------------------------------------------------------- finding strings


class Needles:
    """A few strings that are looked for in growing text."""

    def __init__(self, needles: Sequence[str]) -> None:
        self.all = tuple(dict.fromkeys(needle for needle in needles if needle))
        self._first = frozenset(needle[0] for needle in self.all)
        self._longest = max((len(needle) for needle in self.all), default=0)
        self._starts = frozenset(needle[:i] for needle in self.all for i in range(1, len(needle)))

    def find(self, text: str) -> tuple[int, str] | None:
        """The earliest needle in `text` (the longest of those that begin there), and where."""
        best: tuple[int, str] | None = None
        for needle in self.all:
            at = text.find(needle)
            if at >= 0 and (best is None or at < best[0] or (at == best[0] and len(needle) > len(best[1]))):
                best = (at, needle)
        return best

    def held(self, text: str) -> int:
        """How many characters at the end of `text` could be the start of a needle."""
        tail = text[1 - self._longest :] if self._longest > 1 else ""
        if self._first.isdisjoint(tail):
            return 0
        for start in range(len(tail)):
            if tail[start:] in self._starts:
                return len(tail) - start
        return 0


class StopScanner:
    """Lets text through up to the first stop string, holding back only what could be the start of one."""

    def __init__(self, stops: Needles) -> None:
        self._stops = stops
        self.held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is certain, whether a stop string was found right after it)."""
        if self.held:
            text = self.held + text
            self.held = ""
        if (hit := self._stops.find(text)) is not None:
            return text[: hit[0]], True
        if count := self._stops.held(text):
            self.held = text[-count:]
            return text[:-count], False
        return text, False

    def flush(self) -> str:
        """What was held back, when the text has ended."""
        rest, self.held = self.held, ""
        return rest
