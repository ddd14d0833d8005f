"""The API over HTTP, through the official client where it can express the case.

The first part needs no script: with CLUSTER_TEST_URL it runs against any server (see api_server.py).
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from api_server import *  # noqa: F403
from fake_engine import READY, FakeEngine

from cluster.errors import BadRequest, StepFailed
from cluster.serve.api import Settings
from cluster.serve.chat import ChatModel

CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'


def ids(chat: ChatModel, text: str) -> list[int]:
    return chat._encode(text, special=False)


def said(engine: FakeEngine, chat: ChatModel) -> str:
    """The text of the last prompt that the engine got."""
    decoder = chat.vocabulary.decoder(chat.vocabulary.special)
    return "".join(decoder.push(id) for id in engine.submits[-1].prompt)


def events(body: str) -> list[Any]:
    """The data of a stream's events; comments are left out."""
    blocks = [block.removeprefix("data: ") for block in body.split("\n\n") if block.startswith("data: ")]
    return [block if block == "[DONE]" else json.loads(block) for block in blocks]


async def post(http: httpx.AsyncClient, path: str = CHAT, **body: Any) -> httpx.Response:
    return await http.post(path, json={"messages": ASK, **body} if path == CHAT else body)


# ---------------------------------------------------------------- any server


async def test_the_model_list_names_the_served_model_and_it_can_be_asked_for(client):
    (model,) = (await client.models.list()).data
    assert (await client.models.retrieve(model.id)).id == model.id
    assert (await client.models.retrieve("default")).id == model.id


async def test_another_models_name_is_404_naming_the_served_one(client):
    (model,) = (await client.models.list()).data
    with pytest.raises(openai.NotFoundError, match=model.id) as caught:
        await client.chat.completions.create(model="gpt-9", messages=ASK)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-9")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("GET", "/", 404, "unknown_url"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_unknown_routes_and_methods_get_an_error_object(http, method, path, status, code):
    response = await http.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert (error["type"], error["code"], "param" in error) == ("invalid_request_error", code, True)
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/v1/models/default"])
async def test_what_can_be_read_can_be_probed_by_head(http, path):
    head, get = await http.head(path), await http.get(path)
    assert (head.status_code, head.content, head.headers["content-type"]) == (200, b"", get.headers["content-type"])


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'"x"', b'{"messages": NaN}', b"\xff\xfe", b"[" * 100_000])
async def test_a_body_that_is_no_json_object_is_400(http, raw):
    response = await http.post(CHAT, content=raw)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("messages", None, "messages"),
        ("messages", 5, "messages"),
        ("messages", [], "messages"),
        ("max_tokens", "many", "max_tokens"),
        ("max_tokens", 0, "max_tokens"),
        ("max_completion_tokens", -1, "max_completion_tokens"),
        ("temperature", 2.5, "temperature"),
        ("temperature", True, "temperature"),
        ("top_p", -0.1, "top_p"),
        ("top_k", -2, "top_k"),
        ("min_p", 2, "min_p"),
        ("repetition_penalty", 0, "repetition_penalty"),
        ("presence_penalty", 3, "presence_penalty"),
        ("frequency_penalty", -3, "frequency_penalty"),
        ("n", 0, "n"),
        ("n", 100_000, "n"),
        ("seed", "x", "seed"),
        ("stop", 5, "stop"),
        ("stop", [""], "stop"),
        ("stop", ["a"] * 17, "stop"),
        ("stop_token_ids", [-1], "stop_token_ids"),
        ("stream", "yes", "stream"),
        ("stream_options", 5, "stream_options"),
        ("stream_options", {"include_usage": "x"}, "stream_options.include_usage"),
        ("logit_bias", {"x": 1}, "logit_bias"),
        ("logit_bias", {"-1": 1}, "logit_bias"),
        ("logit_bias", {"42": 101}, "logit_bias"),
        ("logit_bias", {"42": "x"}, "logit_bias"),
        ("logprobs", 2, "logprobs"),
        ("top_logprobs", 3, "top_logprobs"),
        ("tools", 5, "tools"),
        ("tool_choice", "required", "tool_choice"),
        ("tool_choice", {"type": "function", "function": {"name": "add"}}, "tool_choice"),
        ("reasoning_effort", "extreme", "reasoning_effort"),
        ("chat_template_kwargs", {"chat_template": "x"}, "chat_template_kwargs"),
        ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs"),
        ("response_format", {"type": "json_object"}, "response_format"),
        ("response_format", {"type": "json_schema", "json_schema": {}}, "response_format"),
        ("functions", [{"name": "f"}], "functions"),
        ("modalities", ["audio"], "modalities"),
        ("temperatur", 1, "temperatur"),
    ],
)
async def test_what_cannot_be_served_is_400_naming_the_field(http, field, value, param):
    response = await post(http, **{field: value})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)


