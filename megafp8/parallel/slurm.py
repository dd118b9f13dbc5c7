"""Translate Slurm's variables of this process into those that torch reads.

A batch script also sees the job's number of tasks and task number 0, though it is no task of a
step, and a job that is submitted from inside a step inherits that step's variables. Only a process
that `srun` has started as one of several tasks is a rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping

from megafp8.errors import ConfigError, RunError
from megafp8.specs import ParallelSpec

_MOST_TASKS = 10**7
_FIRST_PORT, _NUM_PORTS = 15000, 10000  # below the range of ports that Linux gives to clients
_WAY_OUT = "Start the tasks with srun, or unset the SLURM_STEP variables"


def in_step(environment: Mapping[str, str]) -> bool:
    """Return whether `srun` has started this process as one of several tasks."""
    if not {"SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"} <= environment.keys():
        return False
    if _number(environment, "SLURM_STEP_NUM_TASKS") < 2:
        return False  # `srun --pty bash` starts an ordinary shell, not a rank
    # A batch script can inherit a step's variables, but its own node's task ids differ.
    node = _number(environment, "SLURM_NODEID")
    per_node = tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
    ids = environment.get("SLURM_GTIDS", "").split(",")
    same_job = environment.get("SLURM_NTASKS") == environment["SLURM_STEP_NUM_TASKS"]
    return same_job and node < len(per_node) and len(ids) == per_node[node]


def adopt_step(environment: MutableMapping[str, str]) -> bool:
    """Set torchrun's variables for a task of a Slurm step; return whether this process is one.

    Variables that are already set are kept: MASTER_ADDR and MASTER_PORT may be chosen by hand, and
    under torchrun (one task per node) RANK is torchrun's.
    """
    if "RANK" in environment or not in_step(environment):
        return False
    node = _number(environment, "SLURM_NODEID")
    local_size = tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])[node]
    cpus = environment.get("SLURM_CPUS_PER_TASK")
    threads = cpus or max(1, _number(environment, "SLURM_CPUS_ON_NODE") // local_size)
    ours = {
        "RANK": str(_number(environment, "SLURM_PROCID")),
        "WORLD_SIZE": str(_number(environment, "SLURM_STEP_NUM_TASKS")),
        "LOCAL_RANK": str(_number(environment, "SLURM_LOCALID")),
        "LOCAL_WORLD_SIZE": str(local_size),
    }
    defaults = {
        "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(master_port(environment)),
        "OMP_NUM_THREADS": str(threads),
        # Messages about lost connections would hide the message of the rank that failed.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    environment.update(ours | {k: environment.get(k, v) for k, v in defaults.items()})
    return True


def srun_of_step(environment: Mapping[str, str]) -> list[str]:
    """Return the words with which `srun` starts the ranks of this step again.

    There are none if `srun` did not start this rank, or not the same number on each node.
    """
    if not in_step(environment) or "TORCHELASTIC_RUN_ID" in environment:
        return []
    per_node = tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
    if len(set(per_node)) > 1:
        return []
    layout = [f"--nodes={len(per_node)}", f"--ntasks-per-node={per_node[0]}"]
    return ["srun", *layout, "--kill-on-bad-exit=1"]


def check_ranks(spec: ParallelSpec, environment: Mapping[str, str]) -> None:
    """Raise ConfigError unless as many ranks were started as the settings need."""
    size, local = (environment.get(name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if size != str(spec.world_size):
        key, value = "trainer.devices", spec.devices_per_node
        reason = f"with trainer.num_nodes={spec.num_nodes} the layout has {spec.world_size} rank(s)"
        reason += f", but {size} were started"
    elif local is not None and local != str(spec.devices_per_node):
        key, value = "trainer.devices", spec.devices_per_node
        reason = f"{local} ranks were started on this node"
    else:
        return
    raise ConfigError(
        key,
        value,
        reason,
        "Make trainer.num_nodes and trainer.devices what srun (--nodes, --ntasks-per-node) or "
        "torchrun (--nnodes, --nproc_per_node) starts",
    )


def master_port(environment: Mapping[str, str]) -> int:
    """Return the port of rank 0's store: the same on all tasks of a step, another for other steps.

    Two jobs get the same port only rarely.
    """
    job, step = (_number(environment, name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _FIRST_PORT + (job * 13 + step) % _NUM_PORTS


def given_gpus(environment: Mapping[str, str]) -> str | None:
    """Return the GPUs of this step or job on this node, as Slurm gives them: `0,1`, or a count."""
    names = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE")
    return next((environment[name] for name in names if environment.get(name)), None)


def restart_count(environment: Mapping[str, str]) -> int:
    """Return how often Slurm has restarted this job; 0 outside Slurm."""
    count = environment.get("SLURM_RESTART_COUNT", "0")
    return int(count) if count.isascii() and count.isdigit() else 0


def tasks_per_node(text: str) -> list[int]:
    """Return the tasks of each node from Slurm's text: `2(x3),1` means 2, 2, 2 and 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise RunError(f"SLURM_STEP_TASKS_PER_NODE={text}: cannot be read. {_WAY_OUT}")
        tasks, nodes = int(match[1]), int(match[2] or 1)
        if tasks * nodes > _MOST_TASKS:
            raise RunError(f"SLURM_STEP_TASKS_PER_NODE={text}: are too many. {_WAY_OUT}")
        counts += [tasks] * nodes
    return counts


def first_host(nodes: str) -> str:
    """Return the first name of Slurm's host list: `gpu[003-007,9]-ib,login1` gives `gpu003-ib`."""
    depth, end = 0, len(nodes)
    for place, letter in enumerate(nodes):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            end = place
            break
    first = nodes[:end].strip()
    host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)
    if not host or depth != 0 or set(host) & set("[], "):
        raise RunError(f"SLURM_STEP_NODELIST={nodes}: cannot be read. {_WAY_OUT}")
    return host


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not value.isascii() or not value.isdigit():
        raise RunError(f"{name}={value}: Slurm gives a whole number here. {_WAY_OUT}")
    return int(value)
