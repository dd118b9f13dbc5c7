"""Experts and routers: a worked example by hand, transformers' blocks, and rules of a step.

The numbers of the example were computed outside of this project; the formulas beside it are this
file's own. Whole models with experts are compared with the slow reference in `test_options`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megafp8.checkpoint.reader import Reader
from megafp8.fp8.linear import linears_of_rows
from megafp8.fp8.scaling import ScalingState
from megafp8.models import moe as moe_module
from megafp8.models import router as router_module
from megafp8.models.attention import KVCache
from megafp8.models.block import MLP, mlp_of
from megafp8.models.init import pieces_of
from megafp8.models.moe import MoE
from megafp8.models.parts import Parts
from megafp8.models.random import RandomStreams
from megafp8.models.router import balance_loss, best, choose, counts_of, z_loss
from megafp8.observe.flops import gemm_flops_per_token
from megafp8.parallel.collectives import Axis
from megafp8.parallel.experts import AllToAll
from megafp8.parallel.parts import linears_of
from megafp8.specs import Fp8Recipe, GPTSpec, MoESpec
from megafp8.specs import layer as layer_module
from megafp8.specs.layer import Mlp, layer_spec, linear_names
from megafp8.specs.model import RecomputeSpec
from megafp8.specs.parameters import num_active_parameters, num_parameters, parameters_of
from megafp8.specs.precision import ModuleRule
from megafp8.specs.rank_shape import rank_shape
from megafp8.train import load_model, state_dict
from megafp8.train.build import build
from megafp8.train.generate import Sampling, generate
from megafp8.train.nonfinite import first_nonfinite
from megafp8.train.saver import Saver
from megafp8.train.state import TrainState
from megafp8.train.step import forward_backward, train_step
from megafp8.train.validate import evaluate
from tests.kit.operations import Operations
from tests.models.reference import weights_of
from tests.tiny import (
    SEQ,
    VOCAB,
    build_run,
    gpt_spec,
    microbatch,
    moe_spec,
    optim_spec,
    precision_share,
    run_spec,
)

RECIPES = (
    "delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "nvfp4",
)  # fmt: skip


# ------------------------------------------------------------------------------ a worked example

X = torch.tensor([[[1, 0], [2, -1]], [[0, 1], [1, 1.5]]], dtype=torch.float64)
ROUTER = torch.tensor([[1, 0], [0.5, 0.5], [0, 1], [-0.5, 0.25]], dtype=torch.float64)
GATES = torch.tensor([[1, e / 2] for e in range(4)], dtype=torch.float64)
UPS = torch.tensor([[0.5, 1 - e / 4] for e in range(4)], dtype=torch.float64)
FC2S = torch.tensor([[1, -e / 2] for e in range(4)], dtype=torch.float64)
C = torch.tensor([[1, 0.5], [0.5, -1], [0, 1], [1, 1]], dtype=torch.float64)
"""The main loss is the sum of the outputs times these numbers."""
AFTER = moe_spec(ffn_hidden_size=1, layers=(True,))
WITH_LOSSES = replace(AFTER, router_loss="aux_loss", router_loss_coeff=0.01, z_loss_coeff=0.001)
PRINTED = {
    "logits": [1, 0.5, 0, -0.5, 2, 0.5, -1, -1.25, 0, 0.5, 1, 0.25, 1, 1.25, 1.5, -0.125],
    "logsumexp": [1.7873387, 2.2713175, 1.8947715, 2.4486584],
    "y": [
        0.3655293, -0.0690011, 0.0559299, -0.0279650, 0.3156535, -0.2715903, 2.6842666, -2.1539002,
    ],
    "dp": [0.3655293, 0.2741470, 0, 0.3065904, -0.1167111, -0.3655293, 1.2113704, 0],
    "dlogits main": [
        0.0214752, -0.0214752, 0, 0, -0.0457269, 0.0457269, 0, 0,
        0, 0.0584732, -0.0584732, 0, 0, 0.2981595, -0.2981595, 0,
    ],
    "dlogits": [
        0.0216834, -0.0206589, 0.0000766, -0.0002074, -0.0451290, 0.0462856, 0.0000298, -0.0000507,
        0.0001218, 0.0592938, -0.0581420, -0.0003262, 0.0001553, 0.2991129, -0.2979036, -0.0001402,
    ],
    "dx": [
        0.7625424, 0.6656707, 0.4974473, 0.9348117, -0.6204514, -0.6412666, 0.6945573, 0.2871952,
    ],
    "main": [0.6457348],
    "aux": [0.0114880],
    "seq aux": [0.0150450],
    "sigmoid seq aux": [0.0124560],
    "z": [0.0044849],
    "parts of aux": [0.0057875, 0.0057004],
    "drouter main": [-0.0699786, 0.0457269, 0.3681381, 0.4599856, -0.2981595, -0.5057125, 0, 0],
    "drouter": [
        -0.0684193, 0.0454837, 0.3710251, 0.4616775, -0.2977674, -0.5050271, -0.0004491, -0.0004858,
    ],
    "dgate": [0.2887186, 0, 0.6079026, 0.4201270, 0, -0.2887186, 0, 0],
    "dup": [1.8952887, -0.7201172, 0.9808220, 0.2070984, 0, -0.4550542, 0, 0],
    "dfc2": [0.2275271, 0.1137636, 1.2267000, 1.1619304, 1.6235338, 1.8510609, 0, 0],
    "amax fc1": [2, 2, 1.5, 0],
    "amax fc2": [0.2275271, 1.0607328, 1.6235338, 0],
}  # fmt: skip
WEIGHTS: dict[str, tuple[MoESpec, tuple[float, ...], list[dict[int, float]]]] = {
    "softmax after": (AFTER, (), [
        {0: 0.6224593, 1: 0.3775407}, {0: 0.8175745, 1: 0.1824255},
        {1: 0.3775407, 2: 0.6224593}, {1: 0.4378235, 2: 0.5621765},
    ]),
    "softmax before": (replace(AFTER, pre_softmax=True), (), [
        {0: 0.4550542, 1: 0.2760043}, {0: 0.7623744, 1: 0.1701087},
        {1: 0.2478897, 2: 0.4087010}, {1: 0.3015986, 2: 0.3872602},
    ]),
    "sigmoid": (replace(AFTER, score_function="sigmoid"), (), [
        {0: 0.5401174, 1: 0.4598826}, {0: 0.5859260, 1: 0.4140740},
        {1: 0.4598826, 2: 0.5401174}, {1: 0.4873737, 2: 0.5126263},
    ]),
    "sigmoid, bias, scale": (
        replace(AFTER, score_function="sigmoid", scaling_factor=2.5), (-0.2, 0, 0, 0.3), [
            {1: 1.5561483, 3: 0.9438517}, {0: 1.4648151, 1: 1.0351849},
            {2: 1.4132361, 3: 1.0867639}, {1: 1.2184343, 2: 1.2815657},
        ],
    ),
}  # fmt: skip
"""Of each mode: the experts of each token and their weights."""


class Example:
    """The example by this file's own formulas, a token and an expert at a time, in FP64."""

    def __init__(self, moe: MoESpec) -> None:
        self.x = X.view(4, 2).clone().requires_grad_()
        self.router = ROUTER.clone().requires_grad_()
        self.experts = [t.clone().requires_grad_() for t in (GATES, UPS, FC2S)]
        gates, ups, fc2s = self.experts
        self.logits = self.x @ self.router.t()
        self.logits.retain_grad()
        chosen = [weights_of(moe, logits) for logits in self.logits]
        self.weights = [p for each in chosen for p in each.values()]
        for p in self.weights:
            p.retain_grad()
        self.read = [[0.0] for _ in range(4)], [[0.0] for _ in range(4)]  # by fc1s and fc2s
        rows = []
        for x, of_token in zip(self.x, chosen, strict=True):
            y = torch.zeros(2, dtype=torch.float64)
            for e, p in of_token.items():
                gate = gates[e] @ x
                inner = p * gate / (1 + (-gate).exp()) * (ups[e] @ x)
                self.read[0][e] += x.detach().abs().tolist()
                self.read[1][e].append(inner.abs().item())
                y = y + inner * fc2s[e]
            rows.append(y)
        self.y = torch.stack(rows)
        self.main = (C * self.y).sum()
        self.aux, self.z = self.balance(range(4)), self.logits.exp().sum(-1).log()
        self.z = 0.001 * (self.z**2).sum() / 4

    def balance(self, tokens: range, of: range | None = None, *, sigmoid: bool = False) -> Any:
        """The auxiliary loss of some tokens; `of` sums their scores over a part of them alone."""
        scores = self.logits.softmax(-1)
        if sigmoid:
            scores = 1 / (1 + (-self.logits).exp())
            scores = scores / scores.sum(-1, keepdim=True)
        counts = [0] * 4
        for t in tokens:
            for e in sorted(range(4), key=lambda e: (-scores[t, e].item(), e))[:2]:
                counts[e] += 1
        total = sum(counts[e] * scores[t, e] for e in range(4) for t in of or tokens)
        return 0.01 * 4 / (2 * len(tokens) ** 2) * total

    def backward(self, *, with_losses: bool) -> Example:
        loss = self.main + self.aux + self.z if with_losses else self.main
        loss.backward()
        return self

    def printed(self) -> dict[str, Any]:
        """What the example prints, under its names."""
        main = Example(AFTER).backward(with_losses=False)
        halves = range(2), range(2, 4)
        pair, sigmoid = (
            sum(self.balance(half, sigmoid=is_sigmoid) for half in halves) / 2
            for is_sigmoid in (False, True)
        )
        gates, ups, fc2s = self.experts
        return {
            "logits": self.logits, "logsumexp": self.logits.exp().sum(-1).log(), "y": self.y,
            "dp": torch.stack([p.grad for p in self.weights]),
            "dlogits main": main.logits.grad, "dlogits": self.logits.grad, "dx": self.x.grad,
            "main": self.main, "aux": self.aux, "seq aux": pair,
            "sigmoid seq aux": sigmoid, "z": self.z,
            "parts of aux": torch.stack(
                [self.balance(range(4), half) for half in halves]
            ),
            "drouter main": main.router.grad, "drouter": self.router.grad,
            "dgate": gates.grad, "dup": ups.grad, "dfc2": fc2s.grad,
            "amax fc1": torch.tensor([max(each) for each in self.read[0]], dtype=torch.float64),
            "amax fc2": torch.tensor([max(each) for each in self.read[1]], dtype=torch.float64),
        }  # fmt: skip


