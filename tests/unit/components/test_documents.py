"""What a source of documents promises: a fixed order, every document, and errors with a place."""

import importlib.util
import itertools
import json
import logging
import re
import sys
import sysconfig
import types
from pathlib import Path

import pytest

from torchtitan_lc.components import documents as module
from torchtitan_lc.components.documents import (
    DocumentSource,
    IndexedDocuments,
    JsonlDocuments,
    StdlibDocuments,
    TextDocuments,
    build_documents,
    check_documents,
)
from torchtitan_lc.components.hf_documents import HFDocuments
from torchtitan_lc.tools.errors import UserError
from torchtitan_lc.tools.logging import logger


def take(source: DocumentSource, start: int, step: int, n: int) -> list[str]:
    return list(itertools.islice(source.documents(start, step), n))


def all_of(source: IndexedDocuments) -> list[str]:
    return [source[i] for i in range(len(source))]


def write_jsonl(path: Path, texts: list[str], end: str = "\n") -> Path:
    path.write_text("\n".join(json.dumps({"text": text, "id": 1}) for text in texts) + end)
    return path


def test_the_standard_library_is_long_documents_in_the_same_order_every_time():
    source = StdlibDocuments()
    modules, asyncio = source[0], source[1 + sorted_packages().index("asyncio")]
    assert modules.startswith("# __future__.py\n") and "\n# os.py\n" in modules
    assert len(modules) > 1_000_000
    names = re.findall(r"^# (asyncio/\w+\.py)$", asyncio, re.MULTILINE)
    assert names == sorted(names) and "asyncio/base_events.py" in names
    assert len(source) == 1 + len(sorted_packages()) > 20
    again = StdlibDocuments()
    assert [again[i] for i in (0, 5, -1)] == [source[i] for i in (0, 5, -1)]


def sorted_packages() -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    folders = (d for d in root.iterdir() if d.is_dir() and d.name.isidentifier())
    return sorted(d.name for d in folders if d.name != "test" and any(d.rglob("*.py")))


def test_the_standard_library_has_no_tests_and_no_installed_packages():
    paths = [p.as_posix() for files in StdlibDocuments()._documents for p in files]
    unwanted = r"/(tests?|idle_test|site-packages|dist-packages|__pycache__)/|_sysconfigdata"
    root = Path(sysconfig.get_path("stdlib")).as_posix()
    assert not [p for p in paths if re.search(unwanted, p.removeprefix(root))]


def test_a_python_file_is_read_in_the_encoding_it_declares(tmp_path):
    (tmp_path / "a.py").write_bytes("# coding: latin-1\nx = '\u00e9'\n".encode("latin-1"))
    (tmp_path / "b.py").write_bytes(b"# coding: nonsense\nx = '\xe9'\n")
    assert "\u00e9" in module._read_python(tmp_path / "a.py")
    assert "\u00e9" in module._read_python(tmp_path / "b.py")


def test_documents_go_round_for_ever(tmp_path):
    source = JsonlDocuments(str(write_jsonl(tmp_path / "a.jsonl", list("abcde"))))
    assert take(source, 0, 1, 7) == list("abcdeab")
    assert take(source, 3, 4, 5) == list("dcbae")
    assert take(source, 23, 5, 2) == list("dd")


def test_text_files_of_a_folder_are_sorted_and_hidden_and_empty_ones_left_out(tmp_path):
    (tmp_path / "sub" / ".git").mkdir(parents=True)
    for name in ("b.txt", "sub/a.md", "a.py", "sub/.git/x.txt", ".x.txt", "data.bin"):
        (tmp_path / name).write_text(name)
    (tmp_path / "empty.txt").touch()
    source = TextDocuments(str(tmp_path))
    assert all_of(source) == ["a.py", "b.txt", "sub/a.md"]
    assert all_of(TextDocuments(str(tmp_path / "data.bin"))) == ["data.bin"]


