#!/usr/bin/env python3
"""Check on a GPU machine what megafp8 claims about GPUs, in stages of some minutes each.

    first   the default, 7.5 minutes at most: what a new machine tells soonest, most telling part
            first: device, products, a layer of each recipe, kernels, tests, the README's command,
            steps in BF16 and FP8, where the time goes, the same run twice, steps in others
    again   2.5 minutes at most: the parts of `first` that failed or did not end (`--after FILE`,
            the results.jsonl of that command), or those that `--only` names
    runs    do operations work: versions, products in each layout, casts, attention, one layer
    right   are they right: the tests marked `gpu`, and memory checks of the casts
    fast    are they fast: products, layers and steps in BF16 and FP8
    trains  does training work: losses, a killed run that is continued, bit-for-bit repeats
    ranks   on several GPUs: ten layouts of 2, 4 and 8 ranks compared with one rank
    own     a job of your own: `--config FILE.yaml`, for 20 steps
    te      Transformer Engine compared with our own engine, where it is installed
    all     runs, right, fast and trains, one after another, and te where it can be imported

    python scripts/gpu_check.py wheels .wheels        # once, on a machine with a network
    python scripts/gpu_check.py --out DIR             # then on the GPU machine: the stage `first`
    python scripts/gpu_check.py ranks --out DIR       # or each other stage
    python scripts/gpu_check.py --out DIR --tiny      # on a CPU: check that this program runs

Fifteen minutes on a GPU, two minutes for each start of the machine included, are two commands.
Between them the machine is not needed: read the table, and mend on a CPU what failed.

    1  first                                        7.5 minutes
    2  again --after OLD/results.jsonl --out NEW    2.5 minutes

Each other stage has ten minutes at most, and `--seconds` gives a command less. A single GPU of
80 GB is enough: what needs more is skipped, with both numbers of bytes.

A stage has parts, each with a deadline, and the failure of one part does not stop the others. What
a part leaves of its time goes to those after it. Each row and the end of each part are written to
DIR/results.jsonl at once, and then DIR/table.txt, which a command prints when it ends; the output
of a part is in DIR/logs. `--archive FILE` also keeps all of DIR in one file, after each part. The
exit code is 1 if a part failed. This file needs no package: dependencies of megafp8 that the
machine's PyTorch image lacks come as wheels (`--wheels`, by default the project's folder .wheels).
Where the tree has no repository, `--commit` says of which commit it is.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ("hydra-core==1.3.2", "omegaconf>=2.3,<2.4", "antlr4-python3-runtime==4.9.3", "torchao")
"""omegaconf 2.4 warns where hydra calls it, and warnings are errors in the tests."""
IMPORTED_AS = {"hydra-core": "hydra", "pyyaml": "yaml"}
BROUGHT = ("hydra", "omegaconf", "antlr4")
"""What the wheels bring of the packages that every part needs."""
ALL_STAGES = ("runs", "right", "fast", "trains")
STAGES = ("first", "again", *ALL_STAGES, "ranks", "own", "te")
LAYOUTS = (
    "dp 2, ZeRO-1",
    "dp 2, FSDP",
    "tp 2, sp",
    "cp 2",
    "pp 2, zero bubble V",
    "dp 4, O2",
    "tp 2 x dp 2, sp",
    "cp 2 x dp 2, FSDP",
    "tp 2 x pp 2 x dp 2, sp, ZeRO-1",
    "tp 2 x cp 2 x dp 2, sp",
)
"""The parts of `ranks`, which benchmarks/gpu_ranks.py describes."""
FIRST_STEPS = ("bf16", "fp8")
MORE_STEPS = ("fp8 graphs", "fp8 O2", "te fp8", "fp8 mxfp8", "fp4 nvfp4")
COMMIT = "MEGAFP8_COMMIT"  # benchmarks/gpu_common.py reads it
COUNTS = ("passed", "failures", "errors", "skipped")  # of a part that runs tests
MOST_NAMES = 40  # of failed tests in a table
STAGE_SECONDS = 570.0  # a command on the machine may last ten minutes
LIMITS = {"first": 450.0, "again": 150.0}  # of stages that share fifteen minutes with two starts
PATIENCE_SECONDS = 20.0  # after SIGINT, for a part to print its results
GPU_TESTS = (
    "tests/gpu", "tests/fp8/kernels", "tests/fp8_numerics/kernels",
    "tests/models/test_documents.py", "tests/ops/test_attention.py",
    "tests/observe/test_memory.py", "tests/train/test_profiling.py", "tests/data/test_loader.py",
    "tests/optim/test_scaled_adam.py", "tests/models/test_windows.py",
)  # fmt: skip
FIRST_TESTS = ("tests/gpu", "tests/optim/test_scaled_adam.py")
UNCOMPILED = ("-k", "not block-")  # layers by `torch.compile` take most of the time of these tests
FAST_LAYERS = (
    "bf16", "fp8 delayed", "te bf16", "te fp8 delayed", "fp8 tensorwise", "fp8 rowwise",
    "fp8 blockwise", "fp8 params", "bf16 compiled", "fp8 delayed compiled",
    "torchao fp8 tensorwise",
)  # fmt: skip
TE_VARIANTS = ("bf16", "fp8 delayed", "te bf16", "te fp8 delayed")


@dataclass(frozen=True)
class Part:
    """Describe one command of a stage, with its time limit in seconds."""

    name: str
    seconds: float
    command: tuple[str, ...]
    junit: Path | None = None  # pytest writes it; at least one test must have run


def benchmark(name: str, *arguments: str) -> tuple[str, ...]:
    """Return the command of a benchmark."""
    return (sys.executable, f"benchmarks/{name}.py", *arguments)


def parts_of(stage: str, args: argparse.Namespace) -> list[Part]:
    """Return the parts of a stage; parts that others depend on come first."""
    results = results_of(args)
    if stage in ("first", "again"):
        return first_parts(args)
    if stage == "ranks":
        names = ("reference", *LAYOUTS)
        return [Part(name, 51, benchmark("gpu_ranks", name, *results)) for name in names]
    if stage == "own":
        own = ("own", "--config", str(args.config), "--steps", "20")
        return [Part("your job", 560, benchmark("gpu_trains", *own, *results))]
    if stage == "runs":
        names = {"device": 60, "products": 60, "casts": 120, "sdpa": 60, "layers": 150}
        return [
            Part(name, seconds, benchmark("gpu_runs", name, *results))
            for name, seconds in names.items()
        ]
    if stage == "right":
        return right_parts(args)
    if stage == "fast":
        variants = FAST_LAYERS[:2] if args.tiny else FAST_LAYERS  # no compiled variant
        layers = [
            Part(
                f"layer {2048 * batch} tokens",
                100,
                benchmark("gpu_layer", "--batch", str(batch), "--runs", "20", "--variants",
                          *variants, *results),
            )
            for batch in ((4,) if args.tiny else (8, 4))
        ]  # fmt: skip
        steps = [
            Part(
                f"steps of {preset}",
                seconds,
                benchmark("gpu_step", "--presets", preset, "--steps", "20", *results),
            )
            for preset, seconds in {"1.3b": 90, "5b-half": 110, "5b": 120}.items()
        ]
        gemm = Part("products", 40, benchmark("gpu_gemm", *results))
        return [gemm, layers[0], *steps[: 1 if args.tiny else 3], *layers[1:]]
    if stage == "trains":
        names = {"losses": 300, "continues": 120, "repeats": 120}
        return [
            Part(name, seconds, benchmark("gpu_trains", name, *results))
            for name, seconds in names.items()
        ]
    trace = ("--engine", "te", "--steps", "2" if args.tiny else "200")
    steps = ("--variants", "bf16", "fp8", "te bf16", "te fp8", "--steps", "30")
    return [
        tests_part("tests", 180, ("tests/gpu/test_te_gpu.py",), args),
        Part("layer", 120, benchmark("gpu_layer", "--variants", *TE_VARIANTS, *results)),
        Part("steps", 200, benchmark("gpu_step", *steps, *results)),
        Part("trace", 60, benchmark("gpu_trace", *trace, "--out", str(args.out / "trace"))),
    ]


def results_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the arguments that all benchmarks take."""
    return (*(("--tiny",) if args.tiny else ()), "--results", str(args.out))