@pytest.fixture(scope="module")
def example() -> Example:
    return Example(AFTER).backward(with_losses=True)


@pytest.mark.parametrize("name", PRINTED)
def test_the_formulas_give_each_printed_digit(name: str, example: Example) -> None:
    found = example.printed()[name].detach().flatten()
    assert found.tolist() == pytest.approx(PRINTED[name], abs=5.01e-8, rel=0)


@pytest.mark.parametrize("mode", WEIGHTS)
def test_the_weights_of_each_mode_are_the_printed_ones(mode: str) -> None:
    moe, bias, printed = WEIGHTS[mode]
    logits = X.view(4, 2) @ ROUTER.t()
    bias_E = torch.tensor(bias) if bias else None
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 2e-7)):
        choice = choose(logits.to(dtype), moe, bias_E)
        for t, expected in enumerate(printed):
            by_hand = weights_of(moe, logits[t], bias)
            assert by_hand == pytest.approx(expected, abs=5.01e-8, rel=0)
            found = dict(zip(choice.experts[t].tolist(), choice.weights[t].tolist(), strict=True))
            assert found == pytest.approx({e: p.item() for e, p in by_hand.items()}, rel=bound)
            assert list(found) == sorted(found)


def layer_of(
    moe: MoESpec, dtype: torch.dtype = torch.float64, ep: Axis | None = None, **changes: Any
) -> tuple[MoE, dict[str, torch.Tensor]]:
    """An MLP of experts alone, which `ep` may divide, and its logical tensors, to be written."""
    sizes: dict[str, Any] = dict(num_layers=1, bias=False, activation="swiglu", moe=moe)
    parts = Parts(gpt_spec(**(sizes | changes)), dtype, 7, RandomStreams(7))
    if ep is not None:
        parts.exchange, parts.num_expert_parts = AllToAll(ep), ep.size
    layer = mlp_of(parts, 0)
    assert isinstance(layer, MoE) and parts.added_losses is not None
    parts.added_losses.begin_step(torch.device("cpu"))
    parts.added_losses.begin_microbatch(torch.ones(2, 2, dtype=torch.bool))
    return layer, {
        piece.name.removeprefix("layers.0.mlp."): param.data[piece.local]
        for param in layer.parameters()
        for piece in pieces_of(param)
    }


