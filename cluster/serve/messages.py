"""OpenAI chat messages and tools, checked and put into the plain form that chat templates read.

Pure. What a template cannot take in is refused by the name of its field; nothing is dropped. `chat.py` renders the
result, `openai.py` calls in.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cluster.errors import BadRequest

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def normal_messages(messages: Any) -> list[Message]:
    """Messages as templates expect them: content is text, developer is system, tool arguments are objects, keys that
    are null are absent. Raises BadRequest naming the field."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message.", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, at: str) -> Message:
    if not isinstance(message, dict):
        raise BadRequest(f"{at} must be an object with role and content.", param=at)
    role = message.get("role")
    if role not in ROLES:
        raise BadRequest(f"{at}.role must be one of {', '.join(ROLES)}.", param=f"{at}.role")
    plain = {key: value for key, value in message.items() if value is not None}
    plain["role"] = "system" if role == "developer" else role
    plain["content"] = _content(message.get("content"), f"{at}.content")
    reasoning = plain.pop("reasoning", None)
    if isinstance(reasoning, str):
        plain.setdefault("reasoning_content", reasoning)
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], f"{at}.tool_calls")
        if not plain["tool_calls"]:
            del plain["tool_calls"]
    return plain


def _content(content: Any, at: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{at} must be a string or a list of text parts.", param=at)
    return "".join(_part(part, f"{at}[{i}]") for i, part in enumerate(content))


def _part(part: Any, at: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise BadRequest(f"{at} is of type {kind!r}; this server takes text parts only.", param=at)
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise BadRequest(f"{at}.text must be a string.", param=f"{at}.text")
    return text


def _tool_calls(calls: Any, at: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise BadRequest(f"{at} must be a list.", param=at)
    out = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"{at}[{i}].function.name must be a string.", param=f"{at}[{i}].function.name")
        out.append(
            {**call, "type": "function", "function": {**function, "arguments": _arguments(function.get("arguments"))}}
        )
    return out


def _arguments(arguments: Any) -> Any:
    """An object wherever the text holds one (templates iterate over it); other text stays as the model wrote it."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    return arguments


def normal_tools(tools: Any) -> list[dict[str, Any]]:
    """The request's tools, checked. Raises BadRequest naming the field."""
    if not isinstance(tools, list):
        raise BadRequest("tools must be a list.", param="tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(tool, dict) or tool.get("type", "function") != "function":
            raise BadRequest(f"tools[{i}].type must be 'function'.", param=f"tools[{i}].type")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise BadRequest(f"tools[{i}].function.name must be a string.", param=f"tools[{i}].function.name")
        if not isinstance(function.get("parameters") or {}, dict):
            raise BadRequest(
                f"tools[{i}].function.parameters must be an object.", param=f"tools[{i}].function.parameters"
            )
    # Templates read `description` and `parameters` without asking whether they are there.
    return [{"type": "function", "function": {"description": "", **_without_null(tool["function"])}} for tool in tools]


def _without_null(function: dict[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in function.items() if value is not None}
    plain.setdefault("parameters", {"type": "object", "properties": {}})
    return plain


# ---------------------------------------------------------------- system messages


def merge_leading_system(messages: Sequence[Message]) -> list[Message]:
    """The system messages that open the chat become one."""
    count = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return [*_merged(messages[:count]), *messages[count:]]


def system_to_front(messages: Sequence[Message]) -> list[Message]:
    """All system messages become one at the front, for templates that read only that."""
    system = [message for message in messages if message["role"] == "system"]
    return [*_merged(system), *(message for message in messages if message["role"] != "system")]


def system_into_user(messages: Sequence[Message]) -> list[Message]:
    """The system text opens the first user message, for templates that have no system role."""
    merged = system_to_front(messages)
    if merged[0]["role"] != "system":
        return merged
    text, rest = merged[0]["content"], merged[1:]
    for i, message in enumerate(rest):
        if message["role"] == "user":
            return [*rest[:i], {**message, "content": f"{text}\n\n{message['content']}"}, *rest[i + 1 :]]
    return [{"role": "user", "content": text}, *rest]


def _merged(system: Sequence[Message]) -> list[Message]:
    if len(system) < 2:
        return list(system)
    return [{**system[0], "content": "\n\n".join(message["content"] for message in system if message["content"])}]
