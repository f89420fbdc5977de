"""What a ring holds around its kernel."""

from __future__ import annotations

from torchtitan_lc.attention.buffers.kernels import backward_workspace
from torchtitan_lc.attention.buffers.sizes import Sizes
from torchtitan_lc.tools.ledger import Ledger


def ring_forward(ledger: Ledger, s: Sizes, n: int, m: int) -> None:
    """Ring.forward: the sum of out in fp32, k and v at hand and on their way, and a part with its product."""
    out, lse = n * s.head, s.lse(n)
    wide = out * s.wide // s.itemsize
    ledger.moment(
        ring_k_and_v=min(s.ring - 1, 2) * 2 * m * s.head,
        ring_sums=wide + lse,
        ring_part=out + lse + wide + 3 * lse,
    )
    ledger.moment(ring_sums=wide, out=out + lse)


def ring_backward(ledger: Ledger, s: Sizes, n: int, m: int) -> None:
    """Ring.backward but for its results: dq in fp32, and dk and dv: of the step, leaving and arriving. Of the
    rank whose queries all meet half of the keys, which holds most."""
    dq, dkv = n * s.head, 2 * m * s.head
    wide = s.wide // s.itemsize
    ledger.moment(
        ring_k_and_v=dkv, dq=dq, dk_and_dv=dkv, kernel_workspace=backward_workspace(s, n, m)
    )
    ledger.moment(ring_k_and_v=dkv, dq=dq, dk_and_dv=dkv, ring_sums=wide * (dq + dkv))
    ledger.moment(
        ring_k_and_v=min(s.ring - 1, 2) * dkv,
        ring_sums=wide * (dq + 3 * dkv),
        ring_part=dq + dkv // 2,
        kernel_workspace=backward_workspace(s, n, m, 0.5),
    )
    ledger.moment(dq=dq, dk_and_dv=dkv, ring_sums=wide * (dq + dkv))
