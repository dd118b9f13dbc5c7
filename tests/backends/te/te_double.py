"""A recording stand-in for Transformer Engine on a CPU.

Its signatures are those of the real sources (te_signatures.json): a call with an argument that a
version does not have fails. What it computes is written from Transformer Engine's documented
semantics and imports nothing of megafp8: pre-norm layer, QKV rows by head or in blocks, GELU in
its tanh form, delayed scaling by the fused update at the exit of the outermost region (forward)
and after the first module's backward (backward), over amaxes that are reduced within the region's
group, of which None means all ranks. Also what its sources showed to be traps: a layer made in FP8
quantizes its own random weights and stages their amaxes; sizes are asserted at the first forward;
the MLP asserts that a recipe overrides nothing in backward; NVTE_UNFUSED_FP8_UPDATE=1 is another
update.
"""

# B batch  S sequence  D model width

from __future__ import annotations

import ast
import enum
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.backends.te import te_ranks
from tests.backends.te.te_scales import Quantized, Quantizer, State

SIGNATURES: dict[str, dict[str, list[dict[str, Any]]]] = json.loads(
    Path(__file__).with_name("te_signatures.json").read_text("utf-8")
)
VERSIONS = tuple(SIGNATURES)
KINDS = {
    "positional or keyword": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "keyword-only": inspect.Parameter.KEYWORD_ONLY,
    "variadic positional": inspect.Parameter.VAR_POSITIONAL,
    "variadic keyword": inspect.Parameter.VAR_KEYWORD,
}


class FP8FwdTensors(enum.IntEnum):
    """The columns of a module's forward tensors (pytorch/csrc/common.h)."""

    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5


class FP8BwdTensors(enum.IntEnum):
    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3


class Format(enum.Enum):
    """Largest numbers of (forward, backward)."""

    E4M3 = (448.0, 448.0)
    HYBRID = (448.0, 57344.0)


@dataclass(frozen=True)
class MMParams:
    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    power_2_scale: bool = False
    amax_epsilon: float = 0.0


def signature(version: str, name: str) -> inspect.Signature:
    """A callable's real signature, without `self`."""
    return inspect.Signature(
        [
            inspect.Parameter(p["name"], KINDS[p["kind"]], default=_default(p))
            for p in SIGNATURES[version][name]
        ]
    )


def _default(parameter: dict[str, Any]) -> Any:
    if "default" not in parameter:
        return inspect.Parameter.empty
    try:
        return ast.literal_eval(parameter["default"])
    except ValueError:
        return parameter["default"]  # an expression: as text


def recipe_classes(version: str) -> SimpleNamespace:
    """Recipe classes with the real fields, as careless as the real ones: they swallow the rest."""

    def make(name: str) -> type:
        fields = {p["name"]: _default(p) for p in SIGNATURES[version][name]}

        def init(self: Any, **given: Any) -> None:
            for key, default in fields.items():
                setattr(self, key, given.get(key, default))

        quantizers = {
            key: QParams() for key in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight",
                                       "fp8_quant_bwd_grad")
        }  # fmt: skip
        body = {"__init__": init, "__dataclass_fields__": fields, **quantizers}
        return type(name, (), body)

    names = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")
    there = {name: make(name) for name in names if name in SIGNATURES[version]}
    return SimpleNamespace(Format=Format, QParams=QParams, MMParams=MMParams, **there)


