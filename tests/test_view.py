"""What the terminal shows, rendered into a recording console."""

from __future__ import annotations

import io
import json
import os
import shlex
from typing import Any

from rich.console import Console

from cluster.config import ClusterConfig
from cluster.show.view import StartView, amount, curl, ready_text, status_table
from cluster.state import ClusterState, ProcessRecord

URL = "http://127.0.0.1:8080"


def health(status: str, done: int = 0, total: int = 0, **more: Any) -> dict[str, Any]:
    progress = {"what": status, "done": done, "total": total, "unit": "bytes"} if total else None
    return {"status": status, "model": "tiny", "progress": progress, "reason": "", "takes": ["chat"]} | more


def shown(*healths: dict[str, Any], terminal: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=60, _environ={})
    with StartView(URL, None, console, clock=lambda: 0.0) as view:
        for h in healths:
            view.update(h)
    return out.getvalue()


def test_plain_output_names_each_phase_once_and_ends_with_the_ready_block():
    text = shown(health("launching"), health("loading"), health("loading"), health("ready"))
    assert text.split()[:2] == ["launching", "loading"]
    assert text.count("loading") == 1
    assert text.endswith(ready_text(URL, "tiny", None) + "\n")


def test_a_model_without_a_chat_template_is_tried_by_a_plain_continuation():
    text = shown(health("ready", takes=[]))
    assert f"{URL}/v1/completions" in text
    assert "cluster chat" not in text


def test_plain_output_tells_progress_in_quarters():
    text = shown(*(health("loading", done, 400_000_000) for done in range(0, 400_000_001, 4_000_000)))
    lines = [line for line in text.splitlines() if " of " in line]
    assert lines == [f"loading  {n} of 400 MB" for n in (0, 100, 200, 300, 400)]


def test_a_terminal_gets_a_bar_and_the_time_of_each_phase():
    text = shown(health("loading", 100_000_000, 400_000_000), health("ready"), terminal=True)
    assert "100 of 400 MB" in text
    assert "loading      0.0 s" in text


def test_the_curl_line_is_not_wrapped_on_a_narrow_terminal():
    assert curl(URL, "tiny", None) in shown(health("ready"))


def test_a_loss_and_a_failure_tell_their_reason():
    text = shown(health("ready"), health("lost", reason="rank 0: killed"), health("failed", reason="too often"))
    assert "lost         rank 0: killed" in text
    assert "failed       too often" in text


def test_the_curl_line_is_one_shell_command_with_a_json_body():
    words = shlex.split(curl(URL, "it's a model", "key"))
    assert words[:2] == ["curl", f"{URL}/v1/chat/completions"]
    assert words[words.index("-H") + 1] == "Authorization: Bearer key"
    assert json.loads(words[-1])["model"] == "it's a model"


def test_amounts_are_in_units_that_a_person_reads():
    assert amount({"done": 138_000_000, "total": 538_000_000, "unit": "bytes"}) == "138 of 538 MB"
    assert amount({"done": 3_000_000_000, "total": 26_000_000_000, "unit": "bytes"}) == "3 of 26 GB"
    assert amount({"done": 3, "total": 5, "unit": "steps"}) == "3 of 5"
    assert amount({"done": 0, "total": 0, "unit": "steps"}) == ""


def state() -> ClusterState:
    return ClusterState(ProcessRecord.of(os.getpid()), URL, ClusterConfig().without_key(), "", detached=True)


def test_the_status_table_shows_ranks_reason_and_warnings():
    facts = health(
        "lost",
        ranks=[{"rank": 0, "host": "this machine", "pid": 77}],
        reason="no sign of life",
        warnings=["the disk is full"],
        restarts=2,
        last_token_age_s=3.2,
        requests={"running": 1, "waiting": 4},
        context=4096,
    )
    out = io.StringIO()
    Console(file=out, width=100).print(status_table(state(), facts))
    lines = {" ".join(line.split()) for line in out.getvalue().splitlines()}
    assert {
        "status lost",
        "rank 0 this machine, pid 77",
        "reason no sign of life",
        "warning the disk is full",
        "relaunches 2",
        "last token 3 s ago",
        "requests 1 running, 4 waiting",
        "context 4096 tokens",
    } <= lines


def test_the_status_table_shows_links_and_virtual_machines():
    def rank(number, **facts):
        return {"rank": number, "host": f"host-{number}", "pid": 7, "layers": [0, 4]} | facts

    ranks = [rank(0, link="10.0.0.2", device="Apple Paravirtual device"), rank(1, link="10.0.0.3", device="Apple M3")]
    facts = health("ready", ranks=ranks, strategy="pipeline", backend="ring")
    out = io.StringIO()
    Console(file=out, width=100).print(status_table(state(), facts))
    assert "host-0, pid 7, virtual machine, layers 0 to 3, link 10.0.0.2" in out.getvalue()
    assert "host-1, pid 7, layers 0 to 3, link 10.0.0.3" in out.getvalue()
