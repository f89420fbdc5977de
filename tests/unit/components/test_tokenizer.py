"""What a tokenizer promises: its own BOS and EOS, text as text, and no document that it dies of."""

import base64
import json
import time
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from torchtitan_lc.components import tokenizer as module
from torchtitan_lc.components.tokenizer import (
    PIECE_CHARS,
    ByteTokenizer,
    HFTokenizer,
    TiktokenTokenizer,
    build_tokenizer,
    llama3_special_tokens,
    split_text,
)
from torchtitan_lc.tools.errors import UserError

TEXT = "Hello  world!\n\n  caf\u00e9 \U0001f600\tdef f(x):\r\n    return x + 1234567\n"


def write_hf(folder: Path, bos: str = "<s>", eos: str = "</s>", config: bool = True) -> Path:
    """A small byte-level BPE whose own post-processor adds BOS, and which cuts and pads texts."""
    folder.mkdir(exist_ok=True)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(dict.fromkeys([bos, eos])),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["hello world aaaa ^^^^ return def"] * 5, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, bpe.token_to_id(bos))]
    )
    bpe.enable_truncation(8)
    bpe.enable_padding(length=16)
    bpe.save(str(folder / "tokenizer.json"))
    if config:
        names = {"bos_token": {"content": bos}, "eos_token": eos}
        (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def write_ranks(folder: Path) -> Path:
    tokens = [bytes([i]) for i in range(256)]
    tokens += [b"aa", b"^^", b"aaaa", b"^^^^", b"el", b" w"]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    folder.mkdir(exist_ok=True)
    path = folder / "tokenizer.model"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(params=["byte", "hf", "tiktoken"])
def tokenizer(request, tmp_path):
    if request.param == "hf":
        return HFTokenizer(write_hf(tmp_path))
    if request.param == "tiktoken":
        return TiktokenTokenizer(write_ranks(tmp_path))
    return ByteTokenizer()


def test_text_comes_back_from_its_ids(tokenizer):
    ids = tokenizer.encode(TEXT, add_bos=False, add_eos=False)
    assert ids.dtype == np.int64 and ids.ndim == 1
    assert ids.min() >= 0 and ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids) == TEXT


def test_bos_and_eos_are_added_once_and_only_when_asked_for(tokenizer):
    plain = tokenizer.encode(TEXT, add_bos=False, add_eos=False).tolist()
    both = tokenizer.encode(TEXT, add_bos=True, add_eos=True).tolist()
    assert both == [tokenizer.bos_id, *plain, tokenizer.eos_id]
    assert tokenizer.bos_id not in plain and tokenizer.eos_id not in plain
    assert tokenizer.encode("", add_bos=True, add_eos=True).tolist() == [both[0], both[-1]]
    assert tokenizer.encode("", add_bos=False, add_eos=False).shape == (0,)


@pytest.mark.parametrize("name", ["<s>", "</s>", "<|end_of_text|>", "<|begin_of_text|>"])
def test_a_special_token_written_out_in_a_document_stays_text(tokenizer, name):
    ids = tokenizer.encode(f"a {name} b", add_bos=False, add_eos=False)
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids.tolist())
    assert tokenizer.decode(ids) == f"a {name} b"


@pytest.mark.parametrize("text", ["^" * 1_000_000, "a" * 100_000, " " * 200_000])
def test_long_unbroken_text_is_encoded_in_little_time(tokenizer, text):
    start = time.perf_counter()
    ids = tokenizer.encode(text, add_bos=False, add_eos=False)
    assert time.perf_counter() - start < 5
    assert tokenizer.decode(ids) == text


def test_the_library_sees_no_piece_longer_than_the_limit(tmp_path, monkeypatch):
    seen = []

    class Recorder:
        def encode_to_numpy(self, text, **_):
            seen.append(text)
            return np.zeros(1, dtype=np.uint32)

    tokenizer = TiktokenTokenizer(write_ranks(tmp_path))
    monkeypatch.setattr(tokenizer, "_encoding", Recorder())
    text = "^" * 50_000 + "word " * 20_000
    tokenizer.encode(text, add_bos=False, add_eos=False)
    assert "".join(seen) == text and max(map(len, seen)) <= PIECE_CHARS


