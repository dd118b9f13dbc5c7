"""The table of Transformer Engine's versions: it is of all of them, and its checks can fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megafp8.specs.te_versions import HASHES, release_of
from scripts import te_versions
from tests.te_cpu.sources import need_sources

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in te_versions.TABLE.read_text().splitlines()
    if line.startswith("| 2.")
]


def test_the_committed_table_has_every_version_and_each_ran() -> None:
    assert [row[0] for row in ROWS] == list(HASHES)
    for version, modules, *recipes, bits in ROWS:
        assert int(modules) > 60 and recipes == ["ok"] * 5 and bits == "yes", version
    assert release_of("2.6.0.post1") == (2, 6)


def test_a_result_outside_its_bound_is_named() -> None:
    x, w, g = te_versions.operands()
    found = [(x.float() @ w.float().t()).bfloat16(), (g.float() @ w.float()).bfloat16(),
             (g.float().t() @ x.float()).bfloat16()]  # fmt: skip
    other = found[0] + 1
    for name in te_versions.RECIPES:
        assert te_versions.compared(name, found, other) == "ok"
    assert te_versions.compared("delayed", found, found[0]) == "as in BF16"
    for place, what in enumerate(("output", "input gradient", "weight gradient")):
        wrong = [tensor * 2 if index == place else tensor for index, tensor in enumerate(found)]
        assert te_versions.compared("delayed", wrong, other) == f"{what} outside its bound"
    slightly = [found[0] * 1.25, *found[1:]]
    assert te_versions.compared("BF16", slightly, other) == "output outside its bound"


def test_a_version_that_fails_is_a_failure() -> None:
    good = {"modules": "100", **dict.fromkeys(te_versions.RECIPES, "ok")}
    assert te_versions.why_wrong(good) == ""
    assert "blockwise: TypeError" in te_versions.why_wrong(good | {"blockwise": "TypeError: no"})
    assert "router" in te_versions.why_wrong(good | {"modules": "router: ImportError"})
    assert "BF16: not run" in te_versions.why_wrong({"modules": "5"})
    assert te_versions.row_of("2.4.0", good, good | {"BF16 bits": "other"}).endswith(
        "| only delayed, tensorwise, blockwise, mxfp8 |"
    )


def test_rows_of_other_versions_stay(tmp_path: Path) -> None:
    table, rows = tmp_path / "table.md", {"2.12.0": "| 2.12.0 | a |", "2.4.0": "| 2.4.0 | b |"}
    te_versions.write_rows(table, rows)
    assert te_versions.read_rows(table) == rows
    assert table.read_text().endswith("| 2.4.0 | b |\n| 2.12.0 | a |\n")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["2.7.0", "2.9.0", "2.20.2"])
def test_versions_that_once_failed(version: str) -> None:
    """The first two ended in a TypeError with blockwise; of the last, not all could be imported."""
    need_sources(version)
    assert te_versions.why_wrong(te_versions.tried(version)) == ""


def test_only_finite_numbers_pass(tmp_path: Path) -> None:
    x, w, g = te_versions.operands()
    bad = torch.full_like(x @ w.t(), torch.nan)
    found = [bad, g @ w, g.t() @ x]
    assert "outside" in te_versions.compared("delayed", found, bad)
