"""Train on one rank and on two tensor-parallel ranks, and show that the losses stay together.

The runs compute in FP32, so that FP8 operands are almost the only numbers that are rounded.
Settings on the command line, such as `model.fp8=False`, apply to both runs.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from megafp8.observe.metrics import read_metrics

SCRIPT = Path(__file__).parents[1] / "pretrain_gpt.py"
TINY = """
    model.fp8=True trainer.precision=32 trainer.accelerator=cpu
    model.num_layers=2 model.hidden_size=64 model.ffn_hidden_size=256 model.num_attention_heads=4
    model.encoder_seq_length=64 model.micro_batch_size=8 model.global_batch_size=16
    model.data.splits_string="990,5,5"
    trainer.max_steps=5 trainer.log_every_n_steps=1 model.optim.sched.warmup_steps=2
    exp_manager.create_tensorboard_logger=False
""".split()
LAYOUTS = {"1 rank": [], "2 ranks": ["trainer.devices=2", "model.tensor_model_parallel_size=2"]}


def losses(settings: list[str]) -> dict[int, float]:
    """Run one job, and return its training loss by step; its files are deleted."""
    print(f"training: {' '.join(settings) or 'one rank'} …", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(SCRIPT), *TINY, *settings]
        command.append(f"exp_manager.explicit_log_dir={folder}/run")
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = read_metrics(f"{folder}/run/metrics.jsonl")
    return {int(row["step"]): row["loss"] for row in rows if "loss" in row}


if __name__ == "__main__":
    by_layout = {name: losses([*layout, *sys.argv[1:]]) for name, layout in LAYOUTS.items()}
    print("step", *(f"{name:>9}" for name in by_layout))
    for step in by_layout["1 rank"]:
        print(f"{step:4}", *(f"{found[step]:9.5f}" for found in by_layout.values()))
