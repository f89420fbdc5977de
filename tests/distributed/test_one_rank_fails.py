"""What one rank alone cannot do stops all of them, with its words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.helpers import run_distributed
from tests.tiny import register_tiny, tiny_config
from torchtitan_lc.components.agreement import same_on_all
from torchtitan_lc.tools.errors import UserError
from torchtitan_lc.trainer import Trainer


def _train(rank: int, world_size: int, folder: str) -> tuple[str, int]:
    register_tiny()
    settings = {
        "job.dump_folder": folder,
        "training.dataset": "jsonl",
        "training.dataset_path": f"{folder}/data.jsonl",
    }
    trainer = Trainer(tiny_config(settings), torch.device("cpu"))
    with pytest.raises(UserError) as refused:
        trainer.train()
    trainer.close()
    return str(refused.value), trainer.state.step


def test_a_document_that_one_rank_cannot_read_is_named_by_all(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "long enough for a row of this job, and some more. " * 2})] * 8
    lines[5] = json.dumps({"txt": "of the second lane"})
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    (first, step), (second, other) = run_distributed(_train, 2, str(tmp_path))
    assert first == second and 'data.jsonl:6 is not a document: it has no field "text"' in first
    assert step == other > 0


def _compare(rank: int, world_size: int) -> list[str]:
    said = []
    for facts in (
        {"optimizer.lr": "0.1", "training.steps": "5"},
        {"optimizer.lr": str(rank % 2), "training.steps": "5"},
        {"optimizer.lr": "0.1", **({"debug.seed": "7"} if rank else {})},
    ):
        try:
            same_on_all(facts, "They differ:")
            said.append("")
        except UserError as error:
            said.append(str(error))
    return said


def test_settings_that_differ_are_named_on_all_ranks_with_the_ranks_that_have_them() -> None:
    said = run_distributed(_compare, 3)
    assert said[0] == said[1] == said[2]
    same, other, absent = said[0]
    assert same == ""
    assert other == "They differ:\n  optimizer.lr: 0 on ranks 0, 2; 1 on rank 1"
    assert absent == "They differ:\n  debug.seed: absent on rank 0; 7 on ranks 1, 2"


def _start(rank: int, world_size: int, tmp: str) -> str:
    """As a launcher that was given another learning rate, and another folder of data, than its peer."""
    register_tiny()
    folder = Path(tmp) / f"node{rank}"
    folder.mkdir()
    texts = ["the same on both nodes, and long enough for rows of this job. " * 4] * 4
    if rank:
        texts.append("one document more. " * 9)
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = {"training.dataset": "jsonl", "training.dataset_path": f"{folder}/data.jsonl"}
    with pytest.raises(UserError) as refused:
        Trainer(tiny_config({"job.dump_folder": tmp, **settings}), torch.device("cpu"))
    return str(refused.value)


def test_other_data_on_another_node_is_noticed_before_the_first_step(tmp_path: Path) -> None:
    first, second = run_distributed(_start, 2, str(tmp_path))
    assert first == second
    assert "training.dataset: jsonl:data.jsonl, 4 documents on rank 0; " in first


LONG = "long enough for a row of this job, and some more. " * 2


def _write_lines(folder: str, broken: bool) -> None:
    lines = [json.dumps({"text": f"{i}: {LONG}"}) for i in range(8)]
    if broken:
        lines[5] = lines[5][:20]
    Path(folder, "data.jsonl").write_text("\n".join(lines) + "\n")


def _run(folder: str, dump: str) -> tuple[Trainer, str]:
    settings = {
        "job.dump_folder": f"{folder}/{dump}",
        "training.dataset": "jsonl",
        "training.dataset_path": f"{folder}/data.jsonl",
        "training.steps": 6,
        "checkpoint.enable": True,
        "checkpoint.interval": 100,
    }
    trainer, said = Trainer(tiny_config(settings), torch.device("cpu")), ""
    try:
        trainer.train()
    except UserError as error:
        said = str(error)
    trainer.close()
    return trainer, said


def _repaired(rank: int, world_size: int, folder: str) -> tuple[int, str, bool]:
    register_tiny()
    if rank == 0:
        _write_lines(folder, broken=True)
    torch.distributed.barrier()
    stopped, said = _run(folder, "repaired")
    if rank == 0:
        _write_lines(folder, broken=False)
    torch.distributed.barrier()
    resumed, _ = _run(folder, "repaired")
    straight, _ = _run(folder, "straight")
    ours, theirs = ([_shard(p) for p in t.module.parameters()] for t in (resumed, straight))
    same = [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)]
    return stopped.state.step, said, all(same)


def _shard(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


def test_a_run_that_meets_a_broken_line_keeps_its_steps_and_goes_on_once_it_is_repaired(
    tmp_path: Path,
) -> None:
    for step, said, equal in run_distributed(_repaired, 2, str(tmp_path)):
        assert step > 0 and "data.jsonl:6 is not a document" in said
        assert (tmp_path / "repaired" / "checkpoint" / f"step-{step}").is_dir()
        assert equal, "as without the broken line"
