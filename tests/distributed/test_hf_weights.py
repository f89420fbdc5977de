"""Hugging Face weights into shards and back: the same bytes, on any number of ranks."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.helpers import run_distributed
from tests.hf_folders import KINDS, NAMES, differing, make_folder, read_weights, write_weights
from tests.tiny import tiny_config
from torchtitan_lc.components import hf_export
from torchtitan_lc.components.hf_export import Exporter
from torchtitan_lc.components.hf_folder import HuggingFaceForm
from torchtitan_lc.tools.errors import UserError
from torchtitan_lc.trainer import Trainer

SETTINGS: dict[str, Any] = {
    "model.flavor": "from_hf",
    "model.tokenizer": "byte",
    "activation_checkpoint.mode": "none",
    "checkpoint.enable": True,
    "checkpoint.interval": 1000,
    "checkpoint.initial_load_in_hf": True,
    "checkpoint.last_save_in_hf": True,
    "checkpoint.export_dtype": "bfloat16",
}


def _trainer(
    kind: str, folder: str, settings: dict[str, Any], device: str | torch.device = "cpu"
) -> Trainer:
    chosen = {
        **SETTINGS,
        "model.name": NAMES[kind],
        "model.hf_assets_path": f"{folder}/{kind}",
        "job.dump_folder": f"{folder}/out/{kind}",
        **settings,
    }
    return Trainer(tiny_config(chosen), torch.device(device))


def _load_and_export(
    rank: int, world_size: int, folder: str, out: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """Of each kind: load, export, load the export; parameters after both, and logits of one rank."""
    answers = {}
    for kind in KINDS:
        own = {"job.dump_folder": f"{out}/{kind}", **settings}
        trainer = _trainer(kind, folder, own)
        assert trainer.checkpointer.load() == 0
        first = _weights(trainer)
        trainer.checkpointer.save(1, last_step=True)
        again = {
            "job.dump_folder": f"{out}/{kind}/again",
            "checkpoint.initial_load_path": f"{out}/{kind}/hf/step-1",
        }
        reloaded = _trainer(kind, folder, {**settings, **again})
        assert reloaded.checkpointer.load() == 0
        logits = None
        if world_size == 1:
            tokens = torch.arange(64)[None] * 3
            with torch.no_grad():
                logits = reloaded.model(tokens, torch.arange(64)[None], None, None)
        answers[kind] = {"first": first, "reloaded": _weights(reloaded), "logits": logits}
        trainer.close()
        reloaded.close()
    return answers


def _weights(trainer: Trainer) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().cpu().clone()
        for name, p in trainer.module.named_parameters()
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of each kind; that of qwen3 is in three files."""
    folder = tmp_path_factory.mktemp("hf")
    for kind in KINDS:
        make_folder(folder / kind, kind, files=3 if kind == "qwen3" else 1)
    return folder


@pytest.fixture(scope="module")
def one_rank(folders: Path) -> dict[str, Any]:
    return run_distributed(_load_and_export, 1, str(folders), str(folders / "one"), {})[0]


@pytest.fixture(scope="module")
def two_ranks(folders: Path) -> dict[str, Any]:
    """One row over both."""
    cp = {"parallelism.context_parallel_degree": 2}
    return run_distributed(_load_and_export, 2, str(folders), str(folders / "two"), cp)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", ["one", "two"])
def test_load_export_reload_gives_identical_bytes_per_tensor(
    kind: str, ranks: str, folders: Path, request: pytest.FixtureRequest
) -> None:
    answer = request.getfixturevalue(f"{ranks}_rank" + ("s" if ranks == "two" else ""))[kind]
    source = read_weights(folders / kind)
    assert differing(source, read_weights(folders / ranks / kind / "hf" / "step-1")) == []
    assert differing(answer["first"], answer["reloaded"]) == []
    assert {tensor.dtype for tensor in answer["first"].values()} == {torch.float32}
    assert len(answer["first"]) == len(source)


def test_ranks_that_share_rows_hold_the_weights_of_one_rank(
    one_rank: dict[str, Any], two_ranks: dict[str, Any]
) -> None:
    for kind in KINDS:
        assert differing(one_rank[kind]["first"], two_ranks[kind]["first"]) == []


