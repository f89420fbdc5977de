"""The manual: the docstrings under the fields of job_config.py, as data and as `--help`."""

import ast
import dataclasses
import functools
import inspect
from typing import Annotated, Any, get_type_hints

from torchtitan_lc.config import names
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.config.values import kind_of


@functools.cache
def field_docs(section: type) -> dict[str, str]:
    """The text under each field of a section's dataclass, line breaks turned into spaces.

    A field without one is absent. Read from the source, as Python keeps no docstring of a field.
    """
    (definition,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for statement, follower in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = _string_of(follower)
            if text:
                docs[statement.target.id] = " ".join(text.split())
    return docs


def section_doc(section: type) -> str:
    """The docstring of a section's dataclass, line breaks turned into spaces."""
    return " ".join((section.__doc__ or "").split())


def section_types() -> dict[str, type]:
    """The dataclass of each section, in order: {"job": Job, ..., "model.rope": ModelRope}."""
    return {section: type(names.get_key(JobConfig(), section)) for section in names.all_sections()}


def print_help(program: str) -> None:
    """Print tyro's page of all keys with docstrings and defaults, then end the program with 0."""
    import tyro  # here, so that reading a config costs nothing that only this page needs

    tyro.cli(_for_help(JobConfig), prog=program, args=["--help"], use_underscores=True)


def _for_help(section: type) -> Any:
    """The same dataclass with its docs where tyro looks first.

    Left to itself tyro breaks the lines where the source does, and shows a list as words apart.
    """
    import tyro

    hints = get_type_hints(section, include_extras=True)
    fields: list[Any] = []
    for item in dataclasses.fields(section):
        hint: Any = hints[item.name]
        default = dataclasses.field(default=item.default, default_factory=item.default_factory)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            shown = _for_help(hint)
            fields.append((item.name, shown, dataclasses.field(default_factory=shown)))
            continue
        metavar = {"tokens": "TOKENS", "list": "A,B,..."}.get(kind_of(hint).base)
        text = field_docs(section).get(item.name)
        shown = Annotated[hint, tyro.conf.arg(help=text, metavar=metavar)]
        fields.append((item.name, shown, default))
    doc = {"__doc__": section_doc(section)}
    return dataclasses.make_dataclass(section.__name__, fields, namespace=doc)


def _string_of(statement: ast.stmt) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        value = statement.value.value
        return value if isinstance(value, str) else ""
    return ""
