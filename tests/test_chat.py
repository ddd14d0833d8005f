"""A model's text side: its files, its template, its prompts."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from api_server import *  # noqa: F403
from tiny_tokenizer import TEMPLATE, build_tokenizer_folder

from cluster.errors import BadRequest, NotAModelFolder
from cluster.serve.chat import SHORT_CHARACTERS, ChatModel, Defaults
from cluster.serve.messages import normal_messages, normal_tools

USER = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}


def text_of(model: ChatModel, ids: list[int]) -> str:
    decoder = model.vocabulary.decoder(model.vocabulary.special)
    return "".join(decoder.push(id) for id in ids)


async def rendered(model: ChatModel, messages: list[dict], tools=None, **options) -> str:
    prompt = await model.chat_prompt(normal_messages(messages), tools and normal_tools(tools), options)
    return text_of(model, prompt.ids)


@pytest.fixture
def build(tmp_path):
    return lambda **settings: ChatModel.load(build_tokenizer_folder(tmp_path / "model", **settings))


def test_importing_the_api_and_loading_a_model_never_imports_mlx(tokenizer_folder):
    program = (
        "import sys, pathlib, cluster.serve.api; from cluster.serve.chat import ChatModel;"
        f"assert ChatModel.load(pathlib.Path({str(tokenizer_folder)!r})).tool_format.name == 'json_tools';"
        "found = [name for name in sys.modules if name.split('.')[0] in ('mlx', 'mlx_lm', 'torch')];"
        "sys.exit(str(found) if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


async def test_a_chat_is_rendered_by_the_models_template(chat):
    assert await rendered(chat, [USER]) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


async def test_tools_calls_and_options_reach_the_template(chat):
    call = {"id": "c", "function": {"name": "add", "arguments": '{"a":2,"b":3}'}}
    chat_with_call = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5"},
    ]
    text = await rendered(chat, chat_with_call, [TOOL], reasoning_effort="low")
    assert '"name": "add"' in text
    assert "<tool_call>add: a=2 b=3</tool_call>" in text
    assert "<|im_start|>tool\n5" in text
    assert "effort low" in text


async def test_a_template_that_opens_the_reasoning_block_is_noticed_but_a_user_who_writes_it_is_not(chat):
    opened = await chat.chat_prompt(normal_messages([USER]), None, {"enable_thinking": True})
    written = await chat.chat_prompt(normal_messages([{"role": "user", "content": "<think>"}]), None, {})
    assert (opened.reasoning, written.reasoning) == (True, False)


async def test_options_cannot_replace_the_template_or_the_call_of_it(chat):
    for name in ("chat_template", "tokenize", "tools", "messages"):
        with pytest.raises(BadRequest, match=name):
            await chat.chat_prompt(normal_messages([USER]), None, {name: "x"})


async def test_a_template_that_raises_is_a_bad_request_with_its_words(build):
    model = build(template="{% if messages[0].content == 'Hello' %}{{ raise_exception('no greeting') }}{% endif %}")
    with pytest.raises(BadRequest, match="no greeting"):
        await model.chat_prompt(normal_messages([USER]), None, {})


async def test_a_model_without_a_template_takes_plain_text_only(build):
    model = build(template=None)
    assert text_of(model, (await model.text_prompt("Hello")).ids) == "Hello"
    with pytest.raises(BadRequest) as caught:
        await model.chat_prompt(normal_messages([USER]), None, {})
    assert caught.value.code == "no_chat_template"


async def test_tools_are_refused_when_the_template_has_no_place_for_them(build):
    model = build(template="{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(BadRequest) as caught:
        await model.chat_prompt(normal_messages([USER]), [TOOL], {})
    assert caught.value.param == "tools"


LATER = [USER, {"role": "assistant", "content": "b"}, {"role": "developer", "content": "BANANA"}, USER]


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE,
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
        "{{ m.role }}:{{ m.content }}\n{% endfor %}",
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
        "{% for m in messages if m.role != 'system' %}{{ m.role }}:{{ m.content }}\n{% endfor %}",
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m.role }}:{{ m.content }}\n{% endfor %}",
    ],
    ids=["anywhere", "raises when late", "reads the first only", "has none"],
)
async def test_a_developer_message_reaches_the_prompt_whatever_the_template_allows(build, template):
    model = build(template=template)
    assert "BANANA" in await rendered(model, LATER)
    assert "BANANA" in await rendered(model, [LATER[2], {"role": "system", "content": "x"}, USER])


async def test_a_long_prompt_is_rendered_away_from_the_event_loop(chat, monkeypatch):
    threads = []
    monkeypatch.setattr("cluster.serve.chat.asyncio.to_thread", _recording(threads))
    await chat.text_prompt("a" * SHORT_CHARACTERS)
    assert threads == []
    prompt = await chat.text_prompt("a" * (SHORT_CHARACTERS + 1))
    assert (len(threads), len(prompt.ids)) == (1, SHORT_CHARACTERS + 1)


async def test_streams_go_on_while_a_long_prompt_is_tokenised(chat):
    begin = last = time.monotonic()
    longest_pause = 0.0
    encoding = asyncio.create_task(chat.text_prompt("the thing " * 200_000))
    while not encoding.done():
        await asyncio.sleep(0)
        now = time.monotonic()
        longest_pause, last = max(longest_pause, now - last), now
    assert longest_pause < (last - begin) / 2


async def test_what_an_agent_wrote_into_its_calls_counts_as_long(chat, monkeypatch):
    threads = []
    monkeypatch.setattr("cluster.serve.chat.asyncio.to_thread", _recording(threads))
    call = {"function": {"name": "write", "arguments": {"content": "a" * SHORT_CHARACTERS}}}
    await chat.chat_prompt(normal_messages([USER, {"role": "assistant", "tool_calls": [call]}]), None, {})
    assert len(threads) == 1


async def test_many_threads_may_encode_at_once(chat):
    texts = [f"{i} " + "the thing " * 2000 for i in range(8)]
    prompts = await asyncio.gather(*(chat.text_prompt(text) for text in texts))
    assert [text_of(chat, prompt.ids) for prompt in prompts] == texts


@pytest.mark.parametrize(
    ("generation", "defaults"),
    [
        (None, Defaults()),
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, Defaults(temperature=0.6, top_p=0.95, top_k=20)),
        ({"do_sample": False, "temperature": 0.6}, Defaults(temperature=0.0)),
        ({"do_sample": True, "min_p": 0.1, "repetition_penalty": 1.1}, Defaults(min_p=0.1, repetition=1.1)),
        ({"temperature": None}, Defaults()),
    ],
)
def test_defaults_come_from_generation_config(build, generation, defaults):
    assert build(generation=generation).defaults == defaults


def test_every_end_of_text_id_of_any_file_stops(build):
    model = build(generation={"eos_token_id": [1, 2]}, config={"eos_token_id": 3, "text_config": {"eos_token_id": 4}})
    assert set(model.stop_ids) == {1, 2, 3, 4, model._tokenizer.eos_token_id}


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(NotAModelFolder, match=str(tmp_path)):
        ChatModel.load(tmp_path)


def test_a_broken_json_file_is_named(tmp_path: Path):
    folder = build_tokenizer_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(NotAModelFolder, match=r"generation_config\.json"):
        ChatModel.load(folder)


def _recording(calls: list):
    to_thread = asyncio.to_thread

    async def record(work, *args):
        calls.append(work)
        return await to_thread(work, *args)

    return record


def test_a_config_that_transformers_rejects_is_a_named_error(tmp_path):
    folder = build_tokenizer_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "llama", "hidden_size": "wide"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotAModelFolder, match=r"its tokenizer does not load"):
        ChatModel.load(folder)
