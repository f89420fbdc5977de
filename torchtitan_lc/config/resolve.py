"""What -1 and "auto" stand for: settings that follow from others and from the number of ranks."""

from torchtitan_lc.config.job_config import JobConfig


def resolve_degrees(config: JobConfig, world_size: int) -> tuple[int, int, int]:
    """(replicate, shard, context parallel): positive, with the product `world_size`.

    Raises ValueError naming the degrees if they cannot be laid over that many ranks.
    """
    parallelism = config.parallelism
    replicate = parallelism.data_parallel_replicate_degree
    shard = parallelism.data_parallel_shard_degree
    cp = parallelism.context_parallel_degree
    for name, degree in (
        ("data_parallel_replicate_degree", replicate),
        ("context_parallel_degree", cp),
    ):
        if degree < 1:
            raise ValueError(f"parallelism.{name} = {degree}: must be at least 1")
    if shard < 1 and shard != -1:
        raise ValueError(
            f"parallelism.data_parallel_shard_degree = {shard}: must be at least 1, or -1 for all "
            "ranks that the other degrees leave"
        )
    fixed = replicate * cp * (1 if shard == -1 else shard)
    written = (
        f"parallelism.data_parallel_replicate_degree = {replicate}, data_parallel_shard_degree = "
        f"{shard}, context_parallel_degree = {cp}"
    )
    if shard == -1 and world_size % fixed:
        raise ValueError(
            f"{written}: {replicate} x {cp} = {fixed} does not divide the {world_size} ranks; "
            f"{_have_ranks(config, f'a multiple of {fixed}')}, or choose other degrees"
        )
    if shard != -1 and fixed != world_size:
        raise ValueError(
            f"{written}: the product is {fixed}, but there are {world_size} ranks; "
            f"{_have_ranks(config, str(fixed))}, or set data_parallel_shard_degree = -1 to take what is left"
        )
    return replicate, world_size // (replicate * cp), cp


def _have_ranks(config: JobConfig, wanted: str) -> str:
    if plan_is_asked(config) or config.dry_run.enable:
        return f"plan for {wanted} GPUs (plan.nodes, plan.gpus_per_node)"
    return f"start {wanted} ranks (NGPU, NNODES)"


def plan_is_asked(config: JobConfig) -> bool:
    """Whether the job is to be planned, and not to be started."""
    return config.plan.enable or config.plan.search or bool(config.plan.ladder)


def accumulation_steps(config: JobConfig, dp_degree: int) -> int:
    """Micro-batches per optimizer step; `dp_degree` is replicate x shard.

    Raises ValueError if global_batch_size is no whole number of micro-batches.
    """
    local, wanted = config.training.local_batch_size, config.training.global_batch_size
    rows = local * dp_degree
    if wanted == -1:
        return 1
    if wanted < 1 or wanted % rows:
        near = max(rows, round(wanted / rows) * rows)
        raise ValueError(
            f"training.global_batch_size = {wanted} is not a multiple of local_batch_size {local} "
            f"x data-parallel degree {dp_degree} = {rows}; use {near}, or -1 for one micro-batch"
        )
    return wanted // rows


def resolve_strategy(config: JobConfig) -> str:
    """attention.strategy with "auto" replaced by what it stands for."""
    if config.attention.strategy != "auto":
        return config.attention.strategy
    return "local" if config.parallelism.context_parallel_degree == 1 else "upipe"
