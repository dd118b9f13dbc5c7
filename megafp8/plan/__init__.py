"""What a run will cost, from its specs alone: no torch, no device, milliseconds."""

from megafp8.plan.flops import (
    AttentionCount,
    ModelFlops,
    flops_per_token,
    gemm_flops_per_token,
)

__all__ = ["AttentionCount", "ModelFlops", "flops_per_token", "gemm_flops_per_token"]
