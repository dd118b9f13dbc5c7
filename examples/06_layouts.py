"""Train the same model in several parallel layouts, and show that the losses stay together.

The layouts combine tensor, context and pipeline parallelism and replicas. The runs compute in FP32,
so that FP8 operands are almost the only numbers that are rounded. `ranks=4` leaves out layouts
with more ranks; other settings on the command line apply to all runs.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from megafp8.observe.metrics import read_metrics

SCRIPT = Path(__file__).parents[1] / "pretrain_gpt.py"
TINY = """
    model.fp8=True trainer.precision=32 trainer.accelerator=cpu
    model.num_layers=4 model.hidden_size=64 model.ffn_hidden_size=256 model.num_attention_heads=4
    model.encoder_seq_length=64 model.micro_batch_size=4 model.global_batch_size=32
    model.data.splits_string="990,5,5"
    trainer.max_steps=5 trainer.log_every_n_steps=1 model.optim.sched.warmup_steps=2
    exp_manager.create_tensorboard_logger=False
""".split()
TENSOR = "model.tensor_model_parallel_size=2"
CONTEXT = "model.context_parallel_size=2"
PIPELINE = "model.pipeline_model_parallel_size=2"
ZERO_BUBBLE = "model.pipeline_schedule=ZBVZeroBubble model.virtual_pipeline_model_parallel_size=2"
LAYOUTS = {
    "alone": (1, ""),
    "cp2": (2, CONTEXT),
    "pp2": (2, PIPELINE),
    "pp2-zbv": (2, f"{PIPELINE} {ZERO_BUBBLE}"),
    "tp2-cp2": (4, f"{TENSOR} {CONTEXT}"),
    "tp2-pp2": (4, f"{TENSOR} {PIPELINE}"),
    "tp2-pp2-dp2": (8, f"{TENSOR} {PIPELINE}"),
}


def losses(num_ranks: int, settings: list[str]) -> dict[int, float]:
    """Run one job, and return its training loss by step; its files are deleted."""
    print(f"training on {num_ranks} rank(s): {' '.join(settings)} …", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(SCRIPT), *TINY, f"trainer.devices={num_ranks}", *settings]
        command.append(f"exp_manager.explicit_log_dir={folder}/run")
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = read_metrics(f"{folder}/run/metrics.jsonl")
    return {int(row["step"]): row["loss"] for row in rows if "loss" in row}


if __name__ == "__main__":
    limits = [int(word[6:]) for word in sys.argv[1:] if word.startswith("ranks=")]
    more = [word for word in sys.argv[1:] if not word.startswith("ranks=")]
    chosen = {name: layout for name, layout in LAYOUTS.items() if layout[0] <= min([*limits, 8])}
    found = {name: losses(size, [*keys.split(), *more]) for name, (size, keys) in chosen.items()}
    print("step", *(f"{name:>12}" for name in found))
    for step in found["alone"]:
        print(f"{step:4}", *(f"{by_step[step]:12.6f}" for by_step in found.values()))
