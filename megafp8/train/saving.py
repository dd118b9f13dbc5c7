"""What a checkpoint of a run holds, and saving and loading it on all ranks together.

    model/<name>                     FP32 master weights, logical tensors
    optimizer/<state>/<name>         AdamW's moments
    scaling/<direction>/<field>/<tensor>[/shards]
    rng/torch                        torch's default generator (ours are keyed and need no state)

The manifest's meta keeps the scalars: step, samples, updates, configuration, data fingerprint.
"""

from __future__ import annotations

import math
import platform
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import megafp8
from megafp8.checkpoint import store
from megafp8.checkpoint.best import METRICS, NONE, Best
from megafp8.checkpoint.disk import os_errors_reported
from megafp8.checkpoint.layout import set_aside, step_name
from megafp8.checkpoint.placement import Placement
from megafp8.checkpoint.reader import Reader
from megafp8.errors import CheckpointError, NonFiniteError, UserError
from megafp8.optim.adamw import STATES
from megafp8.parallel.mesh import Mesh
from megafp8.precision.backends.te_state import TeScaling
from megafp8.precision.scaling import ScalingState
from megafp8.train.pieces import placements_of
from megafp8.train.state import TrainState

Notify = Callable[[str], None]

# Torch shares out larger tensors among its threads: a thread of the background would get a team of
# its own, beside the one that trains.
_ELEMENTS_OF_ONE_THREAD = 16384


class Saver:
    """Writes a run's checkpoints under `root` and keeps the newest and the best ones."""

    def __init__(self, root: Path, keep: int, meta: dict[str, Any], best: Best = NONE) -> None:
        self.root, self.keep, self.meta, self.best = root, keep, meta, best
        self.metrics: dict[str, float] = {}  # what was measured last, by its name
        self._known_good: Collection[Path] = ()
        self.last_step: int | None = None  # of the newest checkpoint that this run has committed
        self._versions = {
            "megafp8": megafp8.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "commit": _commit(),
        }

    def save(self, state: TrainState) -> Path:
        """All ranks together. Raises `CheckpointError` on every rank if any of them fails.

        A state that is not finite is never saved as good: that is a `NonFiniteError`.
        """
        return self.write(state.mesh, state.step, list(placements(state)), self.meta_of(state))

    def write(
        self,
        mesh: Mesh,
        step: int,
        pieces: Sequence[Placement],
        meta: dict[str, Any],
        group: dist.ProcessGroup | None = None,
    ) -> Path:
        """`save` of what was taken from a state before. The ranks agree within `group`; None: all
        ranks' own."""
        if bad := first_known(mesh, _first_nonfinite(pieces), group):
            raise_on_all(
                NonFiniteError(
                    f"step {step}: {bad} is not finite: this step was not saved. The same command "
                    "continues from the checkpoint before it; lower model.optim.lr if it comes back"
                )
            )
        error: UserError | None = None
        staging: Path | None = None
        try:
            staging = store.begin(self.root, step) if mesh.is_main else None
        except UserError as failure:
            error = failure
        staging = from_main(mesh, staging, group)
        entry = None
        try:
            if staging is not None:
                name = f"rank{mesh.world.rank}.safetensors"
                entry = store.write_shard(staging, name, pieces)
        except UserError as failure:
            error = failure
        entries, error = gather(mesh, entry, group), _cause(gather(mesh, error, group))
        final: Path | None = None
        if mesh.is_main and error is None and staging is not None:
            try:
                final = store.commit(staging, self.root, step, entries, meta)
                self._known_good = store.prune(
                    self.root, self.keep, self._known_good, best=self.best
                )
            except UserError as failure:
                error = failure
        elif mesh.is_main and staging is not None:
            store.discard(staging)
        final, error = from_main(mesh, (final, error), group)
        if error is not None:
            raise_on_all(error)
        assert final is not None
        self.last_step = step
        return final

    def path_of(self, step: int) -> Path:
        return self.root / step_name(step)

    def meta_of(self, state: TrainState) -> dict[str, Any]:
        """The scalars of the state, and what was measured last."""
        return {
            **self.meta,
            METRICS: {n: v for n, v in sorted(self.metrics.items()) if math.isfinite(v)},
            "consumed_samples": state.consumed_samples,
            "num_updates": state.optimizer.num_updates,
            "num_skipped": state.num_skipped,
            "loss_scale": None if state.loss_scale is None else state.loss_scale.state(),
            "versions": self._versions,
        }


