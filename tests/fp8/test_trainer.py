"""The Trainer of transformers trains converted models as a loop of our own does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megafp8 import fp8
from tests.fp8 import rank_work
from tests.fp8.models import gpt2, mixtral, tokens
from tests.ranks import run_ranks

pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")

ACCUMULATED = 4


class Recorded(nn.Module):
    """A GPT-2 with its loss, which records the batches that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt2: Any = gpt2()
        head = self.gpt2.lm_head  # the Trainer cannot save tied weights of a module like this one
        head.weight = nn.Parameter(head.weight.detach().clone())
        self.seen: list[torch.Tensor] = []
        self.fails_at = -1

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            if len(self.seen) == self.fails_at:
                raise RuntimeError("no more memory")
            self.seen.append(input_ids.clone())
        return {"loss": self.gpt2(input_ids, labels=input_ids).loss}


DATA = [{"input_ids": row} for step in range(12) for row in tokens(step)]


def converted(recipe: str = "delayed") -> tuple[Recorded, fp8.Fp8State]:
    model = Recorded()
    return model, fp8.convert(model, recipe=recipe, skip="gpt2.lm_head")


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)


def trainer(
    model: nn.Module, state: fp8.Fp8State, folder: Path, *, callback: Any = None, **changes: Any
) -> Any:
    """A Trainer of 5 optimizer steps; an epoch has 6 batches, so its last step has 2 of 4."""
    from transformers import Trainer, TrainingArguments

    from megafp8.fp8.trainer import Fp8Callback

    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": ACCUMULATED,
        "max_steps": 5,
        "max_grad_norm": 0.0,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
    }
    optimizer = optimizer_of(model)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return Trainer(
        model,
        TrainingArguments(output_dir=str(folder), **(arguments | changes)),
        train_dataset=DATA,
        eval_dataset=DATA[:4],
        optimizers=(optimizer, constant),
        callbacks=[callback or Fp8Callback(state)],
    )


def by_own_loop(batches: list[torch.Tensor], sizes: list[int]) -> tuple[Recorded, fp8.Fp8State]:
    """Train on these batches, `sizes` of which make each optimizer step."""
    model, state = converted()
    optimizer = optimizer_of(model)
    left = iter(batches)
    for size in sizes:
        for number in range(size):
            with state.microbatch(first=number == 0):
                (model(next(left))["loss"] / size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, state


def assert_same(one: tuple[Recorded, fp8.Fp8State], other: tuple[Recorded, fp8.Fp8State]) -> None:
    for mine, theirs in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)
    mine, theirs = one[1].state_dict(), other[1].state_dict()
    assert mine.keys() == theirs.keys() and mine
    for key, value in mine.items():
        assert torch.equal(value, theirs[key]), key


def test_accumulation_has_the_histories_of_our_own_loop_bit_for_bit(tmp_path: Path) -> None:
    model, state = converted()
    trainer(model, state, tmp_path).train()
    sizes = [4, 2, 4, 2, 4]  # the second step of each epoch has the rest of its 6 batches
    assert len(model.seen) == sum(sizes)
    updates = {scale.num_updates for scale in state.scales().values()}
    assert updates == {sum(sizes), len(sizes)}  # those of weights move once a step
    assert_same((model, state), by_own_loop(model.seen, sizes))
    mean = [sum(loss.item() for loss in losses) for losses in _losses(model)]
    assert mean[1] < mean[0]


def _losses(model: Recorded) -> list[list[torch.Tensor]]:
    """Return the losses of a new model and of the trained one, over the same batches."""
    with torch.no_grad():
        return [[m.eval()(batch)["loss"] for batch in model.seen[:2]] for m in (Recorded(), model)]


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_a_continued_run_takes_its_scales_over(recipe: str, tmp_path: Path) -> None:
    """Or the number of its steps, by which stochastic rounding draws."""
    from megafp8.fp8.trainer import Fp8Callback

    whole = converted(recipe)
    trainer(*whole, tmp_path / "whole").train()
    assert (tmp_path / "whole" / "checkpoint-2" / "fp8_scales_0.safetensors").is_file()
    again = converted(recipe)
    saved = tmp_path / "whole" / "checkpoint-2"
    named = Fp8Callback(again[1], resume_from=saved)
    trainer(*again, tmp_path / "again", callback=named).train(resume_from_checkpoint=str(saved))
    assert_same(whole, again)