@dataclass
class Call:
    """One call: its name, and its arguments as bound by the real signature."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


class Double:
    """One version's stand-in: `pytorch`, `recipe` and `extension` are its three modules."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.calls: list[Call] = []
        self.recipe = recipe_classes(version)
        # What runs is counted at `generic_gemm`, which this double does not call.
        self.extension = SimpleNamespace(
            FP8FwdTensors=FP8FwdTensors, FP8BwdTensors=FP8BwdTensors, generic_gemm=None
        )
        self.depth = 0
        self.enabled = False
        self.fp8_recipe: Any = None
        self.group: Any = None  # of the newest region
        self.fp8_parameters = False
        self.recipe_of_parameters: Any = None
        self.modules: list[Module] = []  # that ran in a region, in order
        self.is_first_module = False
        double = self

        class TransformerLayer(Layer):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(double, *args, **kwargs)

        class FP8GlobalStateManager:
            @classmethod
            def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
                double.update("scaling_fwd" if forward else "scaling_bwd")

        self.global_state = FP8GlobalStateManager
        base = SimpleNamespace(FP8GlobalStateManager=FP8GlobalStateManager)
        self.pytorch = SimpleNamespace(
            TransformerLayer=TransformerLayer, module=SimpleNamespace(base=base), checkpoint=None
        )
        for name in ("autocast", "fp8_autocast", "quantized_model_init", "fp8_model_init"):
            if name in SIGNATURES[version]:
                setattr(self.pytorch, name, self._context(name))

    def record(self, name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        bound = signature(self.version, name).bind(*args, **kwargs)
        bound.apply_defaults()
        self.calls.append(Call(name, dict(bound.arguments)))
        return dict(bound.arguments)

    def named(self, *names: str) -> list[Call]:
        return [call for call in self.calls if call.name in names]

    def _context(self, name: str) -> Any:
        run = self._autocast if name.endswith("autocast") else self._model_init

        @contextmanager
        def context(*args: Any, **kwargs: Any) -> Iterator[None]:
            arguments = self.record(name, *args, **kwargs)
            with run(arguments):
                yield
            self.calls.append(Call(f"{name} exit"))

        return context

    @contextmanager
    def _autocast(self, arguments: dict[str, Any]) -> Iterator[None]:
        before = self.enabled, self.fp8_recipe
        self.enabled = arguments["enabled"]
        self.fp8_recipe = arguments.get("recipe", arguments.get("fp8_recipe"))
        self.group = arguments.get("amax_reduction_group", arguments.get("fp8_group"))
        if self.depth == 0:
            self.is_first_module = True
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            enabled = self.enabled
            self.enabled, self.fp8_recipe = before
            if enabled and self.depth == 0 and torch.is_grad_enabled():
                self.global_state.reduce_and_update_fp8_tensors(forward=True)

    @contextmanager
    def _model_init(self, arguments: dict[str, Any]) -> Iterator[None]:
        self.fp8_parameters = arguments["enabled"]
        self.recipe_of_parameters = arguments["recipe"]
        yield
        self.fp8_parameters = False

    def update(self, key: str) -> None:
        """The fused update of every module's tensors in one direction."""
        self.calls.append(Call(f"update {key}"))
        modules = dict.fromkeys(self.modules)
        states = [module.fp8_meta[key] for module in modules if key in module.fp8_meta]
        if not states:
            return
        amaxes = torch.cat([state.amax_history[0] for state in states])
        is_reduced = states[0].recipe.reduce_amax and dist.is_initialized()
        if is_reduced and dist.get_world_size(self.group) > 1:
            dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=self.group)
        counts = [state.amax_history.shape[1] for state in states]
        for state, own in zip(states, amaxes.split(counts), strict=True):
            state.amax_history[0] = own
            state.update()


