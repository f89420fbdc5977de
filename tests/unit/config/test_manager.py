"""Which file is read, which source wins, and the way back to TOML."""

import dataclasses
import logging
import subprocess
import sys
import tempfile
from logging.handlers import QueueHandler
from pathlib import Path
from queue import SimpleQueue

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_lc.config import manager, names
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.config.manager import load_config, to_toml
from torchtitan_lc.config.token_count import parse_token_count
from torchtitan_lc.tools.errors import UserError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A stand-in for train_configs/ with two files; the working folder is elsewhere and empty."""
    folder = tmp_path / "train_configs"
    folder.mkdir()
    (folder / "llama8b_5m.toml").write_text('[training]\nseq_len = "5M"\n')
    (folder / "debug.toml").write_text("[training]\nsteps = 7\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(manager, "SHIPPED_FOLDER", folder)
    return folder


def test_the_command_line_wins_over_the_file_and_the_file_over_the_default(load):
    config = load("[training]\nsteps = 3\nseq_len = 4096", "--training.steps", "4")
    assert config.training.steps == 4
    assert config.training.seq_len == 4096
    assert config.training.gc_freq == JobConfig().training.gc_freq


def test_a_flag_equal_to_the_default_still_wins_over_the_file(load):
    config = load("[training]\nsteps = 3", "--training.steps", "10000")
    assert config.training.steps == 10000


def test_without_any_source_the_defaults_hold():
    assert load_config([]) == JobConfig()


def test_two_loads_share_no_state():
    load_config(["--checkpoint.exclude_from_loading", "a", "--model.rope.theta", "3"])
    assert load_config([]) == JobConfig()


@pytest.mark.parametrize(
    "flags",
    [
        ["--config", "llama8b_5m"],
        ["--config=llama8b_5m.toml"],
        ["--job.config_file", "llama8b_5m.toml"],
        ["--job.config-file=llama8b_5m"],
    ],
)
def test_all_ways_to_name_the_file_find_the_shipped_one(shipped, flags):
    config = load_config(flags)
    assert config.training.seq_len == 5 * 1024 * 1024
    assert config.job.config_file == str(shipped / "llama8b_5m.toml")


def test_the_environment_may_name_the_file(shipped, monkeypatch):
    monkeypatch.setenv("CONFIG_FILE", "debug")
    assert load_config([]).training.steps == 7
    assert load_config(["--config", "debug.toml"]).training.steps == 7


def test_a_file_in_the_working_folder_wins_over_a_shipped_one(shipped):
    Path("debug.toml").write_text("[training]\nsteps = 8")
    assert load_config(["--config", "debug.toml"]).training.steps == 8


def test_a_folder_of_the_same_name_does_not_hide_a_shipped_file(shipped):
    Path("debug").mkdir()
    assert load_config(["--config", "debug"]).training.steps == 7


@pytest.mark.parametrize("environment", [None, "llama8b_5m"])
def test_two_different_files_are_refused(shipped, monkeypatch, environment):
    flags = ["--config", "debug"]
    if environment:
        monkeypatch.setenv("CONFIG_FILE", environment)
    else:
        flags += ["--config", "llama8b_5m"]
    with pytest.raises(UserError, match="different config files.*debug.*llama8b_5m"):
        load_config(flags)


def test_a_missing_file_lists_the_near_shipped_names(shipped):
    with pytest.raises(UserError, match=r"--config lama8b_5m: no such file; .* llama8b_5m"):
        load_config(["--config", "lama8b_5m"])
    with pytest.raises(UserError, match="train_configs/ has debug, llama8b_5m"):
        load_config(["--config", "qqqqq.toml"])


def test_a_file_flag_without_a_name_is_refused():
    with pytest.raises(UserError, match="--config: needs the name of a file"):
        load_config(["--config"])


def test_every_shipped_config_loads():
    for path in sorted((ROOT / "train_configs").glob("*.toml")):
        load_config(["--config", str(path)])


@pytest.fixture
def heard():
    """What the package's logger is given."""
    queue: SimpleQueue[logging.LogRecord] = SimpleQueue()
    handler = QueueHandler(queue)
    logger = logging.getLogger("torchtitan_lc")
    logger.addHandler(handler)
    yield lambda: [queue.get().getMessage() for _ in range(queue.qsize())]
    logger.removeHandler(handler)


