"""Train a converted model under other frameworks, and compare its bits with those of a plain loop.

pip install deepspeed lightning accelerate, in an environment of its own that has megafp8 too. Then

    python -m scripts.frameworks                                        # one process
    torchrun --nproc-per-node 2 -m scripts.frameworks deepspeed accelerate   # two ranks of gloo

Each framework trains four steps of two microbatches, and is continued from a checkpoint after two.
Losses, weights and scales must be those of a loop that averages gradients by hand, in FP32. A line
for each says so; the exit code is 1 if any differs. Lightning runs on one process.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megafp8 import fp8

STEPS, MICROBATCHES, ROWS, WIDTH = 4, 2, 8, 32
Result = tuple[list[float], list[torch.Tensor], dict[str, Any]]  # losses, weights, scales


def model() -> nn.Module:
    """Return a small model with the same weights each time."""
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def converted(net: nn.Module) -> fp8.Fp8State:
    """Convert all but the last linear, with one amax for all ranks."""
    return fp8.convert(
        net, skip="3", amax_group=dist.group.WORLD if dist.is_initialized() else None
    )


def batch(number: int, rank: int) -> torch.Tensor:
    """Return a rank's rows of a microbatch."""
    draw = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(ROWS, WIDTH, generator=draw)


def optimizer_of(net: nn.Module) -> torch.optim.AdamW:
    """Return the optimizer that all have."""
    return torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)


