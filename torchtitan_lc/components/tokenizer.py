"""Text to token ids, from local files only.

    document --split_text--> pieces of <= PIECE_CHARS --library--> ids of each piece --> one array

The library never sees a whole document. Regular expressions and BPE merges of some releases panic
or go quadratic on a long run without a space (tiktoken issues 15 and 195), and an Encoding object
of a 50 MB document would weigh several GB.

Text is only ever text: "<|end_of_text|>" written out in a document becomes ordinary tokens, never
the control token. BOS and EOS are added by `encode`'s two flags and by nothing else, whatever
post-processor a tokenizer.json brings.
"""

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from torchtitan_lc.tools.errors import UserError

TokenArray = npt.NDArray[np.int64]

# Long enough that a forced cut inside a run is rare, short enough that a quadratic merge of one
# piece is over in a fraction of a second.
PIECE_CHARS = 20_000


class Tokenizer(Protocol):
    """What the rest of the framework needs of a tokenizer.

    `vocab_size` is the largest id plus one. One token may be both `bos_id` and `eos_id`.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None: ...

    def encode(self, text: str, add_bos: bool, add_eos: bool) -> TokenArray:
        """Ids of `text`, int64 [n]. ValueError if BOS or EOS is asked for and does not exist."""
        ...

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of `ids`; bytes that are no valid UTF-8 become U+FFFD."""
        ...


def split_text(text: str, limit: int = PIECE_CHARS) -> Iterator[str]:
    """Cut `text` into pieces of at most `limit` characters which join to `text` again.

    A cut falls where the patterns of GPT-2 and Llama-3 style tokenizers cut as well: after a
    newline, or before a space, that is followed by other text. So the ids are those of the uncut
    text. Only a stretch of `limit` characters without such a place is cut anywhere. A tokenizer
    that marks the start of a text (Llama 2's leading "▁") makes one such mark per piece.
    """
    start = 0
    while len(text) - start > limit:
        end = start + limit
        cut = next((i for i in range(end, start, -1) if _is_cut(text, i)), end)
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]


