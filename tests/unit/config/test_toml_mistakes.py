"""A mistake in the file is named, with its fix; a run with silently wrong settings never starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_lc.config.manager import load_config
from torchtitan_lc.tools.errors import UserError


def test_a_misspelt_key_names_its_neighbour(mistake):
    text = mistake("[training]\nseq_lenn = 4096")
    assert "[training] seq_lenn: no such key; did you mean `seq_len`?" in text


def test_a_misspelt_section_names_its_neighbour(mistake):
    text = mistake('[activaton_checkpoint]\nmode = "full"')
    assert "[activaton_checkpoint]: no such section; did you mean [activation_checkpoint]" in text


def test_a_misspelt_nested_section_names_its_neighbour(mistake):
    assert "[model.ropee]: no such section; did you mean [model.rope]" in mistake(
        "[model.ropee]\ntheta = 1e6"
    )


def test_a_key_in_the_wrong_section_is_sent_home(mistake):
    assert "[model] seq_len: no such key here; `seq_len` exists in [training]" in mistake(
        "[model]\nseq_len = 4096"
    )


def test_a_key_outside_any_section_is_sent_home(mistake):
    assert "seq_len: stands outside any section" in mistake("seq_len = 4096")
    assert "exists in [training]" in mistake("seq_len = 4096")


def test_a_misspelt_key_in_the_wrong_section_is_still_found(mistake):
    assert "did you mean `context_parallel_degree` in [parallelism]?" in mistake(
        "[training]\ncontext_paralel_degree = 2"
    )


def test_a_key_near_nothing_lists_the_keys_of_its_section(mistake):
    assert "[compile] has enable, backend" in mistake("[compile]\nzzz = 1")


def test_a_section_near_nothing_lists_the_sections(mistake):
    assert "there are [job], [profiling]" in mistake("[zzz]\na = 1")


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        (
            'steps = "8192"',
            'steps = "8192": expected an integer, got a string; drop the quotes: 8192',
        ),
        ('seq_len = "8192"', "got a string; drop the quotes: 8192"),
        (
            'seq_len = "8k5"',
            'expected a number of tokens (an integer, or "128K", "5M"), got a string',
        ),
        ('seq_len = "1.5M"', 'expected a whole number of tokens, such as 8192, "128K" or "5M"'),
        ("seq_len = 4096.0", "got a float; write 4096"),
        ('max_norm = "1e-4"', "expected a number, got a string; drop the quotes: 1e-4"),
        ("steps = 10.0", "expected an integer, got a float; write 10"),
        ("steps = 1.5", "steps = 1.5: expected an integer, got a float"),
        ("steps = true", "steps = true: expected an integer, got a boolean"),
        ("max_norm = true", "expected a number, got a boolean"),
        ("steps = [1]", "expected an integer, got a list"),
        ("steps = 2026-01-01", "expected an integer, got a date"),
        ("dataset_path = 5", "expected a string, got an integer"),
        ('dtype = "fp8"', 'dtype = "fp8": expected one of "float32", "bfloat16"'),
        ("dtype = 32", 'expected one of "float32", "bfloat16", got an integer'),
        ("steps = {a = 1}", "expected an integer, got a table"),
    ],
)
def test_a_value_of_the_wrong_type_says_what_was_expected(mistake, line, answer):
    text = mistake(f"[training]\n{line}")
    assert answer in text
    assert "[training]" in text


def test_other_types_say_what_was_expected_too(mistake):
    assert "expected true or false, got a string; drop the quotes: true" in mistake(
        '[compile]\nenable = "true"'
    )
    assert "expected true or false, got an integer" in mistake("[compile]\nenable = 1")
    assert 'expected a list of strings, got a string; write ["a", "b"]' in mistake(
        '[checkpoint]\nexclude_from_loading = "a,b"'
    )
    assert "expected a list of strings, got a list" in mistake(
        "[checkpoint]\nexclude_from_loading = [1]"
    )
    assert "lr: no such key" not in mistake('[optimizer]\nlr = "1e-4"')


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ('host_memory_gib = "8"', 'a number or "auto", got a string; drop the quotes: 8'),
        (
            'host_memory_gib = "lots"',
            'host_memory_gib = "lots": expected a number or "auto", got a',
        ),
        ("host_memory_gib = true", 'expected a number or "auto", got a boolean'),
        ('early_fetch = "Auto"', 'expected true or false or "auto", got a string'),
        ('early_fetch = "true"', 'true or false or "auto", got a string; drop the quotes: true'),
        ("early_fetch = 1", 'expected true or false or "auto", got an integer'),
        ('enable = "auto"', "expected true or false, got a string"),
    ],
)
def test_where_a_word_may_stand_for_a_value_both_are_expected(mistake, line, answer):
    assert answer in mistake(f"[activation_offload]\n{line}")


def test_a_word_may_stand_for_a_value(load):
    config = load(
        '[activation_checkpoint]\nselective_layers = "auto"\n'
        '[activation_offload]\nhost_memory_gib = "auto"\nearly_fetch = "auto"'
    )
    assert config.activation_checkpoint.selective_layers == "auto"
    assert config.activation_offload.host_memory_gib == "auto"
    assert config.activation_offload.early_fetch == "auto"
    config = load(
        "[activation_checkpoint]\nselective_layers = 0\n"
        "[activation_offload]\nhost_memory_gib = 8\nearly_fetch = false"
    )
    assert config.activation_checkpoint.selective_layers == 0
    assert type(config.activation_offload.host_memory_gib) is float
    assert config.activation_offload.early_fetch is False


def test_a_section_written_as_a_value_is_refused(mistake):
    assert "[model.rope] is a section, not a key" in mistake("[model]\nrope = 5")
    assert "[training] is a section, not a key" in mistake("training = 5")


def test_an_integer_may_stand_for_a_float(load):
    norm = load("[training]\nmax_norm = 2").training.max_norm
    assert norm == 2.0
    assert type(norm) is float


def test_the_file_cannot_choose_itself(mistake):
    assert "belongs on the command line" in mistake('[job]\nconfig_file = "other.toml"')


def test_a_syntax_error_says_where(mistake):
    text = mistake("[training]\nsteps = = 3")
    assert "job.toml" in text
    assert "line 2, column 9" in text


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "job.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not a text file in UTF-8"):
        load_config(["--config", str(path)])


def test_all_mistakes_of_both_sources_are_reported_together(mistake):
    text = mistake(
        '[training]\nseq_lenn = 1\nsteps = "3"\n[nowhere]\na = 1',
        "--training.stepss=5",
        "--optimizer.lr",
        "fast",
    )
    assert "5 problems" in text
    for part in ("seq_lenn", 'steps = "3"', "[nowhere]", "--training.stepss", "--optimizer.lr"):
        assert part in text


def test_the_command_ends_with_code_2_and_without_a_traceback(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("[training]\nseq_lenn = 1")
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan_lc.config.manager", "--config", str(path)],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "did you mean `seq_len`" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
