"""Whole runs at FP8-LM's levels: kill and resume, other levels' checkpoints, refusals, readers."""

from __future__ import annotations

import pytest
import torch

from megafp8.checkpoint.reader import SCALES, Reader
from megafp8.train.load_model import load_model, read_tensor
from tests.train.runs import Place

LEVEL = "model.optim.fp8_opt_level"
SHORT = ["trainer.max_steps=6", "model.optim.sched.warmup_steps=1"]
LEVELS = {
    "O1": [f"{LEVEL}=O1"],
    "O2": [f"{LEVEL}=O2", "model.optim.stochastic_rounding=True"],
    "O3": [f"{LEVEL}=O3"],
    "BF16 moments": ["model.optim.exp_avg_dtype=bf16", "model.optim.exp_avg_sq_dtype=bf16"],
    "FP32 sums, L2": [
        f"{LEVEL}=O2",
        "model.optim.main_grads_sum_dtype=fp32",
        "model.optim.name=adam",
    ],
}

SHARDING = "model.optim.data_parallel_sharding_strategy"
TWO_SHARDS = ("trainer.devices=2", "model.optim.name=distributed_fused_adam")


def tensors(place: Place, step: int, name: str) -> dict[str, torch.Tensor]:
    reader = Reader(place.checkpoint(step, name))
    wanted = ("model/", "optimizer/", "scaling/", "reduction/", SCALES)
    return {name: reader.read(name) for name in reader.names() if name.startswith(wanted)}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


def assert_killed_is_whole(place: Place) -> None:
    """The runs `killed` and `whole` have the same bits in their checkpoints of step 6."""
    whole, killed = tensors(place, 6, "whole"), tensors(place, 6, "killed")
    assert whole.keys() == killed.keys()
    for name, tensor in whole.items():
        assert torch.equal(bits(tensor), bits(killed[name])), name


@pytest.mark.parametrize("level", LEVELS)
def test_a_killed_run_continues_bit_for_bit(place: Place, level: str) -> None:
    """A run is killed between two microbatches of its fourth step, and begins that step again."""
    flags = [*SHORT, *LEVELS[level]]
    done = place.run(*flags, "exp_manager.name=whole")
    assert done.code == 0, done.output
    killed = place.run(*flags, "exp_manager.name=killed", fault=["killed_in_microbatch", 4, 1])
    assert killed.code == -9 and place.steps("killed") == [2], killed.output
    done = place.run(*flags, "exp_manager.name=killed")
    assert done.code == 0 and "continuing from" in done.output, done.output
    assert_killed_is_whole(place)
    kept = [[row["loss"] for row in place.metrics(n) if "lr" in row] for n in ("whole", "killed")]
    assert kept[0] == kept[1]


@pytest.mark.slow
@pytest.mark.parametrize("shard_by", ["tensors", "elements"])
def test_a_killed_rank_of_a_sharded_level_loses_nothing(place: Place, shard_by: str) -> None:
    """Rank 1 of two is killed in the fourth step; factors of FP8 sums are in the checkpoint."""
    flags = [*SHORT, f"{LEVEL}=O3", *TWO_SHARDS, f"{SHARDING}=optim_grads"]
    flags += [f"model.optim.shard_by={shard_by}", "model.optim.fp8_grad_reduction=auto"]
    done = place.run(*flags, "exp_manager.name=whole")
    assert done.code == 0 and "ZeRO-2 over 2 ranks" in done.output, done.output
    fault = ["in_rank", 1, "killed_in_microbatch", 2, 1]  # the fourth of one a step
    killed = place.run(*flags, "exp_manager.name=killed", fault=fault)
    assert killed.code != 0 and place.steps("killed") == [2], killed.output
    done = place.run(*flags, "exp_manager.name=killed")
    assert done.code == 0 and "continuing from" in done.output, done.output
    assert_killed_is_whole(place)


