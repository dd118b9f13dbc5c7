"""Tests of the training step: accumulation, normalization, clipping, non-finite steps."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megafp8.data.loader import Microbatch
from megafp8.fp8 import scaled
from megafp8.fp8.recipes.nvfp4 import Nvfp4
from megafp8.optim import scaled_adam
from megafp8.optim.adamw import STATES
from megafp8.optim.protocol import Optimizers
from megafp8.specs import Fp8Recipe, LossScaleSpec
from megafp8.specs.recipe import Cast, Scaled
from megafp8.train.generate import sample
from megafp8.train.state import TrainState
from megafp8.train.step import StepResult, forward_backward, train_step
from megafp8.train.validate import evaluate
from tests.c_kernels import need_kernels
from tests.copies import Copies
from tests.kit.tensors import state_tensors
from tests.tiny import build_run, gpt_spec, microbatch, optim_spec
from tests.train.skipped import O2, SKIPPED, check_skipped_step

FP8 = Fp8Recipe(amax_history_len=4)
# A large epsilon makes Adam's update follow the gradient's size, so that it can be compared.
SMOOTH = optim_spec(eps=1e-2, clip_grad_norm=0.5)
PRECISIONS = pytest.mark.parametrize(
    ("compute", "fp8"),
    [("fp32", None), ("bf16", None), ("bf16", FP8), ("fp32", FP8)],
    ids=["fp32", "bf16", "bf16 fp8", "fp32 fp8"],
)


def step(state: TrainState, microbatches: list[Microbatch]) -> float:
    """Run a step as the loop does, and return its loss."""
    result = train_step(state, microbatches)
    assert result.is_finite
    state.step += 1
    return result.loss


def split(big: Microbatch, sizes: list[int]) -> list[Microbatch]:
    cuts = np.cumsum(sizes)[:-1]
    pairs = zip(np.split(big.tokens_BS, cuts), np.split(big.targets_BS, cuts), strict=True)
    return [Microbatch(tokens.copy(), targets.copy()) for tokens, targets in pairs]


def masters_of(state: TrainState) -> list[torch.Tensor]:
    return [master.detach().clone() for master in state.masters.masters]


def everything(state: TrainState) -> dict[str, torch.Tensor]:
    """Return weights, master weights, moments and FP8 tables."""
    tensors = {f"weight {i}": p.detach() for i, p in enumerate(state.masters.params)}
    tensors |= {f"master {i}": m for i, m in enumerate(masters_of(state))}
    for name in STATES:
        moments = state_tensors(state.optimizer, name)
        tensors |= {f"{name} {i}": moment for i, moment in enumerate(moments)}
    for direction, table in state.scaling.tables.items():
        tensors |= {f"{direction} {name}": t for name, t in table.tensors().items()}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [name for name, tensor in left.items() if not torch.equal(tensor, right[name])]
    assert not different


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1, 1, 1], [2, 4], [5, 1]])
@pytest.mark.parametrize("ignored", [0.0, 0.5], ids=["all counted", "half ignored"])
def test_microbatches_add_up_to_one_big_batch(sizes: list[int], ignored: float) -> None:
    """Loss, norm and update of 3 steps in FP32 differ by 1e-5 at most.

    Rows have unequal numbers of counted tokens, so that a mean of the microbatches' means would be
    another loss.
    """
    together, apart = (build_run(optim=SMOOTH) for _ in range(2))
    for number in range(3):
        big = microbatch(number, batch=6, ignored=ignored)
        big.targets_BS[0, 2:] = -100 if ignored else big.targets_BS[0, 2:]
        before = masters_of(together)
        results = [train_step(together, [big]), train_step(apart, split(big, sizes))]
        assert results[0].num_tokens == results[1].num_tokens == big.num_targets
        assert results[0].loss == pytest.approx(results[1].loss, rel=1e-5)
        assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-5)
        for state in (together, apart):
            state.step += 1
        for old, one, other in zip(before, masters_of(together), masters_of(apart), strict=True):
            bound = 1e-5 * (one - old).abs().max() + 2.0**-23 * old.abs().max()
            assert (one - other).abs().max() <= bound


def test_loss_is_the_mean_over_counted_tokens() -> None:
    """The loss is the sum over microbatches divided by the number of counted tokens."""
    state = build_run()
    parts = [microbatch(1, ignored=0.9), microbatch(2, ignored=0.1)]
    sums = [
        state.model(torch.from_numpy(p.tokens_BS), torch.from_numpy(p.targets_BS)).item()
        for p in parts
    ]
    counts = [part.num_targets for part in parts]
    assert counts[0] < counts[1] / 2
    expected = sum(sums) / sum(counts)
    assert train_step(state, parts).loss == pytest.approx(expected, rel=1e-6)


def test_gradients_are_those_of_autograd() -> None:
    """The flat FP32 buffer is compared with a plain backward pass of the mean loss."""
    state = build_run()
    batch = microbatch(1, ignored=0.3)
    norm = train_step(
        state, [batch]
    ).grad_norm  # the step leaves the clipped gradient in the buffer
    fresh = build_run()
    forward_backward(fresh, [batch])
    grads = [grad / batch.num_targets for grad in fresh.masters.grads]
    plain = build_run()
    plain.sink.main_grads.clear()  # everything through autograd
    for param in plain.masters.params:
        param._post_accumulate_grad_hooks.clear()  # type: ignore[attr-defined]
    tokens, targets = torch.from_numpy(batch.tokens_BS), torch.from_numpy(batch.targets_BS)
    (plain.model(tokens, targets) / batch.num_targets).backward()
    for ours, param in zip(grads, plain.masters.params, strict=True):
        assert param.grad is not None
        assert (ours - param.grad).abs().max() <= 1e-6 * param.grad.abs().max()
    total = torch.cat([grad.flatten() for grad in grads]).double().norm().item()
    assert norm == pytest.approx(total, rel=1e-6)


def test_gradients_do_not_leak_into_the_next_step() -> None:
    state, fresh = build_run(), build_run()
    forward_backward(state, [microbatch(1), microbatch(2)])
    forward_backward(state, [microbatch(3)])
    forward_backward(fresh, [microbatch(3)])
    assert torch.equal(state.masters.own_grads[0], fresh.masters.own_grads[0])


@pytest.mark.parametrize("limit", [0.1, 1e9, 0.0, None])
def test_clipping_scales_the_gradient_to_the_limit(limit: float | None) -> None:
    state = build_run(optim=optim_spec(clip_grad_norm=limit))
    norm = train_step(state, [microbatch(1)]).grad_norm
    left = state.masters.own_grads[0].double().norm().item()
    assert norm > 0.2, "the norm before clipping is reported"
    assert left == pytest.approx(0.1 if limit == 0.1 else norm, rel=1e-4)


@PRECISIONS
def test_training_learns(compute: str, fp8: Fp8Recipe | None) -> None:
    state = build_run(compute=compute, fp8=fp8)
    losses = [step(state, [microbatch(i % 3), microbatch(i % 3 + 3)]) for i in range(40)]
    assert losses[0] == pytest.approx(math.log(96), abs=0.1)
    assert losses[-1] < 0.8 * losses[0]


@PRECISIONS
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_updates_nothing(
    compute: str, fp8: Fp8Recipe | None, value: float
) -> None:
    """One microbatch of two gives a NaN. Its amaxes are counted, but no scale follows them.

    Training then continues.
    """
    state = build_run(compute=compute, fp8=fp8)
    for number in range(2):
        step(state, [microbatch(number)])
    before = everything(state)
    remaining = [0]

    def spoil(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        remaining[0] += 1
        return output * value if remaining[0] == 2 else output

    handle = state.model.final_norm.register_forward_hook(spoil)
    result = train_step(state, [microbatch(2), microbatch(3)])
    handle.remove()
    assert not result.is_finite
    after = everything(state)
    for name, tensor in before.items():
        if not name.startswith(("forward", "backward")):
            assert torch.equal(tensor, after[name]), name
    assert state.optimizer.num_updates == 2
    if fp8 is not None:
        tables = state.scaling.tables
        assert tables["backward"].num_nonfinite.min() >= 1, "every gradient was not finite"
        assert not tables["forward"].num_nonfinite.any()
        for table in tables.values():
            assert table.quant_scale.isfinite().all() and table.history.isfinite().all()
    assert math.isfinite(step(state, [microbatch(4)]))


@PRECISIONS
def test_evaluation_leaves_no_trace(compute: str, fp8: Fp8Recipe | None) -> None:
    """FP8 tables stay the same bits, and so do later steps compared with a run without evaluation.

    Dropout is on.
    """
    dropout = gpt_spec(hidden_dropout=0.1, attention_dropout=0.1, ffn_dropout=0.1)
    watched, other = (build_run(compute=compute, fp8=fp8, model=dropout) for _ in range(2))
    for number in range(3):
        batches = [microbatch(number), microbatch(number + 10)]
        assert step(watched, batches) == step(other, batches)
        before = everything(watched)
        first = evaluate(watched, [microbatch(50 + i) for i in range(3)])
        assert_same(everything(watched), before)
        assert evaluate(watched, [microbatch(50 + i) for i in range(3)]) == first
        assert watched.model.training
    assert_same(everything(watched), everything(other))


def test_evaluation_is_the_mean_over_counted_tokens_without_dropout() -> None:
    state = build_run(model=gpt_spec(hidden_dropout=0.5))
    plain = build_run()
    batches = [microbatch(1, ignored=0.8), microbatch(2, batch=5)]
    sums, counts = 0.0, 0
    with torch.no_grad():
        for b in batches:
            tokens, targets = torch.from_numpy(b.tokens_BS), torch.from_numpy(b.targets_BS)
            sums += plain.model(tokens, targets).item()
            counts += b.num_targets
    loss, counted = evaluate(state, batches)
    assert counted == counts
    assert loss == pytest.approx(sums / counts, rel=1e-6)


def test_evaluation_runs_no_backward_products() -> None:
    state = build_run(compute="bf16", fp8=FP8)
    evaluate(state, [microbatch(1)])
    places = {place for _, place in state.counter.flops}
    assert places == {"output", "attention", "head"}


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_fp8_differs_from_high_precision_and_stays_within_one_percent(compute: str) -> None:
    high, low = build_run(compute=compute), build_run(compute=compute, fp8=Fp8Recipe())
    pairs = []
    for number in range(20):
        batches = [microbatch(number), microbatch(number + 100)]
        pairs.append((step(high, batches), step(low, batches)))
    assert all(a != b for a, b in pairs[1:]), "FP8 does something"
    assert all(b == pytest.approx(a, rel=0.01) for a, b in pairs)
    shares = low.counter.share("fp8"), high.counter.share("fp8")
    assert shares[0] > 0.5 and shares[1] == 0


@PRECISIONS
def test_the_same_run_twice_is_the_same_bit_for_bit(compute: str, fp8: Fp8Recipe | None) -> None:
    runs = [build_run(compute=compute, fp8=fp8) for _ in range(2)]
    for number in range(3):
        assert step(runs[0], [microbatch(number)]) == step(runs[1], [microbatch(number)])
    assert_same(everything(runs[0]), everything(runs[1]))


def test_a_batch_without_counted_tokens_is_no_update() -> None:
    """A batch without counted tokens is reported as not finite and does not crash."""
    state = build_run()
    empty = microbatch(1)
    empty.targets_BS[:] = -100
    before = copy.deepcopy(everything(state))
    result = train_step(state, [empty])
    assert not result.is_finite and result.num_tokens == 0
    assert_same(everything(state), before)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("clip_grad_norm", [None, 0.5])
def test_a_step_copies_once_from_the_device(
    clip_grad_norm: float | None, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, norm, number of tokens and the ranks' flags come in one copy.

    It comes before the update, or after it where the kernel decides whether to update. No copy goes
    to the device that the host would wait for.
    """
    monkeypatch.setattr(Optimizers, "decides_on_device", on_device)
    state = build_run(optim=optim_spec(clip_grad_norm=clip_grad_norm))
    train_step(state, [microbatch(1)])
    update = state.optimizer.step
    calls: list[str] = []

    def noted(*args: Any) -> None:
        calls.append("update")
        update(*args)

    state.optimizer.step = noted  # type: ignore[method-assign]
    with Copies(torch.device("cpu"), calls.append, with_backward=False):
        result = train_step(state, [microbatch(2), microbatch(3)], lambda: (False, True))
    assert calls == (["update", "tolist"] if on_device else ["tolist", "update"])
    assert result.raised == (False, True)


