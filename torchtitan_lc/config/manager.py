"""Command line and TOML file to JobConfig, and back to TOML.

    defaults  <  TOML file  <  command line

    load_config(["--config", "debug", "--training.steps", "20"])

`python -m torchtitan_lc.config.manager --config X ...` prints the resolved configuration. What the
package's __init__ re-exports leaves this module out: imported there, it would be loaded twice by
that command, and Python warns about it.
"""

import difflib
import logging
import os
import sys
from pathlib import Path

from torchtitan_lc.config import names
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.config.manual import print_help
from torchtitan_lc.config.sources import Flag, Found, read_flags, read_toml, split_argv
from torchtitan_lc.config.values import toml_item
from torchtitan_lc.tools.errors import UserError

SHIPPED_FOLDER = Path(__file__).resolve().parents[2] / "train_configs"

logger = logging.getLogger("torchtitan_lc")


def load_config(argv: list[str], *, quiet: bool = False) -> JobConfig:
    """The settings that `argv` (without the program's name) and the file it names stand for.

    Old names that are still understood are logged, unless `quiet`: for a process of a job of which
    another one has said them. `--help` prints all keys and exits with 0.
    Raises UserError with every problem of both sources.
    """
    if any(word in ("-h", "--help") for word in argv):
        print_help("./run_train.sh")
    flags, problems = split_argv(argv)
    path, file_problems = _config_file(flags)
    problems += file_problems
    sources = [(str(path), read_toml(path))] if path else []
    flags = [flag for flag in flags if flag.key != "job.config_file"]
    sources.append(("command line", read_flags(flags)))

    for source, found in sources:
        problems += [f"{source}: {problem}" for problem in found.problems]
    if problems:
        raise UserError(_report(problems))
    for source, found in () if quiet else sources:
        for notice in found.notices:
            logger.warning(f"{source}: {notice}")
    return _build(path, [found for _, found in sources])


def to_toml(config: JobConfig) -> str:
    """All sections and keys of `config`; loading the text gives an equal config.

    Keys that are None are left out, as TOML has no word for it. So is job.config_file, which stands
    in a comment: a loaded config names the file it was really read from. And so is job.print_config, which
    asked for the text: a job started from it is to train.
    """
    left_out = ("job.config_file", "job.print_config")
    lines = []
    if config.job.config_file:
        lines.append(f"# resolved from {toml_item(config.job.config_file)} and the command line")
    for section in names.all_sections():
        lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        for key in names.all_keys():
            value = names.get_key(config, key)
            if names.section_of(key) == section and value is not None and key not in left_out:
                lines.append(f"{key.rpartition('.')[2]} = {toml_item(value)}")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print the resolved configuration; the exit code: 0, or 2 after a user's mistake."""
    try:
        print(to_toml(load_config(sys.argv[1:])), end="")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _build(path: Path | None, sources: list[Found]) -> JobConfig:
    config = JobConfig()
    config.job.config_file = str(path) if path else None
    for found in sources:
        for key, value in found.values.items():
            names.set_key(config, key, value)
    return config


def _config_file(flags: list[Flag]) -> tuple[Path | None, list[str]]:
    """The file that the flags or CONFIG_FILE name, and what is wrong with that choice."""
    given = [(flag.written, flag.text) for flag in flags if flag.key == "job.config_file"]
    if os.environ.get("CONFIG_FILE"):
        given.append(("CONFIG_FILE", os.environ["CONFIG_FILE"]))
    problems: list[str] = []
    chosen: dict[Path, tuple[Path, str]] = {}  # by absolute path: two ways to write one are one
    for name, text in given:
        path = _find(text) if text else None
        if not text:
            problems.append(f"{name}: needs the name of a file")
        elif path is None:
            problems.append(f"{name} {text}: no such file{_shipped_names(text)}")
        else:
            chosen.setdefault(path.resolve(), (path, f"{name} {text}"))
    if len(chosen) > 1:
        written = ", ".join(label for _, label in chosen.values())
        problems.append(f"different config files: {written}; give one")
    return next((path for path, _ in chosen.values()), None), problems


def _find(name: str) -> Path | None:
    """`name` as a path, else as a bare name in train_configs/, with or without ".toml"."""
    candidates = [Path(name)]
    if os.sep not in name:
        candidates += [SHIPPED_FOLDER / name, SHIPPED_FOLDER / f"{name}.toml"]
    return next((path for path in candidates if path.is_file()), None)


def _shipped_names(wanted: str) -> str:
    shipped = sorted(path.stem for path in SHIPPED_FOLDER.glob("*.toml"))
    near = difflib.get_close_matches(Path(wanted).stem, shipped, n=5, cutoff=0.4) or shipped
    return f"; train_configs/ has {', '.join(near)}" if near else ""


def _report(problems: list[str]) -> str:
    if len(problems) == 1:
        return f"The configuration has a problem.\n  {problems[0]}"
    lines = "".join(f"\n  {problem}" for problem in problems)
    return f"The configuration has {len(problems)} problems.{lines}"


if __name__ == "__main__":
    sys.exit(main())
