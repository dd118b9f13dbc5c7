"""Which of torch's operations run."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Notes operations and which of them read memory of `watched`."""

    def __init__(self, *watched: torch.Tensor) -> None:
        super().__init__()
        self._storages = {x.untyped_storage().data_ptr() for x in watched}
        self.names: list[str] = []
        self.readers: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.names.append(name)
        flat = [x for arg in args for x in (arg if isinstance(arg, list) else [arg])]
        found = [x for x in flat if isinstance(x, torch.Tensor)] if self._storages else []
        is_view = name in ("select", "slice", "detach", "unsqueeze")
        if not is_view and any(x.untyped_storage().data_ptr() in self._storages for x in found):
            self.readers.append(name)
        return func(*args, **(kwargs or {}))
