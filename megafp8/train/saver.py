"""Write a run's checkpoints on all ranks together."""

from __future__ import annotations

import math
import platform
import subprocess
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megafp8
from megafp8.checkpoint import store
from megafp8.checkpoint.best import METRICS, NONE, Best
from megafp8.checkpoint.manifest import SKIPPED_IN_A_ROW, Placement
from megafp8.checkpoint.reader import SCALES
from megafp8.checkpoint.step_directories import step_name
from megafp8.errors import NonFiniteError, UserError
from megafp8.files import note_progress
from megafp8.parallel.agreement import first_known, on_all, on_main, raise_on_all
from megafp8.parallel.launch import note_checkpoint
from megafp8.parallel.mesh import Mesh
from megafp8.train import state_dict
from megafp8.train.phases import steps_for_meta
from megafp8.train.scaling_dict import SCALING_LAYOUT, scaling_layout
from megafp8.train.state import TrainState

# Torch divides larger tensors among threads. For the thread that writes in the background, it would
# start more threads, which compete with those that train.
_ELEMENTS_OF_ONE_THREAD = 16384


class Saver:
    """Write a run's checkpoints under `root`, and keep the newest and the best ones."""

    def __init__(self, root: Path, keep: int, meta: dict[str, Any], best: Best = NONE) -> None:
        self.root, self.keep, self.meta, self.best = root, keep, meta, best
        self.metrics: dict[str, float] = {}  # the last measured values, by name
        self._known_good: Collection[Path] = ()
        self.last_step: int | None = None  # step of the newest checkpoint of this run
        self._versions = {
            "megafp8": megafp8.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "commit": _commit(),
        }

    def save(self, state: TrainState) -> Path:
        """Save the state and return the checkpoint's directory. All ranks call it together.

        Raises:
            CheckpointError: Some rank failed to write; every rank raises.
            NonFiniteError: The state has a value that is not finite, and is therefore not saved.
        """
        return self.write(
            state.mesh, state.step, list(state_dict.placements(state)), self.meta_of(state)
        )

    def write(
        self,
        mesh: Mesh,
        step: int,
        pieces: Sequence[Placement],
        meta: dict[str, Any],
        group: dist.ProcessGroup | None = None,
    ) -> Path:
        """Save `pieces` and `meta`, which were taken from a state at `step`; see `save`.

        The ranks agree within `group`, or within that of the mesh if it is None.
        """
        if bad := first_known(mesh, _first_nonfinite(pieces), group):
            raise_on_all(
                NonFiniteError(
                    f"step {step}: {bad} is not finite: this step was not saved. The same command "
                    "continues from the checkpoint before it; lower model.optim.lr if this happens "
                    "again"
                )
            )
        staging = on_main(mesh, lambda: store.begin(self.root, step), group)
        file_name = f"rank{mesh.world.rank}.safetensors"
        try:
            entries = on_all(mesh, lambda: store.write_shard(staging, file_name, pieces), group)
        except UserError:
            if mesh.is_main:
                store.discard(staging)
            raise

        def commit() -> Path:
            committed = store.commit(staging, self.root, step, entries, meta)
            note_checkpoint(committed)
            self._known_good = store.prune(self.root, self.keep, self._known_good, best=self.best)
            return committed

        final = on_main(mesh, commit, group)
        self.last_step = step
        return final

    def path_of(self, step: int) -> Path:
        """Return the directory of the checkpoint of `step`."""
        return self.root / step_name(step)

    def meta_of(self, state: TrainState) -> dict[str, Any]:
        """Return the scalars of the state, and the metrics that were measured last."""
        return {
            **self.meta,
            SCALING_LAYOUT: scaling_layout(state),
            **steps_for_meta(state),
            METRICS: {n: v for n, v in sorted(self.metrics.items()) if math.isfinite(v)},
            "consumed_samples": state.consumed_samples,
            "num_updates": state.optimizer.num_updates,
            "num_skipped": state.num_skipped,
            SKIPPED_IN_A_ROW: state.num_skipped_in_a_row,
            "loss_scale": None if state.loss_scale is None else state.loss_scale.state(),
            "versions": self._versions,
        }


def _first_nonfinite(pieces: Iterable[Placement]) -> str | None:
    for placement in pieces:
        if placement.name.startswith(("model/", "optimizer/", SCALES)):
            flat = placement.tensor.detach().flatten()
            flat = flat.float() if flat.itemsize == 1 else flat  # torch has no test for FP8
            parts = flat.split(_ELEMENTS_OF_ONE_THREAD) if flat.device.type == "cpu" else (flat,)
            if not all(torch.isfinite(part).all() for part in parts):
                return placement.name
            note_progress()
    return None


def _commit() -> str | None:
    """Return the git commit of the code that runs, or None outside of a checkout."""
    folder = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
