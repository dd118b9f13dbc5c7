"""One version of the repository in a folder of its own, and a process that runs its commands."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

SERVER = Path(__file__).with_name("serve.py")
TIMEOUT_SECONDS = 300.0  # of one command


class CannotCompareError(Exception):
    """The comparison itself cannot be done."""


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int  # negative: a signal's number
    last_line: str  # of its output, or the error that it tells

    @classmethod
    def read(cls, code: int, log: Path) -> Self:
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        errors = [line for line in lines if line.startswith("error: ")]
        return cls(code, (errors or [line for line in lines if line.strip()] or ["no output"])[-1])


class Tree:
    """Commands of the version in `folder/tree`, which work in `folder/NAME`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.code = folder / "tree"
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK") and not name.startswith("SLURM_")
        } | {
            "PYTHONPATH": str(self.code),  # an installed megafp8 is another version
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
        }
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:  # this process was interrupted, and a command runs
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    @property
    def _server(self) -> subprocess.Popen[str]:
        """Started with the first command: runs that are kept need none."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(SERVER), str(self.code)],
                env=self._environment,
                cwd=self.code,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        return self._process

    def run(
        self,
        script: str,
        argv: list[str],
        name: str,
        *,
        num_ranks: int = 1,
        kill_at: str | None = None,
        log: str = "log.txt",
    ) -> Done:
        """`python SCRIPT ARGV…` in `folder/name`, as so many ranks; `kill_at`: see serve.py."""
        cwd = self.folder / name
        cwd.mkdir(parents=True, exist_ok=True)
        request = {
            "run": script,
            "argv": argv,
            "cwd": str(cwd),
            "log": str(cwd / log),
            "ranks": num_ranks,
            "kill_at": kill_at,
            "timeout": TIMEOUT_SECONDS,
        }
        server = self._server
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        if not answer:
            raise CannotCompareError(f"the process of {self.code} died in {name}")
        return Done.read(int(answer), cwd / log)

    def launch(self, script: str, argv: list[str], name: str) -> Done:
        """The same as a process of its own, as a user starts it."""
        cwd = self.folder / name
        cwd.mkdir(parents=True, exist_ok=True)
        with open(cwd / "log.txt", "ab") as log:
            done = subprocess.run(
                [sys.executable, str(self.code / script), *argv],
                env=self._environment,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_SECONDS,
            )
        return Done.read(done.returncode, cwd / "log.txt")


def commit_of(repository: Path, name: str) -> str:
    """The hash of the commit that a branch, tag or abbreviation names.

    Raises:
        CannotCompareError: There is none.
    """
    words = ["rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
    found = subprocess.run(["git", "-C", str(repository), *words], capture_output=True, text=True)
    if found.returncode:
        raise CannotCompareError(f"{repository} has no commit {name!r}")
    return found.stdout.strip()


def extract(repository: Path, commit: str | None, target: Path) -> None:
    """The files of `commit`; without one those of the working tree that git does not ignore.

    They are copied, so that nobody's later edits reach a comparison that runs.
    """
    git = ["git", "-C", str(repository)]
    if commit is not None:
        archive = subprocess.run([*git, "archive", commit], capture_output=True, check=True)
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(target, filter="data")
        return
    listed = subprocess.run(
        [*git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (repository / name).is_file():  # else it was deleted
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(repository / name, target / name)


def make_text(path: Path) -> None:
    """Text with something to learn, a paragraph a document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    paragraphs = [
        f"def function_{n}(x):\n    return x * {n * 7} + {n % 13}\n" * (n % 5 + 1)
        for n in range(200)
    ]
    path.write_text("\n".join(paragraphs), encoding="utf-8")
