"""Hold gradients, master weights and moments in few bits, and update them (FP8-LM).

`StorageSpec` says in which formats. The weights of linears may have gradients and masters in few
bits; embeddings, norms and biases have FP32 ones. Moments in few bits are those of all parameters,
or of the linears alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from megafp8.fp8.formats import STORAGE_FORMATS
from megafp8.fp8.scaled import Dither, ScaledTensor
from megafp8.models.init import key_of, pieces_of
from megafp8.ops import torch_private
from megafp8.optim.adamw import STATES, AdamW
from megafp8.optim.kernels import choose_kernel, prepare_state, set_count
from megafp8.optim.masters import Masters, Segment, Store, initial_master
from megafp8.optim.scaled_adam import (
    Constants,
    Dithers,
    Tensors,
    backup_bytes,
    fresh_amaxes,
    keeps_backup,
    kernel_name,
    update,
    update_part,
)
from megafp8.optim.schedules import learning_rate
from megafp8.parallel.collectives import Axis
from megafp8.parallel.data import GradBucket, buckets_of
from megafp8.parallel.scaled_data import ExchangedBucket, FlatGrads, Fp8SumBucket, lay_out
from megafp8.specs import OptimSpec, StorageSpec

Asked = tuple[Segment, Tensors, Constants]


class StoredMasters(Masters):
    """Hold master weights and gradients as a `StorageSpec` says; each rank has whole tensors.

    If the master of a linear's weight has fewer bits than FP32, the rank keeps no second copy of
    that weight: the parameter's data are the master's stored bits, and the linear reads them
    through a `StoredFew`. A weight that is kept in FP8 alone has a master besides; `stores` maps
    such a parameter to the function that writes a new master into it.

        stored         the master weight of each segment, of FP32 ones too
        stored_grads   the gradient of each segment, of FP32 ones too
        grad_of        the gradient of each parameter, as the backward pass fills it
        scaled_groups  the gradients below FP32, in the buckets that ranks reduce them in
        own_weights    the parameters that are their own masters in few bits
        linears        the weights of linears
        in_fp8, plain  the parameters whose gradients are below FP32, and the others
        factors        of sums in FP8 over replicas, one for each of `in_fp8`; see `factor_of`
        row_of         the number of each parameter, where segments are parts of tensors; or None

    A tensor-parallel rank's part of a weight is a tensor with a scale of its own.
    """

    row_of: Mapping[nn.Parameter, int] | None = None

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        storage: StorageSpec,
        linears: Collection[nn.Parameter],
        stores: Mapping[nn.Parameter, Store] | None = None,
        *,
        data: Axis | None = None,
        bucket_bytes: int = 125 << 20,
    ) -> None:
        """Take the initial values of `params`; `linears` are the linears' weights among them.

        `data` are the replicas that reduce gradients; `bucket_bytes` is a bucket's size in FP32.
        """
        self._stores, self.data = dict(stores or {}), data or Axis("data")
        self.params, self.storage = list(params), storage
        self.device = self.params[0].device
        self.linears, self.bucket_size = frozenset(linears), bucket_bytes // 4
        self.own_weights: dict[nn.Parameter, ScaledTensor] = {}
        self.stored: list[ScaledTensor] = []
        self.masters = []
        self.in_fp8 = [p for p in self.params if p in self.linears and storage.main_grads != "fp32"]
        in_fp8 = frozenset(self.in_fp8)
        self.plain = [param for param in self.params if param not in in_fp8]
        self.plain.sort(key=lambda param: not pieces_of(param)[0].is_sharded)
        self._lay_out()
        sizes = [len(group.params) for group in self.scaled_groups]
        count = self.data.size
        factor = {"pre": 1 / count, "post": 1.0}.get(storage.reduction, count**-0.5)
        self.factors = torch.full((sum(sizes),), factor, device=self.device)
        self._factors_of = self.factors.split(sizes)

    def _lay_out(self) -> None:
        """Make gradients and masters of everything."""
        self.shards = Axis("shards")
        self.segments = [Segment(param, 0, param.numel()) for param in self.params]
        for param in self.params:
            self._take(param)
        sizes = [param.numel() for param in self.plain]
        self.flat_grad = torch.zeros(sum(sizes), device=self.device)
        one, fmt = torch.ones((), device=self.device), STORAGE_FORMATS["fp32"]
        self.grad_of = {
            param: ScaledTensor(view.view_as(param), one, fmt)
            for param, view in zip(self.plain, self.flat_grad.split(sizes), strict=True)
        }
        in_fp8, size = STORAGE_FORMATS[self.storage.main_grads], self.data.size
        self.scaled_groups = [
            lay_out(group, in_fp8, self.device, size)
            for group in groups_of(self.in_fp8, self.bucket_size)
        ]
        self._collect(self.scaled_groups)
        whole = sum(p.numel() for p in self.plain if not pieces_of(p)[0].is_sharded)
        self.replicated_grads = [self.flat_grad[self.flat_grad.numel() - whole :]]
        # dividing a scale divides its gradient
        self.own_grads = [self.flat_grad, *(group.scales for group in self.scaled_groups)]

    def _collect(self, groups: Iterable[FlatGrads]) -> None:
        """Take the gradients of `groups`, and list those of the segments."""
        for group in groups:
            self.grad_of |= dict(zip(group.params, group.grads, strict=True))
        self.param_grads = [self.grad_of[param].payload for param in self.params]
        self.stored_grads = [self.grad_of[segment.param] for segment in self.segments]
        self.grads = [stored.payload for stored in self.stored_grads]

    def agree(self, amaxes: torch.Tensor) -> torch.Tensor:
        """Return the amaxes of whole tensors; this rank has all tensors whole."""
        return amaxes

    def hold_grad(self, param: nn.Parameter) -> None:
        """Prepare the memory of a parameter's gradient, before it is first written in a step."""

    def reducer_buckets(self) -> list[GradBucket]:
        """Return the buckets for the gradient reducer."""
        plain = buckets_of(self.flat_grad, self.plain, self.bucket_size * torch.float32.itemsize)
        return [*plain, *self._scaled_buckets()]

    def _scaled_buckets(self, *, stays: bool = False) -> list[ExchangedBucket]:
        """Return the buckets of the gradients below FP32."""
        early, reduction = not self.storage.sums_in_fp32, self.storage.reduction
        if reduction == "fp32":
            return [ExchangedBucket(group, stays, early) for group in self.scaled_groups]
        return [
            Fp8SumBucket(group, stays, early, factors=factors, adapts=reduction == "auto")
            for group, factors in zip(self.scaled_groups, self._factors_of, strict=True)
        ]

    @property
    def factors_adapt(self) -> bool:
        """Whether the factors of sums in FP8 change, and belong to the state of a run."""
        return self.storage.reduction == "auto" and self.data.size > 1

    def factor_of(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield the parameters with gradients below FP32, and the factor of each, a 0-d view."""
        for group, factors in zip(self.scaled_groups, self._factors_of, strict=True):
            yield from zip(group.params, factors.unbind(), strict=True)

    def _take(self, param: nn.Parameter) -> None:
        """Append the master weight of `param`."""
        name = self.storage.main_params if param in self.linears else "fp32"
        master = initial_master(param)
        if name == "fp32":
            one = torch.ones((), device=self.device)
            stored = ScaledTensor(master.detach(), one, STORAGE_FORMATS["fp32"])
        else:
            stored = ScaledTensor.of(master.detach(), STORAGE_FORMATS[name])
            if self._is_fp8(param):
                master = nn.Parameter(stored.payload)
            else:
                param.data = stored.payload
                self.own_weights[param], master = stored, param
        self.stored.append(stored)
        self.masters.append(master)

    def _is_fp8(self, param: nn.Parameter) -> bool:
        """Whether the weight is kept in FP8 alone, and has a master besides."""
        return param in self._stores

    def scaled_grads(self) -> Iterator[tuple[nn.Parameter, ScaledTensor]]:
        """Yield the parameters whose gradients are in few bits, with these."""
        for param in self.in_fp8:
            yield param, self.grad_of[param]

    def plain_grads(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield the parameters whose gradients are in FP32, with these."""
        for param in self.plain:
            yield param, self.grad_of[param].payload

    def squared_norms(self) -> torch.Tensor:
        """Return the squared L2 norm of each segment's gradient, of its values, FP64 [segments]."""
        grads = self.stored_grads
        in_fp32 = [grad.payload for grad in grads if grad.fmt.name == "fp32"]
        plain = iter(torch_private.norms_of(in_fp32) if in_fp32 else ())  # a shard may have none
        return torch.stack(
            [
                next(plain).double().square() if g.fmt.name == "fp32" else g.sum_of_squares()
                for g in grads
            ]
        )

    def is_finite(self, param: nn.Parameter) -> bool:
        """Whether the gradient of `param` holds neither NaN nor infinity."""
        grad = self.grad_of.get(param)
        return grad is None or bool(grad.values().isfinite().all())

    @contextmanager
    def lend_grads(self) -> Iterator[None]:
        """Set the `.grad` of the masters whose gradient is FP32 like them, inside the context."""
        lent = []
        for master, stored, grad in zip(self.masters, self.stored, self.stored_grads, strict=True):
            if stored.fmt.name == grad.fmt.name == "fp32":
                master.grad = grad.payload
                lent.append(master)
        yield
        for master in lent:
            master.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the weights that the model computes with, where these differ."""
        self._round_plain()
        for segment, stored in zip(self.segments, self.stored, strict=True):
            if store := self._stores.get(segment.param):
                store(stored.values())

    def _round_plain(self) -> None:
        """Round FP32 masters into parameters that are neither FP32 nor FP8."""
        both = zip(self.segments, self.masters, strict=True)
        rows = [(segment.param, master) for segment, master in both]
        pairs = [(p, m) for p, m in rows if p is not m and not self._is_fp8(p)]
        if pairs:
            params, masters = zip(*pairs, strict=True)
            torch_private.copy_all_(params, masters)


class StoredAdamW(AdamW):
    """Update stored master weights with Adam; the moments have the formats of `spec.storage`.

    A parameter of which everything is FP32 is updated by the same kernel as without storage in few
    bits, with the same bits. `seed` seeds stochastic rounding.
    """

    masters: StoredMasters

    def __init__(self, masters: StoredMasters, spec: OptimSpec, seed: int) -> None:
        self.masters, self.spec, self._seed = masters, spec, seed
        self._num_updates = 0
        storage = spec.storage
        self._stored: dict[nn.Parameter, Tensors] = {}
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        rows = zip(
            masters.segments, masters.masters, masters.stored, masters.stored_grads, strict=True
        )
        for segment, master, stored, grad in rows:
            few = not storage.linears_only or segment.param in masters.linears
            names = (storage.exp_avg, storage.exp_avg_sq) if few else ("fp32", "fp32")
            if {stored.fmt.name, grad.fmt.name, *names} == {"fp32"}:
                groups[spec.decays(segment.param.dim())].append(master)
                continue
            shape, device = stored.payload.shape, masters.device
            moments = [ScaledTensor.zeros(shape, STORAGE_FORMATS[name], device) for name in names]
            self._stored[master] = Tensors(stored, moments[0], moments[1], grad)
        self._kernel, name = choose_kernel(spec, masters.device)
        self.kernel_name = kernel_name(
            masters.device,
            self._stored.values(),
            is_l2=spec.name == "adam",
            stochastic=storage.stochastic_rounding,
            in_parts=masters.row_of is not None,
        )
        self._torch = None
        if plain := groups[True] + groups[False]:
            self.kernel_name += f"; where all is FP32, {name}"
            both = ((groups[True], spec.weight_decay), (groups[False], 0.0))
            made = [{"params": group, "weight_decay": decay} for group, decay in both if group]
            self._torch = self._kernel.make(made, spec)
            prepare_state(self._kernel, self._torch, plain)

    @property
    def decides_on_device(self) -> bool:
        """Return False: an update of states in few bits clips and skips on the host."""
        return False

    def step(self, step: int) -> None:
        """Apply the gradients as optimizer step `step`, counted from 1, and write the weights."""
        lr = learning_rate(self.spec, step)
        self._num_updates += 1
        if self._torch is not None:
            for group in self._torch.param_groups:
                group["lr"] = lr
            with self.masters.lend_grads():
                self._torch.step()
        asked = [
            (segment, tensors, self._constants(segment.param, lr))
            for segment, master in zip(self.masters.segments, self.masters.masters, strict=True)
            if (tensors := self._stored.get(master)) is not None
        ]
        if self.masters.row_of is None:
            self._update_whole(asked, step)
        else:
            self._update_parts(asked, step, self.masters.row_of)
        self.masters.write_back()

    def _update_whole(self, asked: Sequence[Asked], step: int) -> None:
        """Update whole tensors."""
        largest = max((backup_bytes(tensors) for _, tensors, _ in asked), default=0)
        device, backup = self.masters.device, None
        if keeps_backup(device):  # for this step alone
            backup = torch.empty(largest, dtype=torch.uint8, device=device)
        for segment, tensors, constants in asked:
            update(tensors, constants, self._dithers(segment, step), backup)

    def _update_parts(
        self, asked: Sequence[Asked], step: int, row_of: Mapping[nn.Parameter, int]
    ) -> None:
        """Update parts of tensors, with the scales of the whole ones, which ranks agree on."""
        amaxes = torch.zeros(len(row_of), 3, device=self.masters.device)
        for segment, tensors, constants in asked:
            fresh_amaxes(tensors, constants, amaxes[row_of[segment.param]])
        self.masters.agree(amaxes)
        for segment, tensors, constants in asked:
            dithers = self._dithers(segment, step)
            update_part(tensors, constants, amaxes[row_of[segment.param]], dithers)

    def _constants(self, param: nn.Parameter, lr: float) -> Constants:
        spec = self.spec
        decay = spec.weight_decay if spec.decays(param.dim()) else 0.0
        return Constants(lr, spec.betas, spec.eps, decay, spec.name == "adam", self._num_updates)

    def _dithers(self, segment: Segment, step: int) -> Dithers:
        if not self.spec.storage.stochastic_rounding:
            return None, None, None
        piece = segment.piece
        name: tuple[object, ...] = (piece.name,)
        if any(piece.offset):
            name += (piece.offset,)
        if segment.begin:  # a part has random numbers of its own
            name += ("from", segment.begin)
        keys = (key_of("round", self._seed, step, *name, what) for what in ("model", *STATES))
        param_key, first, second = (Dither(key) for key in keys)
        return param_key, first, second

    @property
    def num_updates(self) -> int:
        """Return how many updates were applied, which is Adam's t; skipped steps do not count."""
        return self._num_updates

    def set_num_updates(self, count: int) -> None:
        """Set Adam's t to `count`, when training continues from a checkpoint."""
        self._num_updates = count
        if self._torch is not None:
            set_count(self._kernel, self._torch, count)

    def stored_states(self, name: str) -> list[ScaledTensor]:
        """Return the moments `exp_avg` or `exp_avg_sq` in the order of the masters."""
        assert name in STATES
        found = []
        for master in self.masters.masters:
            if (tensors := self._stored.get(master)) is not None:
                found.append(getattr(tensors, name))
            else:
                assert self._torch is not None
                one = torch.ones((), device=self.masters.device)
                moment = self._torch.state[master][name]
                found.append(ScaledTensor(moment, one, STORAGE_FORMATS["fp32"]))
        return found

    def state_tensors(self, name: str) -> list[torch.Tensor]:
        """Return the moments' payloads in the order of the masters."""
        return [moment.payload for moment in self.stored_states(name)]


def groups_of(params: Sequence[nn.Parameter], size: int) -> list[list[nn.Parameter]]:
    """Return groups of consecutive parameters; each is full at `size` elements."""
    groups: list[list[nn.Parameter]] = []
    held = size
    for param in params:
        if held >= size:
            groups.append([])
            held = 0
        groups[-1].append(param)
        held += param.numel()
    return groups