class Module(nn.Module):
    """What LayerNormLinear, Linear and LayerNormMLP share: FP8 state and its methods."""

    def __init__(self, layer: Layer, num_gemms: int) -> None:
        super().__init__()
        self.double, self.num_gemms, self.ranks = layer.double, num_gemms, layer.ranks
        self.fp8_meta: dict[str, Any] = {}
        self.cached: dict[int, torch.Tensor] = {}

    def init_fp8_meta_tensors(self, *args: Any, **kwargs: Any) -> None:
        recipe = self.double.record("init_fp8_meta_tensors", *args, **kwargs)["recipe"]
        assert self.fp8_meta["num_gemms"] == self.num_gemms
        if "scaling_fwd" not in self.fp8_meta and hasattr(recipe, "amax_history_len"):
            forward, backward = recipe.fp8_format.value
            self.fp8_meta["scaling_fwd"] = State(recipe, 3 * self.num_gemms, forward)
            self.fp8_meta["scaling_bwd"] = State(recipe, 2 * self.num_gemms, backward)

    def get_fp8_meta_tensors(self) -> dict[str, list[torch.Tensor]]:
        self.double.record("get_fp8_meta_tensors")
        return {
            key: [self.fp8_meta[key].scale.clone(), self.fp8_meta[key].amax_history.clone()]
            for key in ("scaling_fwd", "scaling_bwd")
        }

    def reset_fp8_meta_tensors(self, *args: Any, **kwargs: Any) -> None:
        kept = self.double.record("reset_fp8_meta_tensors", *args, **kwargs)["fp8_meta_tensors"]
        for key in ("scaling_fwd", "scaling_bwd"):
            self.fp8_meta[key].scale.copy_(kept[key][0])
            self.fp8_meta[key].amax_history.copy_(kept[key][1])

    def gemm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        number: int,
        is_first_microbatch: bool | None,
    ) -> torch.Tensor:
        """Column-parallel unless it is its layer's projection or FC2."""
        if self.double.enabled:
            self._check(x, weight)
        is_row = isinstance(self, Linear) or number == 2
        if not is_row:
            x = te_ranks.into_columns(x, self.ranks)
        out = self._product(x, weight, number, is_first_microbatch)
        if is_row:
            out = te_ranks.out_of_rows(out, self.ranks)
        return out if bias is None else out + bias

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor, number: int, is_first_microbatch: bool | None
    ) -> torch.Tensor:
        double = self.double
        delayed = double.enabled and hasattr(double.fp8_recipe, "amax_history_len")
        if not delayed:
            return F.linear(x, weight)
        if "scaling_fwd" not in self.fp8_meta:
            self.fp8_meta["num_gemms"] = self.num_gemms
            self.init_fp8_meta_tensors(double.fp8_recipe)
        double.modules.append(self)
        is_first, double.is_first_module = double.is_first_module, False
        state: State = self.fp8_meta["scaling_fwd"]
        x_q = state.cast(x, FP8FwdTensors[f"GEMM{number}_INPUT"])
        if isinstance(weight, Quantized):
            w_q = weight.detach().float()  # as it is kept: cast, and its amax staged, by `copy_`
        elif is_first_microbatch is False:
            w_q = self.cached[number]
        else:
            w_q = state.cast(weight, FP8FwdTensors[f"GEMM{number}_WEIGHT"])
            if is_first_microbatch is True:
                self.cached[number] = w_q
        out: torch.Tensor = Gemm.apply(x, weight, x_q, w_q, self, number, is_first)
        return out

    def _check(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        """`assert_dim_for_fp8_exec`, and what its MLP does not have."""
        for tensor in (x, weight):
            assert tensor.shape[:-1].numel() % 8 == 0 and tensor.shape[-1] % 16 == 0, (
                f"FP8 execution requires other dims than {list(tensor.shape)}"
            )
        override = getattr(self.double.fp8_recipe, "backward_override", None)
        assert self.num_gemms == 1 or override is None, "not implemented in LayerNormMLP"


class Gemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, x_q: Any, w_q: Any, module: Any, number: int,
                is_first: bool) -> torch.Tensor:  # fmt: skip
        ctx.module, ctx.number, ctx.is_first = module, number, is_first
        ctx.save_for_backward(x_q, w_q)
        return (x_q @ w_q.t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (grad,) = grads
        x_q, w_q = ctx.saved_tensors
        column = FP8BwdTensors[f"GRAD_OUTPUT{ctx.number}"]
        g_q = ctx.module.fp8_meta["scaling_bwd"].cast(grad, column)
        if ctx.is_first:  # the first module is the last in backward
            ctx.module.double.global_state.reduce_and_update_fp8_tensors(forward=False)
        grad_weight = g_q.flatten(0, -2).t() @ x_q.flatten(0, -2)
        return (g_q @ w_q).to(grad.dtype), grad_weight.to(grad.dtype), *[None] * 5


def normal(out: int, width: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(0.023 * torch.randn(out, width).to(dtype))


class Normed(Module):
    """A module that begins with a norm over `width`."""

    def __init__(self, layer: Layer, num_gemms: int) -> None:
        super().__init__(layer, num_gemms)
        width, dtype = layer.given["hidden_size"], layer.given["params_dtype"]
        self.epsilon = layer.given["layernorm_epsilon"]
        self.layer_norm_weight = nn.Parameter(torch.ones(width, dtype=dtype))
        self.layer_norm_bias = None
        if layer.given["normalization"] == "LayerNorm":
            self.layer_norm_bias = nn.Parameter(torch.zeros(width, dtype=dtype))

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        if self.layer_norm_bias is None:
            return F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.epsilon)
        return F.layer_norm(
            x, x.shape[-1:], self.layer_norm_weight, self.layer_norm_bias, self.epsilon
        )


class LayerNormLinear(Normed):
    def __init__(self, layer: Layer, out: int) -> None:
        super().__init__(layer, 1)
        dtype = layer.given["params_dtype"]
        self.weight = normal(out, layer.given["hidden_size"], dtype)
        self.bias = layer.bias(out)


class Linear(Module):
    def __init__(self, layer: Layer, width: int) -> None:
        super().__init__(layer, 1)
        out = layer.given["hidden_size"]
        self.weight = normal(out, width, layer.given["params_dtype"])
        self.bias = layer.bias(out)


class LayerNormMLP(Normed):
    def __init__(self, layer: Layer, ffn: int, is_gated: bool) -> None:
        super().__init__(layer, 2)
        width, dtype = layer.given["hidden_size"], layer.given["params_dtype"]
        inner = 2 * ffn if is_gated else ffn
        self.fc1_weight, self.fc1_bias = normal(inner, width, dtype), layer.bias(inner)
        self.fc2_weight, self.fc2_bias = normal(width, ffn, dtype), layer.bias(width)


ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "srelu": lambda x: F.relu(x) ** 2,
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "reglu": lambda x: F.relu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
}


