"""What the row loader promises: every token once, the same rows for any number of ranks, and a
state from which the stream goes on as if it had never stopped."""

import itertools
import json
import logging
import threading
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_lc.components import data as module
from torchtitan_lc.components.data import (
    Lane,
    Position,
    RowLoader,
    build_loader,
    check_dataset,
)
from torchtitan_lc.components.documents import DocumentSource, IndexedDocuments
from torchtitan_lc.components.tokenizer import ByteTokenizer, Tokenizer
from torchtitan_lc.ops.loss import IGNORE_INDEX
from torchtitan_lc.tools.errors import UserError

BYTES = ByteTokenizer()


class Documents(IndexedDocuments):
    def __init__(self, texts: list[str], name: str = "test") -> None:
        self.texts, self.name = texts, name

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, i: int) -> str:
        return self.texts[i]


class Stream(Documents):
    """A source that does not know its length."""

    def count(self):
        return None


class OneToken(ByteTokenizer):
    """GPT-2's habit: one token that is both BOS and EOS."""

    bos_id = eos_id = 256


class NoEnds(ByteTokenizer):
    bos_id = eos_id = None


def stream_of_lane(texts: list[str], j: int, num_lanes: int, length: int) -> list[int]:
    """The first `length` tokens of a lane, written down from the definition."""
    tokens: list[int] = []
    n = j
    while len(tokens) < length:
        text = texts[n % len(texts)]
        tokens += [256, *text.encode(), 257] if text else []
        n += num_lanes
    return tokens[:length]


def loader(
    texts: list[str],
    seq_len: int,
    lanes: Sequence[int] = (0,),
    num_lanes: int = 1,
    source: DocumentSource | None = None,
    tokenizer: Tokenizer = BYTES,
) -> RowLoader:
    return RowLoader(source or Documents(texts), tokenizer, seq_len, lanes, num_lanes)


def expected_positions(tokens: torch.Tensor) -> torch.Tensor:
    """Counted from the start of the row and from each BOS; for tokenizers whose BOS is 256."""
    positions = torch.zeros_like(tokens)
    for row, ids in enumerate(tokens.tolist()):
        for i in range(1, len(ids)):
            positions[row, i] = 0 if ids[i] == 256 else positions[row, i - 1] + 1
    return positions


def rows_of(rows: RowLoader, lanes: Sequence[int], n: int) -> dict[int, list[list[int]]]:
    """n rows of each lane as lists of seq_len + 1 tokens; checks labels and positions too."""
    out: dict[int, list[list[int]]] = {j: [] for j in lanes}
    for _ in range(n):
        batch = rows.next_batch(lanes)
        assert all(t.dtype == torch.int64 and t.is_contiguous() for t in batch.values())
        assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
        if 256 in batch["tokens"] and 257 in batch["tokens"]:  # BOS and EOS of ByteTokenizer
            assert torch.equal(batch["positions"], expected_positions(batch["tokens"]))
        for i, j in enumerate(lanes):
            out[j].append([*batch["tokens"][i].tolist(), int(batch["labels"][i, -1])])
    return out


def joined(rows: list[list[int]]) -> list[int]:
    assert all(a[-1] == b[0] for a, b in itertools.pairwise(rows))
    return [rows[0][0], *(token for row in rows for token in row[1:])]


texts_strategy = st.lists(st.text(alphabet="abc", max_size=40), min_size=1, max_size=7).filter(any)


@settings(deadline=None, max_examples=150)
@given(
    texts=texts_strategy,
    seq_len=st.integers(1, 25),
    num_lanes=st.integers(1, 5),
    before=st.integers(0, 6),
    after=st.integers(1, 6),
    data=st.data(),
)
def test_a_resume_at_any_row_goes_on_with_the_very_next_token(
    texts, seq_len, num_lanes, before, after, data
):
    texts = [text or "x" for text in texts]  # a lane of empty documents has a test of its own
    lanes = data.draw(st.permutations(range(num_lanes)))
    lanes = lanes[: data.draw(st.integers(1, num_lanes))]
    first = loader(texts, seq_len, lanes, num_lanes)
    rows = rows_of(first, lanes, before)
    state = json.loads(json.dumps(first.state_dict()))  # plain numbers and names only
    second = loader(texts, seq_len, lanes, num_lanes)
    second.load_state_dict(state)
    assert second.state_dict() == state
    more = rows_of(second, lanes, after)
    for j in lanes:
        expected = stream_of_lane(texts, j, num_lanes, (before + after) * seq_len + 1)
        assert joined(rows[j] + more[j]) == expected
        assert state["lanes"][f"lane{j}"]["rows"] == before
        assert state["lanes"][f"lane{j}"]["tokens"] == before * seq_len
    first.close()
    second.close()


