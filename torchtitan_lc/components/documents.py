"""Where the text comes from: sources of documents in a fixed order, the same on every rank.

    document n of the endless stream = document n % N of the source, in epoch n // N

Nothing is shuffled: the order is the data's own, so no rank can draw another one and a position
is one number. Shuffle once, when the data set is written. A source is asked for every step-th
document, because that is what one lane of the row loader reads (components/data.py).
"""

import json
import os
import sysconfig
import tokenize
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from torchtitan_lc.components.hf_documents import HFDocuments, check_hf_dataset
from torchtitan_lc.tools.errors import UserError
from torchtitan_lc.tools.logging import warn_once

# A single file may have any suffix; in a folder other files are data of another kind more often.
TEXT_SUFFIXES = [".txt", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cpp", ".cu", ".rs"]
_SCAN_BYTES = 1 << 24


class DocumentSource(Protocol):
    """What the row loader needs of a source of text."""

    name: str

    def count(self) -> int | None:
        """Documents per epoch; None while a stream has not been read to its end."""
        ...

    def documents(self, start: int, step: int) -> Iterator[str]:
        """Documents start, start + step, ... of the endless stream; it never ends.

        Raises UserError for a document that cannot be read.
        """
        ...


class IndexedDocuments(ABC):
    """A source that can read any of its documents at once; opening it reads no text."""

    name: str

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, i: int) -> str:
        """The text of document i, 0 <= i < len; the same at every call."""

    def count(self) -> int:
        return len(self)

    def documents(self, start: int, step: int) -> Iterator[str]:
        n = start
        while True:
            yield self[n % len(self)]
            n += step


class StdlibDocuments(IndexedDocuments):
    """The source text of the running Python's own standard library.

    Document 0 is all top-level modules that are one file; every top-level package is one document
    more. Within a document each file follows a line with its path. Left out: tests, installed
    packages, and what the build of this Python generated.
    """

    name = "stdlib"
    SKIPPED = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}

    def __init__(self) -> None:
        self._root = Path(sysconfig.get_path("stdlib"))
        modules = [
            path
            for path in sorted(self._root.glob("*.py"))
            if not path.name.startswith("_sysconfigdata")
        ]
        packages = (self._package(folder) for folder in sorted(self._root.iterdir()))
        self._documents = [files for files in (modules, *packages) if files]
        if not self._documents:
            raise UserError(
                f'training.dataset is "stdlib" but {self._root} holds no Python source: '
                'set training.dataset to "text" and training.dataset_path to some text.'
            )

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, i: int) -> str:
        parts = []
        for path in self._documents[i]:
            parts += ["# ", path.relative_to(self._root).as_posix(), "\n", _read_python(path), "\n"]
        return "".join(parts)

    def _package(self, folder: Path) -> list[Path]:
        # A folder such as config-3.11-x86_64-linux-gnu is no package: no module has such a name.
        if not folder.is_dir() or not folder.name.isidentifier():
            return []
        found: list[Path] = []
        for parent, folders, files in os.walk(folder):
            folders[:] = [name for name in folders if name not in self.SKIPPED]
            found += [Path(parent, name) for name in files if name.endswith(".py")]
        return [] if folder.name in self.SKIPPED else sorted(found)


class TextDocuments(IndexedDocuments):
    """A text file, or all text files below a folder, sorted by path; each file is a document."""

    def __init__(self, dataset_path: str) -> None:
        self._files = _files(dataset_path, TEXT_SUFFIXES)
        self.name = f"text:{Path(dataset_path).name}"

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, i: int) -> str:
        data = self._files[i].read_bytes()
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            warn_once(
                f"{self._files[i]} is not UTF-8 at byte {error.start}: "
                "what cannot be read becomes U+FFFD."
            )
            return data.decode("utf-8", errors="replace")


class JsonlDocuments(IndexedDocuments):
    """A .jsonl file, or all of a folder sorted by path; each line's "text" is a document.

    Opening it reads the files once for the places of the lines: 8 bytes per document stay.
    """

    def __init__(self, dataset_path: str) -> None:
        self._files = _files(dataset_path, [".jsonl"])
        starts = [_line_starts(path) for path in self._files]
        self._first_of_file = np.cumsum([0, *(len(s) for s in starts)])
        self._starts = np.concatenate(starts)
        self.name = f"jsonl:{Path(dataset_path).name}"
        if not any(self[i] for i in range(len(self))):
            raise _empty(dataset_path)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, i: int) -> str:
        path = self._files[int(np.searchsorted(self._first_of_file, i, side="right")) - 1]
        start = int(self._starts[i])
        with open(path, "rb") as file:
            file.seek(start)
            return _text_of_line(file.readline(), path, start)