def gradients_of(layer: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for param in layer.parameters():
        assert param.grad is not None
        for piece in pieces_of(param):
            found[piece.name.removeprefix("layers.0.mlp.")] = param.grad[piece.local]
    return found


def example_layer(moe: MoESpec, dtype: torch.dtype) -> MoE:
    layer, tensors = layer_of(moe, dtype, hidden_size=2, num_attention_heads=1, ffn_hidden_size=1)
    tensors["router.weight"].copy_(ROUTER)
    for e in range(4):
        tensors[f"experts.{e}.gate.weight"].copy_(GATES[e])
        tensors[f"experts.{e}.up.weight"].copy_(UPS[e])
        tensors[f"experts.{e}.fc2.weight"].copy_(FC2S[e][:, None])
    return layer


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 2e-7)])
def test_the_layer_is_the_example(dtype: torch.dtype, bound: float, example: Example) -> None:
    # A term weighs as the four counted tokens do, and the example adds one mean.
    moe = replace(WITH_LOSSES, router_loss_coeff=0.01 / 4, z_loss_coeff=0.001 / 4)
    layer = example_layer(moe, dtype)
    read: dict[str, list[float]] = {"fc1": [], "fc2": []}
    for name, amaxes in read.items():
        for linear in getattr(layer, name):
            linear.register_forward_pre_hook(
                lambda _, args, amaxes=amaxes: amaxes.append(
                    max([0.0, *args[0].detach().abs().flatten().tolist()])
                )
            )
    x = X.clone().to(dtype).requires_grad_()
    y = layer(x)
    (C.view(2, 2, 2).to(dtype) * y).sum().backward()
    found = {"y": y, "dx": x.grad, "drouter": layer.router.weight.grad}
    grads = gradients_of(layer)
    for part in ("gate", "up", "fc2"):
        each = [grads[f"experts.{e}.{part}.weight"].flatten() for e in range(4)]
        found[f"d{part}"] = torch.stack(each)
    sums = layer.router.added.sums
    found |= {"aux": 0.01 * sums[0] / 4, "z": 0.001 * sums[1] / 4}
    found |= {f"amax {name}": torch.tensor(amaxes, dtype=dtype) for name, amaxes in read.items()}
    printed = example.printed()
    for name, value in found.items():
        expected = printed[name].detach().flatten()
        difference = (value.detach().double().flatten() - expected).abs().max()
        assert difference <= bound * max(1, expected.abs().max()), (name, difference)
    assert layer.router.counts.tolist() == [2, 4, 2, 0]
    assert grads["experts.3.gate.weight"].tolist() == [[0, 0]]  # zeros, and not no gradient


@pytest.mark.parametrize(
    "score, name, sequences",
    [("softmax", "aux", 1), ("softmax", "seq aux", 2), ("sigmoid", "sigmoid seq aux", 2)],
)
def test_the_losses_of_a_router(score: Any, name: str, sequences: int, example: Example) -> None:
    moe = replace(AFTER, score_function=score)
    logits = example.logits.detach()
    found = 0.01 * balance_loss(logits, moe, sequences)
    assert found.item() == pytest.approx(example.printed()[name].item(), rel=1e-12)
    assert 0.001 * z_loss(logits).item() == pytest.approx(example.z.item(), rel=1e-12)
    assert balance_loss(torch.eye(4), replace(moe, top_k=1)).item() == pytest.approx(1)


def test_the_term_of_sequences_is_added_for_each_of_them(example: Example) -> None:
    moe = replace(AFTER, router_loss="seq_aux_loss", router_loss_coeff=0.01)
    layer = example_layer(moe, torch.float64)
    layer(X.clone().requires_grad_())
    assert layer.router.added.sums.item() / 4 == pytest.approx(
        example.printed()["seq aux"].item() / 0.01, rel=1e-12
    )


def test_uncounted_tokens_are_routed_and_a_term_weighs_as_the_counted_ones(
    example: Example,
) -> None:
    """One of four tokens is counted: a quarter of the weight, and the same mean over all."""
    layer = example_layer(replace(WITH_LOSSES, z_loss_coeff=0.0), torch.float64)
    layer.router.added.begin_microbatch(torch.tensor([[False, True], [False, False]]))
    layer(X.clone().requires_grad_()).sum().mul(0).backward()
    alone = Example(AFTER)
    alone.aux.backward()
    torch.testing.assert_close(layer.router.weight.grad, alone.router.grad, rtol=1e-12, atol=0)
    assert layer.router.added.sums[0].item() == pytest.approx(alone.aux.item() / 0.01, rel=1e-12)


@pytest.mark.parametrize(
    "counts, signs", [((2, 4, 2, 0), (0, -1, 0, 1)), ((1, 4, 2, 1), (1, -1, 0, 1))]
)
def test_the_bias_moves_by_the_sign(counts: tuple[int, ...], signs: tuple[int, ...]) -> None:
    layer, _ = layer_of(replace(AFTER, has_expert_bias=True))
    layer.router.counts.copy_(torch.tensor(counts))
    layer.router.move_bias()
    assert layer.router.bias is not None
    assert layer.router.bias.tolist() == pytest.approx([0.001 * x for x in signs], rel=1e-6)


def test_counts_beyond_fp32_move_the_bias_by_the_exact_sign() -> None:
    layer, _ = layer_of(replace(AFTER, has_expert_bias=True))
    layer.router.counts.copy_(torch.tensor([2**40, 2**40 + 1, 2**40 - 1, 2**40]))
    layer.router.move_bias()
    assert layer.router.bias is not None
    assert layer.router.bias.sign().tolist() == [0, -1, 1, 0]


# ---------------------------------------------------------------------------------- the choice