async def test_image_parts_are_refused_by_name(client):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,x"}}
    with pytest.raises(openai.BadRequestError, match="image_url"):
        await client.chat.completions.create(model="default", messages=[{"role": "user", "content": [image]}])


async def test_too_many_alternatives_are_400(http):
    assert (await post(http, logprobs=True, top_logprobs=21)).json()["error"]["param"] == "top_logprobs"
    response = await post(http, "/v1/completions", prompt="a", logprobs=21)
    assert response.json()["error"]["param"] == "logprobs"


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": None},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": ["a", 1]},
        {"prompt": [-1]},
        {"prompt": [10**9]},
        {"prompt": [True]},
        {"prompt": ""},
        {"prompt": {"a": 1}},
        {"prompt": ["a"] * 300},
    ],
)
async def test_what_is_no_prompt_is_400_naming_it(http, body):
    response = await post(http, "/v1/completions", **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(("field", "value"), [("echo", True), ("suffix", "x"), ("best_of", 3)])
async def test_completion_fields_that_are_not_built_are_refused_by_name(http, field, value):
    response = await post(http, "/v1/completions", prompt="a", max_tokens=1, **{field: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


async def test_the_clients_request_id_comes_back_if_it_is_sane(http):
    assert (await http.get("/health", headers={"x-request-id": "abc-1"})).headers["x-request-id"] == "abc-1"
    odd = (await http.get("/health", headers={"x-request-id": "a b" * 100})).headers["x-request-id"]
    assert odd.startswith("req_")


async def test_headers_are_bounded(http):
    response = await http.get("/health", headers={f"x-{i}": "a" * 4000 for i in range(15)})
    assert response.status_code == 200
    assert (await http.get("/health", headers={f"x-{i}": "a" * 4000 for i in range(17)})).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_null_is_unset_and_what_cannot_change_the_answer_is_ignored(http, stream):
    unset = dict.fromkeys(("model", "max_tokens", "temperature", "top_logprobs", "logprobs", "stop", "tools", "seed"))
    ignored = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "prompt_cache_key": "k"}
    idle = {"response_format": {"type": "text"}, "modalities": ["text"], "functions": None, "audio": None}
    response = await post(
        http, **unset, **ignored, **idle, max_completion_tokens=2, stream=stream or None, stream_options=None
    )
    assert response.status_code == 200, response.text


async def test_a_stream_ends_with_a_finish_reason_then_done(http):
    body = events((await post(http, stream=True, max_tokens=3)).text)
    assert body[-1] == "[DONE]"
    assert body[-2]["choices"][0]["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize("options", [{}, None, {"include_usage": False}, {"include_usage": None}])
async def test_no_usage_chunk_unless_it_is_asked_for(http, options):
    body = events((await post(http, stream=True, max_tokens=3, stream_options=options)).text)
    assert all(chunk["choices"] and "usage" not in chunk for chunk in body[:-1])


async def test_usage_comes_in_one_chunk_without_choices_before_done_and_is_null_elsewhere(http):
    body = events((await post(http, stream=True, max_tokens=3, stream_options={"include_usage": True})).text)
    *chunks, last, done = body
    assert (last["choices"], done) == ([], "[DONE]")
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"]
    assert all(chunk["usage"] is None for chunk in chunks)


async def test_health_and_metrics_answer(http):
    assert (await http.get("/health")).status_code == 200
    assert "cluster_requests_total" in (await http.get("/metrics")).text


# ---------------------------------------------------------------- text


async def test_a_chat_is_answered(client, engine, chat):
    engine.says(ids(chat, "Hello the end"))
    engine.cached = 3
    answer = await client.chat.completions.create(model="tiny", messages=ASK)
    assert answer.choices[0].message.content == "Hello the end"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "lab/tiny"
    assert answer.usage.completion_tokens == len(ids(chat, "Hello the end"))
    assert answer.usage.prompt_tokens == len(engine.submits[0].prompt)
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert said(engine, chat) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("batch", [False, True], ids=["token by token", "all tokens at once"])
async def test_a_streamed_chat_is_the_same_text(client, engine, chat, batch):
    engine.batch = batch
    engine.says(ids(chat, "Hello the ď \U0001f600 end"))
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            model="lab/tiny", messages=ASK, stream=True, stream_options={"include_usage": True}
        )
    ]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == "Hello the ď \U0001f600 end"
    assert not any("\ufffd" in piece for piece in pieces)
    assert "ď" in "|".join(pieces)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == len(engine.script[0][0])
    assert len({chunk.id for chunk in chunks}) == 1
    if batch:
        assert len(pieces) == 2  # the text, then the finish


@pytest.mark.parametrize("stop", ["END", ["nothing", "END"]])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_and_tells_the_engine_what_counts(client, engine, chat, stop, stream):
    engine.says(ids(chat, "Hello END more and more"))
    request = {"model": "default_model", "messages": ASK, "stop": stop}
    if stream:
        chunks = [chunk async for chunk in await client.chat.completions.create(**request, stream=True)]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        answer = await client.chat.completions.create(**request)
        text = answer.choices[0].message.content
        assert answer.usage.completion_tokens == 2
    assert text == "Hello "
    assert [(abort.index, abort.keep) for abort in engine.aborts] == [(0, 2)]
    assert engine.open_requests == 0


async def test_a_stop_string_within_one_token_leaves_what_is_before_it(client, engine, chat):
    engine.says(ids(chat, "Hello.\n\nmore"))
    answer = await client.chat.completions.create(model="default", messages=ASK, stop=["\n\n"])
    assert answer.choices[0].message.content == "Hello."
    assert (answer.usage.completion_tokens, engine.aborts[0].keep) == (1, 1)


async def test_several_samples_come_as_choices_and_end_on_their_own(client, engine, chat):
    engine.script = [(ids(chat, "Hello"), "stop"), (ids(chat, "the end STOP more"), "stop")]
    answer = await client.chat.completions.create(model="default", messages=ASK, n=2, stop="STOP")
    assert [choice.message.content for choice in answer.choices] == ["Hello", "the end "]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert engine.submits[0].n == 2
    stream = await client.chat.completions.create(model="default", messages=ASK, n=2, stop="STOP", stream=True)
    texts = ["", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["Hello", "the end "]


async def test_what_the_request_says_reaches_the_engine(client, engine):
    await client.chat.completions.create(
        model="default",
        messages=ASK,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"42": -100},
        seed=-7,
        max_tokens=16,
        max_completion_tokens=32,
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [7]},
    )
    sampling = engine.submits[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 5, 0.1)
    assert (sampling.repetition, sampling.presence, sampling.frequency) == (1.1, 1.0, -1.0)
    assert sampling.bias == {42: -100.0}
    assert 0 <= sampling.seed < 1 << 63
    assert engine.submits[0].max_tokens == 32
    assert 7 in engine.submits[0].stop_ids


