"""Time whole commands of a small job on a CPU beside nanoGPT's own: its example for a laptop.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/beside_nanogpt.py nanoGPT [--rounds 3] [--steps 1000]

Each round runs nanoGPT (4 layers x 128, 12 x 64 tokens, FP32, no dropout, not compiled), and ours
of the same sizes in FP32 and in FP8, one after the other with two threads. The text is that of this
project's documents: characters for nanoGPT, bytes for ours. Every 250 steps nanoGPT evaluates 20
batches of each of its two sets and saves if it has become better; ours evaluate 20 batches of one
set, and save at the end. nanoGPT's GELU is the exact one, so ours has it too, and once in FP32 the
form with tanh that is our default. The figures are seconds of a command and milliseconds of a step:
medians of the rounds, of which a step's is the median of the logged ones in the second half.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pickle
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from busy_cores import NANOGPT, ROOT, rows_of

JOBS = {
    "fp32": ("model.openai_gelu=False",),
    "fp32-tanh": ("model.openai_gelu=True",),
    "fp8": ("model.openai_gelu=False", "model.fp8=True"),
}
EVERY, BATCHES = 250, 20
THEIRS = (
    "config/train_shakespeare_char.py --device=cpu --compile=False --log_interval=10 "
    f"--eval_iters={BATCHES} --eval_interval={EVERY} --block_size=64 --batch_size=12 "
    "--n_layer=4 --n_head=4 --n_embd=128 --dropout=0.0"
).split()


def prepare(nanogpt: Path, folder: Path) -> None:
    """Write the same text as nanoGPT's data and as ours, in `folder`/corpus."""
    pages = (path.read_text() for path in sorted(ROOT.glob("docs/**/*.md")))
    text = "".join(c for c in "".join(pages) if c == "\n" or " " <= c <= "~")
    numbers = {c: number for number, c in enumerate(sorted(set(text)))}
    ids = np.array([numbers[c] for c in text], dtype=np.uint16)
    data, border = nanogpt / "data/shakespeare_char", len(ids) * 9 // 10
    ids[:border].tofile(data / "train.bin")
    ids[border:].tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(numbers)}))  # as it reads it
    documents = (text[at : at + 5000] for at in range(0, len(text), 5000))
    lines = (json.dumps({"text": document}) + "\n" for document in documents)
    (folder / "text.jsonl").write_text("".join(lines))
    output = ["--output", str(folder / "corpus"), "--tokenizer", "bytes"]
    command = [sys.executable, "-m", "megafp8", "preprocess", str(folder / "text.jsonl"), *output]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def timed(command: list[str], where: Path) -> tuple[float, str]:
    """Return a command's seconds by the clock, and what it wrote."""
    began = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        command, cwd=where, env=environment, check=True, capture_output=True, text=True
    )
    return time.perf_counter() - began, done.stdout


def run(name: str, nanogpt: Path, folder: Path, steps: int) -> tuple[float, float]:
    """Run a job once; return the seconds of the command and the milliseconds of a step."""
    if name == "nanoGPT":
        more = [f"--max_iters={steps}", f"--lr_decay_iters={steps}"]
        seconds, said = timed([sys.executable, "train.py", *THEIRS, *more], nanogpt)
        each = [float(ms) for ms in re.findall(r"iter \d+: loss [\d.]+, time ([\d.]+)ms", said)]
    else:
        log = folder / f"{name}-{time.time_ns()}"
        settings = [
            *NANOGPT,
            *JOBS[name],
            f"model.data.data_prefix={folder / 'corpus'}",
            f"trainer.max_steps={steps}",
            f"trainer.val_check_interval={EVERY}",
            f"trainer.limit_val_batches={BATCHES}",
            "trainer.log_every_n_steps=10",
            f"exp_manager.explicit_log_dir={log}",
        ]
        seconds, _ = timed([sys.executable, str(ROOT / "pretrain_gpt.py"), *settings], ROOT)
        each = [1e3 * row["step_seconds"] for row in rows_of(log)]
    return seconds, statistics.median(each[len(each) // 2 :])


def main() -> None:
    """Run all jobs in every round, print medians, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("nanogpt", type=Path, help="a checkout of nanoGPT; its data is overwritten")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ("nanoGPT", *JOBS)}
    with tempfile.TemporaryDirectory() as folder:
        prepare(args.nanogpt, Path(folder))
        for _ in range(args.rounds):
            for name, runs in found.items():
                runs.append(run(name, args.nanogpt, Path(folder), args.steps))
                print(f"{name}: {runs[-1][0]:.1f} s, {runs[-1][1]:.1f} ms a step", flush=True)
    medians = {
        name: [round(statistics.median(values), 1) for values in zip(*runs, strict=True)]
        for name, runs in found.items()
    }
    result = {
        "command": f"python benchmarks/beside_nanogpt.py nanoGPT --rounds {args.rounds} "
        f"--steps {args.steps}",
        "cpu": runpy.run_path(str(Path(__file__).with_name("cpu_step.py")))["cpu_name"](),
        "torch": version("torch"),
        "threads": 2,
        "load": os.getloadavg()[0],  # of the last minute, with this run
        "seconds of the command, milliseconds of a step": medians,
        "runs": found,
    }
    path = args.results / f"{datetime.date.today()}_beside-nanogpt.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{json.dumps(medians, indent=1)}\nwritten: {path}")


if __name__ == "__main__":
    main()
