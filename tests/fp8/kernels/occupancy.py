"""Say how many warps a multiprocessor (SM) of a GPU holds at a time; imports no Triton."""

from __future__ import annotations

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes a block, CUDA C guide


def resident_warps(num_warps: int, registers: int, shared: int, capability: int) -> int:
    """Return how many warps of such blocks an SM holds.

    An SM has 65536 registers, given to each warp in units of 256, room for 64 warps and 32 blocks,
    and one KiB of shared memory more than a block may ask for, less one KiB for each block (CUDA
    C++ programming guide, compute capabilities).
    """
    of_a_warp = -(-registers * 32 // 256) * 256
    blocks = min(65536 // (of_a_warp * num_warps), 64 // num_warps, 32)
    blocks = min(blocks, (SHARED_LIMIT[capability] + 1024) // (shared + 1024))
    return blocks * num_warps
