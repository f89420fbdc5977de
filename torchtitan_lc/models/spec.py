"""The model registry: a name -> what the trainer needs to build, spread and train that model.

A package of yours registers its model when it is imported, and `experimental.custom_import` names it:

    from torchtitan_lc.models.spec import ModelSpec, register_model
    register_model(ModelSpec(name="mine", flavors={"small": MyArgs(...)}, build=MyModel,
                             parallelize=my_parallelize))

docs/registering-a-model.md is a complete example.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from torchtitan_lc.attention.documents import Documents
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.distributed.parallel_dims import Meshes
from torchtitan_lc.tools.errors import UserError

BUILT_IN = ("llama3", "qwen2", "qwen3", "mistral")
FROM_HF = "from_hf"  # the flavor that is read from model.hf_assets_path


class ModelArgs(Protocol):
    """What the rest of the framework reads of a model's shape."""

    @property
    def dim(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


class Model(Protocol):
    """forward(tokens, positions, labels, documents) -> summed loss of this rank's live labels;
    init_weights(seed) fills the materialised parameters."""

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        labels: Tensor | None,
        documents: Documents | None,
    ) -> Tensor: ...
    def init_weights(self, seed: int) -> None: ...


@dataclass(frozen=True)
class HuggingFace:
    """How a model is written down by Hugging Face.

    name(parameter) -> the tensor's name in their safetensors: loading and exporting rename, nothing
    else. read_config(parsed config.json) -> args; UserError that names what is not supported.
    write_config(args) -> what config.json holds of the model's shape and rope.
    """

    name: Callable[[str], str]
    read_config: Callable[[Mapping[str, Any]], Any]
    write_config: Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class ModelSpec:
    """name: `model.name`. flavors: `model.flavor` -> args. build(args) -> module, on any device.
    parallelize(model, config, strategy, meshes): applies strategy, tiles, checkpointing, compile and
    FSDP2 in place. adjust(args, config) -> args: takes over the config's model settings (rope).
    shrink(args) -> args: the same attention in a model that runs in a moment, for the self-check.
    warnings(args, config) -> what the log should say of the flavor's args under this config.
    float8(args, config) -> what keeps [float8] from being used with these args, a text for each; None for
    a model whose parallelize does not use it.
    hf: its form at Hugging Face, None for a model that has none."""

    name: str
    flavors: Mapping[str, Any]
    build: Callable[[Any], nn.Module]
    parallelize: Callable[[nn.Module, JobConfig, Any, Meshes], None]
    adjust: Callable[[Any, JobConfig], Any] = lambda args, config: args
    shrink: Callable[[Any], Any] = lambda args: shrink_fields(args)
    warnings: Callable[[Any, JobConfig], list[str]] = lambda args, config: []
    float8: Callable[[Any, JobConfig], list[str]] | None = None
    hf: HuggingFace | None = None


def shrink_fields(args: Any) -> Any:
    """Dataclass args with at most 2 layers, an MLP of 256 and a vocabulary of 512, where they have
    fields of these names. Raises UserError for args that are no dataclass."""
    if not dataclasses.is_dataclass(args) or isinstance(args, type):
        raise UserError(
            f"the self-check cannot make {type(args).__name__} smaller, which is no dataclass: make it "
            "one, or give ModelSpec a `shrink`; attention.self_check = false trains without the check"
        )
    limits = {"n_layers": 2, "hidden_dim": 256, "vocab_size": 512}
    names = {f.name for f in dataclasses.fields(args)}
    small = {n: min(getattr(args, n), limit) for n, limit in limits.items() if n in names}
    return dataclasses.replace(args, **small)


_registry: dict[str, ModelSpec] = {}


def register_model(spec: ModelSpec) -> None:
    """Make ``spec`` known under its name. Raises ValueError when the name is taken, by a built-in
    model too."""
    if spec.name in _registry or (spec.name in BUILT_IN and not _is_built_in(spec)):
        raise ValueError(
            f"a model named {spec.name!r} is registered already: choose another ModelSpec.name"
        )
    _registry[spec.name] = spec


def get_model(name: str) -> ModelSpec:
    """The spec registered under ``name``. Raises UserError that names the known ones."""
    if name in BUILT_IN:
        importlib.import_module(f"torchtitan_lc.models.{name}")
    if name not in _registry:
        known = sorted({*BUILT_IN, *_registry})
        raise UserError(
            f"model.name = {name!r} is not registered; known models: {', '.join(known)}. "
            "A model of your own is registered by the module that experimental.custom_import names."
        )
    return _registry[name]


def get_args(spec: ModelSpec, config: JobConfig) -> Any:
    """The args of the config's flavor with the config's model settings applied."""
    return spec.adjust(flavor_args(spec, config), config)


def flavor_args(spec: ModelSpec, config: JobConfig) -> Any:
    """The args of the config's flavor as they are published, or as `model.hf_assets_path` has them."""
    flavor = config.model.flavor
    if flavor == FROM_HF and spec.hf is not None:
        return spec.hf.read_config(_hf_config(config.model.hf_assets_path))
    if flavor not in spec.flavors:
        lower = {name.lower(): name for name in spec.flavors}
        near = [lower[n] for n in difflib.get_close_matches(flavor.lower(), lower, n=1)]
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        known = [*spec.flavors, *([] if spec.hf is None else [FROM_HF])]
        raise UserError(
            f"model.flavor = {flavor!r} is not a flavor of {spec.name!r}{hint}; "
            f"flavors: {', '.join(known)}"
        )
    return spec.flavors[flavor]


def _hf_config(folder: str) -> dict[str, Any]:
    """The parsed config.json of `model.hf_assets_path`. Raises UserError where it cannot be read."""
    path = Path(folder) / "config.json"
    if not folder or not path.is_file():
        raise UserError(
            f"model.flavor = {FROM_HF!r} reads the shape from config.json, but model.hf_assets_path = "
            f"{folder!r} has none: set it to the folder of a Hugging Face model"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} must hold a JSON object, not a {type(config).__name__}")
    return config


def import_custom(module: str) -> None:
    """Import the user's module (`experimental.custom_import`), so that it can register its models."""
    if not module:
        return
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
            raise  # the module is there, something that it imports is not: that is its own bug
        raise UserError(
            f"experimental.custom_import = {module!r} cannot be imported: no module named "
            f"{error.name!r}; put its parent folder on PYTHONPATH or install it"
        ) from error


def identity(spec: ModelSpec, flavor: str, args: Any) -> dict[str, Any]:
    """Plain description of a model, kept in its checkpoints for messages."""
    named = [f.name for f in dataclasses.fields(args)] if _is_dataclass(args) else vars(args)
    return {"name": spec.name, "flavor": flavor, **{k: _plain(getattr(args, k)) for k in named}}


def _plain(value: Any) -> str:
    """Of a dataclass, such as rope's scaling, its type and fields: two types may have the same fields."""
    if _is_dataclass(value):
        return repr({"type": type(value).__name__, **dataclasses.asdict(value)})
    return repr(value)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_built_in(spec: ModelSpec) -> bool:
    return spec.build.__module__.startswith("torchtitan_lc.models.")
