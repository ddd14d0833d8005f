"""A model's text side, in the coordinator: chat messages to prompt ids, its defaults, its markers and tool format.

Loads the tokenizer and the small JSON files of a model folder, never weights and never mlx. The supervisor loads one
ChatModel per model; `openai.py` renders with it, `answer.py` decodes with it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import BadRequest, NotAModelFolder
from cluster.serve.markers import Markers, find_markers
from cluster.serve.messages import Message, merge_leading_system, system_into_user, system_to_front
from cluster.serve.text import Vocabulary
from cluster.serve.tools import ToolFormat, find_format, mlx_lm_module

logger = logging.getLogger("cluster.chat")
SHORT_CHARACTERS = 8192  # text up to this size is rendered and tokenised in the event loop (about 2 ms)


@dataclass(frozen=True, slots=True)
class Defaults:
    """How the model samples where a request does not say: its generation_config.json."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition: float = 1.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to continue. `reasoning`: the template has already opened the reasoning block."""

    ids: list[int]
    reasoning: bool = False


class ChatModel:
    """The tokenizer of one model and all that goes with it. Immutable after `load`; safe to use from threads."""

    def __init__(self, tokenizer: Any, config: dict[str, Any], generation: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self.vocabulary = Vocabulary(tokenizer)
        if self.vocabulary.backend is not None:  # a prompt is never cut or padded behind the client's back
            self.vocabulary.backend.no_truncation()
            self.vocabulary.backend.no_padding()
        self.vocabulary_size = max(self.vocabulary.size, _vocabulary_size(config))
        self.defaults = _defaults(generation)
        self.stop_ids = _stop_ids(tokenizer, config, generation)
        known = tokenizer.get_vocab()
        self._longest_token = max(map(len, known), default=1)  # in characters; of a byte vocabulary, in bytes
        init = getattr(tokenizer, "init_kwargs", {})
        template = _template_text(tokenizer)
        self.markers: Markers = find_markers(known)
        self.tool_format: ToolFormat | None = find_format(template, known, init.get("tool_parser_type"))
        self._render = self._renderer(init.get("chat_template_type"))
        self.has_template = self._render is not None
        self._reserved = {*inspect.signature(type(tokenizer).apply_chat_template).parameters, "messages"} - {"kwargs"}
        self._place_system: Callable[[Sequence[Message]], list[Message]] = merge_leading_system
        self.takes_tools = False
        if self.has_template:
            self._place_system = self._find_system_place()
            self.takes_tools = self._tools_show()

    @property
    def takes(self) -> list[str]:
        """What requests may ask of this model beside plain text: "chat", "tools", "reasoning"."""
        able = {"chat": self.has_template, "tools": self.takes_tools, "reasoning": bool(self.markers.think_start)}
        return [what for what, possible in able.items() if possible]

    @classmethod
    def load(cls, folder: Path) -> ChatModel:
        """Read a model folder's tokenizer and settings. Raises NotAModelFolder when there is no usable tokenizer."""
        from transformers import AutoTokenizer  # slow to import, and only the coordinator's loading needs it

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        except Exception as error:  # transformers checks config.json and every tokenizer file, each in its own way
            raise NotAModelFolder(
                f"{folder}: its tokenizer does not load: {error}",
                hint="Fetch the model again, with its config.json and its tokenizer files.",
            ) from error
        return cls(tokenizer, _read_json(folder / "config.json"), _read_json(folder / "generation_config.json"))

    # ------------------------------------------------------------ prompts

    async def chat_prompt(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        options: dict[str, Any],
        *,
        limit_tokens: int | None = None,
    ) -> Prompt:
        """The prompt of a chat (already in normal form). `options` reach the template as variables.

        Long ones are rendered in a thread, so that others' streams go on. Raises BadRequest when the model has no
        chat template, no place for tools, or its template refuses these messages, and when the text is so long that
        it has more than `limit_tokens` however it is cut: megabytes are not tokenised only to be refused.
        """
        if not self.has_template:
            raise BadRequest(
                "This model has no chat template, so it cannot take chat messages.",
                code="no_chat_template",
                param="messages",
                hint="Use /v1/completions.",
            )
        if tools and not self.takes_tools:
            raise BadRequest("This model's chat template has no place for tools.", param="tools")
        for name in options:
            if name in self._reserved:  # these steer the tokenizer's function, they are no template variables
                raise BadRequest(f"chat_template_kwargs.{name} cannot be set.", param="chat_template_kwargs")
        return await self._run(_characters(messages, tools), self._chat_prompt, messages, tools, options, limit_tokens)

    async def text_prompt(self, text: str, *, limit_tokens: int | None = None) -> Prompt:
        """The prompt of a plain continuation, with the beginning-of-text token where the tokenizer has one. Raises
        BadRequest as `chat_prompt` does."""
        self._check_length(text, limit_tokens, "prompt")
        return await self._run(len(text), lambda: Prompt(self._encode(text, special=True)))

    async def _run(self, characters: int, work: Callable[..., Prompt], *args: Any) -> Prompt:
        return work(*args) if characters <= SHORT_CHARACTERS else await asyncio.to_thread(work, *args)

    def _chat_prompt(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        options: dict[str, Any],
        limit_tokens: int | None,
    ) -> Prompt:
        assert self._render is not None, "asked for a chat prompt without a template"
        try:
            text = self._render(self._place_system(messages), tools, **options)
        except Exception as error:  # a template raises what it likes: its own message is what helps the client
            logger.info("the chat template refused a request: %s", type(error).__name__)
            raise BadRequest(f"The model's chat template refused these messages: {error}", param="messages") from error
        self._check_length(text, limit_tokens, "messages")
        start = self.markers.think_start
        return Prompt(self._encode(text, special=False), bool(start) and text.rstrip().endswith(start))

    def _check_length(self, text: str, limit_tokens: int | None, param: str) -> None:
        if limit_tokens is not None and len(text) > limit_tokens * self._longest_token:
            raise BadRequest(
                f"The prompt has {len(text)} characters, but {limit_tokens} tokens of at most {self._longest_token} "
                "characters fit.",
                param=param,
                code="context_length_exceeded",
                hint="Shorten the prompt, or start the server with a larger --context.",
            )

    def _encode(self, text: str, *, special: bool) -> list[int]:
        if self.vocabulary.backend is not None:
            # The backend itself: transformers' wrapper changes the shared tokenizer's state on every call, which
            # fails when two threads encode. As a batch: `encode` holds Python's lock until it is done, and with it
            # every stream.
            return list(self.vocabulary.backend.encode_batch_fast([text], add_special_tokens=special)[0].ids)
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    # ------------------------------------------------------------ the template

    def _renderer(self, named: str | None) -> Callable[..., str] | None:
        """`render(messages, tools, **options) -> text`, from the template or from mlx-lm's module of that name."""
        module = mlx_lm_module("chat_templates", named) if named else None
        if module is not None and hasattr(module, "apply_chat_template"):
            return functools.partial(_render_with_module, module.apply_chat_template)
        if self._tokenizer.chat_template is None:
            return None
        return functools.partial(_render_with_template, self._tokenizer)

    def _find_system_place(self) -> Callable[[Sequence[Message]], list[Message]]:
        """How system messages reach this model, found by asking its template: many read only the first message,
        some raise on a later one or on any."""
        user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        system = {"role": "system", "content": "qzSystemqz"}
        if self._shows([system, user], "qzSystemqz"):
            anywhere = self._shows([user, answer, system, user], "qzSystemqz")
            return merge_leading_system if anywhere else system_to_front
        return (
            system_into_user
            if self._shows([{"role": "user", "content": "qzSystemqz"}], "qzSystemqz")
            else (merge_leading_system)
        )

    def _tools_show(self) -> bool:
        tool = {
            "type": "function",
            "function": {
                "name": "qzToolqz",
                "description": "d",
                "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}},
            },
        }
        return self._shows([{"role": "user", "content": "a"}], "qzToolqz", [tool])

    def _shows(self, messages: list[Message], sign: str, tools: list[dict[str, Any]] | None = None) -> bool:
        assert self._render is not None
        try:
            return sign in self._render(messages, tools)
        except Exception as error:  # a template that raises does not take this form; that is the answer
            logger.debug("template probe: %s", error)
            return False


def _render_with_template(tokenizer: Any, messages: list[Message], tools: Any, /, **options: Any) -> str:
    return str(
        tokenizer.apply_chat_template(
            messages, tools=tools or None, **{**options, "tokenize": False, "add_generation_prompt": True}
        )
    )


def _render_with_module(apply: Callable[..., Any], messages: list[Message], tools: Any, /, **options: Any) -> str:
    if tools:
        options["tools"] = tools
    return str(apply(messages, **{**options, "add_generation_prompt": True}))


# ---------------------------------------------------------------- a model's files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise NotAModelFolder(f"{path} is not readable JSON: {error}", hint="Fetch the model again.") from error
    return value if isinstance(value, dict) else {}


def _template_text(tokenizer: Any) -> str:
    template = tokenizer.chat_template
    return "\n".join(map(str, template.values())) if isinstance(template, dict) else template or ""


def _vocabulary_size(config: dict[str, Any]) -> int:
    nested = config.get("text_config")
    size = config.get("vocab_size") or (nested.get("vocab_size") if isinstance(nested, dict) else 0)
    return size if isinstance(size, int) else 0


def _defaults(generation: dict[str, Any]) -> Defaults:
    greedy = generation.get("do_sample") is False

    def number(name: str, otherwise: float) -> float:
        value = generation.get(name)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else otherwise

    return Defaults(
        temperature=0.0 if greedy else number("temperature", 1.0),
        top_p=number("top_p", 1.0),
        top_k=int(number("top_k", 0)),
        min_p=number("min_p", 0.0),
        repetition=number("repetition_penalty", 1.0),
    )


def _stop_ids(tokenizer: Any, config: dict[str, Any], generation: dict[str, Any]) -> list[int]:
    """Every id that any of the model's files calls the end of a text."""
    nested = config.get("text_config")
    places = [generation, config, nested if isinstance(nested, dict) else {}, {"eos_token_id": tokenizer.eos_token_id}]
    found: dict[int, None] = {}
    for place in places:
        value = place.get("eos_token_id")
        for id in value if isinstance(value, list) else [value]:
            if isinstance(id, int) and not isinstance(id, bool):
                found[id] = None
    return list(found)


def _characters(messages: Sequence[Message], tools: Sequence[object] | None) -> int:
    """About how much text there is, a tool's definition taken as 1000 characters. What an agent wrote into its calls
    counts as well: whole files."""
    return sum(len(str(value)) for message in messages for value in message.values()) + 1000 * len(tools or ())