def _load_and_export_one(
    rank: int, world_size: int, folder: str, out: str, settings: dict[str, Any]
) -> None:
    trainer = _trainer("qwen3", folder, {"job.dump_folder": out, **settings})
    trainer.checkpointer.load()
    trainer.checkpointer.save(1, last_step=True)
    trainer.close()


@pytest.mark.parametrize("replicas", [1, 2])
def test_rows_that_do_not_divide_come_back_from_four_ranks_and_replicas(
    replicas: int, folders: Path, tmp_path: Path
) -> None:
    settings = {"parallelism.data_parallel_replicate_degree": replicas}
    run_distributed(_load_and_export_one, 4, str(folders), str(tmp_path), settings)
    exported = read_weights(tmp_path / "hf" / "step-1")
    assert differing(read_weights(folders / "qwen3"), exported) == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_export_opens_in_transformers_and_gives_our_logits(
    kind: str, folders: Path, one_rank: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.enable_propagation()
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folders / "one" / kind / "hf" / "step-1", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info  # missing, unexpected and mis-shaped tensors, errors
    said = [r.getMessage() for r in caplog.records if r.name.startswith("transformers")]
    assert not said
    with torch.no_grad():
        want = model(torch.arange(64)[None] * 3).logits
    assert (one_rank[kind]["logits"] - want).abs().max() <= 1e-5
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == (kind == "llama_tied")


def train_and_export(
    rank: int, world_size: int, folder: str, out: str, settings: dict[str, Any], device: str = "cpu"
) -> list[dict[str, Tensor]]:
    """Train; the weights after each step. Each export is held until another step is done (or, as the
    last one is waited for, a second has gone by)."""
    stepped = threading.Event()
    write_file = hf_export._write_file

    def held(*args: Any) -> None:
        stepped.clear()
        stepped.wait(timeout=1)
        write_file(*args)

    hf_export._write_file = held  # type: ignore[assignment]
    training = {
        "training.steps": 3,
        "optimizer.lr": 0.05,
        "metrics.log_freq": 1,
        "parallelism.context_parallel_degree": world_size,
        "checkpoint.last_save_in_hf": False,
    }
    own = {"job.dump_folder": out, **training, **settings}
    where = f"cuda:{rank}" if device == "cuda" else device
    trainer = _trainer("llama_tied", folder, own, where)
    step, weights = trainer.train_step, []

    def watched(metrics: Any) -> Any:
        result = step(metrics)
        weights.append(_weights(trainer))
        stepped.set()
        return result

    trainer.train_step = watched  # type: ignore[method-assign]
    trainer.train()
    trainer.close()
    return weights


def check_exports(folder: Path, weights: list[dict[str, Tensor]]) -> None:
    """Each export holds the weights of its own step, and the tied table once."""
    for step, ours in enumerate(weights, start=1):
        exported = read_weights(folder / "hf" / f"step-{step}")
        assert torch.equal(exported["model.norm.weight"], ours["head.norm.weight"])
        assert torch.equal(exported["model.embed_tokens.weight"], ours["tok_embeddings.weight"])
        assert "lm_head.weight" not in exported


def test_exports_while_training_goes_on_change_no_bit_and_hold_their_own_step(
    folders: Path, tmp_path: Path
) -> None:
    quiet, busy = str(tmp_path / "quiet"), str(tmp_path / "busy")
    exporting = {"checkpoint.hf_interval": 1, "checkpoint.export_dtype": "float32"}
    want = run_distributed(train_and_export, 2, str(folders), quiet, {})[0]
    got = run_distributed(train_and_export, 2, str(folders), busy, exporting)[0]
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in _logged(quiet)] == [line[key] for line in _logged(busy)]
    assert len(want) == 3 and not torch.equal(
        want[0]["head.norm.weight"], want[2]["head.norm.weight"]
    )
    for step, weights in enumerate(got, start=1):
        assert differing(weights, want[step - 1]) == []
    check_exports(Path(busy), got)
    assert not (Path(quiet) / "hf").exists()

    # The same command goes on from the job's own step, not from the Hugging Face folder.
    run_distributed(train_and_export, 2, str(folders), busy, {"training.steps": 4})
    assert [line["step"] for line in _logged(busy)] == [1, 2, 3, 4]


