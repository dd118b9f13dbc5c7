"""What Transformer Engine's layers copy between themselves, and what its scaling state reads."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megafp8.backends.te.layer import TeLayer
from megafp8.backends.te.state import TeScaling
from megafp8.specs import Fp8Recipe
from tests.kit.operations import Operations


def test_a_part_of_the_sequence_stays_in_the_order_of_the_layers() -> None:
    """They take [S, B, D]: of three layers the first one's input alone is copied."""
    layer = SimpleNamespace(packs=False, sequence_parallel=True, layer=lambda x_SBD: x_SBD + 1)
    x_BSD = torch.randn(2, 5, 3)
    with Operations() as seen:
        out_BSD = x_BSD
        for _ in range(3):
            out_BSD = TeLayer._run(layer, out_BSD, {})  # type: ignore[arg-type]
    assert seen.names.count("clone") == 1
    assert torch.equal(out_BSD, x_BSD + 1 + 1 + 1)


def test_all_scales_of_a_model_come_in_one_copy() -> None:
    """Each kind of Transformer Engine's tensors is read once, however many modules there are."""
    length, directions = 4, ("forward", "backward")
    scaling = TeScaling(Fp8Recipe(amax_history_len=length), None)  # type: ignore[arg-type]
    tensors = []
    for number in range(5):
        states = {}
        for key in ("scaling_fwd", "scaling_bwd"):
            states[key] = SimpleNamespace(scale=torch.rand(3), amax_history=torch.rand(length, 3))
            tensors += [states[key].scale, states[key].amax_history]
        module = SimpleNamespace(fp8_meta=states)
        for direction in directions:
            for column in (2, 0):
                scaling._add(f"{number}.{direction}.{column}", module, direction, column)
    with Operations(*tensors) as seen:
        scaling.pull()
    assert seen.readers == ["cat", "cat"]
    for slot, module, direction, column in scaling._slots:
        state = module.fp8_meta["scaling_fwd" if direction == "forward" else "scaling_bwd"]
        table, row = slot.table, slot.index
        assert torch.equal(table.quant_scale[row], state.scale[column])
        assert torch.equal(table.amax[row], state.amax_history[0, column])
        assert torch.equal(table.history[row], state.amax_history[1:, column])