def _is_cut(text: str, i: int) -> bool:
    """Whether text[:i] and text[i:] have the same ids apart as together."""
    if text[i - 1] in "\r\n":
        return not text[i].isspace()
    return text[i] in " \t" and i + 1 < len(text) and not text[i + 1].isspace()


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, BOS 256, EOS 257: needs no files."""

    vocab_size = 258
    bos_id: int | None = 256
    eos_id: int | None = 257

    def encode(self, text: str, add_bos: bool, add_eos: bool) -> TokenArray:
        data = np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)
        return _with_ends(self, [data], add_bos, add_eos)

    def decode(self, ids: npt.ArrayLike) -> str:
        array = np.asarray(ids, dtype=np.int64)
        return array[array < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class HFTokenizer:
    """A Hugging Face tokenizer.json; BOS and EOS from the JSON files beside it.

    They are looked up in tokenizer_config.json, special_tokens_map.json, config.json and
    generation_config.json; the first file that names the role decides, also when it says null. A
    model whose tokenizer_config.json has "add_bos_token": false was trained without BOS, so none is
    added. EOS is added whatever it says: documents in a row have to end.
    """

    def __init__(self, folder: Path) -> None:
        import tokenizers

        path = folder / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for every defect
            raise UserError(f"{path} cannot be read as a tokenizer: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # special tokens in the text stay text
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        without_bos = _read_json(folder / "tokenizer_config.json").get("add_bos_token") is False
        self.bos_id = None if without_bos else self._find_role(folder, "bos")
        self.eos_id = self._find_role(folder, "eos")

    def encode(self, text: str, add_bos: bool, add_eos: bool) -> TokenArray:
        def ids(piece: str) -> npt.ArrayLike:
            return self._tokenizer.encode(piece, add_special_tokens=False).ids

        return _with_ends(self, _encode_pieces(ids, text), add_bos, add_eos)

    def decode(self, ids: npt.ArrayLike) -> str:
        array = np.asarray(ids, dtype=np.int64)
        return self._tokenizer.decode(array.tolist(), skip_special_tokens=False)

    def _find_role(self, folder: Path, role: str) -> int | None:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            names = _read_json(folder / name)
            if f"{role}_token" in names:
                return self._id_of(names[f"{role}_token"], f"{role}_token", folder / name)
        for name in ("config.json", "generation_config.json"):
            ids = _read_json(folder / name)
            if f"{role}_token_id" in ids:
                return self._checked_id(ids[f"{role}_token_id"], f"{role}_token_id", folder / name)
        return None

    def _checked_id(self, value: Any, key: str, path: Path) -> int | None:
        # Chat models list every token that may end a turn; the first of them ends the text.
        token_id = value[0] if isinstance(value, list) and value else value
        if token_id is None or (type(token_id) is int and 0 <= token_id < self.vocab_size):
            return token_id
        raise UserError(
            f"{path} has {key} = {value!r}, which is no id of tokenizer.json beside it "
            f"(0..{self.vocab_size - 1}): the two files are not of the same model."
        )

    def _id_of(self, token: Any, key: str, path: Path) -> int | None:
        content = token.get("content") if isinstance(token, dict) else token
        if content is None:
            return None
        token_id = self._tokenizer.token_to_id(content)
        if token_id is None:
            raise UserError(
                f"{path} has {key} = {content!r}, which tokenizer.json beside it does not know: "
                "the two files are not of the same model."
            )
        return token_id


class TiktokenTokenizer:
    """A Llama-3 style rank file (`tokenizer.model`): base64 token and rank per line.

    The 256 special tokens follow the ranks, so with Llama 3's 128,000 ranks BOS is 128000 and
    EOS 128001.
    """

    # Llama 3's pre-tokenizer, as published in its tokenizer.json.
    PATTERN = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )

    def __init__(self, path: Path) -> None:
        import tiktoken

        ranks = _read_ranks(path)
        special = {token: len(ranks) + i for i, token in enumerate(llama3_special_tokens())}
        self._encoding = tiktoken.Encoding(
            path.name, pat_str=self.PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
        self.vocab_size = len(ranks) + len(special)
        self.bos_id: int | None = special["<|begin_of_text|>"]
        self.eos_id: int | None = special["<|end_of_text|>"]

    def encode(self, text: str, add_bos: bool, add_eos: bool) -> TokenArray:
        def ids(piece: str) -> npt.ArrayLike:
            return self._encoding.encode_to_numpy(piece, disallowed_special=())

        return _with_ends(self, _encode_pieces(ids, text), add_bos, add_eos)

    def decode(self, ids: npt.ArrayLike) -> str:
        return self._encoding.decode(np.asarray(ids, dtype=np.int64).tolist(), errors="replace")


def llama3_special_tokens() -> list[str]:
    """The 256 control tokens of Llama 3 in the order of their ids."""
    reserved = (f"<|reserved_special_token_{i}|>" for i in range(251))
    named = {
        0: "<|begin_of_text|>",
        1: "<|end_of_text|>",
        6: "<|start_header_id|>",
        7: "<|end_header_id|>",
        9: "<|eot_id|>",
    }
    return [named[i] if i in named else next(reserved) for i in range(256)]


def build_tokenizer(kind: str, assets_path: str) -> Tokenizer:
    """The tokenizer of `model.tokenizer` = kind and `model.hf_assets_path` = assets_path.

    "auto": tokenizer.json in the folder, else its rank file *.model; bytes without a folder.
    Raises UserError when the files that the kind needs are not there or cannot be read.
    """
    if kind == "byte" or (kind == "auto" and not assets_path):
        return ByteTokenizer()
    if kind not in ("auto", "hf", "tiktoken"):
        raise UserError(f'model.tokenizer is "{kind}": choose auto, byte, hf or tiktoken.')
    if not assets_path:
        raise UserError(
            f'model.tokenizer is "{kind}" but model.hf_assets_path is empty: '
            "set it to the folder with the tokenizer's files."
        )
    folder = Path(assets_path)
    if not folder.is_dir():
        is_file = folder.is_file()
        wrong = f"a file: give its folder, {folder.parent}" if is_file else "which does not exist"
        raise UserError(f"model.hf_assets_path is {assets_path}, {wrong}.")
    has_json = (folder / "tokenizer.json").is_file()
    if has_json and kind != "tiktoken":
        return HFTokenizer(folder)
    if kind == "hf":
        raise UserError(f'model.tokenizer is "hf" but {folder} has no tokenizer.json.')
    models = sorted(folder.glob("*.model"))
    if len(models) == 1:
        return TiktokenTokenizer(models[0])
    found = f"has {len(models)} *.model files, one is needed" if models else "has no *.model file"
    wanted = "" if kind == "tiktoken" else " and no tokenizer.json"
    raise UserError(f"model.hf_assets_path {folder} {found}{wanted}: copy the tokenizer there.")


def check_goes_with(kind: str, folder: str | Path) -> None:
    """UserError where ``kind`` is bytes and ``folder`` holds weights with a tokenizer of their own, to which
    the same ids mean other text."""
    folder = Path(folder)
    own = [
        path.name
        for path in (folder / "tokenizer.json", *sorted(folder.glob("*.model")))
        if path.is_file()
    ]
    if kind == "byte" and own:
        raise UserError(
            f'model.tokenizer = "byte", but {folder} has a tokenizer ({own[0]}): its weights would read bytes '
            'as if they were its tokens. Set model.tokenizer = "auto" and model.hf_assets_path to that folder.'
        )


def _with_ends(
    tokenizer: Tokenizer, parts: list[npt.NDArray[Any]], add_bos: bool, add_eos: bool
) -> TokenArray:
    for wanted, token, role in (
        (add_bos, tokenizer.bos_id, "BOS"),
        (add_eos, tokenizer.eos_id, "EOS"),
    ):
        if wanted and token is None:
            raise ValueError(f"{type(tokenizer).__name__} has no {role} token to add.")
    head = [np.array([tokenizer.bos_id])] if add_bos else []
    tail = [np.array([tokenizer.eos_id])] if add_eos else []
    whole = [*head, *parts, *tail]
    return np.concatenate(whole, dtype=np.int64) if whole else np.empty(0, dtype=np.int64)


def _encode_pieces(
    encode: Callable[[str], npt.ArrayLike], text: str
) -> list[npt.NDArray[np.int64]]:
    pieces = []
    for piece in split_text(text):
        try:
            pieces.append(np.asarray(encode(piece), dtype=np.int64))
        except BaseException as error:
            # A Rust panic arrives as pyo3's PanicException, which is no Exception and cannot be
            # imported; left alone it would end the rank with a stack of the library.
            if type(error).__name__ != "PanicException":
                raise
            raise UserError(
                f"the tokenizer library cannot encode the text {piece[:60]!r}...: {error}"
            ) from error
    return pieces


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; an absent file names no tokens, a broken one is an error."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not a {type(value).__name__}.")
    return value


def _read_ranks(path: Path) -> dict[bytes, int]:
    # Not tiktoken.load: it keeps a copy in the temporary folder under a hash of the file's path
    # and would go on serving that copy after the file has changed.
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise UserError(
                f"{path}:{number} is not a base64 token and its rank. A SentencePiece model is "
                "not supported: convert it to tokenizer.json."
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
        raise UserError(
            f"{path} has {len(ranks)} ranks; they must be 0, 1, 2, ... without a gap and hold at "
            "least the 256 bytes. Is the download complete?"
        )
    return ranks
