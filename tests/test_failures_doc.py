"""docs/failures.md has a section with a remedy for every expected failure, and for nothing else."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from cluster import errors

TEXT = (Path(__file__).parent.parent / "docs" / "failures.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL))
CLASSES = {
    name: kind
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.ClusterError) and kind is not errors.ClusterError
}


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_error_has_a_section_that_says_more_than_its_name(name):
    assert len(SECTIONS.get(name, "").split()) >= 10


def test_no_section_describes_an_error_that_does_not_exist():
    assert set(SECTIONS) - set(CLASSES) == set()


def test_every_error_says_in_one_line_what_it_is():
    assert [name for name, kind in CLASSES.items() if not kind.__doc__ or "\n" in kind.__doc__.strip()] == []


def test_wrong_usage_and_failures_have_the_documented_exit_codes():
    usage = {name for name, kind in CLASSES.items() if kind.exit_code == 2}
    assert usage == {name for name in SECTIONS if "Exit code 2." in SECTIONS[name]}
    assert {kind.exit_code for kind in CLASSES.values()} <= {1, 2}