def test_of_equal_scores_the_lower_experts_are_taken() -> None:
    for count in (4, 64):
        scores = torch.ones(3, count)
        assert best(scores, 3).tolist() == [[0, 1, 2]] * 3
    assert best(torch.tensor([[1.0, 1, 1, 0], [0, 2, 1, 1]]), 2).tolist() == [[0, 1], [1, 2]]


def test_the_best_are_those_of_a_stable_sort() -> None:
    """Also where scores are infinite or no numbers: no expert is taken twice."""
    values = torch.tensor([-torch.inf, -1.0, 0.0, -0.0, 0.5, 0.5, torch.inf, torch.nan])
    scores = values[
        torch.randint(len(values), (4000, 8), generator=torch.Generator().manual_seed(3))
    ]
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    for count in (1, 2, 5, 8):
        assert torch.equal(best(scores, count), order[:, :count].sort(dim=-1).values)


@pytest.mark.parametrize(
    "changes",
    [{}, dict(pre_softmax=True), dict(score_function="sigmoid"), dict(pre_softmax=True, top_k=1)],
)
def test_a_nan_among_the_logits_makes_the_weights_nan(changes: dict[str, Any]) -> None:
    for value in (math.nan, -math.nan):
        for place in range(4):
            logits = torch.tensor([[3.0, 2, 1, 0], [0, 1, 2, 3]])
            logits[0, place] = value
            weights = choose(logits, replace(AFTER, **changes)).weights
            assert not weights[0].isfinite().all() and weights[1].isfinite().all()


def test_no_function_of_an_unfixed_order_is_used() -> None:
    """Cross entropy adds to one place of each row alone; counts of tokens are whole numbers."""
    found = {
        (path.name, word)
        for path in Path(moe_module.__file__).parent.glob("*.py")
        for word in (".topk(", "index_add", "scatter_add", "scatter_reduce")
        if word in path.read_text()
    }
    assert found == {("loss.py", "scatter_add"), ("router.py", "scatter_add")}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_counting_tokens_does_not_read_them_on_the_host(device: str) -> None:
    """As `torch.bincount` does on a GPU, twice (ATen/native/cuda/SummaryOps.cu)."""
    with Operations() as seen:
        counts = counts_of(torch.tensor([[0, 2], [2, 3]], device=device), 5)
    assert counts.is_meta or counts.tolist() == [1, 0, 2, 1, 0]
    assert not {"bincount", "_local_scalar_dense"} & set(seen.names)


# ------------------------------------------------------------------- transformers' own blocks

transformers = pytest.importorskip("transformers")


def theirs(family: str, **choices: Any) -> nn.Module:
    """A block of transformers with weights in FP64; its softmax is in FP32."""
    sizes: dict[str, Any] = dict(hidden_size=8, intermediate_size=6, num_experts_per_tok=2)
    sizes |= dict(num_hidden_layers=1, num_attention_heads=2, **choices)
    if family == "mixtral":
        from transformers.models.mixtral import modeling_mixtral as theirs

        config = transformers.MixtralConfig(num_local_experts=4, **sizes)
        config._experts_implementation = "eager"
        block: nn.Module = theirs.MixtralSparseMoeBlock(config)
    elif family == "qwen3":
        from transformers.models.qwen3_moe import modeling_qwen3_moe as theirs

        config = transformers.Qwen3MoeConfig(num_experts=4, moe_intermediate_size=6, **sizes)
        config._experts_implementation = "eager"
        block = theirs.Qwen3MoeSparseMoeBlock(config)
    else:
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

        more: dict[str, Any] = dict(n_group=1, topk_group=1, n_routed_experts=4)
        more |= dict(n_shared_experts=2, moe_intermediate_size=6, norm_topk_prob=True)
        config = transformers.DeepseekV3Config(**(sizes | more))
        config._experts_implementation = "eager"
        block = theirs.DeepseekV3MoE(config)
    block = block.double()
    generator = torch.Generator().manual_seed(3)
    for tensor in (*block.parameters(), *block.buffers()):
        tensor.data = torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * 0.3
    return block


BLOCKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mixtral": ("mixtral", {}, {}),
    "qwen3 renormalized": ("qwen3", dict(norm_topk_prob=True), {}),
    "qwen3": ("qwen3", dict(norm_topk_prob=False), dict(pre_softmax=True)),
    "deepseek_v3": ("deepseek_v3", dict(routed_scaling_factor=2.5), dict(
        score_function="sigmoid", scaling_factor=2.5, has_expert_bias=True,
        shared_ffn_hidden_size=12,
    )),
}  # fmt: skip


def check_close(name: str, ours: torch.Tensor | None, theirs: torch.Tensor | None) -> None:
    assert ours is not None and theirs is not None, name
    assert (ours - theirs).abs().max() <= 3e-7 * max(1, theirs.abs().max()), name


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_of_transformers(block: str) -> None:
    family, choices, changes = BLOCKS[block]
    reference = theirs(family, **choices)
    layer, tensors = layer_of(moe_spec(ffn_hidden_size=6, layers=(True,), **changes), hidden_size=8)
    pairs: dict[str, Callable[[], torch.Tensor | None]] = {}  # our tensor, its gradient there
    experts: Any = reference.experts
    for e in range(4):
        both: Any = {
            "gate": lambda t, e=e: t[0][e, :6], "up": lambda t, e=e: t[0][e, 6:],
            "fc2": lambda t, e=e: t[1][e],
        }  # fmt: skip
        for part, pick in both.items():
            pairs[f"experts.{e}.{part}.weight"] = pick
    fused = (experts.gate_up_proj, experts.down_proj)
    gate: Any = reference.gate
    tensors["router.weight"].copy_(gate.weight)
    for name, pick in pairs.items():
        tensors[name].copy_(pick(fused))
    shared: Any = getattr(reference, "shared_experts", None)
    if shared is not None:
        for part, linear in (("gate", "gate_proj"), ("up", "up_proj"), ("fc2", "down_proj")):
            tensors[f"shared.{part}.weight"].copy_(getattr(shared, linear).weight)
        assert layer.router.bias is not None
        layer.router.bias.copy_(gate.e_score_correction_bias)
    generator = torch.Generator().manual_seed(4)
    x, factors = 0.5 * torch.randn(2, 2, 5, 8, dtype=torch.float64, generator=generator)
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = reference(inputs[0])
    out = out[0] if isinstance(out, tuple) else out
    ours = layer(inputs[1])
    check_close("y", ours, out)
    (factors * out).sum().backward()
    (factors * ours).sum().backward()
    grads = gradients_of(layer)
    expected = {name: pick([t.grad for t in fused]) for name, pick in pairs.items()}
    expected |= {"router.weight": gate.weight.grad}
    check_close("dx", inputs[1].grad, inputs[0].grad)
    for name, grad in expected.items():
        check_close(name, grads[name], grad)
    assert layer.router.counts.min() >= 0 and layer.router.counts.sum() == 20