def test_every_token_but_the_first_is_a_label_exactly_once():
    texts = ["one", "a longer document", "z"]
    total = sum(len(text) + 2 for text in texts)
    rows = loader(texts, seq_len=total - 1)
    batch = rows.next_batch([0])
    expected = stream_of_lane(texts, 0, 1, total)
    assert batch["tokens"][0].tolist() == expected[:-1]
    assert batch["labels"][0].tolist() == expected[1:]
    assert batch["labels"].eq(257).sum() == len(texts)  # the end of a document is learnt
    assert (batch["labels"] != IGNORE_INDEX).all()


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_shards_of_a_row_have_every_label_and_the_row_s_positions(cp):
    batch = loader(["x" * 500], seq_len=64).next_batch([0])
    shards = [{k: t.chunk(cp, dim=1)[r] for k, t in batch.items()} for r in range(cp)]
    labels = torch.cat([s["labels"] for s in shards], dim=1)
    assert torch.equal(labels, batch["labels"]) and (labels != IGNORE_INDEX).sum() == 64
    assert [int(s["positions"][0, 0]) for s in shards] == [r * 64 // cp for r in range(cp)]


@pytest.mark.parametrize("seq_len", [5, 64])
def test_the_rows_of_a_step_do_not_depend_on_the_number_of_ranks(seq_len):
    texts = [chr(97 + i) * (3 + 17 * i % 50) for i in range(11)]
    num_lanes, steps = 4, 6
    whole = rows_of(loader(texts, seq_len, range(4), 4), range(4), steps)
    for dp in (1, 2, 4):
        union: dict[int, list[list[int]]] = {}
        for rank in range(dp):
            lanes = list(range(rank, num_lanes, dp))
            rows = loader(texts, seq_len, lanes, num_lanes)
            for _ in range(steps):  # accumulation: one micro-batch per lane
                for j in lanes:
                    union.setdefault(j, []).extend(rows_of(rows, [j], 1)[j])
        assert union == whole


def test_ranks_of_one_context_parallel_group_get_the_same_rows():
    texts = ["ab" * 9, "c" * 31, "d"]
    peers = [loader(texts, 8, [1, 3], 4) for _ in range(2)]
    assert rows_of(peers[0], [1, 3], 5) == rows_of(peers[1], [1, 3], 5)
    assert peers[0].state_dict() == peers[1].state_dict()


def test_each_document_of_an_epoch_is_read_by_one_lane():
    texts = [chr(97 + i) * 6 for i in range(12)]
    rows = loader(texts, 8, range(3), 3)  # a document with its ends is one row long
    read = rows_of(rows, range(3), 3)
    assert rows.epoch == 0
    read = {j: read[j] + more for j, more in rows_of(rows, range(3), 1).items()}
    assert rows.epoch == 1
    first_letters = [chr(row[1]) for lane in read.values() for row in lane]
    assert sorted(first_letters) == [text[0] for text in texts]


@pytest.mark.parametrize("at", [2, 3, 4])
def test_a_resume_around_the_end_of_an_epoch_is_exact_for_two_more_epochs(at):
    texts = ["aaaa", "b", "c"]  # 6 + 3 + 3 = 12 tokens: an epoch of this lane is 3 rows
    rows = loader(texts, seq_len=4)
    rows_of(rows, [0], at)
    again = loader(texts, seq_len=4)
    again.load_state_dict(rows.state_dict())
    assert again.state_dict() == rows.state_dict()
    more = rows_of(again, [0], 8)[0]
    assert more == rows_of(rows, [0], 8)[0]
    assert joined(more) == stream_of_lane(texts, 0, 1, 4 * (at + 8) + 1)[4 * at :]


def test_a_resume_in_an_epoch_neither_repeats_nor_skips_a_document():
    texts = [chr(0x4E00 + i) for i in range(200)]  # 3 bytes, BOS, EOS: a document is a row of 5

    def read(rows: RowLoader, n: int) -> list[str]:
        return [BYTES.decode(np.array(row[:5])) for row in rows_of(rows, [0], n)[0]]

    first, second = loader(texts, 5), loader(texts, 5)
    before = read(first, 50)  # the thread has prepared one more
    second.load_state_dict(first.state_dict())
    assert sorted(before + read(second, 150)) == sorted(texts)


def test_each_document_is_read_once_in_each_epoch_and_alike_after_a_restart():
    texts = [chr(97 + i) * 6 for i in range(8)]  # a document with its ends is a row of 8

    def epochs() -> list[list[str]]:
        ranks = [loader(texts, 8, [rank], 2) for rank in range(2)]
        return [
            [chr(row[1]) for j in range(2) for row in rows_of(ranks[j], [j], 4)[j]]
            for _ in range(2)
        ]

    first, second = epochs()
    assert sorted(first) == sorted(second) == [text[0] for text in texts]
    assert epochs() == [first, second]


def test_a_state_of_all_ranks_serves_another_number_of_ranks():
    """Ranks add their lanes under keys of their own: no rank's position hides another's."""
    texts = ["a" * 3, "b" * 90, "c" * 40, "d" * 7, "e"]
    merged: dict = {}
    for rank in range(2):
        rows = loader(texts, 16, [rank, rank + 2], 4)
        rows_of(rows, [rank, rank + 2], 5)
        state = rows.state_dict()
        merged = {**state, "lanes": {**merged.get("lanes", {}), **state["lanes"]}}
    one = loader(texts, 16, range(4), 4)
    one.load_state_dict(merged)
    assert one.state_dict() == merged
    expected = rows_of(loader(texts, 16, range(4), 4), range(4), 8)
    assert rows_of(one, range(4), 3) == {j: expected[j][5:] for j in range(4)}


def test_the_counters_are_of_rows_and_tokens_not_of_calls():
    rows = loader(["abc" * 50], 10, [0, 1], 2)
    for _ in range(2):  # two steps of three micro-batches
        for _ in range(3):
            rows.next_batch([0])
    rows.next_batch([1, 1])
    lanes = rows.state_dict()["lanes"]
    assert (lanes["lane0"]["rows"], lanes["lane0"]["tokens"]) == (6, 60)
    assert (lanes["lane1"]["rows"], lanes["lane1"]["tokens"]) == (2, 20)


def test_the_row_length_may_change_at_a_resume():
    texts = ["a" * 30, "b" * 50]
    rows = loader(texts, 8)
    short = rows_of(rows, [0], 3)[0]
    longer = loader(texts, 20)
    longer.load_state_dict(rows.state_dict())
    assert joined(short + rows_of(longer, [0], 2)[0]) == stream_of_lane(texts, 0, 1, 3 * 8 + 41)
    assert longer.state_dict()["lanes"]["lane0"]["tokens"] == 3 * 8 + 2 * 20


def test_more_lanes_than_documents():
    texts = ["a" * 5, "b" * 9]
    rows = rows_of(loader(texts, 6, range(5), 5), range(5), 4)
    for j in range(5):
        assert joined(rows[j]) == stream_of_lane(texts, j, 5, 25)


def test_one_token_in_both_roles_stands_once_between_documents():
    rows = loader(["ab", "cd"], 11, tokenizer=OneToken())
    assert rows.next_batch([0])["tokens"][0].tolist() == [97, 98, 256, 99, 100, 256] + [
        97, 98, 256, 99, 100
    ]  # fmt: skip


def test_a_tokenizer_without_bos_and_eos_joins_the_documents():
    rows = loader(["ab", "cd"], 6, tokenizer=NoEnds())
    assert rows.next_batch([0])["tokens"][0].tolist() == [97, 98, 99, 100, 97, 98]


@pytest.mark.parametrize("tokenizer", [BYTES, NoEnds()])
def test_empty_documents_are_passed_over(tokenizer):
    full, thin = ["ab", "cd", "e"], ["", "ab", "", "", "cd", "e", ""]
    rows = [rows_of(loader(t, 4, tokenizer=tokenizer), [0], 9) for t in (full, thin)]
    assert rows[0] == rows[1]


def test_a_lane_of_only_empty_documents_is_an_error_not_a_hang():
    rows = loader(["ab", "", "cd", ""], 4, range(2), 2)
    rows.next_batch([0])
    with pytest.raises(UserError, match="all documents of test.*empty"):
        rows.next_batch([1])


def test_a_document_with_the_words_of_a_special_token_is_one_document():
    text = "a\x00<|end_of_text|>b"
    rows = loader([text], len(text) + 2)
    assert rows.next_batch([0])["tokens"][0].tolist() == [256, *text.encode(), 257]


def test_a_lane_holds_one_tokenized_document_in_four_bytes_a_token():
    class Watched(Documents):
        def __getitem__(self, i: int) -> str:
            assert lane._held is None  # freed before the next is read
            return super().__getitem__(i)

    texts = ["a" * 1000, "b" * 2000, "c" * 3000]
    lane = Lane(Watched(texts), BYTES, start=0, step=1)
    row, position = lane.read_row(lane.position, seq_len=2500)
    assert row.tokens.shape == (2501,) and row.tokens.base is None
    assert row.starts == (0, 1002)
    held = [v for v in vars(lane).values() if isinstance(v, tuple) and not hasattr(v, "_fields")]
    assert len(held) == 1 and held[0][0] == position.document == 1
    assert held[0][1].dtype == np.int32 and held[0][1].nbytes == 4 * 2002


def test_a_state_of_another_global_batch_is_refused_with_the_fix():
    state = loader(["abc"], 4, range(2), 2).state_dict()
    with pytest.raises(
        UserError, match=r"batch of 2 rows, this run's is 4.*global_batch_size to 2"
    ):
        loader(["abc"], 4, range(4), 4).load_state_dict(state)


def test_a_state_without_a_lane_of_this_rank_is_refused_by_name():
    state = loader(["abc"], 4, [0, 2], 4).state_dict()
    with pytest.raises(UserError, match="no data position of lane1, lane3"):
        loader(["abc"], 4, [1, 2, 3], 4).load_state_dict(state)


def test_a_position_behind_the_end_of_its_document_is_refused():
    rows = loader(["abcdefgh" * 4], 16)
    rows_of(rows, [0], 1)
    other = loader(["abc"], 16)
    other.load_state_dict(rows.state_dict())
    with pytest.raises(UserError, match="at token 16 of document 0 of test, which has only 5 tok"):
        other.next_batch([0])


def test_other_data_at_a_resume_is_a_warning(caplog, monkeypatch):
    monkeypatch.setattr(module.logger, "propagate", True)
    state = loader(["abc"], 4).state_dict()
    assert state["fingerprint"] == {"name": "test", "documents": 1}

    def warned(source: DocumentSource) -> bool:
        caplog.clear()
        with caplog.at_level(logging.WARNING, module.logger.name):
            loader([], 4, source=source).load_state_dict(state)
        return "not that of the checkpoint: it was test with" in caplog.text

    assert not warned(Documents(["abc"]))
    assert not warned(Stream(["abc"]))  # its length is not known yet
    assert warned(Documents(["abc", "def"]))
    assert warned(Documents(["abc"], name="other"))
    state["fingerprint"]["documents"] = 0  # of a stream that had not come to its end
    assert not warned(Documents(["abc", "def"]))


def test_an_error_of_the_thread_reaches_the_caller_with_the_row_it_belongs_to():
    class Broken(Documents):
        def __getitem__(self, i: int) -> str:
            if i == 2:
                raise UserError("line 3 is bad")
            return super().__getitem__(i)

    source = Broken(["a" * 8, "b" * 8, "c" * 8])
    rows = loader([], 10, source=source)
    good = rows_of(rows, [0], 1)[0][0]  # meanwhile the thread runs into document 2
    assert good == stream_of_lane(source.texts, 0, 1, 11)
    state = rows.state_dict()
    for _ in range(2):
        with pytest.raises(UserError, match="line 3 is bad"):
            rows.next_batch([0])
        assert rows.state_dict() == state


def test_a_lane_reads_on_after_an_error_of_its_source():
    class Broken(Documents):
        broken: set[int] = set()

        def __getitem__(self, i: int) -> str:
            if i in self.broken:
                raise UserError("bad")
            return super().__getitem__(i)

    source = Broken(["aa", "bb", "cc", "dd"])
    lane = Lane(source, BYTES, start=0, step=1)
    lane.read_row(Position(0, 0), seq_len=7)  # documents 0 and 1
    source.broken = {0}
    with pytest.raises(UserError, match="bad"):
        lane.read_row(Position(0, 0), seq_len=7)
    row, _ = lane.read_row(Position(2, 0), seq_len=3)
    assert row.tokens.tolist() == [256, *b"cc", 257]


def test_a_document_that_the_tokenizer_cannot_encode_is_named():
    class Refuses(ByteTokenizer):
        def encode(self, text, add_bos, add_eos):
            if "bad" in text:
                raise UserError("cannot encode")
            return super().encode(text, add_bos, add_eos)

    with pytest.raises(UserError, match="document 1 of test: cannot encode"):
        loader(["good", "bad"], 10, tokenizer=Refuses()).next_batch([0])


def test_the_state_is_of_the_rows_handed_out_not_of_those_prepared():
    prepared = threading.Event()

    class Watched(Documents):
        def __getitem__(self, i: int) -> str:
            if i == 3:
                prepared.set()
            return super().__getitem__(i)

    texts = [c * 8 for c in "abcd"]
    rows = loader([], 20, source=Watched(texts))
    first = rows_of(rows, [0], 1)[0]
    assert prepared.wait(10)
    assert rows.state_dict()["lanes"]["lane0"] == {
        "document": 2, "offset": 0, "rows": 1, "tokens": 20
    }  # fmt: skip
    rows.load_state_dict(loader(texts, 20).state_dict())  # and back to the start
    assert rows_of(rows, [0], 2)[0] == [*first, stream_of_lane(texts, 0, 1, 41)[20:]]


def test_a_stream_without_known_length_is_read_by_the_same_loader():
    texts = ["abc", "d" * 20, "ef"]
    rows = loader([], 7, range(2), 2, source=Stream(texts))
    expected = rows_of(loader(texts, 7, range(2), 2), range(2), 9)
    assert rows_of(rows, range(2), 9) == expected
    assert rows.epoch == 0 and rows.fingerprint() == {"name": "test", "documents": 0}


@pytest.mark.parametrize("lanes, num_lanes", [([], 1), ([0, 0], 2), ([2], 2), ([-1], 2)])
def test_lanes_that_do_not_exist_are_refused(lanes, num_lanes):
    with pytest.raises(ValueError, match="must be distinct numbers of 0"):
        loader(["abc"], 4, lanes, num_lanes)


def test_a_batch_of_another_rank_s_lane_is_refused():
    with pytest.raises(ValueError, match=r"lanes \[1\] are not of this rank"):
        loader(["abc"], 4, [0], 2).next_batch([0, 1])


def test_the_section_training_builds_the_loader(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "hello"}\n{"text": "world"}\n')
    config = SimpleNamespace(
        dataset="jsonl", dataset_path=str(tmp_path), seq_len=6, isolate_documents=True
    )
    check_dataset(config)
    rows = build_loader(config, BYTES, lanes=[1], num_lanes=2)
    assert BYTES.decode(rows.next_batch([1])["tokens"][0].numpy()) == "world"
    config.dataset_path = str(tmp_path / "absent")
    with pytest.raises(UserError, match="absent does not exist"):
        check_dataset(config)
    with pytest.raises(UserError, match="absent does not exist"):
        build_loader(config, BYTES, lanes=[1], num_lanes=2)


def test_positions_count_through_the_row_when_documents_are_not_isolated():
    rows = RowLoader(Documents(["ab", "cd"]), BYTES, 8, [0], 1, isolate_documents=False)
    assert rows.next_batch([0])["positions"].tolist() == [list(range(8))]


def test_an_end_token_inside_a_document_starts_no_new_one():
    class EndsInside(ByteTokenizer):
        def encode(self, text, add_bos, add_eos):
            ids = super().encode(text, add_bos, add_eos)
            ids[ids == ord("|")] = 257
            return ids

    batch = RowLoader(Documents(["a|b", "cd"]), EndsInside(), 9, [0], 1).next_batch([0])
    assert batch["tokens"][0].tolist() == [256, 97, 257, 98, 257, 256, 99, 100, 257]
    assert batch["positions"][0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]


def test_documents_without_any_end_token_are_told_apart():
    batch = RowLoader(Documents(["abc", "d", "ef"]), NoEnds(), 6, [0], 1).next_batch([0])
    assert batch["positions"][0].tolist() == [0, 1, 2, 0, 0, 1]


def test_a_document_that_begins_with_the_row_s_last_label_is_none_of_this_row():
    batch = RowLoader(Documents(["ab", "cd"]), BYTES, 4, [0], 1).next_batch([0])
    assert batch["labels"][0, -1] == 256 and batch["positions"][0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("isolate", [True, False])
def test_rows_are_padded_to_the_multiple_without_a_live_label_or_a_lost_token(isolate):
    def rows(multiple: int) -> RowLoader:
        source = Documents(["abcdefgh"])
        return RowLoader(source, BYTES, 7, [0], 1, multiple=multiple, isolate_documents=isolate)

    plain, padded = rows(1), rows(4)
    for _ in range(5):
        want, got = plain.next_batch([0]), padded.next_batch([0])
        assert all(t.shape == (1, 8) and t.is_contiguous() for t in got.values())
        assert all(torch.equal(got[name][:, :7], want[name]) for name in want)
        assert got["labels"][0, 7] == IGNORE_INDEX
        assert got["positions"][0, 7] == 0  # a document of its own
    assert plain.state_dict() == padded.state_dict()
