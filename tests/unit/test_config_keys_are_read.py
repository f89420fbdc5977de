"""No key without an effect: each field of JobConfig is read somewhere, apart from its declaration,
its checks and its printing.

Found in the source by ast: `config.training.seq_len`, or `.seq_len` of a name that holds the
section: `training_config`, a parameter annotated with its class, or a name assigned from one of
these. A plain `config` may be any section, if only one has the field. `getattr(section, variable)`
reads all.
"""

import ast
import dataclasses
import typing
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from torchtitan_lc.config.job_config import JobConfig

PACKAGE = Path(__file__).resolve().parents[2] / "torchtitan_lc"

# Of config/ only these turn settings into what the program uses.
READERS_IN_CONFIG = {"resolve.py"}

NOT_READ = {
    ("job", "config_file"): "names the file that config/ itself reads",
}

Key = tuple[str, str]  # (section, field); of [model.rope] the section is "rope"


def sections(config_class: type, name: str = "") -> Iterator[tuple[str, type]]:
    """(name, dataclass) of every section, nested ones included."""
    hints = typing.get_type_hints(config_class)
    if name:
        yield name, config_class
    for field in dataclasses.fields(config_class):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from sections(hints[field.name], field.name)


def keys(config_class: type) -> set[Key]:
    nested = {name for name, _ in sections(config_class)}
    return {
        (name, field.name)
        for name, section in sections(config_class)
        for field in dataclasses.fields(section)
        if field.name not in nested
    }


def last_name(node: ast.AST) -> str | None:
    """`a` of a, `b` of x.y.b: what a value is called where it is used."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def names_of_sections(tree: ast.AST, classes: dict[str, str]) -> dict[str, set[str]]:
    """Section -> what one module calls it. ``classes``: class name -> section."""
    names = {section: {section, f"{section}_config"} for section in classes.values()}
    classes = dict(classes)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:  # "import Metrics as MetricsConfig"; a torch Optimizer is none
                is_ours = (node.module or "").endswith("job_config")
                section = classes.get(alias.name) if is_ours else None
                if section is None or alias.asname:
                    classes.pop(alias.asname or alias.name, None)
                if section and alias.asname:
                    classes[alias.asname] = section
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            called = node.arg if isinstance(node, ast.arg) else last_name(node.target)
            for part in ast.walk(node.annotation):
                section = classes.get(last_name(part) or "")
                if section and called:
                    names[section].add(called)
    size = -1
    while size != (size := sum(map(len, names.values()))):  # self.config = config, and so on
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.NamedExpr):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for section_names in names.values():
                    if last_name(node.value) in section_names:
                        section_names.update(filter(None, map(last_name, targets)))
    return names


def reads(tree: ast.AST) -> Iterator[tuple[str | None, str | None]]:
    """(name of the owner, field) of each attribute that is read; field None stands for any."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield last_name(node.value), node.attr
        elif isinstance(node, ast.Call) and last_name(node.func) == "getattr":
            owner, field = node.args[:2]
            yield last_name(owner), str(field.value) if isinstance(field, ast.Constant) else None


def keys_read(sources: Iterable[str], config_class: type) -> set[Key]:
    classes = {section.__name__: name for name, section in sections(config_class)}
    wanted = keys(config_class)
    sharing = Counter(field for _, field in wanted)
    found: set[Key] = set()
    for source in sources:
        tree = ast.parse(source)
        names = names_of_sections(tree, classes)
        for owner, read in reads(tree):
            for section, field in wanted:
                is_owner = owner in names[section] or (owner == "config" and sharing[field] == 1)
                if is_owner and read in (field, None):
                    found.add((section, field))
    return found


def test_every_config_key_is_read() -> None:
    config = PACKAGE / "config"
    files = [p for p in PACKAGE.rglob("*.py") if p.parent != config or p.name in READERS_IN_CONFIG]
    unread = keys(JobConfig) - keys_read((p.read_text(encoding="utf-8") for p in files), JobConfig)
    assert {".".join(key) for key in unread ^ set(NOT_READ)} == set()


@dataclasses.dataclass
class First:
    enable: bool = False
    only_here: int = 0


@dataclasses.dataclass
class Second:
    enable: bool = False
    first: First = dataclasses.field(default_factory=First)


@dataclasses.dataclass
class Toy:
    second: Second = dataclasses.field(default_factory=Second)


@pytest.mark.parametrize(
    "source, found",
    [
        ("x = config.second.enable", {("second", "enable")}),
        ("x = config.second.first.enable", {("first", "enable")}),
        ("x = anything.only_here", set()),
        ("x = config.only_here", {("first", "only_here")}),
        ("x = config.enable", set()),
        ("x = getattr(config.first, 'enable')", {("first", "enable")}),
        ("x = getattr(config.first, n)", {("first", "enable"), ("first", "only_here")}),
        ("config.second.enable = True", set()),
        ("def f(c: First | None): return c.enable", {("first", "enable")}),
        ("def f(c): s = c.second; return s.enable", {("second", "enable")}),
        (
            "class A:\n"
            " def __init__(self, c: Second): self._c = c\n"
            " def f(self): return self._c.enable",
            {("second", "enable")},
        ),
        (
            "from x.job_config import First as F\ndef f(c: F): return c.enable",
            {("first", "enable")},
        ),
        ("from torch import First\ndef f(c: First): return c.enable", set()),
    ],
)
def test_a_read_is_found_and_a_write_or_a_namesake_is_none(source: str, found: set[Key]) -> None:
    assert keys_read([source], Toy) == found
    assert keys(Toy) == {("first", "enable"), ("first", "only_here"), ("second", "enable")}
