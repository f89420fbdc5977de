"""What a Hugging Face folder must hold, told from headers; and reading it, one tensor at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.helpers import run_distributed
from tests.hf_folders import make_folder, read_weights, shapes, write_weights
from torchtitan_lc.components import hf_folder
from torchtitan_lc.components.hf_folder import SafetensorsReader, misfit, tied_copy_differs
from torchtitan_lc.tools.errors import UserError


def rewrite(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Put other tensors into a folder of one file; None takes one out."""
    tensors = read_weights(folder) | {k: v for k, v in changes.items() if v is not None}
    for name, value in changes.items():
        if value is None:
            del tensors[name]
    write_weights(folder, tensors)


def lines(problem: str | None) -> list[str]:
    return [] if problem is None else problem.splitlines()


# ---- what fits -------------------------------------------------------------------------------


@pytest.mark.parametrize("files", [1, 3])
def test_a_folder_of_the_model_fits(tmp_path: Path, files: int) -> None:
    make_folder(tmp_path / "hf", "llama", files=files)
    assert misfit(tmp_path / "hf", shapes("llama")) is None


def test_missing_extra_and_mis_shaped_tensors_are_all_listed(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    make_folder(folder, "llama")
    layers = [f"model.layers.{i}" for i in range(2)]
    changes: dict[str, Any] = {f"{layer}.mlp.up_proj.weight": None for layer in layers}
    changes |= {"lm_head.weight": None, "model.norm.weight": None}
    changes |= {f"{layer}.self_attn.q_proj.bias": torch.zeros(36) for layer in layers}
    changes["model.embed_tokens.weight"] = torch.zeros(264, 36)
    changes["model.layers.1.input_layernorm.weight"] = torch.zeros(36, dtype=torch.int8)
    rewrite(folder, changes)
    said = lines(misfit(folder, shapes("llama")))
    assert said[0].endswith("do not fit this run's model (8 differences):")
    for name in (
        "lm_head.weight",
        "model.norm.weight",
        *[f"{x}.mlp.up_proj.weight" for x in layers],
    ):
        assert f"  {name}: not in the checkpoint" in said
    for layer in layers:
        assert f"  {layer}.self_attn.q_proj.bias: only in the checkpoint" in said
    want = "shape [264, 36] in the checkpoint, [263, 36] in this run"
    assert f"  model.embed_tokens.weight: {want}" in said
    int8 = "dtype I8; only F64, F32, F16, BF16 are read"
    assert f"  model.layers.1.input_layernorm.weight: {int8}" in said


def test_rotary_tables_of_old_versions_are_passed_over(tmp_path: Path) -> None:
    make_folder(tmp_path / "hf", "llama")
    rewrite(tmp_path / "hf", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)})
    assert misfit(tmp_path / "hf", shapes("llama")) is None


def test_files_that_the_index_does_not_name_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    make_folder(folder, "llama", files=2)
    write_weights(tmp_path, {"layers.0.attention.wq.weight": torch.zeros(3)})
    (tmp_path / "model.safetensors").rename(folder / "consolidated.safetensors")
    assert misfit(folder, shapes("llama")) is None
    assert (
        SafetensorsReader(folder).read_metadata().state_dict_metadata.keys()
        == shapes("llama").keys()
    )


# ---- tied tables -----------------------------------------------------------------------------


def test_a_second_copy_of_a_tied_table_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hf"
    table = make_folder(folder, "llama_tied")["model.embed_tokens.weight"]
    rewrite(folder, {"lm_head.weight": table.clone()})
    monkeypatch.setattr(hf_folder, "_COMPARED_ROWS", 100)  # 263 rows: the last part is short
    assert misfit(folder, shapes("llama_tied")) is None
    assert tied_copy_differs(folder, shapes("llama_tied")) is None


def test_another_matrix_where_a_tied_tables_copy_should_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hf"
    head = make_folder(folder, "llama_tied")["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1
    rewrite(folder, {"lm_head.weight": head})
    monkeypatch.setattr(hf_folder, "_COMPARED_ROWS", 100)
    problem = tied_copy_differs(folder, shapes("llama_tied"))
    assert problem is not None and "tie_word_embeddings = false" in problem
    assert tied_copy_differs(folder, shapes("llama")) is None  # an untied model has a place for it


# ---- what cannot be read ---------------------------------------------------------------------


def test_a_file_that_the_index_names_and_a_download_left_out_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path / "hf", "llama", files=3)
    (tmp_path / "hf" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"are missing: model-00002-of-00003\.safetensors"):
        misfit(tmp_path / "hf", shapes("llama"))


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path / "hf", "llama")
    file = tmp_path / "hf" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read.*Download it again"):
        misfit(tmp_path / "hf", shapes("llama"))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "neither model.safetensors nor"),
        ({"pytorch_model.bin": "x"}, "save them as safetensors first"),
        ({"model.safetensors.index.json": "{}"}, "has no weight_map"),
        ({"model.safetensors.index.json": "{"}, "cannot be read"),
    ],
)
def test_a_folder_without_weights_says_what_it_lacks(
    tmp_path: Path, files: dict[str, str], said: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as refused:
        misfit(tmp_path, shapes("llama"))
    assert said in str(refused.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        misfit(tmp_path / "nowhere", shapes("llama"))


# ---- memory ----------------------------------------------------------------------------------

MIB = 2**20
ROWS, WIDTH, TENSORS = 1024, 2048, 20  # 4 MiB each in bf16, all in one file


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def _most_while_loading(rank: int, world_size: int, folder: str) -> int:
    """Bytes that a rank holds at the worst moment of a load, above its shards."""
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.zeros(ROWS, WIDTH)
    state = {f"w{i}": distribute_tensor(whole.clone(), mesh, [Shard(0)]) for i in range(TENSORS)}
    del whole
    most = 0

    class Watched:
        """safe_open; how much is resident is asked when a file is about to be closed."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.inner = real(*args, **kwargs)

        def __enter__(self) -> Any:
            return self.inner.__enter__()

        def __exit__(self, *error: Any) -> None:
            nonlocal most
            most = max(most, _resident())
            self.inner.__exit__(*error)

    real = hf_folder.safe_open
    reader = SafetensorsReader(Path(folder))
    hf_folder.safe_open = Watched  # type: ignore[misc,assignment]
    before = _resident()
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(state, storage_reader=reader, planner=planner)
    assert all(float(t.to_local().min()) == float(t.to_local().max()) == 1 for t in state.values())
    return most - before


def test_a_rank_holds_its_shards_and_one_tensor_more(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.ones(ROWS, WIDTH, dtype=torch.bfloat16) for i in range(TENSORS)}
    write_weights(tmp_path, tensors)
    for extra in run_distributed(_most_while_loading, 2, str(tmp_path)):
        # One tensor is 4 MiB, its part here 2; all parts together, kept mapped, would be 40.
        assert extra < 16 * MIB


def test_the_index_is_read_as_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(UserError, match="holds no JSON object"):
        hf_folder.read_json(tmp_path / "config.json")
