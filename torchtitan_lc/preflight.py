"""Everything that can be wrong with a job and be known before a process group exists.

Runs once in the launcher, before workers start, and reads only the config, the model's shape and what
lies on disk. All problems are reported together, and each is said by one part: what the settings alone
tell by config/validate.py, the rest by whoever will need it (kernel, strategy, tokenizer, data,
checkpoint).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from torchtitan_lc.attention.base import AttentionShape, Peers
from torchtitan_lc.attention.kernels import KernelChoice, Math, choose_kernel
from torchtitan_lc.attention.strategies import best_ulysses_degree, make_strategy
from torchtitan_lc.components import hf_folder
from torchtitan_lc.components.checkpoint_folders import choose_start
from torchtitan_lc.components.checkpoint_reading import misfit
from torchtitan_lc.components.data import check_dataset
from torchtitan_lc.components.hf_export import hugging_face_form
from torchtitan_lc.components.hf_folder import HuggingFaceForm
from torchtitan_lc.components.metric_writers import missing_packages
from torchtitan_lc.components.output_folders import unwritable
from torchtitan_lc.components.tokenizer import Tokenizer, build_tokenizer, check_goes_with
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.config.no_effect import warn
from torchtitan_lc.config.resolve import resolve_strategy
from torchtitan_lc.config.validate import check
from torchtitan_lc.memory.checkpointing import layer_modes
from torchtitan_lc.models.spec import (
    ModelSpec,
    flavor_args,
    get_args,
    get_model,
    identity,
    import_custom,
)
from torchtitan_lc.ops.linear import float8_missing
from torchtitan_lc.tools.dtypes import torch_dtype
from torchtitan_lc.tools.errors import UserError
from torchtitan_lc.tools.logging import logger

T = TypeVar("T")


@dataclass(frozen=True)
class JobModel:
    """The model that a config names: its spec and its args with the config's settings applied."""

    spec: ModelSpec
    args: Any


def job_model(config: JobConfig) -> JobModel:
    import_custom(config.experimental.custom_import)
    spec = get_model(config.model.name)
    return JobModel(spec, get_args(spec, config))


def job_kernel(config: JobConfig, args: Any, device_type: str) -> KernelChoice:
    return choose_kernel(
        config.attention.kernel,
        device_type=device_type,
        dtype=compute_dtype(config),
        head_dim=args.head_dim,
        packed=config.training.isolate_documents,
    )


def job_hf(config: JobConfig, model: JobModel) -> HuggingFaceForm | None:
    """The model's form at Hugging Face, None if it has none. Raises UserError when the config asks to
    load or to export one that does not exist."""
    if model.spec.hf is not None:
        return hugging_face_form(model.spec.hf, model.args, config)
    checkpoint = config.checkpoint
    asked = {
        "initial_load_in_hf": checkpoint.initial_load_in_hf,
        "last_save_in_hf": checkpoint.last_save_in_hf,
        "hf_interval": checkpoint.hf_interval,
    }
    for key, value in asked.items():
        if value:
            raise UserError(
                f"checkpoint.{key} = {value}: the model {model.spec.name!r} does not say how Hugging "
                "Face writes it down; give its ModelSpec an `hf`, or leave the key out"
            )
    return None


