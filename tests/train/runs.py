"""Run `pretrain_gpt.py` on a tiny job, and read the files of its runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megafp8.data.indexed import IndexedWriter
from megafp8.data.tokenize import train_tokenizer
from tests.limits import HANG_SECONDS

ROOT = Path(__file__).parents[2]
STEPS = 12
TIMING_KEYS = {
    "step_seconds",
    "tokens_per_second",
    "tflops_causal",
    "tflops_full",
    "mfu_causal",
    "mfu_full",
    "hfu_causal",
    "hfu_full",
    "peak_memory_bytes",
    "data_wait_fraction",
}
JOB = [
    "trainer.accelerator=cpu",
    f"trainer.max_steps={STEPS}",
    "trainer.log_every_n_steps=1",
    "trainer.val_check_interval=4",
    "trainer.limit_val_batches=1",
    "exp_manager.create_tensorboard_logger=False",
    "exp_manager.checkpoint_callback_params.every_n_train_steps=2",
    "model.micro_batch_size=2",
    "model.global_batch_size=4",
    "model.encoder_seq_length=32",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "model.num_attention_heads=2",
    "model.hidden_dropout=0.1",
    "model.attention_dropout=0.1",
    "model.ffn_dropout=0.1",
    "model.fp8=True",
    "model.fp8_amax_history_len=8",
    "model.optim.sched.warmup_steps=2",
]
FILES = "model.data.train_ds.file_names"
TWO_RANKS = ["trainer.devices=2", "model.tensor_model_parallel_size=2"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
ENVIRONMENT.pop("RANK", None)


def make_dataset(prefix: Path, seed: int = 0) -> Path:
    """Make an indexed dataset of a few thousand tokens, with its tokenizer."""
    texts = [
        f"def function_{n}_{seed}(x):\n    return x * {n * 7 + seed} + {n % 13}\n\n" * (n % 5 + 1)
        for n in range(120)
    ]
    tokenizer = train_tokenizer(texts, 300)
    with IndexedWriter(prefix, "uint16") as writer:
        for text in texts:
            writer.add_document([*tokenizer.encode(text), tokenizer.eod_id])
    tokenizer.save(prefix.with_name(f"{prefix.name}.tokenizer.json"))
    return prefix


class Driver:
    """Start jobs as forks of one process that has imported torch; see driver.py."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.train.driver"],
            cwd=ROOT,
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def ask(self, request: object) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start_python(
        self, *words: str, cwd: Path, folder: Path, env: Mapping[str, str] | None = None
    ) -> Program:
        """Start what `python WORDS…` runs, without importing torch; its output is in `folder`."""
        made = tempfile.mkdtemp(prefix="program-", dir=folder)
        program = Program(self, Path(made, "stdout"), Path(made, "stderr"))
        paths = {"stdout": str(program.stdout_file), "stderr": str(program.stderr_file)}
        program.pid = self.ask({"python": words, "cwd": str(cwd), "env": dict(env or {}), **paths})
        return program

    def run_python(
        self, *words: str, cwd: Path, folder: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Do what `subprocess.run(["python", WORDS…])` does; see `start_python`."""
        return self.start_python(*words, cwd=cwd, folder=folder, env=env).wait()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@dataclass
class Program:
    """Hold a program in Python that a `Driver` has started."""

    driver: Driver
    stdout_file: Path
    stderr_file: Path
    pid: int = 0
    code: int | None = None

    def has_ended(self) -> bool:
        """Whether it has ended; the caller need not wait for it then."""
        return self._code(0.0) is not None

    def wait(self, seconds: float = HANG_SECONDS) -> subprocess.CompletedProcess[str]:
        """Return how it ended."""
        code = self._code(seconds)
        assert code is not None, f"still running after {seconds} s: {self.stderr_file.read_text()}"
        out, err = self.stdout_file.read_text(), self.stderr_file.read_text()
        return subprocess.CompletedProcess([], code, out, err)

    def _code(self, seconds: float) -> int | None:
        if self.code is None:
            self.code = self.driver.ask({"wait": self.pid, "seconds": seconds})
        return self.code


@dataclass
class Done:
    """Describe how a process ended. A negative code is the number of the signal that killed it."""

    code: int
    output: str  # stdout and stderr
    seconds: float

    @property
    def first_line(self) -> str:
        return self.output.splitlines()[0]


@dataclass
class Child:
    """Hold a job that a `Driver` has started."""

    driver: Driver
    pid: int
    log: Path
    skip: int  # bytes of earlier jobs' output
    began: float = field(default_factory=time.monotonic)

    def wait(self, seconds: float = HANG_SECONDS) -> Done | None:
        """Return how the job ended, or None if it still runs after the time."""
        code = self.driver.ask({"wait": self.pid, "seconds": seconds})
        if code is None:
            return None
        return Done(code, self.output, time.monotonic() - self.began)

    @property
    def output(self) -> str:
        return self.log.read_bytes()[self.skip :].decode() if self.log.exists() else ""


@dataclass(frozen=True)
class Place:
    """Hold a working directory, so that equal jobs in two of them have equal configurations.

    `run` trains in `runs/job` of the directory unless `more` sets `exp_manager.name`.
    """

    driver: Driver
    data: Path
    cwd: Path

    def argv(self, *more: str) -> list[str]:
        argv = [*JOB, f"model.data.data_prefix={self.data}", "exp_manager.name=job", *more]
        last = {word.partition("=")[0]: word for word in argv}  # a key may be given once
        return list(last.values())

    def start(self, *more: str, fault: Sequence[object] | None = None) -> Child:
        log = self.cwd / "log.txt"
        skip = log.stat().st_size if log.exists() else 0
        request = {
            "argv": self.argv(*more),
            "cwd": str(self.cwd),
            "log": str(log),
            "fault": fault,
        }
        return Child(self.driver, self.driver.ask(request), log, skip)

    def run(self, *more: str, fault: Sequence[object] | None = None) -> Done:
        child = self.start(*more, fault=fault)
        done = child.wait()
        assert done is not None, child.output
        return done

    def command(self, *more: str) -> subprocess.Popen[bytes]:
        """Run the real command line in a process of its own; its output goes to `command.txt`."""
        with open(self.cwd / "command.txt", "wb") as output:
            return subprocess.Popen(
                [sys.executable, str(ROOT / "pretrain_gpt.py"), *self.argv(*more)],
                cwd=self.cwd,
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def command_output(self) -> str:
        return (self.cwd / "command.txt").read_text()

    def dir(self, name: str = "job") -> Path:
        return self.cwd / "runs" / name

    def steps(self, name: str = "job") -> list[int]:
        checkpoints = self.dir(name) / "checkpoints"
        return sorted(
            int(path.name[5:]) for path in checkpoints.glob("step_*") if path.name[5:].isdigit()
        )

    def checkpoint(self, step: int, name: str = "job") -> Path:
        return self.dir(name) / "checkpoints" / f"step_{step:08d}"

    def metrics(self, name: str = "job") -> list[dict[str, Any]]:
        lines = (self.dir(name) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def summary(self, name: str = "job") -> dict[str, Any]:
        return json.loads((self.dir(name) / "summary.json").read_text())

    def status(self, name: str = "job") -> str:
        return json.loads((self.dir(name) / "run.json").read_text())["status"]

    def last_step(self, name: str = "job") -> int:
        """Return the step of the last complete line of metrics, or 0 without one."""
        path = self.dir(name) / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        return int(json.loads(whole[-1])["step"]) if whole else 0


class Finetuning(Place):
    """Runs `finetune_gpt.py` from the model of another run."""

    def argv(self, *more: str) -> list[str]:
        """Return settings of a short job; the shape is the base model's."""
        argv = [
            "--config-name=finetune_gpt",
            "trainer.accelerator=cpu",
            "trainer.max_steps=6",
            "trainer.log_every_n_steps=1",
            "trainer.val_check_interval=3",
            "trainer.limit_val_batches=1",
            "exp_manager.create_tensorboard_logger=False",
            "exp_manager.checkpoint_callback_params.every_n_train_steps=2",
            "exp_manager.name=job",
            "model.micro_batch_size=2",
            "model.global_batch_size=4",
            "model.optim.sched.warmup_steps=2",
            "model.optim.lr=1e-2",
            f"{FILES}={self.cwd / 'mine.jsonl'}",
        ]
        given = {word.partition("=")[0] for word in more}
        return [word for word in argv if word.partition("=")[0] not in given] + list(more)


def wait_until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {HANG_SECONDS} s: {what}"
        time.sleep(0.01)


def assert_same(one: Place, other: Place, *, same_settings: bool = True, unpruned: int = 1) -> None:
    """Assert that the files of `one` and of the undisturbed `other` are equal, except for timings.

    Without `same_settings`, the settings that a manifest records may differ. `unpruned` is the
    number of kills that may have come between a commit and its pruning.
    """
    for mine, theirs in zip(timeless_metrics(one), timeless_metrics(other), strict=True):
        assert mine == theirs
    steps = other.steps()
    assert one.steps()[-len(steps) :] == steps and steps[-1] == STEPS
    # A kill between a commit and its pruning leaves one more checkpoint until the next save; a run
    # that has ended has no such checkpoint.
    assert len(one.steps()) <= len(steps) + unpruned
    for step in steps:
        mine, theirs = one.checkpoint(step), other.checkpoint(step)
        names = sorted(path.name for path in mine.iterdir())
        assert names == sorted(path.name for path in theirs.iterdir())
        for name in names:
            if name.endswith(".safetensors"):
                assert (mine / name).read_bytes() == (theirs / name).read_bytes(), (step, name)
        assert _manifest(mine, same_settings) == _manifest(theirs, same_settings)
    hidden = [path.name for path in (one.dir() / "checkpoints").iterdir()]
    assert not [name for name in hidden if not name.startswith("step_")], hidden
    for key in ("val_loss", "consumed_tokens", "step", "status", "num_skipped_steps"):
        assert one.summary()[key] == other.summary()[key], key
    assert one.status() == other.status() == "finished"


def timeless_metrics(place: Place) -> list[list[tuple[str, str]]]:
    """Return keys and values without timings, as they are written, digit for digit."""
    lines = (place.dir() / "metrics.jsonl").read_text().splitlines()
    parsed = [json.loads(line, parse_float=str, parse_int=str) for line in lines]
    return [[(k, v) for k, v in line.items() if k not in TIMING_KEYS] for line in parsed]


def _manifest(checkpoint: Path, with_settings: bool) -> dict[str, Any]:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    if not with_settings:
        del manifest["meta"]["config"]
    del manifest["meta"]["versions"]  # the commit may change while tests run
    return manifest
