"""Say which commands come after a migration."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import megafp8
from megafp8_migrate.report import Migration
from megafp8_migrate.slurm import JOB_SCRIPT


def next_steps(file: Path, m: Migration) -> list[str]:
    """Return lines with the commands that plan, count and start the job of a new file."""
    folder, name = file.absolute().parent, file.name.removesuffix(".yaml")
    job = f"--config-dir {shlex.quote(str(folder))} --config-name {shlex.quote(name)}"
    trainer: dict[str, Any] = m.out.get("trainer") or {}
    on_gpu, nodes, devices = (
        trainer.get("accelerator") != "cpu", trainer.get("num_nodes", 1), trainer.get("devices")
    )  # fmt: skip
    lines = ["next, on this machine, without a GPU:"]
    lines += [f"  megafp8 plan {job}"] if on_gpu else []
    lines.append(f"  megafp8 dryrun {job}" + (" trainer.accelerator=gpu" if on_gpu else ""))
    if nodes == 1 and not m.slurm_options and shutil.which("sbatch") is None:
        return [*lines, "then the job:", f"  megafp8 pretrain {job}"]
    size = [f"--nodes={nodes}"] if isinstance(nodes, int) else []
    if isinstance(devices, int):
        size += [f"--ntasks-per-node={devices}", f"--gpus-per-node={devices if on_gpu else 0}"]
    options = " ".join(map(shlex.quote, [*size, *m.slurm_options]))
    clone = Path(megafp8.__file__).parents[1]
    has_script = (clone / JOB_SCRIPT).is_file()
    enter = f"cd {shlex.quote(str(clone))} && " if has_script else ""
    where = "on Slurm:" if has_script else "on Slurm, in a clone of megafp8:"
    return [*lines, f"then the job, {where}", f"  {enter}sbatch {options} {JOB_SCRIPT} {job}"]
