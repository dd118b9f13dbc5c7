"""Key random streams by the place of their use, so that a resumed run needs no generator state.

Every draw is keyed by seed, step, microbatch and site (the dropout's name). So recomputation,
another order of microbatches and another number of replicas draw the same numbers. Another
tensor-parallel size does so only for tensors that every rank holds whole: a site whose tensor is
sharded also has the rank in its key, so that shards draw different numbers. If ranks share the
sequence, every site has the context-parallel rank in its key.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megafp8.models.init import key_of


class RandomStreams:
    """Hold the seed and the position in the run that key the random streams."""

    def __init__(self, seed: int, tp_rank: int = 0, cp_rank: int = 0) -> None:
        self.seed, self.tp_rank = seed, tp_rank
        self._tokens = () if cp_rank == 0 else (f"cp {cp_rank}",)
        self._position: tuple[int, int] = (0, 0)

    def begin_microbatch(self, step: int, global_index: int) -> None:
        """Set the position; `global_index` counts the step's microbatches over all replicas."""
        self._position = (step, global_index)

    @property
    def position(self) -> tuple[int, int]:
        """Return the position: (step, global index of the microbatch)."""
        return self._position

    @contextmanager
    def at(self, position: tuple[int, int]) -> Iterator[None]:
        """Set the position within the context, so that a microbatch's layers can be recomputed."""
        current, self._position = self._position, position
        try:
            yield
        finally:
            self._position = current

    @contextmanager
    def keyed(self, site: str, device: torch.device, *, sharded: bool = False) -> Iterator[None]:
        """Seed torch's default generator of `device` with this site's key within the context."""
        key = key_of(
            self.seed, *self._position, site, self.tp_rank if sharded else "all", *self._tokens
        )
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(key)
        else:
            torch.default_generator.manual_seed(key)
        yield
