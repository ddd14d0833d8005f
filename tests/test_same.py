from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.errors import VersionsDiffer
from cluster.ship.same import HERE, NAMES, Facts, check, differences

A = Facts("a", "25C56", "3.13.5", "0.32.4", "0.32.2", "0123", "89ab")


def test_equal_hosts_pass_without_a_word():
    assert check([A, replace(A, host="b")]) == []


@pytest.mark.parametrize(
    ("fact", "value"),
    [("build", "25D1"), ("python", "3.12.9"), ("mlx", "0.31.0"), ("mlx_lm", ""), ("ours", "x"), ("model", "y")],
)
def test_each_difference_is_named_with_every_hosts_value(fact: str, value: str):
    with pytest.raises(VersionsDiffer) as raised:
        check([A, replace(A, host="b"), replace(A, host="c", **{fact: value})])
    assert raised.value.message.splitlines()[1:] == [
        f"  {NAMES[fact]}: {getattr(A, fact)} on a and b, {value or 'none'} on c"
    ]


def test_all_differences_are_told_at_once_each_with_its_remedy():
    with pytest.raises(VersionsDiffer) as raised:
        check([A, replace(A, host="b", mlx="0.31.0", build="25D1", model="y")])
    assert len(raised.value.message.splitlines()) == 4
    assert "cluster install a b" in raised.value.hint
    assert "Software Update" in raised.value.hint and "cluster pull" in raised.value.hint


def test_the_machine_that_installs_is_no_host_to_install_on():
    with pytest.raises(VersionsDiffer) as raised:
        check([Facts(HERE, ours="x"), A])
    assert "`cluster install a` makes them equal" in raised.value.hint


def test_only_the_last_part_of_pythons_version_may_differ_and_is_told():
    assert check([A, replace(A, host="b", python="3.13.7")]) == ["Python: 3.13.5 on a, 3.13.7 on b"]


def test_what_does_not_count_on_a_host_is_not_compared():
    coordinator = Facts("laptop", ours="0123")
    assert differences([coordinator, A]) == []
    assert [found.fact for found in differences([replace(coordinator, ours="other"), A])] == ["ours"]
