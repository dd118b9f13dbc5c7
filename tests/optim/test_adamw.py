"""AdamW over FP32 masters against torch's plain AdamW; what masters and weights have in common."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megafp8.models.init import constant, normal, parameter, pieces_of
from megafp8.optim.adamw import STATES, AdamW
from megafp8.optim.clipping import clip, grad_norm
from megafp8.optim.kernels import STATES_OF_ADAM, TorchAdam
from megafp8.optim.masters import Masters
from megafp8.optim.partitions import Partition
from megafp8.optim.protocol import Optimizers, Step
from megafp8.optim.schedules import learning_rate
from megafp8.parallel.collectives import Axis
from megafp8.parallel.mesh import Replicas
from megafp8.plan.time import write_back_bytes
from megafp8.specs import OptimSpec
from megafp8.specs.geometry import Piece, whole_pieces
from megafp8.specs.optim import AdamTraits
from tests.kit.tensors import state_tensors
from tests.tiny import build_run, optim_spec, run_spec

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def params(dtype: torch.dtype) -> list[nn.Parameter]:
    """A whole matrix, half of a sharded one, a norm's weight and a bias."""
    half = Piece("half", (6, 4), (3, 0), (slice(0, 3), slice(0, 4)))
    return [
        parameter((5, 7), whole_pieces("matrix", (5, 7)), normal(1.0, 1), dtype),
        parameter((7,), whole_pieces("norm", (7,)), constant(1.0), dtype),
        parameter((3, 4), [half], normal(1.0, 1), dtype),
        parameter((3,), whole_pieces("bias", (3,)), constant(0.0), dtype),
    ]


def optimizer(dtype: torch.dtype, spec: OptimSpec | None = None) -> Optimizers:
    return Optimizers(Masters(params(dtype)), spec or optim_spec())


def draw_gradients(masters: Masters, step: int, std: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    masters.own_grads[0].copy_(std * torch.randn(masters.own_grads[0].shape, generator=generator))


@DTYPES
@pytest.mark.parametrize("reference", [torch.float64, torch.float32], ids=["in FP64", "in FP32"])
@pytest.mark.parametrize(
    ("name", "plain_class"),
    [("adamw", torch.optim.AdamW), ("fused_adam", torch.optim.AdamW), ("adam", torch.optim.Adam)],
)
def test_masters_follow_torchs_plain_optimizer(
    name: str, plain_class: Any, dtype: torch.dtype, reference: torch.dtype
) -> None:
    """12 steps, within 1e-6 of each tensor's largest element. Matrices decay, the others not;
    the weight decay is large so that a wrong group or kind would show."""
    spec = optim_spec(name=name, weight_decay=0.5, lr=0.05)
    ours = optimizer(dtype, spec)
    masters = ours.masters.masters
    copies = [nn.Parameter(master.detach().to(reference, copy=True)) for master in masters]
    plain = plain_class(
        [
            {"params": [c for c in copies if c.dim() > 1], "weight_decay": 0.5},
            {"params": [c for c in copies if c.dim() == 1], "weight_decay": 0.0},
        ],
        lr=1.0,
        betas=spec.betas,
        eps=spec.eps,
        fused=False,
        foreach=False,
    )
    for step in range(1, 13):
        draw_gradients(ours.masters, step)
        for copy, grad in zip(copies, ours.masters.grads, strict=True):
            copy.grad = grad.to(reference, copy=True)
        for group in plain.param_groups:
            group["lr"] = learning_rate(spec, step)
        ours.step(step)
        plain.step()
        for master, copy in zip(masters, copies, strict=True):
            difference = (master.detach().to(reference) - copy.detach()).abs().max()
            assert difference <= 1e-6 * copy.detach().abs().max()
    assert ours.num_updates == 12
    for moment in STATES:
        for state, copy in zip(state_tensors(ours, moment), copies, strict=True):
            theirs = plain.state[copy][moment]
            assert (state.to(reference) - theirs).abs().max() <= 1e-6 * theirs.abs().max()


@pytest.mark.parametrize("with_scale", [False, True], ids=["", "with a scale"])
@pytest.mark.parametrize(
    ("name", "plain_class"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam)]
)
def test_our_calls_of_torchs_kernel_have_the_bits_of_torchs_optimizer(
    name: str, plain_class: Any, with_scale: bool
) -> None:
    """The third of five steps finds an infinity, where a scale is given; rates change."""
    spec = optim_spec(name=name, weight_decay=0.5, lr=0.05)
    ours, theirs = params(torch.float32), params(torch.float32)
    pairs = [
        ({"params": p[:2], "weight_decay": 0.5}, {"params": p[2:], "weight_decay": 0.0})
        for p in (ours, theirs)
    ]
    mine = TorchAdam(list(pairs[0]), spec)
    plain = plain_class(list(pairs[1]), lr=1.0, betas=spec.betas, eps=spec.eps, fused=True)
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        for optimizer in (mine, plain):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (step + 1)
            if with_scale:
                optimizer.grad_scale = torch.tensor(3.7)
                optimizer.found_inf = torch.tensor(float(step == 2))
            optimizer.step()
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other) and not torch.equal(one, one.grad)
            for state in STATES_OF_ADAM:
                assert torch.equal(mine.state[one][state], plain.state[other][state])
    assert plain.state[theirs[0]]["step"] == (4 if with_scale else 5)