def test_a_panic_of_the_library_becomes_an_error_that_shows_the_text(tmp_path, monkeypatch):
    class PanicException(BaseException):
        """As pyo3 raises it: not an Exception."""

    class Panics:
        def encode_to_numpy(self, text, **_):
            raise PanicException("stack overflow")

    tokenizer = TiktokenTokenizer(write_ranks(tmp_path))
    monkeypatch.setattr(tokenizer, "_encoding", Panics())
    with pytest.raises(UserError, match="cannot encode the text 'some text'.*stack overflow"):
        tokenizer.encode("some text", add_bos=False, add_eos=False)


def test_an_interrupt_is_not_taken_for_a_panic(tmp_path, monkeypatch):
    class Interrupted:
        def encode_to_numpy(self, text, **_):
            raise KeyboardInterrupt

    tokenizer = TiktokenTokenizer(write_ranks(tmp_path))
    monkeypatch.setattr(tokenizer, "_encoding", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("some text", add_bos=False, add_eos=False)


@settings(deadline=None, max_examples=300)
@given(st.text(alphabet="ab1;'s \t\n\r\u00e9\u2003", max_size=60), st.integers(2, 12))
def test_pieces_join_to_the_text_and_are_bounded(text, limit):
    pieces = list(split_text(text, limit))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= limit for piece in pieces)


@settings(deadline=None, max_examples=500)
@given(st.text(alphabet="ab1;'s \t\n\r\u00e9\u2003", min_size=2, max_size=30), st.data())
def test_a_cut_at_a_chosen_place_changes_no_ids(text, data):
    """Found with Llama 3's own pattern, with merges over everything that it keeps together."""
    i = data.draw(st.integers(1, len(text) - 1))
    if module._is_cut(text, i):
        encode = pattern_only().encode_ordinary
        assert encode(text) == encode(text[:i]) + encode(text[i:])


def pattern_only() -> tiktoken.Encoding:
    """Ranks that would merge across any border which the pattern does not draw."""
    alphabet = [c.encode() for c in "ab1;'s \t\n\r"]
    pairs = [x + y for x in alphabet for y in alphabet]
    tokens = [bytes([i]) for i in range(256)] + pairs
    return tiktoken.Encoding(
        "pairs",
        pat_str=TiktokenTokenizer.PATTERN,
        mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens={},
    )


def test_ordinary_text_has_the_same_ids_in_pieces_as_in_one(tmp_path, monkeypatch):
    text = TEXT * 20
    folder = write_hf(tmp_path / "hf")
    path = write_ranks(tmp_path / "tt")
    for tokenizer in (HFTokenizer(folder), TiktokenTokenizer(path)):
        whole = tokenizer.encode(text, add_bos=True, add_eos=True)
        with monkeypatch.context() as patch:
            patch.setattr(module, "split_text", lambda t: split_text(t, 50))
            assert tokenizer.encode(text, add_bos=True, add_eos=True).tolist() == whole.tolist()


def test_one_token_in_both_roles_keeps_both(tmp_path):
    tokenizer = HFTokenizer(write_hf(tmp_path, bos="<|endoftext|>", eos="<|endoftext|>"))
    assert tokenizer.bos_id == tokenizer.eos_id is not None
    ids = tokenizer.encode("hello", add_bos=True, add_eos=True)
    assert ids[0] == ids[-1] == tokenizer.bos_id


@pytest.mark.parametrize(
    "files, bos, eos",
    [
        ({"special_tokens_map.json": {"bos_token": "<s>", "eos_token": "</s>"}}, 0, 1),
        ({"config.json": {"bos_token_id": 0, "eos_token_id": [1, 5]}}, 0, 1),
        ({"generation_config.json": {"bos_token_id": 1, "eos_token_id": 0}}, 1, 0),
        (
            {
                "tokenizer_config.json": {"bos_token": None, "eos_token": "</s>"},
                "config.json": {"bos_token_id": 1, "eos_token_id": 0},
            },
            None,
            1,
        ),
        ({}, None, None),
    ],
)
def test_roles_are_found_in_the_files_beside_the_tokenizer(tmp_path, files, bos, eos):
    write_hf(tmp_path, config=False)
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value))
    tokenizer = HFTokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (bos, eos)
    if bos is None:
        with pytest.raises(ValueError, match="has no BOS"):
            tokenizer.encode("x", add_bos=True, add_eos=False)


