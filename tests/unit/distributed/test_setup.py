"""What a job sets for NCCL before its process groups, and leaves where the user has set it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch.distributed as dist

from torchtitan_lc.distributed.setup import init_distributed


@pytest.mark.parametrize(
    "users", [{}, {"TORCH_NCCL_HIGH_PRIORITY": "0", "TORCH_FR_BUFFER_SIZE": "7"}]
)
def test_exchanges_go_before_kernels_unless_the_user_says_otherwise(
    users: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {"TORCH_NCCL_HIGH_PRIORITY": "1", "TORCH_FR_BUFFER_SIZE": "2000"}
    for name in (*ours, "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    seen: dict[str, str] = {}

    def started(*_: Any, **__: Any) -> None:
        seen.update({name: os.environ[name] for name in ours})

    monkeypatch.setattr(dist, "init_process_group", started)
    init_distributed("cpu", timeout_seconds=1, trace_buffer_size=2000)
    assert seen == {**ours, **users}