def test_bytes_that_are_not_utf8_are_replaced_and_said(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    (tmp_path / "a.txt").write_bytes(b"good \xff text")
    with caplog.at_level(logging.WARNING, logger.name):
        assert TextDocuments(str(tmp_path))[0] == "good \ufffd text"
    assert "a.txt is not UTF-8 at byte 5" in caplog.text


@pytest.mark.parametrize("scan_bytes", [1, 7, 1 << 24])
def test_jsonl_finds_every_line_of_every_file(tmp_path, monkeypatch, scan_bytes):
    monkeypatch.setattr(module, "_SCAN_BYTES", scan_bytes)
    write_jsonl(tmp_path / "b.jsonl", ["three\nlines\u2028here", "four"], end="")
    write_jsonl(tmp_path / "a.jsonl", ["one", "", "two\ud83d\ude00"], end="\n\n\r\n")
    source = JsonlDocuments(str(tmp_path))
    texts = ["one", "", "two\U0001f600", "three\nlines\u2028here", "four"]
    assert all_of(source) == texts and source.count() == 5


def test_half_a_surrogate_pair_becomes_text_that_can_be_encoded(tmp_path):
    (tmp_path / "a.jsonl").write_text(r'{"text": "bad \ud800 half"}')
    text = JsonlDocuments(str(tmp_path))[0]
    assert text == "bad \ufffd half" and text.encode()


@pytest.mark.parametrize(
    "line, says",
    [
        ('{"text": "cut', "a.jsonl:4 is not a document"),
        ('{"body": "x"}', 'a.jsonl:4 is not a document: it has no field "text"'),
        ('{"text": 7}', 'a.jsonl:4 is not a document: "text" is a int'),
        ("[1, 2]", "a.jsonl:4 is not a document"),
        ('{"text": "\udcff"}', "a.jsonl:4 is not a document"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, says):
    path = tmp_path / "a.jsonl"
    good = '{"text": "good"}\n'
    path.write_bytes(f"{good}\n{good}{line}\n{good}".encode(errors="surrogateescape"))
    source = JsonlDocuments(str(path))
    assert (source[0], source[1], source[3]) == ("good", "good", "good")
    with pytest.raises(UserError, match=re.escape(says)):
        source[2]


@pytest.mark.parametrize("opener", [build_documents, check_documents])
@pytest.mark.parametrize("dataset, suffix", [("text", "txt"), ("jsonl", "jsonl")])
def test_an_empty_dataset_is_refused_by_its_path(tmp_path, opener, dataset, suffix):
    def refused(path: Path | str, says: str) -> None:
        with pytest.raises(UserError, match=says):
            opener(dataset, str(path))

    refused("", "dataset_path is empty: set it")
    refused(tmp_path / "absent", "absent does not exist")
    refused(tmp_path, f"{tmp_path.name} is empty")
    (tmp_path / f"a.{suffix}").touch()
    refused(tmp_path, f"{tmp_path.name} is empty")
    refused(tmp_path / f"a.{suffix}", f"a.{suffix} is empty")
    if dataset == "jsonl":
        (tmp_path / "a.jsonl").write_text('{"text": ""}\n\n{"text": ""}\n')
        refused(tmp_path, f"{tmp_path.name} is empty")
        (tmp_path / "a.jsonl").write_text("plain words\n")
        refused(tmp_path, "a.jsonl:1 is not a document")


@pytest.mark.parametrize("opener", [build_documents, check_documents])
def test_an_unknown_dataset_is_refused_with_the_choices(opener):
    with pytest.raises(UserError, match='"c4".*choose stdlib, text, jsonl or hf'):
        opener("c4", "")


def test_a_dataset_that_is_there_passes_the_check(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["", "one"])
    (tmp_path / "a.txt").write_text("one")
    for dataset in ("stdlib", "text", "jsonl"):
        check_documents(dataset, str(tmp_path))
        assert build_documents(dataset, str(tmp_path)).count()


class FakeStream:
    """The worst that datasets.IterableDataset might do: its iterators share one place."""

    def __init__(self, texts: list, skipped: int = 0) -> None:
        self.texts = texts
        self.at = self.skipped = skipped

    def skip(self, n: int) -> "FakeStream":
        return FakeStream(self.texts, self.skipped + n)

    def __iter__(self):
        self.at = self.skipped
        while self.at < len(self.texts):
            self.at += 1
            yield {"text": self.texts[self.at - 1], "id": self.at}


@pytest.fixture
def stream_of(monkeypatch):
    """A function from texts to a HFDocuments that reads them through a stand-in of the library."""

    def build(texts: list) -> HFDocuments:
        library = types.ModuleType("datasets")
        library.__dict__["load_dataset"] = lambda *args, **kwargs: FakeStream(texts)
        library.__spec__ = importlib.util.spec_from_loader("datasets", None)
        monkeypatch.setitem(sys.modules, "datasets", library)
        return HFDocuments("some/name")

    return build


@pytest.mark.parametrize("start, step", [(0, 1), (2, 3), (4, 5), (6, 7), (5, 1), (23, 4), (10, 12)])
def test_a_stream_of_unknown_length_gives_the_same_documents(stream_of, start, step):
    texts = list("abcde")
    source = stream_of(texts)
    expected = [texts[(start + i * step) % 5] for i in range(12)]
    assert source.count() is None
    assert take(source, start, step, 12) == expected
    assert source.count() == 5
    assert take(source, start, step, 12) == expected  # now with a known length


def test_lanes_of_a_stream_do_not_disturb_one_another(stream_of):
    texts = list("abcdefg")
    source = stream_of(texts)
    lanes = [source.documents(j, 2) for j in range(2)]
    for i in range(20):
        assert [next(lane) for lane in lanes] == [texts[2 * i % 7], texts[(2 * i + 1) % 7]]


def test_a_stream_knows_its_length_after_its_first_end(stream_of):
    source = stream_of(list("abcde"))
    reader = source.documents(3, 1)
    assert [next(reader), next(reader), source.count()] == ["d", "e", None]
    assert [next(reader), source.count()] == ["a", 5]


def test_a_stream_says_what_is_wrong_with_it(stream_of):
    with pytest.raises(UserError, match="some/name is empty"):
        take(stream_of([]), 0, 1, 1)
    with pytest.raises(UserError, match="some/name is empty"):
        take(stream_of([]), 3, 1, 1)
    with pytest.raises(UserError, match='no string in its field "text"; its fields are text, id'):
        take(stream_of([7]), 0, 1, 1)
    assert take(stream_of(["a", None]), 0, 1, 2) == ["a", ""]


def test_a_missing_library_is_refused_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for opener in (build_documents, check_documents):
        with pytest.raises(UserError, match=r"pip install -e '.\[hf\]'"):
            opener("hf", "some/name")
        with pytest.raises(UserError, match="dataset_path is empty"):
            opener("hf", "")


def test_hugging_face_datasets_reads_a_folder(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", [f"a{i}" for i in range(30)])
    write_jsonl(folder / "b.jsonl", [f"b{i}" for i in range(20)])
    texts = [f"a{i}" for i in range(30)] + [f"b{i}" for i in range(20)]
    source = HFDocuments(str(folder))
    lanes = [source.documents(j, 3) for j in range(3)]
    read = [[next(lane) for _ in range(40)] for lane in lanes]
    assert read == [[texts[(j + 3 * i) % 50] for i in range(40)] for j in range(3)]
    assert take(source, 148, 1, 4) == ["b18", "b19", "a0", "a1"]
    with pytest.raises(UserError, match="cannot be opened"):
        HFDocuments(str(tmp_path / "absent"))
