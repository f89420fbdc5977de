"""Does this interpreter hold what pyproject.toml asks for? Answers in a fraction of a second.

    python3 scripts/requirements_met.py [EXTRA ...]

Exit code 0: yes. 1: no, and each missing requirement is printed. 3: the Python itself is too old.
Nothing is imported: versions come from the installed metadata, because `import torch` alone takes
seconds. A package that can be imported but carries no metadata (a source tree on PYTHONPATH)
counts as present, since its version cannot be known without running it.
"""

import sys

MINIMUM_PYTHON = (3, 11)
if sys.version_info < MINIMUM_PYTHON:  # said before the imports below, which older ones lack
    wanted, found = (".".join(map(str, v[:2])) for v in (MINIMUM_PYTHON, sys.version_info))
    print(f"Python {wanted} or newer is needed, this is {found}")
    sys.exit(3)

import importlib.metadata  # noqa: E402
import importlib.util  # noqa: E402
import re  # noqa: E402
import tomllib  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402

_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*(.*)$")
_CLAUSE = re.compile(r"^(>=|==|<)\s*([0-9][0-9A-Za-z.]*?)(\.\*)?$")


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.11.0a0+nv25" -> (2, 11, 0).

    Pre-release and local parts are left out on purpose: vendors' containers number their builds
    "2.11.0a0+...", and their torch is the one to use there.
    """
    match = re.match(r"\d+(?:\.\d+)*", version)
    if match is None:
        raise ValueError(f"version {version!r} does not start with a number")
    return tuple(map(int, match.group().split(".")))


def allows(specifier: str, version: str) -> bool:
    """Whether ``version`` satisfies e.g. ">=2.11", "==0.18.*", ">=1,<2", "==4.0.0b36" or ""."""
    return all(_clause_allows(c.strip(), version) for c in specifier.split(",") if c.strip())


def _clause_allows(clause: str, version: str) -> bool:
    match = _CLAUSE.match(clause)
    if match is None:
        raise ValueError(f"requirement clause {clause!r} is not one of >=, ==, < with a version")
    operator, wanted_text, any_suffix = match.groups()
    if operator == "==" and not any_suffix:
        return version.split("+")[0] == wanted_text  # "2.13.0+cpu" is a build of 2.13.0
    wanted, found = release(wanted_text), release(version)
    if operator == "==":
        return found[: len(wanted)] == wanted
    length = max(len(wanted), len(found))
    wanted_padded, found_padded = (v + (0,) * (length - len(v)) for v in (wanted, found))
    return found_padded >= wanted_padded if operator == ">=" else found_padded < wanted_padded


def installed_version(name: str) -> str | None:
    """The version of a distribution, "" if it is importable without metadata, None if absent."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        spec = importlib.util.find_spec(name.replace("-", "_"))
        # A folder that happens to have the package's name is found too, but without an origin.
        return "" if spec is not None and spec.origin is not None else None
    return version or None  # half-removed packages leave metadata without a version


def unmet(
    requirements: list[str], version_of: Callable[[str], str | None] = installed_version
) -> list[str]:
    """One line for each requirement that is missing or present at a version that is not allowed."""
    problems = []
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        if match is None or ";" in requirement:
            raise ValueError(f"requirement {requirement!r} is not of the form name[extra]>=version")
        name, specifier = match.groups()
        version = version_of(name)
        if version is None:
            problems.append(f"{requirement}: not installed")
        elif version and not allows(specifier, version):
            problems.append(f"{requirement}: found {version}")
    return problems


def requirements_of(pyproject: Path, extras: list[str]) -> list[str]:
    """The base dependencies and those of the named extras. KeyError for an unknown extra."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    requirements = list(project["dependencies"])
    for extra in extras:
        requirements += project["optional-dependencies"][extra]
    return requirements


def main() -> int:
    """Print what is missing for the extras on the command line; 0 if nothing is, else 1."""
    pyproject = Path(__file__).resolve().parent.parent / "pyproject.toml"
    problems = unmet(requirements_of(pyproject, sys.argv[1:]))
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