def load(step_dir: Path, state: TrainState, notify: Notify) -> dict[str, Any]:
    """Fill `state` from a verified checkpoint, whatever layout wrote it; returns its meta."""
    reader = Reader(step_dir)
    reader.load_into([p for p in placements(state) if not p.name.startswith("scaling/")])
    if isinstance(state.scaling, ScalingState):
        _load_scaling(reader, state, notify)
        if isinstance(state.scaling, TeScaling):
            state.scaling.push()
    if "rng/torch" in reader.names():
        torch.set_rng_state(reader.read("rng/torch"))
    meta = reader.meta
    state.step = reader.step
    state.consumed_samples = int(meta["consumed_samples"])
    state.num_skipped = int(meta["num_skipped"])
    state.optimizer.set_num_updates(int(meta["num_updates"]))
    if state.loss_scale is not None:
        state.loss_scale.set_state(meta["loss_scale"])
    state.masters.write_back()
    return meta


def newest_valid(root: Path, mesh: Mesh, notify: Notify) -> Path | None:
    """The newest checkpoint that verifies, found by the main rank for all.

    Damaged ones after it are renamed: they are no longer the newest, which pruning insists on.
    What a killed process left half written goes: it may be what fills the disk.
    """
    found: Path | None = None
    error: UserError | None = None
    if mesh.is_main:
        try:
            store.remove_leftovers(root)
            found = store.newest_valid(root, notify)
            _set_aside_after(found)
        except UserError as failure:
            error = failure
    found, error = from_main(mesh, (found, error))
    if error is not None:
        raise_on_all(error)
    return found


def _set_aside_after(found: Path | None) -> None:
    if found is None:
        return
    paths = [found.parent / step_name(step) for step in store.steps(found.parent)]
    for path in paths[paths.index(found) + 1 :]:
        with os_errors_reported(path, "setting a damaged checkpoint aside"):
            set_aside(path)


def placements(state: TrainState) -> Iterator[Placement]:
    """Every tensor of the state, as pieces of logical tensors."""
    yield from _fixed_placements(state)
    yield from _passing_placements(state)


def _fixed_placements(state: TrainState) -> Iterator[Placement]:
    """Of tensors that training writes into."""
    yield from model_placements(state)
    for name in STATES:
        yield from _pieces(f"optimizer/{name}/", state, state.optimizer.state_tensors(name))


def _passing_placements(state: TrainState) -> Iterator[Placement]:
    """Of tensors that training makes anew."""
    if isinstance(state.scaling, ScalingState):
        yield from _scaling_placements(state)
    if state.mesh.is_main:
        rng = torch.get_rng_state()
        yield Placement("rng/torch", tuple(rng.shape), (0,), rng)


class RepeatedPlacements:
    """`placements`, again and again: where weights' and moments' pieces lie is found once, for as
    long as their tensors stay in place."""

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._places: list[int] = []
        self._fixed: list[Placement] = []

    def now(self) -> list[Placement]:
        state = self._state
        moments = (state.optimizer.state_tensors(name) for name in STATES)
        tensors = [*state.masters.masters, *(tensor for each in moments for tensor in each)]
        places = [tensor.data_ptr() for tensor in tensors]
        if places != self._places:
            self._places, self._fixed = places, list(_fixed_placements(state))
        return [*self._fixed, *_passing_placements(state)]


def _first_nonfinite(pieces: Iterable[Placement]) -> str | None:
    for placement in pieces:
        if placement.name.startswith(("model/", "optimizer/")):
            flat = placement.tensor.detach().flatten()
            parts = flat.split(_ELEMENTS_OF_ONE_THREAD) if flat.device.type == "cpu" else (flat,)
            if not all(torch.isfinite(part).all() for part in parts):
                return placement.name
    return None


def model_placements(state: TrainState) -> Iterator[Placement]:
    """The master weights."""
    return _pieces("model/", state, state.masters.masters)


