"""Before the first step: can this run's checkpoints be written, and do they fit?"""

from __future__ import annotations

from pathlib import Path

from megafp8.checkpoint import room, store
from megafp8.errors import UserError
from megafp8.specs import CheckpointSpec
from megafp8.train import saving
from megafp8.train.state import TrainState

_BYTES_OF_A_PIECE = 1024  # its entries in the file's header and in the manifest, at most


def require_room(
    saver: saving.Saver,
    spec: CheckpointSpec,
    state: TrainState,
    max_steps: int,
    *,
    saves_at_once: bool = False,
) -> None:
    """All ranks together; every one raises `CheckpointError` if any could not write.

    `saves_at_once`: there will be a checkpoint before the first step.

    Counted are the checkpoints that will lie there at once: the kept, and the new one that is
    verified before an older one goes.
    """
    periodic = spec.every_n_train_steps or spec.train_time_interval_seconds
    if not (periodic or spec.save_last or saves_at_once) or state.step >= max_steps:
        return  # only a signal would save
    mesh = state.mesh
    own = [p for p in saving.placements(state) if p.replica == 0]
    num_bytes = sum(p.tensor.nbytes + _BYTES_OF_A_PIECE for p in own)
    in_all = sum(saving.gather(mesh, num_bytes))
    error: UserError | None = None
    staging: Path | None = None
    if mesh.is_main:
        try:
            more = num_more(spec, state.step, max_steps, len(store.steps(saver.root)))
            files = mesh.world.size + 3  # with manifest, its hash and the directory
            room.require_free_space(saver.root, in_all, more, files)
            staging = store.begin(saver.root, state.step)
        except UserError as failure:
            error = failure
    staging, error = saving.from_main(mesh, (staging, error))
    if staging is not None:
        try:
            room.require_file_size(saver.root, num_bytes)
            room.try_to_write(staging, mesh.world.rank)
        except UserError as failure:
            error = failure
        error = saving.first_known(mesh, error)
        if mesh.is_main:
            store.discard(staging)
    if error is not None:
        saving.raise_on_all(error)


def num_more(spec: CheckpointSpec, step: int, max_steps: int, num_there: int) -> int:
    """How many checkpoints will be added before one goes for each that comes."""
    left = max_steps - step
    saves = 1  # the last, or a signal's
    if spec.train_time_interval_seconds is not None:
        saves = left
    elif spec.every_n_train_steps is not None:
        saves += (max_steps - 1) // spec.every_n_train_steps - step // spec.every_n_train_steps
    saves = max(1, min(saves, left))
    if spec.save_top_k < 0:
        return saves
    return min(saves, max(1, spec.keep + spec.save_top_k + 1 - num_there))
