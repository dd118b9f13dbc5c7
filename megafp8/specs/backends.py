"""State what packages without torch must know of a backend: its bytes, its limits and its words.

This is the part without torch of `megafp8/backends/protocol.py`. What Transformer Engine's layers
cannot do is the table of `megafp8/config/te_layers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megafp8.specs.layer import first_and_last_linear
from megafp8.specs.precision import BackendName, Fp8Recipe, ModulePrecision
from megafp8.specs.recipes import HIGH_PRECISION

TE_IS_PROVEN_ON_GPUS = False
"""Whether tests/gpu/test_te_gpu.py has passed on a GPU; before that, `model.fp8_backend=auto` means
`native`."""


@dataclass(frozen=True, kw_only=True)
class BackendTraits:
    """Describe a backend to plan and checks.

    Attributes:
        note: For which backend's layers the figures of a plan hold.
        keeps_inputs: Whether its linears keep their inputs in the compute dtype for the backward
            pass, also where the product is in FP8.
        copies_weights: Whether it keeps FP8 copies of weights for a whole step.
        casts_gathered_from: The first version of its package that keeps no copies of weights that
            FSDP gathers; None if no version does.
        transposes_gathered: Whether a weight that FSDP gathers in FP8 has its transpose besides,
            and not a tensor of the compute dtype.
        keeps_ends_high: Whether the model's first and last linear stay in high precision unless a
            rule names them.
        draws_at_once: Whether its layers have values from the moment when they are built, except
            with FSDP, for which all layers are built without memory (`models.init.values_later`).
        weight_gradients: What a product makes of a weight's gradient where FP32 sums of gradients
            are kept: `added` to the sum by the product, `fp32`, which only the first product of a
            step writes into the sum itself, or in the compute dtype (`work`), for autograd.
        is_counted: Whether the plan counts its weights and scales exactly; otherwise it may keep
            them in another form.
    """

    note: str
    keeps_inputs: bool = False
    copies_weights: bool = True
    casts_gathered_from: str | None = None
    transposes_gathered: bool = False
    keeps_ends_high: bool = False
    draws_at_once: bool = False
    weight_gradients: Literal["added", "fp32", "work"] = "fp32"
    is_counted: bool = False

    @property
    def depends_on_version(self) -> bool:
        """Whether a plan depends on the version of its package."""
        return self.casts_gathered_from is not None

    def copies_gathered(self, version: str | None) -> bool:
        """Whether a version of its package keeps FP8 copies of weights that FSDP gathers.

        None stands for the version that runs where none was asked for.
        """
        if (first := self.casts_gathered_from) is None:
            return False
        # Imported here: a run with our own layers needs nothing of Transformer Engine.
        from megafp8.specs.te_versions import DEFAULT_VERSION, release_of

        return release_of(version or DEFAULT_VERSION) < release_of(first)

    def precision_of(self, recipe: Fp8Recipe, linear: str, num_layers: int) -> ModulePrecision:
        """Return the recipe under which the linear of this name runs, in a model of many layers."""
        if self.keeps_ends_high and linear in first_and_last_linear(num_layers):
            is_named = any(rule.matches(linear) for rule in recipe.modules)
            return recipe.precision_of(linear) if is_named else HIGH_PRECISION
        return recipe.precision_of(linear)


BACKENDS: Mapping[BackendName, BackendTraits] = {
    "native": BackendTraits(
        note="Figures are those of our own layers (native).",
        is_counted=True,
    ),
    "te": BackendTraits(
        note="Backend te: Transformer Engine's FP8 copies of weights, in two orientations, are "
        "counted; its activations, workspace and time are taken to be those of our own layers.",
        casts_gathered_from="2.16",
        transposes_gathered=True,
        draws_at_once=True,
        weight_gradients="added",
    ),
    "torchao": BackendTraits(
        note="Backend torchao: its linears keep their inputs in the compute dtype and no FP8 "
        "copies of weights, as counted here; their time is taken to be that of our own linears.",
        keeps_inputs=True,
        copies_weights=False,
        keeps_ends_high=True,
        weight_gradients="work",
    ),
}