async def test_the_limit_is_the_room_left_and_is_clamped_to_it(client, engine):
    await client.chat.completions.create(model="default", messages=ASK)
    await client.chat.completions.create(model="default", messages=ASK, max_completion_tokens=40960)
    room = READY.kv_tokens - len(engine.submits[0].prompt)
    assert [submit.max_tokens for submit in engine.submits] == [room, room]


async def test_a_prompt_without_room_is_400_with_both_numbers_and_is_not_submitted(client, engine):
    with pytest.raises(openai.BadRequestError, match="1400 tokens") as caught:
        await client.completions.create(model="default", prompt="a" * 1400)
    assert str(READY.kv_tokens) in str(caught.value)
    assert caught.value.code == "context_length_exceeded"
    assert engine.submits == []


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_megabytes_that_cannot_fit_are_400_before_they_are_tokenised(http, engine, monkeypatch, path):
    monkeypatch.setattr(ChatModel, "_encode", lambda *_, **__: 1 / 0)
    text = "a" * 3_000_000
    response = await post(
        http, path, **({"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text})
    )
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert str(READY.kv_tokens) in error["message"]
    response = await post(http, "/v1/completions", prompt=[1] * 1_000_000)
    assert "1000000 tokens" in response.json()["error"]["message"]
    assert engine.submits == []


async def test_logprobs_carry_tokens_bytes_and_alternatives_streamed_or_not(client, engine, chat):
    engine.says(ids(chat, "Helloď"))
    request = {"model": "default", "messages": ASK, "logprobs": True, "top_logprobs": 20}
    answer = await client.chat.completions.create(**request)
    whole = answer.choices[0].logprobs.content
    assert [entry.token for entry in whole] == ["Hello", "bytes:\\xc4", "bytes:\\x8f"]
    assert bytes(byte for entry in whole for byte in entry.bytes).decode() == "Helloď"
    assert [entry.logprob for entry in whole] == [-0.5] * 3
    assert [len(entry.top_logprobs) for entry in whole] == [20] * 3
    assert len(whole) == answer.usage.completion_tokens
    streamed = [
        entry.token
        async for chunk in await client.chat.completions.create(**request, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == [entry.token for entry in whole]


# ---------------------------------------------------------------- tools and reasoning


async def test_a_tool_turn_with_null_content_reaches_the_template(client, engine, chat):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":2,"b":3}'}}
    for content in ({"content": None}, {}):
        messages = [*ASK, {"role": "assistant", **content, "tool_calls": [call]}]
        messages.append({"role": "tool", "tool_call_id": "c1", "content": "5"})
        await client.chat.completions.create(model="default", messages=messages)
        assert "<tool_call>add: a=2 b=3</tool_call>" in said(engine, chat)


async def test_a_developer_message_is_the_system_message(client, engine, chat):
    messages = [{"role": "developer", "content": "Reply only BANANA"}, *ASK]
    await client.chat.completions.create(model="default", messages=messages)
    assert said(engine, chat).startswith("<|im_start|>system\nReply only BANANA<|im_end|>")


async def test_reasoning_and_a_tool_call_leave_null_content(client, engine, chat):
    engine.says(ids(chat, f"<think>\nhm\n</think>\n\n{CALL}"))
    answer = await client.chat.completions.create(model="default", messages=ASK, tools=[TOOL])
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == (None, "hm\n")
    assert (message.tool_calls[0].function.name, message.tool_calls[0].type) == ("add", "function")
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 2}
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0


async def test_streamed_calls_have_indices_and_the_finish_reason(client, engine, chat):
    engine.says(ids(chat, f"<think>hm</think>Sure. {CALL}\n{CALL}"))
    calls, text, reasoning, finish = [], "", "", None
    async for chunk in await client.chat.completions.create(model="default", messages=ASK, tools=[TOOL], stream=True):
        delta = chunk.choices[0].delta
        calls += delta.tool_calls or []
        text += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        finish = chunk.choices[0].finish_reason or finish
    assert [(call.index, call.function.name) for call in calls] == [(0, "add"), (1, "add")]
    assert calls[0].id != calls[1].id
    assert (text, reasoning, finish) == ("Sure. ", "hm", "tool_calls")


async def test_without_parallel_calls_the_first_one_ends_the_turn(client, engine, chat):
    engine.says(ids(chat, f"{CALL}\n{CALL}"))
    answer = await client.chat.completions.create(
        model="default", messages=ASK, tools=[TOOL], parallel_tool_calls=False
    )
    assert len(answer.choices[0].message.tool_calls) == 1
    assert engine.aborts[0].keep == answer.usage.completion_tokens


async def test_tool_choice_none_takes_the_tools_out_of_the_prompt(client, engine, chat):
    engine.says(ids(chat, CALL))
    answer = await client.chat.completions.create(model="default", messages=ASK, tools=[TOOL], tool_choice="none")
    assert answer.choices[0].message.content == CALL
    assert '"add"' not in said(engine, chat)


async def test_template_options_pass_and_an_opened_reasoning_block_is_split(client, engine, chat):
    engine.says(ids(chat, "hm</think>Paris"))
    answer = await client.chat.completions.create(
        model="default",
        messages=ASK,
        reasoning_effort="low",
        extra_body={"chat_template_kwargs": {"enable_thinking": True}},
    )
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", "Paris")
    assert "effort low" in said(engine, chat)


# ---------------------------------------------------------------- completions


async def test_a_completion_takes_a_string_ids_and_lists_of_both(client, engine, chat):
    engine.says(ids(chat, " the end"))
    token_ids = ids(chat, "Hello")
    for prompt, count in (("Hello", 1), (token_ids, 1), (["Hello", "Hello"], 2), ([token_ids, token_ids], 2)):
        engine.submits.clear()
        answer = await client.completions.create(model="default", prompt=prompt, max_tokens=5)
        assert [choice.text for choice in answer.choices] == [" the end"] * count
        assert [submit.prompt for submit in engine.submits] == [token_ids] * count
        assert answer.usage.prompt_tokens == count * len(token_ids)


async def test_choices_are_numbered_prompt_by_prompt(client, engine, chat):
    engine.script = [(ids(chat, "Hello"), "stop"), (ids(chat, "the"), "stop")]
    stream = await client.completions.create(model="default", prompt=["a", "b"], n=2, stream=True)
    texts = dict.fromkeys(range(4), "")
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "Hello", 1: "the", 2: "Hello", 3: "the"}


async def test_a_completion_does_not_look_for_markers(client, engine, chat):
    engine.says(ids(chat, f"<think>a</think>{CALL}"))
    answer = await client.completions.create(model="default", prompt="Hello")
    assert answer.choices[0].text == f"<think>a</think>{CALL}"


async def test_completion_logprobs_have_the_old_form(client, engine, chat):
    engine.says(ids(chat, "Hello the"))
    answer = await client.completions.create(model="default", prompt="a", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert (logprobs.tokens, logprobs.text_offset) == (["Hello", " the"], [0, 5])
    assert logprobs.token_logprobs == [-0.5, -0.5]
    assert [len(top) for top in logprobs.top_logprobs] == [2, 2]


# ---------------------------------------------------------------- waiting, failing, leaving


class TestWaiting:
    @pytest.fixture
    def app_settings(self) -> Settings:
        return Settings(keepalive_s=0.01)

    async def test_headers_and_comments_come_while_a_request_waits_and_while_a_call_is_being_written(
        self, http, engine, chat
    ):
        for hold in (0, 5):
            engine.hold(at=hold)
            engine.says(ids(chat, CALL))
            async with http.stream("POST", CHAT, json={"messages": ASK, "stream": True, "tools": [TOOL]}) as response:
                assert response.status_code == 200
                assert response.headers["content-type"].startswith("text/event-stream")
                lines = response.aiter_lines()
                while not (line := await anext(lines)).startswith(":"):
                    assert not line.startswith("data")
                engine.release()
                rest = [line async for line in lines if line.startswith("data")]
            assert rest[-1] == "data: [DONE]"
            assert '"tool_calls"' in rest[0]


async def test_a_failed_step_is_an_error_event_in_a_stream_and_a_500_else(client, http, engine, chat):
    engine.says(ids(chat, "Hello the end"))
    engine.fail = (1, StepFailed("The step broke."))
    body = events((await post(http, stream=True)).text)
    assert body[0]["choices"][0]["delta"]["content"] == "Hello"
    assert body[-2]["error"] == {
        "message": "The step broke.",
        "type": "server_error",
        "param": None,
        "code": "step_failed",
    }
    assert body[-1] == "[DONE]"
    with pytest.raises(openai.APIError, match="The step broke"):
        async for _ in await client.chat.completions.create(model="default", messages=ASK, stream=True):
            pass
    with pytest.raises(openai.InternalServerError, match="The step broke"):
        await client.chat.completions.create(model="default", messages=ASK)


async def test_a_request_that_the_engine_calls_bad_is_400(client, engine):
    engine.fail = (0, BadRequest("It needs 900 tokens and 400 fit."))
    with pytest.raises(openai.BadRequestError, match="900"):
        await client.chat.completions.create(model="default", messages=ASK)


async def test_a_lost_engine_ends_open_requests_with_503_and_health_says_so(http, engine, service):
    engine.hold(at=0)
    waiting = asyncio.create_task(post(http))
    await engine.until("submit")
    engine.lose("it was killed")
    response = await waiting
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_lost")
    assert response.headers["retry-after"]
    assert (await post(http)).status_code == 503
    service.engine = service.ready = None
    health = await http.get("/health")
    assert (health.status_code, health.json()["phase"]) == (503, "loading")


async def test_before_the_model_is_ready_requests_get_503_to_come_back(http, service):
    service.ready = None
    response = await post(http)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
    assert response.headers["retry-after"]
    assert (await http.get("/v1/models")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold", [0, 2], ids=["in the queue", "while decoding"])
async def test_a_client_that_leaves_frees_its_request(base_url, engine, chat, stream, hold):
    engine.says(ids(chat, "Hello the end"))
    engine.hold(at=hold)
    async with httpx.AsyncClient(base_url=base_url, verify=False) as leaver:
        request = asyncio.create_task(post(leaver, stream=stream))
        await engine.until("submit")
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    await engine.until("abort")
    assert [(abort.index, abort.keep) for abort in engine.aborts] == [(-1, None)]
    assert engine.open_requests == 0


async def test_a_client_that_closes_its_stream_early_frees_its_request(client, engine, chat):
    engine.says(ids(chat, "Hello the end"))
    engine.hold(at=2)
    stream = await client.chat.completions.create(model="default", messages=ASK, stream=True)
    assert (await anext(stream)).choices[0].delta.content == "Hello"
    await stream.close()
    await engine.until("abort")
    assert engine.open_requests == 0


class TestQueue:
    @pytest.fixture
    def app_settings(self) -> Settings:
        return Settings(queue_limit=1)

    async def test_when_the_queue_is_full_a_request_is_429_to_come_back(self, http, client, engine):
        engine.hold(at=0)
        waiting = [asyncio.create_task(post(http)) for _ in range(READY.slots + 1)]
        while len(engine.submits) < READY.slots + 1:
            engine.changed.clear()
            await engine.changed.wait()
        refused = await post(http)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert refused.headers["retry-after"]
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="default", messages=ASK, stream=True)
        engine.release()
        assert {response.status_code for response in await asyncio.gather(*waiting)} == {200}

    async def test_more_prompts_than_will_ever_fit_are_400(self, http, engine):
        response = await post(http, "/v1/completions", prompt=["a"] * 6)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


# ---------------------------------------------------------------- around the routes


class TestKey:
    @pytest.fixture
    def app_settings(self) -> Settings:
        return Settings(api_key="sesame", cors_origin=("https://app.example",))

    async def test_the_key_is_asked_for_on_every_route_but_health(self, http, engine):
        for path in ("/v1/models", "/metrics", "/v1/nothing"):
            response = await http.get(path)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
            assert response.headers["x-request-id"]
        assert (await http.get("/health")).status_code == 200

    async def test_only_the_right_key_opens(self, base_url, engine):
        async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="sesame", max_retries=0) as right:
            assert (await right.chat.completions.create(model="default", messages=ASK)).choices
        async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="Sesame", max_retries=0) as wrong:
            with pytest.raises(openai.AuthenticationError):
                await wrong.models.list()

    async def test_a_browser_of_a_named_origin_may_ask_before_and_read_after(self, http, engine):
        ask = {"origin": "https://app.example", "access-control-request-method": "POST"}
        preflight = await http.options(CHAT, headers={**ask, "access-control-request-headers": "authorization"})
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, ask["origin"])
        refused = await http.get("/v1/models", headers={"origin": ask["origin"]})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ask["origin"])
        other = await http.get("/health", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


class TestSize:
    @pytest.fixture
    def app_settings(self) -> Settings:
        return Settings(max_body_bytes=1000)

    async def test_a_body_over_the_limit_is_413_announced_or_not(self, http, engine):
        async def pieces():
            for _ in range(20):
                yield b" " * 100

        for content in (b" " * 1001, pieces()):
            response = await http.post(CHAT, content=content)
            assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


async def test_a_model_without_a_template_has_completions_only(client, service, engine, tmp_path):
    from tiny_tokenizer import build_tokenizer_folder

    service.chat = ChatModel.load(build_tokenizer_folder(tmp_path / "m", template=None))
    engine.says(ids(service.chat, "Hello"))
    with pytest.raises(openai.BadRequestError, match="chat template"):
        await client.chat.completions.create(model="default", messages=ASK)
    assert (await client.completions.create(model="default", prompt="a")).choices[0].text == "Hello"


async def test_a_bug_in_a_route_is_a_500_object_with_an_id(http, service, monkeypatch, caplog):
    monkeypatch.setattr(service, "health", lambda: 1 / 0)
    response = await http.get("/health")
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    assert response.headers["x-request-id"] in caplog.text


async def test_a_request_is_one_log_line_without_its_prompt(client, engine, chat, caplog):
    engine.says(ids(chat, "Hello"))
    caplog.set_level("INFO", logger="cluster")
    await client.chat.completions.create(model="default", messages=[{"role": "user", "content": "my secret"}])
    lines = [record.getMessage() for record in caplog.records if record.name == "cluster.api"]
    assert len(lines) == 1
    assert f"POST {CHAT} 200 req_" in lines[0]
    assert "1 output tokens" in lines[0]
    assert "secret" not in caplog.text


class TestLogPrompts:
    @pytest.fixture
    def app_settings(self) -> Settings:
        return Settings(log_prompts=True)

    async def test_prompts_are_logged_only_on_request(self, client, engine, caplog):
        caplog.set_level("INFO", logger="cluster")
        await client.chat.completions.create(model="default", messages=[{"role": "user", "content": "my secret"}])
        assert "my secret" in caplog.text
