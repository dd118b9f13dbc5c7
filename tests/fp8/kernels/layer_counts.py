"""Count what one layer starts on a GPU with FP8 tensor cores, on meta tensors.

A layer runs forward and backward; nothing is computed. Every operation and every Triton launch is
counted, with the bytes of its arguments and results; views and allocations are not. Attention
counts as 1 + 3 launches, as fused kernels take them. A host synchronization (`.item()`,
`bool(tensor)`, `.cpu()`) raises on meta.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import call
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo import trace_rules
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8_numerics import torch_private as of_numerics
from fp8_numerics.gemm import Engine
from fp8_numerics.kernels import triton_launch
from fp8_numerics.meta import planning_for
from megafp8.backends import native
from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.fp8 import scaling
from megafp8.fp8.engine import LAYOUTS
from megafp8.parallel import parts
from megafp8.parallel.mesh import single_rank
from megafp8.parallel.parts import linears_of
from megafp8.specs import HealthSpec
from megafp8.train.build import build
from megafp8.train.report.fp8 import HealthLog
from megafp8.train.state import TrainState

META = torch.device("meta")
BATCH, SEQUENCE, HIDDEN = 4, 2048, 4096
FREE = {
    "view", "_unsafe_view", "t", "transpose", "permute", "slice", "select", "expand", "unsqueeze",
    "squeeze", "split", "split_with_sizes", "chunk", "detach", "alias", "as_strided", "unbind",
    "reshape", "_reshape_alias", "unflatten", "narrow", "lift_fresh", "empty", "empty_like",
    "new_empty", "empty_strided", "new_empty_strided", "promote_types",
}  # fmt: skip
PRODUCTS = {"_scaled_mm", "_scaled_mm_v2", "mm", "addmm", "bmm"}
LLAMA = (
    "model.openai_gelu=False",
    "model.normalization=rmsnorm",
    "model.activation=swiglu",
    "model.bias=False",
    "model.position_embedding_type=rope",
)
FP8 = ("model.fp8=True",)
GPT = ("model.openai_gelu=True",)
RECIPES: dict[str, tuple[str, ...]] = {
    "bf16": (),
    "delayed": FP8,
    "fp8_params": (*FP8, "model.fp8_params=True"),
    "tensorwise": (*FP8, "model.fp8_recipe=tensorwise"),
    "rowwise": (*FP8, "model.fp8_recipe=rowwise"),
    "blockwise": (*FP8, "model.fp8_recipe=blockwise"),
    "mxfp8": (*FP8, "model.fp8_recipe=mxfp8"),
    "nvfp4": (*FP8, "model.fp8_recipe=nvfp4"),
}


class Cost(NamedTuple):
    """Launches, and bytes for one token and one of `HIDDEN`, without the products.

    `activations` are passes over tensors of tokens, `attention` what its fused kernels read and
    write, `weights` the casts of weights and the sums of their gradients.
    """

    launches: int
    activations: float
    attention: float
    weights: float


class Tally(TorchDispatchMode):
    """Counts what torch starts; `add` takes the launches that it does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()  # by the field of `Cost`, and "products"
        self._watches = True
        self.takes_batches = False  # whether copies from the host are allowed that do not wait

    def add(self, name: str, tensors: list[Any], count: int = 1) -> None:
        found = [x for x in tensors if isinstance(x, torch.Tensor)]
        # What an operation writes in place is its argument and its result: counted once.
        places = [(x.untyped_storage()._cdata, x.storage_offset(), x.shape) for x in found]
        tensors = list(dict(zip(places, found, strict=True)).values())
        assert all(x.device == META for x in tensors), f"{name}: a tensor of another device"
        self.launches[name] += count
        part = "attention" if name.startswith("attention") else "activations"
        judged = tensors[:1] if name.startswith("triton") else tensors  # what a kernel reads
        part = "weights" if any(is_weight(x) for x in judged) else part
        part = "products" if name in PRODUCTS else part
        self.bytes[part] += sum(x.numel() * x.element_size() for x in tensors)

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Return a context in which tensors of the host may be made."""
        self._watches = False
        yield
        self._watches = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        is_batch = self.takes_batches and name == "_to_copy" and (kwargs or {}).get("non_blocking")
        if self._watches and name not in FREE and not is_batch:
            is_filled = name.startswith("new_") or name.endswith("_like")  # reads no argument
            read = () if is_filled else (args, kwargs)
            leaves = [x for x in tree_leaves(read) if isinstance(x, torch.Tensor)]
            results = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            self.add(name, leaves + results)
        return out

    def cost(self) -> Cost:
        unit = BATCH * SEQUENCE * HIDDEN
        parts = (self.bytes[part] / unit for part in ("activations", "attention", "weights"))
        return Cost(sum(self.launches.values()), *parts)


def is_weight(x: torch.Tensor) -> bool:
    """Whether a tensor is a weight matrix, its gradient or its payload: no dim counts tokens."""
    return x.numel() >= HIDDEN * HIDDEN and BATCH * SEQUENCE not in x.shape and x.dim() == 2


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tally]:
    """Meta tensors take a GPU's paths; Triton's launches are counted, not done."""
    import triton.runtime.interpreter as interpreter
    from triton.runtime.jit import JITFunction

    tally = Tally()

    def launched(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        tally.add(f"triton {kernel.fn.__name__}", [*args, *options.values()])

    monkeypatch.setattr(JITFunction, "run", launched)
    monkeypatch.setattr(interpreter.InterpretedFunction, "run", launched)

    def matmul(*operands: torch.Tensor, out: torch.Tensor | None = None, **rest: Any) -> Any:
        product = of_numerics.scaled_mm(*operands, **rest)  # torch has no `out` on meta
        if isinstance(rest["scale_a"], tuple):  # torch multiplies the factors of both operands
            tally.add("mul", [rest["scale_a"][1], rest["scale_b"][1]])
        return product if out is None else out

    layouts = frozenset(LAYOUTS)
    engine = Engine(uses_triton=True, layouts=layouts, fp32_results=layouts, matmul=matmul)
    monkeypatch.setattr(scaling, "engine_of", lambda device: engine)
    monkeypatch.setattr(triton_launch, "unavailable", lambda device: None)
    monkeypatch.setattr(torch._meta_registrations, "device_hint", lambda tensor: "cuda")
    trace_rules.get_torch_obj_rule_map()  # Dynamo keeps what it reads first: not these doubles
    monkeypatch.setattr(F, "scaled_dot_product_attention", fused_attention(tally))
    monkeypatch.setattr(torch, "rms_norm", fused_rms_norm(tally))
    for module in (native, parts):
        monkeypatch.setattr(module, "runs_triton", lambda device: True)
    with planning_for("cuda"):
        yield tally


def fused_attention(tally: Tally) -> Callable[..., torch.Tensor]:
    """Return attention as a GPU's fused kernels do it: one launch and three."""

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *qkv: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*qkv)
            out = torch.empty_like(qkv[0].transpose(1, 2)).transpose(1, 2)
            tally.add("attention", [*qkv, out])
            return out

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
            grads = tuple(torch.empty_like(x) for x in ctx.saved_tensors)
            tally.add("attention backward", [grad, *ctx.saved_tensors, *grads], count=3)
            return grads

    return lambda q, k, v, **options: Fused.apply(q, k, v)


