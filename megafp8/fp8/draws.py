"""Draw the random bytes of stochastic rounding, by the place of each element in the whole run.

A byte follows from the seed, the step, the sample, the tensor, the product, and the element: the
token's position in its sample and the number of the feature. So the same element gets the same
byte in every layout of ranks, in every division of samples into microbatches, and after a resume.
"""

# B samples   S tokens of a sample   T tokens, or other rows   N columns

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from itertools import chain
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from fp8_numerics.philox import WIDTH, Counters, Key, Rows, random_bytes

EVALUATION = -1
"""The step whose draws are those of evaluations."""


@dataclass(frozen=True)
class Tokens:
    """Say which tokens a microbatch has on this rank, equally many of each sample.

    `samples` are their numbers among those of the step. `positions` are those of every sample, or
    `by_sample` has those of each; None in both stands for as many positions as tensor-parallel
    ranks have rows for each sample, from 0 on.
    """

    samples: tuple[int, ...] = (0,)
    positions: tuple[range, ...] | None = None
    by_sample: tuple[tuple[range, ...], ...] | None = None


ONE_SAMPLE = Tokens()


@dataclass(frozen=True)
class TokenOrder:
    """Say which tokens a tensor of a linear has, and in which order, with sequence parallelism.

    Tensor-parallel rank `rank` of `size` has one of `size` chunks of the positions. A tensor has
    the chunk of this rank (`own`), or those of all ranks one after the other (`by_rank`), or the
    tokens are not divided (`whole`).
    """

    kind: Literal["whole", "own", "by_rank"] = "whole"
    rank: int = 0
    size: int = 1


@dataclass(frozen=True)
class Part:
    """Say which part of a whole tensor this rank has.

    `columns` are the numbers of its columns in the whole tensor, and `rows` those of its rows, if
    it is a weight; None stands for all of them. `tokens` is about the rows of other tensors.
    """

    rows: tuple[range, ...] | None = None
    columns: tuple[range, ...] | None = None
    tokens: TokenOrder = TokenOrder()


WHOLE = Part()


class Moment(NamedTuple):
    """Say which microbatch of the run a cast belongs to."""

    step: int
    tokens: Tokens


class DrawsSnapshot(NamedTuple):
    """Hold where the draws of a microbatch are."""

    moment: Moment
    uses: dict[str, int]


class Draws:
    """Key the draws of all tensors by seed and moment.

    `at` is the microbatch whose casts draw; who begins a microbatch sets it. Nothing is kept from
    one step to the next, so that a resumed run draws what an undisturbed one draws.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.at = Moment(0, ONE_SAMPLE)
        self.rows: Rows | None = None  # of the present cast; None: those of the microbatch's tokens
        self._uses: dict[Tokens, dict[str, int]] = {}  # of the microbatches of one step
        self._step_of_uses = 0

    def begin(self, tensor: str, *, is_weight: bool) -> tuple[str, Moment]:
        """Return what keys the draws of one cast, and when it is.

        A weight is the same in all microbatches of a step, and so are its draws. Another tensor
        that is cast repeatedly in a microbatch has other draws each time.
        """
        if is_weight:
            return f"{self.seed} {self.at.step} {tensor}", self.at
        uses = self._uses_now()
        uses[tensor] += 1
        return f"{self.seed} {self.at.step} {tensor} {uses[tensor]}", self.at

    def _uses_now(self) -> dict[str, int]:
        if self._step_of_uses != self.at.step:
            self._uses.clear()
            self._step_of_uses = self.at.step
        return self._uses.setdefault(self.at.tokens, defaultdict(int))

    def rows_of(self, number: int, order: TokenOrder, device: torch.device) -> Rows:
        """Return the samples and positions of the `number` tokens of this rank's microbatch."""
        return _of_tokens(self.at.tokens, order, number, device)

    @contextmanager
    def of_rows(self, rows: Rows | None) -> Iterator[None]:
        """Let casts inside the context draw for these rows: tokens in another order, or a part."""
        self.rows = rows
        try:
            yield
        finally:
            self.rows = None

    def begin_evaluation(self) -> None:
        """Let the casts that follow draw what those of every evaluation draw."""
        self._uses.clear()
        self.at = Moment(EVALUATION, ONE_SAMPLE)

    def snapshot(self) -> DrawsSnapshot:
        """Return where the draws of the present microbatch are."""
        return DrawsSnapshot(self.at, dict(self._uses_now()))

    def restore(self, snapshot: DrawsSnapshot) -> None:
        """Go back to a snapshot: the casts that follow draw what those after it drew."""
        self.at = snapshot.moment
        uses = self._uses_now()
        uses.clear()
        uses.update(snapshot.uses)


