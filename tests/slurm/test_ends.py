"""How a job of `pretrain.sbatch` ends does not depend on who passes a rank's exit code on.

`srun` and `scontrol` are imitated: the first prints what the real one, torchrun and bubblewrap
print, which `make test-slurm` compares with the real programs in some of the rows.
"""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megafp8.parallel.ends import end_line

SCRIPT = Path(__file__).parents[2] / "examples/slurm/pretrain.sbatch"


def line(code: int, rank: int = 3, *, is_lost: bool = False, restarts: int = 0) -> str:
    environment = {"RANK": str(rank), "MEGAFP8_MAX_RESTARTS": str(restarts)}
    return f"{rank}: {end_line(code, environment, is_lost=is_lost)}"


def srun(task: int, how: str) -> str:
    return f"srun: error: node2: task {task}: {how}"


@dataclass(frozen=True)
class Row:
    """Hold an end: what reaches the log, the code of `srun`, and what the job is to make of it."""

    says: tuple[str, ...]
    srun: int
    code: int
    is_requeued: bool = False
    signal: str = ""  # that the script receives


LOST = tuple(line(1, rank, is_lost=True) for rank in (0, 1, 2))
SAVED = tuple(line(75, rank) for rank in range(4))
EXITED_1 = srun(0, "Exited with exit code 1")
TORCHRUN = (srun(0, "Exited with exit code 1"), srun(1, "Exited with exit code 137"))
ENDS = {
    "saved, srun": Row((*SAVED, srun(0, "Exited with exit code 75")), 75, 75, True),
    "saved, torchrun": Row((*SAVED, EXITED_1), 1, 75, True),
    "saved, a neighbour is killed meanwhile by torchrun": Row((*SAVED[:3], EXITED_1), 1, 75, True),
    "killed, srun": Row((*LOST, srun(3, "Killed"), EXITED_1), 137, 137, True),
    "killed, torchrun": Row((*LOST, *TORCHRUN), 1, 137, True),
    "killed, torchrun that says nothing": Row((*LOST, EXITED_1), 1, 137, True),
    "killed, bubblewrap": Row((*LOST, srun(3, "Exited with exit code 137")), 1, 137, True),
    "killed in the imports": Row((srun(3, "Exited with exit code 138"),), 138, 137, True),
    "out of memory, srun": Row((*LOST, srun(3, "Out Of Memory")), 1, 137, True),
    "hang, srun": Row(
        (line(4, 0), line(4, 2), line(1, 1, is_lost=True), EXITED_1, srun(3, "Killed")), 1, 4
    ),
    "hang, torchrun": Row((line(4, 0), line(1, 1, is_lost=True), EXITED_1), 1, 4),
    "hang, to be started again": Row((line(4, 0, restarts=2), EXITED_1), 1, 4, True),
    "crash, srun": Row((line(1, 2), *LOST[:2], EXITED_1, srun(3, "Killed")), 137, 1),
    "crash, torchrun": Row((line(1, 2), *LOST[:2], EXITED_1), 1, 1),
    "crash, bubblewrap": Row((line(1, 2), srun(3, "Exited with exit code 137")), 137, 1),
    "crash, to be started again": Row((line(1, 2, restarts=3), *LOST[:2]), 1, 1, True),
    "refused, srun": Row((line(2, 0), srun(0, "Exited with exit code 2")), 2, 2),
    "refused, torchrun": Row((line(2, 0), EXITED_1), 1, 2),
    "refused, though restarts are asked for": Row((line(2, 0, restarts=3), EXITED_1), 1, 2),
    "not finite, srun": Row((line(3, 0), srun(1, "Exited with exit code 3")), 3, 3),
    "not finite, torchrun": Row((line(3, 0), EXITED_1), 1, 3),
    "no rank said anything": Row((EXITED_1,), 1, 1),
    "finished": Row((), 0, 0),
    "stopped by hand": Row(SAVED, 75, 75, False, "USR2"),
    "preempted": Row(SAVED, 75, 75, False, "TERM"),  # Slurm itself requeues it
    "the time limit": Row(SAVED, 75, 75, True, "USR1"),
    "the time limit, torchrun": Row((*SAVED, EXITED_1), 1, 75, True, "USR1"),
}


def run_script(folder: Path, row: Row, requeue: int = 1) -> subprocess.CompletedProcess[str]:
    """Run the script with programs that imitate Slurm's; `scontrol requeue` leaves a file."""
    programs = folder / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    (folder / "said").write_text("".join(f"{text}\n" for text in row.says))
    wait = f"kill -{row.signal} $PPID; sleep 0.3" if row.signal else ":"
    (programs / "srun").write_text(
        f"#!/bin/sh\ntrap '' USR1\ncat {folder}/said >&2\n{wait}\nexit {row.srun}\n"
    )
    (programs / "scontrol").write_text(
        "#!/bin/sh\n"
        f'case "$1" in requeue) touch {folder}/requeued; kill -TERM $PPID;; '
        f"show) echo JobId=7 Requeue={requeue} Command=/a/pretrain.sbatch;; esac\n"
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SLURM_")
    }
    environment |= {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "megafp8",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NTASKS_PER_NODE": "2",
        "CONTAINER_IMAGE": "",
        "PYTHON": sys.executable,
        "MEGAFP8_DIR": str(folder),
    }
    (folder / "pretrain_gpt.py").touch()
    return subprocess.run(
        ["bash", str(SCRIPT), "exp_manager.name=first", "some.key=0123456789abcdef"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, bool, str]]:
    """Run all rows, some at a time; return the code, whether it was requeued, and the log."""
    folder = tmp_path_factory.mktemp("ends")

    def run(item: tuple[int, tuple[str, Row]]) -> tuple[str, tuple[int, bool, str]]:
        number, (name, row) = item
        here = folder / str(number)
        done = run_script(here, row)
        log = done.stdout + done.stderr
        return name, (done.returncode, (here / "requeued").exists(), log)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return dict(pool.map(run, enumerate(ENDS.items())))


@pytest.mark.parametrize("name", ENDS)
def test_every_way_of_starting_ends_alike(
    name: str, ended: dict[str, tuple[int, bool, str]]
) -> None:
    code, is_requeued, log = ended[name]
    assert (code, is_requeued) == (ENDS[name].code, ENDS[name].is_requeued), log
    assert "some.key" not in log, "an argument may be a secret"


def test_the_log_says_why_a_job_is_not_requeued(tmp_path: Path) -> None:
    done = run_script(tmp_path, ENDS["saved, srun"], requeue=0)
    assert done.returncode == 75 and not (tmp_path / "requeued").exists()
    assert "not requeued, since this job was submitted with --no-requeue" in done.stdout


def test_a_job_that_is_killed_again_at_once_is_not_requeued_for_ever(tmp_path: Path) -> None:
    done = [run_script(tmp_path, ENDS["out of memory, srun"]) for _ in range(4)]
    assert "not requeued" not in done[2].stdout
    assert "three restarts ended by a signal within two minutes: not requeued" in done[3].stdout
    assert "node2: task 3: Out Of Memory" in done[3].stdout
