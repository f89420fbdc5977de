"""Where documents begin and end in packed rows; tokens of one never see those of another.

    positions   0 1 2 3 4 0 1 0 1 2 3       a document begins where the position is 0
    bounds      0         5   7       11

The packer decides boundaries, by restarting positions; no token id means one. Boundaries are kept on the
host, where they decide which kernel calls are made, and on the device as the cu_seqlens that kernels
for packed rows read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """bounds: for each row 0 = b0 < b1 < ... < bn = S; document i of the row is tokens [b_i, b_i+1)."""

    bounds: tuple[tuple[int, ...], ...]
    _on_device: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def from_positions(positions: Tensor) -> Documents | None:
        """positions [B, S] integers on the host -> Documents; None when every row is one document.

        Raises ValueError for a row that does not begin with position 0.
        """
        length = positions.shape[1]
        rows = []
        for row in positions:
            starts = (row == 0).nonzero().flatten().tolist()
            if not starts or starts[0] != 0:
                raise ValueError(
                    "a row must begin with position 0: its first token starts a document"
                )
            rows.append((*starts, length))
        if all(len(row) == 2 for row in rows):
            return None
        return Documents(tuple(rows))

    @property
    def rows(self) -> int:
        return len(self.bounds)

    @property
    def seq_len(self) -> int:
        return self.bounds[0][-1]

    @property
    def max_len(self) -> int:
        """Tokens of the longest document."""
        return max(b - a for row in self.bounds for a, b in zip(row, row[1:], strict=False))

    def cu_seqlens(self, device: torch.device) -> Tensor:
        """[number of documents + 1] int32: boundaries over the rows laid end to end (B*S tokens)."""
        if device not in self._on_device:
            starts = [row * self.seq_len + b for row, bs in enumerate(self.bounds) for b in bs[:-1]]
            total = self.rows * self.seq_len
            host = torch.tensor([*starts, total], dtype=torch.int32)
            self._on_device[device] = host.to(device, non_blocking=True)
        return self._on_device[device]
