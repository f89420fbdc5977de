"""Ring attention (Liu et al., arXiv 2310.01889) as a kernel around a kernel.

    ring rank r holds q, k, v of its own tokens; k and v travel round the ring, and each rank meets
    those of every other once:

    step 0      own k, v           causal within the rank's tokens
    step t      those of r - t     rectangles without a mask, see below

Tokens lie in zigzag (layout.py), so a rank holds two chunks of the row. Of two different chunks, one is
wholly before the other, so between them a causal mask is all or nothing; and as documents are
stretches of the row, at most one document reaches from one chunk into the other. So whatever the mask,
a pair of chunks is one rectangle without a mask, or nothing. Adjacent rectangles are joined: a row
that is one document needs a single kernel call per step, each with half the work of a full square.

Partial results are merged by their log-sum-exp in at least fp32 and rounded once at the end; in backward
the kernel gets the merged (out, lse), which makes every rectangle's gradient exact, and dk and dv
travel on in fp32 with the k and v that they belong to until they are home. Each transfer runs while the
kernel works on what has arrived.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lc.attention.documents import Documents
from torchtitan_lc.attention.kernels import Kernel
from torchtitan_lc.attention.layout import Layout, Range
from torchtitan_lc.ops.tiled import sum_dtype


@dataclass(frozen=True)
class Rectangle:
    """Query rows [q_start, q_stop) attend to keys [k_start, k_stop), all to all; indices into what the
    two ranks hold."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int


class Ring:
    """A Kernel whose q, k, v are this ring rank's part of the row, in the order of ``layout``.

    group: the ``ranks`` ranks that hold the rest; collective over them. documents, where given, are
    those of the whole row.
    """

    def __init__(
        self, kernel: Kernel, *, ranks: int, rank: int, group: dist.ProcessGroup | None
    ) -> None:
        self.kernel = kernel
        self.ranks, self.rank, self.group = ranks, rank, group
        self.name = f"ring of {ranks} x {kernel.name}"

    def unsupported(
        self, device_type: str, dtype: torch.dtype, head_dim: int, packed: bool = False
    ) -> str | None:
        return self.kernel.unsupported(device_type, dtype, head_dim, packed)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        scale: float,
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor]:
        mask = self._mask(q, causal, documents)
        others = self._travel(_Moving(self, [k, v]))
        out, lse = self.kernel.forward(
            q, k, v, causal=causal, scale=scale, documents=mask.own_documents
        )
        wide = out.to(sum_dtype(out.dtype))
        total = wide.clone() if wide is out else wide
        del out, wide
        lse = lse.clone()
        for source, (k_there, v_there) in others:
            for rows, box in mask.rectangles(source):
                part, part_lse = self.kernel.forward(
                    q[rows, box.q_start : box.q_stop],
                    k_there[rows, box.k_start : box.k_stop],
                    v_there[rows, box.k_start : box.k_stop],
                    causal=False,
                    scale=scale,
                )
                merge(
                    total[rows, box.q_start : box.q_stop],
                    lse[rows, :, box.q_start : box.q_stop],
                    part,
                    part_lse,
                )
                del part, part_lse
            del k_there, v_there  # or they would be there beside the next
        return total.to(q.dtype), lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        mask = self._mask(q, causal, documents)
        others = self._travel(_Moving(self, [k, v]))
        own = self.kernel.backward(
            dout, q, k, v, out, lse, causal=causal, scale=scale, documents=mask.own_documents
        )
        wide = sum_dtype(q.dtype)
        dq, dk, dv = (grad.to(wide, copy=True) for grad in own)
        del own
        moving = _Moving(self, [dk, dv])
        for source, (k_there, v_there) in others:
            dk, dv = torch.zeros_like(dk), torch.zeros_like(dv)
            for rows, box in mask.rectangles(source):
                queries, keys = slice(box.q_start, box.q_stop), slice(box.k_start, box.k_stop)
                parts = self.kernel.backward(
                    dout[rows, queries],
                    q[rows, queries],
                    k_there[rows, keys],
                    v_there[rows, keys],
                    out[rows, queries],
                    lse[rows, :, queries].contiguous(),
                    causal=False,
                    scale=scale,
                )
                dq[rows, queries] += parts[0]
                dk[rows, keys] += parts[1]
                dv[rows, keys] += parts[2]
                del parts
            del k_there, v_there
            # What the ranks before this one have found arrives now, after the kernel, and moves on.
            arrived = moving.arrived()
            for found, before in zip((dk, dv), arrived, strict=True):
                found += before
            del arrived, found, before
            moving = _Moving(self, [dk, dv])
        dk, dv = moving.arrived()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _mask(self, q: Tensor, causal: bool, documents: Documents | None) -> _Mask:
        seq_len = q.shape[1] * self.ranks
        bounds = documents.bounds if documents is not None else None
        return _Mask(self.ranks, self.rank, seq_len, causal, bounds)

    def _travel(self, moving: _Moving) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """Yield (ring rank, its k and v) for every other rank, one step of the ring after the other;
        the next ones are on their way while the caller works. ``moving``: the own ones, sent before
        the first kernel was called, or the transfer would queue behind it on a GPU."""
        for step in range(1, self.ranks):
            tensors = moving.arrived()
            if step + 1 < self.ranks:
                moving = _Moving(self, tensors)
            # Handed over, not kept: while these are read the next ones arrive.
            yield (self.rank - step) % self.ranks, (tensors.pop(0), tensors.pop(0))


