"""Define what FP8-LM's two ways of ZeRO share: a rank has the sums and masters of its own part.

The part consists of whole tensors (`stored_zero.py`) or of elements (`stored_split.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from megafp8.fp8.scaled import ScaledTensor
from megafp8.optim.stored import StoredMasters
from megafp8.optim.zero import Fp8Weights, MasterPart, move
from megafp8.parallel.collectives import Axis
from megafp8.parallel.data import GradBucket
from megafp8.parallel.scaled_data import ExchangedBucket, FlatGrads
from megafp8.specs import StorageSpec


class OwnedStoredMasters(StoredMasters):
    """Hold the stored masters, moments and summed gradients of the part that a rank owns.

    plain_groups   the gradients in FP32, in the buckets that ranks reduce them in
    frees_grads    whether the memory of a bucket is freed once its gradients were sent
    """

    plain_groups: list[FlatGrads]

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        storage: StorageSpec,
        linears: Collection[nn.Parameter],
        fp8: Fp8Weights,
        shards: Axis,
        *,
        bucket_bytes: int,
        tied: Collection[nn.Parameter] = frozenset(),
        frees_grads: bool = False,
    ) -> None:
        """Divide `params` among the ranks of `shards`.

        `fp8` has the weights kept in FP8. `tied` are parameters that other pipeline stages have
        too: all of these divide them in the same way, though their other parameters differ. With
        `frees_grads` a rank frees the gradients that it does not own (stage 2).
        """
        self._fp8_weights, self._fp8 = fp8, frozenset(fp8.params)
        self._tied = frozenset(tied)
        self.frees_grads = frees_grads and shards.size > 1
        super().__init__(params, storage, linears, data=shards, bucket_bytes=bucket_bytes)

    def _is_fp8(self, param: nn.Parameter) -> bool:
        return param in self._fp8

    def _dtype_of(self, param: nn.Parameter) -> torch.dtype:
        """Return the dtype of the memory in which ranks gather a weight that has a master."""
        return self._fp8_weights.dtype_of(param) if self._is_fp8(param) else param.dtype

    def _move(self, param: nn.Parameter, place: torch.Tensor) -> None:
        """Let a weight that has a master occupy `place`, a flat tensor."""
        if self._is_fp8(param):
            self._fp8_weights.move(param, place)
        else:
            move(param, place)

    def _collect(self, groups: Iterable[FlatGrads]) -> None:
        """Take the gradients of `groups`; those of the segments are the sums of this rank."""
        groups = list(groups)
        super()._collect(groups)
        self._group_of = {param: group for group in groups for param in group.params}
        own = {
            group.params[index]: grad
            for group in groups
            for index, grad in group.own_sums(self.data.rank)
        }
        self.stored_grads = [self._of_segment(own[segment.param]) for segment in self.segments]
        self.grads = [stored.payload for stored in self.stored_grads]

    def _of_segment(self, grad: ScaledTensor) -> ScaledTensor:
        """Return a gradient in the shape of its segment's master."""
        return grad

    def hold_grad(self, param: nn.Parameter) -> None:
        """Allocate the memory of a parameter's gradient, if it is freed between uses."""
        self._group_of[param].hold()

    def begin_step(self) -> None:
        """Free the sums of the last step, if a step allocates new ones."""
        for group in (*self.plain_groups, *self.scaled_groups):
            group.begin_step()

    def is_finite(self, param: nn.Parameter) -> bool:
        """Whether this rank's part of the gradient of `param` is finite.

        A NaN of any rank is in the sum of the rank that owns the element.
        """
        both = zip(self.segments, self.stored_grads, strict=True)
        return all(
            bool(grad.values().isfinite().all()) for segment, grad in both if segment.param is param
        )

    def reducer_buckets(self) -> list[GradBucket]:
        """Return the buckets for the gradient reducer; a sum stays with its owners only.

        In stage 2 those of linears are reduced early in the first step too, since each linear gives
        one gradient in a microbatch.
        """
        scaled = self._scaled_buckets(stays=True)
        for bucket in scaled if self.frees_grads else ():
            bucket.num_gradients = len(bucket.held.params)
        return [*(ExchangedBucket(group, stays=True) for group in self.plain_groups), *scaled]

    def _quantize(self, parts: Iterable[MasterPart]) -> None:
        """Quantize this rank's parts of the weights in FP8, by the scales of the whole ones."""
        if self._fp8:
            self._fp8_weights.store(list(parts), self.shards)
