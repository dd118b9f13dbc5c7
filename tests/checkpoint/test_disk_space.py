"""Test that what would stop a save, such as too little disk space, is reported before training."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from megafp8.errors import CheckpointError
from megafp8.runs import preflight


def test_free_space_is_asked_for(tmp_path: Path) -> None:
    preflight.require_free_space(tmp_path / "not" / "yet", 1)
    with pytest.raises(CheckpointError, match=f"needs {10**18} bytes and [0-9]+ are free"):
        preflight.require_free_space(tmp_path, 10**18)
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(CheckpointError, match=f"4 checkpoints, kept at once, need {4 * free} "):
        preflight.require_free_space(tmp_path, free, 4)


def test_file_names_are_counted_where_they_can_run_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)

    def few(files: int, free: int) -> None:
        fields = list(real)
        fields[5:8] = [files, free, free]  # f_files, f_ffree, f_favail
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))

    few(1000, 11)
    with pytest.raises(CheckpointError, match=r"need 12 files \(inodes\) and 11 are free"):
        preflight.require_free_space(tmp_path, 1, 3, files_each=4)
    few(1000, 12)
    preflight.require_free_space(tmp_path, 1, 3, files_each=4)
    few(0, 0)  # as btrfs says
    preflight.require_free_space(tmp_path, 1, 3, files_each=4)


def test_a_limit_of_file_sizes(tmp_path: Path) -> None:
    preflight.require_file_size(tmp_path, 10**15)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        preflight.require_file_size(tmp_path, 100_000)
        with pytest.raises(CheckpointError, match=r"100001 bytes .* limit is 100000.*ulimit -f"):
            preflight.require_file_size(tmp_path, 100_001)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EIO, errno.ENOSPC])
def test_a_first_small_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    preflight.try_to_write(tmp_path, 0)
    with pytest.raises(CheckpointError, match=r"rank 3 on .* does not see .* all ranks share"):
        preflight.try_to_write(tmp_path / "elsewhere", 3)

    def fails(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(CheckpointError, match=f"small file failed with {errno.errorcode[number]}"):
        preflight.try_to_write(tmp_path, 1)