def test_a_checkpoint_of_another_level_is_converted_and_its_error_reported(place: Place) -> None:
    done = place.run(*SHORT, "trainer.max_steps=2", "trainer.val_check_interval=2")
    assert done.code == 0, done.output
    plain = Reader(place.checkpoint(2))
    path = f"model.resume_from_checkpoint={place.dir()}"
    few = place.run(*SHORT, f"{LEVEL}=O2", path, "exp_manager.name=few", "trainer.max_steps=3")
    assert few.code == 0, few.output
    for what, now in (
        ("model", "fp16"),
        ("optimizer/exp_avg", "fp8"),
        ("optimizer/exp_avg_sq", "fp16"),
    ):
        line = (
            f"{what}: stored in float32 there and in {now} here; converted, with a relative error"
        )
        assert line in few.output, few.output
    stored = Reader(place.checkpoint(3, "few"))
    name = "layers.0.attention.query.weight"
    assert stored.dtype(f"model/{name}") == torch.float16
    assert stored.dtype("model/embedding.word.weight") == torch.float32
    assert stored.dtype("optimizer/exp_avg/embedding.word.weight") == torch.float8_e4m3fn

    back = place.run(
        *SHORT,
        f"model.resume_from_checkpoint={place.dir('few')}",
        "exp_manager.name=back",
        "trainer.max_steps=4",
    )
    assert back.code == 0 and "converted" not in back.output, back.output
    assert "step 3" in back.output
    assert plain.dtype(f"model/{name}") == Reader(place.checkpoint(4, "back")).dtype(
        f"model/{name}"
    )


def test_a_checkpoint_of_a_level_is_read_by_everything_else(place: Place) -> None:
    """Evaluation, export and new runs that start from the weights read its values in FP32."""
    done = place.run(*SHORT, "trainer.max_steps=2", f"{LEVEL}=O2")
    assert done.code == 0, done.output
    reader = Reader(place.checkpoint(2))
    name = "layers.1.mlp.fc1.weight"
    payload, scale = reader.read(f"model/{name}"), reader.read(f"{SCALES}model/{name}")
    values = read_tensor(reader, name)
    assert values.dtype == torch.float32 and torch.equal(values, payload.float() * scale)
    assert payload.abs().max() > 65504 / 2, "the scaled amax lies in the upper half"
    model = load_model(reader, torch.float32, torch.device("cpu"))
    assert any(torch.equal(param, values) for param in model.parameters())
    begun = place.run(
        *SHORT, "trainer.max_steps=1", f"restore_from_path={place.dir()}", "exp_manager.name=begun"
    )
    assert begun.code == 0 and "loaded the weights from" in begun.output, begun.output


def test_the_start_says_what_is_stored_how(place: Place) -> None:
    done = place.run(*SHORT, "trainer.max_steps=1", f"{LEVEL}=O2")
    assert done.code == 0, done.output
    assert "FP8-LM: gradients of linears in fp8, their masters in fp16" in done.output
    assert "first moments in fp8, second in fp16" in done.output
    assert "6.0 bytes a parameter of the linears" in done.output


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ([f"{LEVEL}=O2", "model.fp8=False"], LEVEL),
        ([f"{LEVEL}=O1", "model.optim.fp8_grad_reduction=auto"], "fp8_grad_reduction=auto"),
        ([f"{LEVEL}=O2", "model.fsdp=True"], "model.fsdp=True"),
        ([f"{LEVEL}=O2", f"{SHARDING}=optim_grads"], f"{SHARDING}=optim_grads"),
        ([f"{LEVEL}=O2", *TWO_SHARDS, f"{SHARDING}=optim_grads_params"], f"{SHARDING}=optim_grads"),
        (
            [
                f"{LEVEL}=O2",
                *TWO_SHARDS,
                f"{SHARDING}=optim_grads",
                "model.optim.main_grads_sum_dtype=fp32",
            ],
            f"{SHARDING}=optim_grads",
        ),
        ([f"{LEVEL}=O2", "model.fp8_backend=torchao"], "model.fp8_backend=torchao"),
        ([f"{LEVEL}=O2", "model.fp8_params=True"], "model.fp8_params=True"),
        ([f"{LEVEL}=O3", "model.fp8_recipe=rowwise"], f"{LEVEL}=O3"),
        ([f"{LEVEL}=O2", "trainer.gradient_clip_algorithm=value"], "gradient_clip_algorithm"),
        ([f"{LEVEL}=O4"], f"{LEVEL}=O4"),
        (["model.optim.moments_scaling=group"], "megafp8 0.1.0"),
        (["model.optim.exp_avg_dtype=int8"], "model.optim.exp_avg_dtype=int8"),
        (["model.optim.main_grads_dtype=bf16"], "model.optim.main_grads_dtype=bf16"),
        (["model.optim.stochastic_rounding=True"], "model.optim.stochastic_rounding=True"),
    ],
)
def test_what_cannot_be_is_refused_by_name(place: Place, flags: list[str], key: str) -> None:
    done = place.run(*[flag for flag in SHORT], *flags)
    assert done.code == 2 and key in done.output and "Traceback" not in done.output, done.output
