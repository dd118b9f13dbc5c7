"""What the ranks of the tests do: train a converted model under DDP or FSDP2."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fp8_numerics.cast import Fp8Tensor
from megafp8 import fp8
from megafp8.errors import RunError
from megafp8.fp8.build import linear_quantizer
from megafp8.fp8.rows import why_rows_differ
from megafp8.fp8.scaling import ScaleTable, ScalingState, Slot
from megafp8.ops import exchange
from megafp8.parallel.mesh import Mesh
from megafp8.specs import Fp8Recipe
from megafp8.specs.precision import PrecisionPhase
from megafp8.specs.recipes import load_recipe
from megafp8.train.phases import begin_phase
from megafp8.train.step import train_step
from tests.fp8.models import mixtral, mlp, noise, tokens
from tests.fp8.quantized import quantized
from tests.kit.cases import Case
from tests.kit.faults import Fault, planted
from tests.ranks import Rank

STEPS = 3
Right = Callable[..., Any]


def batch(step: int) -> torch.Tensor:
    return noise(8, 32, seed=step)


def train(rank: Rank, wrapper: str, reduce: bool, experts: bool = False) -> dict[str, Any]:
    """Each rank trains on its half; returns losses, parameters and scales."""
    dist.init_process_group("gloo", rank=rank.index, world_size=rank.size)
    model: Any = mixtral() if experts else mlp()
    group = dist.group.WORLD if reduce else None
    state = fp8.convert(model, skip="lm_head" if experts else (), amax_group=group)
    if wrapper == "ddp":
        run: torch.nn.Module = DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (rank.size,))
        for part in model.model.layers if experts else (model[0], model[2]):
            fully_shard(part, mesh=mesh)
        run = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
    losses, first_scales = [], {}
    for step in range(STEPS):
        half = (tokens if experts else batch)(step).chunk(rank.size)[rank.index]
        with state.microbatch():
            out = run(half).logits if experts else run(half)
            loss = out.square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        first_scales = first_scales or state.scales()
    if wrapper == "fsdp2":
        forms = [linear.fp8.weight_form for linear in state.linears.values()]
        assert not any(form.is_saved_for_backward for form in forms)
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return {
        "losses": losses,
        "parameters": [parameter.detach().clone() for parameter in whole],
        "first": {name: scale.quant_scale for name, scale in first_scales.items()},
        "scales": {name: scale.quant_scale for name, scale in state.scales().items()},
    }


def train_by_fsdp1(rank: Rank) -> tuple[list[list[Any]], list[str]]:
    """Accumulate two microbatches a step: by hand, and in each way of FSDP1, which it refuses late.

    Return losses, parameters and scales of each, and what conversion says of sharded models.
    """
    dist.init_process_group("gloo", rank=rank.index, world_size=rank.size)
    warnings.filterwarnings("ignore", category=FutureWarning)  # FSDP1 is deprecated
    ways = [(ShardingStrategy[s], o) for s in ("FULL_SHARD", "SHARD_GRAD_OP") for o in (0, 1)]

    def shard(module: torch.nn.Module, way: tuple[ShardingStrategy, int]) -> torch.nn.Module:
        device = torch.device("cpu")
        given = {"sharding_strategy": way[0], "use_orig_params": bool(way[1]), "device_id": device}
        return FullyShardedDataParallel(module, **given)

    def run(way: tuple[ShardingStrategy, int] | None) -> list[Any]:
        model = mlp()
        state = fp8.convert(model, amax_group=dist.group.WORLD)
        whole: Any = model
        if way is not None:
            model[0], model[2] = shard(model[0], way), shard(model[2], way)
            whole = shard(model, way)
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
        losses = []
        for step in range(2 * STEPS):
            is_first = step % 2 == 0
            waits = whole.no_sync() if way is not None and is_first else nullcontext()
            with waits, state.microbatch(first=is_first):
                loss = whole(batch(step).chunk(rank.size)[rank.index]).square().mean()
                loss.backward()
            losses.append(loss.item())
            if not is_first:
                for parameter in model.parameters() if way is None else ():
                    dist.all_reduce(parameter.grad.div_(rank.size))
                optimizer.step()
                optimizer.zero_grad()
        forms = [linear.fp8.weight_form for linear in state.linears.values()]
        assert all(form.is_saved_for_backward == (way is None) for form in forms)
        summon = FullyShardedDataParallel.summon_full_params
        with nullcontext() if way is None else summon(whole):
            flat = torch.cat([p.detach().flatten() for p in whole.parameters()])
        return [losses, flat, state.state_dict()]

    said = []
    for way in ways[:2]:
        with pytest.raises(fp8.Fp8Error) as refused:
            fp8.convert(shard(mlp(), way))
        said.append(str(refused.value))
    return [run(None), *map(run, ways)], said


def convert_in_a_group_of_one(rank: Rank) -> str | None:
    """What `fp8.convert` refuses of a group that has rank 0 alone."""
    dist.init_process_group("gloo", rank=rank.index, world_size=rank.size)
    group = dist.new_group([0])
    try:
        fp8.convert(mlp(), amax_group=group)
    except fp8.Fp8Error as error:
        return str(error)
    return None


def convert_other_linears(rank: Rank) -> str:
    """What `fp8.convert` refuses where rank 1 leaves out a linear that the others have."""
    dist.init_process_group("gloo", rank=rank.index, world_size=rank.size)
    model = mlp()
    with pytest.raises(fp8.Fp8Error) as refused:
        fp8.convert(model, skip="2" if rank.index == 1 else (), amax_group=dist.group.WORLD)
    assert not any(isinstance(module, fp8.Fp8Linear) for module in model), "nothing is changed"
    return str(refused.value)


def build_with_other_rows(mesh: Mesh, renamed: dict[str, tuple[str, str]]) -> dict[str, list[str]]:
    """What a run refuses of ranks whose rows differ: at its start, and when its recipe changes.

    On rank 1 the tensor of a pair's first name is registered under the second, or not at all.
    """
    return {label: _refused(mesh, pair) for label, pair in renamed.items()}


def _register(
    pair: tuple[str, str], right: Right, table: ScaleTable, name: str, *rule: Any, **place: Any
) -> Slot:
    name = dict(zip(pair, reversed(pair), strict=True)).get(name, name)
    return right(table, name, *rule, **place) if name else Slot(table, 0)


def _refused(mesh: Mesh, pair: tuple[str, str]) -> list[str]:
    recipe = Fp8Recipe(amax_history_len=4)
    state, other = Case(fp8=recipe).build(mesh), replace(recipe, margin=1)
    state.phases = tuple(
        PrecisionPhase(after=after, changes=(), recipe=each)
        for after, each in enumerate((recipe, other))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "dist", None)  # a step exchanges no names
        train_step(state, Case().microbatches(0, mesh))
    state.step = 1
    texts = []
    wrong = Fault("megafp8.fp8.scaling.ScaleTable.register", partial(_register, pair), rank=1)
    with planted(wrong, rank=mesh.world.rank):
        for act in (lambda: Case(fp8=recipe).build(mesh), lambda: begin_phase(state)):
            with pytest.raises(RunError) as error:
                act()
            texts.append(str(error.value))
    return texts


def share_rows(mesh: Mesh) -> tuple[str | None, dict[str, list[float]], str | None]:
    """Each rank casts the tensor of its own number, and has rows for all of them.

    Return what the ranks say of their rows, the histories, and what they say of a row of nobody.
    """
    rank, size = mesh.world.rank, mesh.world.size
    state = ScalingState(Fp8Recipe(amax_history_len=3), mesh.amax.start_all_reduce_max)
    for table in (state.forward, state.backward):
        for number in range(size):
            table.register(f"expert {number}", is_here=number == rank)
        table.amax[rank] = rank + 1
    assert mesh.amax.group is not None
    difference = why_rows_differ(state, mesh.amax.group)
    state.end_forward()
    state.end_backward()
    histories = {key: table.history[:, -1].tolist() for key, table in state.tables.items()}
    state.backward.register("expert 9", is_here=False)
    return difference, histories, why_rows_differ(state, mesh.amax.group)


def quantize_a_part(rank: Rank, recipe: str, along: int) -> list[float]:
    """Quantize an input that lies on the first rank alone; return both operands' scales."""
    dist.init_process_group("gloo", rank=rank.index, world_size=rank.size)
    load_recipe(recipe)

    def maximum(amax: torch.Tensor) -> None:
        dist.all_reduce(amax, dist.ReduceOp.MAX)

    state = ScalingState(Fp8Recipe(name=recipe))
    linear = linear_quantizer(state, "linear", lambda role: maximum)
    assert linear is not None
    part = noise(32, 32, seed=1).tensor_split([32], along)[rank.index]
    found, _ = quantized(linear, "input", part)
    scales = []
    for operand in found:
        assert isinstance(operand, Fp8Tensor) and operand.payload.shape == part.shape
        whole = operand.dequant_scale if operand.outer is None else operand.outer
        scales.append(whole.item())
    return scales


