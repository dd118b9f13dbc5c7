"""Checkpoints written in the background are the same files, reported one step later at most."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from megafp8.checkpoint.reader import Reader
from megafp8.checkpoint.step_directories import step_name
from megafp8.errors import CheckpointError, NonFiniteError
from megafp8.train import background_saver, state_dict
from megafp8.train.background_saver import BackgroundSaver, Snapshot
from megafp8.train.saver import Placement, Saver, store
from megafp8.train.state import TrainState
from megafp8.train.step import train_step
from tests.tiny import build_run, microbatch
from tests.train.precision_schedule_work import SCHEDULE, built, run_steps
from tests.train.runs import TWO_RANKS, Done, Place, assert_same

ASYNC = "exp_manager.checkpoint_callback_params.async_save=True"
KEEP_ALL = "exp_manager.checkpoint_callback_params.keep=20"
EVERY = "exp_manager.checkpoint_callback_params.every_n_train_steps"


def trained(steps: int = 1) -> TrainState:
    state = build_run()
    for _ in range(steps):
        one_step(state)
    return state


def one_step(state: TrainState) -> None:
    train_step(state, [microbatch(state.step)])
    state.step += 1
    state.consumed_samples += 2


def contents(placements: list[Placement]) -> dict[str, torch.Tensor]:
    return {p.name: p.tensor.detach().clone() for p in placements}


def saver_at(root: Path) -> Saver:
    return Saver(root, 3, {"config": {}, "data_fingerprint": ""})


def test_a_snapshot_does_not_move_with_the_state() -> None:
    state = trained()
    snapshot = Snapshot(state_dict.placements(state))
    expected = contents(list(state_dict.placements(state)))
    taken = snapshot.take(state_dict.placements(state))
    addresses = [p.tensor.data_ptr() for p in taken]
    one_step(state)
    now = contents(list(state_dict.placements(state)))
    changed = [p.name for p in taken if not torch.equal(expected[p.name], now[p.name])]
    assert {"model/embedding.word.weight", "optimizer/exp_avg/final_norm.weight"} <= set(changed)
    assert all(torch.equal(p.tensor, expected[p.name]) for p in taken)
    assert snapshot.num_bytes == sum(t.nbytes for t in expected.values())
    again = snapshot.take(state_dict.placements(state))
    assert [p.tensor.data_ptr() for p in again] == addresses, "its memory is used again"
    assert all(torch.equal(p.tensor, now[p.name]) for p in again)


def test_replicas_are_not_copied() -> None:
    whole = torch.ones(3)
    first = Placement("a", (3,), (0,), whole)
    second = Placement("a", (3,), (0,), whole, replica=1)
    snapshot = Snapshot([first, second])
    assert snapshot.num_bytes == whole.nbytes
    assert [p.name for p in snapshot.take([first, second])] == ["a"]
    assert Snapshot([second]).take([second]) == [], "a rank may have nothing to write"


def test_what_is_written_is_the_state_of_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training continues while the file waits; a checkpoint gets its name when it is complete."""
    import threading

    state, saver = trained(), saver_at(tmp_path)
    expected = contents(list(state_dict.placements(state)))
    may_write = threading.Event()
    write_shard = store.write_shard

    def waits(*args: object) -> object:
        assert may_write.wait()
        return write_shard(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "write_shard", waits)
    background = BackgroundSaver(saver, state)
    background.start(state)
    saver.metrics["val_loss"] = 1.0  # measured later
    one_step(state)
    assert not background.has_ended() and saver.last_step is None
    assert store.steps(tmp_path) == []
    with pytest.raises(AssertionError, match="overlap"):
        background.start(state)
    may_write.set()
    saved = background.wait()
    assert saved.path == tmp_path / step_name(1) and saver.last_step == 1
    reader = Reader(saved.path)
    assert reader.meta["metrics"] == {} and reader.meta["consumed_samples"] == 2
    assert reader.names() == tuple(sorted(expected))
    assert all(torch.equal(reader.read(name), expected[name]) for name in expected)


def test_copies_follow_a_change_of_precision(tmp_path: Path) -> None:
    """Delayed scaling has histories, which MXFP8 before and after it has not."""
    entries = "[{from: 1, recipe: delayed}, {from: 3, recipe: mxfp8}]"
    state = built("model.fp8_recipe=mxfp8", SCHEDULE + entries)
    meta = {"config": state.backend.spec.resolved, "data_fingerprint": ""}
    background = BackgroundSaver(Saver(tmp_path, 9, meta), state)
    for step in (1, 2, 4, 3):
        if step == 3:  # a rollback, of a run that has begun in the last precision
            background = BackgroundSaver(Saver(tmp_path, 9, meta), state)
            state_dict.load_checkpoint(tmp_path / step_name(2), state, lambda _: None)
        run_steps(state, step)
        background.start(state)
        expected = contents(list(state_dict.placements(state)))
        reader = Reader(background.wait().path)
        assert reader.names() == tuple(sorted(expected))
        assert all(torch.equal(reader.read(name), expected[name]) for name in expected)


