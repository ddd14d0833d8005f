"""The OpenAI dialect: bodies of /v1/chat/completions and /v1/completions to a TextRequest, and answers back to JSON.

An adapter: all it knows of the engine is `generate.TextRequest` and `answer.Delta`. Another dialect is a file beside
this one. `api.py` calls `parse_*`, then a Writer's methods.

Fields come in four kinds: built ones (`Common`, `ChatBody`, `CompletionBody`), those that cannot change an answer
(IGNORED), those that could and are not built (REFUSED, unless they ask for what happens anyway), and unknown ones,
which are refused by name: a misspelt `temperatur` would otherwise be lost silently. null means unset everywhere.
"""

from __future__ import annotations

import difflib
from typing import Any, TypeVar

import msgspec

from cluster.errors import BadRequest
from cluster.serve.answer import ToolUse
from cluster.serve.chat import ChatModel, Prompt
from cluster.serve.generate import TextRequest, most_tokens
from cluster.serve.messages import normal_messages, normal_tools
from parallel import wire

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_PROMPTS = 256
MAX_TOP_LOGPROBS = 20
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

# What cannot change the answer: accounting, caching hints, storage, safety routing, speed.
IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "safety_identifier",
        "prediction",
        "cache_prompt",
        "keep_alive",
        "ttl",
        "priority",
        "request_id",
    }
)
# What could and is not built, with the values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "functions": ([],),
    "function_call": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "echo": (False,),
    "suffix": ("",),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "grammar": ("",),
    "structured_outputs": (),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "draft_model": (),
    "adapters": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "skip_special_tokens": (True,),
    "chat_template": (),
    "documents": ([],),
}


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of both routes. `top_k`, `min_p`, `repetition_penalty`, `stop_token_ids` are extensions that other
    servers have under the same names."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    seed: int | None = None
    n: int = 1
    stop: str | list[str] = ""
    stop_token_ids: list[int] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()


class ChatBody(Common, frozen=True, kw_only=True):
    messages: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = {}


class CompletionBody(Common, frozen=True, kw_only=True):
    prompt: Any = None
    logprobs: int | None = None
    best_of: int | None = None


Body = TypeVar("Body", ChatBody, CompletionBody)


def parse_body(raw: bytes, shape: type[Body]) -> Body:
    """The body, with its fields' types checked. Raises BadRequest naming the field."""
    try:
        fields = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"The body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise BadRequest("The body must be a JSON object.", code="invalid_json")
    known = {name: value for name, value in fields.items() if value is not None and name not in IGNORED}
    for name in [name for name in known if name not in shape.__struct_fields__]:
        _refuse(name, known.pop(name), shape)
    if isinstance(options := known.get("stream_options"), dict):
        known["stream_options"] = {name: value for name, value in options.items() if value is not None}
    try:
        return msgspec.convert(known, shape)
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at `")
        param = path.rstrip("`").removeprefix("$.").removesuffix("[...]") or None
        raise BadRequest(f"{param or 'The body'}: {said}.", param=param, code="invalid_type") from error


def _refuse(name: str, value: Any, shape: type[Any]) -> None:
    if name in REFUSED:
        if value in REFUSED[name]:
            return
        hint = "Use tools and tool_choice." if name.startswith("function") else ""
        raise BadRequest(
            f"{name} is not supported by this server.", param=name, code="unsupported_parameter", hint=hint
        )
    near = difflib.get_close_matches(name, [*shape.__struct_fields__, *IGNORED], n=1)
    raise BadRequest(
        f"Unknown field {name!r}.",
        param=name,
        code="unknown_parameter",
        hint=f"Did you mean {near[0]!r}?" if near else "",
    )


# ---------------------------------------------------------------- to a TextRequest