def _train_two_steps(
    rank: int, world_size: int, folder: str, out: str, settings: dict[str, Any]
) -> int:
    """How many steps it trained."""
    own = {"job.dump_folder": out, "training.steps": 2, "optimizer.lr": 0.05, **settings}
    trainer = _trainer("llama_tied", folder, own)
    step, trained = trainer.train_step, []

    def counted(metrics: Any) -> Any:
        trained.append(1)
        return step(metrics)

    trainer.train_step = counted  # type: ignore[method-assign]
    trainer.train()
    trainer.close()
    return len(trained)


def _remove(export: Path) -> None:
    shutil.rmtree(export)


def _leave_unfinished(export: Path) -> None:
    export.rename(export.with_name(export.name + ".unfinished"))


def _cut_short(export: Path) -> None:
    file = export / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _make_older(export: Path) -> None:
    """As one of a run that was left by load_step; its weights are another's."""
    write_weights(export, {name: torch.zeros_like(t) for name, t in read_weights(export).items()})
    os.utime(export / "config.json", (1, 1))


@pytest.mark.parametrize("lose", [_remove, _leave_unfinished, _cut_short, _make_older])
@pytest.mark.parametrize("model_only", [False, True])
def test_an_export_that_a_finished_run_owes_is_made_up_for_by_the_same_command(
    folders: Path, tmp_path: Path, lose: Callable[[Path], None], model_only: bool
) -> None:
    settings: dict[str, Any] = {
        "checkpoint.last_save_model_only": model_only,
        "checkpoint.exclude_from_loading": ["model"],  # which is not meant for an export
    }
    run = (_train_two_steps, 2, str(folders), str(tmp_path), settings)
    assert run_distributed(*run) == [2, 2]
    export = tmp_path / "hf" / "step-2"
    want = read_weights(export)
    lose(export)
    assert run_distributed(*run) == [0, 0]
    assert differing(read_weights(export), want) == []
    assert (export / "config.json").is_file()
    assert [p.name for p in export.parent.iterdir()] == ["step-2"]


def test_an_export_that_is_there_is_left_alone(folders: Path, tmp_path: Path) -> None:
    run: tuple[Any, ...] = (_train_two_steps, 1, str(folders), str(tmp_path), {})
    run_distributed(*run)
    (tmp_path / "hf" / "step-2" / "notes.txt").write_text("somebody's own")
    run_distributed(*run)
    assert (tmp_path / "hf" / "step-2" / "notes.txt").is_file()


def _logged(folder: str) -> list[dict[str, float]]:
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _fail_on_rank_zero(rank: int, world_size: int, folder: str) -> list[str]:
    """The first of two exports meets a full disk on rank 0, in its first file; what each rank is told."""
    mesh = init_device_mesh("cpu", (world_size,))
    tensors = {
        f"w{i}": distribute_tensor(torch.full((9, 4), float(i)), mesh, [Shard(0)]) for i in range(5)
    }
    form = HuggingFaceForm(str, {}, torch.float32)
    exporter = Exporter(Path(folder), form, tensors, dist.new_group(backend="gloo"))
    hf_export._MAX_FILE_BYTES = 4 * 36
    fsync, told = hf_export.os.fsync, []

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    hf_export.os.fsync = full  # type: ignore[assignment]
    exporter.start(1, tensors)
    try:
        exporter.wait()
    except UserError as error:
        told.append(str(error))
    hf_export.os.fsync = fsync
    exporter.start(2, tensors)
    exporter.wait()
    exporter.close()
    return told


def test_an_export_that_rank_zero_cannot_write_is_told_by_all_and_the_next_one_is_whole(
    tmp_path: Path,
) -> None:
    (first,), (second,) = run_distributed(_fail_on_rank_zero, 2, str(tmp_path))
    assert first == second and "step-1 could not be written: [Errno 28] No space left" in first
    want = {f"w{i}": torch.full((9, 4), float(i)) for i in range(5)}
    assert differing(read_weights(tmp_path / "step-2"), want) == []
    assert not (tmp_path / "step-1").exists()
