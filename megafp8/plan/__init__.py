"""Predict what a run costs from its specs, without torch or a device, in milliseconds."""

from megafp8.plan.flops import (
    AttentionCount,
    ModelFlops,
    flops_per_token,
    gemm_flops_per_token,
)

__all__ = ["AttentionCount", "ModelFlops", "flops_per_token", "gemm_flops_per_token"]
