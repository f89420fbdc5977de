"""Every way in which people write a setting on the command line means what they think."""

import pytest

from torchtitan_lc.config.manager import load_config
from torchtitan_lc.tools.errors import UserError


@pytest.mark.parametrize(
    "flags",
    [
        ["--training.seq_len", "4096"],
        ["--training.seq_len=4096"],
        ["--training.seq-len", "4096"],
        ["--training.seq-len=4K"],
        ["--training.seq_len", "4k"],
        ["--training.seq_len", "1", "--training.seq_len", "4096"],
    ],
)
def test_a_value_may_follow_a_space_or_an_equals_sign(flags):
    assert load_config(flags).training.seq_len == 4096


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--checkpoint.enable"], True),
        (["--checkpoint.enable=True"], True),
        (["--checkpoint.enable", "true"], True),
        (["--checkpoint.enable=False"], False),
        (["--checkpoint.enable", "false"], False),
        (["--checkpoint.no_enable"], False),
        (["--checkpoint.no-enable"], False),
        (["--checkpoint.enable", "--checkpoint.no_enable"], False),
        (["--checkpoint.no_enable", "--checkpoint.enable", "--training.steps", "3"], True),
    ],
)
def test_a_boolean_may_be_a_flag_a_no_flag_or_a_word(load, flags, expected):
    assert load_config(flags).checkpoint.enable is expected
    other = str(not expected).lower()
    assert load(f"[checkpoint]\nenable = {other}", *flags).checkpoint.enable is expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "auto"),
        (["--activation_offload.early_fetch"], True),
        (["--activation_offload.early_fetch", "--training.steps=3"], True),
        (["--activation_offload.no_early_fetch"], False),
        (["--activation_offload.early_fetch", "false"], False),
        (["--activation_offload.early_fetch", "auto"], "auto"),
        (["--activation_offload.early-fetch=auto"], "auto"),
        (["--activation_offload.early_fetch", "--activation_offload.early_fetch=auto"], "auto"),
    ],
)
def test_a_boolean_that_may_be_a_word_has_all_its_forms(load, flags, expected):
    assert load_config(flags).activation_offload.early_fetch == expected
    if flags:
        text = "[activation_offload]\nearly_fetch = true"
        assert load(text, *flags).activation_offload.early_fetch == expected


def test_a_number_that_may_be_a_word_is_either():
    flag = "--activation_offload.host_memory_gib"
    assert load_config([flag, "1.5"]).activation_offload.host_memory_gib == 1.5
    assert load_config([f"{flag}=auto"]).activation_offload.host_memory_gib == "auto"
    flag = "--activation_checkpoint.selective_layers"
    assert load_config([flag, "7"]).activation_checkpoint.selective_layers == 7
    assert load_config([flag, "auto"]).activation_checkpoint.selective_layers == "auto"


def test_lists_are_written_with_commas():
    flag = "--checkpoint.exclude_from_loading"
    assert load_config([flag, "a,b"]).checkpoint.exclude_from_loading == ["a", "b"]
    assert load_config([f"{flag}=a, b,"]).checkpoint.exclude_from_loading == ["a", "b"]
    assert load_config([f"{flag}="]).checkpoint.exclude_from_loading == []


def test_nested_sections_are_dotted():
    rope = load_config(["--model.rope.theta", "5e5", "--model.rope.type=llama3"]).model.rope
    assert (rope.theta, rope.type) == (5e5, "llama3")


def test_negative_numbers_are_values():
    assert load_config(["--training.global_batch_size", "-1"]).training.global_batch_size == -1


def test_none_empties_an_optional_key(load):
    text = "[lr_scheduler]\ndecay_ratio = 0.5"
    assert load(text, "--lr_scheduler.decay_ratio", "none").lr_scheduler.decay_ratio is None


def test_a_value_that_starts_with_dashes_follows_an_equals_sign():
    assert load_config(["--job.description=--fast"]).job.description == "--fast"


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        (
            ["--training.seq_lenn", "4"],
            "--training.seq_lenn 4: no such key; did you mean `seq_len`?",
        ),
        (["--model.seq_len=4"], "`seq_len` exists in [training]"),
        (["--trainin.seq_len=4"], "`seq_len` exists in [training]"),
        (["--seq_len", "4"], "stands outside any section"),
        (["--zzz", "4"], "no such key in any section"),
        (["--training", "4"], "--training 4: is a section; its keys are written training.name"),
        (["--training.steps"], "--training.steps: needs a value: an integer"),
        (["--training.steps", "--compile.enable"], "--training.steps: needs a value"),
        (["--training.steps=abc"], "--training.steps abc: expected an integer"),
        (["--training.steps=1.5"], "expected an integer"),
        (["--training.seq_len=0.5M"], "expected a number of tokens"),
        (["--optimizer.lr=fast"], "expected a number"),
        (["--compile.enable=maybe"], "expected true or false"),
        (["--compile.enable=auto"], "expected true or false"),
        (["--activation_offload.early_fetch=often"], 'expected true or false or "auto"'),
        (["--activation_offload.host_memory_gib=all"], 'expected a number or "auto"'),
        (["--activation_checkpoint.selective_layers=2.5"], 'expected an integer or "auto"'),
        (["--attention.strategy=upype"], '"local", "ulysses", "upipe"'),
        (["--training.no_steps"], "has no `no_` form"),
        (["--compile.no_enable=true"], "takes no value; write --compile.enable true"),
        (["stray"], "stray: a value without a flag"),
        (["--checkpoint.exclude_from_loading", "a", "b"], "b: a value without a flag"),
    ],
)
def test_a_wrong_flag_is_named_with_its_fix(flags, answer):
    with pytest.raises(UserError) as caught:
        load_config(flags)
    assert answer in str(caught.value)


def test_help_lists_every_key_with_its_text_and_ends_with_0(capsys):
    from torchtitan_lc.config import names

    with pytest.raises(SystemExit) as ended:
        load_config(["--help"])
    page = capsys.readouterr().out
    assert ended.value.code == 0
    missing = [key for key in names.all_keys() if f"--{key}" not in page]
    assert missing == []
    assert "--training.seq_len TOKENS" in page
    assert "Steps between log lines" in page
    assert "(default: 16384)" in page
