"""Say what an FP8 recipe is, beside its rule: its traits, as data without torch.

The checks of settings, the plan, the linears, the communication between ranks and the reports read
traits; none of them asks for a recipe's name. What a recipe does not declare is refused.
"""

# M rows across a product's sum   K elements along it

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

FormatName = Literal["e4m3", "e5m2"]
GemmName = Literal["output", "grad_input", "grad_weight"]
Role = Literal["input", "weight", "grad_output"]
LayoutName = Literal["tensor", "row", "block", "square", "mx", "nv"]
Power2 = Literal["never", "off", "on", "always"]
ROLES: tuple[Role, ...] = get_args(Role)
BLOCK = 128
"""Elements along one side of the blocks that `scaled_mm` knows."""
TENSOR_CORE_MULTIPLE = 16
"""The sizes of operands of FP8 tensor cores are multiples of this number."""
PackedName = Literal["mx", "nv"]
_PACKED: dict[PackedName, tuple[int, int, int]] = {"mx": (32, 8, 0), "nv": (16, 4, 4)}
"""The elements that share a byte of scale, the bits of an element, and the bytes of the factor."""

_LAYOUTS: dict[tuple[int | None, int | None], LayoutName] = {
    (None, None): "tensor",
    (1, None): "row",
    (1, BLOCK): "block",
    (BLOCK, BLOCK): "square",
}