# ------------------------------------------------------------------------- what must be equal


def random_input(width: int = 32, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(2, 5, width, dtype=dtype, generator=torch.Generator().manual_seed(2))


def test_gradients_are_the_derivatives() -> None:
    moe = moe_spec(ffn_hidden_size=3, layers=(True,), shared_ffn_hidden_size=2, scaling_factor=1.5)
    layer, tensors = layer_of(moe, hidden_size=4)
    for tensor in tensors.values():
        tensor.mul_(30)
    params = tuple(layer.parameters())

    def run(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        names = [name for name, _ in layer.named_parameters()]
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x,))

    x = random_input(4).requires_grad_()
    assert torch.autograd.gradcheck(run, (x, *params), atol=1e-7)


def test_the_order_of_experts_has_no_effect() -> None:
    """Of two experts a token's sum is the same in either order, bit for bit."""
    moe, order = moe_spec(layers=(True,)), [2, 0, 3, 1]
    (one, tensors), (other, renamed) = layer_of(moe), layer_of(moe)
    renamed["router.weight"].copy_(tensors["router.weight"][order])
    for e, was in enumerate(order):
        for part in ("gate", "up", "fc2"):
            renamed[f"experts.{e}.{part}.weight"].copy_(tensors[f"experts.{was}.{part}.weight"])
    inputs = [random_input().requires_grad_() for _ in range(2)]
    for layer, x in zip((one, other), inputs, strict=True):
        layer(x).square().sum().backward()
    assert torch.equal(one(inputs[0]), other(inputs[1]))
    assert one.router.counts[order].tolist() == other.router.counts.tolist()
    grads, again = gradients_of(one), gradients_of(other)
    for e, was in enumerate(order):
        for part in ("gate", "up", "fc2"):
            name = f"experts.{{}}.{part}.weight".format
            assert torch.equal(again[name(e)], grads[name(was)])


def test_sums_over_a_tokens_experts_are_rounded_once() -> None:
    """Outputs and gradients of inputs in BF16, of tokens that have three experts each."""
    moe = moe_spec(num_experts=3, top_k=3, layers=(True,))
    layer, _ = layer_of(moe, torch.bfloat16)
    rows: dict[str, list[torch.Tensor]] = {"out": [], "grad": []}
    for fc1, fc2 in zip(layer.fc1, layer.fc2, strict=True):
        fc2.register_forward_hook(lambda _, args, out: rows["out"].append(out.detach().float()))
        fc1.register_full_backward_hook(lambda _, grads, __: rows["grad"].append(grads[0].float()))
    layer.router.weight.requires_grad_(False).zero_()  # its gradient would be a fourth part
    x = (30 * random_input().to(torch.bfloat16)).requires_grad_()
    out = layer(x)
    out.square().sum().backward()
    first, second, third = rows["out"]  # every expert has all tokens in order
    assert torch.equal(out.flatten(0, 1), (first + second + third).to(torch.bfloat16))
    first, second, third = reversed(rows["grad"])
    assert x.grad is not None
    assert torch.equal(x.grad.flatten(0, 1), (first + second + third).to(torch.bfloat16))
    twice = (first + second).to(torch.bfloat16).float() + third
    assert not torch.equal(twice.to(torch.bfloat16), x.grad.flatten(0, 1))


def test_weights_of_experts_are_rounded_with_what_they_multiply() -> None:
    """An expert's second linear reads the product of its activations and FP32 weights in BF16."""
    layer, tensors = layer_of(moe_spec(num_experts=3, top_k=3, layers=(True,)), torch.bfloat16)
    tensors["router.weight"].mul_(100)
    read: dict[str, list[torch.Tensor]] = {"fc1": [], "fc2": []}
    for fc1, fc2 in zip(layer.fc1, layer.fc2, strict=True):
        fc1.register_forward_hook(lambda _, __, out: read["fc1"].append(out))
        fc2.register_forward_pre_hook(lambda _, args: read["fc2"].append(args[0]))
    x = random_input().to(torch.bfloat16)
    layer(x)
    weights_TK = choose(layer.router(x.flatten(0, 1)), layer.router.moe).weights
    weights_R1 = weights_TK.t().flatten()[:, None]  # every expert has all tokens in order
    inner, found = layer.activation(torch.cat(read["fc1"])), torch.cat(read["fc2"])
    assert torch.equal(found, (inner.float() * weights_R1).to(torch.bfloat16))
    assert not torch.equal(found, inner * weights_R1.to(torch.bfloat16))


def test_equal_experts_are_the_dense_mlp() -> None:
    layer, tensors = layer_of(moe_spec(ffn_hidden_size=64, layers=(True,)))
    spec = gpt_spec(num_layers=1, bias=False, activation="swiglu")
    dense = mlp_of(Parts(spec, torch.float64, 7, RandomStreams(7)), 0)
    assert isinstance(dense, MLP)
    for param in dense.parameters():
        for piece in pieces_of(param):
            part = piece.name.removeprefix("layers.0.mlp.")
            for e in range(4):
                tensors[f"experts.{e}.{part}"].copy_(param.data[piece.local])
    x = random_input()
    torch.testing.assert_close(layer(x), dense(x), rtol=1e-13, atol=1e-16)


ONE = moe_spec(num_experts=1, top_k=1, pre_softmax=True, ffn_hidden_size=64, layers=(True, True))