def parameter_shapes(model: JobModel) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter, by our name; nothing is allocated."""
    with torch.device("meta"):
        module = model.spec.build(model.args)
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def compute_dtype(config: JobConfig) -> torch.dtype:
    """The dtype of weights and activations in forward and backward."""
    return torch_dtype(config.training.mixed_precision_param)


def attention_shape(config: JobConfig, args: Any) -> AttentionShape:
    return AttentionShape(
        n_heads=args.n_heads,
        n_kv_heads=args.n_kv_heads,
        head_dim=args.head_dim,
    )


def ulysses_degree(config: JobConfig, args: Any, ranks_per_node: int | None = None) -> int:
    """Ranks that exchange heads; context_parallel_degree divided by it go round a ring.

    ranks_per_node: of this job; None takes what the launcher said to this worker.
    """
    cp = config.parallelism.context_parallel_degree
    degree = config.parallelism.context_parallel_ulysses_degree
    if degree != -1:
        return degree
    if resolve_strategy(config) == "ring":
        return 1
    if ranks_per_node is None:
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", cp))
    return best_ulysses_degree(cp, args.n_heads, args.n_kv_heads, ranks_per_node)


def check_job(
    config: JobConfig,
    world_size: int,
    device_type: str,
    *,
    ranks_per_node: int | None = None,
    quiet: bool = False,
) -> None:
    """Raise UserError with every problem of the job, each once; log a warning for every key that has
    no effect here and for what the model says of it, unless ``quiet``."""
    problems = check(config, world_size) + _checkable(config, device_type, ranks_per_node)
    if problems:
        raise UserError("\n".join(problems))
    if quiet:
        return
    spec = get_model(config.model.name)
    for message in warn(config) + spec.warnings(flavor_args(spec, config), config):
        logger.warning(message)


def _checkable(config: JobConfig, device_type: str, ranks_per_node: int | None) -> list[str]:
    """What the parts of the job say when they are asked, each independently of the others."""
    problems: list[str] = []

    def collect(step: Callable[[], T], reads: str = "") -> T | None:
        """reads: the key that names the files which ``step`` reads, if it reads any."""
        try:
            return step()
        except (UserError, ValueError) as error:
            problems.append(str(error))
        except OSError as error:
            if not reads:
                raise
            problems.append(_not_read(reads, error))
        return None

    model = collect(lambda: job_model(config))
    tokenizer = collect(
        lambda: build_tokenizer(config.model.tokenizer, config.model.hf_assets_path),
        reads="model.hf_assets_path",
    )
    if model is not None:
        collect(lambda: job_kernel(config, model.args, device_type))
        collect(lambda: _check_strategy(config, model.args, ranks_per_node))
        ac = config.activation_checkpoint
        if ac.selective_layers != "auto":
            selective = ac.selective_layers
            collect(lambda: layer_modes(ac.mode, selective, model.args.n_layers))
        if tokenizer is not None:
            collect(lambda: _check_vocabulary(tokenizer, model))
        if config.compile.enable:
            collect(lambda: _check_backend(config.compile.backend))
        if config.float8.enable:
            problems += _float8_problems(config, model, device_type)
    collect(lambda: check_dataset(config.training), reads="training.dataset_path")
    problems += unwritable(config)
    problems += missing_packages(config.metrics)
    loaded = "checkpoint.folder or checkpoint.initial_load_path"
    start = collect(
        lambda: choose_start(
            config.checkpoint,
            config.job.dump_folder,
            config.model.hf_assets_path,
            config.training.steps,
        ),
        reads=loaded,
    )
    if model is not None:
        form = collect(lambda: job_hf(config, model), reads="model.hf_assets_path")
        if start is not None and start.path is not None:
            if not start.in_hf:
                path = start.path
                collect(lambda: _check_fits(config, model, path), reads=loaded)
            elif form is not None:
                path = start.path
                collect(lambda: check_goes_with(config.model.tokenizer, path), reads=loaded)
                collect(lambda: _check_fits_hf(config, model, form, path), reads=loaded)
    return problems


def _not_read(key: str, error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{key}: {where}{error.strerror or error}; check the path and its permissions, or name another"


def _check_strategy(config: JobConfig, args: Any, ranks_per_node: int | None) -> None:
    """ValueError when the strategy cannot do this model on these ranks; silent about numbers that
    config/validate.py refuses."""
    ranks = config.parallelism.context_parallel_degree
    heads_per_stage = config.attention.heads_per_stage
    ulysses = config.parallelism.context_parallel_ulysses_degree
    if min(ranks, heads_per_stage) < 1:
        return
    if ulysses != -1 and (ulysses < 1 or ranks % ulysses):
        return
    ulysses = ulysses_degree(config, args, ranks_per_node)
    strategy = make_strategy(
        resolve_strategy(config),
        Math(),  # of the kernel nothing is asked here: any will do
        ulysses=Peers(ulysses),
        ring=Peers(ranks // ulysses),
        heads_per_stage=heads_per_stage,
    )
    strategy.check(attention_shape(config, args))


def _check_backend(name: str) -> None:
    # Half a second, which only jobs that compile have to spend.
    from torch._dynamo import list_backends

    if name in list_backends(exclude_tags=None):
        return
    raise UserError(
        f"compile.backend = {name!r}: torch has no such backend; choose one of "
        f"{', '.join(list_backends())}"
    )


def _float8_problems(config: JobConfig, model: JobModel, device_type: str) -> list[str]:
    if model.spec.float8 is None:
        return [
            f"float8.enable = true: the model {model.spec.name!r} does not multiply in float8; set it to "
            "false, or give its ModelSpec a `float8`"
        ]
    missing = float8_missing(device_type, config.float8.emulate)
    return missing + model.spec.float8(model.args, config)


def _check_fits(config: JobConfig, model: JobModel, path: Path) -> None:
    """UserError unless the checkpoint that would be loaded is one of this model."""
    if "model" in config.checkpoint.exclude_from_loading:
        return
    shapes = {f"model.{name}": shape for name, shape in parameter_shapes(model).items()}
    name = identity(model.spec, config.model.flavor, model.args)
    problem = misfit(path, ["model"], shapes, name)
    if problem:
        raise UserError(problem)


def _check_fits_hf(config: JobConfig, model: JobModel, form: HuggingFaceForm, path: Path) -> None:
    """UserError unless the Hugging Face folder that would be loaded is one of this model."""
    if "model" in config.checkpoint.exclude_from_loading:
        return
    shapes = {form.name(name): shape for name, shape in parameter_shapes(model).items()}
    problem = hf_folder.misfit(path, shapes)
    if problem:
        raise UserError(problem)


def _check_vocabulary(tokenizer: Tokenizer, model: JobModel) -> None:
    if tokenizer.vocab_size > model.args.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but {model.spec.name} has a table of "
            f"{model.args.vocab_size}: choose the tokenizer of this model (model.tokenizer, "
            "model.hf_assets_path) or a flavor with a larger vocabulary"
        )
