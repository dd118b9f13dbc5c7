"""Say where a rank's gradients and weights lie in flat tensors and which rank owns what.

The optimizer allocates these tensors (`optim/partitions.py`), and a plan counts them without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from megafp8.specs.parallel import owners_of

ALIGNMENT = 64
"""Parameters and ranges begin at multiples of this number of elements. So no cache line has two
owners, and a vectorized update treats an element in the same way on every rank."""


class Member(NamedTuple):
    """Describe a parameter that is divided."""

    elements: int
    weight: str  # the dtype of the memory of its weights
    grad: str  # the format of its gradient
    is_linear: bool  # whether it is the weight of a layer's linear
    is_sharded: bool  # whether tensor-parallel ranks have parts of it
    is_tied: bool  # whether other pipeline stages have it too


@dataclass(frozen=True)
class Places:
    """Say where parameters lie in a flat tensor; rank r owns `bounds[r]` to `bounds[r + 1]`."""

    rows: tuple[int, ...]  # the parameters' numbers among all members
    sizes: tuple[int, ...]
    begins: tuple[int, ...]
    bounds: tuple[int, ...]
    kind: str  # the format of gradients, or the dtype of weights
    is_padded: bool  # whether all ranges have one size, so that one operation gathers them

    @property
    def elements(self) -> int:
        """Return the elements of the flat tensor, with its padding."""
        return self.bounds[-1]

    @property
    def parts(self) -> list[int]:
        """Return how many elements each rank owns."""
        return [high - low for low, high in zip(self.bounds, self.bounds[1:], strict=False)]

    @property
    def is_split(self) -> bool:
        """Whether some parameter lies in the ranges of several ranks."""
        pieces = list(zip(self.begins, self.sizes, strict=True))
        return any(begin < at < begin + size for at in self.bounds for begin, size in pieces)

    def between(self, low: int, high: int) -> Iterator[tuple[int, slice]]:
        """Yield the parameters that lie in a range, by their place in `rows`, and where in it."""
        for index, (begin, size) in enumerate(zip(self.begins, self.sizes, strict=True)):
            first, last = max(begin, low), min(begin + size, high)
            if first < last:
                yield index, slice(first - low, last - low)

    def owned_by(self, rank: int) -> Iterator[tuple[int, slice]]:
        """Yield what `between` does, for a rank's range."""
        yield from self.between(self.bounds[rank], self.bounds[rank + 1])

    def rounds(self) -> list[list[slice]]:
        """Return which elements each rank receives from all others, one round at a time.

        In a round no rank receives more than an equal share of the tensor. So what arrives from all
        ranks together is never larger than the tensor, also where one rank owns all of it.
        """
        share = max(1, -(-self.elements // len(self.parts)))
        both = list(zip(self.bounds, self.bounds[1:], strict=False))
        return [
            [slice(min(low + at, high), min(low + at + share, high)) for low, high in both]
            for at in range(0, max(1, *self.parts), share)
        ]


@dataclass(frozen=True)
class Division:
    """Say where all members lie; weights that are in none of `weights` stay where they are."""

    order: Sequence[int]  # in which what the ranks own is listed
    grads: Sequence[Places]  # those in FP32 first
    weights: Sequence[Places] = ()
    owners: Sequence[int] = ()  # of members that ranks own whole

    @property
    def splits(self) -> bool:
        """Whether ranks own parts of members."""
        return bool(self.weights) and not self.owners

    def owned_by(self, rank: int) -> Iterator[tuple[int, int]]:
        """Yield the members of which a rank updates some elements, and how many."""
        if not self.weights:  # every rank updates all of them
            for places in self.grads:
                yield from zip(places.rows, places.sizes, strict=True)
        for places in self.weights:
            for index, part in places.owned_by(rank):
                yield places.rows[index], part.stop - part.start


@dataclass(frozen=True)
class ScatteredRow:
    """Say where the gradients of an FSDP module lie in what a rank sends another one.

    `plain` and `in_fp8` have each gradient's elements in the rank's range, and its bytes in the
    message. FP32 numbers come first, then the scales of the others, and then their FP8 bytes: the
    place of FP32 numbers must be a multiple of 4 bytes.
    """

    plain: tuple[tuple[slice, slice], ...]
    in_fp8: tuple[tuple[slice, slice], ...]
    scales: slice
    num_bytes: int

    @classmethod
    def of(cls, sizes: Sequence[int], in_fp8: Sequence[bool]) -> ScatteredRow:
        """Lay out gradients of these numbers of elements, padded, in the order of the module."""
        ends = [0, *accumulate(sizes)]
        places = [slice(*both) for both in zip(ends, ends[1:], strict=False)]
        plain = [place for place, scaled in zip(places, in_fp8, strict=True) if not scaled]
        scaled = [place for place, scaled in zip(places, in_fp8, strict=True) if scaled]
        widths = [4 * (place.stop - place.start) for place in plain]
        widths += [4 * len(scaled), *(place.stop - place.start for place in scaled)]
        ends = [0, *accumulate(widths)]
        parts = [slice(*both) for both in zip(ends, ends[1:], strict=False)]
        before, scales, after = parts[: len(plain)], parts[len(plain)], parts[len(plain) + 1 :]
        return cls(
            tuple(zip(plain, before, strict=True)),
            tuple(zip(scaled, after, strict=True)),
            scales,
            rounded_up(ends[-1], 16),
        )


def equal_parts(
    sizes: Sequence[int], num_ranks: int, *, rows: Sequence[int] = (), kind: str = "", unit: int = 1
) -> Places:
    """Return tensors one after the other, of which each rank owns a range of the same size.

    Tensors and ranges begin at multiples of `unit` elements.
    """
    *begins, end = _ends([rounded_up(size, unit) for size in sizes])
    share = rounded_up(end, unit * num_ranks) // num_ranks
    bounds = tuple(rank * share for rank in range(num_ranks + 1))
    return Places(tuple(rows or range(len(sizes))), tuple(sizes), tuple(begins), bounds, kind, True)


def whole_parts(
    sizes: Sequence[int],
    owners: Sequence[int],
    num_ranks: int,
    *,
    rows: Sequence[int] = (),
    kind: str = "",
    is_padded: bool = False,
) -> Places:
    """Return tensors of which each rank owns whole ones.

    Padded tensors begin at multiples of `ALIGNMENT`; all ranges are as large as the largest one.
    """
    held, places = [0] * num_ranks, []
    unit = ALIGNMENT if is_padded else 1
    for size, owner in zip(sizes, owners, strict=True):
        places.append(held[owner])
        held[owner] += rounded_up(size, unit)
    if is_padded:
        held = [max(held)] * num_ranks
    bounds = _ends(held)
    begins = tuple(bounds[owner] + place for owner, place in zip(owners, places, strict=True))
    return Places(tuple(rows or range(len(sizes))), tuple(sizes), begins, bounds, kind, is_padded)


@dataclass(frozen=True)
class Divided:
    """Hold what is divided among `num_ranks` ranks."""

    members: tuple[Member, ...]
    num_ranks: int
    bucket_size: int  # elements at which a bucket of gradients is full
    is_plain: bool  # whether gradients, masters and moments are all in FP32

    def equal(self, rows: Sequence[int], kind: str, num_ranks: int, unit: int) -> Places:
        """Return members of which each rank owns a range of the same size."""
        return equal_parts(self.sizes(rows), num_ranks, rows=rows, kind=kind, unit=unit)

    def sizes(self, rows: Sequence[int]) -> list[int]:
        """Return the elements of members."""
        return [self.members[row].elements for row in rows]

    def by_grad(self) -> tuple[list[int], list[int]]:
        """Return the members whose gradients are in FP32, and the others."""
        rows = range(len(self.members))
        plain = [row for row in rows if self.members[row].grad == "fp32"]
        return plain, [row for row in rows if self.members[row].grad != "fp32"]

    def groups(self, rows: Sequence[int], unit: int = 1) -> list[list[int]]:
        """Return groups of consecutive members, each full at `bucket_size` elements.

        A member counts as its elements, rounded up to a multiple of `unit`.
        """
        groups: list[list[int]] = []
        held = self.bucket_size
        for row in rows:
            if held >= self.bucket_size:
                groups.append([])
                held = 0
            groups[-1].append(row)
            held += rounded_up(self.members[row].elements, unit)
        return groups

    def kinds(self) -> list[list[int]]:
        """Return the members by what those of one bucket must have in common.

        A tied one is alone: all stages that have it divide it in the same way.
        """
        kinds: dict[tuple[bool, str, int, str], list[int]] = {}
        for row, member in enumerate(self.members):
            alone = row + 1 if member.is_tied else 0
            kind = not member.is_sharded, member.weight, alone, member.grad
            kinds.setdefault(kind, []).append(row)
        if self.is_plain:  # the gradient norm adds squares in this order
            return [rows for _, rows in sorted(kinds.items())]
        return list(kinds.values())

    def owners(self) -> list[int]:
        """Return the rank that owns each member whole, linears first: their ranges are padded.

        Tied members are rank 0's.
        """
        held, owners = [0] * self.num_ranks, [0] * len(self.members)
        for is_linear in (True, False):
            rows = [row for row, m in enumerate(self.members) if m.is_linear == is_linear]
            tied = [place for place, row in enumerate(rows) if self.members[row].is_tied]
            for row, owner in zip(rows, owners_of(self.sizes(rows), held, tied), strict=True):
                owners[row] = owner
        return owners


def replicated(divided: Divided) -> Division:
    """Return gradients alone, which all ranks sum whole; sharded ones in FP32 come first."""
    plain, low_precision = divided.by_grad()
    plain.sort(key=lambda row: not divided.members[row].is_sharded)
    grads = [divided.equal(plain, "fp32", 1, 1)] if plain else []
    for group in divided.groups(low_precision):
        grads.append(divided.equal(group, divided.members[group[0]].grad, divided.num_ranks, 1))
    return Division(range(len(divided.members)), grads)


def by_elements(divided: Divided) -> Division:
    """Return buckets of consecutive members of one kind; a rank owns an equal range of each.

    A bucket's gradients and weights lie at the same places of two tensors.
    """
    order: list[int] = []
    grads, weights = [], []
    # the bounds of buckets decide the order of additions, so both ways of counting stay
    unit = ALIGNMENT if divided.is_plain else 1
    for rows in divided.kinds():
        for group in divided.groups(rows, unit):
            first = divided.members[group[0]]
            places = divided.equal(group, first.grad, divided.num_ranks, ALIGNMENT)
            grads.append(places)
            weights.append(replace(places, kind=first.weight))
            order += group
    grads.sort(key=lambda places: places.kind != "fp32")
    return Division(order, grads, weights)


def by_tensors(divided: Divided, owners: Sequence[int] | None = None) -> Division:
    """Return members that ranks own whole: weights of one dtype in one tensor, by their owners.

    Ranges of linears' weights have one size, so that one operation gathers them. Others would be
    padded too much, since one embedding may be most of what there is.
    """
    owner_of, members = owners or divided.owners(), divided.members

    def flat_tensor(rows: Sequence[int], kind: str, *, is_padded: bool) -> Places:
        """Return where the members `rows` lie in a tensor, each in its owner's range."""
        return whole_parts(
            divided.sizes(rows),
            [owner_of[row] for row in rows],
            divided.num_ranks,
            rows=rows,
            kind=kind,
            is_padded=is_padded,
        )

    kinds: dict[tuple[str, bool], list[int]] = {}
    for row, member in enumerate(members):
        kinds.setdefault((member.weight, member.is_linear), []).append(row)
    weights = [
        flat_tensor(rows, dtype, is_padded=linear) for (dtype, linear), rows in kinds.items()
    ]
    grads = []
    for rows in divided.by_grad():
        for group in divided.groups(rows):
            group.sort(key=lambda row: (owner_of[row], not members[row].is_sharded))
            grads.append(flat_tensor(group, members[group[0]].grad, is_padded=False))
    return Division(range(len(members)), grads, weights, owner_of)


class Way(NamedTuple):
    """Hold a way to divide, and whether ranks own parts of members."""

    divide: Callable[[Divided], Division]
    splits: bool = False


WAYS = {
    "replicated": Way(replicated),
    "elements": Way(by_elements, splits=True),
    "tensors": Way(by_tensors),
}
"""The ways to divide, by their names in `OptimSpec.shard_by`.

    replicated   every rank updates every parameter
    elements     a rank updates an equal range of each bucket: ZeRO (arXiv 1910.02054)
    tensors      a rank updates whole parameters: FP8-LM's ZeRO (arXiv 2310.18313, section 2.3,
                 Algorithm 1), where a part of a tensor would be apart from its scale
"""


def padded_rows(num_rows: int, num_ranks: int) -> int:
    """Return the rows of a tensor that FSDP deals to each rank, those of padding included.

    The rule is that of `torch.chunk`: the last ranks may have fewer rows, or none.
    """
    return -(-num_rows // num_ranks)


def rounded_up(count: int, multiple: int) -> int:
    """Return the first multiple of `multiple` that is not below `count`."""
    return -(-count // multiple) * multiple


def _ends(sizes: Sequence[int]) -> tuple[int, ...]:
    return (0, *accumulate(sizes))