class Layer(nn.Module):
    """`TransformerLayer`: a pre-norm layer over [B, S, D] (`attn_input_format="bshd"`), or over
    [S, B, D] ("sbhd"), whose first dim is what sequence parallelism gathers and scatters."""

    def __init__(self, double: Double, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        given = double.record("TransformerLayer.__init__", *args, **kwargs)
        self.double, self.given = double, given
        is_parallel = given["set_parallel_mode"] and given["tp_size"] > 1
        splits_sequence = is_parallel and given["sequence_parallel"]
        assert given["attn_input_format"] == ("sbhd" if splits_sequence else "bshd")
        assert given["layer_number"] >= 1
        self.ranks = te_ranks.Ranks(given["tp_group"], splits_sequence) if is_parallel else None
        assert not given["apply_residual_connection_post_layernorm"]
        heads = given["num_attention_heads"]
        size = given["kv_channels"] or given["hidden_size"] // heads
        share = given["tp_size"] if given["set_parallel_mode"] else 1
        self.heads = heads // share
        self.groups = (given["num_gqa_groups"] or heads) // share
        self.activation = ACTIVATIONS[given["activation"]]
        self.self_attention = nn.Module()
        rows = (self.heads + 2 * self.groups) * size
        self.self_attention.layernorm_qkv = LayerNormLinear(self, rows)
        self.self_attention.proj = Linear(self, self.heads * size)
        is_gated = given["activation"].endswith("glu")
        self.layernorm_mlp = LayerNormMLP(self, given["ffn_hidden_size"] // share, is_gated)
        if double.fp8_parameters:
            for module in self.modules():
                for name, param in list(module.named_parameters(recurse=False)):
                    if param.dim() == 2:
                        setattr(module, name, self.quantized(module, name, param))

    def quantized(self, module: Any, name: str, param: nn.Parameter) -> Quantized:
        """By the quantizer of the module, whose scaling tensors are made for it."""
        recipe = self.double.recipe_of_parameters
        if not hasattr(recipe, "amax_history_len"):
            return Quantized(param.detach(), None)
        if "scaling_fwd" not in module.fp8_meta:
            module.fp8_meta["num_gemms"] = module.num_gemms
            module.init_fp8_meta_tensors(recipe)
        number = 2 if name == "fc2_weight" else 1
        column = FP8FwdTensors[f"GEMM{number}_WEIGHT"]
        return Quantized(param.detach(), Quantizer(module.fp8_meta["scaling_fwd"], column))

    def bias(self, out: int) -> nn.Parameter | None:
        """The real modules hold an empty tensor in place of None."""
        return nn.Parameter(torch.zeros(out, dtype=self.given["params_dtype"])) if (
            self.given["bias"]) else None  # fmt: skip

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = self.double.record("TransformerLayer.forward", *args, **kwargs)
        first, x_BSD = given["is_first_microbatch"], given["hidden_states"]
        qkv, proj, mlp = (self.self_attention.layernorm_qkv, self.self_attention.proj,
                          self.layernorm_mlp)  # fmt: skip
        mixed = qkv.gemm(qkv.norm(x_BSD), qkv.weight, qkv.bias, 1, first)
        if self.given["attn_input_format"] == "sbhd":
            attended = self.attend(mixed.transpose(0, 1)).transpose(0, 1)
        else:
            attended = self.attend(mixed)
        x_BSD = x_BSD + proj.gemm(attended, proj.weight, proj.bias, 1, first)
        inner = mlp.gemm(mlp.norm(x_BSD), mlp.fc1_weight, mlp.fc1_bias, 1, first)
        return x_BSD + mlp.gemm(self.activation(inner), mlp.fc2_weight, mlp.fc2_bias, 2, first)

    def attend(self, mixed: torch.Tensor) -> torch.Tensor:
        batch, seq, rows = mixed.shape
        size = rows // (self.heads + 2 * self.groups)
        if self.given["qkv_weight_interleaved"] and self.given["fuse_qkv_params"]:
            per = self.heads // self.groups
            grouped = mixed.view(batch, seq, self.groups, per + 2, size)
            q, k, v = (part.flatten(2, 3) for part in grouped.split((per, 1, 1), dim=3))
        else:
            whole = mixed.view(batch, seq, -1, size)
            q, k, v = whole.split((self.heads, self.groups, self.groups), dim=2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        causal = self.given["self_attn_mask_type"] == "causal"
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)
