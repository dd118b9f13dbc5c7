"""Run Adam on master weights: with a fused kernel in FP32, and on stored states in any format.

Muon may update the matrices instead (`optim/muon.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import nn

from megafp8.fp8.scaled import Dither, ScaledTensor
from megafp8.fp8.stored_formats import STORAGE_FORMATS
from megafp8.models.init import key_of
from megafp8.optim.clipping import clip, coefficient_on_device
from megafp8.optim.kernels import TORCH, choose_kernel, count, prepare_state, set_count
from megafp8.optim.masters import Masters
from megafp8.optim.muon import Muon
from megafp8.optim.partitions import Segment
from megafp8.optim.scaled_adam import (
    Constants,
    Dithers,
    Tensors,
    fresh_amaxes,
    kernel_name,
    update_all,
    update_part,
    updates_by_triton,
)
from megafp8.optim.schedules import learning_rate
from megafp8.specs import OptimSpec
from megafp8.specs.optim import StorageName

STATES = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum_buffer"
Asked = tuple[Segment, Tensors, Constants]


class AdamW:
    """Update master weights with Adam (Kingma & Ba 2015, arXiv 1412.6980).

    Weight decay is decoupled (Loshchilov & Hutter 2019, arXiv 1711.05101) or, under the name
    `adam`, an L2 term of the gradient. As in NeMo, norms and biases do not decay, unless
    `spec.decays_vectors` is set. The moments have the formats of `spec.storage` and the shape of
    their master weight. Where all of a parameter's states are FP32, a fused kernel updates it; the
    others are updated by `scaled_adam`.
    """

    def __init__(
        self, masters: Masters, spec: OptimSpec, seed: int = 0, muon: Muon | None = None
    ) -> None:
        """Make the moments; `seed` seeds stochastic rounding, and `muon` updates its matrices."""
        self.masters, self.spec, self._seed, self._muon = masters, spec, seed, muon
        self._num_updates = 0
        self._stored: dict[nn.Parameter, Tensors] = {}
        decaying: list[nn.Parameter] = []
        undecayed: list[nn.Parameter] = []
        rows = zip(
            masters.segments, masters.masters, masters.stored, masters.stored_grads, strict=True
        )
        for segment, master, stored, grad in rows:
            if muon is not None and muon.updates(segment.param):
                continue
            names = self._moment_formats(segment.param)
            if {stored.fmt.name, grad.fmt.name, *names} == {"fp32"}:
                (decaying if spec.decays(segment.param.dim()) else undecayed).append(master)
                continue
            shape, device = stored.payload.shape, masters.device
            moments = [ScaledTensor.zeros(shape, STORAGE_FORMATS[name], device) for name in names]
            self._stored[master] = Tensors(stored, moments[0], moments[1], grad)
        self._kernel, self.kernel_name = choose_kernel(spec, masters.device)
        if not (decaying or undecayed):  # with very many ranks, the shard of one may be empty
            undecayed = [nn.Parameter(torch.zeros(0, device=masters.device))]
        with_decay = ((decaying, spec.weight_decay), (undecayed, 0.0))
        groups = [{"params": group, "weight_decay": decay} for group, decay in with_decay if group]
        self._torch = self._kernel.make(groups, spec)
        prepare_state(self._kernel, self._torch, decaying + undecayed)
        if not spec.storage.is_plain:
            self.kernel_name = self._name_of_kernels(self.kernel_name)
        if muon is not None:
            self.kernel_name = f"{muon.describe()}; AdamW for the rest by {self.kernel_name}"

    def _moment_formats(self, param: nn.Parameter) -> tuple[StorageName, StorageName]:
        storage = self.spec.storage
        if storage.linears_only and param not in self.masters.linears:
            return "fp32", "fp32"
        return storage.exp_avg, storage.exp_avg_sq

    def _name_of_kernels(self, of_fp32: str) -> str:
        storage, masters = self.spec.storage, self.masters
        name = kernel_name(
            masters.device,
            self._stored.values(),
            is_l2=self.spec.name == "adam",
            stochastic=storage.stochastic_rounding,
            in_parts=masters.row_of is not None,
        )
        if len(self._stored) == len(masters.masters):
            return name
        return f"{name}; where all is FP32, {of_fp32}"

    @property
    def decides_on_device(self) -> bool:
        """Whether the kernel itself clips and, after a step that is not finite, updates nothing.

        The host then need not know the norm before the update, and no pass over the gradients is
        spent on clipping. torch's kernel does both (`grad_scale`, `found_inf`), where gradients are
        clipped by norm. It is used so on GPUs; on CPUs the bits stay those of `clip`. Where Triton
        updates all states below FP32, its kernels skip too, and multiplying the gradients' scales
        clips them. Other updates of such states clip and skip on the host, and so does Muon.
        """
        if self._muon is not None or self.masters.device.type != "cuda":
            return False
        by_torch = self._kernel is TORCH and self.spec.clip_algorithm == "norm"
        return by_torch and self._triton_updates_stored

    @cached_property
    def _triton_updates_stored(self) -> bool:
        """Whether Triton's kernels update all states below FP32, if there are any."""
        if self._stored and self.masters.row_of is not None:
            return False
        is_l2, stochastic = self.spec.name == "adam", self.spec.storage.stochastic_rounding
        kinds = self._stored.values()
        return all(updates_by_triton(x, is_l2=is_l2, stochastic=stochastic) for x in kinds)

    def update(self, step: int, norm: float, *, divisor: float) -> None:
        """Divide the gradients in `masters` by `divisor`, clip them, and apply them.

        `norm` is the norm of the gradients after the division; `step` is counted from 1.
        """
        clip(self.masters.own_grads, norm, self.spec, divisor=divisor)
        self.step(step)

    @torch.no_grad()
    def update_if_finite(
        self, step: int, loss: torch.Tensor, norm: torch.Tensor, *, divisor: torch.Tensor
    ) -> None:
        """Do what `update` does, unless the loss or the norm is not finite, without the host.

        The arguments are 0-d FP64 tensors on the device; `divisor` is what the gradients' sums are
        divided by, tokens and loss scale. If the step is skipped, masters and moments stay as they
        are; the masters are written into the weights again, since FP8 scales may have moved.
        Gradients may be clipped all the same, and the caller takes back the count of updates
        (`take_back_count`). It is called only with `decides_on_device`.
        """
        skips = (loss.isfinite() & norm.isfinite()).logical_not().float()
        self._torch.found_inf = skips  # where it is 1, torch's kernel updates nothing
        if self.spec.storage.is_plain:  # the kernel divides each gradient by `grad_scale` itself
            self._torch.grad_scale = (divisor / coefficient_on_device(norm, self.spec)).float()
        else:  # one factor for all gradients, as `clip` has it
            factor = (coefficient_on_device(norm, self.spec) / divisor).float()
            for flat_grad in self.masters.own_grads:
                flat_grad.mul_(factor)
        self.step(step, skips)
        self._torch.grad_scale = self._torch.found_inf = None

    def take_back_count(self) -> None:
        """Let the last update not count: its step was not finite, and the device skipped it."""
        self._num_updates -= 1

    def step(self, step: int, skips: torch.Tensor | None = None) -> None:
        """Apply the gradients in `masters` as optimizer step `step`, counted from 1.

        The updated master weights are then rounded into the weights that the model computes with.
        Where `skips` (0-d FP32, on the device) is not 0, the kernels update nothing.
        """
        lr = learning_rate(self.spec, step)
        self._num_updates += 1
        for group in self._torch.param_groups:
            group["lr"] = lr
        with self.masters.attach_grads():
            self._torch.step()
        if not self.spec.storage.is_plain:
            self._update_stored(step, lr, skips)
        if self._muon is not None:
            self._muon.step(lr)
        self.masters.write_back()

    def _update_stored(self, step: int, lr: float, skips: torch.Tensor | None) -> None:
        """Update what has states below FP32."""
        masters, asked = self.masters, []
        rows = zip(masters.segments, masters.masters, masters.stored_grads, strict=True)
        for segment, master, grad in rows:
            if (tensors := self._stored.get(master)) is not None:
                tensors = replace(tensors, grad=grad)  # FSDP's are other tensors in each step
                asked.append((segment, tensors, self._constants(segment.param, lr)))
        if masters.row_of is None:
            self._update_whole(asked, step, skips)
        else:
            self._update_parts(asked, step, masters.row_of)

    def _update_whole(self, asked: Sequence[Asked], step: int, skips: torch.Tensor | None) -> None:
        """Update whole tensors."""
        whole = [(tensors, c, self._dithers(segment, step)) for segment, tensors, c in asked]
        if whole:
            update_all(whole, skips)

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
        """Return the random numbers that round a segment: of its weight and its moments."""
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
        if self.spec.storage.is_plain:
            return count(self._kernel, self._torch)
        return self._num_updates

    def set_num_updates(self, count: int) -> None:
        """Set Adam's t to `count`, when training continues from a checkpoint."""
        self._num_updates = count
        set_count(self._kernel, self._torch, count)

    def num_states(self, param: nn.Parameter) -> int:
        """Return how many states each element of a parameter has, beside its master weight."""
        return 1 if self._muon is not None and self._muon.updates(param) else len(STATES)

    def states(self) -> Iterator[tuple[str, list[tuple[Segment, ScaledTensor]]]]:
        """Yield the name of each kind of state, and what each segment that has one has of it."""
        unit_scale, fp32 = torch.ones((), device=self.masters.device), STORAGE_FORMATS["fp32"]
        for name in STATES:
            of_segments = []
            for segment, master in zip(self.masters.segments, self.masters.masters, strict=True):
                if (tensors := self._stored.get(master)) is not None:
                    of_segments.append((segment, getattr(tensors, name)))
                elif self._muon is None or not self._muon.updates(segment.param):
                    moment = self._torch.state[master][name]
                    of_segments.append((segment, ScaledTensor(moment, unit_scale, fp32)))
            yield name, of_segments
        if self._muon is not None:
            momenta = self._muon.momenta()
            yield MOMENTUM, [(segment, ScaledTensor(m, unit_scale, fp32)) for segment, m in momenta]

    def stored_states(self, name: str) -> list[ScaledTensor]:
        """Return the states of one name in the order of the masters that have it."""
        return [state for _, state in dict(self.states())[name]]

    def state_tensors(self, name: str) -> list[torch.Tensor]:
        """Return the payloads of `stored_states`."""
        return [state.payload for state in self.stored_states(name)]

    def all_state_tensors(self) -> list[torch.Tensor]:
        """Return the payloads of the states of all names."""
        return [state.payload for _, states in self.states() for _, state in states]
