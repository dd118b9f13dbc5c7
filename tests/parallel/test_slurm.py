"""Slurm's variables: who is a rank, and what is read from the lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megafp8.errors import ConfigError, RunError
from megafp8.parallel.slurm import (
    adopt_step,
    check_ranks,
    first_host,
    given_gpus,
    in_step,
    master_port,
    restart_count,
    srun_of_step,
    tasks_per_node,
)
from megafp8.specs import ParallelSpec

# As Slurm 22.05 sets them: two nodes with two tasks each.
BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "4",
    "SLURM_NODELIST": "node[1-2]",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_CPUS_ON_NODE": "8",
}
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
TASK_3 = BATCH | STEP
TASK_3 |= {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_GTIDS": "2,3"}


def test_a_task_becomes_a_rank() -> None:
    environment = dict(TASK_3)
    assert adopt_step(environment)
    assert environment["RANK"] == "3" and environment["WORLD_SIZE"] == "4"
    assert environment["LOCAL_RANK"] == "1" and environment["LOCAL_WORLD_SIZE"] == "2"
    assert environment["MASTER_ADDR"] == "node1" and environment["OMP_NUM_THREADS"] == "4"
    other = {**TASK_3, "SLURM_PROCID": "0", "SLURM_GTIDS": "0,1", "SLURM_NODEID": "0"}
    assert adopt_step(other)
    assert other["MASTER_PORT"] == environment["MASTER_PORT"]


@pytest.mark.parametrize(
    "environment",
    [
        {},
        BATCH,
        BATCH | STEP,  # a batch script that was submitted from inside a step
        TASK_3 | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"},  # srun --pty bash
        TASK_3 | {"SLURM_NTASKS": "8"},  # another job's step
    ],
)
def test_a_shell_is_no_rank(environment: dict[str, str]) -> None:
    mine = dict(environment)
    assert not in_step(mine) and not adopt_step(mine)
    assert mine == environment


def test_the_srun_that_starts_the_ranks_again() -> None:
    words = ["srun", "--nodes=2", "--ntasks-per-node=2", "--kill-on-bad-exit=1"]
    assert srun_of_step(TASK_3) == words
    assert srun_of_step(TASK_3 | {"TORCHELASTIC_RUN_ID": "7"}) == [], "a rank of torchrun"
    uneven = {"SLURM_STEP_TASKS_PER_NODE": "1,2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "3"}
    assert srun_of_step({}) == srun_of_step(BATCH) == srun_of_step(TASK_3 | uneven) == []


def test_what_is_set_stays() -> None:
    under_torchrun = {**TASK_3, "RANK": "0", "WORLD_SIZE": "16"}
    assert not adopt_step(under_torchrun) and under_torchrun["WORLD_SIZE"] == "16"
    chosen = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "3"}
    environment = TASK_3 | chosen
    assert adopt_step(environment) and environment.items() >= chosen.items()
    few = TASK_3 | {"SLURM_CPUS_PER_TASK": "1"}
    assert adopt_step(few) and few["OMP_NUM_THREADS"] == "1"


def test_a_step_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(RunError, match="SLURM_NODEID=x"):
        adopt_step(TASK_3 | {"SLURM_NODEID": "x"})
    with pytest.raises(RunError, match=r"SLURM_STEP_TASKS_PER_NODE=2\(y2\)"):
        adopt_step(TASK_3 | {"SLURM_STEP_TASKS_PER_NODE": "2(y2)"})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("node[1-2]", "node1"),
        ("gpu[003-007,9]-ib,login1", "gpu003-ib"),
        ("a,b[1-2]", "a"),
        ("r[1-2]n[05,07-09]", "r1n05"),
        ("tux[7]", "tux7"),
        ("host-a.example.org", "host-a.example.org"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["", "node[1-2", "]a[", ","])
def test_lists_of_nodes_that_are_none(nodes: str) -> None:
    with pytest.raises(RunError, match="SLURM_STEP_NODELIST"):
        first_host(nodes)


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 9)), min_size=1, max_size=5))
def test_tasks_per_node(runs: list[tuple[int, int]]) -> None:
    text = ",".join(str(n) if times == 1 else f"{n}(x{times})" for n, times in runs)
    assert tasks_per_node(text) == [n for n, times in runs for _ in range(times)]


def test_ports_of_steps_and_jobs_differ() -> None:
    ports = [
        master_port({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
        for job in range(1000, 1100)
        for step in range(8)
    ]
    assert len(set(ports)) == len(ports) and 15000 <= min(ports) and max(ports) < 25000


def test_gpus_and_restarts() -> None:
    assert given_gpus({}) is None and given_gpus({"SLURM_GPUS_ON_NODE": ""}) is None
    assert given_gpus({"SLURM_STEP_GPUS": "0,1", "SLURM_GPUS_ON_NODE": "2"}) == "0,1"
    assert restart_count({}) == 0 and restart_count({"SLURM_RESTART_COUNT": "2"}) == 2


@pytest.mark.parametrize(
    ("world", "local", "said"),
    [("4", "2", None), ("4", None, None), ("3", "2", "3 were"), ("4", "4", "4 ranks were")],
)
def test_as_many_ranks_as_the_layout_has(world: str, local: str | None, said: str | None) -> None:
    spec = ParallelSpec(num_nodes=2, devices_per_node=2)
    environment = {"WORLD_SIZE": world} | ({} if local is None else {"LOCAL_WORLD_SIZE": local})
    if said is None:
        check_ranks(spec, environment)
        return
    with pytest.raises(ConfigError, match=said):
        check_ranks(spec, environment)


def test_absurd_texts_of_slurm() -> None:
    with pytest.raises(RunError, match="are too many"):
        tasks_per_node("2(x99999999999)")
    assert restart_count({"SLURM_RESTART_COUNT": "²"}) == 0