class _Moving:
    """Tensors on their way to the next ring rank, and those of the previous one on their way here."""

    def __init__(self, ring: Ring, tensors: list[Tensor]) -> None:
        tensors = [x.contiguous() for x in tensors]
        self._received = [torch.empty_like(x) for x in tensors]
        self._sent = tensors  # alive until they have left
        group = ring.group
        assert group is not None
        following = dist.get_global_rank(group, (ring.rank + 1) % ring.ranks)
        previous = dist.get_global_rank(group, (ring.rank - 1) % ring.ranks)
        calls = []
        for sent, received in zip(tensors, self._received, strict=True):
            if sent.numel():
                calls.append(dist.P2POp(dist.isend, sent, following, group))
                calls.append(dist.P2POp(dist.irecv, received, previous, group))
        self._works = dist.batch_isend_irecv(calls) if calls else []

    def arrived(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        self._sent = []
        return self._received


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Fold a partial attention result into (out, lse), in place.

    out [B,S,n,D] and lse [B,n,S] in at least fp32, lse finite; part and part_lse likewise shaped. The
    weights are exp of differences to the common log-sum-exp, at most 1, so nothing overflows.
    """
    both = torch.logaddexp(lse, part_lse)
    keep, add = ((x - both).exp().transpose(1, 2).unsqueeze(-1) for x in (lse, part_lse))
    out.mul_(keep).add_(part * add)
    lse.copy_(both)


@dataclass(frozen=True)
class _Mask:
    """Who attends to whom between the parts of a row that ring ranks hold. Pure."""

    ranks: int
    rank: int
    seq_len: int
    causal: bool
    bounds: tuple[tuple[int, ...], ...] | None  # of the whole rows; None: each row is one document

    @property
    def own_documents(self) -> Documents | None:
        """Documents as this rank's own tokens see them: a document that lies in both of its chunks
        is one stretch here, in the right order."""
        if self.bounds is None:
            return None
        ranges = Layout(ring=self.ranks).ring_ranges(self.rank, self.seq_len)
        return _own_documents(self.bounds, tuple(ranges))

    def rectangles(self, source: int) -> list[tuple[slice, Rectangle]]:
        """(rows, rectangle) for this rank's queries and the keys of ring rank ``source``."""
        rows = self.bounds or ((0, self.seq_len),)
        boxes = [
            _rectangles(self.ranks, self.rank, source, self.seq_len, self.causal, bounds)
            for bounds in rows
        ]
        if all(b == boxes[0] for b in boxes):
            return [(slice(None), box) for box in boxes[0]]
        return [(slice(i, i + 1), box) for i, row in enumerate(boxes) for box in row]


@lru_cache(maxsize=8)
def _own_documents(
    rows: tuple[tuple[int, ...], ...], ranges: tuple[Range, ...]
) -> Documents | None:
    """One object for all layers and stages of a micro-batch: it keeps its boundaries on the device, and
    a copy from the host at every kernel call would make the host wait for the device each time."""
    clipped = tuple(_clip(bounds, ranges) for bounds in rows)
    return None if all(len(row) == 2 for row in clipped) else Documents(clipped)


def _clip(bounds: tuple[int, ...], ranges: tuple[Range, ...]) -> tuple[int, ...]:
    """Boundaries of the documents within ``ranges`` of a row, laid end to end."""
    result, at, last = [0], 0, -1
    for start, stop in ranges:
        first = bisect_right(bounds, start) - 1
        if at and first != last:
            result.append(at)
        inner = [at + b - start for b in bounds if start < b < stop]
        result += inner
        last = bisect_right(bounds, stop - 1) - 1
        at += stop - start
    result.append(at)
    return tuple(result)


@lru_cache(maxsize=4096)
def _rectangles(
    ranks: int, rank: int, source: int, seq_len: int, causal: bool, bounds: tuple[int, ...]
) -> tuple[Rectangle, ...]:
    layout = Layout(ring=ranks)
    chunk = seq_len // (2 * ranks)
    found: list[Rectangle] = []
    for i, queries in enumerate(layout.ring_ranges(rank, seq_len)):
        row: list[Rectangle] = []
        for j, keys in enumerate(layout.ring_ranges(source, seq_len)):
            if causal and keys[0] > queries[0]:
                continue
            pair = _shared(queries, keys, bounds)
            if pair is None:
                continue
            (q0, q1), (k0, k1) = pair
            q_shift, k_shift = i * chunk - queries[0], j * chunk - keys[0]
            row.append(Rectangle(q0 + q_shift, q1 + q_shift, k0 + k_shift, k1 + k_shift))
        found += _join_keys(row)
    return tuple(_join_queries(found))


def _shared(queries: Range, keys: Range, bounds: Sequence[int]) -> tuple[Range, Range] | None:
    """The parts of two disjoint chunks that belong to the one document which reaches from the earlier
    into the later; None when there is none."""
    early, late = sorted((queries, keys))
    document = bisect_right(bounds, early[1] - 1) - 1
    start, stop = bounds[document], bounds[document + 1]
    if stop <= late[0]:
        return None
    parts = (max(early[0], start), early[1]), (late[0], min(late[1], stop))
    return parts if early == queries else (parts[1], parts[0])


def _join_keys(row: list[Rectangle]) -> list[Rectangle]:
    if len(row) == 2:
        a, b = row
        if (a.q_start, a.q_stop) == (b.q_start, b.q_stop) and a.k_stop == b.k_start:
            return [Rectangle(a.q_start, a.q_stop, a.k_start, b.k_stop)]
    return row


def _join_queries(boxes: list[Rectangle]) -> list[Rectangle]:
    if len(boxes) == 2:
        a, b = boxes
        if (a.k_start, a.k_stop) == (b.k_start, b.k_stop) and a.q_stop == b.q_start:
            return [Rectangle(a.q_start, b.q_stop, a.k_start, a.k_stop)]
    return boxes
