"""Hold the products that ran, and say which share of them was in FP8."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

State = Literal["in FP8", "asked for and not in FP8", "never asked for", "not known"]
Kind = Literal["linear", "attention", "head"]
STATES: tuple[State, ...] = ("in FP8", "asked for and not in FP8", "never asked for", "not known")
KINDS: tuple[Kind, ...] = ("linear", "attention", "head")
SUSPECT: tuple[State, ...] = ("in FP8", "not known")
SHOWN = 5  # modules that a failure names


class CoverageError(AssertionError):
    """A smaller share of the products ran in FP8 than was asked for, or it is not known."""


@dataclass(frozen=True)
class Product:
    """Describe products that were alike.

    Attributes:
        module: The module's name; of a backward product, that of the module of its forward pass.
        is_backward: Whether a backward pass computed it.
        op: The operation, or what is known of it.
        dtypes: The operands' dtypes.
        shapes: The operands' shapes.
        state: Whether it ran in FP8.
        kind: "attention" are all products of two activations, "head" is the output layer.
        is_emulated: Whether a product of FP8 operands ran in a wider format.
        why: Why its state is not known, or nothing.
    """

    module: str
    is_backward: bool
    op: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    state: State
    kind: Kind = "linear"
    is_emulated: bool = False
    why: str = ""


class Coverage:
    """Count the products of a program: `products` has the calls and FLOPs of each."""

    def __init__(self) -> None:
        self.products: dict[Product, list[int]] = {}
        self.ran: set[str] = set()
        self.asked: set[str] = set()
        self.unseen: set[str] = set()

    def add(self, product: Product, flops: int) -> None:
        """Count one product."""
        found = self.products.setdefault(product, [0, 0])
        found[0] += 1
        found[1] += flops

    def flops(self, *states: State, kinds: Iterable[Kind] = KINDS, emulated: bool = False) -> int:
        """Return the FLOPs of products in these states (all if none is given)."""
        return sum(
            flops
            for product, (_, flops) in self.products.items()
            if product.state in (states or STATES) and product.kind in kinds
            if product.is_emulated or not emulated
        )

    @property
    def share(self) -> float:
        """Return the share of FP8 in the FLOPs of all products but attention and output layer."""
        whole = self.flops(kinds=("linear",))
        return self.flops("in FP8", kinds=("linear",)) / whole if whole else 0.0

    @property
    def not_known(self) -> list[str]:
        """Say which products could not be classified, each in a few words."""
        return [
            f"{p.module or 'outside of modules'}: {p.op} ({p.why})"
            for p in self.products
            if p.state == "not known"
        ]

    @property
    def never_ran(self) -> list[str]:
        """Return the modules that were asked for FP8 and did not run."""
        return sorted(self.asked - self.ran)

    def assert_at_least(self, share: float) -> None:
        """Check that at least this share of the products, by FLOPs, ran in FP8.

        Raises:
            CoverageError: The share is smaller, no product ran, or some could not be classified.
            ValueError: `share` is not above 0 and at most 1.
        """
        if not 0 < share <= 1:
            raise ValueError(f"share={share}: give a number above 0 and up to 1, such as 0.85")
        if not self.products:
            raise CoverageError("No product was recorded. Run the model under the recording.")
        if self.not_known:
            raise CoverageError(
                f"The share of FP8 is not known, because of {_some(self.not_known)}"
            )
        if self.share < share - 1e-9:  # a quotient may be rounded
            raise CoverageError(
                f"{self.share:.1%} of the FLOPs ran in FP8 (attention and output layer apart), "
                f"and {share:.1%} were to. The most that did not: "
                f"{_some(self.missing())}{self._idle()}"
            )

    def assert_kept(self, *names: str) -> None:
        """Check that modules ran, and that none of their products was in FP8.

        `names` are names of modules with * for any text, and mean what is in them too.

        Raises:
            CoverageError: A product of theirs was in FP8 or is not known, or no such module ran.
        """
        for name in names:
            inside = [p for p in self.products if is_named(p.module, (name,))]
            if not inside:
                raise CoverageError(f"{name}: no product of such a module was recorded")
            wrong = {f"{p.module} ({p.op}, {p.state})" for p in inside if p.state in SUSPECT}
            if wrong:
                raise CoverageError(f"{name} was to stay out of FP8: {_some(sorted(wrong))}")

    def missing(self) -> list[str]:
        """Return what did not run in FP8, attention and output layer apart, the most first."""
        whole = self.flops(kinds=("linear",)) or 1
        missing: dict[tuple[str, State], int] = defaultdict(int)
        for product, (_, flops) in self.products.items():
            if product.state != "in FP8" and product.kind == "linear":
                missing[pattern(product.module), product.state] += flops
        ordered = sorted(missing.items(), key=lambda item: -item[1])
        return [
            f"{name or 'outside of modules'} ({state}, {flops / whole:.1%})"
            for (name, state), flops in ordered
        ]

    def _idle(self) -> str:
        idle = self.never_ran
        return f". Asked for FP8 and never ran: {_some(idle)}" if idle else ""

    def table(self) -> str:
        """Return the shares by module, layers of one kind together, and in sum."""
        rows: dict[str, dict[State, int]] = defaultdict(lambda: dict.fromkeys(STATES, 0))
        sums: dict[str, dict[State, int]] = defaultdict(lambda: dict.fromkeys(STATES, 0))
        for product, (_, flops) in self.products.items():
            mark = "" if product.kind == "linear" else f" [{product.kind}]"
            rows[(pattern(product.module) or "(outside)") + mark][product.state] += flops
            sums[product.kind][product.state] += flops
        names = {"linear": "sum", "attention": "attention, apart", "head": "output layer, apart"}
        lines = [("module", "GFLOP", *STATES[:3])]
        lines += [_row(name, counts) for name, counts in sorted(rows.items())]
        lines += [_row(names[kind], sums[kind]) for kind in KINDS if kind in sums]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            "  ".join(
                cell.ljust(width) if not number else cell.rjust(width)
                for number, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        emulated = self.flops("in FP8", emulated=True)
        if emulated:
            text.append(f"emulated in a wider format: {emulated / self.flops('in FP8'):.1%} of FP8")
        text += [f"not known: {line}" for line in self.not_known]
        text += [f"no product seen: {name}" for name in sorted({pattern(n) for n in self.unseen})]
        text += [f"asked and never ran: {n}" for n in sorted({pattern(n) for n in self.never_ran})]
        return "\n".join(text)

    __str__ = table

    def to_dict(self) -> dict[str, Any]:
        """Return everything as what JSON can hold."""
        return {
            "share": self.share,
            "flops": {
                kind: {state: self.flops(state, kinds=(kind,)) for state in STATES}
                for kind in KINDS
            },
            "not_known": self.not_known,
            "never_ran": self.never_ran,
            "no_product_seen": sorted(self.unseen),
            "products": [
                {**asdict(product), "calls": calls, "flops": flops}
                for product, (calls, flops) in self.products.items()
            ],
        }


def pattern(name: str) -> str:
    """Return a module's name with * for numbers, so that the layers of a model are alike."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern with * for any text fits a module's name, or that of one around it."""
    parts = name.split(".")
    outer = [".".join(parts[:number]) for number in range(1, len(parts) + 1)]
    return any(fnmatchcase(part, wanted) for wanted in patterns for part in outer)


def _row(name: str, counts: dict[State, int]) -> tuple[str, ...]:
    whole = sum(counts.values())
    shares = (f"{counts[state] / whole:.1%}" if whole else "?" for state in STATES[:3])
    return (name, f"{whole / 1e9:.6g}", *shares)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return "; ".join(names[:SHOWN]) + more
