"""Pretrain a GPT: `python pretrain_gpt.py model.fp8=True trainer.max_steps=600 …`.

`--help` lists every key; `--cfg job` shows the composed configuration; `-m` sweeps.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from omegaconf import DictConfig

from megafp8.config.app import AppInfo, run_app
from megafp8.config.overrides import quoted
from megafp8.config.resolve import resolve
from megafp8.parallel.launch import is_rank, launch, leave_process

DEFAULT_CONFIG = "pretrain_gpt"


def gpu_available() -> bool:
    import torch

    return torch.cuda.is_available()


def task(cfg: DictConfig, info: AppInfo) -> int:
    """One run: in this process, or as ranks that this process starts and watches."""
    spec = resolve(cfg, gpu_available)
    argv = list(info.overrides)
    command = ["python", "pretrain_gpt.py", *sys.argv[1:]]
    if info.directory is not None:  # a sweep's job works in the sweep's own folder
        argv.append(f"exp_manager.explicit_log_dir={quoted(str(info.directory))}")
        command = ["python", "pretrain_gpt.py", *argv]
    if info.config_name != DEFAULT_CONFIG:
        argv.insert(0, f"--config-name={info.config_name}")
    if info.config_dir is not None:
        argv.insert(0, f"--config-dir={info.config_dir}")
    if spec.parallel.world_size > 1 and not is_rank():
        return launch(str(Path(__file__).absolute()), argv, spec.parallel.devices_per_node)
    from megafp8.train.pretrain import pretrain

    return pretrain(
        spec,
        is_sweep=info.is_sweep,
        command=command,
        settings=(*info.table, *info.inert),
        record=info.record,
    )


def main() -> int:
    """Returns the exit code. Ctrl-C before training begins has nothing to save."""
    try:
        return run_app(sys.argv[1:], task)
    except KeyboardInterrupt:
        print("megafp8: interrupted before training began", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    leave_process(main())
