#!/usr/bin/env python3
"""Turn a Hugging Face folder into a step folder, or the weights of a step folder into one of theirs.

scripts/convert_hf from HF_FOLDER STEP_FOLDER --model.name llama3 --model.flavor from_hf
scripts/convert_hf to STEP_FOLDER HF_FOLDER --config my_job

What follows the two folders are settings as for run_train.sh: they say which model it is, and for `to`
where its tokenizer lies (model.hf_assets_path) and how long its rows were (training.seq_len). One
process, no GPU. `to` reads and writes one tensor at a time, in checkpoint.export_dtype. `from` keeps the dtype
of each tensor and leaves them in the mapped files until torch's writer takes them, one by one, so
that of the folder only what the page cache has room for is in memory. A step folder made this way
holds weights only: name it in checkpoint.initial_load_path.
"""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    # Run as a file, from any folder and before anything is installed.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from safetensors import safe_open  # noqa: E402
from torch.distributed.checkpoint import FileSystemReader  # noqa: E402
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: E402
from torch.distributed.checkpoint.metadata import Metadata  # noqa: E402

from torchtitan_lc.components import checkpoint_reading as reading  # noqa: E402
from torchtitan_lc.components import hf_folder  # noqa: E402
from torchtitan_lc.components.checkpoint_folders import inspect  # noqa: E402
from torchtitan_lc.components.hf_export import write_folder  # noqa: E402
from torchtitan_lc.components.hf_folder import HuggingFaceForm  # noqa: E402
from torchtitan_lc.config.job_config import JobConfig  # noqa: E402
from torchtitan_lc.config.manager import load_config  # noqa: E402
from torchtitan_lc.models.spec import identity  # noqa: E402
from torchtitan_lc.preflight import JobModel, job_hf, job_model, parameter_shapes  # noqa: E402
from torchtitan_lc.tools.errors import UserError  # noqa: E402
from torchtitan_lc.tools.stdout import reader_may_leave  # noqa: E402

Shapes = dict[str, tuple[int, ...]]


def from_hf(source: Path, target: Path, config: JobConfig) -> None:
    """Write the weights of the Hugging Face folder ``source`` as the step folder ``target``."""
    config.model.hf_assets_path = config.model.hf_assets_path or str(source)
    model, form, shapes = _model(config)
    theirs = {form.name(ours): shape for ours, shape in shapes.items()}
    problem = hf_folder.misfit(source, theirs) or hf_folder.tied_copy_differs(source, theirs)
    if problem:
        raise UserError(problem)
    _check_new(target)
    stored = hf_folder.read_headers(source)
    state: dict[str, object] = {"identity": identity(model.spec, config.model.flavor, model.args)}
    for ours in shapes:
        name = form.name(ours)
        with safe_open(stored[name].file, framework="pt") as file:
            state[f"model.{ours}"] = file.get_tensor(name)
    target.mkdir(parents=True, exist_ok=True)  # torch's writer would wrap the error in a traceback
    planner = DefaultSavePlanner(flatten_state_dict=False)
    with reading.no_single_process_warning():
        dcp.save(state, checkpoint_id=target, planner=planner, no_dist=True)


def to_hf(source: Path, target: Path, config: JobConfig) -> None:
    """Write the weights of the step folder ``source`` as the Hugging Face folder ``target``."""
    model, form, shapes = _model(config)
    found = inspect(source)
    if found.state != "complete":
        raise UserError(f"{source} is not a complete step folder: {found.reason}")
    saved_as = {f"model.{ours}": shape for ours, shape in shapes.items()}
    name = identity(model.spec, config.model.flavor, model.args)
    problem = reading.misfit(source, ["model"], saved_as, name)
    if problem:
        raise UserError(problem)
    _check_new(target)
    theirs = {form.name(ours): shape for ours, shape in shapes.items()}
    write_folder(target, theirs, _saved_tensors(source, shapes, form.dtype), form)


class _ReadsMetadataOnce(FileSystemReader):
    """The description of a large checkpoint takes seconds to read, and each tensor asks for it."""

    @functools.cached_property
    def _metadata(self) -> Metadata:
        return super().read_metadata()

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self._metadata


def _saved_tensors(folder: Path, shapes: Shapes, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    reader = _ReadsMetadataOnce(folder)
    for ours, shape in shapes.items():
        tensor = torch.empty(shape, dtype=dtype)
        reading.read_into({f"model.{ours}": tensor}, folder, alone=True, reader=reader)
        yield tensor


def _model(config: JobConfig) -> tuple[JobModel, HuggingFaceForm, Shapes]:
    model = job_model(config)
    form = job_hf(config, model)
    if form is None:
        raise UserError(
            f"model.name = {config.model.name!r} has no Hugging Face form; give its ModelSpec an `hf`"
        )
    return model, form, parameter_shapes(model)


def _check_new(folder: Path) -> None:
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{folder} exists already: name a new folder, or remove it")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for a mistake that the user can fix."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] in (["-h"], ["--help"]):
        with reader_may_leave():
            print(__doc__)
        return 0
    is_complete = len(words) >= 3 and not any(word.startswith("-") for word in words[1:3])
    if not is_complete or words[0] not in ("from", "to"):
        print(__doc__, file=sys.stderr)
        return 2
    direction, source, target = words[0], Path(words[1]), Path(words[2])
    try:
        convert = from_hf if direction == "from" else to_hf
        convert(source, target, load_config(words[3:]))
    except UserError as error:
        print(f"convert_hf cannot go on:\n{error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None:  # no file's: nothing that another path would mend
            raise
        print(
            f"convert_hf cannot go on:\n{error.filename}: {error.strerror}; check the two folders and their "
            "permissions, or name others",
            file=sys.stderr,
        )
        return 2
    print(f"{source} -> {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
