"""A folder of weights as Hugging Face publishes them: what it holds, and reading it into shards.

    config.json
    model.safetensors                                              all tensors in one file, or
    model.safetensors.index.json   {"weight_map": {name: file}}    in several
    model-00001-of-00004.safetensors   ...
    tokenizer.json   tokenizer_config.json   generation_config.json   ...

Other safetensors files that lie there, such as Mistral's consolidated.safetensors, hold the same
weights under other names and are left alone. Names and shapes stand in the files' headers, so whether
a folder fits a model is known without reading a tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from torchtitan_lc.components.checkpoint_reading import differences
from torchtitan_lc.tools.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Tables computed from the config, which old versions of transformers saved with the weights.
_IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
# A tied table may be written down under the name of its second use, too.
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_COMPARED_ROWS = 4096  # of two tables at once


@dataclass(frozen=True)
class HuggingFaceForm:
    """A run's model as Hugging Face writes it down.

    name(parameter) -> their name of the tensor. config, dtype: config.json and the dtype of the
    tensors of an export. assets: model.hf_assets_path, whose tokenizer files go along with it.
    """

    name: Callable[[str], str]
    config: dict[str, Any]
    dtype: torch.dtype
    assets: Path | None = None


@dataclass(frozen=True)
class StoredTensor:
    """file, and dtype as safetensors names it ("BF16")."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def has_weights(folder: str | Path) -> bool:
    """Whether there are weights that `initial_load_in_hf` would read."""
    return any((Path(folder) / name).is_file() for name in (SINGLE, INDEX))


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Their name -> where the tensor lies, for all tensors of the folder. Reads no tensor.

    Raises UserError when there are no safetensors, a file that the index names is missing, or a file
    cannot be read (cut short by an interrupted download, say).
    """
    stored: dict[str, StoredTensor] = {}
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (not a dict)
                    tensor = opened.get_slice(name)
                    shape = tuple(tensor.get_shape())
                    stored[name] = StoredTensor(file, shape, tensor.get_dtype())
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} cannot be read: {error}. Download it again") from error
    return stored


def misfit(folder: Path, wanted: dict[str, tuple[int, ...]]) -> str | None:
    """Why the folder cannot fill ``wanted`` (their name -> shape), None when it can.

    Every missing, extra and mis-shaped tensor is listed, and every one of a dtype that is no plain
    float. Rotary tables of old versions are passed over, and so is a tied table's second copy, of
    which `tied_copy_differs` says whether it is one.
    """
    stored = read_headers(folder)
    extra = {name for name in stored.keys() - wanted.keys() if _may_be_left(name, wanted)}
    shapes = {name: tensor.shape for name, tensor in stored.items() if name not in extra}
    lines = differences(shapes, wanted)
    lines += [
        f"{name}: dtype {stored[name].dtype}; only {', '.join(_DTYPES)} are read"
        for name in sorted(stored.keys() & wanted.keys())
        if stored[name].dtype not in _DTYPES
    ]
    if not lines:
        return None
    return (
        f"the weights in {folder} do not fit this run's model ({len(lines)} differences):\n"
        + "".join(f"  {line}\n" for line in lines)
        + "Choose the model.name and model.flavor of that folder (flavor 'from_hf' takes the shape "
        "from its config.json), or another folder"
    )


def tied_copy_differs(folder: Path, wanted: dict[str, tuple[int, ...]]) -> str | None:
    """Why the second copy of a tied table is none, None when it is or there is no second one.

    Such a file is from an untied model whose config.json says tied: training it tied would silently
    drop its output matrix. Reads both tables by rows.
    """
    stored = read_headers(folder)
    if _HEAD in wanted or not {_HEAD, _EMBEDDING} <= stored.keys():
        return None
    head, table = stored[_HEAD], stored[_EMBEDDING]
    equal = head.shape == table.shape and all(
        torch.equal(a, b) for a, b in zip(_rows(head, _HEAD), _rows(table, _EMBEDDING), strict=True)
    )
    if equal:
        return None
    return (
        f"{folder}: {_HEAD} differs from {_EMBEDDING}, but this model has one table for both uses. "
        "Say tie_word_embeddings = false in its config.json (with flavor 'from_hf'), or choose an "
        "untied flavor"
    )


class SafetensorsReader(HuggingFaceStorageReader):
    """DCP's Hugging Face reader for the files that the index names, one tensor at a time.

    Its base keeps a file mapped until the last tensor in it is read, so that all that a rank has
    read counts as resident: half as much again as its fp32 shards, from a bf16 folder of one file.
    Here the mapping ends with each tensor, and a rank holds its shards and one part more. Values are
    converted to the parameter's dtype, which is exact from bfloat16 and float16 to float32.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.stored = read_headers(folder)

    def read_metadata(self) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=getattr(torch, _DTYPES[tensor.dtype])),
                    torch.Size(tensor.shape),
                    [
                        ChunkStorageMetadata(
                            torch.Size([0] * len(tensor.shape)), torch.Size(tensor.shape)
                        )
                    ],
                )
                for name, tensor in self.stored.items()
                if tensor.dtype in _DTYPES
            },
            storage_data={},
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            name = item.storage_index.fqn
            part = tuple(
                slice(start, start + length)
                for start, length in zip(item.storage_offsets, item.lengths, strict=True)
            )
            with safe_open(self.stored[name].file, framework="pt") as file:
                target = planner.resolve_tensor(item).detach()
                target.copy_(file.get_slice(name)[part])
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises UserError when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object")
    return value


def _weight_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder of Hugging Face weights")
    if not (folder / INDEX).is_file():
        if (folder / SINGLE).is_file():
            return [folder / SINGLE]
        raise UserError(
            f"{folder} has neither {SINGLE} nor {INDEX}; weights in other formats (*.bin, *.gguf) are "
            "not read: save them as safetensors first"
        )
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{folder / INDEX} has no weight_map")
    files = sorted({folder / str(name) for name in weight_map.values()})
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(f"{folder}: files that {INDEX} names are missing: {', '.join(missing)}")
    return files


def _may_be_left(name: str, wanted: dict[str, tuple[int, ...]]) -> bool:
    return bool(_IGNORED.search(name)) or (name == _HEAD and _EMBEDDING in wanted)


def _rows(tensor: StoredTensor, name: str) -> Iterator[torch.Tensor]:
    for start in range(0, tensor.shape[0], _COMPARED_ROWS):
        with safe_open(tensor.file, framework="pt") as file:
            yield file.get_slice(name)[start : start + _COMPARED_ROWS]
