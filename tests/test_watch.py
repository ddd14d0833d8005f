"""Which rank is in trouble, from what was heard and when."""

from __future__ import annotations

from cluster.supervision.watch import Limits, Watch
from parallel import wire


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def ready(clock: Clock) -> Watch:
    watch = Watch(["a", "b", "c"], Limits(), 10.0, clock)
    watch.heard(0, wire.Ready(0, 1, "model", 8192, 32, 1, 1, 1, "any", []))
    return watch


def beat(watch: Watch, *ranks: int) -> None:
    for rank in ranks:
        watch.heard(rank, wire.Beat(rank, "ready", 0, 0.0, wire.Stats()))


def test_the_rank_that_is_silent_is_named():
    watch = ready(clock := Clock())
    beat(watch, 0, 1, 2)
    for clock.now in range(1, 8):
        beat(watch, 0, 1)
        assert watch.trouble() == ""
    clock.now = 8.1
    beat(watch, 0, 1)
    assert watch.trouble() == "rank 2 on c: it gave no sign of life for 8 s"


def test_when_nobody_is_heard_it_is_rank_0_through_which_all_are_heard():
    watch = ready(clock := Clock())
    beat(watch, 1, 2)
    clock.now = 0.9
    beat(watch, 0)
    clock.now = 8.1
    assert watch.trouble() == "rank 0 on a: it gave no sign of life for 8 s"


def test_while_rank_0_checks_the_cluster_is_checking():
    watch = Watch(["a", "b"], Limits(), 10.0, Clock())
    for rank in (0, 1):
        watch.heard(rank, wire.Progress(rank, "warming"))
    watch.heard(0, wire.Progress(0, "checking"))
    assert watch.progress()[0] == "checking"


def test_of_ssh_sessions_that_end_the_first_is_named():
    watch = ready(Clock())
    assert watch.hung_up == ""
    for rank in (1, 0, 2):  # mlx.launch ends the others then
        watch.heard(rank, wire.HungUp(rank))
    assert watch.hung_up == "rank 1 on b: its ssh session ended"
