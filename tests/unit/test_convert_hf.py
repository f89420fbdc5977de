"""scripts/convert_hf.py: there and back in one process, without a process group."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.hf_folders import NAMES, differing, make_folder, read_weights
from torchtitan_lc.components.checkpoint_folders import inspect
from torchtitan_lc.components.checkpoint_reading import read_identity, read_metadata


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "scripts" / "convert_hf.py"
    spec = importlib.util.spec_from_file_location("convert_hf", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", NAMES)
def test_from_and_to_give_back_the_same_bytes(
    script: ModuleType, tmp_path: Path, kind: str
) -> None:
    source, step, back = (tmp_path / name for name in ("source", "step-0", "back"))
    make_folder(source, kind, files=2)
    model = ["--model.name", NAMES[kind], "--model.flavor", "from_hf"]
    assert script.main(["from", str(source), str(step), *model]) == 0
    found = inspect(step)
    assert found.state == "complete" and found.model_only
    saved = read_metadata(step).state_dict_metadata
    assert saved["model.tok_embeddings.weight"].properties.dtype == torch.bfloat16  # type: ignore[union-attr]
    assert read_identity(step)["name"] == NAMES[kind]

    assets = ["--model.hf_assets_path", str(source)]
    for dtype in ("bfloat16", "float32"):
        target = tmp_path / dtype
        export = ["--checkpoint.export_dtype", dtype]
        assert script.main(["to", str(step), str(target), *model, *assets, *export]) == 0
        want = {k: v.to(getattr(torch, dtype)) for k, v in read_weights(source).items()}
        assert differing(read_weights(target), want) == []
        assert (target / "tokenizer_config.json").is_file()
    assert not back.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["from", "{hf}", "{tmp}/new", "--model.name", "qwen3"], "set model.name = 'llama3'"),
        (["from", "{hf}", "{hf}"], "exists already"),
        (["from", "{tmp}/nothing", "{tmp}/new"], "nothing"),
        (["to", "{hf}", "{tmp}/new"], "is not a complete step folder: it has no .metadata"),
        (
            ["from", "{hf}", "{hf}/config.json/deep"],
            "config.json/deep: Not a directory; check the two",
        ),
        (["to", "{hf}"], "scripts/convert_hf from HF_FOLDER STEP_FOLDER"),
        (["into", "{hf}", "{tmp}/new"], "scripts/convert_hf from HF_FOLDER STEP_FOLDER"),
    ],
)
def test_mistakes_are_told_with_exit_code_2_and_nothing_is_written(
    script: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    make_folder(tmp_path / "hf", "llama")
    filled = [word.format(hf=tmp_path / "hf", tmp=tmp_path) for word in words]
    settings = ["--model.flavor", "from_hf"]
    if words[0] == "to":
        settings += ["--model.hf_assets_path", str(tmp_path / "hf")]
    assert script.main([*filled, *settings]) == 2
    assert said in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]
