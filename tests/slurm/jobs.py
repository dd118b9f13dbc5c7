"""Submit jobs of `examples/slurm/pretrain.sbatch` to the test cluster, and read their states."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.train.runs import TIMING_KEYS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/slurm/pretrain.sbatch"
WAYS = ("srun", "torchrun", "bubblewrap")
STEPS = 16
JOB = [
    "trainer.accelerator=cpu",
    f"trainer.max_steps={STEPS}",
    "trainer.log_every_n_steps=1",
    "trainer.val_check_interval=8",
    "trainer.limit_val_batches=1",
    "exp_manager.create_tensorboard_logger=False",
    "exp_manager.checkpoint_callback_params.every_n_train_steps=4",
    "model.micro_batch_size=2",
    "model.global_batch_size=32",
    "model.encoder_seq_length=32",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "model.num_attention_heads=2",
    "model.hidden_dropout=0.1",
    "model.fp8=True",
    "model.fp8_amax_history_len=8",
    "model.optim.sched.warmup_steps=2",
    "model.tensor_model_parallel_size=2",
]
TWO_BY_TWO = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=0", "--mem=0", "--time=10"]


def has_pending(pid: int, number: int) -> bool:
    """Whether this signal was sent to a stopped process meanwhile."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = re.search(r"^ShdPnd:\s*(\w+)$", status, re.MULTILINE)
    assert mask is not None
    return bool(int(mask[1], 16) >> (number - 1) & 1)


ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


class Cluster:
    """Hold the test Slurm in `folder/cluster`; jobs run in `folder`."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder, self.data = folder, data
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
        self.environment = kept | {
            "SLURM_CONF": str(folder / "cluster" / "slurm.conf"),
            "MEGAFP8_DIR": str(ROOT),
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        (folder / "logs").mkdir()

    def run(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment | (environment or {}),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def resume(self, node: str) -> None:
        """Take a node that is down into service, unless it has answered and is back by itself."""
        command = ["scontrol", "update", f"NodeName={node}", "State=RESUME"]
        refused = subprocess.run(command, env=self.environment, capture_output=True).returncode
        assert not refused or "DOWN" not in self.run("scontrol", "show", "node", node)

    def argv(self, name: str, *more: str) -> list[str]:
        argv = [*JOB, f"model.data.data_prefix={self.data}", f"exp_manager.name={name}"]
        argv.append(f"exp_manager.exp_dir={self.folder / 'runs'}")
        given = {word.partition("=")[0] for word in more}
        return [word for word in argv if word.partition("=")[0] not in given] + list(more)

    def start_with(self, way: str) -> dict[str, str]:
        """Return the variables of one of the ways to start ranks, `WAYS`."""
        if way != "bubblewrap":
            return {"LAUNCHER": way}
        mounts = {str(ROOT), str(self.folder), sys.prefix, sys.base_prefix}
        image = self.folder / "cluster" / "image"
        return {"CONTAINER_IMAGE": str(image), "CONTAINER_MOUNTS": ",".join(sorted(mounts))}

    def submit(
        self,
        name: str,
        *more: str,
        sbatch: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Job:
        """Run `sbatch examples/slurm/pretrain.sbatch …` with two nodes of two ranks each."""
        options = [*TWO_BY_TWO, *sbatch, f"--output={self.folder}/logs/%j.out"]
        command = ["sbatch", "--parsable", *options, str(SCRIPT), *self.argv(name, *more)]
        return Job(self, name, self.run(*command, environment=environment).strip())


@dataclass(frozen=True)
class Job:
    cluster: Cluster
    name: str
    number: str

    def field(self, name: str) -> str:
        text = self.cluster.run("scontrol", "show", "job", "-o", self.number)
        found = re.search(rf"(?:^|\s){name}=(\S*)", text)
        assert found is not None, text
        return found[1]

    @property
    def restarts(self) -> int:
        return int(self.field("Restarts"))

    @property
    def log(self) -> str:
        path = self.cluster.folder / "logs" / f"{self.number}.out"
        return path.read_text() if path.exists() else ""

    @property
    def dir(self) -> Path:
        return self.cluster.folder / "runs" / self.name

    def last_step(self) -> int:
        path = self.dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        return int(json.loads(whole[-1])["step"]) if whole else 0

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}\n{self.log}"
            time.sleep(0.2)

    def until_step(self, step: int) -> None:
        self.until(lambda: self.last_step() >= step, f"step {step}")
        assert self.last_step() < STEPS, "too late"

    def wait(self, seconds: float = 180) -> str:
        """Wait for the job's end, and return its state."""
        self.until(lambda: self.field("JobState") in ENDED, "the job's end", seconds)
        return self.field("JobState")

    def metrics(self) -> list[list[tuple[str, str]]]:
        """Return keys and values of the metrics, digit for digit, without times and memory."""
        lines = (self.dir / "metrics.jsonl").read_text().splitlines()
        parsed = [json.loads(line, parse_float=str, parse_int=str) for line in lines]
        return [[(k, v) for k, v in line.items() if k not in TIMING_KEYS] for line in parsed]

    def pids_of_ranks(self) -> dict[int, int]:
        """Return the process ids of the ranks that `srun` has started, by rank."""
        return self._pids(b"SLURM_PROCID")

    def pids_of_workers(self) -> dict[int, int]:
        """Return the process ids of the ranks, whichever launcher has started them, by rank."""
        return self._pids(b"RANK") or self.pids_of_ranks()

    def _pids(self, number: bytes) -> dict[int, int]:
        """Return the process ids of the job's ranks on this machine, by this variable."""
        found: dict[int, int] = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                command = (path.parent / "cmdline").read_bytes()
                pairs = path.read_bytes().split(b"\0")
            except OSError:
                continue
            named = dict(pair.split(b"=", 1) for pair in pairs if b"=" in pair)
            conf = self.cluster.environment["SLURM_CONF"].encode()
            ours = named.get(b"SLURM_JOB_ID") == self.number.encode()
            ours = ours and named.get(b"SLURM_CONF") == conf and b"SLURM_STEP_NUM_TASKS" in named
            words = command.split(b"\0")
            is_rank = b"pretrain_gpt.py" in command and b"megafp8.parallel.torchrun" not in words
            if ours and is_rank and number in named and words[0].endswith(b"python"):
                found[int(named[number])] = int(path.parent.name)
        return found

    def signal_ranks(self, number: int) -> list[int]:
        ranks = self.pids_of_ranks()
        assert sorted(ranks) == [0, 1, 2, 3]
        for pid in ranks.values():
            os.kill(pid, number)
        return list(ranks.values())

    def pids_of_submitit(self) -> list[int]:
        """Return the process ids of a sweep's job."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = path.read_bytes()
                variables = (path.parent / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            here = b"SLURM_CONF=" + self.cluster.environment["SLURM_CONF"].encode() in variables
            ours = f"SLURM_JOB_ID={self.number}".encode() in variables
            if here and ours and b"submitit.core._submit" in command and b"srun" not in command:
                found.append(int(path.parent.name))
        return found