def test_a_model_that_adds_no_bos_of_its_own_gets_none(tmp_path):
    path = write_hf(tmp_path) / "tokenizer_config.json"
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    for rule, bos in ((True, 0), (False, None), (None, 0)):
        path.write_text(json.dumps({**names, "add_bos_token": rule, "add_eos_token": False}))
        tokenizer = HFTokenizer(tmp_path)
        assert (tokenizer.bos_id, tokenizer.eos_id) == (bos, 1), rule


def test_added_tokens_count_and_stand_for_their_text_unless_they_are_special(tmp_path):
    path = write_hf(tmp_path) / "tokenizer.json"
    library = Tokenizer.from_file(str(path))
    before = library.get_vocab_size()
    library.add_tokens(["<indent>"])
    library.add_special_tokens(["<|fim|>"])
    library.save(str(path))
    tokenizer = HFTokenizer(tmp_path)
    assert tokenizer.vocab_size == before + 2
    ids = tokenizer.encode("a<indent>b<|fim|>", add_bos=False, add_eos=False).tolist()
    assert before in ids and before + 1 not in ids
    assert tokenizer.decode(ids) == "a<indent>b<|fim|>"


def test_llama3_files_give_llama3_ids(tmp_path):
    tokenizer = TiktokenTokenizer(write_ranks(tmp_path))
    ranks = tokenizer.vocab_size - 256
    names = llama3_special_tokens()
    assert len(names) == len(set(names)) == 256
    assert (tokenizer.bos_id, tokenizer.eos_id) == (ranks, ranks + 1)
    assert [names[i] for i in (2, 5, 6, 7, 8, 9, 10, 255)] == [
        "<|reserved_special_token_0|>",
        "<|reserved_special_token_3|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|reserved_special_token_4|>",
        "<|eot_id|>",
        "<|reserved_special_token_5|>",
        "<|reserved_special_token_250|>",
    ]


def test_a_rank_file_is_read_anew_after_it_changed(tmp_path):
    path = write_ranks(tmp_path)
    before = TiktokenTokenizer(path).vocab_size
    path.write_text(path.read_text() + base64.b64encode(b"zz").decode() + f" {before - 256}\n")
    assert TiktokenTokenizer(path).vocab_size == before + 1


def test_auto_takes_the_files_that_are_there(tmp_path):
    assert isinstance(build_tokenizer("auto", ""), ByteTokenizer)
    write_ranks(tmp_path)
    assert isinstance(build_tokenizer("auto", str(tmp_path)), TiktokenTokenizer)
    write_hf(tmp_path)
    assert isinstance(build_tokenizer("auto", str(tmp_path)), HFTokenizer)
    assert isinstance(build_tokenizer("tiktoken", str(tmp_path)), TiktokenTokenizer)
    assert isinstance(build_tokenizer("byte", str(tmp_path)), ByteTokenizer)


def test_missing_or_broken_files_are_a_user_error_that_names_them(tmp_path):
    def refused(kind: str, path: Path | str, match: str) -> None:
        with pytest.raises(UserError, match=match):
            build_tokenizer(kind, str(path))

    refused("hf", "", "hf_assets_path is empty")
    refused("auto", tmp_path / "absent", "absent, which does not exist")
    (tmp_path / "file.json").touch()
    refused("hf", tmp_path / "file.json", f"a file: give its folder, {tmp_path}")
    refused("auto", tmp_path, r"has no \*.model file and no tokenizer.json")
    refused("hf", tmp_path, "has no tokenizer.json")
    refused("tiktoken", tmp_path, r"has no \*.model file")
    refused("bpe", tmp_path, "choose auto, byte, hf or tiktoken")
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00")
    refused("auto", tmp_path, "tokenizer.model:2 is not a base64 token.*SentencePiece")
    (tmp_path / "tokenizer.model").write_text("IQ== 0\n")
    refused("auto", tmp_path, "has 1 ranks")
    (tmp_path / "second.model").touch()
    refused("tiktoken", tmp_path, r"has 2 \*.model files")
    (tmp_path / "tokenizer.json").write_text("{")
    refused("auto", tmp_path, "tokenizer.json cannot be read")
    write_hf(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<none>"}')
    refused("auto", tmp_path, "bos_token = '<none>'")
    (tmp_path / "tokenizer_config.json").write_text("not json")
    refused("auto", tmp_path, "tokenizer_config.json is not valid JSON")
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "config.json").write_text('{"eos_token_id": 128001}')
    refused("auto", tmp_path, "eos_token_id = 128001, which is no id")