def test_a_mixture_of_transformers_is_evaluated_and_continued_bit_for_bit(tmp_path: Path) -> None:
    """From a model that is loaded first: the Trainer itself loads no fused experts."""
    from transformers import MixtralForCausalLM

    from megafp8.fp8.trainer import Fp8Callback

    def trained(model: Any, folder: Path, saved: Path | None = None) -> tuple[Any, fp8.Fp8State]:
        state = fp8.convert(model, skip="lm_head")
        callback = Fp8Callback(state, resume_from=saved)
        ours = trainer(model, state, folder, callback=callback, max_steps=3)
        ours.train_dataset = [row | {"labels": row["input_ids"]} for row in DATA]
        ours.eval_dataset = ours.train_dataset[:4]
        ours.train(resume_from_checkpoint=saved and str(saved))
        assert any("eval_loss" in entry for entry in ours.state.log_history)
        return model, state

    whole = trained(mixtral(), tmp_path / "whole")
    saved = tmp_path / "whole" / "checkpoint-2"
    again = trained(MixtralForCausalLM.from_pretrained(saved), tmp_path / "again", saved)
    assert_same(whole, again)
    weights = {s.num_updates for n, s in whole[1].scales().items() if n.endswith(".weight")}
    assert weights == {3} and whole[1].share is not None and whole[1].share > 0.98


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_a_checkpoint_without_scales_is_refused(recipe: str, tmp_path: Path) -> None:
    whole = converted(recipe)
    trainer(*whole, tmp_path).train()
    saved = tmp_path / "checkpoint-4"
    (saved / "fp8_scales_0.safetensors").unlink()
    again = converted(recipe)
    with pytest.raises(fp8.Fp8Error, match="is missing, so training would continue with scales"):
        trainer(*again, tmp_path).train(resume_from_checkpoint=str(saved))


def test_training_goes_on_after_an_exception(tmp_path: Path) -> None:
    """A step that failed leaves the scales as they were; the next call trains."""
    model, state = converted()
    model.fails_at = 6
    ours = trainer(model, state, tmp_path)
    with pytest.raises(RuntimeError, match="no more memory"):
        ours.train()
    assert {scale.num_updates for scale in state.scales().values()} == {6, 2}
    model.fails_at = -1
    ours.train()
    assert {scale.num_updates for scale in state.scales().values()} == {6 + 16, 2 + 5}
    with state.evaluation(), torch.no_grad():
        model.eval()(DATA[0]["input_ids"][None])


def test_recipes_without_histories_train_too(tmp_path: Path) -> None:
    model, state = converted("tensorwise")
    trainer(model, state, tmp_path, max_steps=2).train()
    assert state.counter.share("fp8") > 0
    assert not list(tmp_path.rglob("fp8_scales*"))


def test_a_trainer_without_the_callback_is_told_of_it(tmp_path: Path) -> None:
    """Once; and a loop of one's own is not."""
    from transformers import TrainerCallback

    message = "the Trainer of transformers trains without Fp8Callback.* callbacks=.Fp8Callback"
    model, state = converted("tensorwise")
    with pytest.warns(UserWarning, match=message) as told:
        trainer(model, state, tmp_path, callback=TrainerCallback(), max_steps=2).train()
    assert len(told) == 1
    model, state = converted("delayed")
    with pytest.raises(fp8.Fp8Error, match=message):
        trainer(model, state, tmp_path, callback=TrainerCallback()).train()
    model, state = converted("tensorwise")
    model(DATA[0]["input_ids"][None])["loss"].backward()


def test_a_trainer_of_ones_own_is_told_and_one_of_others_is_not() -> None:
    """The Trainer of Lightning has the name of that of transformers, and other callbacks."""
    from transformers import Trainer

    def train(self: object) -> None:
        model, _ = converted("tensorwise")
        model(DATA[0]["input_ids"][None])["loss"].backward()

    own = type("OwnTrainer", (Trainer,), {"__init__": lambda self: None, "go": train})()
    with pytest.warns(UserWarning, match="trains without Fp8Callback"):
        own.go()
    type("Trainer", (), {"go": train})().go()


@pytest.mark.parametrize(
    ("wrapper", "name"),
    [
        ("ddp", "DistributedDataParallel"),
        pytest.param("fsdp2", "FSDPGPT2LMHeadModel", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_accumulate_validate_and_continue_bit_for_bit(
    wrapper: str, name: str, tmp_path: Path
) -> None:
    one, other = run_ranks(
        rank_work.train_by_trainer, 2, {"folder": str(tmp_path), "wrapper": wrapper}
    )
    steps, accumulated = rank_work.STEPS + 1, 2
    whole = one["whole"]
    assert whole["wrapper"] == name
    assert len(whole["losses"]) == steps and len(whole["validated"]) == steps // 2
    of_weights = {n: count for n, count in whole["updates"].items() if n.endswith(".weight")}
    assert set(of_weights.values()) == {steps}
    rest = whole["updates"].keys() - of_weights.keys()
    assert {whole["updates"][name] for name in rest} == {steps * accumulated}
    for rank in (one, other):
        for run in (rank["whole"], rank["continued"]):
            for mine, theirs in zip(run["parameters"], whole["parameters"], strict=True):
                assert torch.equal(mine, theirs)
            assert run["state"].keys() == whole["state"].keys()
            for key, value in run["state"].items():
                assert torch.equal(value, whole["state"][key]), key
    saved = {file.name for file in (tmp_path / "checkpoint-2").glob("fp8_scales_*")}
    assert saved == {"fp8_scales_0.safetensors", "fp8_scales_1.safetensors"}
