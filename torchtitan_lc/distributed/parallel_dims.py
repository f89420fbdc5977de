"""How the ranks of a job are divided: data parallel replicas, shards, and the ranks that share a row.

    world = dp_replicate x dp_shard x cp,  cp fastest: the ranks that share a row are neighbours (one node)

    8 ranks, dp_replicate 1, dp_shard 2, cp 4      rows:   0 1 2 3 | 4 5 6 7      each group reads its own rows
                                                   FSDP:   0 ……………………… 7         one shard per rank

FSDP shards parameters over dp_shard x cp, so raising cp costs no parameter memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class ParallelDims:
    """Degrees; their product is the world size."""

    dp_replicate: int
    dp_shard: int
    cp: int

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
        data = init_device_mesh(device_type, (self.dp, self.cp), mesh_dim_names=("dp", "cp"))
        return Meshes(fsdp=fsdp, data=data)


@dataclass(frozen=True)
class Meshes:
    """fsdp: (dp_replicate x) dp_shard_cp, what parameters are sharded over. data: dp x cp."""

    fsdp: DeviceMesh
    data: DeviceMesh

    @property
    def cp_group(self) -> dist.ProcessGroup:
        return self.data.get_group("cp")
