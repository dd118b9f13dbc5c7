"""Hold one version of the repository in a folder of its own, and run its commands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from scripts.packages import packages

SERVER = Path(__file__).with_name("serve.py")
TIMEOUT_SECONDS = 300.0  # of one command


class CannotCompareError(Exception):
    """The comparison itself is impossible."""


@dataclass(frozen=True)
class Done:
    """Describe how a command ended."""

    code: int  # negative: a signal's number
    last_line: str  # of its output, or its error message

    @classmethod
    def read(cls, code: int, log: Path) -> Self:
        """Return the end of a command with exit code `code`, whose output is in `log`."""
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        errors = [line for line in lines if line.startswith("error: ")]
        return cls(code, (errors or [line for line in lines if line.strip()] or ["no output"])[-1])


class Tree:
    """Run commands of the version in `folder/tree`, with `folder/NAME` as working directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.code = folder / "tree"
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK") and not name.startswith("SLURM_")
        } | {
            "PYTHONPATH": str(self.code),  # this version of each package, not an installed one
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
        except subprocess.TimeoutExpired:  # a command still runs after an interruption
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    @property
    def _server(self) -> subprocess.Popen[str]:
        """Process that runs the commands, started with the first of them."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(SERVER), str(self.code), *packages()],
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
        """Run `python SCRIPT ARGV…` in `folder/name` on `num_ranks` ranks.

        serve.py explains `kill_at`.

        Raises:
            CannotCompareError: The process that runs the commands died.
        """
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
        """Run `python SCRIPT ARGV…` as a process of its own, as a user starts it."""
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
    """Return the hash of the commit that a branch, tag or abbreviation names.

    Raises:
        CannotCompareError: There is no such commit.
    """
    words = ["rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
    found = subprocess.run(["git", "-C", str(repository), *words], capture_output=True, text=True)
    if found.returncode:
        raise CannotCompareError(f"{repository} has no commit {name!r}")
    return found.stdout.strip()


def extract(repository: Path, commit: str | None, target: Path) -> None:
    """Copy the files of `commit`, or of the working tree if it is None, to `target`.

    Of the working tree, files that git ignores are left out. Later edits do not change a comparison
    that runs, since the files are copies.
    """
    git = ["git", "-C", str(repository)]
    if commit is not None:
        archive = subprocess.run([*git, "archive", commit], capture_output=True, check=True)
        target.mkdir(parents=True, exist_ok=True)
        subprocess.run(["tar", "-x", "-C", str(target)], input=archive.stdout, check=True)
        return
    listed = subprocess.run(
        [*git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source = repository / name
        if source.is_symlink() or source.is_file():  # git also lists deleted files
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target / name, follow_symlinks=False)


def make_text(path: Path) -> None:
    """Write a text with patterns to learn; each paragraph is a document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    paragraphs = [
        f"def function_{n}(x):\n    return x * {n * 7} + {n % 13}\n" * (n % 5 + 1)
        for n in range(200)
    ]
    path.write_text("\n".join(paragraphs), encoding="utf-8")
