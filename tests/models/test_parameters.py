"""The one list of a model's parameters: a wrong entry is found by all that read it.

Shapes, spreads and parts are written down by hand here. Layers of unequal widths, and linears of
several weights of which a token uses some, are planted where the list of a layer is made.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fp8_numerics.gemm import GemmCounter
from megafp8.backends.te.parts import PARAMETERS, TransformerEngineParts
from megafp8.checkpoint import huggingface_files
from megafp8.fp8.grad_sink import AutogradSink
from megafp8.models.block import TransformerLayer
from megafp8.models.gpt import GPT
from megafp8.models.init import key_of, pieces_of
from megafp8.models.parts import Parts
from megafp8.models.random import RandomStreams
from megafp8.observe.flops import gemm_flops_per_token
from megafp8.parallel.collectives import Axis
from megafp8.parallel.parts import NativeParts, PartsArgs
from megafp8.plan.dryrun import rank_share
from megafp8.plan.layer import layer_bytes
from megafp8.plan.memory import rank_memory
from megafp8.plan.time import _linear_time, update_flops
from megafp8.specs import Fp8Recipe, FsdpSpec, GPTSpec, ParallelSpec, RunSpec
from megafp8.specs import layer as layer_module
from megafp8.specs import parameters as parameters_module
from megafp8.specs import rank_shape as shapes
from megafp8.specs.geometry import Box, why_not_a_partition
from megafp8.specs.layer import Mlp
from megafp8.specs.parameters import ParameterSpec, num_parameters, parameters_of
from tests.models.reference import loss_of
from tests.models.test_options import OPTIONS
from tests.tiny import gpt_spec, optim_spec, run_spec

SPEC = gpt_spec(num_layers=1)
SEED = 7
FC2, WORD = "layers.0.mlp.fc2", "embedding.word.weight"
LINEARS = {
    "layers.0.attention.query": (32, 32),
    "layers.0.attention.key": (32, 32),
    "layers.0.attention.value": (32, 32),
    "layers.0.attention.projection": (32, 32),
    "layers.0.mlp.fc1": (64, 32),
    FC2: (32, 64),
}
NORMS = ("layers.0.attention_norm", "layers.0.mlp_norm", "final_norm")
SHAPES: dict[str, tuple[int, ...]] = {
    WORD: (96, 32),
    "embedding.position.weight": (16, 32),
    **{f"{name}.{kind}": (32,) for name in NORMS for kind in ("weight", "bias")},
    **{f"{name}.weight": shape for name, shape in LINEARS.items()},
    **{f"{name}.bias": shape[:1] for name, shape in LINEARS.items()},
}
DIVIDED = {WORD: 0, f"{FC2}.weight": 1, "layers.0.attention.projection.weight": 1}
DIVIDED |= {
    f"{name}.{kind}": 0
    for name in LINEARS
    for kind in ("weight", "bias")
    if name not in (FC2, "layers.0.attention.projection")
}
"""The dims along which tensor-parallel ranks have parts of tensors."""


def initial(name: str) -> torch.Tensor:
    """A logical tensor as a generator of its own draws it; outputs to the stream are scaled."""
    if name.endswith("bias") or "norm" in name:
        return torch.full(SHAPES[name], float(not name.endswith("bias")))
    scaled = name.removesuffix(".weight").endswith(("projection", "fc2"))
    generator = torch.Generator().manual_seed(key_of("init", SEED, name))
    return torch.empty(SHAPES[name]).normal_(
        0, 0.02 / math.sqrt(2) if scaled else 0.02, generator=generator
    )


def part_of(name: str, rank: int) -> tuple[slice, ...]:
    """Which elements of a logical tensor rank `rank` of two has."""
    whole = [slice(0, size) for size in SHAPES[name]]
    if (dim := DIVIDED.get(name)) is not None:
        share = SHAPES[name][dim] // 2
        whole[dim] = slice(rank * share, (rank + 1) * share)
    return tuple(whole)


def plain_parts(spec: GPTSpec = SPEC, dtype: torch.dtype = torch.float32) -> Parts:
    return Parts(spec, dtype, SEED, RandomStreams(SEED))


def model_of_rank(rank: int) -> GPT:
    parts = PartsArgs(
        spec=SPEC, dtype=torch.float32, seed=SEED, streams=RandomStreams(SEED, rank),
        tp=Axis("tp", 2, rank), sink=AutogradSink(), counter=GemmCounter(),
    )  # fmt: skip
    return GPT(NativeParts(parts))


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    params = [(param, piece) for param in model.parameters() for piece in pieces_of(param)]
    return {piece.name: param.detach()[piece.local] for param, piece in params}


def check_the_model(_: Any) -> None:
    model = GPT(plain_parts(dtype=torch.float64))
    tokens = torch.arange(16).view(2, 8)
    loss = loss_of(SPEC, tensors_of(model), tokens, tokens)
    torch.testing.assert_close(model(tokens, tokens).double(), loss)


def check_initial_values(_: Any) -> None:
    tensors = tensors_of(GPT(plain_parts()))
    assert tensors.keys() == SHAPES.keys()
    assert all(torch.equal(tensor, initial(name)) for name, tensor in tensors.items())


def check_ranks(_: Any) -> None:
    for rank in range(2):
        tensors = tensors_of(model_of_rank(rank))
        assert tensors.keys() == SHAPES.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, initial(name)[part_of(name, rank)]), name


def check_checkpoints(_: Any) -> None:
    """Ranks write each element of each logical tensor once; whole ones are rank 0's."""
    boxes: dict[str, list[Box]] = {}
    for rank in range(2):
        for param in model_of_rank(rank).parameters():
            for piece in pieces_of(param):
                if rank == 0 or piece.name in DIVIDED:
                    box = Box(piece.offset, piece.local_box.shape)
                    boxes.setdefault(piece.name, []).append(box)
    assert boxes.keys() == SHAPES.keys()
    assert not any(why_not_a_partition(boxes[name], shape) for name, shape in SHAPES.items())


