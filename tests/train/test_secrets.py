"""A whole run with secrets in its environment: none is in its output or its directory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.train.runs import ENVIRONMENT, ROOT, Place

PLANTED = "hf_pLaNtEd0123456789"
SECRETS = {name: PLANTED for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY")}


@pytest.mark.parametrize("wandb", [False, True])
def test_a_run_leaves_no_secret(place: Place, wandb: bool) -> None:
    if wandb:
        pytest.importorskip("wandb", reason="wandb is not installed")
    argv = place.argv(
        f"exp_manager.create_wandb_logger={wandb}",
        "trainer.max_steps=2",
        "trainer.val_check_interval=1",
        "exp_manager.create_tensorboard_logger=True",
        "model.nsys_profile.enabled=True",
        "model.nsys_profile.start_step=1",
        "model.nsys_profile.end_step=1",
        "model.optim.sched.warmup_steps=1",
        "model.cpu_offloading=False",
    )
    done = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), *argv],
        cwd=place.cwd,
        env=ENVIRONMENT | SECRETS | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"},
        capture_output=True,
        timeout=120,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output.decode()
    assert PLANTED.encode() not in output
    files = [path for path in place.cwd.rglob("*") if path.is_file()]
    assert len(files) > 8 and any("tfevents" in path.name for path in files)
    assert any(path.suffix == ".wandb" for path in files) == wandb
    for path in files:
        assert PLANTED.encode() not in path.read_bytes(), path
    summary = place.summary()
    (inert,) = summary["inert_keys"]
    assert inert["key"] == "model.cpu_offloading" and inert["origin"] == "command line"
    assert b"inert: model.cpu_offloading=False" in output
    set_by = {entry["key"]: entry for entry in summary["non_default"]}
    assert set_by["trainer.max_steps"] == {
        "key": "trainer.max_steps", "value": 2, "origin": "command line", "default": 900
    }  # fmt: skip
