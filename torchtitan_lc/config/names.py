"""The names of all settings, dotted ("model.rope.theta"), and the nearest ones to a wrong name."""

import dataclasses
import difflib
import functools
from typing import Any, get_type_hints

from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.config.values import Kind, kind_of


@functools.cache
def all_keys() -> dict[str, Kind]:
    """Every settable key with the kind of its value, in the order of declaration."""
    return dict(_walk(JobConfig, ""))


@functools.cache
def all_sections() -> tuple[str, ...]:
    """Every section that can stand in brackets in a TOML file."""
    return tuple(dict.fromkeys(section_of(key) for key in all_keys()))


def section_of(key: str) -> str:
    """ "model.rope" of "model.rope.theta"; "" of a name without a section."""
    return key.rpartition(".")[0]


def get_key(config: JobConfig, key: str) -> Any:
    """The value of a dotted key."""
    return functools.reduce(getattr, key.split("."), config)


def set_key(config: JobConfig, key: str, value: Any) -> None:
    """Put `value` under a dotted key of `config`."""
    section, _, name = key.rpartition(".")
    setattr(get_key(config, section), name, value)


def bracketed(key: str) -> str:
    """A key as a reader of TOML looks for it: "[training] seq_len"."""
    section, _, name = key.rpartition(".")
    return f"[{section}] {name}" if section else name


def unknown_section(section: str) -> str:
    """What is wrong with the section name `section`, and the nearest names that exist."""
    near = difflib.get_close_matches(section, all_sections(), n=2, cutoff=0.6)
    if near:
        return "no such section; did you mean " + _either(f"[{name}]" for name in near) + "?"
    return "no such section; there are " + ", ".join(f"[{name}]" for name in all_sections())


def unknown_key(key: str) -> str:
    """What is wrong with the dotted `key`, and the nearest names that exist.

    The order of guesses: the same name in another section, a similar name in this section, a
    similar name elsewhere; and if nothing is near, all names of the section.
    """
    section, _, name = key.rpartition(".")
    here = [_leaf(known) for known in all_keys() if section_of(known) == section]
    homes = [section_of(known) for known in all_keys() if _leaf(known) == name]
    if homes:
        places = _either(f"[{home}]" for home in homes)
        return f"no such key here; `{name}` exists in {places}"
    near = difflib.get_close_matches(name, here, n=3, cutoff=0.6)
    if near:
        return "no such key; did you mean " + _either(f"`{guess}`" for guess in near) + "?"
    leaves = [_leaf(known) for known in all_keys()]
    elsewhere = difflib.get_close_matches(name, leaves, n=1, cutoff=0.75)
    if elsewhere:
        homes = [section_of(known) for known in all_keys() if _leaf(known) == elsewhere[0]]
        places = _either(f"[{home}]" for home in homes)
        return f"no such key; did you mean `{elsewhere[0]}` in {places}?"
    if not section:
        return "no such key in any section; --help lists them all"
    if not here:
        return unknown_section(section)
    return f"no such key; [{section}] has " + ", ".join(here)


def _walk(section: type, prefix: str) -> list[tuple[str, Kind]]:
    hints = get_type_hints(section, include_extras=True)
    found: list[tuple[str, Kind]] = []
    for item in dataclasses.fields(section):
        annotation: Any = hints[item.name]
        key = prefix + item.name
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            found += _walk(annotation, key + ".")
        else:
            found.append((key, kind_of(annotation)))
    return found


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


def _either(names: Any) -> str:
    return " or ".join(names)