async def chat_request(body: ChatBody, chat: ChatModel, ready: wire.Ready) -> TextRequest:
    """The request of a chat body. Raises BadRequest."""
    messages = normal_messages(body.messages)
    tools = _offered_tools(body)
    options = dict(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        if body.reasoning_effort not in EFFORTS:
            raise BadRequest(f"reasoning_effort must be one of {', '.join(EFFORTS)}.", param="reasoning_effort")
        options.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            options.setdefault("enable_thinking", False)
    top = body.top_logprobs
    if top is not None:
        _within("top_logprobs", top, 0, MAX_TOP_LOGPROBS)
        if not body.logprobs:
            raise BadRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    shared = _shared(body, chat, ready.slots, (top or 0) if body.logprobs else -1)
    limit, name = (body.max_completion_tokens, "max_completion_tokens")
    if limit is None:
        limit, name = body.max_tokens, "max_tokens"
    prompt = await chat.chat_prompt(messages, tools or None, options, limit_tokens=most_tokens(ready))
    use = ToolUse(chat.tool_format, tools, body.parallel_tool_calls) if tools and chat.tool_format else None
    return TextRequest([prompt], max_tokens=_limit(name, limit), tool_use=use, **shared)


async def completion_request(body: CompletionBody, chat: ChatModel, ready: wire.Ready) -> TextRequest:
    """The request of a completion body. Raises BadRequest."""
    if body.best_of is not None and body.best_of != body.n:
        raise BadRequest("best_of is not supported beyond n.", param="best_of", code="unsupported_parameter")
    if body.logprobs is not None:
        _within("logprobs", body.logprobs, 0, MAX_TOP_LOGPROBS)
    shared = _shared(body, chat, ready.slots, -1 if body.logprobs is None else body.logprobs)
    most = most_tokens(ready)
    prompts = [
        await chat.text_prompt(one, limit_tokens=most) if isinstance(one, str) else _ids_prompt(one, chat, most)
        for one in _prompts(body.prompt)
    ]
    limit = _limit("max_tokens", body.max_tokens)
    return TextRequest(prompts, max_tokens=limit, is_chat=False, **shared)


def _offered_tools(body: ChatBody) -> list[dict[str, Any]]:
    choice = body.tool_choice
    tools = normal_tools(body.tools) if body.tools is not None else []
    if choice in (None, "auto"):
        return tools
    if choice == "none":
        return []
    raise BadRequest(
        "tool_choice can be 'auto' or 'none': this server cannot force a tool call.",
        param="tool_choice",
        code="unsupported_parameter",
        hint="Use 'auto' and offer only the tool that must be called.",
    )


def _prompts(prompt: Any) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, int) for item in prompt):
            return [prompt]
        if all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) and item for item in prompt):
            if len(prompt) > MAX_PROMPTS:
                raise BadRequest(f"prompt has {len(prompt)} entries; at most {MAX_PROMPTS} are taken.", param="prompt")
            return prompt
    raise BadRequest(
        "prompt must be a string, a list of strings, a list of token ids or a list of those.", param="prompt"
    )


def _ids_prompt(ids: list[Any], chat: ChatModel, limit_tokens: int) -> Prompt:
    for id in ids[:limit_tokens]:  # one that is longer is refused for its length
        if not isinstance(id, int) or isinstance(id, bool) or not 0 <= id < chat.vocabulary_size:
            raise BadRequest(f"prompt: {id!r} is no token id below {chat.vocabulary_size}.", param="prompt")
    return Prompt(ids)


def _shared(body: Common, chat: ChatModel, slots: int, logprobs: int) -> dict[str, Any]:
    if not 1 <= body.n <= slots:
        raise BadRequest(f"n must be between 1 and {slots}, the number of slots.", param="n")
    for id in body.stop_token_ids:
        _within("stop_token_ids", id, 0, chat.vocabulary_size - 1)
    return {
        "sampling": _sampling(body, chat, logprobs),
        "stop_ids": sorted({*chat.stop_ids, *body.stop_token_ids}),
        "n": body.n,
        "stops": _stops(body.stop),
    }


def _sampling(body: Common, chat: ChatModel, logprobs: int) -> wire.Sampling:
    defaults = chat.defaults
    temperature = defaults.temperature if body.temperature is None else body.temperature
    top_p = defaults.top_p if body.top_p is None else body.top_p
    top_k = defaults.top_k if body.top_k is None else max(body.top_k, 0)
    min_p = defaults.min_p if body.min_p is None else body.min_p
    repetition = defaults.repetition if body.repetition_penalty is None else body.repetition_penalty
    _within("temperature", temperature, 0, 2)
    _within("top_p", top_p, 0, 1)
    _within("top_k", body.top_k or 0, -1, 1 << 30)
    _within("min_p", min_p, 0, 1)
    _within("repetition_penalty", repetition, 0.01, 10)
    _within("presence_penalty", body.presence_penalty, -2, 2)
    _within("frequency_penalty", body.frequency_penalty, -2, 2)
    if top_p == 0:  # the most likely token alone
        top_p, top_k = 1.0, 1
    if body.seed is not None:
        _within("seed", body.seed, -(1 << 63), (1 << 64) - 1)
    return wire.Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition=repetition,
        presence=body.presence_penalty,
        frequency=body.frequency_penalty,
        bias=_bias(body.logit_bias, chat.vocabulary_size),
        seed=None if body.seed is None else body.seed & ((1 << 63) - 1),
        logprobs=logprobs,
    )


def _bias(bias: dict[str, float], size: int) -> dict[int, float]:
    out = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < size):
            raise BadRequest(f"logit_bias: {key[:20]!r} is no token id below {size}.", param="logit_bias")
        _within("logit_bias", value, -100, 100)
        out[int(key)] = value
    return out


def _stops(stop: str | list[str]) -> list[str]:
    stops = [stop] if isinstance(stop, str) and stop else list(stop)
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"stop has {len(stops)} strings; at most {MAX_STOPS} are taken.", param="stop")
    for text in stops:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise BadRequest(f"Each stop string must have 1 to {MAX_STOP_CHARACTERS} characters.", param="stop")
    return stops


def _limit(name: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise BadRequest(f"{name} must be at least 1.", param=name)
    return value


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise BadRequest(f"{name} must be between {low} and {high}, not {value}.", param=name)