def first_parts(args: argparse.Namespace) -> list[Part]:
    """Return the parts of the stage `first`, the most telling ones first.

    The first three say whether anything runs, tests whether it is right, the command whether a user
    can train, and the others where the time goes.
    """
    results = results_of(args)
    tests = GPU_TESTS[4:5] if args.tiny else FIRST_TESTS
    kernels = GPU_TESTS[5:6] if args.tiny else GPU_TESTS[1:2]
    runs = {"device": 25, "products": 35, "layers": 65}
    return [
        *(Part(name, limit, benchmark("gpu_runs", name, *results)) for name, limit in runs.items()),
        tests_part("kernels", 65, kernels, args),
        tests_part("tests", 65, tests, args, chosen=UNCOMPILED),
        Part("command", 45, benchmark("gpu_trains", "command", *results)),
        steps_part("steps", 70, FIRST_STEPS, results),
        Part("profile", 30, benchmark("gpu_profile", *results)),
        Part("repeats", 30, benchmark("gpu_trains", "repeats", "--steps", "20", *results)),
        steps_part("more steps", 20, MORE_STEPS[:2] if args.tiny else MORE_STEPS, results),
    ]


def steps_part(
    name: str, seconds: float, variants: tuple[str, ...], results: tuple[str, ...]
) -> Part:
    """Return a part that measures a few steps of 1.3B in each of the `variants`."""
    steps = ("--variants", *variants, "--warm-up", "10", "--steps", "10", "--seconds", "35")
    steps += ("--accumulation", "2")  # the second microbatch adds to the gradients of the first
    return Part(name, seconds, benchmark("gpu_step", *steps, *results))


