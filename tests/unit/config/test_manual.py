"""Every setting has a manual, and the printed manual is the current one."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import get_type_hints

import pytest

from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.config.manual import field_docs, section_doc, section_types

ROOT = Path(__file__).resolve().parents[3]


def _generator():
    spec = importlib.util.spec_from_file_location(
        "write_config_docs", ROOT / "scripts" / "write_config_docs.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("section", section_types().values(), ids=list(section_types()))
def test_every_field_of_every_section_has_a_docstring(section):
    fields = [item.name for item in dataclasses.fields(section)]
    assert [name for name in fields if not field_docs(section).get(name)] == []
    # Without a docstring of its own a dataclass gets its signature, "Job(...)", for one.
    assert not section_doc(section).startswith(section.__name__ + "(")


def test_a_field_without_a_docstring_is_found():
    assert "job" not in field_docs(JobConfig)


def test_every_section_of_the_job_is_covered():
    hints = get_type_hints(JobConfig)
    assert set(hints.values()) <= set(section_types().values())


def test_the_configuration_page_is_current():
    generator = _generator()
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(), (
        "run scripts/write_config_docs.py"
    )
