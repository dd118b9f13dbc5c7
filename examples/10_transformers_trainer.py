"""Train GPT-2 of transformers in FP8 with its own Trainer, on sequences that count up.

The Trainer accumulates four microbatches a step, validates and saves. Its callback encloses each
microbatch, so that delayed scales move once each; a checkpoint of the Trainer has them too. The
program needs accelerate (pip install accelerate) and no network.
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from megafp8 import fp8
from megafp8.fp8.trainer import Fp8Callback

VOCABULARY = 64


def sequences(count: int) -> list[dict[str, torch.Tensor]]:
    """Return sequences of 32 tokens that count up by 1, 2 or 3."""
    rows = [(n + (1 + n % 3) * torch.arange(32)) % VOCABULARY for n in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def train(folder: str) -> tuple[list[float], fp8.Fp8State]:
    """Return the validation losses of 40 steps, and the state of the converted model."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    state = fp8.convert(model, recipe="delayed", skip="lm_head")
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=8, gradient_accumulation_steps=4, max_steps=40,
        learning_rate=3e-3, eval_strategy="steps", eval_steps=10, save_steps=20, use_cpu=True,
        report_to="none", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    trainer = Trainer(
        model,
        arguments,
        train_dataset=sequences(320),
        eval_dataset=sequences(32),
        callbacks=[Fp8Callback(state)],
    )
    trainer.train()
    logged = trainer.state.log_history
    return [row["eval_loss"] for row in logged if "eval_loss" in row], state


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        losses, state = train(folder)
    print("validation losses:", *(f"{loss:.3f}" for loss in losses))
    scale = state.scales()["transformer.h.0.mlp.c_fc.input"]
    print(f"FP8 share of the FLOPs of all products: {state.share:.0%}")
    print(f"{scale.num_updates} microbatches moved the scale to {scale.quant_scale:g}")
