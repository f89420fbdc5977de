"""A run small enough for milliseconds, with everything that a checkpoint has to bring back.

The embedding has 7 rows and the output head 5, so on 2 and 4 ranks the shards are uneven, and on 4
some are empty. Every rank sees the same input, so the averaged gradient, and with it every weight,
is the same at any world size.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torchtitan_lc.components.checkpoint import CheckpointManager
from torchtitan_lc.components.lr_scheduler import build_lr_scheduler
from torchtitan_lc.components.optimizer import build_optimizer
from torchtitan_lc.config.job_config import Checkpoint, LRScheduler, Optimizer

NUM_LANES = 4


class SmallModel(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, width)
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(tokens)))


class TrainState:
    def __init__(self) -> None:
        self.values = {"step": 0, "n_tokens_seen": 0}

    def state_dict(self) -> dict[str, Any]:
        return self.values  # the live object: the manager has to copy it

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = dict(state_dict)


class Lanes:
    """A loader's state: the rows that each lane of this rank has handed out."""

    def __init__(self, lanes: list[int], num_lanes: int = NUM_LANES) -> None:
        self.num_lanes = num_lanes
        self.rows = {f"lane{i}": {"rows": 0, "document": i} for i in lanes}

    def state_dict(self) -> dict[str, Any]:
        return {"num_lanes": self.num_lanes, "fingerprint": "corpus", "lanes": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["num_lanes"] != self.num_lanes:
            raise ValueError(f"{state_dict['num_lanes']} lanes were saved, not {self.num_lanes}")
        self.rows = {lane: dict(state_dict["lanes"][lane]) for lane in self.rows}

    def advance(self) -> None:
        for name, lane in self.rows.items():
            lane["rows"] += 1
            lane["document"] += int(name.removeprefix("lane")) + 1  # lanes move at their own speed


class SmallRun:
    """Model, optimizer, schedule, loader and manager of one rank; FSDP2 if there are processes."""

    def __init__(
        self,
        dump_folder: str | Path,
        config: Checkpoint,
        *,
        seed: int = 0,
        width: int = 6,
        optimizer: Optimizer | None = None,
        identity: str = "small",
        dp_size: int | None = None,
        num_lanes: int = NUM_LANES,
    ) -> None:
        torch.manual_seed(seed)
        self.model = SmallModel(width)
        rank, world = 0, 1
        if dist.is_initialized():
            rank, world = dist.get_rank(), dist.get_world_size()
            mesh = init_device_mesh("cpu", (world,))
            for layer in (self.model.embedding, self.model.head, self.model):
                fully_shard(layer, mesh=mesh)
        dp_size = world if dp_size is None else dp_size
        dp_rank = rank * dp_size // world  # neighbours share a row
        optimizer_config = optimizer or Optimizer(lr=0.05)
        self.optimizer = build_optimizer(self.model.named_parameters(), optimizer_config)
        schedule = LRScheduler(warmup_steps=4, decay_type="cosine")
        self.lr_scheduler = build_lr_scheduler(self.optimizer, schedule, 20)
        self.train_state = TrainState()
        self.lanes = Lanes([i for i in range(num_lanes) if i % dp_size == dp_rank], num_lanes)
        torch.manual_seed(1000 + rank)  # from here on each rank draws its own numbers
        self.manager = CheckpointManager(
            config,
            dump_folder,
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            train_state=self.train_state,
            dataloader=self.lanes,
            model_identity={"name": identity, "flavor": f"width{width}"},
        )

    @property
    def step_number(self) -> int:
        return self.train_state.values["step"]

    def train_one(self) -> None:
        step = self.step_number
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 7, (3, 8), generator=generator)
        self.model(tokens).square().mean().backward()
        self.optimizer.step()
        self.lr_scheduler.step()
        self.optimizer.zero_grad()
        self.lanes.advance()
        torch.rand(2)  # the run uses its random generator
        self.train_state.values["step"] = step + 1
        self.train_state.values["n_tokens_seen"] += 24

    def train_to(self, step: int, *, last_step: int = 0) -> SmallRun:
        while self.step_number < step:
            self.train_one()
            self.manager.save(self.step_number, last_step=self.step_number == last_step)
        return self

    def whole(self) -> dict[str, Any]:
        """Everything that must survive: whole tensors, plain values, the rank's next random number.

        Collective, as gathering a sharded tensor is.
        """
        state: dict[str, Any] = {}
        for name, parameter in self.model.named_parameters():
            state[name] = _gathered(parameter)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                state[f"{name}/{key}"] = _gathered(value)
        before = torch.get_rng_state()
        state["next random number"] = torch.rand(1)
        torch.set_rng_state(before)
        state["lr"] = [group["lr"] for group in self.optimizer.param_groups]
        state["train_state"] = dict(self.train_state.values)
        state["lanes"] = copy.deepcopy(self.lanes.rows)
        return state


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def differing(a: dict[str, Any], b: dict[str, Any], *, without: tuple[str, ...] = ()) -> list[str]:
    """Names whose values are not equal bit for bit; missing ones too."""

    def equal(x: Any, y: Any) -> bool:
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            return torch.equal(x, y)
        return bool(x == y)

    names = (a.keys() | b.keys()) - set(without)
    return sorted(k for k in names if k not in a or k not in b or not equal(a[k], b[k]))