def train_by_trainer(rank: Rank, folder: str, wrapper: str) -> dict[str, Any]:
    """Train with the Trainer of transformers; once to the end, once on from its second step."""
    from transformers import Trainer, TrainingArguments

    from megafp8.fp8.trainer import Fp8Callback
    from tests.fp8.models import gpt2, tokens

    sharding = {"state_dict_type": "SHARDED_STATE_DICT"}
    sharding["transformer_layer_cls_to_wrap"] = "GPT2Block"
    arguments = TrainingArguments(  # joins the ranks, so that their group exists from here on
        folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=STEPS + 1,
        eval_strategy="steps", eval_steps=2, save_steps=2, logging_steps=1, use_cpu=True,
        report_to="none", disable_tqdm=True, fsdp=wrapper == "fsdp2", fsdp_config=sharding,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for step in range(8) for row in tokens(step)]

    def run(resume_from: str | None) -> dict[str, Any]:
        model = gpt2()
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False
        state = fp8.convert(model, "delayed", skip="lm_head", amax_group=dist.group.WORLD)
        callbacks = [Fp8Callback(state)]
        trainer = Trainer(model, arguments, None, data, data[:8], callbacks=callbacks)
        if wrapper == "fsdp2":
            _shard_on_a_cpu(trainer)
        trainer.train(resume_from_checkpoint=resume_from)
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
        return {
            "wrapper": type(trainer.model_wrapped).__name__,
            "parameters": [parameter.detach().clone() for parameter in whole],
            "state": state.state_dict(),
            "updates": {n: scale.num_updates for n, scale in state.scales().items()},
            "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
            "validated": [r["eval_loss"] for r in trainer.state.log_history if "eval_loss" in r],
        }

    return {"whole": run(None), "continued": run(f"{folder}/checkpoint-2")}


def _shard_on_a_cpu(trainer: Any) -> None:
    """Have accelerate shard as on GPUs: of ranks on CPUs it makes replicas, whatever is asked."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    state = trainer.accelerator.state
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    trainer.is_fsdp_enabled = True
