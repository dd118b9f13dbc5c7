"""Transformer Engine's layers under FSDP that shards within a node and replicates over nodes."""

from __future__ import annotations

import pytest
import torch

from megafp8.specs.te_versions import DEFAULT_VERSION
from tests.backends.te import rank_hybrid
from tests.backends.te.same_codes import OF_A_FLIP
from tests.ranks import run_ranks
from tests.te_sources import need_sources

BOUNDS = {"FP32": 1e-6, "delayed": 1e-3, "alone": 1e-3, "mxfp8": 1e-3}
"""Those of losses, as where FSDP over two ranks is compared with replicas: updates differ by a
rounding, so that codes at a tie become others."""


@pytest.mark.parametrize(
    "names",
    [
        ["FP32", "delayed"],
        pytest.param(["alone", "mxfp8"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_two_nodes_of_two_ranks_are_one_process(names: list[str]) -> None:
    """Losses, norms and scales of three steps; two ranks have each row, and all have one loss."""
    need_sources(DEFAULT_VERSION)
    ranks = run_ranks(rank_hybrid.runs, 4, {"names": names, "steps": 3})
    for found in ranks:
        for name, runs in found.items():
            (results, shards, tables), (wanted, whole, of_one) = runs.values()
            assert results == ranks[0][name]["hybrid"][0], name
            assert results[0][0] == pytest.approx(wanted[0][0], rel=OF_A_FLIP.losses), name
            for (loss, norm), (other, whole_norm) in zip(results, wanted, strict=True):
                assert loss == pytest.approx(other, rel=BOUNDS[name]), name
                assert norm == pytest.approx(whole_norm, rel=10 * BOUNDS[name]), name
            assert {key: (-(-rows // 2), *rest) for key, (rows, *rest) in whole.items()} == shards
            assert bool(tables) == (name in ("delayed", "alone"))
            for key, tensor in tables.items() if name == "delayed" else ():
                torch.testing.assert_close(tensor, of_one[key], rtol=2.0**-2, atol=1e-6)
