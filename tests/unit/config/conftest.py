"""What the tests of the configuration share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.config.manager import load_config
from torchtitan_lc.tools.errors import UserError


@pytest.fixture(autouse=True)
def no_config_file_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONFIG_FILE", raising=False)


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., JobConfig]:
    """load("[compile]\\nenable = true", "--training.steps", "4"): that file with those flags."""

    def load_text(toml: str, *flags: str) -> JobConfig:
        path = tmp_path / "job.toml"
        path.write_text(toml, encoding="utf-8")
        return load_config(["--config", str(path), *flags])

    return load_text


@pytest.fixture
def mistake(load: Callable[..., JobConfig]) -> Callable[..., str]:
    """The text of the UserError that `load` raises."""

    def text_of(toml: str, *flags: str) -> str:
        with pytest.raises(UserError) as caught:
            load(toml, *flags)
        return str(caught.value)

    return text_of
