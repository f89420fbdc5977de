"""Settings: what they are (job_config), where they come from (manager), what fits (validate).

No torch here: a configuration can be read, checked and printed on any machine, in a moment.
"""

from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.config.token_count import TokenCount, parse_token_count
from torchtitan_lc.config.validate import (
    accumulation_steps,
    check,
    resolve_degrees,
    resolve_strategy,
    warn,
)

__all__ = [
    "JobConfig",
    "TokenCount",
    "accumulation_steps",
    "check",
    "parse_token_count",
    "resolve_degrees",
    "resolve_strategy",
    "warn",
]
