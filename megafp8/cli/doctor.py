"""Show what this machine has for training, and what each missing part would give.

megafp8 doctor [--self-test]
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megafp8 import __version__
from megafp8.cli.commands import run_old_name
from megafp8.cli.job import command_parser, reports_errors
from megafp8.cli.tried import TRIED, untried
from megafp8.config.layers import conf_dir
from megafp8.config.overrides import quoted
from megafp8.errors import ExitCode, UserError
from megafp8.observe.units import format_bytes, format_duration, in_columns
from megafp8.parallel.launch import job_environment, training_program
from megafp8.secrets import say
from megafp8.specs.gpus import ways
from megafp8.specs.recipes import RECIPES, find_recipe

DISK_BYTES = 64 << 20  # that are written to measure the speed of the disk
PACKAGES = (
    ("transformer-engine", "model.fp8_backend=te on GPUs: NVIDIA's own kernels"),
    (
        "te_cpu",
        "Transformer Engine's own Python on a CPU, and model.fp8_backend=te",
    ),
    ("torchao", "model.fp8_backend=torchao: torchao's FP8 linears"),
    ("triton", "casts and scales of FP8 in GPU kernels of our own"),
    (
        "apex",
        "Apex's kernel for model.optim.name=fused_adam and distributed_fused_adam on GPUs (built "
        "from NVIDIA's sources)",
    ),
    ("tensorboard", "curves in TensorBoard"),
    ("wandb", "curves in Weights & Biases"),
    ("transformers", "named tokenizers, and a check of exported models"),
    ("sentencepiece", "SentencePiece tokenizers"),
    ("tiktoken", "tiktoken tokenizers"),
    ("datasets", "datasets of the Hugging Face Hub in preprocess"),
    ("pyarrow", "Parquet files in preprocess"),
)
SELF_TEST = [
    "trainer.accelerator=cpu", "trainer.log_every_n_steps=2",
    "trainer.limit_val_batches=1", "model.fp8=True", "model.num_layers=2", "model.hidden_size=64",
    "model.ffn_hidden_size=128", "model.encoder_seq_length=32", "model.micro_batch_size=2",
    "model.global_batch_size=4", "model.tokenizer.vocab_size=300",
    "exp_manager.create_tensorboard_logger=False",
]  # fmt: skip

SELF_TEST_SECONDS = 300  # the longest that one of its two runs may take


@dataclass(frozen=True)
class MachinePart:
    """Hold what was found out about one part of the machine; `gives` is empty if it is there."""

    part: str
    text: str
    is_there: bool = True
    gives: str = ""


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Print what was found; return 0, or 1 if the self-test failed."""
    parser = command_parser("doctor", __doc__)
    parser.add_argument(
        "--self-test", action="store_true", help="train a tiny model in FP8, and continue it"
    )
    parser.add_argument("--disk", type=Path, default=Path(), help="the folder to measure (.)")
    options = parser.parse_args(argv)
    findings = examine_machine(options.disk)
    rows = [
        (f"{' ' if f.is_there else '-'} {f.part}",
         f"{f.text}; it would give: {f.gives}" if f.gives else f.text)
        for f in findings
    ]  # fmt: skip
    say(*in_columns(rows), f"\n{what_it_can_do()}")
    if not options.self_test:
        print("A short training run: megafp8 doctor --self-test")
        return int(ExitCode.FINISHED)
    problem = self_test()
    print(problem or "self-test: trained 4 steps in FP8, continued to 6 and wrote a report: good")
    return int(ExitCode.CRASHED if problem else ExitCode.FINISHED)


def examine_machine(disk: Path) -> Iterator[MachinePart]:
    """Yield what this machine has, part by part; no part that fails ends the others."""
    parts: tuple[tuple[str, Callable[[], MachinePart]], ...] = (
        ("megafp8", lambda: MachinePart("megafp8", _own_version())),
        ("torch", _torch),
        ("GPU", _gpu),
        ("NCCL", _nccl),
        ("CPU", _cpu),
        ("C compiler", _compiler),
        ("memory", _memory),
        ("disk", lambda: _disk(disk)),
    )
    for name, look in parts:
        try:
            yield look()
        except Exception as error:  # a broken driver or package is a finding, not a crash
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            yield MachinePart(name, f"cannot be examined ({reason})", is_there=False)
    for package, gives in PACKAGES:
        yield _package(package, gives)
    for name, installed, tried in untried():
        text = f"no suite has passed with {name} {installed}; it has with {tried}"
        yield MachinePart("versions", text, is_there=False)


def what_it_can_do() -> str:
    """Return a sentence: how this machine computes the products of which recipes."""
    import torch

    if not torch.cuda.is_available():
        return (
            "This machine trains in FP8 and FP4 on its CPU: every recipe, with the numbers of a "
            "GPU and without its speed."
        )
    capability = torch.cuda.get_device_capability()
    fast = [name for name in RECIPES if ways(find_recipe(name).traits, capability)]
    emulated = [name for name in RECIPES if name not in fast]
    return (
        f"This machine trains on tensor cores with {', '.join(fast) or 'no recipe'}; "
        f"{', '.join(emulated) or 'no recipe'} would be emulated. No test of ours has run on a GPU."
    )