def _pieces(prefix: str, state: TrainState, tensors: Sequence[torch.Tensor]) -> Iterator[Placement]:
    """Of tensors that belong to the masters' segments."""
    num_shards = state.masters.shards.size
    for segment, tensor in zip(state.masters.segments, tensors, strict=True):
        yield from placements_of(prefix, segment, tensor, state.mesh, num_shards=num_shards)


def _scaling_placements(state: TrainState) -> Iterator[Placement]:
    """Amaxes that are reduced are the same on all ranks; others are kept as one shard per rank."""
    assert isinstance(state.scaling, ScalingState)
    stage, is_synchronized = state.mesh.stage, _is_synchronized(state)
    for name, row in _scaling_rows(state.scaling):
        if is_synchronized:
            yield Placement(name, tuple(row.shape), (0,) * row.dim(), row, int(stage.rank > 0))
        else:
            shape, offset = (stage.size, *row.shape), (stage.rank, *(0,) * row.dim())
            yield Placement(f"{name}/shards", shape, offset, row[None])


def _scaling_rows(scaling: ScalingState) -> Iterator[tuple[str, torch.Tensor]]:
    for direction, table in scaling.tables.items():
        for field, tensor in table.tensors().items():
            for name, row in zip(table.names, tensor.unbind(0), strict=True):
                yield f"scaling/{direction}/{field}/{name}", row


def _is_synchronized(state: TrainState) -> bool:
    assert isinstance(state.scaling, ScalingState)
    mesh = state.mesh
    is_over_all = state.scaling.recipe.reduce_amax and mesh.amax.size == mesh.stage.size
    return is_over_all or mesh.stage.size == 1


def _load_scaling(reader: Reader, state: TrainState, notify: Notify) -> None:
    """FP8 state as it was; shards of another layout are merged by the rule of a reduction."""
    assert isinstance(state.scaling, ScalingState)
    stored = set(reader.names())
    own = list(_scaling_placements(state))
    if own and not any(name.startswith("scaling/") for name in stored):
        notify("the checkpoint was made without FP8: scales and amax histories begin anew")
        return
    same_layout = [
        p for p in own if p.name in stored and reader.global_shape(p.name) == p.global_shape
    ]
    reader.load_into(same_layout)
    loaded = {p.name for p in same_layout}
    merged = 0
    for placement in own:
        if placement.name in loaded:
            continue
        base = placement.name.removesuffix("/shards")
        source = base if base in stored else f"{base}/shards"
        if source not in stored:
            raise CheckpointError(
                reader.path, f"lacks {base}", "Continue with the FP8 settings it was made with"
            )
        value = reader.read(source)
        if source.endswith("/shards"):
            field = base.split("/")[2]
            value = value.amin(0) if field == "quant_scale" else value.amax(0)
            merged += 1
        placement.tensor.copy_(value.view_as(placement.tensor))
    if merged:
        notify(
            f"{merged} FP8 scaling entries differed between the ranks that saved them "
            "(reduce_amax=False): the larger amax and the smaller scale of each are used"
        )


def from_main(mesh: Mesh, value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """The main rank's object on every rank of this job."""
    if mesh.world.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def first_known(mesh: Mesh, value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """The lowest rank's object that is not None, on every rank."""
    return next((v for v in gather(mesh, value, group) if v is not None), None)


def _cause(errors: list[UserError | None]) -> UserError | None:
    """The lowest rank's error that is not a consequence: a rank that fails may take the directory
    away in which another is about to write."""
    found = [error for error in errors if error is not None]
    own = [error for error in found if "ENOENT" not in str(error)]
    return next(iter(own or found), None)


def raise_on_all(error: UserError) -> NoReturn:
    """Every rank has learned of it and raises it: the main rank tells."""
    error.is_shared = True
    raise error


def gather(mesh: Mesh, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's object, by rank."""
    if mesh.world.size == 1:
        return [value]
    values: list[Any] = [None] * mesh.world.size
    dist.all_gather_object(values, value, group=group)
    return values


def _commit() -> str | None:
    """The git commit of the code that runs, if it runs from a checkout."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