def check_the_plan(_: Any) -> None:
    sizes = {name: math.prod(shape) for name, shape in SHAPES.items()}
    own = sum(size // (2 if name in DIVIDED else 1) for name, size in sizes.items())
    assert rank_memory(run_spec(model=SPEC, tp=2, world=2), 0).num_params == own


def check_muon(_: Any) -> None:
    spec = run_spec(model=SPEC, optim=optim_spec(name="muon"))
    counted = sum(update_flops(spec, param) for param in shapes.rank_shape(spec, 0).params)
    sides = [sorted(shape) for shape in LINEARS.values()]
    assert counted == spec.optim.muon.num_steps * sum(4 * m * m * n + 2 * m**3 for m, n in sides)


def check_files_of_hugging_face(folder: Any) -> None:
    joined = {"query": "attn.c_attn", "projection": "attn.c_proj", "fc1": "mlp.c_fc"}
    joined |= {"fc2": "mlp.c_proj", "attention_norm": "ln_1", "mlp_norm": "ln_2"}
    files = {"transformer.wte.weight": SHAPES[WORD]}
    files["transformer.wpe.weight"] = SHAPES["embedding.position.weight"]
    for name, shape in SHAPES.items():
        *_, part, kind = name.split(".")
        if part in joined:
            shape = (3 * shape[0], *shape[1:]) if part == "query" else shape
            files[f"transformer.h.0.{joined[part]}.{kind}"] = shape[::-1]
    files |= {f"transformer.ln_f.{kind}": (32,) for kind in ("weight", "bias")}
    save_file(
        {name: torch.ones(shape) for name, shape in files.items()}, folder / "model.safetensors"
    )
    read = huggingface_files.read_tensors(folder, SPEC)
    assert {tensor.name: tuple(tensor.read().shape) for tensor in read} == SHAPES


def check_transformer_engine(_: Any) -> None:
    """A layer with the parameters that Transformer Engine makes takes over ours."""
    theirs = nn.Module()
    for name, shape in SHAPES.items():
        path = PARAMETERS.get(name.removeprefix("layers.0."))
        if path is None:
            continue
        shape = (3 * shape[0], *shape[1:]) if ".query." in name else shape
        *owners, last = path.split(".")
        module = theirs
        for owner in owners:
            if not hasattr(module, owner):
                module.add_module(owner, nn.Module())
            module = module.get_submodule(owner)
        module.register_parameter(last, nn.Parameter(torch.zeros(shape)))
    TransformerEngineParts._adopt(None, theirs, 0, TransformerLayer(plain_parts(), 0))  # type: ignore[arg-type]
    assert all(torch.equal(t, initial(name)) for name, t in tensors_of(theirs).items())


def check_the_count(_: Any) -> None:
    assert num_parameters(SPEC) == sum(math.prod(shape) for shape in SHAPES.values())


CHECKS: dict[str, Callable[[Any], None]] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_the_model, check_initial_values, check_ranks, check_checkpoints, check_the_plan,
        check_muon, check_files_of_hugging_face, check_transformer_engine, check_the_count,
    )
}  # fmt: skip


