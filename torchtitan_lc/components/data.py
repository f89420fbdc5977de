"""Rows of tokens, cut from an endless stream of documents.

    documents   0   1   2   3   4   5   6 ...        document n: number n % N of epoch n // N
    lane 0      0           3           6            G = 3 lanes: lane j reads j, j+G, j+2G, ...
    lane 1          1           4
    lane 2              2           5

    lane j:     |BOS document EOS|BOS next document EOS|BOS ...
    rows:       |---- S ----|---- S ----|---- S ----|          row k = stream[k*S : k*S + S + 1]

G is the number of rows of one optimizer step over all ranks, so a step's rows are the same
whatever number of ranks shares them, and a document of an epoch is read by one lane only. The
ranks of one context-parallel group own the same lanes and get the same rows.

A row is S inputs and S labels from S + 1 tokens, so rows overlap by one token: every token of a
lane but its first is a label exactly once. Labels are shifted here, on the whole row. Cut into
shards later, no shard has to look for its last label in the next one. Every label is live, EOS
too: padding, where the ranks need some, lies behind the row and is masked by its place, because
a mask made by comparing ids would hide the end of documents.

Positions restart where a document begins, also in the middle of a row; they, and no token id,
say where documents end. What a row cuts off a document is a document of its own in the next row.

Lanes loop over the data for ever, so no rank runs out of it before another.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from torchtitan_lc.components.documents import DocumentSource, build_documents, check_documents
from torchtitan_lc.components.tokenizer import Tokenizer
from torchtitan_lc.ops.loss import IGNORE_INDEX
from torchtitan_lc.tools.errors import UserError
from torchtitan_lc.tools.logging import logger


class DataConfig(Protocol):
    """The part of the section [training] that is read here."""

    @property
    def dataset(self) -> str: ...
    @property
    def dataset_path(self) -> str: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def isolate_documents(self) -> bool: ...


class Position(NamedTuple):
    """Where a lane stands: all that a resume needs to know of it."""

    document: int  # n of the stream, not reduced by the number of documents
    offset: int  # the next row's first token, counted from the document's first token
    rows: int = 0  # rows handed out
    tokens: int = 0  # labels handed out; rows * seq_len as long as seq_len stays the same


class Row(NamedTuple):
    """S + 1 tokens, int32, and where in them a document begins (0 first, each below S)."""

    tokens: npt.NDArray[np.int32]
    starts: tuple[int, ...]


class Lane:
    """One of the G streams of tokens; holds one tokenized document."""

    def __init__(self, source: DocumentSource, tokenizer: Tokenizer, start: int, step: int) -> None:
        self.position = Position(start, 0)
        self.next_row: Future[tuple[Row, Position]] | None = None
        self._source = source
        self._tokenizer = tokenizer
        self._step = step
        self._reader: Iterator[str] = iter(())
        self._reader_at: int | None = None  # the document that the reader gives next
        self._held: tuple[int, npt.NDArray[np.int32]] | None = None

    def read_row(self, position: Position, seq_len: int) -> tuple[Row, Position]:
        """The row that begins at `position`, and the next row's position.

        The next row begins with the last token of this one. Raises UserError for a document
        that cannot be read, and if all documents of the lane are empty.
        """
        n, offset = position.document, position.offset
        if offset and offset >= len(self._document(n)):
            raise UserError(
                f"the checkpoint stands at token {offset} of document {n} of {self._source.name}, "
                f"which has only {len(self._document(n))} tokens: the data or the tokenizer has "
                "changed. Restore it, or start the data afresh with "
                'checkpoint.exclude_from_loading = ["dataloader"].'
            )
        parts: list[npt.NDArray[np.int32]] = []
        missing, empty = seq_len + 1, 0
        while True:
            # A copy: a view would keep all of the document alive beside the next one.
            part = self._document(n)[offset : offset + missing].copy()
            parts.append(part)
            missing -= len(part)
            if missing == 0:
                break
            empty = 0 if len(part) else empty + 1
            if empty == self._source.count():
                raise UserError(
                    f"all documents of {self._source.name} that a lane of {self._step} reads are "
                    "empty: remove the empty documents from the data."
                )
            n, offset = n + self._step, 0
        begins = accumulate((len(part) for part in parts[:-1]), initial=0)
        starts = sorted({start for start in begins if start < seq_len})
        row = Row(np.concatenate(parts), tuple(starts))
        end = offset + len(part) - 1
        return row, Position(n, end, position.rows + 1, position.tokens + seq_len)

    def _document(self, n: int) -> npt.NDArray[np.int32]:
        """The tokens of document n with BOS and EOS; an empty document has none at all."""
        if self._held is not None and self._held[0] == n:
            return self._held[1]
        self._held = None  # free it before the next one is read
        if self._reader_at != n:
            self._reader = self._source.documents(n, self._step)
        self._reader_at = None  # a generator that has raised cannot go on
        text = next(self._reader)
        self._reader_at = n + self._step
        bos, eos = self._tokenizer.bos_id, self._tokenizer.eos_id
        try:
            # One token in both roles is put once between documents, not twice.
            ids = self._tokenizer.encode(
                text,
                add_bos=bool(text) and bos is not None and bos != eos,
                add_eos=bool(text) and eos is not None,
            )
        except UserError as error:
            raise UserError(f"document {n} of {self._source.name}: {error}") from error
        tokens = ids.astype(np.int32)  # held for long; half of int64
        self._held = n, tokens
        return tokens


class RowLoader:
    """Rows of the lanes that this rank owns; one thread prepares the next row of each lane.

    source, tokenizer: the same on every rank. seq_len: tokens per row. lanes: the lanes of this
    rank, of 0..num_lanes-1. num_lanes: rows per optimizer step over all ranks. multiple: rows are
    padded to a multiple of it; the padding is a document of its own without a live label.
    isolate_documents: positions restart where a document begins; else they count through the row.

    The state is that of the rows handed out, never of those prepared ahead. An error of the thread
    is raised by the call that would have returned the row.
    """

    def __init__(
        self,
        source: DocumentSource,
        tokenizer: Tokenizer,
        seq_len: int,
        lanes: Sequence[int],
        num_lanes: int,
        *,
        multiple: int = 1,
        isolate_documents: bool = True,
    ) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len {seq_len} must be at least 1 token")
        if not lanes or len(set(lanes)) < len(lanes) or not set(lanes) <= set(range(num_lanes)):
            raise ValueError(f"lanes {list(lanes)} must be distinct numbers of 0..{num_lanes - 1}")
        self._source = source
        self._seq_len = seq_len
        self._padding = -seq_len % multiple
        self._isolate = isolate_documents
        self._num_lanes = num_lanes
        self._lanes = {j: Lane(source, tokenizer, start=j, step=num_lanes) for j in lanes}
        # One thread, so that sources and tokenizers need not be thread-safe.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rows")

    @property
    def epoch(self) -> int:
        """Epochs that all lanes of this rank have finished; 0 while a stream's end is unknown."""
        count = self._source.count()
        return min(lane.position.document for lane in self._lanes.values()) // count if count else 0

    def next_batch(self, lanes: Sequence[int]) -> dict[str, torch.Tensor]:
        """The next row of each of `lanes`: tokens, labels and positions, int64 [len(lanes), S] and
        the padding, if any, behind it."""
        unknown = set(lanes) - set(self._lanes)
        if unknown:
            raise ValueError(f"lanes {sorted(unknown)} are not of this rank: {list(self._lanes)}")
        rows = [self._take(j) for j in lanes]
        tokens = torch.from_numpy(np.stack([row.tokens for row in rows]).astype(np.int64))
        positions = torch.stack([self._positions(row.starts) for row in rows])
        return {
            "tokens": F.pad(tokens[:, :-1], (0, self._padding)).contiguous(),
            "labels": F.pad(tokens[:, 1:], (0, self._padding), value=IGNORE_INDEX).contiguous(),
            "positions": positions,
        }

    def _positions(self, starts: Sequence[int]) -> torch.Tensor:
        """Positions [S + padding], from 0 at each document's start and at the padding's."""
        begins = list(starts) if self._isolate else [0]
        if self._padding:
            begins.append(self._seq_len)
        ends = [*begins[1:], self._seq_len + self._padding]
        return torch.cat([torch.arange(b - a) for a, b in zip(begins, ends, strict=True)])

    def fingerprint(self) -> dict[str, Any]:
        """What the source was: its name and number of documents (0: not known yet)."""
        return {"name": self._source.name, "documents": self._source.count() or 0}

    def state_dict(self) -> dict[str, Any]:
        """The positions of this rank's lanes.

        Every lane has a key of its own, because a distributed checkpoint keeps one value per key:
        ranks with other lanes add to it, and ranks with the same lanes agree.
        """
        return {
            "num_lanes": self._num_lanes,
            "fingerprint": self.fingerprint(),
            "lanes": {f"lane{j}": lane.position._asdict() for j, lane in self._lanes.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; it may hold the lanes of other ranks too.

        Raises UserError if it is of another global batch size or has no position for one of this
        rank's lanes. Other data than the state's is a warning: data may have been added to it.
        """
        if state["num_lanes"] != self._num_lanes:
            raise UserError(
                f"the checkpoint's data position is of a global batch of {state['num_lanes']} "
                f"rows, this run's is {self._num_lanes}: set training.global_batch_size to "
                f"{state['num_lanes']}, or start the data afresh with "
                'checkpoint.exclude_from_loading = ["dataloader"].'
            )
        absent = [f"lane{j}" for j in self._lanes if f"lane{j}" not in state["lanes"]]
        if absent:
            raise UserError(f"the checkpoint has no data position of {', '.join(absent)}.")
        self._warn_if_other_data(state["fingerprint"])
        self._stop_preparing()
        for j, lane in self._lanes.items():
            lane.position = Position(**state["lanes"][f"lane{j}"])

    def close(self) -> None:
        """End the thread; rows that it has prepared are dropped."""
        self._stop_preparing()
        self._thread.shutdown()

    def _take(self, j: int) -> Row:
        lane = self._lanes[j]
        future = lane.next_row or self._prepare(lane)
        lane.next_row = None
        row, lane.position = future.result()
        lane.next_row = self._prepare(lane)
        return row

    def _prepare(self, lane: Lane) -> Future[tuple[Row, Position]]:
        return self._thread.submit(lane.read_row, lane.position, self._seq_len)

    def _stop_preparing(self) -> None:
        futures = [lane.next_row for lane in self._lanes.values() if lane.next_row is not None]
        for future in futures:
            future.cancel()
        wait(futures)  # the one that was running still uses its lane
        for lane in self._lanes.values():
            lane.next_row = None

    def _warn_if_other_data(self, then: dict[str, Any]) -> None:
        now = self.fingerprint()
        known = then["documents"] and now["documents"]
        if then["name"] != now["name"] or (known and then["documents"] != now["documents"]):
            logger.warning(
                f"The data is not that of the checkpoint: it was {then['name']} with "
                f"{then['documents']} documents and is {now['name']} with {now['documents']}. "
                "The positions are kept, but may now mean other text."
            )


def build_loader(
    training_config: DataConfig,
    tokenizer: Tokenizer,
    lanes: Sequence[int],
    num_lanes: int,
    *,
    multiple: int = 1,
) -> RowLoader:
    """The loader of the section [training] for the lanes of this rank; UserError if no data."""
    source = build_documents(training_config.dataset, training_config.dataset_path)
    return RowLoader(
        source,
        tokenizer,
        training_config.seq_len,
        lanes,
        num_lanes,
        multiple=multiple,
        isolate_documents=training_config.isolate_documents,
    )


def check_dataset(training_config: DataConfig) -> None:
    """UserError unless the data set exists and is not empty; cheap, for use before a launch."""
    check_documents(training_config.dataset, training_config.dataset_path)
