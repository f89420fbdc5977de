"""The tree in README.md names every file of the package, and no other."""

from __future__ import annotations

from pathlib import Path

import torchtitan_lc

PACKAGE = Path(torchtitan_lc.__file__).parent
README = PACKAGE.parent / "README.md"


def named() -> set[str]:
    """Paths of the tree's files below the package, from the indentation of its lines."""
    text = README.read_text(encoding="utf-8")
    block = text.split("## The tree", 1)[1].split("```")[1]
    lines = block.split("torchtitan_lc/\n", 1)[1].split("\ntrain_configs/", 1)[0].splitlines()
    found, folders = set(), [""]
    for line in lines:
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders = folders[:depth]
        if name.endswith("/"):
            folders.append(folders[-1] + name)
        else:
            found.add(folders[-1] + name)
    return found


def test_the_tree_names_every_file_of_the_package() -> None:
    there = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py" or path.parent.parent.name == "models"
    }
    there -= {"models/decoder/__init__.py"}
    assert named() == there
