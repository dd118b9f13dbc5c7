"""What one layer starts on a GPU with FP8 tensor cores, as `layer_counts` counts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.fp8.scaling import ScalingState
from megafp8.models.loss import HeadLoss, backward_of_loss, beginning_of_backward
from megafp8.observe.health import HEALTH_FILE, read_health
from megafp8.observe.trackers import CompositeTracker
from megafp8.optim.protocol import Optimizers
from megafp8.parallel import vocab
from megafp8.parallel.collectives import Axis
from megafp8.parallel.pipeline import Batch
from megafp8.plan import time
from megafp8.specs import HealthSpec
from megafp8.specs.recipes import find_recipe
from megafp8.train import graphs
from megafp8.train import step as train_step_file
from megafp8.train.report.fp8 import HealthLog
from megafp8.train.state import TrainState
from megafp8.train.step import StepResult, train_step
from tests.copies import Copies
from tests.fp8.kernels.layer_counts import (
    BATCH,
    FP8,
    GPT,
    HIDDEN,
    LLAMA,
    META,
    RECIPES,
    SEQUENCE,
    Cost,
    Tally,
    counting,
    second_microbatch,
    state_of,
)
from tests.tiny import microbatch


@pytest.fixture
def tally(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tally]:
    pytest.importorskip("triton")
    with counting(monkeypatch) as tally:
        yield tally


# Counted, not measured. docs/evidence/performance.md has the GPT shape's figures, part by part.
COSTS: dict[tuple[str, str], Cost] = {
    ("gpt", "bf16"): Cost(39, 114.0, 22.0, 0.0),
    ("gpt", "delayed"): Cost(43, 104.1, 22.0, 24.0),
    ("gpt", "fp8_params"): Cost(43, 104.1, 22.0, 12.0),
    ("gpt", "tensorwise"): Cost(83, 193.1, 22.0, 36.0),
    ("gpt", "rowwise"): Cost(87, 210.2, 22.0, 36.0),
    ("gpt", "blockwise"): Cost(55, 179.0, 22.0, 24.0),
    ("gpt", "mxfp8"): Cost(47, 161.6, 22.0, 24.4),
    ("gpt", "nvfp4"): Cost(83, 178.6, 22.0, 30.75),
    ("llama", "bf16"): Cost(49, 216.3, 22.0, 0.0),
    ("llama", "delayed"): Cost(51, 134.8, 22.0, 32.0),
    ("llama", "fp8_params"): Cost(51, 134.8, 22.0, 16.0),
    ("llama", "tensorwise"): Cost(97, 336.3, 22.0, 48.0),
    ("llama", "rowwise"): Cost(97, 336.5, 22.0, 48.0),
    ("llama", "blockwise"): Cost(65, 297.6, 22.0, 32.0),
    ("llama", "mxfp8"): Cost(61, 297.6, 22.0, 32.5),
    ("llama", "nvfp4"): Cost(97, 318.8, 22.0, 41.0),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", ["gpt", "llama"])
def test_launches_and_bytes_of_a_layer(shape: str, recipe: str, tally: Tally) -> None:
    settings = (*RECIPES[recipe], *(LLAMA if shape == "llama" else GPT))
    ran = second_microbatch(settings, tally)
    assert set(ran) == (set() if recipe == "bf16" else {"tensor cores"})
    cost, expected = tally.cost(), COSTS[shape, recipe]
    what = f"{cost}; {dict(tally.launches)}"
    assert cost.launches == expected.launches, what
    if recipe != "fp8_params":
        planned = (
            time.LAUNCHES_IN_BF16 if recipe == "bf16" else find_recipe(recipe).traits.cost.launches
        )
        assert cost.launches == planned[shape == "llama"], "the recipe declares another number"
    assert cost[1:] == pytest.approx(expected[1:], abs=0.1), f"another figure: {what}"


@pytest.mark.parametrize(
    ("by_kernel", "launches", "bytes_of_logit"), [(False, 16, 36.3), (True, 13, 2.3)]
)
def test_launches_and_bytes_of_the_head(
    by_kernel: bool,
    launches: int,
    bytes_of_logit: float,
    tally: Tally,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loss and gradients of one chunk, without the products.

    What is overwritten counts once: the kernel reads the logits twice and writes them, 6 bytes.
    """
    monkeypatch.setattr(vocab, "runs_triton", lambda device: by_kernel)
    tokens, num_rows = BATCH * SEQUENCE, 50304
    with META:
        hidden = torch.empty(1, tokens, HIDDEN, dtype=torch.bfloat16).requires_grad_()
        weight = torch.nn.Parameter(torch.empty(num_rows, HIDDEN, dtype=torch.bfloat16))
        targets = torch.empty(1, tokens, dtype=torch.int64)
        head = HeadLoss(chunk_loss=partial(vocab.loss_by_triton, tp=Axis("tp")))
        with tally:
            head(hidden, weight, targets)
    of_logits = sum(tally.bytes.values()) - tally.bytes["products"]
    what = (
        f"{of_logits / (tokens * num_rows)}; {sum(tally.launches.values())}; {dict(tally.launches)}"
    )
    assert sum(tally.launches.values()) == launches, what
    assert of_logits / (tokens * num_rows) == pytest.approx(bytes_of_logit, abs=0.1)


