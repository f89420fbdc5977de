"""Ranks that decide together: one rank looks, all hear; all look, and one refusal stops all; or all say what
they have, and a difference stops all.

A check that raises on one rank alone leaves the others waiting in their next collective until it
times out. These functions turn such a check into the same answer, or the same error, on all.
They are collective over ``group`` (None: the default group); without a process group there is only
one rank to agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist

from torchtitan_lc.tools.errors import UserError

T = TypeVar("T")


def from_rank_zero(look: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``look`` on global rank 0 only; every rank gets its (picklable) value.

    A UserError of ``look`` is raised on every rank. Any other exception is raised as it is on rank
    0, and as RuntimeError with its text on the others.
    """
    if not dist.is_initialized():
        return look()
    answer: list[Any] = [None, None, None]  # value, text of a UserError, text of another error
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            answer[0] = look()
        except UserError as mistake:
            answer[1] = str(mistake)
        except Exception as unexpected:
            error = unexpected
            answer[2] = repr(unexpected)
    dist.broadcast_object_list(answer, src=0, group=group)
    value, mistake_text, error_text = answer
    if mistake_text is not None:
        raise UserError(mistake_text)
    if error is not None:
        raise error
    if error_text is not None:
        raise RuntimeError(f"rank 0 failed: {error_text}")
    return cast(T, value)


def all_or_none(problem: str | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise UserError on every rank if any rank has a ``problem``; the lowest such rank's text."""
    problems = [problem]
    if dist.is_initialized():
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem, group=group)
    for text in problems:
        if text is not None:
            raise UserError(text)


def same_on_all(facts: Mapping[str, str], why: str, group: dist.ProcessGroup | None = None) -> None:
    """Raise UserError on every rank unless all have the same ``facts`` (a text by name): ``why``, and each
    that differs with its texts and the ranks that have it."""
    if not dist.is_initialized():
        return
    of_rank: list[Mapping[str, str]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(of_rank, dict(facts), group=group)
    lines = []
    for name in dict.fromkeys(name for found in of_rank for name in found):
        ranks: dict[str, list[int]] = {}
        for rank, found in enumerate(of_rank):
            ranks.setdefault(found.get(name, "absent"), []).append(rank)
        if len(ranks) > 1:
            texts = [f"{text} on {_named(which)}" for text, which in ranks.items()]
            lines.append(f"  {name}: {'; '.join(texts)}")
    if lines:
        raise UserError("\n".join([why, *lines]))


def _named(ranks: Sequence[int]) -> str:
    """At most four of them."""
    shown = ", ".join(map(str, ranks[:4]))
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
