#!/usr/bin/env python3
"""Write the planned figures of every train_configs/*.toml into it, as a block of comments.

python scripts/plan_configs.py            write the files
python scripts/plan_configs.py --check    exit with 1 if a file is not current

The machine is that of the file's [plan] section. The block begins with "# Planned for" and ends with the first
line that is no comment; where there is none yet, it goes before the first section.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "train_configs"

if __name__ == "__main__":
    # Run as a file, from any folder and before anything is installed.
    sys.path.insert(0, str(ROOT))

from torchtitan_lc.config.manager import load_config  # noqa: E402
from torchtitan_lc.plan.hardware import make_cluster  # noqa: E402
from torchtitan_lc.plan.job import planned_model  # noqa: E402
from torchtitan_lc.plan.planner import make_plan  # noqa: E402
from torchtitan_lc.plan.report import comment_block  # noqa: E402

FIRST = "# Planned for "


def figures(path: Path) -> list[str]:
    """The block of one file."""
    config = load_config(["--config", str(path)], quiet=True)
    plan = make_plan(config, planned_model(config), make_cluster(config.plan))
    return comment_block(plan)


def with_figures(text: str, block: list[str]) -> str:
    """``text`` of a TOML file with ``block`` in place of the one it has, if any."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith(FIRST)), None)
    if start is None:
        start = stop = next(i for i, line in enumerate(lines) if line.startswith("["))
        block = [*block, ""]
    else:
        stop = next(i for i in range(start, len(lines)) if not lines[i].startswith("#"))
    return "\n".join([*lines[:start], *block, *lines[stop:]]) + "\n"


def main() -> int:
    """Write the files, or compare them; the exit code."""
    old = []
    for path in sorted(CONFIGS.glob("*.toml")):
        text = path.read_text(encoding="utf-8")
        new = with_figures(text, figures(path))
        if new == text:
            continue
        old.append(path.name)
        if "--check" not in sys.argv[1:]:
            path.write_text(new, encoding="utf-8")
    if old and "--check" in sys.argv[1:]:
        print(f"{', '.join(old)}: not current, run scripts/plan_configs.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
