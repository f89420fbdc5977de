"""Memory and time of a job before it runs, on any machine: `--plan`.

    config, cluster -> job.py          plain numbers, every "auto" decided
    job -> state.py, activations.py    bytes at each moment of a step, asked of those who hold them
        -> timing.py                   seconds by part
        -> moments.py                  what is alive together
    planner.py                         the plan; report.py says it; changes.py proposes; search.py tries all

Nothing here knows what a buffer costs: attention/buffers/, memory/placement.py and the model's own
functions, run on the meta device (tiles.py), say that.
"""