def test_no_state_can_be_replaced_behind_the_kernels_lists() -> None:
    optimizer = TorchAdam([{"params": params(torch.float32), "weight_decay": 0.0}], optim_spec())
    for states in optimizer.state.values():
        with pytest.raises(TypeError):
            states["exp_avg"] = torch.zeros(1)  # type: ignore[index]


@pytest.mark.parametrize("vectors_decay", [False, True])
def test_norms_and_biases_decay_only_if_asked(vectors_decay: bool) -> None:
    """With zero gradients only decay moves anything."""
    spec = optim_spec(weight_decay=0.5, lr=0.1, decays_vectors=vectors_decay)
    ours = optimizer(torch.float32, spec)
    before = [master.detach().clone() for master in ours.masters.masters]
    ours.masters.own_grads[0].zero_()
    ours.step(1)
    factor = 1 - 0.5 * learning_rate(ours.spec, 1)
    for master, old in zip(ours.masters.masters, before, strict=True):
        expected = old * factor if master.dim() > 1 or vectors_decay else old
        torch.testing.assert_close(master.detach(), expected)


def test_a_range_of_a_matrix_decays_as_the_matrix_does() -> None:
    """Under ZeRO-1 masters are ranges of elements, which are vectors all of them."""
    masters = Masters(params(torch.float32), partition=Partition("elements", Axis("data", 2)))
    before = [master.detach().clone() for master in masters.masters]
    masters.own_grads[0].zero_()
    ours = Optimizers(masters, optim_spec(weight_decay=0.5))
    ours.optimizers[0].update(Step(1, 0.1, 1))
    assert len(before) > 1 and all(master.dim() == 1 for master in masters.masters)
    for segment, old, new in zip(masters.segments, before, masters.masters, strict=True):
        assert torch.equal(new, old) == (segment.param.dim() == 1)


def test_in_a_gpt_matrices_and_embeddings_decay_alone() -> None:
    state = build_run(optim=optim_spec(weight_decay=0.5, lr=0.1))
    before = [master.detach().clone() for master in state.masters.masters]
    state.masters.own_grads[0].zero_()
    state.optimizer.step(1)
    for param, master, old in zip(state.masters.params, state.masters.masters, before, strict=True):
        names = [piece.name for piece in pieces_of(param)]
        stays = all(name.endswith(".bias") or "norm" in name for name in names)
        assert torch.equal(master, old) == (stays or not old.any()), names
        if not stays:
            torch.testing.assert_close(master.detach(), 0.95 * old)


def test_clipping_by_value_cuts_each_element_of_the_mean_gradient() -> None:
    masters = Masters(params(torch.float32))
    draw_gradients(masters, 3)
    expected = (masters.own_grads[0] / 7).clamp(-0.1, 0.1)
    clip(
        masters.own_grads[0], 1.0, optim_spec(clip_algorithm="value", clip_grad_norm=0.1), divisor=7
    )
    torch.testing.assert_close(masters.own_grads[0], expected)
    assert (masters.own_grads[0].abs() == 0.1).any() and (masters.own_grads[0].abs() < 0.1).any()


