"""From the packer to the logits: a document's length says where it ends, no token id does."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import FLAVORS
from tests.unit.components.test_data import Documents as Texts
from torchtitan_lc.attention.documents import Documents
from torchtitan_lc.components.data import RowLoader
from torchtitan_lc.components.tokenizer import ByteTokenizer, TokenArray
from torchtitan_lc.models.decoder.model import Decoder


class EndsInside(ByteTokenizer):
    """A chat template's habit: EOS after every turn."""

    def encode(self, text: str, add_bos: bool, add_eos: bool) -> TokenArray:
        ids = super().encode(text, add_bos, add_eos)
        ids[ids == ord("|")] = 257
        return ids


class NoEnds(ByteTokenizer):
    bos_id = eos_id = None


@pytest.mark.parametrize(
    ("tokenizer", "texts", "starts"),
    [(EndsInside(), ["ab|cd|e", "fghijk"], [0, 9]), (NoEnds(), ["abcdef", "ghijklm"], [0, 6])],
    ids=["end tokens inside a document", "no end token between documents"],
)
def test_a_changed_token_reaches_to_the_end_of_its_document_and_no_further(
    tokenizer: ByteTokenizer, texts: list[str], starts: list[int]
) -> None:
    seq_len = 13
    loader = RowLoader(Texts(texts), tokenizer, seq_len, [0], 1)
    batch = loader.next_batch([0])
    loader.close()
    model = Decoder(FLAVORS["gqa"])
    model.init_weights(seed=0)
    documents = Documents.from_positions(batch["positions"])

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(tokens, batch["positions"], documents=documents)[0]

    before = logits(batch["tokens"])
    for start, stop in zip(starts, [*starts[1:], seq_len], strict=True):
        changed = batch["tokens"].clone()
        changed[0, start + 1] = ord("z")
        same = (logits(changed) == before).all(dim=-1)
        assert not same[start + 1 : stop].any(), (start, stop)
        assert same[: start + 1].all() and same[stop:].all(), (start, stop)