def renamed_mlp(real: Callable[[GPTSpec, str], Mlp]) -> Callable[[GPTSpec, str], Mlp]:
    """The dense MLP under the names of expert 0, by which weights and roundings are drawn."""

    def mlp(model: GPTSpec, layer: str) -> Mlp:
        experts = (replace(x, is_expert=True) for x in layer_module._pair(
            model, f"{layer}.mlp.experts", model.ffn_hidden_size
        ))  # fmt: skip
        return Mlp(*(linear.one(0) for linear in experts))

    return mlp


@pytest.fixture
def dense_as_an_expert(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(layer_module, "_mlp", renamed_mlp(layer_module._mlp))
    parameters_of.cache_clear()
    yield
    parameters_of.cache_clear()


def tensors_of(state: TrainState) -> dict[str, torch.Tensor]:
    return {p.name: p.tensor.detach().clone() for p in state_dict.placements(state)}


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize("recipe", [None, *RECIPES, "delayed, in fp8"])
def test_one_expert_is_the_dense_layer_bit_for_bit(
    recipe: str | None, compute: str, dense_as_an_expert: None
) -> None:
    name = (recipe or "").partition(",")[0]
    more = dict(amax_history_len=4) if name == "delayed" else {}
    fp8 = None if recipe is None else Fp8Recipe(name=name, params_in_fp8=recipe != name, **more)
    dense = gpt_spec(bias=False, activation="swiglu")
    optim = optim_spec(clip_grad_norm=1e9)  # the norm has one number more: a gradient of zeros
    states = [
        build_run(model=model, fp8=fp8, compute=compute, optim=optim)
        for model in (replace(dense, moe=ONE), dense)
    ]
    for step in range(3):
        batches = [microbatch(2 * step), microbatch(2 * step + 1)]
        one, other = (train_step(state, batches) for state in states)
        assert one.loss == other.loss
    experts, expected = (tensors_of(state) for state in states)
    assert experts.keys() - expected.keys() == {
        f"{prefix}layers.{layer}.mlp.router.weight"
        for layer in range(2)
        for prefix in ("model/", "optimizer/exp_avg/", "optimizer/exp_avg_sq/")
    }
    assert not [name for name, x in expected.items() if not torch.equal(experts[name], x)]


# ----------------------------------------------------------------------------- a training run

MOE = moe_spec(
    router_loss="aux_loss", router_loss_coeff=0.01, z_loss_coeff=0.001, has_expert_bias=True,
    score_function="sigmoid",
)  # fmt: skip
MODEL = gpt_spec(bias=False, activation="swiglu", moe=MOE)


def batches_of(step: int) -> list[Any]:
    return [microbatch(2 * step), microbatch(2 * step + 1, ignored=0.3)]


def trained(state: TrainState, last: int) -> list[float]:
    losses = []
    while state.step < last:
        losses.append(train_step(state, batches_of(state.step)).loss)
        state.step += 1
    return losses


@pytest.mark.parametrize("fp8", [None, Fp8Recipe(amax_history_len=4), Fp8Recipe(name="mxfp8")])
def test_a_run_learns_and_continues_bit_for_bit(
    fp8: Fp8Recipe | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = build_run(model=MODEL, fp8=fp8)
    losses = trained(whole, 20)
    assert losses[-1] < losses[0] - 0.05
    stopped = build_run(model=MODEL, fp8=fp8)
    trained(stopped, 7)
    saved = Saver(tmp_path, 1, {"config": {}, "data_fingerprint": ""}).save(stopped)
    bias = Reader(saved).read("model/layers.1.mlp.router.bias")
    assert bias.dtype == torch.float32 and bias.abs().max() > 0
    continued = build_run(model=MODEL, fp8=fp8)
    state_dict.load_checkpoint(saved, continued, lambda _: None)
    assert trained(continued, 20) == losses[7:]
    expected, found = tensors_of(whole), tensors_of(continued)
    assert expected.keys() == found.keys()
    assert not [name for name, x in expected.items() if not torch.equal(found[name], x)]
    fresh = build_run(model=MODEL, fp8=fp8)
    state_dict.load_weights(Reader(saved), fresh, lambda _: None)
    monkeypatch.setattr(load_model, "shape_of", lambda _: MODEL)
    alone = load_model.load_model(Reader(saved), torch.float32, torch.device("cpu"))
    for model in (fresh.model, alone):
        assert torch.equal(model.parts.buffers()["layers.1.mlp.router.bias"], bias)


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_experts_compute_as_calls_of_their_linears_do(recipe: Any, compute: str) -> None:
    """A hook, such as that which finds the first number that is not finite, sees each call."""
    fp8 = None if recipe is None else Fp8Recipe(name=recipe)
    together, called = (build_run(model=MODEL, fp8=fp8, compute=compute) for _ in range(2))
    seen = set()
    for name, module in called.model.named_modules():
        module.register_forward_hook(lambda *_, name=name: seen.add(name))
    for step in range(2):
        one, other = (train_step(state, batches_of(step)) for state in (together, called))
        assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
        together.step = called.step = step + 1
    assert {f"layers.1.mlp.fc{i}.{e}" for i in (1, 2) for e in range(4)} <= seen
    found, expected = tensors_of(together), tensors_of(called)
    assert not [name for name, x in expected.items() if not torch.equal(found[name], x)]


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_products_of_experts_write_their_rows_where_these_stay(recipe: Any) -> None:
    """No rows are put together afterwards, which would copy all of them once more each way."""
    state = build_run(model=MODEL, fp8=None if recipe is None else Fp8Recipe(name=recipe))
    linears = [each for each in linears_of(state.model) if ".experts." in each.name][:2]
    x = torch.randn(40, linears[0].weight.shape[1], requires_grad=True)
    seen: list[tuple[str, tuple[int, ...]]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor):
                seen.append((func.overloadpacket.__name__, tuple(made.shape)))
            return made

    state.scaling.begin_microbatch(0)
    with Watch():
        out = linears_of_rows(linears, x, [16, 24], [None, None])
        out.backward(torch.ones_like(out))
    assert ("new_empty", tuple(out.shape)) in seen and ("new_empty", tuple(x.shape)) in seen
    rows = {(size, width) for size in (16, 24, 40) for width in (x.shape[1], out.shape[1])}
    assert not rows & {shape for name, shape in seen if name in ("cat", "copy_")}


def counts_of_step(state: TrainState, step: int) -> torch.Tensor:
    """The tokens of each expert in a step, from what the router's product gives."""
    (router,) = state.model.parts.routers
    seen: list[torch.Tensor] = []
    hook = router.register_forward_hook(lambda _, args, out: seen.append(out.detach()))
    forward_backward(state, batches_of(step))
    hook.remove()
    bias = [] if router.bias is None else router.bias.tolist()
    counts = torch.zeros(4, dtype=torch.int64)
    for logits in torch.cat(seen):
        for e in weights_of(router.moe, logits, bias):
            counts[e] += 1
    return counts


def test_a_step_counts_and_moves_the_bias_once_and_an_evaluation_does_not() -> None:
    """As the rule says: by the signs of the whole step, before the next one."""
    state, twin = build_run(model=MODEL), build_run(model=MODEL)
    (router,) = state.model.parts.routers
    expected = torch.zeros(4)
    for step in range(3):
        counts = counts_of_step(twin, step)
        assert counts.sum() == 2 * 2 * 2 * SEQ
        evaluate(state, batches_of(9))
        trained(state, step + 1)
        evaluate(state, batches_of(9))
        assert router.counts.tolist() == counts.tolist()
        expected += 0.001 * (counts.double().mean() - counts).sign().float()
        assert router.bias is not None
        torch.testing.assert_close(router.bias, expected, rtol=0, atol=1e-9)
        trained(twin, step + 1)
    assert expected.abs().max() > 0.001


@pytest.mark.parametrize("recipe", [None, "delayed", "nvfp4"])
def test_recomputation_counts_once(recipe: str | None) -> None:
    """And computes the same bits, in casts that draw too."""
    fp8 = None if recipe is None else Fp8Recipe(name=recipe)  # type: ignore[arg-type]
    again = RecomputeSpec(granularity="full", method="uniform", num_layers=1)
    plain, recomputed = (
        build_run(model=replace(MODEL, recompute=recompute), fp8=fp8) for recompute in (None, again)
    )
    for state in (plain, recomputed):
        trained(state, 3)
    assert torch.equal(
        plain.model.parts.routers[0].counts, recomputed.model.parts.routers[0].counts
    )
    expected, found = tensors_of(plain), tensors_of(recomputed)
    assert not [name for name, x in expected.items() if not torch.equal(found[name], x)]
    results = [train_step(state, batches_of(3)) for state in (plain, recomputed)]
    assert results[0].added == results[1].added and results[0].added.keys() == {
        "aux_loss", "z_loss"
    }  # fmt: skip
    assert results[0].added["aux_loss"] == pytest.approx(1, abs=0.2)


def test_logits_beyond_the_range_are_named_as_the_first_that_are_not_finite() -> None:
    state = build_run(model=MODEL)
    with torch.no_grad():
        state.model.parts.routers[0].weight.fill_(3e38)
    found = first_nonfinite(state, batches_of(0))
    assert found == "output of layers.1.mlp.router"


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_a_nan_of_the_router_is_a_step_that_is_skipped(recipe: str | None) -> None:
    state = build_run(model=MODEL, fp8=None if recipe is None else Fp8Recipe(name=recipe))
    (router,) = state.model.parts.routers
    with torch.no_grad():
        router.weight[2, 3] = math.nan
    before = tensors_of(state)
    result = train_step(state, batches_of(0))
    assert not result.is_finite and math.isnan(result.loss)
    after = tensors_of(state)
    assert torch.equal(
        before["model/layers.1.mlp.router.bias"], after["model/layers.1.mlp.router.bias"]
    )


EMPTY: dict[str, tuple[int, tuple[float, ...], list[int]]] = {
    "the last two": (3, (9, 9, 0, 0), [2 * SEQ, 2 * SEQ, 0, 0]),
    "the first two": (0, (0, 0, 9, 9), [0, 0, 2 * SEQ, 2 * SEQ]),
    "all but one": (2, (0, 9, 0, 0), [0, 2 * SEQ, 0, 0]),
}
"""Experts without tokens: one of them, biases of the router that make it so, and the counts."""


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("empty", EMPTY)
def test_an_expert_without_tokens(empty: str, recipe: Any) -> None:
    """Its gradient is zero, its moments decay; under `delayed` only its weight's history rolls."""
    index, bias, counts = EMPTY[empty]
    top_k = sum(map(bool, counts))
    moe = moe_spec(
        top_k=top_k, has_expert_bias=True, score_function="sigmoid", bias_update_rate=0.0
    )
    model = gpt_spec(bias=False, activation="swiglu", moe=moe)
    more: dict[str, Any] = dict(amax_history_len=4) if recipe == "delayed" else {}
    state = build_run(model=model, fp8=Fp8Recipe(name=recipe, **more), compute="bf16")
    (router,) = state.model.parts.routers
    assert router.bias is not None
    router.bias.copy_(torch.tensor(bias))
    states, own = state.optimizer.states_of_rows(), f".experts.{index}."
    rows = [row for row, s in enumerate(state.masters.segments) if own in s.piece.name]
    for row in rows:
        states[row]["exp_avg"].payload.fill_(1.0)
    for step in range(2):
        assert train_step(state, [microbatch(step)]).is_finite
    assert router.counts.tolist() == counts and len(rows) == 2
    for row in rows:
        assert not state.masters.grads[row].any()
        moment = states[row]["exp_avg"].payload
        assert moment.flatten().tolist() == pytest.approx([0.9**2] * moment.numel(), rel=1e-6)
    if recipe == "delayed":
        assert isinstance(state.scaling, ScalingState)
        tables = state.scaling.tables
        for table, role, rolls in (
            (tables["forward"], "input", 0), (tables["forward"], "weight", 2),
            (tables["backward"], "grad_output", 0),
        ):  # fmt: skip
            row = table.names.index(f"layers.1.mlp.experts.{index}.fc1.{role}")
            assert table.num_updates[row] == rolls, role


def test_expert_rows_are_cast_by_the_rule_of_their_name() -> None:
    rules = (ModuleRule("*.experts.2.*", "high_precision", "a test"),)
    fp8 = Fp8Recipe(name="tensorwise", modules=rules)
    state = build_run(model=MODEL, fp8=fp8)
    high = {linear.name for linear in linears_of(state.model) if linear.quantizer is None}
    assert high == {"layers.1.mlp.experts.2.fc1", "layers.1.mlp.experts.2.fc2"}
    planned = rank_shape(run_spec(model=MODEL, fp8=fp8), 0).linears
    assert high == {name for linear in planned if not linear.in_fp8 for name in linear.names}
    assert linear_names(range(2), MOE) == [linear.name for linear in linears_of(state.model)]
    assert trained(state, 1)
    share, flops = precision_share(state, MODEL), gemm_flops_per_token(MODEL)
    assert share.total_flops == flops.linear + flops.head + flops.router
    kept = 3 * 2 * (2 / 4) * (3 * 32 * 32)  # of one expert of four, of which a token visits two
    assert share.fp8_flops == flops.linear - kept
    ran = state.counter.by_precision()
    rows = [*state.model.parts.routers[0].counts.tolist()]
    in_fp8 = flops.linear - 3 * 2 * 2 * 3 * 32 * 32  # of all linears but those of experts
    in_fp8 = in_fp8 * 4 * SEQ + 3 * 2 * 3 * 32 * 32 * (sum(rows) - rows[2])
    assert ran["fp8"] == in_fp8


def test_text_is_generated_as_the_whole_text_is_read() -> None:
    state = build_run(model=MODEL)
    trained(state, 3)
    model: Any = state.model
    counts = model.parts.routers[0].counts.clone()
    tokens = list(generate(model, [1, 2, 3], 5, Sampling(), vocab_size=VOCAB))
    text = torch.tensor([[1, 2, 3, *tokens]])
    with torch.no_grad():
        whole = model.logits(text)[0, 2:-1].argmax(-1)
        cached = model.logits(text[:, :4], cache := KVCache())
        torch.testing.assert_close(model.logits(text[:, 4:], cache), model.logits(text)[:, 4:])
    assert whole.tolist() == tokens and cached.shape[1] == 4
    assert torch.equal(model.parts.routers[0].counts, counts)


# ------------------------------------------------------------------ what the list of it says


def test_the_names_and_sizes_of_a_layer() -> None:
    moe = moe_spec(shared_ffn_hidden_size=48)
    spec = gpt_spec(bias=False, activation="swiglu", moe=moe)
    shapes = {name: shape for p in parameters_of(spec).values() for name, shape in p.tensors}
    prefix = "layers.1.mlp."
    own = {n.removeprefix(prefix): s for n, s in shapes.items() if n.startswith(prefix)}
    expected = {"router.weight": (4, 32)}
    for name, width in [("shared", 48), *((f"experts.{e}", 32) for e in range(4))]:
        expected |= {f"{name}.{part}.weight": (width, 32) for part in ("gate", "up")}
        expected |= {f"{name}.fc2.weight": (32, width)}
    assert own == expected
    layer = layer_spec(spec, 1)
    assert layer.experts is not None and layer.experts.fc1.visits == Fraction(1, 2)
    names = [part.name for part in layer.experts.fc1.one(3).parts]
    assert names == [f"layers.1.mlp.experts.3.{part}" for part in ("gate", "up")]
    assert layer.experts.fc2.std == layer_spec(spec, 0).linears[-1].std == 0.02 / 2
    total = num_parameters(spec)
    assert total == sum(math.prod(shape) for shape in shapes.values())
    assert total - num_active_parameters(spec) == 2 * 3 * 32 * 32
    visited = replace(spec, moe=replace(moe, top_k=4))  # all experts
    assert num_active_parameters(visited) == num_parameters(visited) == total
    dense = gpt_spec(bias=False, activation="swiglu", num_layers=1)
    flops = gemm_flops_per_token(spec)
    assert flops.router == 3 * 2 * 4 * 32
    attention = 4 * 32 * 32
    of_layer = attention + 3 * 32 * 48 + 2 * 3 * 32 * 32
    assert flops.linear - gemm_flops_per_token(dense).linear == 3 * 2 * of_layer
    single = replace(moe, num_experts=1, top_k=1)
    assert "layers.1.mlp.experts.0.gate.weight" in {
        name for p in parameters_of(replace(spec, moe=single)).values() for name, _ in p.tensors
    }


def test_initial_values_follow_the_names() -> None:
    params = {
        piece.name: param.detach()[piece.local]
        for param in build_run(model=replace(MODEL, hidden_size=256)).model.parameters()
        for piece in pieces_of(param)
    }
    prefix = "layers.1.mlp."
    assert params[f"{prefix}router.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert params[f"{prefix}experts.3.gate.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert params[f"{prefix}experts.3.fc2.weight"].std() == pytest.approx(0.01, rel=0.1)
    different = {float(params[f"{prefix}experts.{e}.up.weight"][0, 0]) for e in range(4)}
    assert len(different) == 4


@pytest.mark.parametrize("compute, dtype", [("bf16", torch.float32), ("fp32", torch.float32)])
def test_the_router_is_in_fp32(compute: str, dtype: torch.dtype) -> None:
    spec = run_spec(model=MODEL, compute=compute)
    spec = replace(spec, precision=replace(spec.precision, half_weights=True))
    state = build(spec, build_run().mesh)
    (router,) = state.model.parts.routers
    assert router.weight.dtype == router.bias.dtype == dtype  # type: ignore[union-attr]
    seen: list[torch.dtype] = []
    router.register_forward_hook(lambda _, args, out: seen.append(out.dtype))
    assert trained(state, 1) and set(seen) == {dtype}
    name = {"bf16": "fp32", "fp32": "fp32"}[compute]
    assert state.counter.flops[name, "router"] == 3 * 2 * 4 * 32 * 2 * 2 * SEQ


def test_a_model_without_experts_has_nothing_of_them() -> None:
    """Nor has one whose list of layers names none."""
    dense = gpt_spec(bias=False)
    none = replace(dense, moe=moe_spec(layers=(False, False), z_loss_coeff=0.1))
    assert parameters_of(none).keys() == parameters_of(dense).keys()
    state = build_run(model=dense)
    assert state.model.parts.added_losses is None and not state.model.parts.routers
    assert trained(build_run(model=none), 2) == trained(state, 2)
    assert router_module.router_losses(none.moe) == []  # type: ignore[arg-type]
