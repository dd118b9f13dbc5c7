"""Random streams keyed by where they are used, so that a resumed run needs no generator state.

Every draw is keyed by seed, step, microbatch and site (the dropout's name): recomputation, another
order of microbatches and another tensor-parallel size draw the same numbers. Sites whose tensors
are sharded over tensor-parallel ranks also carry the rank, so that shards differ; where ranks share
the sequence, all sites carry the rank that has these tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megafp8.models.init import key_of


class RandomStreams:
    """The position in the run that the streams are keyed by."""

    def __init__(self, seed: int, tp_rank: int = 0, cp_rank: int = 0) -> None:
        self.seed, self.tp_rank = seed, tp_rank
        self._tokens = () if cp_rank == 0 else (f"cp {cp_rank}",)
        self._position: tuple[int, int] = (0, 0)

    def begin_microbatch(self, step: int, global_index: int) -> None:
        """`global_index` numbers the step's microbatches over all data-parallel ranks."""
        self._position = (step, global_index)

    @property
    def position(self) -> tuple[int, int]:
        """(step, global index of the microbatch)."""
        return self._position

    @contextmanager
    def at(self, position: tuple[int, int]) -> Iterator[None]:
        """As if `position` were the current one: a microbatch's layers are computed again."""
        current, self._position = self._position, position
        try:
            yield
        finally:
            self._position = current

    @contextmanager
    def keyed(self, site: str, device: torch.device, *, sharded: bool = False) -> Iterator[None]:
        """Torch's default generator of `device` starts at this site's key inside the context."""
        key = key_of(
            self.seed, *self._position, site, self.tp_rank if sharded else "all", *self._tokens
        )
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(key)
        else:
            torch.default_generator.manual_seed(key)
        yield