@pytest.mark.parametrize("begins", ["a step", "a pipeline's schedule", "another factor"])
def test_the_head_multiplies_its_gradients_only_by_what_may_not_be_1(
    begins: str, tally: Tally
) -> None:
    """Both are as large as weight and input; on a GPU the host does not read the factor."""
    with META:
        hidden = torch.empty(1, 16, HIDDEN, dtype=torch.bfloat16).requires_grad_()
        weight = torch.nn.Parameter(torch.empty(128, HIDDEN, dtype=torch.bfloat16))
        loss = HeadLoss()(hidden, weight, torch.empty(1, 16, dtype=torch.int64))
        factor = torch.full((), 1.0)
        backward_of_loss(HeadLoss()(hidden, weight, torch.empty(1, 16, dtype=torch.int64)))
        with tally:
            if begins == "a step":
                backward_of_loss(loss)
            elif begins == "another factor":
                loss.backward(factor)
            else:
                beginning_of_backward(loss).backward()
    assert tally.launches["mul"] == 2 * (begins == "another factor"), dict(tally.launches)


def refuse(what: str) -> None:
    """Fail where a copy between host and device is seen that the host would wait for."""
    raise AssertionError(f"{what}: the host waits for the device")


def whole_step(
    state: TrainState, tally: Tally, num_microbatches: int, *, is_watched: bool = True
) -> None:
    """Run a step's microbatches as `forward_backward` does, and end the step as its update does.

    Before each microbatch all scales are read, as by a validation. A step that is not watched may
    wait, as those before a capture.
    """
    assert state.graphs is not None
    shape = (BATCH, SEQUENCE)
    batch = Batch(*(torch.empty(shape, dtype=torch.int64, device=META) for _ in range(2)))
    state.sink.begin_step()
    for index in range(num_microbatches):
        for table in state.scaling.tables.values():
            assert table.dequant_scale.device == META
        state.scaling.begin_microbatch(index)
        state.graphs._fits({"tokens_BS": batch.tokens_BS, "targets_BS": batch.targets_BS})
        watches = (tally, Copies(META, refuse)) if is_watched else ()
        with ExitStack() as stack:
            for watch in watches:
                stack.enter_context(watch)
            state.graphs._forward_backward(state.graphs._inputs)
        state.scaling.end_forward()
        state.scaling.end_backward()
    state.sink.end_step()
    state.masters.write_back()


CAPTURED = [name for name in RECIPES if name != "nvfp4"]
"""Recipes for which settings allow CUDA graphs: those that round to nearest."""


