"""The model that wrote a checkpoint beside the one that reads it: what differs, and which key sets it.

An identity (models/spec.py) is the model's name, its flavor, and the repr of each of its args.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

# Of a decoder's args: what its rope computes with stands in rope_scaling, the lengths too, and weights that
# are loaded are not initialized. Both differ where only training.seq_len or the flavor's name has changed.
_NOT_COMPUTED_WITH = ("max_position_embeddings", "init_std")
_ROPE_SCALING = "rope_scaling"
_SET_BY = {"name": "model.name", "flavor": "model.flavor", "rope_theta": "model.rope.theta"}


def differing(saved: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """``key: saved value -> this run's`` for each key on which what is computed depends, with the setting
    that gives it where there is one. [] if nothing differs, or ``saved`` says nothing."""
    if not saved:
        return []
    lines: list[str] = []
    for key in {**ours, **saved}:
        old, new = saved.get(key, "not there"), ours.get(key, "not there")
        if old == new or (key in _NOT_COMPUTED_WITH and _ROPE_SCALING in ours):
            continue
        if key == _ROPE_SCALING:
            lines += _of_scaling(old, new)
        else:
            lines.append(_line(key, old, new, _SET_BY.get(key)))
    return lines


def _of_scaling(old: str, new: str) -> Iterator[str]:
    """Those of the settings that differ, where both have the same ones; otherwise all of both."""
    before, now = _settings(old), _settings(new)
    if not now or before.keys() != now.keys():
        yield _line(_ROPE_SCALING, old, new, "model.rope.type and the keys beside it")
        return
    for field in now:
        if before[field] != now[field]:
            key = "training.seq_len" if field == "seq_len" else f"model.rope.{field}"
            yield _line(f"{_ROPE_SCALING}.{field}", before[field], now[field], key)


def _settings(scaling: str) -> dict[str, str]:
    """Of the repr of a dict of plain values; {} for None."""
    return dict(re.findall(r"'(\w+)': ([^,}]+)", scaling))


def _line(key: str, old: str, new: str, set_by: str | None) -> str:
    return f"{key}: {old} -> {new}" + (f" (set by {set_by})" if set_by else "")
