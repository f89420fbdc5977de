"""Write the weights of a run as a Hugging Face folder that loads anywhere.

    outputs/hf/step-500/                 complete: it got this name last
    outputs/hf/step-1000.unfinished/     being written, or left by a run that was killed

Global rank 0 writes all files, one tensor at a time: the other ranks send it their shards as it comes
to them, over a gloo group of its own. So it holds one whole tensor beside its shards, no file system
has to be shared, and nothing is written twice. Every rank first copies its shards to host memory;
from then on training may change the weights.

DCP's HuggingFaceStorageWriter is not used: what it consolidates lacks the format tag that
transformers asks for, it writes every byte twice, and it holds a rank's shards twice to do so.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torchtitan_lc.components.agreement import from_rank_zero
from torchtitan_lc.components.checkpoint_writing import free_at
from torchtitan_lc.components.hf_folder import (
    INDEX,
    SINGLE,
    HuggingFaceForm,
    has_weights,
    misfit,
    read_json,
)
from torchtitan_lc.tools.dtypes import torch_dtype
from torchtitan_lc.tools.errors import UserError
from torchtitan_lc.tools.logging import logger

if TYPE_CHECKING:
    from torchtitan_lc.config.job_config import JobConfig
    from torchtitan_lc.models.spec import HuggingFace

Shape = tuple[int, ...]

_MAX_FILE_BYTES = 5 * 10**9
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_COPIED = (
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.*",
    "*.model",
    "tekken.json",
)
_SAME_MODEL = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
# Under the other types of rope, max_position_embeddings is an input: the length before scaling, or
# (YaRN in transformers 4) that which gives the factor.
_FREE_OF_MAX_POSITIONS = ("default", "llama3")
# The two spellings of transformers 4 and 5; a folder that had one may be written with the other.
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")


def hugging_face_form(hf: HuggingFace, args: Any, config: JobConfig) -> HuggingFaceForm:
    """How an export of this run looks.

    config.json is that of model.hf_assets_path, if it is of a model of this shape, with what the run
    may have changed put over it: rope, dtype, and max_position_embeddings raised to training.seq_len
    (but where rope's frequencies or its reach are computed from it). Raises UserError when that file
    cannot be read.
    """
    assets = Path(config.model.hf_assets_path) if config.model.hf_assets_path else None
    new = hf.write_config(args)
    old: dict[str, Any] = {}
    if assets is not None and (assets / "config.json").is_file():
        old = read_json(assets / "config.json")
        if any(old.get(key) != new.get(key) for key in _SAME_MODEL):
            old = {}
    changed = {*_ROPE_KEYS, "quantization_config", "dtype", "torch_dtype"}
    merged = {key: value for key, value in old.items() if key not in changed} | new
    scaling = new.get("rope_scaling") or new.get("rope_parameters") or {}
    if scaling.get("rope_type", "default") in _FREE_OF_MAX_POSITIONS:
        # That of the source: how far another theta could reach, the run has not shown.
        known = int((old or new).get("max_position_embeddings") or 0)
        merged["max_position_embeddings"] = max(known, config.training.seq_len)
    dtype = config.checkpoint.export_dtype
    merged["dtype" if "dtype" in old else "torch_dtype"] = dtype
    return HuggingFaceForm(hf.name, merged, torch_dtype(dtype), assets)


def write_folder(
    path: Path, shapes: Mapping[str, Shape], tensors: Iterable[Tensor], form: HuggingFaceForm
) -> None:
    """Write ``tensors`` (of form.dtype, in the order of ``shapes``: their name -> shape) as a folder.

    Files hold up to 5 GB. ``path`` appears when all of it is on disk, in place of what was there.
    Raises OSError when it cannot be written; what was at ``path`` is then untouched.
    """
    unfinished = _empty(path.with_name(path.name + ".unfinished"))
    waiting = iter(tensors)
    files = plan_files(shapes, form.dtype.itemsize)
    for file, names in files.items():
        _write_file(unfinished / file, {name: shapes[name] for name in names}, waiting, form.dtype)
    if len(files) > 1:
        total = sum(_numel(shape) for shape in shapes.values()) * form.dtype.itemsize
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(unfinished / INDEX, index)
    for asset in _assets(form.assets):
        shutil.copyfile(asset, unfinished / asset.name)
    _write_json(unfinished / "config.json", form.config)
    if path.exists():
        before = path.with_name(path.name + ".replaced")
        if before.exists():
            shutil.rmtree(before)
        path.rename(before)
        unfinished.rename(path)
        shutil.rmtree(before)
    else:
        unfinished.rename(path)


def plan_files(
    shapes: Mapping[str, Shape], itemsize: int, max_bytes: int | None = None
) -> dict[str, list[str]]:
    """File name -> the tensors in it, in order; a file is closed before it would exceed
    ``max_bytes`` (5 GB), which a single larger tensor may."""
    limit = _MAX_FILE_BYTES if max_bytes is None else max_bytes
    groups: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        bytes_ = _numel(shape) * itemsize
        if groups[-1] and size + bytes_ > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += bytes_
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    count = len(groups)
    return {f"model-{i:05}-of-{count:05}.safetensors": names for i, names in enumerate(groups, 1)}


class Exporter:
    """Exports of one run to ``folder``/step-N, one in flight at a time. Build it on every rank.

    tensors: the model's, by our names, sharded as they will be at every export. group: a gloo group
    of all ranks that nothing else talks in; None without a process group. Collective.
    """

    def __init__(
        self,
        folder: Path,
        form: HuggingFaceForm,
        tensors: Mapping[str, Tensor],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.folder, self.form, self.group = folder, form, group
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._names = {ours: form.name(ours) for ours in tensors}
        self._shapes: dict[str, Shape] = {
            self._names[ours]: tuple(tensor.shape) for ours, tensor in tensors.items()
        }
        mine = {self._names[ours]: _place(tensor) for ours, tensor in tensors.items()}
        self._pieces = _who_sends(self._shapes, mine, group)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf-export")
        self._in_flight: Future[None] | None = None

    def has(self, step: int, source: Path) -> bool:
        """Whether the export of ``step`` is there with every tensor, and not older than ``source``, the
        step folder: that may have been trained again since (checkpoint.load_step)."""
        path = self.folder / f"step-{step}"
        config = path / "config.json"
        if not config.is_file() or not has_weights(path):
            return False
        try:
            whole = misfit(path, self._shapes) is None
        except UserError:  # a file of it is missing or cut short
            return False
        return whole and config.stat().st_mtime_ns >= (source / ".metadata").stat().st_mtime_ns

    def start(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy this rank's shards to host memory in the export's dtype; the rest happens on a thread.

        Waits for the export before it, and raises what that one met.
        """
        self.wait()
        shards = {}
        for ours, tensor in tensors.items():
            name = self._names[ours]
            if any(rank == self._rank for rank, _, _ in self._pieces[name]):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                shards[name] = local.detach().to("cpu", self.form.dtype, copy=True).contiguous()
        self._in_flight = self._thread.submit(self._export, step, shards)

    def wait(self) -> None:
        """Wait for the export in flight, if any. Raises UserError, on every rank, if it could not be
        written. Collective."""
        if self._in_flight is not None:
            in_flight, self._in_flight = self._in_flight, None
            in_flight.result()

    def close(self) -> None:
        """Let the export in flight end after a failure of the run; its own failure is only logged."""
        if self._in_flight is not None:
            error = self._in_flight.exception()
            self._in_flight = None
            if error is not None:
                logger.error(f"The Hugging Face export failed too: {error}")
        self._thread.shutdown()

    def _export(self, step: int, shards: dict[str, Tensor]) -> None:
        began = time.perf_counter()
        path = self.folder / f"step-{step}"
        whole = self._gathered(shards)
        error: Exception | None = None
        if self._rank == 0:
            try:
                write_folder(path, self._shapes, whole, self.form)
            except Exception as met:  # raised below, on all ranks, once they are done sending
                error = met
        for _ in whole:  # the other ranks' part; rank 0 takes what is left after an error
            pass
        from_rank_zero(lambda: _raise(path, error), self.group)
        if self._rank == 0:
            seconds = time.perf_counter() - began
            logger.info(f"Exported {path} for Hugging Face in {seconds:.2f} s")

    def _gathered(self, shards: dict[str, Tensor]) -> Iterator[Tensor]:
        """On rank 0 every whole tensor, in order; the other ranks send their pieces and get none."""
        for name, shape in self._shapes.items():
            mine = shards.pop(name, None)
            if self._rank != 0:
                if mine is not None:
                    dist.send(mine, dst=0, group=self.group)
                continue
            whole = torch.empty(shape, dtype=self.form.dtype)
            for rank, offsets, sizes in self._pieces[name]:
                if rank == 0:
                    assert mine is not None
                    piece = mine
                else:
                    piece = torch.empty(sizes, dtype=self.form.dtype)
                    dist.recv(piece, src=rank, group=self.group)
                box = [slice(at, at + size) for at, size in zip(offsets, sizes, strict=True)]
                whole[tuple(box)] = piece
            yield whole


def _place(tensor: Tensor) -> tuple[Shape, Shape]:
    """Where this rank's part lies in the whole tensor: offsets and sizes."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(offsets), tuple(sizes)


def _who_sends(
    shapes: Mapping[str, Shape],
    mine: Mapping[str, tuple[Shape, Shape]],
    group: dist.ProcessGroup | None,
) -> dict[str, list[tuple[int, Shape, Shape]]]:
    """Name -> (rank, offsets, sizes) of pieces that make up the tensor: of replicas, the lowest
    rank's. Collective."""
    everyone: list[Any] = [mine]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine, group=group)
    pieces = {}
    for name in shapes:
        found: dict[Shape, tuple[int, Shape, Shape]] = {}
        for rank, theirs in enumerate(everyone):
            offsets, sizes = theirs[name]
            if 0 not in sizes:
                found.setdefault(offsets, (rank, offsets, sizes))
        pieces[name] = list(found.values())
    return pieces


def _write_file(
    path: Path, shapes: Mapping[str, Shape], tensors: Iterator[Tensor], dtype: torch.dtype
) -> None:
    """One safetensors file: length of the header, header, and the tensors' bytes as they come."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + _numel(shape) * dtype.itemsize
        header[name] = {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            tensor = next(tensors)
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)} is not as announced")
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _assets(folder: Path | None) -> list[Path]:
    if folder is None:
        return []
    return sorted({file for pattern in _COPIED for file in folder.glob(pattern) if file.is_file()})


def _empty(path: Path) -> Path:
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    return path


def _numel(shape: Shape) -> int:
    return torch.Size(shape).numel()


def _raise(path: Path, error: Exception | None) -> None:
    if isinstance(error, OSError):
        raise UserError(
            f"export {path} could not be written: {error}. {free_at(path.parent)}. Make room, or name "
            "another job.dump_folder; the step folders are untouched, and the same command continues "
            "from the newest one"
        ) from error
    if error is not None:
        raise error
