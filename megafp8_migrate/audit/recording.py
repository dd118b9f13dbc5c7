"""Record what a small training step asks of Transformer Engine: recipes, messages and tensors.

A record is made of plain values, so that two of them can be compared and sent as JSON. Tensors are
in it as hashes of their bytes, process groups as the ranks in them.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "_all_gather_base", "reduce_scatter",
    "reduce_scatter_tensor", "_reduce_scatter_base", "broadcast", "reduce", "all_to_all",
    "all_to_all_single", "send", "recv", "isend", "irecv", "gather", "scatter",
)  # fmt: skip
_DEPTH = 4
"""How deep the attributes of objects of quantization are followed."""
_ADDRESS = re.compile(r":\d{10,}$")
"""The end of Transformer Engine's key of a region: the address of its group in this process."""


class StepRecorder:
    """Hold what one rank has done since the recorder was installed."""

    def __init__(self) -> None:
        self.recipes: list[Any] = []
        self.messages: Counter[str] = Counter()

    def install_messages(self) -> None:
        """Count the calls of torch's collectives; this comes before others import them."""
        for name in COLLECTIVES:
            if (function := getattr(dist, name, None)) is None:
                continue
            counting = self._counting(name, function)
            setattr(dist, name, counting)
            if hasattr(dist.distributed_c10d, name):
                setattr(dist.distributed_c10d, name, counting)

    def _counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            sizes = [_size(value) for value in (*args, *kwargs.values())]
            group = kwargs.get("group") or next((a for a in args if _is_group(a)), None)
            told = " ".join(size for size in sizes if size)
            self.messages[f"{name} {told} over {described(group)}"] += 1
            return function(*args, **kwargs)

        return counted

    def install_recipes(self, te: Any) -> None:
        """Record the arguments of each region of Transformer Engine's `autocast`."""
        manager = te.module.base.FP8GlobalStateManager
        for name in ("autocast_enter", "fp8_autocast_enter"):
            real = getattr(manager, name, None)
            if real is not None:
                setattr(manager, name, self._entering(real))

    def _entering(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def entered(*args: Any, **kwargs: Any) -> Any:
            self.recipes.append(described([list(args), kwargs]))
            return real(*args, **kwargs)

        return entered


def _size(value: Any) -> str:
    """Return the dtype and the bytes of a tensor, or of each tensor of a list."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}:{value.numel() * value.element_size()}"
    if isinstance(value, list | tuple) and value:
        return "+".join(filter(None, map(_size, value)))
    return ""


def _is_group(value: Any) -> bool:
    return isinstance(value, dist.ProcessGroup)


def described(value: Any, depth: int = _DEPTH) -> Any:
    """Return a value as JSON can hold it, without addresses of objects.

    Args:
        value: A recipe, a quantizer, a tensor, or what holds them.
        depth: How deep attributes are followed.
    """
    if isinstance(value, str):
        return _ADDRESS.sub(":…", value)
    if value is None or isinstance(value, bool | int) and not isinstance(value, enum.Enum):
        return value
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if _is_group(value):
        return f"ranks {dist.get_process_group_ranks(value)}"
    if isinstance(value, enum.Enum | torch.dtype | torch.device | torch.Size):
        return str(value)
    if isinstance(value, type) or callable(value) and not hasattr(value, "__dict__"):
        return getattr(value, "__name__", type(value).__name__)
    if depth == 0:
        return type(value).__name__
    if isinstance(value, Mapping):
        return {str(key): described(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = [described(item, depth - 1) for item in value]
        return items if isinstance(value, list | tuple) else sorted(items, key=repr)
    fields = {
        name: described(item, depth - 1)
        for name, item in sorted(getattr(value, "__dict__", {}).items())
    }
    return {"class": type(value).__name__, **fields}


def _tensor(value: torch.Tensor) -> str:
    shape = "x".join(map(str, value.shape))
    said = f"{type(value).__name__} {str(value.dtype).removeprefix('torch.')} {shape}"
    return f"{said} {digest(value)}"


def digest(value: torch.Tensor) -> str:
    """Return a hash of a tensor's bytes; a quantized one counts as the values it stands for."""
    with torch.no_grad():
        plain = value.detach()
        if type(plain) not in (torch.Tensor, torch.nn.Parameter):
            plain = plain.dequantize() if hasattr(plain, "dequantize") else plain.clone()
        plain = plain.cpu().contiguous()
        raw = plain.reshape(-1).view(torch.uint8) if plain.numel() else plain.new_empty(0)
        return hashlib.sha256(raw.numpy().tobytes()).hexdigest()[:16]


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return a model's parameters, buffers, gradients, and all that its layers keep of FP8."""
    state: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        state[f"parameter {name}"] = _tensor(parameter)
        for kind in ("grad", "main_grad"):
            if isinstance(gradient := getattr(parameter, kind, None), torch.Tensor):
                state[f"gradient {name} {kind}"] = _tensor(gradient)
    for name, buffer in model.named_buffers():
        state[f"buffer {name}"] = _tensor(buffer)
    for name, module in model.named_modules():
        state[f"layer {name}"] = type(module).__name__
        for kind in ("fp8_meta", "quantizers", "fp8", "fp8_parameters", "fp8_initialized"):
            if kind in vars(module):
                state[f"{kind} {name}"] = described(vars(module)[kind])
    return state