SHAPES = {
    "gpt": GPT,
    "llama": LLAMA,
    "alibi": (*GPT, "model.position_embedding_type=alibi"),
}


@pytest.mark.parametrize("recipe", CAPTURED)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_captured_step_waits_for_nothing_and_nothing_moves(
    shape: str, recipe: str, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embedding, layer, head and loss, on the paths of a GPU.

    A number that the host reads, and a tensor of the host that a kernel would read, fail here. All
    that a graph reads or writes and that outlives it keeps its memory. Each pass computes the
    reciprocals of the scales itself, since those that others have computed are not updated.
    """
    if shape == "alibi" and recipe != "delayed":
        pytest.skip("attention is the same in each recipe")
    monkeypatch.setattr(vocab, "runs_triton", lambda device: True)
    state = state_of((*RECIPES[recipe], *SHAPES[shape], "model.enable_cuda_graph=True"))
    assert state.graphs is not None
    places = []
    whole_step(state, tally, num_microbatches=1, is_watched=False)
    for _ in range(3):
        whole_step(state, tally, num_microbatches=2)
        lasting = state.graphs.lasting()
        places.append({name: tensor.untyped_storage()._cdata for name, tensor in lasting})
    assert places[0] == places[1] == places[2]
    if isinstance(state.scaling, ScalingState) and state.scaling.recipe.name == "delayed":
        of_rope = 3 * 2 * (shape == "llama")
        assert tally.launches["reciprocal"] - of_rope == 3 * 2 * 2, "steps, microbatches, tables"
    assert len(places[0]) >= 18 and tally.launches["_scaled_mm"] == (recipe != "bf16") * 72


def spoilt(bug: str, output: torch.Tensor) -> torch.Tensor:
    """Return a result by way of something that waits; the last bug does so in its backward pass."""
    match bug:
        case "reads a number":
            return output * output.sum().item()
        case "copies from the host":
            return output * torch.ones(output.shape[-1])
        case "makes a tensor of a number":
            return output * torch.tensor([2.0], device=output.device)
        case "takes a list as an index":
            return output[list(range(output.shape[0]))]
        case "writes by a list as an index":
            output = output.clone()
            output[[0, 1]] = 0.0
            return output
        case "in backward":
            result = output * 1.0
            result.register_hook(lambda grad: grad[[*range(grad.shape[0])]])
            return result
    raise AssertionError(bug)


BUGS = [
    "reads a number",
    "copies from the host",
    "makes a tensor of a number",
    "takes a list as an index",
    "writes by a list as an index",
    "in backward",
]


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_wait_is_seen(bug: str, tally: Tally) -> None:
    state = state_of((*FP8, *GPT, "model.enable_cuda_graph=True"))
    whole_step(state, tally, num_microbatches=1)
    state.model.final_norm.register_forward_hook(lambda *given: spoilt(bug, given[2]))
    with pytest.raises((RuntimeError, AssertionError, NotImplementedError)):
        whole_step(state, tally, num_microbatches=1)


class Eager:
    """Runs passes as before a capture; inside them not even a copy of a batch is allowed."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    @contextmanager
    def beside(self) -> Iterator[None]:
        self._tally.takes_batches = False
        yield
        self._tally.takes_batches = True


class Copied:
    """Stands for the event of a copy to the host."""

    def __init__(self, order: list[str]) -> None:
        self._order = order

    def synchronize(self) -> None:
        self._order.append("the host waits")


def order_in_a_step(
    state: TrainState,
    tally: Tally,
    monkeypatch: pytest.MonkeyPatch,
    more: Callable[[], torch.Tensor] | None = None,
) -> tuple[list[str], StepResult]:
    """Run a step of two microbatches; returns the order of copy, update and wait, and the result.

    Batches come in copies that do not wait. Nothing else of the step, the update included, may wait
    but for the results; meta tensors have no numbers, so these are ones.
    """
    order: list[str] = []

    def copy_to_host(numbers: torch.Tensor) -> tuple[torch.Tensor, Copied]:
        assert numbers.device == META and numbers.dtype == torch.float64
        order.append("copy")
        with tally.unwatched():
            return torch.arange(1.0, len(numbers) + 1, dtype=torch.float64), Copied(order)

    def fused(*given: Any, **options: Any) -> None:
        order.append("update")

    monkeypatch.setattr(train_step_file, "copy_to_host", copy_to_host)
    monkeypatch.setattr(Optimizers, "decides_on_device", True)
    monkeypatch.setattr(graphs, "make_recorder", lambda device: Eager(tally))
    monkeypatch.setattr(torch, "_fused_adamw_", fused)
    tally.takes_batches = True
    with tally, Copies(META, refuse_waits(order)):
        result = train_step(state, [microbatch(0), microbatch(1)], more=more)
    return order, result


def refuse_waits(order: list[str]) -> Callable[[str], None]:
    """Return what fails at each wait for the device but for reading the copy that has arrived."""

    def see(what: str) -> None:
        if what != "tolist" or order[-1:] != ["the host waits"]:
            refuse(what)

    return see


@pytest.mark.parametrize("recipe", CAPTURED)
def test_a_step_waits_for_nothing_before_it_reads_its_result(
    recipe: str, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes, sums of gradients, their norm, the update and the write-back."""
    monkeypatch.setattr(vocab, "runs_triton", lambda device: True)
    state = state_of((*RECIPES[recipe], *GPT, "model.enable_cuda_graph=True"))
    order, _ = order_in_a_step(state, tally, monkeypatch)
    updates = ["update"] * 2  # one with weight decay, one without
    assert order == ["copy", *updates, "the host waits"], "it does not wait for the update"


def test_a_logged_step_of_delayed_waits_as_often_as_others(
    tally: Tally, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The health of tensors and the counts of non-finite updates come with the loss."""
    state = state_of((*FP8, *GPT))
    log = HealthLog(state, HealthSpec(), tmp_path, 0, lambda text: None)
    order, result = order_in_a_step(state, tally, monkeypatch, log.begin())
    assert order == ["copy", "update", "update", "the host waits"]
    with Copies(META, refuse):
        log.end(1, CompositeTracker([]), result.more)
    log.close()
    (record,) = read_health(tmp_path / HEALTH_FILE)
    assert len(record.tensors) == 12 and record.tensors["layers.0.attention.qkv.input"].amax == 4.0


@pytest.mark.parametrize("recipe", ["delayed", "fp8_params"])
@pytest.mark.parametrize("shape", ["gpt", "llama"])
def test_launches_and_bytes_of_a_logged_layer(shape: str, recipe: str, tally: Tally) -> None:
    """A table's update is one launch more, for all layers of a model; no tensor is read again."""
    settings = (*RECIPES[recipe], *(LLAMA if shape == "llama" else GPT))
    second_microbatch(settings, tally, logged=True)
    cost, expected = tally.cost(), COSTS[shape, recipe]
    assert cost.launches == expected.launches + 2, f"{cost}; {dict(tally.launches)}"
    assert shape == "llama" or cost.launches <= 50
    assert cost[1:] == pytest.approx(expected[1:], abs=0.1)


@pytest.mark.parametrize("bug", ["a list as an index", "a batch that is waited for"])
def test_a_planted_wait_outside_of_the_passes_is_seen(
    bug: str, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of((*FP8, *GPT, "model.enable_cuda_graph=True"))
    norms = state.masters.squared_norms

    def spoilt_norms() -> torch.Tensor:
        if bug == "a list as an index":
            return norms()[list(range(len(state.masters.segments)))]
        return norms() * torch.ones(1).to(META)

    monkeypatch.setattr(state.masters, "squared_norms", spoilt_norms)
    with pytest.raises(AssertionError, match="the host waits|another device"):
        order_in_a_step(state, tally, monkeypatch)
