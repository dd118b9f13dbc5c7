"""How a job of `pretrain.sbatch` ends does not depend on who passes a rank's exit code on.

`srun` and `scontrol` are imitated: the first prints what the real one, torchrun and bubblewrap
print, which `make test-slurm` compares with the real programs in some of the rows.
"""

from __future__ import annotations

import concurrent.futures
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from megafp8.parallel.ends import end_line
from megafp8.runs.restarts import failing_node

SCRIPT = Path(__file__).parents[2] / "examples/slurm/pretrain.sbatch"


def line(
    code: int,
    rank: int = 3,
    *,
    is_lost: bool = False,
    restarts: int = 0,
    hanging: Sequence[int] = (),
) -> str:
    environment = {"RANK": str(rank), "MEGAFP8_MAX_RESTARTS": str(restarts)}
    return f"{rank}: {end_line(code, environment, is_lost=is_lost, hanging=hanging)}"


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
    "saved, a node's torchrun is ended by srun meanwhile": Row(
        (*SAVED, srun(0, "Exited with exit code 75"), srun(1, "Exited with exit code 143")),
        *(143, 75, True),
    ),
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


def run_script(
    folder: Path, row: Row, requeue: int = 1, name: str = "first", **given: str
) -> subprocess.CompletedProcess[str]:
    """Run the script with programs that imitate Slurm's.

    They leave files: `requeued`, `updated` with the arguments of `scontrol update`, `command` with
    those of `srun`, and `variables` with those of the ranks. `given` are more variables of the job.
    """
    programs = folder / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    (folder / "said").write_text("".join(f"{text}\n" for text in row.says))
    wait = f"kill -{row.signal} $PPID; sleep 0.3" if row.signal else ":"
    (programs / "srun").write_text(
        "#!/bin/sh\n[ $1 != --help ] || { echo --container-image; exit; }\n"
        f"echo \"$@\" >{folder}/command\ntrap '' USR1\nenv >{folder}/variables\n"
        f"cat {folder}/said >&2\n{wait}\nexit {row.srun}\n"
    )
    given_name = f"exp_manager.name={name}"
    words = f"'/a b/pretrain.sbatch' '{given_name}' some.key=0123456789abcdef"
    job = f"JobId=7 Requeue={requeue} TimeLimit=02:00:00 Command={words} WorkDir=/a"
    (programs / "scontrol").write_text(
        '#!/bin/sh\ncase "$1 $2" in\n'
        f"requeue*) touch {folder}/requeued; kill -TERM $PPID ;;\n"
        f'update*) echo "$@" >>{folder}/updated ;;\n'
        f"'show hostnames') printf 'node1\\nnode2\\n' ;;\n"
        f"show*) echo {job} ;;\nesac\n"
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
        **given,
    }
    (folder / "pretrain_gpt.py").touch()
    return subprocess.run(
        ["bash", str(SCRIPT), given_name, "some.key=0123456789abcdef"],
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
    assert "requeues none: the same sbatch command continues the run" in done.stdout


def test_a_job_that_is_killed_again_at_once_is_not_requeued_for_ever(tmp_path: Path) -> None:
    row = ENDS["out of memory, srun"]
    done = [run_script(tmp_path, row, SLURM_RESTART_COUNT=str(count)) for count in range(4)]
    assert "not requeued" not in done[2].stdout
    assert "three restarts ended by a signal within two minutes: not requeued" in done[3].stdout
    assert "node2: task 3: Out Of Memory" in done[3].stdout


def variables(folder: Path) -> dict[str, str]:
    lines = (folder / "variables").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def test_the_next_start_knows_how_the_last_one_ended(tmp_path: Path) -> None:
    """A start that left no word of its end, as on a lost node, does not get that of another."""
    for count, row in enumerate(["killed, srun", "saved, srun"]):
        run_script(tmp_path, ENDS[row], SLURM_RESTART_COUNT=str(count))
    assert variables(tmp_path)["MEGAFP8_LAST_END"] == "node2: task 3: Killed"
    run_script(tmp_path, ENDS["finished"], SLURM_RESTART_COUNT="3")
    assert variables(tmp_path)["MEGAFP8_LAST_END"].startswith("Slurm requeued it (a lost node")
    assert not list((tmp_path / "logs").iterdir()), "the job is over"
    run_script(tmp_path, ENDS["finished"], SLURM_RESTART_COUNT="0")
    assert "MEGAFP8_LAST_END" not in variables(tmp_path)


@pytest.mark.parametrize(
    ("says", "ended"),
    [
        ((line(4, 0, restarts=2, hanging=[3]), srun(3, "Killed")), "rank 3 on node2 hung"),
        ((line(4, 0, restarts=2),), "a rank hung"),
        ((*LOST, line(1, 3, restarts=2), srun(0, "Killed")), "rank 3 on {host} crashed"),
        ((*LOST, srun(3, "Segmentation fault")), "node2: task 3: Segmentation fault"),
        (LOST, "a rank was lost"),  # by others, whose nodes are not to blame
        (SAVED, "saved"),
    ],
)
def test_the_rank_and_node_to_blame_are_named(
    tmp_path: Path, says: tuple[str, ...], ended: str
) -> None:
    run_script(tmp_path, Row(says, 1, 1))
    run_script(tmp_path, ENDS["finished"], SLURM_RESTART_COUNT="1")
    host = socket.gethostname()
    last = variables(tmp_path)["MEGAFP8_LAST_END"]
    assert last == ended.format(host=host)
    node = next((word for word in (host, "node2") if word in last), None)
    assert failing_node([{"ended": last}]) == node


@pytest.mark.parametrize("signal", ["USR1", "TERM"])
def test_a_signal_is_no_node(tmp_path: Path, signal: str) -> None:
    run_script(tmp_path, Row(SAVED, 75, 75, True, signal))
    run_script(tmp_path, ENDS["finished"], SLURM_RESTART_COUNT="1")
    last = variables(tmp_path)["MEGAFP8_LAST_END"]
    assert last == f"saved after {signal}" and failing_node([{"ended": last}]) is None


def test_the_line_that_continues_is_the_one_that_submitted_the_job(tmp_path: Path) -> None:
    given = {"LAUNCHER": "torchrun", "SRUN_ARGS": "--mpi=none -v", "SLURM_JOB_PARTITION": "big"}
    run_script(tmp_path, ENDS["finished"], **given)
    words = shlex.split(variables(tmp_path)["MEGAFP8_STARTED_AS"])
    sbatch = words.index("sbatch")
    assert words[0] == "env" and {"LAUNCHER=torchrun", "SRUN_ARGS=--mpi=none -v"} < set(words)
    assert f"MEGAFP8_DIR={tmp_path}" in words[:sbatch]
    options = ["--ntasks-per-node=2", "--gpus-per-node=0", "--time=02:00:00", "--partition=big"]
    assert words[sbatch + 1 :] == [*options, "/a b/pretrain.sbatch"], "--nodes=2 is in the script"
    assert variables(tmp_path)["MEGAFP8_ADDED"] == "trainer.num_nodes=2 trainer.devices=2"


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_pyxis_gets_image_mounts_folder_and_a_home(tmp_path: Path, launcher: str) -> None:
    """The host's HOME, which pyxis passes on, is no folder of the image."""
    given = {"CONTAINER_IMAGE": "nvcr.io#a/b:1", "CONTAINER_MOUNTS": "/data,/r:/runs"}
    run_script(tmp_path, ENDS["finished"], **given, LAUNCHER=launcher, PYTHON="", MEGAFP8_DIR="")
    words = (tmp_path / "command").read_text().split()
    assert "--container-image=nvcr.io#a/b:1" in words and "--no-container-mount-home" in words
    assert "--container-mounts=/data,/r:/runs" in words
    assert "--container-workdir=/workspace/megafp8" in words
    home = words.index("HOME=/tmp")
    assert words[home - 1] == "env" and words[home + 1] == "python3"


def test_a_notice_longer_than_the_time_limit_is_named(tmp_path: Path) -> None:
    said = "s after the start: if it is the notice of --signal, the time limit is hardly longer"
    assert said in run_script(tmp_path, ENDS["the time limit"]).stdout
    assert "hardly longer" not in run_script(tmp_path, ENDS["stopped by hand"]).stdout


def test_accounting_has_the_name_of_the_run(tmp_path: Path) -> None:
    run_script(tmp_path, ENDS["finished"])
    run_script(tmp_path, ENDS["finished"], SLURM_JOB_NAME="megafp8:first")  # a restart
    assert (tmp_path / "updated").read_text() == "update JobId=7 JobName=megafp8:first\n" * 2


@pytest.mark.parametrize("name", ["a-secret-of-mine", "0123456789" * 4, "$(touch oops)"])
def test_a_name_that_may_be_a_secret_is_not_shown(tmp_path: Path, name: str) -> None:
    done = run_script(tmp_path, ENDS["finished"], name=name, MY_TOKEN="a-secret-of-mine")
    assert name not in done.stdout + done.stderr and not (tmp_path / "updated").exists()


def test_logs_are_in_the_repository_but_their_content_is_not(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    shutil.copy(SCRIPT.parents[2] / "logs" / ".gitignore", tmp_path / "logs")
    (tmp_path / "logs" / "7.out").touch()
    (tmp_path / "logs" / ".ends-7").touch()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    listing = subprocess.run(
        ["git", "status", "--porcelain", "-uall"], cwd=tmp_path, capture_output=True, text=True
    )
    assert listing.stdout == "?? logs/.gitignore\n"
    assert "logs" in (SCRIPT.parents[2] / ".dockerignore").read_text().split()
    assert "#SBATCH --output=logs/%j.out\n" in SCRIPT.read_text(), "%x would change with the name"
