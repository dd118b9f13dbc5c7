"""Pretrain a GPT: `megafp8 pretrain model.fp8=True trainer.max_steps=600 …`.

`--help` lists every key, `--cfg job` shows the composed configuration, and `-m` runs a sweep. In a
clone of the repository `python pretrain_gpt.py` does the same.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megafp8 import __version__
from megafp8.cli.epochs import with_epochs
from megafp8.cli.job import ADDED, FINETUNE_JOB, STARTED_AS
from megafp8.cli.main import AppInfo, report_error, run_app
from megafp8.config.errors import SettingError
from megafp8.config.layers import DEFAULT_CONFIG
from megafp8.config.overrides import quoted
from megafp8.config.own_recipes import TRUST, load_recipes_of
from megafp8.config.resolve import data_spec, observe_spec, resolve
from megafp8.errors import UserError
from megafp8.files import paths_reported
from megafp8.ops.torch_build import driver_version, why_no_gpu
from megafp8.ops.waiting import prepare_threads
from megafp8.parallel.ends import MAX_RESTARTS, REQUEUES
from megafp8.parallel.environment import check_environment
from megafp8.parallel.launch import (
    follow_launcher,
    has_launcher,
    is_rank,
    launch,
    prepare_allocator,
    prepare_connections,
    training_program,
)
from megafp8.parallel.slurm import adopt_step, check_ranks, given_gpus, srun_of_step
from megafp8.runs.place import check_place
from megafp8.runs.run_data import check_data
from megafp8.secrets import say

if TYPE_CHECKING:  # megafp8.cli comes before all that takes long to import: it handles Ctrl-C
    from megafp8.config.load import Loaded


def gpu_available() -> bool:
    """Whether PyTorch finds a GPU.

    Raises:
        SettingError: Slurm gave this job GPUs and PyTorch finds none.
    """
    import torch

    available = torch.cuda.is_available()
    if not available and (given := given_gpus(os.environ)):
        finding = f"PyTorch {torch.__version__} finds none"
        hint = "Use a CUDA build of PyTorch, and a container that sees the driver (check with "
        hint += "nvidia-smi)"
        if (why := why_no_gpu()) is not None:
            finding, hint = why
        raise SettingError(
            "trainer.accelerator",
            None,
            f"Slurm gave GPU(s) {given} to this job, and {finding}",
            f"{hint}, or set trainer.accelerator=cpu",
        )
    if not available and not is_rank() and (driver := driver_version()) is not None:
        why = why_no_gpu()
        reason = "PyTorch finds no GPU" if why is None else f"{why.reason}. {why.hint}"
        say(f"warning: NVIDIA's driver {driver} is here, and this job runs on the CPU: {reason}")
    return available


def _typed_command() -> list[str]:
    """Return the words before the arguments, as the user typed them.

    Ranks that were started by a launcher have its command line, so that the usual words stand in.
    """
    if (started_as := os.environ.get(STARTED_AS)) is not None:
        return shlex.split(started_as)
    usual = [*srun_of_step(os.environ), "python", Path(sys.argv[0]).name]
    typed = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    is_plain = len(typed) == 2 and Path(typed[1]).name == usual[1] and not is_rank()
    return typed if is_plain else usual


def typed_words() -> list[str]:
    """Return the words of the user's command.

    The ranks of `megafp8 finetune` get its job as an option, and those of a batch script the layout
    of its job, which the user did not type.
    """
    command, added = _typed_command(), os.environ.get(ADDED, "").split()
    if has_launcher() and command[-1] == "finetune":
        added.append(f"--config-name={FINETUNE_JOB}")
    return [*command, *(word for word in sys.argv[1:] if word not in added)]


def task(loaded: Loaded, info: AppInfo) -> int:
    """Run one job, in this process or on ranks that it starts and watches; return the exit code.

    Raises:
        SettingError: The job asks for ranks that this process cannot start.
    """
    adopt_step(os.environ)  # also here, since a sweep's job on Slurm does not run `main`
    if not is_rank():
        with paths_reported():
            check_data(data_spec(loaded.values))
            check_place(observe_spec(loaded.values))
    load_recipes_of(loaded.values)  # a sweep's job on Slurm does not run `main`
    if not is_rank() and sys.stdout.isatty():  # the import takes seconds, or many from a slow disk
        say(f"megafp8 {__version__}: loading PyTorch …")
    loaded, notes = with_epochs(loaded, info.gives_steps)
    spec = resolve(loaded.values, gpu_available)
    prepare_connections(spec.parallel, os.environ)  # the ranks that this process starts inherit it
    argv = list(info.overrides)
    if info.config_name != DEFAULT_CONFIG:
        argv.insert(0, f"--config-name={info.config_name}")
    if info.config_dir is not None:
        argv.insert(0, f"--config-dir={info.config_dir}")
    if info.trusts_recipes:
        argv.insert(0, TRUST)
    command = typed_words()
    if info.directory is not None:  # a sweep's job works in the sweep's own folder
        argv.append(f"exp_manager.explicit_log_dir={quoted(str(info.directory))}")
        command = [*_typed_command(), *argv]
    restarts = spec.train.max_restarts
    if is_rank():
        check_ranks(spec.parallel, os.environ)
        if restarts and REQUEUES in os.environ:
            os.environ[MAX_RESTARTS] = str(restarts)  # a rank that crashes or hangs says it
        elif restarts and not has_launcher():
            raise SettingError(
                "trainer.max_restarts",
                restarts,
                "torchrun or srun started these ranks, and only that launcher can start them again",
                "Leave it out, and use torchrun's --max-restarts; on Slurm, "
                "examples/slurm/pretrain.sbatch starts the job again as it says",
            )
    elif spec.parallel.num_nodes > 1:
        raise SettingError(
            "trainer.num_nodes",
            spec.parallel.num_nodes,
            "one command starts ranks on its own machine only",
            "Start the ranks on all nodes with srun or torchrun (examples/slurm/pretrain.sbatch)",
        )
    elif spec.parallel.world_size > 1 or restarts:
        num_ranks = spec.parallel.devices_per_node
        return launch(training_program(), argv, num_ranks, max_restarts=restarts)
    from megafp8.train.pretrain import pretrain

    return pretrain(
        spec,
        is_sweep=info.is_sweep,
        command=command,
        notes=(*info.inert, *notes),
        record=info.record,
    )


def main(argv: Sequence[str], config_name: str = DEFAULT_CONFIG) -> int:
    """Run the command line with the job `config_name`, and return the exit code.

    After Ctrl-C before training there is nothing to save.
    """
    follow_launcher()
    prepare_allocator(os.environ)  # torch has not been imported yet
    try:
        adopt_step(os.environ)
        prepare_threads(os.environ, is_foreign_rank=is_rank() and not has_launcher())
        check_environment(os.environ)
        prog = os.environ.get(STARTED_AS, f"python {Path(sys.argv[0]).name}")
        return run_app(argv, task, prog=prog, config_name=config_name, gpu_available=gpu_available)
    except UserError as error:  # about the variables that a launcher sets
        return report_error(error)
    except KeyboardInterrupt:
        is_sweep = not {"-m", "--multirun"}.isdisjoint(argv)
        when = "" if is_sweep else " before training began"
        print(f"megafp8: interrupted{when}", file=sys.stderr)
        return 128 + signal.SIGINT