def _narrow(param: ParameterSpec) -> ParameterSpec:
    tensors = ((param.name, (32, 48)),)
    return dataclasses.replace(param, tensors=tensors)


PLANTED: dict[str, tuple[str, Callable[[ParameterSpec], ParameterSpec | None], set[str]]] = {
    "a shape": (f"{FC2}.weight", _narrow, set(CHECKS)),
    "a spread": (
        f"{FC2}.weight",
        lambda param: dataclasses.replace(param, std=0.02),
        {"initial_values", "ranks", "transformer_engine"},
    ),
    "a value": (
        "layers.0.mlp_norm.weight",
        lambda param: dataclasses.replace(param, value=0.0),
        {"initial_values", "ranks", "transformer_engine"},
    ),
    "a division": (
        WORD,
        lambda param: dataclasses.replace(param, divided=None),
        {"ranks", "checkpoints", "the_plan"},
    ),
    "a bias too few": (
        f"{FC2}.bias",
        lambda param: None,
        set(CHECKS) - {"muon"},
    ),
}


@pytest.fixture(autouse=True)
def no_list_is_kept() -> Iterator[None]:
    lists: tuple[Any, ...] = (parameters_module.parameters_of, parameters_module.logical_shapes)
    caches = (*lists, shapes._layer_shapes, shapes._rank_shape, shapes._kinds)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("name", CHECKS)
def test_who_reads_the_list_finds_what_is_written_by_hand(name: str, tmp_path: Any) -> None:
    CHECKS[name](tmp_path)


