"""How the ranks of a job are divided: data parallel replicas, shards, and the ranks that share a row.

    world = dp_replicate x dp_shard x cp,  cp = ring x ulysses, the last one fastest: the ranks that
    exchange heads are neighbours (one node), those of a ring may be further apart

    8 ranks, dp_shard 2, cp 4 (ulysses 2)      rows:      0 1 2 3 | 4 5 6 7    each group reads its own rows
                                               ulysses:   0 1 | 2 3 | 4 5 | 6 7
                                               ring:      0 2 | 1 3 | 4 6 | 5 7
                                               FSDP:      0 ……………………… 7      one shard per rank

FSDP shards parameters over dp_shard x cp, so raising cp costs no parameter memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan_lc.attention.base import ALONE, Peers


@dataclass(frozen=True)
class ParallelDims:
    """Degrees; dp_replicate x dp_shard x cp is the world size. ulysses divides cp, the rest is ring."""

    dp_replicate: int
    dp_shard: int
    cp: int
    ulysses: int

    @property
    def ring(self) -> int:
        return self.cp // self.ulysses

    @property
    def dp(self) -> int:
        """Groups that read different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.dp * self.cp

    def dp_rank(self, rank: int) -> int:
        return rank // self.cp

    def cp_rank(self, rank: int) -> int:
        return rank % self.cp

    def build(self, device_type: str) -> Meshes:
        """Create the process groups; collective over all ranks of the job."""
        if dist.get_world_size() != self.world_size:
            raise ValueError(
                f"dp_replicate {self.dp_replicate} x dp_shard {self.dp_shard} x cp {self.cp} = "
                f"{self.world_size} ranks, but {dist.get_world_size()} are running"
            )
        # Two meshes over the same ranks, so that FSDP and the exchange of heads have communicators of
        # their own: they run at the same time, and one communicator would put them in a row.
        sharded = self.dp_shard * self.cp
        if self.dp_replicate > 1:
            fsdp = init_device_mesh(
                device_type,
                (self.dp_replicate, sharded),
                mesh_dim_names=("dp_replicate", "dp_shard_cp"),
            )
        else:
            fsdp = init_device_mesh(device_type, (sharded,), mesh_dim_names=("dp_shard_cp",))
        data = init_device_mesh(
            device_type,
            (self.dp, self.ring, self.ulysses),
            mesh_dim_names=("dp", "ring", "ulysses"),
        )
        return Meshes(fsdp=fsdp, data=data)

    def peers(self, meshes: Meshes, name: str) -> Peers:
        """This rank's peers along "ring" or "ulysses"."""
        ranks = self.ring if name == "ring" else self.ulysses
        if ranks == 1:
            return ALONE
        return Peers(ranks, meshes.data.get_local_rank(name), meshes.data.get_group(name))


@dataclass(frozen=True)
class Meshes:
    """fsdp: (dp_replicate x) dp_shard_cp, what parameters are sharded over. data: dp x ring x ulysses."""

    fsdp: DeviceMesh
    data: DeviceMesh

    def groups(self) -> list[dist.ProcessGroup]:
        """Every process group of the job, the default one first."""
        world = dist.group.WORLD
        assert world is not None
        meshes = (self.fsdp, self.data)
        return [world, *(mesh.get_group(name) for mesh in meshes for name in _names(mesh))]


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()