def build_documents(dataset: str, dataset_path: str) -> DocumentSource:
    """Open the source of `training.dataset` and `training.dataset_path`.

    Raises UserError if it does not exist, cannot be read, or holds no text.
    """
    if dataset == "stdlib":
        return StdlibDocuments()
    if dataset == "text":
        return TextDocuments(dataset_path)
    if dataset == "jsonl":
        return JsonlDocuments(dataset_path)
    if dataset == "hf":
        return HFDocuments(dataset_path)
    raise _unknown(dataset)


def check_documents(dataset: str, dataset_path: str) -> None:
    """UserError unless the source exists and is not empty; reads at most its first document.

    Of "hf" only the library is looked for: the data set may be reachable from one node only.
    """
    if dataset == "stdlib":
        StdlibDocuments()
    elif dataset == "text":
        TextDocuments(dataset_path)
    elif dataset == "jsonl":
        if not any(_text_of_lines(path) for path in _files(dataset_path, [".jsonl"])):
            raise _empty(dataset_path)
    elif dataset == "hf":
        check_hf_dataset(dataset_path)
    else:
        raise _unknown(dataset)


def _unknown(dataset: str) -> UserError:
    return UserError(f'training.dataset is "{dataset}": choose stdlib, text, jsonl or hf.')


def _empty(dataset_path: str) -> UserError:
    return UserError(f"training.dataset_path {dataset_path} is empty: it holds no text at all.")


def _files(dataset_path: str, suffixes: list[str]) -> list[Path]:
    """The file itself, or the non-empty files below a folder with one of the suffixes, sorted."""
    if not dataset_path:
        raise UserError("training.dataset_path is empty: set it to a file or a folder with data.")
    root = Path(dataset_path)
    if root.is_file():
        files = [root]
    elif root.is_dir():
        files = [
            path
            for path in sorted(root.rglob("*"))
            if path.suffix.lower() in suffixes
            and path.is_file()
            and not any(part.startswith(".") for part in path.relative_to(root).parts)
        ]
    else:
        raise UserError(f"training.dataset_path {dataset_path} does not exist.")
    if not files:
        raise UserError(
            f"training.dataset_path {dataset_path} is empty: no file below it ends in "
            f"{', '.join(suffixes)}."
        )
    files = [path for path in files if path.stat().st_size > 0]
    if not files:
        raise _empty(dataset_path)
    return files


def _read_python(path: Path) -> str:
    """The text of a Python file in the encoding that it declares, else as latin-1."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return path.read_text(encoding="latin-1")


def _line_starts(path: Path) -> npt.NDArray[np.int64]:
    """Byte offsets of the lines of `path` that are not blank, int64 [lines]."""
    found = [np.zeros(1, dtype=np.int64)]
    size = 0
    with open(path, "rb") as file:
        while chunk := file.read(_SCAN_BYTES):
            newlines = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n"))
            found.append(newlines + (size + 1))
            size += len(chunk)
    starts = np.concatenate(found)
    lengths = np.diff(starts, append=size)
    return starts[lengths > 2]  # a blank line is at most "\r\n"; no document is so short


def _text_of_lines(path: Path) -> str:
    """The first text of a .jsonl file that is not empty, or ""."""
    start = 0
    with open(path, "rb") as file:
        for line in file:
            if line.strip() and (text := _text_of_line(line, path, start)):
                return text
            start += len(line)
    return ""


def _text_of_line(line: bytes, path: Path, start: int) -> str:
    """The "text" of a JSON line that begins at byte `start` of `path`."""
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError) as error:
        detail = 'it has no field "text"' if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"{path}:{_line_number(path, start)} is not a document: {detail}"
        ) from error
    if not isinstance(text, str):
        raise UserError(
            f'{path}:{_line_number(path, start)} is not a document: "text" is a '
            f"{type(text).__name__}, not a string"
        )
    # JSON can spell half of a surrogate pair, which no tokenizer can take.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _line_number(path: Path, start: int) -> int:
    newlines = 0
    with open(path, "rb") as file:
        while start > 0 and (chunk := file.read(min(start, _SCAN_BYTES))):
            newlines += chunk.count(b"\n")
            start -= len(chunk)
    return newlines + 1
