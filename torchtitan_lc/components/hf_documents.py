"""Hugging Face `datasets` as a stream of documents, read in order and never shuffled.

A stream has no random access: the reader of one lane passes over the documents of the other
lanes. Reading is hundreds of times faster than training at long context, so this costs bandwidth
(each lane reads the data once), not time. `skip` passes over whole Arrow tables, so a resume reads
the bytes up to its position but builds no Python object of them.
"""

import copy
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from torchtitan_lc.tools.errors import UserError


class HFDocuments:
    """The field "text" of the training split of a data set on the Hub or in a local folder.

    dataset_path: "folder", "user/name" or "user/name:config".
    """

    def __init__(self, dataset_path: str) -> None:
        check_hf_dataset(dataset_path)
        import datasets

        self.name = f"hf:{dataset_path}"
        self._count: int | None = None
        path, _, config = dataset_path.partition(":")
        if Path(dataset_path).exists():
            path, config = dataset_path, ""
        try:
            self._dataset = datasets.load_dataset(
                path, config or None, split="train", streaming=True
            )
        except Exception as error:  # no path, no network, no such config: a dozen types
            raise UserError(
                f"training.dataset_path {dataset_path} cannot be opened as a Hugging Face data "
                f"set: {type(error).__name__}: {error}"
            ) from error

    def count(self) -> int | None:
        return self._count

    def documents(self, start: int, step: int) -> Iterator[str]:
        skip = start % self._count if self._count else start
        wait = 0  # documents to pass over before the next one that is asked for
        while True:
            read = 0
            for text in self._read(skip):
                read += 1
                if wait == 0:
                    yield text
                    wait = step
                wait -= 1
            if read == 0 and skip > 0:  # the start lies in a later epoch
                self._count = self._count_all()
                skip = start % self._count
            else:
                self._count = self._checked_count(skip + read)
                skip = 0

    def _read(self, skip: int) -> Iterator[str]:
        # A copy per reader: all iterators of one IterableDataset write their place into one shared
        # state, from which a kind of data set may take it again at its next shard.
        dataset = copy.deepcopy(self._dataset)
        for example in dataset.skip(skip) if skip else dataset:
            text = example.get("text", 0)
            if text is None:  # Arrow's null: some rows of real data sets have no text
                text = ""
            if not isinstance(text, str):
                raise UserError(
                    f'{self.name}: a document has no string in its field "text"; '
                    f"its fields are {', '.join(example)}."
                )
            yield text

    def _count_all(self) -> int:
        return self._checked_count(sum(1 for _ in self._read(0)))

    def _checked_count(self, count: int) -> int:
        if count == 0:
            raise UserError(f"training.dataset_path: {self.name} is empty.")
        return count


def check_hf_dataset(dataset_path: str) -> None:
    """UserError if the library is missing or no data set is named; reaches for no network."""
    if not dataset_path:
        raise UserError(
            'training.dataset is "hf" but training.dataset_path is empty: set it to a data set '
            'on the Hub ("user/name") or a local folder.'
        )
    if importlib.util.find_spec("datasets") is None:
        raise UserError(
            'training.dataset is "hf", which needs the package datasets: '
            "pip install -e '.[hf]' in the checkout"
        )