@dataclass
class Draw:
    """Return random bytes for one cast; the object is the `draw` of a recipe's `Cast`.

    `tensor` names the tensor and the product; `sizes` are those of the matrix that the rule is
    given, before it was filled up to whole blocks, and `seen` afterwards. `is_turned` says that it
    is the transposed tensor. `is_rotated` says that what it was filled with is rotated with the
    rest, so that it is not zero: its rows draw as if their tokens followed.
    """

    draws: Draws
    tensor: str
    part: Part
    sizes: tuple[int, int]
    seen: tuple[int, int]
    device: torch.device
    is_turned: bool = False
    is_weight: bool = False
    is_rotated: bool = False
    _begun: tuple[str, Moment] | None = None
    _calls: int = field(default=0)

    def __call__(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return bytes (uint8) of a shape, on the tensor's device.

        The bytes of the matrix's own shape are those of its elements. Those of another shape are
        the same after a resume, but depend on the layout of ranks.
        """
        key, moment = self._next()
        if tuple(shape) != self.seen:
            count = torch.Size(shape).numel()
            first = 0 if self.is_weight else moment.tokens.samples[0]
            rows = Rows(*(torch.full((1,), n, device=self.device) for n in (first, 0)))
            return random_bytes(key, rows, [range(count)]).reshape(shape)
        columns = self.sizes[0 if self.is_turned else 1]
        rows = self._rows(moment.tokens, with_all=self.is_rotated)
        drawn = random_bytes(key, rows, self.part.columns or (range(columns),))
        drawn = drawn.t() if self.is_turned else drawn
        missing = [seen - size for seen, size in zip(self.seen, drawn.shape, strict=True)]
        return F.pad(drawn, (0, missing[1], 0, missing[0])) if any(missing) else drawn

    def counters(self) -> Counters | None:
        """Return what a kernel makes the bytes of the tensor's elements of, in place of a call.

        None: this rank's columns are not whole blocks of `WIDTH`, so that no kernel makes them.
        """
        columns = self.part.columns or (range(self.sizes[0 if self.is_turned else 1]),)
        if any(span.start % WIDTH or len(span) % WIDTH for span in columns):
            return None
        key, moment = self._next()
        blocks = _blocks_of(columns, self.device)
        return Counters(key, self._rows(moment.tokens, with_all=True), blocks)

    def _next(self) -> tuple[Key, Moment]:
        if self._begun is None:
            self._begun = self.draws.begin(self.tensor, is_weight=self.is_weight)
        named, moment = self._begun
        self._calls += 1
        return _key(f"{named} {self._calls}"), moment

    def _rows(self, tokens: Tokens, *, with_all: bool) -> Rows:
        """Return the places of the tensor's rows, `with_all` also of those that it has seen."""
        step = -1 if self.is_turned else 1
        number, seen = self.sizes[::step][0], self.seen[::step][0]
        if self.is_weight:
            rows = self.part.rows or (range(number),)
            return _of_weight(rows, self.device)
        places = self.draws.rows
        if places is None:
            places = _of_tokens(tokens, self.part.tokens, number, self.device)
        assert len(places.samples) == number, f"{number} rows, and {len(places.samples)} places"
        return _continued(places, seen - number) if with_all and seen > number > 0 else places


def _key(text: str) -> Key:
    digest = sha256(text.encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


# The microbatches of every step have the same numbers of samples, and so the same tables: a copy to
# the device, which the host may wait for, is made in the first step alone.
@lru_cache(maxsize=64)
def _blocks_of(columns: tuple[range, ...], device: torch.device) -> torch.Tensor:
    blocks = [number // WIDTH for span in columns for number in span[::WIDTH]]
    return torch.tensor(blocks, dtype=torch.int64, device="cpu").to(device)


@lru_cache(maxsize=64)
def _of_weight(rows: tuple[range, ...], device: torch.device) -> Rows:
    numbers = torch.tensor(list(chain(*rows)), dtype=torch.int64, device="cpu").to(device)
    return Rows(torch.zeros_like(numbers), numbers)


@lru_cache(maxsize=64)
def _of_tokens(tokens: Tokens, order: TokenOrder, number: int, device: torch.device) -> Rows:
    """Return the samples and positions of `number` rows of a tensor."""
    if not number:
        return Rows(*torch.zeros(2, 0, dtype=torch.int64, device=device))
    samples_B = torch.tensor(tokens.samples, dtype=torch.int64)
    rows_per_sample, rest = divmod(number, len(samples_B))
    assert not rest, f"{number} rows are not the tokens of {len(samples_B)} samples"
    if tokens.by_sample is not None:
        positions_BS = torch.tensor([list(chain(*spans)) for spans in tokens.by_sample])
    elif tokens.positions is not None:
        positions_BS = torch.tensor(list(chain(*tokens.positions))).expand(len(samples_B), -1)
    else:
        whole = rows_per_sample * (order.size if order.kind == "own" else 1)
        positions_BS = torch.arange(whole).expand(len(samples_B), -1)
    chunks = positions_BS.chunk(order.size, 1)
    chunks = (chunks[order.rank],) if order.kind == "own" else chunks
    chunks = (positions_BS,) if order.kind == "whole" else chunks
    rows = Rows(
        torch.cat([samples_B.repeat_interleave(chunk.shape[1]) for chunk in chunks]),
        torch.cat([chunk.flatten() for chunk in chunks]),
    )
    assert len(rows.samples) == number, f"{number} rows are not these {len(rows.samples)} tokens"
    return Rows(rows.samples.to(device), rows.positions.to(device))


def _continued(rows: Rows, number: int) -> Rows:
    """Return rows with `number` more, of the last sample, after all positions."""
    following = torch.arange(1, number + 1, device=rows.positions.device) + rows.positions.amax()
    samples = rows.samples[-1:].expand(number)
    return Rows(torch.cat((rows.samples, samples)), torch.cat((rows.positions, following)))


def columns_of(ranges: Sequence[range]) -> tuple[range, ...]:
    """Return ranges of columns, of which neighbours are joined."""
    joined: list[range] = []
    for span in ranges:
        if joined and joined[-1].stop == span.start:
            joined[-1] = range(joined[-1].start, span.stop)
        else:
            joined.append(span)
    return tuple(joined)
