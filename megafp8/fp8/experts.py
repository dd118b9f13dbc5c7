"""Convert experts that transformers fuses into two parameters: each expert has linears of its own.

`gate_up_proj` [E, 2F, D] has an expert's gate rows and then its up rows, and `down_proj` [E, D, F]
leads back. They stay the model's parameters. An expert's linear reads a slice of one, has a name
(`….experts.3.down_proj`) and with it a quantizer and scales, and its gradient goes into the slice.
"""

# T tokens  K experts of a token  R rows of one expert  E experts  D width  F width of an expert

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from megafp8.fp8.converted import CLASSES, Converted, converted_class, is_sharded
from megafp8.fp8.draws import TokenOrder
from megafp8.ops import torch_private

PROJECTIONS = ("gate_up_proj", "down_proj")
ROUTED = ("hidden_states", "top_k_index", "top_k_weights")
LAYOUT = {
    "is_transposed": (False, "its weights lie as [in, out]"),
    "is_concatenated": (True, "its rows of gate and up are interleaved"),
    "has_gate": (True, "it has no gate"),
    "has_bias": (False, "it has biases"),
    "has_post_expert_norm": (False, "it has a norm behind each expert"),
}
"""What transformers says of a module's experts: the value that converted ones have, or a reason."""


class ExpertLinear(nn.Module):
    """Hold an expert's projection: a linear without bias whose weight is a slice of a parameter."""

    bias = None

    def __init__(self, experts: nn.Module, projection: str, index: int) -> None:
        super().__init__()
        self._place = experts, projection, index  # within a tuple it is no submodule

    @property
    def whole(self) -> torch.Tensor:
        """Return the parameter of all experts, or what a parametrization computes in its place."""
        experts, projection, _ = self._place
        return cast(torch.Tensor, getattr(experts, projection))

    @property
    def weight(self) -> torch.Tensor:
        """Return the expert's weight [O, I], a view."""
        return self.whole[self._place[2]]

    def on_tokens(
        self, x_RI: torch.Tensor, weight_OI: torch.Tensor, tokens_R: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        """Return the output [R, O] of the rows of some of `num_tokens` tokens.

        `weight_OI` is the expert's, of a view that serves all experts.
        """
        return F.linear(x_RI, weight_OI)


class Fp8ExpertLinear(Converted, ExpertLinear):  # type: ignore[misc]
    """An expert's projection that `fp8.convert` has converted."""

    def own_weight(self) -> nn.Parameter | None:
        experts, projection, _ = self._place
        return torch_private.parameters_of(experts).get(projection)

    def stored_weights(self) -> Sequence[torch.Tensor]:
        experts, projection, _ = self._place
        found = [p for name, p in experts.named_parameters() if projection in name]
        return found or [self.whole]  # FSDP1 keeps views that are no parameters

    def on_tokens(
        self, x_RI: torch.Tensor, weight_OI: torch.Tensor, tokens_R: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        """Return the output [R, O] of the rows of some tokens, by whose places casts draw."""
        rows = self.fp8.quantizer.rows_of(num_tokens, TokenOrder(), x_RI.device)
        rows = None if rows is None else rows.take(tokens_R)
        return self.run(x_RI, cast(nn.Parameter, weight_OI), None, rows)


CLASSES[ExpertLinear] = Fp8ExpertLinear
Linears = list[tuple[ExpertLinear, ExpertLinear]]  # of each expert


class ConvertedExperts(nn.Module):
    """The part that every converted module of experts has; subclasses say what it was before."""

    fp8_linears: Linears

    @torch.compiler.disable(reason="megafp8's FP8 linears run eagerly and part the graph")  # type: ignore[untyped-decorator,unused-ignore]
    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sums of the tokens' experts, [T, D], as transformers' eager ones.

        `top_k_index` [T, K] are the experts, and numbers from E on stand for none.

        Raises:
            Fp8Error: As `Converted.forward`.
        """
        linears = (linear for pair in self.fp8_linears for linear in pair)
        first = next(each for each in linears if isinstance(each, Fp8ExpertLinear))
        first.fp8.shared.check_samples(first.fp8, hidden_states)
        # Each weight is cast in a microbatch, so that its history rolls whatever tokens choose.
        casts_all = first.fp8.shared.phase == "microbatch" and not first.fp8.shared.is_outside
        routed = hidden_states, top_k_index, top_k_weights
        return _output(self, self.fp8_linears, *routed, with_empty=casts_all)


def _output(
    module: nn.Module,
    linears: Linears,
    x_TD: torch.Tensor,
    experts_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    *,
    with_empty: bool = False,
) -> torch.Tensor:
    """Return the experts' weighted sum for each token, added in the order of experts.

    The rows of an expert are in the order of their tokens. `with_empty` runs experts without rows.
    """
    chosen, num_choices = experts_TK.flatten(), experts_TK.shape[-1]
    # On a GPU `torch.bincount` would wait for two numbers more.
    num, ones = len(linears), chosen.new_ones(()).expand_as(chosen)
    counts = chosen.new_zeros(num + 1).scatter_add_(0, chosen.clamp(max=num), ones)[:num].tolist()
    places = chosen.sort(stable=True).indices[: sum(counts)].split(counts)
    # One view of all experts: its backward pass stacks their gradients, while a slice of each
    # expert would add up as many tensors of the whole parameter's size.
    slices = (cast(torch.Tensor, getattr(module, name)).unbind() for name in PROJECTIONS)
    out_TD = torch.zeros_like(x_TD)
    for (gate_up, down), place_R, gate_up_weight, down_weight in zip(
        linears, places, *slices, strict=True
    ):
        if len(place_R) or with_empty:
            tokens_R = place_R // num_choices
            to = tokens_R, len(x_TD)
            inner_RF = _gated(module, gate_up.on_tokens(x_TD[tokens_R], gate_up_weight, *to))
            rows_RD = down.on_tokens(inner_RF, down_weight, *to)
            rows_RD = rows_RD * weights_TK.flatten()[place_R, None]
            out_TD.index_add_(0, tokens_R, rows_RD.to(out_TD.dtype))
    return out_TD


def _gated(module: nn.Module, gate_up_RF: torch.Tensor) -> torch.Tensor:
    """Return the activation of the gate times up, by the module's own rule if it has one."""
    own: Callable[[torch.Tensor], torch.Tensor] | None = getattr(module, "_apply_gate", None)
    if own is not None:
        return own(gate_up_RF)
    gate_RF, up_RF = gate_up_RF.chunk(2, -1)
    activated: torch.Tensor = cast(nn.Module, module.act_fn)(gate_RF)
    return activated * up_RF


def has_fused_experts(module: nn.Module) -> bool:
    """Whether a module holds the two parameters of fused experts."""
    own = _own(module)
    return all(name in own and own[name].dim() == 3 for name in PROJECTIONS)


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a module holds itself, by name."""
    return dict(module.named_parameters(recurse=False))


def linears_of(module: nn.Module) -> Linears:
    """Return the linears of each expert; those of a converted module are the ones it has."""
    if isinstance(module, ConvertedExperts):
        return module.fp8_linears
    num_experts = len(_own(module)[PROJECTIONS[0]])
    gate_up, down = ([ExpertLinear(module, p, e) for e in range(num_experts)] for p in PROJECTIONS)
    return list(zip(gate_up, down, strict=True))


def named(name: str, linears: Linears) -> dict[str, nn.Module]:
    """Return the linears of the module `name` by their names."""
    return {
        f"{name}.{number}.{projection}".removeprefix("."): linear
        for number, pair in enumerate(linears)
        for projection, linear in zip(PROJECTIONS, pair, strict=True)
    }


def bind_experts(module: nn.Module, linears: Linears) -> None:
    """Let a module compute by its experts' linears, of which at least one is converted."""
    if isinstance(module, ConvertedExperts):
        return
    module.__class__ = converted_class(type(module), ConvertedExperts)
    assert isinstance(module, ConvertedExperts)
    module.fp8_linears = linears
    module.register_load_state_dict_post_hook(_after_load)  # type: ignore[no-untyped-call]


def _after_load(module: nn.Module, keys: object) -> None:
    """Look at the weights that `load_state_dict` has put into a module of experts."""
    assert isinstance(module, ConvertedExperts)
    for pair in module.fp8_linears:
        for linear in pair:
            if isinstance(linear, Fp8ExpertLinear) and not is_sharded(linear.whole):
                linear.fp8.shared.take_weight(linear.fp8, linear.weight.detach())


def why_refused(module: nn.Module) -> str | None:
    """Return why a module's fused experts cannot be converted; None if they can."""
    own = _own(module)
    if isinstance(module, ConvertedExperts):
        return None
    if reasons := [
        why for key, (as_here, why) in LAYOUT.items() if getattr(module, key, as_here) != as_here
    ]:
        return ", ".join(reasons)
    if others := own.keys() - set(PROJECTIONS):
        return f"it has {', '.join(sorted(others))} besides"
    if "forward" in vars(module):
        return "its forward is replaced by an attribute of the instance, so FP8 would never run"
    gate_up, down = (own[name].shape for name in PROJECTIONS)
    if gate_up != (down[0], 2 * down[2], down[1]):
        return f"{[*gate_up]} and {[*down]} are not [E, 2F, D] and [E, D, F]"
    return _differs(module, own)


def _differs(module: nn.Module, own: Mapping[str, nn.Parameter]) -> str | None:
    """Return how a module computes otherwise than converted experts would; None if it does not.

    Both compute the same small random experts in FP32 on the CPU. Activations are large enough to
    meet a limit, if the module has one.
    """
    draw = torch.Generator().manual_seed(0)
    num, tokens, width, inner = len(own[PROJECTIONS[0]]), 16, 16, 8

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device="cpu", dtype=torch.float32)

    weights = drawn(num, 2 * inner, width), drawn(num, width, inner)
    chosen = drawn(tokens, num).sort().indices[:, : min(2, num)]
    routed = 4 * drawn(tokens, width), chosen, drawn(*chosen.shape)
    before = [own[name] for name in PROJECTIONS]
    try:
        for name, weight in zip(PROJECTIONS, weights, strict=True):
            setattr(module, name, nn.Parameter(weight, requires_grad=False))
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            expected = module.forward(**dict(zip(ROUTED, routed, strict=True)))
            got = _output(module, linears_of(module), *routed)
        is_alike = torch.allclose(got, expected, rtol=1e-4, atol=1e-4 * float(got.abs().max()))
    except Exception as error:  # whatever code of others raises
        return f"its forward fails on small experts ({type(error).__name__}: {error})"
    finally:
        for name, weight in zip(PROJECTIONS, before, strict=True):
            setattr(module, name, weight)
    return None if is_alike else "it computes otherwise than experts with a gate, up and down do"