@dataclass(frozen=True)
class Scales:
    """Say which elements of an operand [M, K] share a scale, where the product sums over K.

    `across` counts rows, `along` counts elements of a row; None stands for all of them. `has_outer`
    says that one more FP32 factor applies to the whole operand, so that there are scales of two
    levels (NVFP4).
    """

    across: int | None
    along: int | None
    has_outer: bool = False

    @property
    def is_one(self) -> bool:
        """Whether the whole operand has one scale."""
        return self.across is None and self.along is None

    @property
    def layout(self) -> LayoutName | None:
        """Return the name that `scaled_mm` has for such scales; None: products are emulated."""
        return None if self.has_outer else _LAYOUTS.get((self.across, self.along))

    def shape(self, rows: int, inner: int) -> tuple[int, ...]:
        """Return the shape of the scales of an operand [rows, inner]: () for one scale."""
        if self.is_one:
            return ()
        return -(-rows // (self.across or max(1, rows))), -(-inner // (self.along or max(1, inner)))

    def count(self, rows: int, inner: int) -> int:
        """Return the number of scales of an operand [rows, inner]."""
        down, right = self.shape(rows, inner) or (1, 1)
        return down * right


TENSOR, ROW = Scales(None, None), Scales(1, None)


def blocks(along: int, across: int = 1) -> Scales:
    """Return scales for blocks of `across` rows and `along` elements of the sum."""
    return Scales(across, along)


@dataclass(frozen=True)
class Casts:
    """Say how one tensor of a linear is cast for its two products.

    Attributes:
        last: The scales where the sum runs along the tensor's last dim.
        first: The scales where the sum runs along its first dim.
        serves_both: Whether one quantization serves both products. Otherwise each product reads a
            quantization of its own, made from the tensor in high precision.
        is_random: Whether values are rounded stochastically, so that the rule draws random bytes.
        rotation: The name of an orthogonal matrix that the operand along the first dim is
            multiplied by, along the sum. The product cancels it if the other operand has it too.
    """

    last: Scales
    first: Scales
    serves_both: bool = False
    is_random: bool = False
    rotation: str | None = None


def alike(scales: Scales, *, serves_both: bool = False) -> Casts:
    """Return casts with the same kind of scales along both dims."""
    return Casts(scales, scales, serves_both=serves_both)


@dataclass(frozen=True)
class Cost:
    """Say what a recipe costs on a GPU, for the plan.

    Attributes:
        launches: The kernels that a layer of a GPT and of Llama starts, forward and backward.
            (0, 0) stands for a recipe whose kernels were not counted; the plan then takes the
            largest count of the built-in recipes.
        reads_twice: Whether a cast reads its tensor once more before, for amaxes.
        sums_columns: Whether a cast also adds up the columns, for the gradient of a bias.
        bytes_written: The bytes an element that a cast writes, in two orientations.
    """

    launches: tuple[int, int] = (0, 0)
    reads_twice: bool = False
    sums_columns: bool = False
    bytes_written: float = 2

    @property
    def bytes_of_cast(self) -> float:
        """Return the bytes an element that a cast moves: it reads BF16, and writes operands."""
        return (4 if self.reads_twice else 2) + self.bytes_written


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Say what the program must know of a recipe beside its rule.

    Attributes:
        help: What its scales are computed from: a clause without a subject, for the documentation.
        input: How inputs are cast.
        weight: How weights are cast.
        grad_output: How output gradients are cast.
        backward_formats: The formats that gradients may have; the first is the default. Inputs and
            weights are in E4M3.
        numbers: The numbers of operands: those of the formats, or FP4 (E2M1) instead.
        options: The parts of the rule that settings can switch off (`Recipe.without`).
        is_simulated: Whether the rule returns values in high precision instead of bytes and scales.
            Products then multiply these values; FP8 weights, FP8 messages and FP8 tensor cores are
            refused.
        has_history: Whether scales follow from earlier amaxes, by `update`, in rows of a
            `ScaleTable`: they are known before the tensor, its amaxes are reduced after a pass, and
            checkpoints keep both.
        agrees: Whether ranks that hold parts of a tensor agree on its amax before they cast it.
        commutes: Whether quantizing parts and joining them gives the quantization of the whole, for
            parts whose sizes are multiples of `multiple`. Bytes and scales may then cross ranks.
        agrees_on_columns: Whether ranks that hold parts of the tokens agree on the amaxes of a
            tensor's columns, which have one scale each, before they cast it for the product over
            tokens. Sequence parallelism may then gather bytes; a row is whole on its rank.
        shares_weight: Whether the scale of a weight follows from its amax alone, so that ranks that
            hold parts of the weight can agree on it and cast their parts (FSDP, ZeRO-1).
        power_2: Whether scales are powers of two. `never` and `always` leave no choice; `off` and
            `on` are the defaults of `fp8_power_2_scale`.
        high_precision: The products that the recipe itself keeps out of FP8.
        packs: The kind of scales, in tiles of bytes, with which the recipe's Triton kernels pack
            operands for Blackwell's tensor cores: `mx` (E8M0 for 32 elements) or `nv` (E4M3 for 16
            elements of FP4, and the factor of the whole operand). None: it has no such kernels.
        multiple: The number that sizes are multiples of on each rank.
        pads: Whether other sizes may be padded (`pad_inner_dim`).
        backends: The names that other backends have for the recipe: {"te": "DelayedScaling"}.
        cost: What the plan counts.
        max_saturated: The largest fraction of saturated values that is normal, for a rule that
            saturates by design; health warns of more.
        advised: On GPUs of which compute capabilities it is the recipe to begin with, and why.
    """

    help: str = "its own rule"
    input: Casts
    weight: Casts
    grad_output: Casts
    backward_formats: tuple[FormatName, ...] = ("e4m3",)
    numbers: Literal["fp8", "e2m1"] = "fp8"
    options: tuple[str, ...] = ()
    is_simulated: bool = False
    has_history: bool = False
    agrees: bool = False
    commutes: bool = False
    agrees_on_columns: bool = False
    shares_weight: bool = False
    power_2: Power2 = "always"
    high_precision: frozenset[GemmName] = frozenset()
    packs: PackedName | None = None
    multiple: int = TENSOR_CORE_MULTIPLE
    pads: bool = False
    backends: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    cost: Cost = Cost()
    max_saturated: float = 0.0
    advised: Mapping[tuple[int, int], str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def casts(self) -> dict[Role, Casts]:
        """Return how each of a linear's tensors is cast."""
        return {"input": self.input, "weight": self.weight, "grad_output": self.grad_output}

    @property
    def scales(self) -> tuple[Scales, ...]:
        """Return the kinds of scales that occur."""
        kinds = (s for casts in self.casts.values() for s in (casts.last, casts.first))
        return tuple(dict.fromkeys(kinds))

    @property
    def layouts(self) -> tuple[LayoutName | None, ...]:
        """Return the kinds of scales that occur, as `scaled_mm` names them."""
        if self.packs is not None:
            return (self.packs,)
        if self.is_simulated or self.numbers != "fp8":
            return (None,)
        return tuple(dict.fromkeys(scales.layout for scales in self.scales))

    @property
    def kind(self) -> str:
        """Return the name of its numbers for headers: FP8, FP4 or simulated."""
        if self.is_simulated:
            return "simulated"
        return "FP4" if self.numbers == "e2m1" else "FP8"

    @property
    def is_random(self) -> bool:
        """Whether a tensor is rounded stochastically."""
        return any(casts.is_random for casts in self.casts.values())

    @property
    def is_e4m3(self) -> bool:
        """Whether all tensors are in E4M3, whatever `fp8_hybrid` says."""
        return self.backward_formats == ("e4m3",)

    @property
    def has_one_scale(self) -> bool:
        """Whether every tensor has one scale alone, so that ranks can exchange its bytes."""
        return all(scales.is_one and not scales.has_outer for scales in self.scales)

    @property
    def keeps_weight(self) -> bool:
        """Whether a weight can be kept as FP8 bytes with one tensor of scales for both products."""
        is_plain = self.numbers == "fp8" and not self.weight.last.has_outer
        return self.weight.serves_both and is_plain and not self.is_simulated

    @property
    def gathers_tokens(self) -> bool:
        """Whether sequence parallelism may gather quantized tokens."""
        is_shared = self.has_one_scale and (self.has_history or self.agrees)
        is_known = self.commutes or is_shared or self.agrees_on_columns
        return not self.is_simulated and is_known

    def weight_bytes(
        self, out_features: int, in_features: int, products: Collection[GemmName]
    ) -> int:
        """Return the bytes of the copies of a weight that tensor cores read for some products.

        `output` reads it along its in features, `grad_input` along its out features. The scales of
        packed operands are counted, which are 3 % of MXFP8's bytes and 11 % of NVFP4's.
        """
        shapes = {"output": (out_features, in_features), "grad_input": (in_features, out_features)}
        return sum(self._operand_bytes(*shapes[name]) for name in shapes if name in products)

    def _operand_bytes(self, rows: int, inner: int) -> int:
        if self.packs is None:
            return rows * inner
        return packed_bytes(self.packs, rows, inner)

    @property
    def power_2_is_choice(self) -> bool:
        """Whether `fp8_power_2_scale` acts."""
        return self.power_2 in ("off", "on")

    @property
    def power_2_default(self) -> bool:
        """Whether scales are powers of two unless something else is asked for."""
        return self.power_2 in ("on", "always")