def _own_version() -> str:
    where = Path(__file__).parents[1]
    try:
        conf_dir()
    except UserError:
        hint = "pip install -e ./fp8_numerics -e ./fp8_coverage -e ."
        return f"{__version__} in {where}, without conf/: install it with {hint}"
    return f"{__version__} in {where}, Python {platform.python_version()}"


def _torch() -> MachinePart:
    import torch

    tried = f"the tests pass with {TRIED['torch']}"
    return MachinePart("torch", f"{torch.__version__}, {torch.get_num_threads()} threads; {tried}")


def _gpu() -> MachinePart:
    import torch

    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        major, minor = device.major, device.minor
        fp8 = "FP8 tensor cores" if (major, minor) >= (8, 9) else "no FP8 tensor cores"
        text = f"{torch.cuda.device_count()} x {device.name}, {format_bytes(device.total_memory)}"
        return MachinePart("GPU", f"{text}, compute capability {major}.{minor}, {fp8}; {_driver()}")
    text = "PyTorch finds none"
    if shutil.which("nvidia-smi"):
        build = "a CPU build" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
        text += f", although nvidia-smi is here ({_driver()}); torch is {build}"
    gives = "FP8 products on tensor cores; here they are emulated, with the same numbers"
    return MachinePart("GPU", text, is_there=False, gives=gives)


def _driver() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "driver unknown"
    done = subprocess.run(
        [program, "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=20,
    )
    lines = done.stdout.split()
    return f"driver {lines[0]}" if lines else "the driver does not answer"


def _nccl() -> MachinePart:
    import torch

    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        return MachinePart("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    return MachinePart(
        "NCCL", "not usable", is_there=False, gives="several GPUs (CPU ranks use gloo)"
    )


def _cpu() -> MachinePart:
    from fp8_numerics import cpu

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    flags = cpu.read_flags() or frozenset()
    levels = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    text = f"{cores} cores, {', '.join(levels) or platform.machine()}"
    if cpu.FAST_AT_BF16:
        return MachinePart("CPU", f"{text}: fast BF16 products")
    hint = "fast products of BF16 values; here they run in FP32 and are rounded once"
    return MachinePart("CPU", f"{text}; {cpu.why_slow_at_bf16()}", is_there=False, gives=hint)


def _compiler() -> MachinePart:
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return MachinePart("C compiler", str(shutil.which(name)))
    gives = "fast FP8 casts on CPUs; without it torch makes the same casts more slowly"
    return MachinePart("C compiler", "none", is_there=False, gives=gives)


def _memory() -> MachinePart:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return MachinePart("memory", format_bytes(total))


def _disk(folder: Path) -> MachinePart:
    """Measure how fast a checkpoint could be written there: bytes that reach the disk."""
    free = shutil.disk_usage(folder).free
    block = os.urandom(1 << 20)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(DISK_BYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.perf_counter() - began
    rate = format_bytes(DISK_BYTES / seconds)
    return MachinePart("disk", f"{format_bytes(free)} free in {folder.absolute()}, writes {rate}/s")


def _package(name: str, gives: str) -> MachinePart:
    if name == "apex" and not _is_nvidias_apex():
        return MachinePart(name, "not installed", is_there=False, gives=gives)
    try:
        return MachinePart(name, version(name))
    except PackageNotFoundError:
        pass
    if importlib.util.find_spec(name.replace("-", "_")) is not None:
        return MachinePart(name, "installed")
    return MachinePart(name, "not installed", is_there=False, gives=gives)


def _is_nvidias_apex() -> bool:
    """Whether the package `apex` has Adam's kernel; on PyPI the name is another project's."""
    from megafp8.optim.kernels import apex_adam

    return apex_adam() is not None


def self_test() -> str | None:
    """Train a tiny model in FP8 for four steps on the CPU, and continue it to six.

    Return what went wrong, or None.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        for steps in (4, 6):
            argv = [
                *SELF_TEST,
                f"trainer.max_steps={steps}",
                f"exp_manager.explicit_log_dir={quoted(str(run))}",
            ]
            try:
                done = subprocess.run(
                    [sys.executable, *training_program(), *argv],
                    capture_output=True,
                    text=True,
                    timeout=SELF_TEST_SECONDS,
                    env=job_environment(),
                )
            except subprocess.TimeoutExpired:
                return f"self-test: {steps} steps were not done after {SELF_TEST_SECONDS} s"
            if done.returncode != 0:
                last = (done.stderr or done.stdout).strip().splitlines()[-5:]
                return "\n".join(
                    [f"self-test: exit code {done.returncode} at {steps} steps", *last]
                )
        if not (run / "report.html").is_file():
            return "self-test: the run left no report"
    print(f"self-test on the CPU took {format_duration(time.monotonic() - began)}")
    return None


if __name__ == "__main__":
    run_old_name("doctor")
