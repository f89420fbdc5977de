#!/usr/bin/env python3
"""Write docs/configuration.md from the docstrings of torchtitan_lc/config/job_config.py.

python scripts/write_config_docs.py            write the file
python scripts/write_config_docs.py --check    exit with 1 if the file is not current
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"

if __name__ == "__main__":
    # Run as a file, from any folder and before anything is installed.
    sys.path.insert(0, str(ROOT))

from torchtitan_lc.config import names  # noqa: E402
from torchtitan_lc.config.job_config import JobConfig  # noqa: E402
from torchtitan_lc.config.manual import field_docs, section_doc, section_types  # noqa: E402
from torchtitan_lc.config.values import Kind, toml_item  # noqa: E402

OPENING = """\
# Configuration

Generated from `torchtitan_lc/config/job_config.py` by `scripts/write_config_docs.py`; edit there.

A setting comes from the command line (`--section.key value`), else from the TOML file (`--config`),
else from the default below. On the command line `--section.key=value` and dashes for underscores
are the same; a boolean is switched by `--section.key` and `--section.no_key`, or given `true` or
`false`; a list is written with commas; `none` empties a key that may be empty. Wherever tokens are
counted, `"128K"` and `"5M"` are 128 x 1024 and 5 x 1024 x 1024.

An unknown key, a wrong type or a combination that cannot run is an error, and all of them are
reported together. Names of TorchTitan that have moved are accepted with a notice.
`python -m torchtitan_lc.config.manager --config NAME ...` prints what a command line resolves to.
"""


def page() -> str:
    """The whole text of docs/configuration.md."""
    parts = [OPENING]
    defaults = JobConfig()
    for section, section_type in section_types().items():
        docs = field_docs(section_type)
        parts.append(f"\n## [{section}]\n\n{section_doc(section_type)}\n\n")
        for key, kind in names.all_keys().items():
            if names.section_of(key) != section:
                continue
            name = key.rpartition(".")[2]
            default = names.get_key(defaults, key)
            shown = "left out" if default is None else f"`{toml_item(default)}`"
            parts.append(f"- **{name}** ({_kind(kind)}; default {shown})  \n  {docs[name]}\n")
    return "".join(parts)


def _kind(kind: Kind) -> str:
    if kind.base == "choice":
        return " | ".join(f"`{choice}`" for choice in kind.choices)
    words = {"tokens": "token count", "str": "string", "list": "list of strings"}
    return words.get(kind.base, kind.base)


def main() -> int:
    """Write the page, or compare it; the exit code."""
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    print(f"{PAGE.name} is not current: run scripts/write_config_docs.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
