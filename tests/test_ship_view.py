from __future__ import annotations

import io

from rich.console import Console

from cluster.show.ship_view import ShipView


def shown(*steps: tuple[str, str, int, int] | str, terminal: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, _environ={})
    with ShipView(console) as view:
        for step in steps:
            if isinstance(step, str):
                view.say(step)
            else:
                view.update(*step)
    return out.getvalue()


def test_plain_lines_come_at_each_quarter_and_not_more_often():
    steps = [("studio-a", "model-1", done * 10**6, 100 * 10**6) for done in range(0, 101, 5)]
    assert shown(*steps).splitlines() == [f"studio-a: copying {done} of 100 MB" for done in (0, 25, 50, 75, 100)]


def test_packages_are_counted():
    assert shown(("studio-a", "installing", 3, 6)) == "studio-a: installing 3 of 6\n"


def test_another_thing_that_happens_is_told_at_once():
    lines = shown(("a", "checking", 90, 100), ("a", "model-1", 10, 10**8), ("a", "checking", 0, 100)).splitlines()
    assert [line.split()[1] for line in lines] == ["checking", "copying", "checking"]


def test_a_terminal_has_a_bar_for_each_host_and_lines_above_them():
    text = shown(("studio-a", "model-1", 5 * 10**7, 10**8), ("studio-b", "installing", 1, 9), "a note", terminal=True)
    assert "50 of 100 MB" in text and "1 of 9" in text and "a note" in text
    assert "studio-a" in text and "studio-b" in text