def test_an_accepted_old_name_is_logged(load, heard):
    config = load("[training]\nbatch_size = 3", "--training.seed", "5")
    assert (config.training.local_batch_size, config.debug.seed) == (3, 5)
    in_file, in_flag = heard()
    assert "[training] batch_size is now called training.local_batch_size" in in_file
    assert "--training.seed 5 is now called debug.seed" in in_flag


def _reload(config: JobConfig) -> JobConfig:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "resolved.toml")
        path.write_text(to_toml(config), encoding="utf-8")
        again = load_config(["--config", str(path)])
        assert again.job.config_file == str(path)
    again.job.config_file = config.job.config_file
    return again


def test_the_resolved_config_of_the_defaults_loads_back_equal():
    assert _reload(JobConfig()) == JobConfig()


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
FINITE = st.floats(allow_nan=False)


@settings(max_examples=40, deadline=None)
@given(
    strings=st.tuples(TEXT, TEXT),
    numbers=st.tuples(FINITE, st.none() | FINITE),
    tokens=st.integers(0, 1 << 40),
    parts=st.lists(TEXT, max_size=3),
    seed=st.none() | st.integers(0, 1 << 62),
    flag=st.booleans(),
)
def test_any_resolved_config_loads_back_equal(strings, numbers, tokens, parts, seed, flag):
    config = JobConfig()
    config.job.description, config.checkpoint.initial_load_path = strings
    config.optimizer.lr, config.model.rope.theta = numbers
    config.training.seq_len = tokens
    config.checkpoint.exclude_from_loading = parts
    config.lr_scheduler.total_steps = seed
    config.compile.enable = flag
    config.job.config_file = strings[0] or None
    assert _reload(config) == config


def test_the_resolved_config_has_every_key_that_is_set():
    config = JobConfig()
    for key in names.all_keys():
        if names.get_key(config, key) is None:
            names.set_key(config, key, 1)
    lines = to_toml(config).splitlines()
    written = {line.partition(" = ")[0] for line in lines if " = " in line}
    expected = {key.rpartition(".")[2] for key in names.all_keys()} - {
        "config_file",
        "print_config",
    }
    assert written == expected
    assert len([line for line in lines if " = " in line]) == len(names.all_keys()) - 2


@given(count=st.integers(0, 5000), unit=st.sampled_from(["", "K", "M", "G", "k", "m", "g"]))
def test_token_counts_have_binary_suffixes(count, unit):
    size = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}[unit.lower()]
    assert parse_token_count(f"{count}{unit}") == count * size


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5M", "5MB", "5Mi", "1e3", "128 K K", "nan"])
def test_other_ways_to_write_a_token_count_are_refused(text):
    with pytest.raises(ValueError, match="whole number of tokens"):
        parse_token_count(text)


def test_token_counts_in_a_file_may_be_plain_or_suffixed(load):
    tiling = load('[tiling]\nmlp_tokens = "8K"\nloss_tokens = 512').tiling
    assert (tiling.mlp_tokens, tiling.loss_tokens) == (8192, 512)
    assert load('[training]\nseq_len = "5M"').training.seq_len == 5_242_880


def test_every_section_is_a_fresh_dataclass():
    one, other = JobConfig(), JobConfig()
    for item in dataclasses.fields(JobConfig):
        assert getattr(one, item.name) is not getattr(other, item.name)


def test_reading_a_config_imports_neither_torch_nor_tyro():
    code = (
        "import sys; from torchtitan_lc.config.manager import load_config; load_config([]);"
        "import torchtitan_lc.config;"
        "print([m for m in ('torch', 'tyro', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr
