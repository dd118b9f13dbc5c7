"""The table of Transformer Engine's versions: it is of all of them, and its checks can fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megafp8.specs import te_versions as specs_of_te
from megafp8.specs.te_versions import FIRST_WITH_NVFP4, is_before
from scripts import te_versions
from te_cpu import versions
from te_cpu.versions import HASHES, release_of
from tests.spec import nvfp4
from tests.spec.formats import Floats32
from tests.te_sources import need_sources

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in te_versions.TABLE.read_text().splitlines()
    if line.startswith("| 2.")
]


def test_settings_know_the_versions_of_the_table() -> None:
    """They are checked without `te_cpu`, which may not be installed."""
    for name in ("OLDEST", "DEFAULT_VERSION", "NEWEST_TRIED"):
        assert getattr(specs_of_te, name) == getattr(versions, name)
    for version in ("2.12", "2.3.0", "2.12.0", "2.99.1", "3.0.0"):
        assert specs_of_te.why_not_on_cpu(version) == versions.why_not(version)


def test_the_committed_table_has_every_version_and_each_ran() -> None:
    assert [row[0] for row in ROWS] == list(HASHES)
    for version, modules, *recipes, bits in ROWS:
        lacks_fp4 = is_before(version, FIRST_WITH_NVFP4)
        expected = ["ok"] * 5 + [te_versions.ABSENT if lacks_fp4 else "ok"]
        assert int(modules) > 60 and recipes == expected and bits == "yes", version
    assert release_of("2.6.0.post1") == (2, 6)


def test_a_result_outside_its_bound_is_named() -> None:
    x, w, g = te_versions.operands()
    found = [(x.float() @ w.float().t()).bfloat16(), (g.float() @ w.float()).bfloat16(),
             (g.float().t() @ x.float()).bfloat16()]  # fmt: skip
    other = found[0] + 1
    for name in te_versions.SAME_RULE:
        assert te_versions.compared(name, found, other) == "ok"
    assert te_versions.compared("delayed", found, found[0]) == "as in BF16"
    for place, what in enumerate(("output", "input gradient", "weight gradient")):
        wrong = [tensor * 2 if index == place else tensor for index, tensor in enumerate(found)]
        assert te_versions.compared("delayed", wrong, other) == f"{what} outside its bound"
    slightly = [found[0] * 1.25, *found[1:]]
    assert te_versions.compared("BF16", slightly, other) == "output outside its bound"


@pytest.mark.parametrize("version", ["2.8.0", "2.20.2"])
def test_nvfp4_is_held_to_the_rule_of_its_version(version: str) -> None:
    """Products of the specification's operands pass, and those that are 5 % larger do not."""
    x, w, g = (operand.float().numpy() for operand in te_versions.operands())
    g_t, x_t = (rotated_rows(operand.T) for operand in (g, x))
    is_older = version == "2.8.0"
    found = [
        torch.from_numpy(values(left, 1, is_older) @ values(right, rows, is_older).T).bfloat16()
        for left, right, rows in ((x, w, 16), (g, w.T, 16), (g_t, x_t, 1))
    ]
    other = found[0] + 1
    assert te_versions.compared("nvfp4", found, other, version) == "ok"
    assert te_versions.compared("nvfp4", found, found[0], version) == "as in BF16"
    for place, what in enumerate(("output", "input gradient", "weight gradient")):
        wrong = [tensor * 1.05 if place == index else tensor for index, tensor in enumerate(found)]
        outside = te_versions.compared("nvfp4", wrong, other, version)
        assert outside == f"{what} outside its bound"


def values(x: Floats32, rows: int, is_older: bool) -> Any:
    x = np.ascontiguousarray(x)
    return nvfp4.quantize_blocks(x, rows, sixth_first=is_older).values


def rotated_rows(x: Floats32) -> Floats32:
    turned = nvfp4.rotate(np.ascontiguousarray(x)).astype(np.float32)
    return torch.from_numpy(turned).bfloat16().float().numpy()


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
