from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def files_in_tree() -> list[str]:
    """The files that the annotated tree names, by indentation, with their folders."""
    block = next(block for block in README.split("```")[1::2] if block.lstrip().startswith("cluster/ "))
    files, folders = [], []
    for line in block.strip().splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name, note = line.split(None, 1)
        assert note.strip(), f"{name} has no description"
        folders = [*folders[:depth], name]
        if not name.endswith("/"):
            files.append("".join(folders))
    return files


def files_of_the_packages() -> list[str]:
    """What git tracks; where this is no git checkout, what is there."""
    packages = ("cluster", "parallel")
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", *packages], capture_output=True, text=True, check=False
    )
    if listed.returncode == 0:
        return [name for name in listed.stdout.split("\0") if name]
    found = [path for package in packages for path in (ROOT / package).rglob("*") if path.is_file()]
    return [str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts]


def test_the_tree_names_every_file_of_both_packages_and_no_other() -> None:
    tree = files_in_tree()
    assert len(tree) == len(set(tree))
    assert set(tree) - set(files_of_the_packages()) == set(), "named in README.md, but not tracked"
    assert set(files_of_the_packages()) - set(tree) == set(), "tracked, but not named in README.md"


@pytest.mark.parametrize("document", ["README.md", "docs/quickstart.md", "docs/architecture.md"])
def test_relative_links_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [link for link in links if not (ROOT / document).parent.joinpath(link).exists()] == []


def test_the_make_targets_that_documents_mention_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = README + "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    mentioned = set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)) | set(re.findall(r"`make ([a-z-]+)", text))
    assert {"up", "test"} <= mentioned <= targets
