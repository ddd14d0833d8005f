from __future__ import annotations

from cluster.ship.spread import AT_ONCE, HERE, Copy, Spread

FILES = ["1", "2", "3", "4"]


def everyone(hosts: str) -> dict[tuple[str, str], float]:
    return {(a, b): 1.0 for a in hosts for b in hosts if a != b}


def run(spread: Spread, hosts: str) -> list[Copy]:
    """All copies, each host starting its next one as soon as the last one is done."""
    copies: list[Copy] = []
    while any(map(spread.lacks, hosts)):
        started = [copy for host in hosts if (copy := spread.next_for(host)) is not None]
        assert started, "nobody can go on"
        for copy in started:
            spread.done(copy)
        copies += started
    return copies


def test_every_file_leaves_here_once_when_hosts_can_pass_it_on():
    copies = run(Spread(dict.fromkeys("abc", FILES), {}, everyone("abc")), "abc")
    assert sorted(copy.name for copy in copies if copy.source == HERE) == FILES
    assert sorted((copy.name, copy.target) for copy in copies) == sorted((f, h) for f in FILES for h in "abc")


def test_without_links_between_hosts_everything_comes_from_here():
    copies = run(Spread(dict.fromkeys("abc", FILES), {}, {}), "abc")
    assert {copy.source for copy in copies} == {HERE}
    assert len(copies) == 12


def test_the_fastest_link_is_taken():
    speeds = {("a", "c"): 10.0, ("b", "c"): 80.0}
    spread = Spread({"c": ["1"]}, {"a": {"1"}, "b": {"1"}}, speeds)
    assert spread.next_for("c") == Copy("1", "b", "c")


def test_a_file_that_comes_over_a_link_is_taken_before_one_from_here():
    spread = Spread({"b": ["1", "2"]}, {"a": {"2"}}, everyone("ab"))
    assert spread.next_for("b") == Copy("2", "a", "b")


def test_a_source_sends_only_so_many_at_once():
    spread = Spread({host: [host] for host in "abc"}, {}, {})
    assert [spread.next_for(host) is not None for host in "abc"] == [True] * AT_ONCE + [False]


def test_a_host_waits_for_a_file_that_its_neighbour_is_getting():
    spread = Spread({"a": ["1"], "b": ["1"]}, {}, everyone("ab"))
    first = spread.next_for("a")
    assert first == Copy("1", HERE, "a")
    assert spread.next_for("b") is None
    spread.done(first)
    assert spread.next_for("b") == Copy("1", "a", "b")


def test_a_link_that_failed_is_not_used_again():
    spread = Spread({"b": ["1"]}, {"a": {"1"}}, everyone("ab"))
    copy = spread.next_for("b")
    assert copy == Copy("1", "a", "b")
    spread.failed(copy)
    assert spread.next_for("b") == Copy("1", HERE, "b")


def test_what_a_host_that_gave_up_was_getting_comes_to_others_from_here():
    spread = Spread({"a": ["1"], "b": ["1"]}, {}, everyone("ab"))
    assert spread.next_for("a") is not None
    spread.give_up("a")
    assert not spread.lacks("a")
    assert spread.next_for("b") == Copy("1", HERE, "b")
