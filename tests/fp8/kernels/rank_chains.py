"""What the ranks of test_fused.py do: the same steps with chains of kernels and without them."""

from __future__ import annotations

from typing import Any

import torch

from fp8_numerics.gemm import EMULATED
from megafp8.fp8 import chain
from megafp8.parallel.mesh import join
from megafp8.specs import Fp8Recipe, GPTSpec, ParallelSpec
from megafp8.train.step import forward_backward, reduce_gradients
from tests.fp8.kernels.test_engine import hopper, run_with
from tests.ranks import Rank
from tests.tiny import microbatch


def both_ways(rank: Rank, parallel: ParallelSpec, model: GPTSpec) -> dict[str, Any]:
    """Return losses and gradients of two steps by chains and apart, and the linears in chains."""
    mesh = join(parallel)
    names: set[str] = set()
    run = chain.run_chain

    def noting(links: Any, *args: Any, **options: Any) -> Any:
        names.update(link.linear.name for link in links)
        return run(links, *args, **options)

    chain.run_chain = noting  # type: ignore[assignment]
    found: dict[str, Any] = {}
    for way, engine in (("chains", hopper()), ("apart", EMULATED)):
        fp8 = Fp8Recipe(amax_history_len=3)
        state = run_with(engine, mesh, fp8=fp8, model=model, parallel=parallel)
        losses = []
        for step in range(2):
            losses.append(forward_backward(state, [microbatch(step)])[0].item())
        reduce_gradients(state)
        found[way] = losses, [grad.clone() for grad in state.masters.grads]
        if way == "chains":
            found["names"] = sorted(names)
            names.clear()
    found["names apart"] = sorted(names)
    return {name: _portable(value) for name, value in found.items()}


def _portable(value: Any) -> Any:
    if isinstance(value, tuple):
        return value[0], [tensor.detach().to(torch.float32) for tensor in value[1]]
    return value