def test_errors_are_raised_by_the_wait(tmp_path: Path) -> None:
    state = trained()
    background = BackgroundSaver(saver_at(tmp_path / "file" / "below"), state)
    (tmp_path / "file").write_text("")
    background.start(state)
    with pytest.raises(CheckpointError, match="file"):
        background.wait()
    (tmp_path / "file").unlink()
    state.masters.masters[0].data.view(-1)[0] = torch.nan
    background.start(state)
    with pytest.raises(NonFiniteError, match="is not finite: this step was not saved"):
        background.wait()
    assert not (tmp_path / "file").exists()


def test_the_same_run(place: Place, undisturbed: tuple[Place, Done]) -> None:
    done = place.run(ASYNC)
    assert done.code == 0
    assert_same(place, undisturbed[0], same_settings=False)
    reported = [line for line in done.output.splitlines() if "(in the background, in " in line]
    assert [line.split()[1] for line in reported] == ["2", "4", "6", "8", "10"], done.output


def test_a_failure_is_reported_within_a_step(place: Place, undisturbed: tuple[Place, Done]) -> None:
    fault = ["both", ["full_disk_at", 2], ["save_ends_within", 5]]
    done = place.run(ASYNC, KEEP_ALL, fault=fault)
    assert done.code == 0, done.output
    assert place.steps() == [2, 6, 8, 10, 12]
    lines = done.output.splitlines()
    (warned,) = [i for i, line in enumerate(lines) if "checkpoint at step 4 failed" in line]
    assert "ENOSPC" in lines[warned] and "training continues" in lines[warned]
    later = next(i for i, line in enumerate(lines) if line.startswith("step  6/"))
    assert warned < later, done.output


def test_the_next_save_waits_and_says_so(place: Place) -> None:
    every_step = (f"{EVERY}=1", KEEP_ALL, "trainer.max_steps=4")
    done = place.run(ASYNC, *every_step, fault=["saves_last_until_waited_for"])
    assert done.code == 0
    assert "step 2: waiting until the checkpoint of step 1 is written" in done.output
    assert place.steps() == [1, 2, 3, 4], "none is left out"
    assert not list((place.dir() / "checkpoints").glob(".*"))


def test_a_signal_waits_for_both(place: Place, undisturbed: tuple[Place, Done]) -> None:
    """Step 6 is being written when the signal arrives in step 7."""
    faults = [["slow_saves", 1.0], ["signalled", int(signal.SIGTERM), 7]]
    done = place.run(ASYNC, fault=["both", *faults])
    assert done.code == 75, done.output
    assert place.steps() == [4, 6, 7]
    assert place.run(ASYNC).code == 0
    assert_same(place, undisturbed[0], same_settings=False)


def test_an_infinite_weight_ends_the_run_a_step_later(place: Place) -> None:
    fault = ["infinite_weight", "final_norm.weight", 6]
    done = place.run(ASYNC, f"{EVERY}=3", fault=fault)
    assert done.code == 3, done.output
    assert "step 6: model/final_norm.weight is not finite: this step was not saved" in done.output
    assert place.steps() == [3]


@pytest.mark.slow
def test_two_ranks_agree_apart_from_training(place: Place) -> None:
    """One save fails on both ranks, since the disk is full at the second; others are complete."""
    fault = ["in_rank", 1, "both", ["slow_saves", 0.3], ["full_disk_at", 2]]
    done = place.run(*TWO_RANKS, ASYNC, KEEP_ALL, fault=fault)
    assert done.code == 0, done.output
    assert done.output.count("checkpoint at step 4 failed, training continues") == 1
    assert "rank1.safetensors" in done.output and "ENOSPC" in done.output
    assert place.steps() == [2, 6, 8, 10, 12]
    for step in place.steps():
        store.verify(place.checkpoint(step))


def test_pages_are_locked_as_they_are_and_unlocked_when_they_are_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A double of CUDA's runtime: exactly the block's bytes, and no power of two above them."""
    locked: dict[int, int] = {}

    class Cudart:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
            locked[address] = size
            return 0

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
            del locked[address]
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    block = torch.ones(3000, dtype=torch.uint8)
    background_saver._lock_pages(block)
    assert locked == {block.data_ptr(): 3000}
    view = block[10:20].view(torch.int16)
    del block
    assert locked, "a view keeps the memory"
    del view
    assert not locked
