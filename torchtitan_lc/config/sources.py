"""The two places that settings come from, each read into {dotted key: value} with all complaints.

    TOML file      [training] seq_len = "128K"       -> {"training.seq_len": 131072}
    command line   --training.seq-len=128K           -> {"training.seq_len": 131072}

Neither reader stops at the first mistake: a `Found` carries every value that is right, every
notice, and every problem.
"""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_lc.config import names
from torchtitan_lc.config.renamed import Verdict, look_up
from torchtitan_lc.config.values import from_text, from_toml, toml_item

# Flags that may be written without their section.
SHORT = {"config": "job.config_file", "plan": "plan.enable", "dry_run": "dry_run.enable"}


@dataclass
class Found:
    """What one source says. `values` has current keys and values of the declared types."""

    values: dict[str, Any] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Flag:
    """One command-line setting. `written` is its name as typed; `text` is None for a bare flag."""

    written: str
    key: str
    text: str | None


def read_toml(path: Path) -> Found:
    """The settings of a TOML file."""
    found = Found()
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        found.problems.append(f"not valid TOML: {error}")
    except UnicodeDecodeError as error:
        found.problems.append(f"not a text file in UTF-8: {error}")
    except OSError as error:
        found.problems.append(f"cannot be read: {error.strerror}")
    else:
        _read_table(table, "", found)
    return found


def read_flags(flags: list[Flag]) -> Found:
    """The settings of the command line. A key given twice takes its last value."""
    found = Found()
    for flag in flags:
        shown = flag.written if flag.text is None else f"{flag.written} {flag.text}"
        verdict = look_up(flag.key, "true" if flag.text is None else flag.text)
        _note(verdict, shown, found)
        if verdict != Verdict() and verdict.key is None:
            continue
        try:
            key, value = _flag_value(verdict.key or flag.key, flag)
        except ValueError as error:
            found.problems.append(f"{shown}: {error}")
        else:
            found.values[key] = value
    return found


def split_argv(argv: list[str]) -> tuple[list[Flag], list[str]]:
    """The flags of a command line and the problems of its form.

    A word after a flag is its value unless it starts with "--"; so `--checkpoint.enable` may stand
    alone, and a value that starts with "--" is written `--key=value`.
    """
    flags: list[Flag] = []
    problems: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            problems.append(
                f"{word}: a value without a flag (settings are written --section.key value, "
                "lists with commas)"
            )
            continue
        written, equals, text = word.partition("=")
        value: str | None = text if equals else None
        if not equals and words and not words[0].startswith("--"):
            value = words.pop(0)
        key = written[2:].replace("-", "_")
        flags.append(Flag(written, SHORT.get(key, key), value))
    return flags, problems


def _read_table(table: dict[str, Any], section: str, found: Found) -> None:
    for name, value in table.items():
        key = f"{section}.{name}" if section else name
        is_section = key in names.all_sections() or any(
            known.startswith(key + ".") for known in names.all_sections()
        )
        if is_section and isinstance(value, dict):
            _read_table(value, key, found)
        elif is_section:
            found.problems.append(f"{key} = {toml_item(value)}: [{key}] is a section, not a key")
        else:
            _read_item(key, value, found)


def _read_item(key: str, value: Any, found: Found) -> None:
    is_table = isinstance(value, dict) and key not in names.all_keys()
    shown = f"[{key}]" if is_table else names.bracketed(key)
    verdict = look_up(key, value)
    if is_table and verdict == Verdict():
        found.problems.append(f"{shown}: {names.unknown_section(key)}")
        return
    _note(verdict, shown, found)
    if verdict != Verdict() and verdict.key is None:
        return
    key = verdict.key or key
    if key == "job.config_file":
        found.problems.append(f"{shown}: belongs on the command line; a file cannot choose itself")
    elif key in found.values:
        found.problems.append(f"{shown}: given twice, under its old and its new name")
    elif key not in names.all_keys():
        found.problems.append(f"{shown}: {_no_such_key(key)}")
    else:
        try:
            found.values[key] = from_toml(names.all_keys()[key], value)
        except ValueError as error:
            found.problems.append(f"{shown} = {toml_item(value)}: {error}")


def _flag_value(key: str, flag: Flag) -> tuple[str, Any]:
    """The (key, value) that a flag means. `--section.no_flag` is `--section.flag false`."""
    kinds = names.all_keys()
    section, _, name = key.rpartition(".")
    positive = f"{section}.{name.removeprefix('no_')}"
    positive = look_up(positive, "false").key or positive
    if key not in kinds and name.startswith("no_") and positive in kinds:
        if kinds[positive].base != "bool":
            raise ValueError(f"{positive} is not true or false, so it has no `no_` form")
        if flag.text is not None:
            raise ValueError(f"takes no value; write --{positive} {flag.text}")
        return positive, False
    if key not in kinds:
        raise ValueError(_no_such_key(key))
    if flag.text is None:
        if kinds[key].base == "bool":
            return key, True
        raise ValueError(f"needs a value: {kinds[key].expected}")
    return key, from_text(kinds[key], flag.text)


def _no_such_key(key: str) -> str:
    if "." in key:
        return names.unknown_key(key)
    if key in names.all_sections():
        return f"is a section; its keys are written {key}.name"
    return f"stands outside any section: {names.unknown_key(key)}"


def _note(verdict: Verdict, shown: str, found: Found) -> None:
    if verdict.notice:
        found.notices.append(f"{shown} {verdict.notice}")
    if verdict.problem:
        found.problems.append(f"{shown} {verdict.problem}")
