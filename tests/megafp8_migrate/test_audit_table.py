"""The page of flags that do nothing: it has every case, and the command of each repeats it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megafp8.specs.te_versions import DEFAULT_VERSION
from scripts.audit_table import __main__ as table
from tests.te_sources import need_sources

PAGE = table.TABLE.read_text(encoding="utf-8")
REPORT = """\
megatron-core 0.19.2, over Transformer Engine 2.12.0 on a CPU: a GPT of 2 layers, two replicas

--no-fp8-wgrad  no effect: recipe and training step are the same without it
    read at megatron/core/fp8_utils.py:737, and 1 more
--fp8-margin 2  reaches TE: the recipe: margin 2, without it 0
    never read

1 no effect, 1 reaches TE
"""


def test_a_report_becomes_a_part_of_the_page() -> None:
    assert table.answers(REPORT) == {
        "--no-fp8-wgrad": (
            "no effect", "recipe and training step are the same without it",
            "read at megatron/core/fp8_utils.py:737, and 1 more",
        ),
        "--fp8-margin 2": ("reaches TE", "the recipe: margin 2, without it 0", "never read"),
    }  # fmt: skip
    part = table.section("A title", "scripts/audit_table/delayed.sh", REPORT)
    assert part.startswith("## A title\n\nmegatron-core 0.19.2, over")
    assert "$ megafp8 audit scripts/audit_table/delayed.sh --source wheels" in part
    assert "| `--fp8-margin 2` | reaches TE | the recipe: margin 2, without it 0 |" in part


@pytest.mark.parametrize("title", {**table.CASES, **table.PUBLISHED})
def test_the_committed_page_has_each_case_and_no_run_failed(title: str) -> None:
    part = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    file = {**table.CASES, **table.PUBLISHED}[title]
    assert f"megafp8 audit {file} --source wheels" in part
    assert (table.ROOT / file).is_file() is (title in table.CASES)
    assert "| `" in part and "failed" not in part and "two runs with the same flags" not in part


@pytest.mark.slow
@pytest.mark.parametrize("title", table.CASES)
def test_the_command_of_a_case_repeats_it(title: str) -> None:
    need_sources(DEFAULT_VERSION)
    wheels = os.environ.get(table.WHEELS, "")
    if not wheels:
        pytest.skip(
            f"{table.WHEELS} names no folder of wheels; {table.TABLE.name} has the commands"
        )
    file = table.CASES[title]
    said = table.audited(file, Path(wheels))
    assert said is not None and table.section(title, file, said) in PAGE
