"""Test manifests with a right hash whose scalars are not what this program writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megafp8.checkpoint.manifest import Manifest, check_state, read_manifest, write_manifest
from megafp8.errors import CheckpointError

GOOD: dict[str, Any] = {
    "config": {"model": {"num_layers": 2}},
    "data_fingerprint": "abc",
    "consumed_samples": 8,
    "num_updates": 1,
    "num_skipped": 0,
    "loss_scale": None,
    "metrics": {"val_loss": 2.5},
    "last_in_effect": {},
    "scaling_layout": {"tp": 1, "cp": 1, "dp": 2, "amax": 2},
    "versions": {"torch": "2"},
}


def forged(folder: Path, meta: dict[str, Any]) -> Path:
    write_manifest(folder, Manifest(step=1, meta=meta, shards=()))
    return folder


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("config", []),
        ("config", {"model": []}),
        ("config", {"trainer": 5}),
        ("data_fingerprint", 5),
        ("consumed_samples", -5),
        ("consumed_samples", 10**30),
        ("consumed_samples", "8"),
        ("consumed_samples", True),
        ("num_updates", "x"),
        ("num_updates", 1.5),
        ("num_skipped", [0]),
        ("last_in_effect", 5),
        ("metrics", [1]),
        ("metrics", {"val_loss": "low"}),
        ("scaling_layout", {"tp": "1"}),
        ("loss_scale", {"scale": -1, "num_finite": 0, "num_overflows": 0}),
        ("loss_scale", {"scale": 1}),
        ("eod_id", -1),
        ("versions", "2"),
    ],
)
def test_a_forged_value_is_refused_by_its_key(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        read_manifest(forged(tmp_path, GOOD | {key: value}))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_manifest(forged(tmp_path, GOOD)).meta == GOOD
    check_state(GOOD, tmp_path)


@pytest.mark.parametrize("key", ["data_fingerprint", "consumed_samples", "num_updates"])
def test_a_state_without_a_part_is_refused(key: str, tmp_path: Path) -> None:
    meta = {name: value for name, value in GOOD.items() if name != key}
    meta = read_manifest(forged(tmp_path, meta)).meta  # weights alone may be read
    with pytest.raises(CheckpointError, match=f"lacks {key}"):
        check_state(meta, tmp_path)


def test_weights_alone_are_said_to_be_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has weights, but no state of training"):
        check_state({"config": {"model": {}}, "eod_id": 3}, tmp_path)