@pytest.mark.parametrize("limit", [0.5, 1e9, None])
def test_clipping_by_norm_is_torchs(limit: float | None) -> None:
    masters = Masters(params(torch.float32))
    draw_gradients(masters, 3)
    copy = nn.Parameter(torch.zeros_like(masters.own_grads[0]))
    copy.grad = masters.own_grads[0] / 7
    norm = torch.nn.utils.clip_grad_norm_([copy], limit or math.inf).item()
    clip(masters.own_grads[0], norm, optim_spec(clip_grad_norm=limit), divisor=7)
    torch.testing.assert_close(masters.own_grads[0], copy.grad)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def contents(ours: Optimizers) -> list[torch.Tensor]:
    """Return copies of gradients, masters, weights and moments."""
    masters = ours.masters
    moments = [tensor for name in STATES for tensor in state_tensors(ours, name)]
    tensors = [masters.own_grads[0], *masters.masters, *masters.params, *moments]
    return [tensor.detach().clone() for tensor in tensors]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("limit", [0.5, 1e9, None])
def test_a_kernel_that_clips_updates_as_after_clipping(limit: float | None) -> None:
    """A division rounds a gradient where clipping multiplies: one unit of the last place."""
    results = []
    for on_device in (False, True):
        ours = optimizer(torch.float32, optim_spec(clip_grad_norm=limit, lr=0.1))
        for step in range(1, 4):
            draw_gradients(ours.masters, step)
            norm = (ours.masters.own_grads[0] / 7).norm().item()
            if on_device:
                ours.update_if_finite(step, scalar(1), scalar(norm), divisor=scalar(7))
            else:
                ours.update(step, norm, divisor=7)
        moments = [torch.cat([x.flatten() for x in state_tensors(ours, name)]) for name in STATES]
        results.append((ours.masters.own_grads[0].clone(), *moments))
    for mine, theirs in zip(*results, strict=True):
        assert (mine - theirs).abs().max() <= 2.0**-21 * theirs.abs().max()
    assert ours.num_updates == 3
    draw_gradients(ours.masters, 4)
    before = ours.masters.own_grads[0].clone()
    ours.step(4)
    assert torch.equal(ours.masters.own_grads[0], before), "a later step alone divides by nothing"


@DTYPES
@pytest.mark.parametrize("limit", [0.3, 1e9, None])
def test_the_factor_computed_on_the_device_has_the_bits_of_the_hosts(
    limit: float | None, dtype: torch.dtype
) -> None:
    """The expected factor is Python's, given to torch's kernel as a number of the host."""
    ours, expected = (optimizer(dtype, optim_spec(clip_grad_norm=limit, lr=0.1)) for _ in range(2))
    for step in range(1, 40):
        divisor = 3.0 * step
        for each in (ours, expected):
            draw_gradients(each.masters, step)
        norm = (ours.masters.own_grads[0] / divisor).norm().item()
        ours.update_if_finite(step, scalar(1), scalar(norm), divisor=scalar(divisor))
        factor = divisor / min(1.0, (limit or math.inf) / (norm + 1e-6))
        expected.step(step, divisor=torch.full((), factor))
    assert same(contents(ours), contents(expected))


def kernels_count(ours: Optimizers) -> int:
    """Return Adam's t, which the kernel counts for each parameter."""
    (adamw,) = ours.optimizers
    assert isinstance(adamw, AdamW)
    (count,) = {int(state["step"]) for state in adamw._torch.state.values()}
    return count