def fused_rms_norm(tally: Tally) -> Callable[..., torch.Tensor]:
    """Return RMSNorm as CUDA runs it, one launch and two; on meta torch takes it apart."""

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
            out = torch.empty_like(x)
            ctx.save_for_backward(x, weight, rstd)
            tally.add("rms_norm", [x, weight, rstd, out])
            return out

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x, weight, rstd = ctx.saved_tensors
            grads = torch.empty_like(x), torch.empty_like(weight)
            tally.add("rms_norm backward, input", [grad, x, weight, rstd, grads[0]])
            tally.add("rms_norm backward, weight", [grad, x, rstd, grads[1]])
            return grads

    return lambda x, shape, weight, epsilon: Fused.apply(x, weight)


def state_of(settings: tuple[str, ...]) -> TrainState:
    """Return the state of a model with one layer, on meta."""
    cfg = load([
        "model.num_layers=1", f"model.hidden_size={HIDDEN}", f"model.ffn_hidden_size={4 * HIDDEN}",
        f"model.num_attention_heads={HIDDEN // 128}", f"model.encoder_seq_length={SEQUENCE}",
        f"model.max_position_embeddings={SEQUENCE}", f"model.micro_batch_size={BATCH}",
        f"model.global_batch_size={BATCH}", "trainer.precision=bf16",
        *settings,
    ])  # fmt: skip
    spec = resolve(cfg, lambda: True)
    spec = dataclasses.replace(spec, model=dataclasses.replace(spec.model, vocab_size=128))
    with META:
        return build(spec, single_rank(META))


def second_microbatch(
    settings: tuple[str, ...],
    tally: Tally,
    *,
    only_linears: bool = False,
    logged: bool = False,
    counted_by: AbstractContextManager[Any] | None = None,
) -> dict[str, int]:
    """Run a layer twice and count the second time; returns the FP8 FLOPs by what ran them.

    `only_linears` runs its linears alone, each on an input of its own. `logged` measures FP8's
    health as in a step that is logged. `counted_by` counts instead of the tally.
    """
    state = state_of(settings)
    if logged:
        HealthLog(state, HealthSpec(), None, 0, lambda text: None).begin()
    layers: list[Any] = linears_of(state.model) if only_linears else [state.model.forward_layers]
    for counted in (nullcontext(), counted_by or tally):  # tables of random bytes are made once
        tally.launches.clear()
        tally.bytes.clear()
        state.sink.begin_step()
        state.scaling.begin_microbatch(0)
        widths = [x.weight.shape[1] if only_linears else HIDDEN for x in layers]
        inputs = [_activation(width).requires_grad_() for width in widths]
        with counted:
            outs = [*map(call, layers, inputs)]
            state.scaling.end_forward()
            for out in outs:
                out.backward(_activation(out.shape[-1]))
            state.scaling.end_backward()
    return dict(state.counter.fp8_backends)


def _activation(width: int) -> torch.Tensor:
    return torch.empty((BATCH, SEQUENCE, width), dtype=torch.bfloat16, device=META)
