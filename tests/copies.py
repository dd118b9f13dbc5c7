"""Notice what copies numbers between a device and the host, from the calls of torch's functions.

On CUDA each of these calls makes the host wait until the device has done all that was started
before; in a capture it is an error. The calls themselves are seen, so a test needs no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from megafp8.ops import torch_private

TO_THE_HOST = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__index__")
FROM_NUMBERS = ("tensor", "as_tensor", "asarray", "new_tensor", "scalar_tensor")
INDEXED = ("__getitem__", "__setitem__", "index_put", "index_put_")


class Copies(TorchFunctionMode):
    """Call `see` with the name of each copy to the host or to `device`.

    `__bool__` is left out, since the loss checks on CPUs only whether any target is ignored, and on
    the meta device it raises. A tensor made of Python's numbers counts where it is made on
    `device`; an index that is a list, a range or an array always counts, as torch makes a tensor
    of it and copies this to the device of what is indexed.
    """

    def __init__(
        self, device: torch.device, see: Callable[[str], None], *, with_backward: bool = True
    ) -> None:
        """Without `with_backward` nothing is seen in backward passes.

        On CPUs alone the head reads there a number that GPUs leave where it is.
        """
        super().__init__()
        self._device, self._see, self._with_backward = device, see, with_backward

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in TO_THE_HOST:
            self._see(name)
        if name in INDEXED and _is_of_the_host(args[1]):
            self._see("a list as an index")
        if function is torch.Tensor.backward and self._with_backward:  # torch suspends this mode
            with self:
                gradient = args[1] if len(args) > 1 else kwargs.get("gradient")
                gradient = torch.ones_like(args[0]) if gradient is None else gradient
                return torch_private.run_backward(args[0], gradient)
        result = function(*args, **kwargs)
        if name in FROM_NUMBERS and result.device == self._device:
            self._see(f"torch.{name} of the host's numbers")
        return result


def _is_of_the_host(index: Any) -> bool:
    """Whether any part of an index is a sequence of the host's numbers."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, list | range | np.ndarray | tuple) for part in parts)