def right_parts(args: argparse.Namespace) -> list[Part]:
    """Return the parts of the stage `right`; memory checks need NVIDIA's compute-sanitizer."""
    tests = GPU_TESTS[4:5] if args.tiny else GPU_TESTS
    parts = [tests_part("tests", 420, tests, args)]
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is not None:
        casts = benchmark("gpu_runs", "casts", "--tiny", "--results", str(args.out / "sanitizer"))
        # Calls of CUDA that fail harmlessly, in PyTorch and Triton, are no memory errors.
        command = (sanitizer, "--error-exitcode", "1", "--report-api-errors", "no", *casts)
        parts.append(Part("memory checks of casts", 100, command))
    return parts


def tests_part(
    name: str,
    seconds: float,
    paths: tuple[str, ...],
    args: argparse.Namespace,
    *,
    chosen: tuple[str, ...] = (),
) -> Part:
    """Return a part that runs the tests marked `gpu` in `paths`, or those `chosen` of them."""
    junit = args.out / f"{name}-{Path(paths[0]).stem}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=short"]
    if not args.tiny:  # a trial without a GPU skips the tests that need one; asked for, they fail
        command += ["-m", "gpu"]
    command += ["--junitxml", str(junit), "-p", "no:cacheprovider"]
    if args.workers and importlib.util.find_spec("xdist"):
        command += ["-n", str(args.workers)]
    return Part(name, seconds, (*command, *chosen, *paths), junit)