@pytest.mark.parametrize("planted", PLANTED)
def test_a_wrong_entry_is_found_by_all_that_read_it(
    planted: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, change, by = PLANTED[planted]
    listed = parameters_module._listed

    def wrong(model: GPTSpec) -> Iterator[ParameterSpec]:
        changed = (change(param) if param.name == name else param for param in listed(model))
        return (param for param in changed if param is not None)

    monkeypatch.setattr(parameters_module, "_listed", wrong)
    noticed = set()
    for check in CHECKS:
        try:
            CHECKS[check](tmp_path)
        except Exception:
            noticed.add(check)
    assert noticed == by


def test_ranks_sum_the_gradients_of_norms_of_heads_alone() -> None:
    """Every rank has such a norm whole, and its gradient of the rank's own heads."""
    listed = parameters_of(gpt_spec(num_layers=1, qk_layernorm=True)).values()
    found = {piece.name for param in listed for piece in param.pieces(2, 1) if piece.is_of_heads}
    names = ("layers.0.attention.query_norm", "layers.0.attention.key_norm")
    assert found == {f"{name}.{kind}" for name in names for kind in ("weight", "bias")}


@pytest.mark.parametrize("option", OPTIONS)
def test_the_list_has_the_models_order(option: str) -> None:
    spec = gpt_spec(**OPTIONS[option])
    with torch.device("meta"):
        model = GPT(plain_parts(spec))
    names = [piece.name for param in model.parameters() for piece in pieces_of(param)]
    listed = parameters_of(spec).values()
    assert names == [name for param in listed for name, _ in param.tensors]


def planted_mlp(monkeypatch: pytest.MonkeyPatch, change: Callable[[str, Mlp], Mlp]) -> None:
    """Let each layer have another MLP than its own."""
    real = layer_module._mlp
    monkeypatch.setattr(
        layer_module, "_mlp", lambda model, layer: change(layer, real(model, layer))
    )


def job(fsdp: FsdpSpec | None = None, **choices: Any) -> RunSpec:
    parallel = ParallelSpec(devices_per_node=2, accelerator="gpu", fsdp=fsdp)
    spec = run_spec(model=gpt_spec(), compute="bf16", parallel=parallel, **choices)
    return dataclasses.replace(spec, data=dataclasses.replace(spec.data, seq_length=16))


def wider(layer: str, mlp: Mlp) -> Mlp:
    """Twice the width in layer 1."""
    if layer != "layers.1":
        return mlp
    parts = tuple(dataclasses.replace(part, out_features=128) for part in mlp.fc1.parts)
    return Mlp(
        dataclasses.replace(mlp.fc1, parts=parts), dataclasses.replace(mlp.fc2, in_features=128)
    )


SHARED: dict[str, dict[str, Any]] = {
    "whole": {},
    "zero": {"optim": optim_spec(name="distributed_fused_adam")},
    "fsdp": {"fsdp": FsdpSpec()},
}


@pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*deprecated:FutureWarning")
@pytest.mark.parametrize("shared", SHARED)
def test_layers_may_differ(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wider second layer computes as the reference does, and is planned as a build holds it."""
    planted_mlp(monkeypatch, wider)
    model = GPT(plain_parts(gpt_spec(), torch.float64))
    tokens = torch.arange(16).view(2, 8)
    loss = loss_of(gpt_spec(), tensors_of(model), tokens, tokens)
    torch.testing.assert_close(model(tokens, tokens).double(), loss)
    spec = job(**SHARED[shared], fp8=Fp8Recipe(amax_history_len=16))
    planned, real = rank_memory(spec, 0), rank_share(spec, 0)
    assert planned.held == real.held and planned.num_params == real.num_params
    assert planned.start == pytest.approx(real.start, rel=0.03)  # the wider layer is 9 % of it
    scalars = real.step.microbatch - planned.step.microbatch  # which a plan leaves out
    assert 0 <= scalars < 128
    assert planned.step.weight_copies == real.step.weight_copies
    one, two = (layer_bytes(spec, layer) for layer in range(2))
    assert one < two and shapes.kinds_of_layers(spec) == (0, 1)


def of_eight(layer: str, mlp: Mlp) -> Mlp:
    """Eight weights of each linear, of which a token uses two."""
    return Mlp(
        *(
            dataclasses.replace(
                linear,
                name=linear.name.replace(".mlp.", ".mlp.experts."),
                parts=tuple(
                    dataclasses.replace(part, name=part.name.replace(".mlp.", ".mlp.experts."))
                    for part in linear.parts
                ),
                experts=8,
                visits=Fraction(2, 8),
            )
            for linear in mlp
        )
    )


def test_a_token_that_uses_two_of_eight_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLOPs and kept bytes are those of two weights, and states those of eight."""
    spec = job(fp8=Fp8Recipe(amax_history_len=16))
    tokens, layers, ffn = 2 * 16, 2, 64
    weights = 2 * 32 * ffn  # of one FC1 and one FC2
    biases = ffn + 32
    flops, before = gemm_flops_per_token(spec.model), rank_memory(spec, 0)
    kept, (dense, _) = layer_bytes(spec, 0), shapes.layer_shapes(spec)
    seconds = _linear_time(dense.mlp.rows[0], tokens, 1.0, 2.0, 0.0)
    copies = dense.mlp.rows[0].weight_copies(dense.mlp.rows[0].fp8_products)
    planted_mlp(monkeypatch, of_eight)
    for cache in (shapes._layer_shapes, shapes._rank_shape, shapes._kinds, parameters_of):
        cache.cache_clear()
    assert gemm_flops_per_token(spec.model).linear - flops.linear == layers * 6 * weights
    # a second row of each token: FC1's and FC2's inputs in FP8, and FC1's output in BF16
    assert layer_bytes(spec, 0) - kept == tokens * (32 + ffn + 2 * ffn)
    after, (shape, _) = rank_memory(spec, 0), shapes.layer_shapes(spec)
    more = 7 * layers * (weights + biases)
    assert after.num_params - before.num_params == more
    assert after.held.gradients - before.held.gradients == 4 * more
    assert after.held.moments - before.held.moments == 8 * more
    assert after.held.weights - before.held.weights == 2 * more
    assert after.held.scaling - before.held.scaling == 7 * layers * 2 * 3 * (4 * 16 + 20)
    assert after.step.weight_copies - before.step.weight_copies == 7 * layers * 2 * weights
    fc2 = shape.mlp.rows[0]
    assert _linear_time(fc2, tokens, 1.0, 2.0, 0.0) == 2 * seconds
    assert fc2.weight_copies(fc2.fp8_products) == 8 * copies
    assert shape.mlp.columns[0].weight_elements == 8 * 32 * ffn
    names = [name for name in parameters_of(spec.model) if ".experts." in name]
    assert names[:2] == ["layers.0.mlp.experts.0.fc1.weight", "layers.0.mlp.experts.0.fc1.bias"]
    assert len(names) == 2 * 2 * 8 * layers
