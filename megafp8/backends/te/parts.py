"""Make the parts of a GPT whose layers are Transformer Engine's `TransformerLayer`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import nn

from megafp8.backends.te.dryrun import cuda_is_meta
from megafp8.backends.te.layer import HeadDropout, TeLayer
from megafp8.backends.te.quantized import is_quantized
from megafp8.backends.te.state import TeGemm, TeRegion, TeScaling, TeTensor
from megafp8.backends.te.weights import (
    forget_staged_amax,
    leave_meta,
    quantize_without_values,
    to_be_gathered,
)
from megafp8.fp8.scaling import Direction
from megafp8.models.block import TransformerLayer
from megafp8.models.init import are_later, pieces_of
from megafp8.models.parts import both_contexts
from megafp8.models.positions import alibi_slopes
from megafp8.parallel.parts import NativeParts, PartsArgs
from megafp8.specs import Fp8Recipe, GPTSpec
from megafp8.specs.layer import linear_names
from megafp8.specs.model import Activation, Normalization
from megafp8.specs.precision import AttentionInFp8
from megafp8.specs.recipes import HIGH_PRECISION

Part = tuple[str, str, tuple[tuple[str, Direction, str], ...]]

# Transformer Engine's parameters by our logical names, less `layers.N.`. A fused one goes by the
# first of its pieces: query, key and value; gate and up.
PARAMETERS = {
    f"{ours}.{kind}": f"{theirs}{kind}"
    for ours, theirs in {
        "attention_norm": "self_attention.layernorm_qkv.layer_norm_",
        "attention.query": "self_attention.layernorm_qkv.",
        "attention.query_norm": "self_attention.q_norm.",
        "attention.key_norm": "self_attention.k_norm.",
        "attention.projection": "self_attention.proj.",
        "mlp_norm": "layernorm_mlp.layer_norm_",
        "mlp.fc1": "layernorm_mlp.fc1_",
        "mlp.gate": "layernorm_mlp.fc1_",
        "mlp.fc2": "layernorm_mlp.fc2_",
    }.items()
    for kind in ("weight", "bias")
}
# (module, which of its GEMMs, how many it has, the weight in it) of each of our linears
GEMM_OF = {
    "attention.qkv": ("self_attention.layernorm_qkv", 1, 1, "weight"),
    "attention.projection": ("self_attention.proj", 1, 1, "weight"),
    "mlp.fc1": ("layernorm_mlp", 1, 2, "fc1_weight"),
    "mlp.fc2": ("layernorm_mlp", 2, 2, "fc2_weight"),
}
# (part of our names, module, tensors by (our name, direction, column)), by what is in FP8. The
# columns of its core are those of Transformer Engine's cpp_extensions/fused_attn.py.
_CORE: tuple[Part, ...] = (
    (
        "core",
        "self_attention.core_attention",
        (
            ("qkv", "forward", "GEMM1_OUTPUT"),
            ("output", "forward", "GEMM2_INPUT"),
            ("scores", "forward", "GEMM3_OUTPUT"),
            ("grad_qkv", "backward", "GRAD_OUTPUT1"),
            ("grad_output", "backward", "GRAD_INPUT2"),
            ("grad_scores", "backward", "GRAD_INPUT3"),
        ),
    ),
)
# Since 2.12 the projection hands attention an FP8 gradient wherever attention is in FP8; 2.4 does
# so with `fp8_mha` alone, and leaves the row unused otherwise.
_PROJECTION: tuple[Part, ...] = (
    ("projection", "self_attention.proj", (("grad_input", "backward", "GRAD_INPUT1"),)),
)
_QKV: tuple[Part, ...] = (
    ("qkv", "self_attention.layernorm_qkv", (("output", "forward", "GEMM1_OUTPUT"),)),
)
ATTENTION_TENSORS: dict[AttentionInFp8, tuple[Part, ...]] = {
    "none": (),
    "core": _CORE + _PROJECTION,
    "whole": _CORE + _PROJECTION + _QKV,
}
ACTIVATIONS: dict[Activation, str] = {
    "gelu-tanh": "gelu",
    "geglu-tanh": "geglu",
    "squared-relu": "srelu",
    "swiglu": "swiglu",
    "reglu": "reglu",
}
NORMALIZATIONS: dict[Normalization, str] = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}


def casts_gathered_weights_always(layer: nn.Module) -> bool:
    """Whether this version casts weights that FSDP gathers in each pass, and keeps no FP8 copy.

    2.20 does, forward and backward, and 2.12 does not. Its modules have a property for it then.
    """
    return hasattr(type(layer.get_submodule("layernorm_mlp")), "is_fsdp2")


def kinds_of_layers(spec: GPTSpec, recipe: Fp8Recipe | None) -> list[bool]:
    """Return which kinds of layers a model has: in FP8 (True) or not, or both."""
    layers = range(spec.num_layers)
    kinds = {recipe is not None and is_layer_in_fp8(recipe, index) for index in layers}
    return sorted(kinds, reverse=True)


def tensors_of_attention(
    in_fp8: AttentionInFp8, layer: nn.Module, index: int
) -> Iterator[TeTensor]:
    """Yield the tensors of attention that have scales of their own where it runs in FP8.

    Transformer Engine uses columns for them that are named after products, of which attention
    counts as three.
    """
    for part, path, columns in ATTENTION_TENSORS[in_fp8]:
        module = layer.get_submodule(path)
        for role, direction, column in columns:
            name = f"layers.{index}.attention.{part}.{role}"
            yield TeTensor(name, module, direction, column, num_gemms=3 if part == "core" else 1)


def is_layer_in_fp8(recipe: Fp8Recipe, index: int) -> bool:
    """Whether the linears of a layer are in FP8: the checks let them be so all or none."""
    return all(recipe.precision_of(name) != HIGH_PRECISION for name in linear_names([index]))


class TransformerEngineParts(NativeParts):
    """Make Transformer Engine's layers; embedding, final norm and head are our own.

    Weights get our own initial values, by logical name.
    """

    def __init__(
        self,
        parts_args: PartsArgs,
        *,
        region: TeRegion,
        te_scaling: TeScaling | None,
        device: torch.device,
        recipe: Fp8Recipe | None,
        user_buffers: bool = False,
        attention_in_fp8: AttentionInFp8 = "none",
        packs: bool = False,
    ) -> None:
        """Make no part yet; with `packs` the layers keep documents apart."""
        super().__init__(parts_args)
        self.packs = packs
        self.region, self.te_scaling, self.device = region, te_scaling, device
        self.recipe, self.user_buffers = recipe, user_buffers
        self.attention_in_fp8 = attention_in_fp8

    @property
    def context_spec(self) -> GPTSpec:
        """Return the spec of what all layers share in attention.

        ALiBi and windows are not part of it: Transformer Engine makes that bias from the slopes,
        and its masks itself.
        """
        spec = dataclasses.replace(self.spec, window_size=None, window_attn_skip_freq=None)
        if spec.position_embedding_type != "alibi":
            return spec
        return dataclasses.replace(spec, position_embedding_type="none")

    @cached_property
    def alibi_slopes(self) -> torch.Tensor | None:
        """Return the slopes of this rank's heads in FP32, or None for a model without ALiBi."""
        if self.spec.position_embedding_type != "alibi":
            return None
        slopes = alibi_slopes(self.spec.num_attention_heads)[self.local_heads()]
        return torch.tensor(slopes, dtype=torch.float32, device=self.device)

    @property
    def sums_in_products(self) -> bool:
        """Whether products add the gradients of weights to FP32 sums, instead of autograd.

        FSDP has no such sums, and a dry run has no values to add.
        """
        return not self.gathers_weights and self.device.type != "meta"

    def recomputed(self, function: Callable[..., Any], *args: Any) -> torch.Tensor:
        """Return `function(*args)`; backward recomputes its activations instead of keeping them.

        Transformer Engine's own function does it, as the one of torch would record the amaxes of a
        recomputation again. Its variant that is not reentrant updates the backward scales once a
        microbatch, and the reentrant one after each module.
        """
        checkpoint = self.region.names.checkpoint
        out: torch.Tensor = checkpoint(
            function, *args, use_reentrant=False, context_fn=self.recompute_contexts
        )
        return out

    def recompute_contexts(
        self,
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, again = super().recompute_contexts()
        return first, both_contexts(again, self.region.recomputation())

    def own_layer(self, index: int) -> nn.Module:
        """Return Transformer Engine's layer `index` (from 0) with our initial weights.

        In a dry run its scales and amaxes have no values either, as those that its forward pass
        makes later.
        """
        with cuda_is_meta() if self.device.type == "meta" else nullcontext():
            return self._own_layer(index)

    def _own_layer(self, index: int) -> TeLayer:
        """Make the layer, register its FP8 tensors, and say what FSDP gathers of it."""
        names, recipe = self.region.names, self.recipe
        in_fp8 = recipe is not None and is_layer_in_fp8(recipe, index)
        weights_in_fp8 = in_fp8 and recipe is not None and recipe.params_in_fp8
        context = names.model_init(self.region.recipe) if weights_in_fp8 else nullcontext()
        with context:
            layer = names.transformer_layer(**self.arguments(index))
        if self.spec.qk_layernorm:  # its earlier versions make them in FP32, whatever the layer is
            layer.get_submodule("self_attention.q_norm").to(self.dtype)
            layer.get_submodule("self_attention.k_norm").to(self.dtype)
        if weights_in_fp8 and self.device.type == "meta" and not are_later():
            quantize_without_values(layer, self._weights(layer))
        self._adopt(layer, index, TransformerLayer(self, index))
        if are_later():
            leave_meta(layer, self.device)
        if self.spec.recompute is not None:
            # Recomputation that is not reentrant switches this fusion off at the first call.
            mlp: Any = layer.get_submodule("layernorm_mlp")
            mlp.bias_gelu_nvfusion = False
        if self.te_scaling is not None and in_fp8:
            for name in linear_names([index]):
                path, number, num_gemms, _ = GEMM_OF[name.removeprefix(f"layers.{index}.")]
                gemm = TeGemm(name, layer.get_submodule(path), number, num_gemms)
                self.te_scaling.register(gemm, index)
            for tensor in tensors_of_attention(self.attention_in_fp8, layer, index):
                self.te_scaling.register_tensor(tensor, index)
        slopes = self.alibi_slopes
        options = {"in_fp8": in_fp8, "packs": self.packs}
        te_layer = TeLayer(layer, self, self.region, index, alibi_slopes=slopes, **options)
        if in_fp8 and self.attention_in_fp8 != "none":
            te_layer.attention_dtype = "fp8"
        te_layer.weight_paths = tuple(self._weights(layer))
        if self.sums_in_products:
            te_layer.summed_in_products = te_layer.weights
        if self.gathers_weights and not weights_in_fp8 and casts_gathered_weights_always(layer):
            self.region.cast_always.add(index)
        if weights_in_fp8 and self.gathers_weights:
            te_layer.gathered = to_be_gathered(self._weights(layer), names, self.dtype)
        return te_layer

    def _weights(self, layer: nn.Module) -> dict[str, tuple[Any, int]]:
        """Return the modules of the layer's linears, and their columns in the modules' quantizers.

        They go by the paths of the linears' weights.
        """
        index, columns = self.region.names.forward_index, {}
        for path, number, _, weight in GEMM_OF.values():
            column = int(getattr(index, f"GEMM{number}_WEIGHT"))
            columns[f"{path}.{weight}"] = (layer.get_submodule(path), column)
        return columns

    def arguments(self, index: int) -> dict[str, Any]:
        """Return what `TransformerLayer` is made with. Its layers count from 1.

        With `fuse_qkv_params` and without interleaving, the QKV weight's rows are this rank's
        query, key and value in turn, as in ours.
        """
        spec = self.spec
        tracker = HeadDropout(self.streams, f"layers.{index}.attention.dropout", self.device)
        is_parallel = self.tp.size > 1
        return {
            "hidden_size": spec.hidden_size,
            "ffn_hidden_size": spec.ffn_hidden_size,
            "num_attention_heads": spec.num_attention_heads,
            "num_gqa_groups": spec.num_kv_heads,
            "kv_channels": spec.head_size,
            "layernorm_epsilon": spec.layernorm_epsilon,
            "hidden_dropout": spec.hidden_dropout,
            "attention_dropout": spec.attention_dropout,
            "layer_number": index + 1,
            "self_attn_mask_type": "padding_causal" if self.packs else "causal",
            "tp_group": self.tp.group if is_parallel else None,
            "tp_size": self.tp.size,
            "params_dtype": self.dtype,
            "get_rng_state_tracker": (lambda: tracker) if is_parallel else None,
            "sequence_parallel": self.sequence_parallel,
            "set_parallel_mode": is_parallel,
            "fuse_qkv_params": True,
            "qkv_weight_interleaved": False,
            "bias": spec.bias,
            "fuse_wgrad_accumulation": self.sums_in_products,
            "ub_tp_comm_overlap": self.user_buffers,
            "activation": ACTIVATIONS[spec.activation],
            "normalization": NORMALIZATIONS[spec.normalization],
            "zero_centered_gamma": spec.layernorm_zero_centered_gamma,
            # It compares this with the text "meta", and then makes no values.
            "device": "meta" if are_later() or self.device.type == "meta" else self.device,
            "attn_input_format": self.form,
            **self._norms_of_heads(),
            **self._window(index),
        }

    def _window(self, index: int) -> dict[str, Any]:
        """Return the argument about a window: how many earlier and later keys a query sees."""
        window = self.spec.window_of(index)
        return {} if window is None else {"window_size": (window, 0)}

    def _norms_of_heads(self) -> dict[str, Any]:
        """Return the arguments about norms of queries and keys, which old versions do not know."""
        if not self.spec.qk_layernorm:
            return {}
        return {
            "qk_norm_type": NORMALIZATIONS[self.spec.normalization],
            "qk_norm_eps": self.spec.layernorm_epsilon,
            "qk_norm_before_rope": True,
        }

    @property
    def form(self) -> str:
        """Return the order of the dims of what its layers get, in its words.

        Its linears gather and scatter along the first dim, so parts of sequences lead there.
        Documents are all in one row.
        """
        if self.packs:
            return "thd"
        return "sbhd" if self.sequence_parallel else "bshd"

    @torch.no_grad()
    def _adopt(self, layer: nn.Module, index: int, native: nn.Module) -> None:
        """Give Transformer Engine's parameters our initial values, pieces and FP32 masters.

        The masters are our FP32 initialization itself, which is more than what its
        `preserve_high_precision_init_val` would keep. Inside `values_later` our parameters, which
        have no values yet, take the place of its own.
        """
        ours = {
            PARAMETERS[pieces_of(p)[0].name.removeprefix(f"layers.{index}.")]: p
            for p in native.parameters()
        }
        theirs = {name: p for name, p in layer.named_parameters() if p.numel() > 0}
        if set(ours) != set(theirs):
            odd = sorted(set(ours) ^ set(theirs))
            raise RuntimeError(f"Transformer Engine's layer and ours differ in {odd}")
        for path, source in ours.items():
            target: Any = theirs[path]
            if source.shape != target.shape:
                raise RuntimeError(f"{path} is {target.shape}, ours {source.shape}")
            if are_later():
                owner, _, name = path.rpartition(".")
                setattr(layer.get_submodule(owner), name, source)
                continue
            forget_staged_amax(target)
            target.copy_(source)
            initial = source.initial_master  # type: ignore[attr-defined]
            if initial is None and is_quantized(target):
                initial = source.detach().clone()
            target.pieces, target.initial_master = pieces_of(source), initial
