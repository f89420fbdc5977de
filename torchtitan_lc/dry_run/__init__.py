"""The job's own steps by one process, measured against the plan: `--dry_run`.

    config, device -> job.py       what this process runs: which kernel, real or fake tensors, how much memory
        -> trainer.py, rank.py     the Trainer as rank 0 of the world, on torch's fake process group
        -> measure.py              bytes and seconds, and where memory ran out
    compare.py                     measured beside planned, in words and as JSON

Nothing is loaded, saved or compared over ranks: peers are not there.
"""