class Check:
    """Run parts, and record their outcomes."""

    def __init__(
        self, out: Path, environment: dict[str, str], is_tiny: bool, archive: Path | None = None
    ) -> None:
        self.out, self.environment, self.is_tiny = out, environment, is_tiny
        self.archive = archive
        self.failed: list[str] = []

    def note(self, **line: object) -> None:
        """Append a line to results.jsonl."""
        with (self.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def stage(self, stage: str, parts: list[Part], deadline: float) -> None:
        """Run the parts of a stage one after another, until `deadline` on the monotonic clock.

        A part also gets the time that those before it have left of theirs.
        """
        end = time.monotonic()
        for part in parts:
            own = part.seconds * (10 if self.is_tiny else 1)
            end += own
            left = deadline - time.monotonic()
            if left < 5:
                self.end(stage, part, "not started: no time was left", 0.0)
                continue
            self.run(stage, part, min(max(own, end - time.monotonic()), left))

    def run(self, stage: str, part: Part, seconds: float) -> None:
        """Run one part for `seconds` at most, and record its outcome."""
        began = time.monotonic()
        log = self.out / "logs" / f"{stage}-{part.name.replace(' ', '-')}.txt"
        print(f"== {stage}: {part.name} (at most {seconds:.0f} s)", flush=True)
        with log.open("w") as file:
            code, is_late = call(part.command, self.environment, seconds, file.fileno())
        outcome = "passed" if code == 0 else f"failed: exit code {code}"
        if is_late:
            outcome = f"failed: stopped after {seconds:.0f} s"
        counts: dict[str, Any] = {} if part.junit is None else counts_of(part.junit)
        if part.junit is not None and outcome == "passed":
            if not counts.get("passed") and not self.is_tiny:
                outcome = "failed: no test ran"
        if part.junit is not None and (names := failed_tests(part.junit)):
            counts["failed_tests"] = names
        self.end(stage, part, outcome, time.monotonic() - began, **counts)
        if outcome != "passed":
            print(log.read_text(errors="replace")[-2000:], flush=True)

    def end(self, stage: str, part: Part, outcome: str, seconds: float, **counts: Any) -> None:
        """Record and print the outcome of a part."""
        if outcome != "passed":
            self.failed.append(f"{stage}: {part.name}")
        self.note(stage=stage, part=part.name, outcome=outcome, seconds=round(seconds, 1), **counts)
        (self.out / "table.txt").write_text(table(self.out / "results.jsonl"))
        if self.archive is not None:
            with tarfile.open(self.archive, "w:gz") as archive:
                archive.add(self.out, self.out.name)
        details = "".join(f", {counts[what]} {what}" for what in COUNTS if what in counts)
        print(f"== {stage}: {part.name}: {outcome}, {seconds:.0f} s{details}", flush=True)


def table(lines: Path) -> str:
    """Return what is known of parts and their rows as text; `lines` is results.jsonl.

    Rows come before the end of their part. Of rows that only say that something is right, the
    number is given.
    """
    text: list[str] = []
    rows: list[str] = []
    right = 0
    for line in map(json.loads, lines.read_text().splitlines()):
        if "began" in line:  # an earlier command wrote into the same folder
            text, rows, right = [], [], 0
        elif "part" in line:
            name = f"{line['stage']}: {line['part']}"
            counts = "".join(f", {line[what]} {what}" for what in COUNTS if line.get(what))
            text.append(f"{name:<44} {line['seconds']:6.0f} s  {line['outcome']}{counts}")
            text += [f"    {test}" for test in line.get("failed_tests", ())]
            text += [*rows, *([f"    {right} more rows are right"] if right else [])]
            rows, right = [], 0
        elif "key" in line:
            what = next(what for what in ("row", "failed", "skipped") if what in line)
            said = figures_of(line["row"]) if what == "row" else f"{what}: {line[what][:300]}"
            right += not said
            rows += [f"    {line['key']:<40} {said}"] * bool(said)
    return "\n".join(text) + "\n"


def figures_of(row: dict[str, object]) -> str:
    """Return the figures of a row that a table shows, or nothing."""
    forms = {
        "tokens_per_second": "{:.0f} tokens/s",
        "times_bf16": "{:.2f} x bf16",
        "step_seconds": "{:.4f} s a step",
        "flops_per_second": "{:.3g} FLOP/s",
        "bytes_per_second": "{:.3g} bytes/s",
        "relative_difference_to_bf16": "{:.1%} from bf16",
        "idle_share": "idle {:.1%}",
        "memory_over_plan": "{:.3f} x planned memory",
        "losses_apart": "losses {:.1e} apart",
        "bound": "of {:.1e} allowed",
    }
    given = {key: form for key, form in forms.items() if isinstance(row.get(key), float)}
    found = [form.format(row[key]) for key, form in given.items()]
    card = row.get("card")
    if found and isinstance(card, dict):
        found.append(f"{card['watts']:.0f} W at {card['sm_mhz']:.0f} MHz")
    return ", ".join(found)


def call(
    command: tuple[str, ...], environment: dict[str, str], seconds: float, output: int
) -> tuple[int, bool]:
    """Run a command; return its exit code, and whether it was stopped after `seconds`.

    It is stopped by SIGINT, after which pytest still reports, and then by SIGKILL.
    """
    # A shell lets its background jobs ignore SIGINT, and a process that is started inherits that.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    signal.signal(signal.SIGINT, inherited)
    try:
        return process.wait(seconds), False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            return process.wait(PATIENCE_SECONDS), True
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL, True
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # also the processes that it has started
        except ProcessLookupError:
            pass
        process.wait()


def failed_tests(junit: Path) -> list[str]:
    """Return the first tests that failed, each with the end of its error's first line."""
    if not junit.exists():
        return []
    found = []
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        for error in (*case.iter("failure"), *case.iter("error")):
            reason = (error.get("message") or "").strip().partition("\n")[0]
            found.append(f"{case.get('classname')}::{case.get('name')}: {reason[:160]}")
    return found[:MOST_NAMES]


def counts_of(junit: Path) -> dict[str, int]:
    """Return how many tests passed, failed and so on by pytest's file, or {} without a file."""
    if not junit.exists():
        return {}
    suites = list(ElementTree.parse(junit).getroot().iter("testsuite"))
    found = {
        key: sum(int(suite.get(key, "0")) for suite in suites)
        for key in ("tests", "failures", "errors", "skipped")
    }
    return {"passed": found.pop("tests") - sum(found.values()), **found}


def unpacked(wheels: Path, folder: Path) -> list[str]:
    """Unpack all wheels, which are archives of packages, to `folder`; return their names."""
    found = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
    for wheel in found:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return [wheel.name for wheel in found]


def environment_with(site: Path) -> dict[str, str]:
    """Return the environment of the parts, which finds this tree first, and unpacked wheels."""
    path = [str(ROOT), str(site), os.environ.get("PYTHONPATH", "")]
    mine = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONUNBUFFERED": "1"}
    mine |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1"}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ, **mine}


def needed() -> list[str]:
    """Return the modules that a run needs, by the dependencies in pyproject.toml.

    The distributions of this repository are left out: their folders are in it.
    """
    files = [ROOT / "pyproject.toml", *ROOT.glob("*/pyproject.toml")]
    projects = [tomllib.loads(file.read_text())["project"] for file in files]
    ours = {project["name"] for project in projects}
    names = [re.split(r"[^\w-]", text, maxsplit=1)[0] for text in projects[0]["dependencies"]]
    return [*(IMPORTED_AS.get(name, name) for name in names if name not in ours), "antlr4"]


def missing(environment: dict[str, str]) -> list[str]:
    """Return the names of necessary packages that a part would not find."""
    program = (
        "import importlib.util as u, sys\n"
        "def has(name):\n"
        "    try: return u.find_spec(name) is not None\n"
        "    except ImportError: return False\n"
        "print(*[name for name in sys.argv[1:] if not has(name)])"
    )
    command = [sys.executable, "-c", program, *needed()]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.split()


def how_to_get(lacking: list[str], wheels: Path) -> str:
    """Return what to do about missing modules."""
    text = f"missing: {', '.join(lacking)}."
    if brought := [name for name in lacking if name in BROUGHT]:
        text += (
            f" On a machine with a network, run `python scripts/gpu_check.py wheels {wheels.name}`"
        )
        text += f", which downloads {', '.join(brought)}; then give that folder as --wheels."
    if others := [name for name in lacking if name not in BROUGHT]:
        text += f" Install {', '.join(others)} with pip."
    return text


def header(environment: dict[str, str]) -> dict[str, Any]:
    """Return what benchmarks/gpu_header.py says of this machine, or only the reason why not."""
    command = benchmark("gpu_header")
    try:
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": "nothing was said of the device within a minute"}
    except (IndexError, ValueError):
        return {"error": done.stderr.strip()[-500:]}
    return found


def header_text(found: dict[str, Any]) -> str:
    """Return the header as text: devices, versions, what is emulated, and what is not there."""
    if "error" in found:
        return f"the device cannot be asked: {found['error']}"
    lines = [f"{max(1, found['gpus'])} x {found['device']}, driver {found['driver']}"]
    lines[0] += f", PyTorch {found['torch']}, CUDA {found['cuda']}, Python {found['python']}"
    if card := found.get("card"):
        lines.append("; ".join(f"{field} {value}" for field, value in card.items()))
    by_reason: dict[str, list[str]] = {}
    for recipe, why in found["emulated"].items():
        by_reason.setdefault(why, []).append(recipe)
    for why, recipes in by_reason.items():
        lines.append(f"emulated here, at the speed of other products: {', '.join(recipes)} ({why})")
    if why := found["no_transformer_engine"]:
        lines.append(f"no Transformer Engine: {why}")
    if found["gpus"] > 1:
        lines.append("the stage `ranks` compares layouts of these GPUs with one of them")
    return "\n".join(lines)


def fetch_wheels(folder: Path) -> int:
    """Fetch or build the wheels, without their dependencies: a few MB."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(folder), *WHEELS]
    return subprocess.run(command).returncode


def arguments(argv: list[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = (*STAGES, "all")
    parser.add_argument(
        "stages", nargs="*", metavar="STAGE", help=f"one or more of {', '.join(known)}"
    )
    parser.add_argument("--stage", nargs="+", default=[], choices=known)
    parser.add_argument("--config", type=Path, help="the YAML file of the stage `own`")
    parser.add_argument("--out", type=Path, required=True, help="a folder for all results")
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts to run, and no other")
    parser.add_argument("--after", type=Path, help="results.jsonl of `first`, for `again`")
    parser.add_argument("--archive", type=Path, help="a .tar.gz file that keeps all of --out")
    parser.add_argument("--commit", help="the commit of a tree without a repository, for results")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".wheels")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, help="time limit of the whole command")
    parser.add_argument(
        "--tiny", action="store_true", help="check on any device that this program runs"
    )
    args = parser.parse_args(argv)
    args.stages = [*args.stages, *args.stage] or ["first"]
    if unknown := set(args.stages) - {*known}:
        parser.error(f"unknown stage {', '.join(sorted(unknown))}: use {', '.join(known)}")
    if (args.config is None) == ("own" in args.stages):
        parser.error("--config names the file of the stage `own`, which needs it")
    if "again" in args.stages and (args.only is None) == (args.after is None):
        parser.error("`again` needs --after, the results.jsonl of `first`, or --only and its parts")
    args.out = args.out.absolute()
    if args.after is not None:
        try:
            args.only = mended(args.after, [part.name for part in first_parts(args)])
        except (OSError, ValueError) as error:
            parser.error(f"--after {args.after}: {error}; give the results.jsonl of `first`")
        if not args.only:
            parser.error(f"all parts passed in {args.after}")
    asked = [stage for name in args.stages for stage in (ALL_STAGES if name == "all" else [name])]
    known_parts = [part.name for stage in asked for part in parts_of(stage, args)]
    if unknown := sorted(set(args.only or ()) - {*known_parts}):
        parser.error(f"no part is called {', '.join(unknown)}: use {', '.join(known_parts)}")
    return args


def mended(results: Path, parts: list[str]) -> list[str]:
    """Return which `parts` of an earlier command did not pass, by its results.

    A part without an outcome did not pass: the machine may have gone before its end.

    Raises:
        OSError: There is no such file.
        ValueError: The file is of another stage, or has no results.
    """
    asked: list[str] | None = None
    passed: set[str] = set()
    for text in results.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # cut where the machine went
            continue
        if not isinstance(line, dict):
            continue
        if "began" in line:
            asked, passed = line.get("only") or parts, set()
            if not {*line["stages"]} & {"first", "again"}:
                raise ValueError(f"these are results of {', '.join(line['stages'])}")
        elif line.get("outcome") == "passed" and line["stage"] in ("first", "again"):
            passed.add(line["part"])
    if asked is None:
        raise ValueError("no command began in this file")
    return [part for part in parts if part in asked and part not in passed]


def stages_of(asked: list[str], header: dict[str, Any]) -> list[str]:
    """Return the stages to run: `all` stands for four, and `te` where it can be imported."""
    has_te = header.get("no_transformer_engine", "unknown") is None
    every = [*ALL_STAGES, *(["te"] if has_te else [])]
    return [stage for name in asked for stage in (every if name == "all" else [name])]


def main(argv: list[str]) -> int:
    """Run the command line, and return the exit code."""
    if argv[:1] == ["wheels"]:
        if len(argv) != 2:
            print("usage: gpu_check.py wheels DIR", file=sys.stderr)
            return 2
        return fetch_wheels(Path(argv[1]))
    args = arguments(argv)
    try:
        (args.out / "logs").mkdir(parents=True, exist_ok=True)
        if args.archive is not None:
            args.archive.parent.mkdir(parents=True, exist_ok=True)
            args.archive.touch()
    except OSError as error:
        print(f"error: the results cannot be written: {error}", file=sys.stderr)
        return 2
    end = time.monotonic() + (args.seconds or float("inf"))
    slow = 40.0 if args.tiny else 1.0  # a trial checks that parts run, on however busy a machine
    with tempfile.TemporaryDirectory(prefix="megafp8-check-") as site:
        brought = unpacked(args.wheels, Path(site))
        environment = environment_with(Path(site)) | ({COMMIT: args.commit} if args.commit else {})
        check = Check(args.out, environment, args.tiny, args.archive)
        began = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        check.note(began=began, stages=args.stages, only=args.only, wheels=brought)
        if lacking := missing(check.environment):
            check.note(missing=lacking)
            print(how_to_get(lacking, args.wheels), file=sys.stderr)
            return 1
        found = header(check.environment)
        check.note(header=found)
        print(header_text(found), flush=True)
        for stage in stages_of(args.stages, found):
            limit = slow * LIMITS.get(stage, STAGE_SECONDS)
            deadline = min(end, time.monotonic() + limit)
            parts = parts_of(stage, args)
            wanted = [part for part in parts if args.only is None or part.name in args.only]
            check.stage(stage, wanted, deadline)
    check.note(failed=check.failed)
    print((args.out / "table.txt").read_text())
    print("failed: " + "; ".join(check.failed) if check.failed else "all parts passed")
    return int(bool(check.failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