def packed_bytes(kind: PackedName, rows: int, inner: int) -> int:
    """Return the bytes of an operand [rows, inner] that is packed for Blackwell's tensor cores.

    Scales lie in whole tiles of 128 rows x 4 blocks, as `fp8_numerics/swizzle.py` says.
    """
    block, bits, factor = _PACKED[kind]
    tiles = -(-rows // 128) * -(-inner // (4 * block))
    return rows * inner * bits // 8 + 512 * tiles + factor


def contradictions(traits: Traits) -> list[str]:
    """Return which traits contradict each other, or what no recipe may declare; empty: none."""
    return [
        *_wrong_values(traits),
        *_wrong_scales(traits),
        *_wrong_rotations(traits),
        *_wrong_claims(traits),
    ]


def _wrong_values(traits: Traits) -> list[str]:
    wrong = []
    if not traits.backward_formats or set(traits.backward_formats) - set(get_args(FormatName)):
        wrong.append(f"backward_formats={traits.backward_formats} must name e4m3, e5m2 or both")
    if traits.power_2 not in get_args(Power2):
        wrong.append(f"power_2={traits.power_2!r} must be {', '.join(get_args(Power2))}")
    if unknown := set(traits.high_precision) - set(get_args(GemmName)):
        wrong.append(f"high_precision names {sorted(unknown)[0]}, which is no product of a linear")
    if not isinstance(traits.multiple, int) or traits.multiple < 1:
        wrong.append(f"multiple={traits.multiple} must be a whole number from 1")
    return wrong


def _wrong_scales(traits: Traits) -> list[str]:
    wrong = []
    for role, casts in traits.casts.items():
        for scales in (casts.last, casts.first):
            for size in (scales.across, scales.along):
                if size is not None and (size < 1 or traits.multiple % size):
                    wrong.append(
                        f"multiple={traits.multiple} is not a multiple of the blocks of {size} "
                        f"that {role} has"
                    )
        if casts.serves_both and casts.last != Scales(
            casts.first.along, casts.first.across, casts.first.has_outer
        ):
            wrong.append(f"{role} serves both products with other blocks for each of the two")
    return list(dict.fromkeys(wrong))


def _wrong_rotations(traits: Traits) -> list[str]:
    wrong = []
    for role, casts in traits.casts.items():
        if casts.serves_both and casts.rotation:
            wrong.append(f"{role} is rotated for one product alone, and so cannot serve both")
    if traits.input.rotation != traits.grad_output.rotation:
        wrong.append("input and grad_output are not rotated alike, so that no product cancels it")
    if traits.weight.rotation:
        wrong.append("weight is rotated, and the product for grad_input has no other such operand")
    return wrong


def _wrong_claims(traits: Traits) -> list[str]:
    wrong, has_outer = [], any(scales.has_outer for scales in traits.scales)
    if traits.commutes and has_outer and not traits.agrees:
        wrong.append("commutes=True with a factor of the whole tensor needs agrees=True")
    if traits.has_history and not traits.has_one_scale:
        wrong.append("has_history=True needs one scale for each tensor (TENSOR)")
    casts = traits.casts.values()
    if traits.has_history and not all(cast.serves_both for cast in casts):
        wrong.append("has_history=True needs one quantization for both products (serves_both)")
    is_rounded = traits.numbers == "fp8" and not any(cast.is_random for cast in casts)
    if traits.has_history and (traits.is_simulated or not is_rounded):
        wrong.append("has_history=True rounds to FP8, without is_simulated, numbers and is_random")
    if traits.has_history and traits.agrees:
        wrong.append("has_history=True and agrees=True exclude each other")
    of_tokens = {traits.input, traits.grad_output}
    if traits.agrees_on_columns and (traits.agrees or of_tokens != {alike(ROW)}):
        wrong.append("agrees_on_columns=True needs ROW for input and grad_output, without agrees")
    if traits.shares_weight and not (traits.keeps_weight and traits.weight.last.is_one):
        wrong.append("shares_weight=True needs one scale for a weight, for both of its products")
    if traits.is_simulated and (traits.backends or traits.numbers != "fp8"):
        wrong.append("is_simulated=True excludes backends and numbers")
    return wrong
