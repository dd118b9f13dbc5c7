"""A rank leaves with its process groups if all ranks do, and at once if it fails alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from megafp8.errors import RunError
from megafp8.parallel import launch
from megafp8.parallel.launch import prepare_allocator, prepare_connections
from megafp8.parallel.mesh import single_rank
from megafp8.specs.parallel import FsdpSpec, ParallelSpec
from megafp8.train import pretrain
from tests.tiny import run_spec

ROOT = Path(__file__).parents[2]


def shared(error: RunError) -> RunError:
    error.is_shared = True
    return error


class Nccl:
    """Imitate NCCL's process groups: a group is destroyed when all ranks destroy it."""

    def __init__(self) -> None:
        self.destroyed = 0

    def destroy(self) -> None:
        self.destroyed += 1


@pytest.mark.parametrize(
    ("outcome", "is_destroyed"),
    [
        (0, True),
        (75, True),
        (shared(RunError("every rank raises this")), True),
        (RunError("this rank alone has no free disk space"), False),
        (ValueError("a bug on this rank alone"), False),
        (KeyboardInterrupt(), False),
    ],
    ids=["finished", "saved", "shared error", "error", "bug", "interrupt"],
)
def test_process_groups_stay_while_an_exception_is_under_way(
    monkeypatch: pytest.MonkeyPatch, outcome: int | BaseException, is_destroyed: bool
) -> None:
    """NCCL waits for other ranks when a group is destroyed: a rank that fails would never end."""

    def run(*arguments: object) -> int:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    groups = Nccl()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", groups.destroy)
    monkeypatch.setattr(pretrain, "join", lambda spec: single_rank())
    monkeypatch.setattr(pretrain, "_pretrain", run)
    code = None
    try:
        code = pretrain.pretrain(run_spec(), is_sweep=False, command=[])
    except BaseException as error:
        assert error is outcome
    assert code == (outcome if isinstance(outcome, int) else None)
    assert groups.destroyed == is_destroyed


@pytest.mark.parametrize(
    ("parallel", "given", "expected"),
    [
        ({"tp": 2, "accelerator": "gpu"}, None, "1"),
        ({"tp": 2, "accelerator": "gpu"}, "8", "8"),
        ({"tp": 1, "accelerator": "gpu"}, None, None),
        ({"tp": 2, "accelerator": "cpu"}, None, None),
        ({"tp": 2, "accelerator": "gpu", "fsdp": FsdpSpec()}, None, None),
    ],
)
def test_messages_of_tensor_parallelism_start_in_order(
    parallel: dict, given: str | None, expected: str | None
) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    environment = {} if given is None else {name: given}
    prepare_connections(ParallelSpec(**parallel), environment)
    assert environment.get(name) == expected


def test_the_allocator_grows_segments_unless_the_user_has_chosen() -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        environment = {name: "max_split_size_mb:128"}
        prepare_allocator(environment)
        assert environment == {name: "max_split_size_mb:128"}
    environment = {}
    prepare_allocator(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("is_rank", [True, False])
def test_a_rank_with_a_bug_leaves_without_destructors(is_rank: bool) -> None:
    """Destructors of process groups may wait forever; the traceback is printed nevertheless."""
    program = """if True:
        import atexit
        from megafp8.parallel.launch import run_process
        atexit.register(lambda: print("destructors ran", flush=True))
        def main():
            raise ValueError("the number is 42")
        run_process(main)
    """
    environment = {name: os.environ[name] for name in os.environ if name not in ("RANK",)}
    environment |= {"RANK": "1", "WORLD_SIZE": "2"} if is_rank else {}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.count("ValueError: the number is 42") == 1
    assert ("destructors ran" in done.stdout) != is_rank


@pytest.mark.parametrize(
    ("codes", "named"),
    [([1, 4], 1), ([4, 1], 0), ([1, -9, 4], 1), ([1, 3], 1), ([0, 1], 1)],
)
def test_the_code_that_explains_the_others_names_the_rank(
    codes: list[int], named: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neighbours of a hung rank crash because it does not answer; both are often seen at once."""
    ranks = [subprocess.Popen([sys.executable, "-c", ""]) for _ in codes]
    for rank, code in zip(ranks, codes, strict=True):
        rank.wait()
        rank.returncode = code
    code = launch._code_of_job(ranks, None, None, tmp_path)
    assert code == (codes[named] if codes[named] > 1 else 1)
    if codes[named] in (1, -9):
        assert f"rank {named} died" in capsys.readouterr().err


def test_the_error_that_was_noted_first_explains_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks that lose their connection to the first one die later, and may be seen before it."""
    for rank, when in enumerate((30, 10, 20)):
        (tmp_path / str(rank)).write_text(f"ValueError: of rank {rank}")
        os.utime(tmp_path / str(rank), ns=(when, when))
    (tmp_path / "progress").touch()
    os.utime(tmp_path / "progress", ns=(1, 1))
    ranks = [subprocess.Popen([sys.executable, "-c", ""]) for _ in range(3)]
    for each in ranks:
        each.wait()
        each.returncode = 1
    assert launch._code_of_job(ranks, 0, None, tmp_path) == 1
    said = capsys.readouterr().err
    assert "rank 1 died (exit code 1)" in said and ": ValueError: of rank 1; the other" in said