@DTYPES
@pytest.mark.parametrize(
    ("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)]
)
def test_a_kernel_skips_a_step_that_is_not_finite(
    loss: float, norm: float, dtype: torch.dtype
) -> None:
    """Nothing moves, Adam's t neither, and the next step is the one that would have come."""
    ours, undisturbed = optimizer(dtype), optimizer(dtype)
    for each in (ours, undisturbed):
        draw_gradients(each.masters, 1)
        each.update_if_finite(1, scalar(1), scalar(2), divisor=scalar(7))
    before = contents(ours)
    ours.update_if_finite(2, scalar(loss), scalar(norm), divisor=scalar(7))
    ours.num_updates -= 1  # as a step does
    assert same(contents(ours), before)
    assert kernels_count(ours) == ours.num_updates == 1
    for each in (ours, undisturbed):
        draw_gradients(each.masters, 3)
        each.update_if_finite(3, scalar(1), scalar(2), divisor=scalar(7))
    assert same(contents(ours), contents(undisturbed))
    assert kernels_count(ours) == ours.num_updates == 2


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations move, and the operations that touch the gradients.

    What an operation changes is read and written; what it fills from another tensor is written.
    """

    def __init__(self, gradients: torch.Tensor) -> None:
        super().__init__()
        self.bytes = 0
        self.passes: list[str] = []
        self._gradients = gradients.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given = {
            **dict(zip((a.name for a in func._schema.arguments), args, strict=False)),
            **(kwargs or {}),
        }
        touched = []
        for argument in func._schema.arguments:
            value = given.get(argument.name)
            tensors = [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            times = 2 if is_written and "copy" not in name else 1
            touched += [(tensor, times) for tensor in tensors if tensor.dim() > 0]
        if name not in VIEWS:
            if any(x.untyped_storage().data_ptr() == self._gradients for x, _ in touched):
                self.passes.append(name)
            self.bytes += sum(x.numel() * x.element_size() * times for x, times in touched)
        return result


VIEWS = {"detach", "view", "split", "split_with_sizes", "alias", "slice", "_unsafe_view"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_norm_clip_and_update_are_two_passes_over_the_gradients(dtype: torch.dtype) -> None:
    """The bytes for each parameter are those that docs/evidence/performance.md and the plan state.

    An FP32 weight is its own master, and nothing rounds it.
    """
    sizes = (256, 512)
    matrix = parameter(sizes, whole_pieces("matrix", sizes), normal(1.0, 1), dtype)
    ours = Optimizers(Masters([matrix]), optim_spec(clip_grad_norm=0.5))
    draw_gradients(ours.masters, 1)
    one = Axis("one")
    with Traffic(ours.masters.own_grads[0]) as traffic:
        norm = grad_norm(ours.masters, one, one)
        ours.update_if_finite(1, scalar(1), norm, divisor=scalar(7))
    assert traffic.passes == ["_foreach_norm", "_fused_adamw_"]
    planned = AdamTraits.update_bytes + write_back_bytes(run_spec(), dtype.itemsize)
    assert planned == (42 if dtype == torch.bfloat16 else 36)
    assert traffic.bytes / matrix.numel() == pytest.approx(planned, abs=0.01)


def test_weights_are_the_masters_rounded() -> None:
    ours = optimizer(torch.bfloat16, optim_spec(lr=1e-5))
    for step in range(1, 5):
        draw_gradients(ours.masters, step)
        ours.step(step)
        for param, master in zip(ours.masters.params, ours.masters.masters, strict=True):
            assert torch.equal(param.detach(), master.detach().bfloat16())
    lost = [
        not torch.equal(master.detach(), param.detach().float())
        for param, master in zip(ours.masters.params, ours.masters.masters, strict=True)
    ]
    assert any(lost), "the masters hold more than the weights"


def test_masters_start_from_the_unrounded_initialization() -> None:
    exact = {tuple(p.shape): p.detach() for p in params(torch.float32)}
    masters = Masters(params(torch.bfloat16))
    for param, master in zip(masters.params, masters.masters, strict=True):
        assert master.dtype == torch.float32 and master is not param
        assert torch.equal(master.detach(), exact[tuple(param.shape)])


def test_an_fp32_master_is_the_parameter() -> None:
    masters = Masters(params(torch.float32))
    assert all(p is m for p, m in zip(masters.params, masters.masters, strict=True))


def test_sharded_parameters_come_first_in_one_flat_gradient() -> None:
    masters = Masters(params(torch.bfloat16))
    assert [pieces_of(param)[0].is_sharded for param in masters.params].index(False) == 1
    assert tuple(masters.params[0].shape) == (3, 4)
    assert masters.own_grads[0].numel() == sum(p.numel() for p in masters.params)
    masters.own_grads[0].copy_(torch.arange(masters.own_grads[0].numel()))
    assert torch.equal(torch.cat([grad.flatten() for grad in masters.grads]), masters.own_grads[0])
    for param, grad in zip(masters.params, masters.grads, strict=True):
        assert grad.shape == param.shape


@DTYPES
def test_a_step_leaves_no_gradients_behind(dtype: torch.dtype) -> None:
    ours = optimizer(dtype)
    draw_gradients(ours.masters, 1)
    ours.step(1)
    assert all(param.grad is None for param in (*ours.masters.params, *ours.masters.masters))


def test_gradient_norm_is_that_of_all_gradients() -> None:
    masters = Masters(params(torch.float32))
    for std in (1.0, 1e-12, 1e12):
        draw_gradients(masters, 3, std)
        expected = masters.own_grads[0].double().norm().item()
        assert grad_norm(masters, Axis("tp"), Axis("pp")).item() == pytest.approx(
            expected, rel=1e-6
        )
    masters.own_grads[0][5] = math.nan
    assert math.isnan(grad_norm(masters, Axis("tp"), Axis("pp")).item())
    masters.own_grads[0].zero_()
    assert grad_norm(masters, Axis("tp"), Axis("pp")).item() == 0


def test_gradient_norm_sums_sharded_parameters_over_ranks_and_replicated_ones_once() -> None:
    class TwoEqualRanks(Axis):
        def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor * 2

    masters = Masters(params(torch.float32))
    draw_gradients(masters, 3)
    squares = [grad.double().square().sum().item() for grad in masters.grads]
    expected = math.sqrt(2 * squares[0] + sum(squares[1:]))
    assert grad_norm(masters, TwoEqualRanks("tp", 2), Axis("pp")).item() == pytest.approx(
        expected, rel=1e-6
    )


def test_gradient_norm_leaves_out_copies_and_sums_groups_over_stages_too() -> None:
    """A stage's copy of a tied weight is counted by its owner, and experts by all stages."""

    class Summing(Axis):
        def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor * self.size

    given = params(torch.float32)
    copy, expert = given[0], given[1]
    for param, change in ((copy, {"replica": 1}), (expert, {"group": "expert"})):
        (piece,) = pieces_of(param)
        param.pieces = (replace(piece, **change),)  # type: ignore[attr-defined, arg-type]
    masters = Masters(given, others={"expert": Partition()})
    masters.shards_of = {"dense": Summing("data", 2), "expert": Summing("edp", 3)}
    draw_gradients(masters, 3)
    masters.own_grads[1].fill_(2.0)
    both = zip(masters.segments, masters.grads, strict=True)
    of = {s.param: g.double().square().sum().item() for s, g in both}
    dense = sum(of[param] for param in given[2:])
    groups = {"expert": Replicas(Axis("edp"), Summing("ep", 5))}
    norm = grad_norm(masters, Axis("tp"), Summing("pp", 7), groups=groups)
    assert norm.item() == pytest.approx(math.sqrt(7 * (2 * dense + 3 * 5 * of[expert])), rel=1e-6)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_number_of_updates_can_be_restored(name: str) -> None:
    """Adam's bias correction goes on from there, also where Muon owns the first parameter."""

    def made() -> Optimizers:
        given = params(torch.float32)
        return Optimizers(Masters(given, linears=given[:1]), optim_spec(name=name))

    ours, again = made(), made()
    assert len(ours.optimizers) == 1 + (name == "muon")
    for step in (1, 2, 3):
        draw_gradients(ours.masters, step)
        ours.step(step)
        if step == 2:
            for mine, theirs in zip(again.masters.masters, ours.masters.masters, strict=True):
                mine.data.copy_(theirs.data)
            both = zip(again.all_state_tensors(), ours.all_state_tensors(), strict=True)
            for state, their_state in both:
                state.copy_(their_state)
            again.set_num_updates(ours.num_updates)
    draw_gradients(again.masters, 3)
    again.step(3)
    assert again.num_updates == 3
    for mine, theirs in zip(again.masters.masters, ours.masters.masters, strict=True):
        assert torch.equal(mine, theirs)


def test_ranks_that_own_nothing_name_the_same_states() -> None:
    """Names that some ranks lack would be checkpoints and messages that others wait for."""
    for rank in range(8):
        given = params(torch.float32)
        partition = Partition("tensors", Axis("data", 8, rank))
        masters = Masters(given, partition=partition, linears=given[:1])
        states = Optimizers(masters, optim_spec(name="dist_muon")).states()
        assert [name for name, _ in states] == ["exp_avg", "exp_avg_sq", "momentum_buffer"], rank
