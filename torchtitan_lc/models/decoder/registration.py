"""The registration of a model that is a `Decoder` as it stands, under its own shapes and names."""

from __future__ import annotations

from collections.abc import Mapping

from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.decoder.float8 import float8_problems
from torchtitan_lc.models.decoder.hf import Family, tensor_name
from torchtitan_lc.models.decoder.model import Decoder
from torchtitan_lc.models.decoder.parallelize import parallelize
from torchtitan_lc.models.decoder.settings import adjust, warnings
from torchtitan_lc.models.spec import HuggingFace, ModelSpec, register_model


def register_decoder(name: str, flavors: Mapping[str, DecoderArgs], family: Family) -> None:
    """Make the decoders of these shapes known under ``name``, a value of `model.name`.

    flavors: `model.flavor` -> the shape. family: their form at Hugging Face. Raises ValueError when the
    name is taken.
    """
    register_model(
        ModelSpec(
            name=name,
            flavors=flavors,
            build=Decoder,
            parallelize=parallelize,
            adjust=adjust,
            warnings=warnings,
            float8=float8_problems,
            hf=HuggingFace(tensor_name, family.read_config, family.write_config),
        )
    )