def loss_of(net: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return a loss that reaches all weights."""
    return (net(x) - x).square().mean()


def weights_of(net: nn.Module) -> list[torch.Tensor]:
    """Return copies of the weights."""
    return [p.detach().clone() for p in net.parameters()]


def plain(rank: int, ranks: int, *, each: bool) -> Result:
    """Run the loop by hand; `each` averages over ranks after every microbatch, not after all."""
    net = model()
    state, optimizer, losses = converted(net), optimizer_of(net), []
    for step in range(STEPS):
        sums = [torch.zeros_like(p) for p in net.parameters()]
        for index in range(MICROBATCHES):
            with state.microbatch(first=index == 0):
                loss = loss_of(net, batch(MICROBATCHES * step + index, rank))
                (loss / MICROBATCHES).backward()
            losses.append(loss.item())
            for total, p in zip(sums, net.parameters(), strict=True):
                assert p.grad is not None
                if ranks > 1 and (each or index == MICROBATCHES - 1):
                    dist.all_reduce(p.grad.div_(ranks))
                if each or index == MICROBATCHES - 1:
                    total += p.grad
                    p.grad = None
        for total, p in zip(sums, net.parameters(), strict=True):
            p.grad = total
        optimizer.step()
        optimizer.zero_grad()
    return losses, weights_of(net), state.state_dict()


def deepspeed(rank: int, folder: str) -> Iterable[tuple[str, Result]]:
    """Train with each stage of ZeRO."""
    import deepspeed as ds

    def engine(stage: int) -> tuple[Any, fp8.Fp8State]:
        net = model()
        state = converted(net)
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": MICROBATCHES,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
            "steps_per_print": 10**9,
        }
        return ds.initialize(model=net, optimizer=optimizer_of(net), config=config)[0], state

    for stage in (1, 2, 3):
        losses: list[float] = []
        whole, state = engine(stage)
        for number in range(STEPS * MICROBATCHES):
            if number == STEPS * MICROBATCHES // 2:
                whole.save_checkpoint(folder, client_state={"fp8": state.state_dict()})
                whole, state = engine(stage)
                state.load_state_dict(whole.load_checkpoint(folder)[1]["fp8"])
            with state.microbatch(first=number % MICROBATCHES == 0):
                loss = loss_of(whole, batch(number, rank))
                whole.backward(loss)
            whole.step()
            losses.append(loss.item())
        parameters = list(whole.module.parameters())
        with ds.zero.GatheredParameters(parameters, enabled=stage == 3):
            weights = weights_of(whole.module)
        yield f"DeepSpeed {ds.__version__}, ZeRO {stage}", (losses, weights, state.state_dict())


def accelerate(rank: int, folder: str) -> Iterable[tuple[str, Result]]:
    """Train with what `Accelerator.prepare` returns."""
    import accelerate as hf

    accelerator = hf.Accelerator(cpu=True, gradient_accumulation_steps=MICROBATCHES)

    def prepared() -> tuple[Any, Any, fp8.Fp8State]:
        accelerator.free_memory()
        accelerator._custom_objects.clear()
        net = model()
        state = converted(net)
        accelerator.register_for_checkpointing(state)
        return *accelerator.prepare(net, optimizer_of(net)), state

    losses, is_first = [], True
    whole, optimizer, state = prepared()
    for number in range(STEPS * MICROBATCHES):
        if number == STEPS * MICROBATCHES // 2:
            accelerator.save_state(folder)
            whole, optimizer, state = prepared()
            accelerator.load_state(folder)
        with accelerator.accumulate(whole), state.microbatch(first=is_first):
            loss = loss_of(whole, batch(number, rank))
            accelerator.backward(loss)
        losses.append(loss.item())
        is_first = accelerator.sync_gradients
        optimizer.step()
        optimizer.zero_grad()
    yield f"Accelerate {hf.__version__}", (losses, weights_of(whole), state.state_dict())


def lightning(rank: int, folder: str) -> Iterable[tuple[str, Result]]:
    """Train a LightningModule with the hooks of docs/guide/own_model_training.md."""
    import lightning as pl

    losses: list[float] = []

    class Module(pl.LightningModule):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.state = model(), None

        def configure_model(self) -> None:
            self.state = self.state or converted(self.net)

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            self.open = self.state.microbatch(first=index % MICROBATCHES == 0)
            self.open.__enter__()

        def on_after_backward(self) -> None:
            self.open.__exit__(None, None, None)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["fp8"] = self.state.state_dict()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.state.load_state_dict(checkpoint["fp8"])

        def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
            loss = loss_of(self.net, x)
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.AdamW:
            return optimizer_of(self)

    half = MICROBATCHES * STEPS // 2

    def fit(module: Module, epoch: int, start: str | None) -> Any:
        """Train one half, which is an epoch: within one Lightning would skip batches."""
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder,
            accumulate_grad_batches=MICROBATCHES, max_epochs=epoch + 1,
        )  # fmt: skip
        data = [batch(number, rank) for number in range(epoch * half, (epoch + 1) * half)]
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None), ckpt_path=start)
        return trainer

    kept = f"{folder}/middle.ckpt"
    fit(Module(), 0, None).save_checkpoint(kept)
    module = Module()
    fit(module, 1, kept)
    assert module.state is not None
    result = losses, weights_of(module.net), module.state.state_dict()
    yield f"Lightning {pl.__version__}", result


FRAMEWORKS = {"deepspeed": deepspeed, "accelerate": accelerate, "lightning": lightning}


def is_same(found: Result, expected: Result) -> bool:
    """Whether losses, weights and scales have the same bits."""
    (losses, weights, scales), (losses2, weights2, scales2) = found, expected
    return (
        losses == losses2
        and all(map(torch.equal, weights, weights2))
        and scales.keys() == scales2.keys()
        and all(torch.equal(value, scales2[name]) for name, value in scales.items())
    )


def main(names: list[str]) -> int:
    """Run the named frameworks; return 1 if one has other bits."""
    torch.set_num_threads(1)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for key, value in {**alone, "MASTER_PORT": "29541"}.items():
        os.environ.setdefault(key, value)  # as torchrun does
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    expected = [plain(rank, ranks, each=each) for each in (False, True)]
    differs = False
    for name in names or FRAMEWORKS:
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        for what, found in FRAMEWORKS[name](rank, folder[0]):
            same = any(is_same(found, one) for one in expected)
            differs |= not same
            if rank == 0:
                print(f"{what}: {'the bits of a plain loop' if same else 'OTHER BITS'}", flush=True)
    dist.destroy_process_group()
    return int(differs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