@pytest.mark.parametrize("fp8", SKIPPED, ids=str)
@pytest.mark.parametrize("spoils", ["loss", "gradient"])
def test_a_step_that_the_kernel_skips_changes_nothing_but_scales(
    fp8: str, spoils: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU's kernel stands for the GPU's, on which tests/gpu/test_skipped_step.py runs this."""
    monkeypatch.setattr(Optimizers, "decides_on_device", True)
    check_skipped_step(torch.device("cpu"), SKIPPED[fp8], spoils)


def steps_with_spoilt_ones(
    state: TrainState, num_steps: int, spoilt: tuple[int, ...]
) -> list[StepResult]:
    """Take steps as the loop does, counted from 1; those that are spoilt are not finite."""
    results = []
    for number in range(1, num_steps + 1):
        factor = math.inf if number in spoilt else 1.0
        hook = state.model.final_norm.register_forward_hook(lambda *a, f=factor: a[2] * f)
        results.append(train_step(state, [microbatch(number), microbatch(number + 10)]))
        hook.remove()
        if not results[-1].is_finite and not state.optimizer.decides_on_device:
            state.masters.write_back()
        state.step += 1
        assert results[-1].is_finite == (number not in spoilt), number
    assert state.optimizer.num_updates == num_steps - len(spoilt)
    return results


def clipped_by_the_kernel(ours: Optimizers, step: int, norm: float, *, divisor: float) -> None:
    """Update as GPUs did before: the host waits, then torch's kernel divides and clips."""
    limit = ours.spec.clip_grad_norm or math.inf
    ours.step(step, divisor=torch.full((), divisor / min(1.0, limit / (norm + 1e-6))))


@pytest.mark.parametrize(
    ("compute", "fp8"),
    [("fp32", None), ("bf16", FP8), ("bf16", Fp8Recipe(amax_history_len=4, params_in_fp8=True))],
    ids=["fp32", "bf16 fp8", "fp8 params"],
)
@pytest.mark.parametrize("scaled", [False, True], ids=["", "fp16 loss scale"])
def test_a_kernel_that_decides_gives_the_bits_of_a_host_that_decides(
    compute: str, fp8: Fp8Recipe | None, scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 3 and 4 of six are not finite; after each, the loop's part is done as well.

    Weights, masters, moments, FP8 tables, losses, norms, the loss scale and Adam's t are equal.
    """
    rule = LossScaleSpec(init_scale=2.0**8, growth_interval=2, hysteresis=1)
    choices = dict(compute=compute, fp8=fp8, loss_scale=rule if scaled else None)
    found = []
    for on_device in (False, True):
        monkeypatch.setattr(Optimizers, "decides_on_device", on_device)
        monkeypatch.setattr(Optimizers, "update", clipped_by_the_kernel)
        state = build_run(optim=optim_spec(clip_grad_norm=0.5), **choices)
        results = steps_with_spoilt_ones(state, 6, spoilt=(3, 4))
        scale = None if state.loss_scale is None else state.loss_scale.state()
        found.append((repr(results), scale, everything(state)))
    assert found[0][:2] == found[1][:2]
    assert_same(found[0][2], found[1][2])


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter sum gradients and update, as on a GPU."""
    pytest.importorskip("triton")
    from megafp8.fp8.kernels import triton_adam, triton_sums

    monkeypatch.setattr(triton_sums, "PROGRAMS", 2)  # the interpreter runs one after another
    for module in (triton_sums, triton_adam):
        monkeypatch.setattr(module, "BLOCK", 4096)
    for module in (scaled, scaled_adam):
        monkeypatch.setattr(module, "runs_triton", lambda device: True)
    monkeypatch.setattr(scaled_adam, "_kernel_reproduces_torch", lambda: False)
    monkeypatch.setattr(scaled_adam, "_triton_reproduces_torch", lambda *_: True)
    monkeypatch.setattr(scaled.ScaledTensor, "_fits_kernel", lambda *_: False)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, from numpy
@pytest.mark.parametrize("spoils", ["loss", "gradient"])
def test_triton_over_stored_states_skips_a_step(
    spoils: str, by_triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Optimizers, "decides_on_device", Optimizers.skip_on_device)
    check_skipped_step(torch.device("cpu"), SKIPPED["delayed"], spoils, O2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, from numpy
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_stored_states_have_the_bits_of_a_host_that_decides(
    stochastic: bool, by_triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 2 and 3 of five are not finite; clipping on the device has the host's factor."""
    storage = replace(O2, stochastic_rounding=stochastic)
    optim, found = optim_spec(clip_grad_norm=0.5, storage=storage), []
    for on_device in (False, True):
        decides = Optimizers.skip_on_device if on_device else False
        monkeypatch.setattr(Optimizers, "decides_on_device", decides)
        state = build_run(optim=optim, compute="bf16", fp8=FP8)
        assert state.optimizer.decides_on_device == on_device
        results = steps_with_spoilt_ones(state, 5, spoilt=(2, 3))
        found.append((repr(results), everything(state)))
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])


def test_a_run_in_nvfp4_leaves_no_cast_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its header says, with sizes of 16 times an odd number, in validation and samples too."""
    need_kernels()

    def cast(self: Nvfp4, x_MK: torch.Tensor, asked: Cast) -> Scaled:
        raise AssertionError(f"{asked.role} {list(x_MK.shape)} is cast by torch operations")

    monkeypatch.setattr(Nvfp4, "cast", cast)
    model = gpt_spec(hidden_size=48, ffn_hidden_size=80, num_attention_heads=3)
    state = build_run(model=model, compute="bf16", fp8=Fp8Recipe(name="nvfp4"))
    assert state.backend.describe().endswith("casts in C")
    step(state, [microbatch(0, batch=3), microbatch(1, batch=3)])
    evaluate(state, [microbatch(2, batch=3)])
    sample(state, [1, 2, 3], 2, vocab_size=96, temperature=1.0, seed=0)
