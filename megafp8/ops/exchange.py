"""Send bytes between the ranks of a process group, whatever their number on each rank."""

from __future__ import annotations

import torch
import torch.distributed as dist


def broadcast_bytes(content: bytes | None, group: dist.ProcessGroup | None) -> bytes:
    """Return the bytes of rank 0 on all ranks of the group; the other ranks give None."""
    size = _number(len(content or b""), group)
    dist.broadcast(size, src=0, group=group)  # so that the other ranks have memory for the bytes
    sent = _as_tensor(content or b"", int(size), group)
    dist.broadcast(sent, src=0, group=group)
    return _as_bytes(sent) if content is None else content


def gather_bytes(content: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Return the bytes of every rank of the group, by rank."""
    own_size = _number(len(content), group)
    sizes = [torch.zeros_like(own_size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, own_size, group=group)
    most = int(max(sizes))  # all ranks must send equally many bytes
    sent = _as_tensor(content, most, group)
    parts = [torch.empty_like(sent) for _ in sizes]
    dist.all_gather(parts, sent, group=group)
    return [_as_bytes(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]


def _number(value: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return a number as a tensor of shape (1,) that the group can send."""
    return torch.tensor([value], device=_device(group))


def _as_tensor(content: bytes, size: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return bytes as a tensor of `size` elements, of which the last ones are 0."""
    whole = torch.zeros(size, dtype=torch.uint8)
    if content:
        whole[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return whole.to(_device(group))


def _as_bytes(sent: torch.Tensor) -> bytes:
    return bytes(sent.cpu().numpy().data)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return where tensors must be for the group: NCCL sends those of GPUs, gloo those of hosts."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
