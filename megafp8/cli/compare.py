"""Train a configuration and its baseline from the same seeds, and say whether the loss is the same.

python -m megafp8.cli.compare model.fp8=True … [--seeds 1 2 3] [--out DIR]

The baseline is the same configuration with model.fp8=False, and without settings that only FP8
has. Both start from the same weights and read the same data. If the command is interrupted, the
same command continues it. The exit code is 0 for "same" and "better", 5 for "worse", 6 for
"undecided", 75 after an interruption.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

import yaml

from megafp8.cli.job import command_parser, reports_errors
from megafp8.config.layers import DEFAULT_CONFIG, conf_dir
from megafp8.config.load import load_all
from megafp8.config.overrides import quoted
from megafp8.config.rules import unused
from megafp8.config.schema import all_keys
from megafp8.config.settings import read_value
from megafp8.config.values import plain
from megafp8.errors import ExitCode, RunError, UserError
from megafp8.files import read_json, to_json, write_atomically, write_json_atomically
from megafp8.report.curves import gap_chart
from megafp8.report.page import runs_page
from megafp8.report.record import RunRecord, read_run
from megafp8.report.verdict import (
    Pair,
    Signal,
    Verdict,
    all_signals,
    gaps_of,
    judge,
    ratio,
    weakest_tensors,
)
from megafp8.report.writer import REPORT_FILE
from megafp8.runs.find import is_run

WORSE, UNDECIDED = 5, 6
RESULT_FILE = "compare.json"
INPUT_FILE = "compare-input.json"  # says what configurations the runs beside it have
LABELS = ("baseline", "given")
STORED = tuple(
    f"model.optim.{name}"
    for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
)
"""Settings of FP8-LM that the baseline has at their defaults, though they work without FP8."""


@dataclass(frozen=True)
class Job:
    """Name one run: the configuration, the seed, its settings and its directory."""

    label: str
    seed: int
    overrides: tuple[str, ...]
    directory: Path


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Train all runs, write the page and print the verdict; return the exit code."""
    parser = command_parser("compare", __doc__)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="the configuration")
    parser.add_argument(
        "--base",
        nargs="+",
        default=["model.fp8=False"],
        metavar="KEY=VALUE",
        help="what the baseline has instead (model.fp8=False)",
    )
    parser.add_argument("--seeds", type=int, nargs="+", help="values of model.seed (the usual one)")
    parser.add_argument(
        "--tolerance", type=float, default=0.5, help="largest gap that counts as same, in %% (0.5)"
    )
    parser.add_argument("--out", type=Path, help="the directory (compare/ and a short hash)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (1)")
    parser.add_argument("--config-dir", type=Path, help="a directory of your own YAML files")
    parser.add_argument("--config-name", default=DEFAULT_CONFIG, help="the YAML's name")
    options = parser.parse_intermixed_args(list(argv))
    return compare(options)


def compare(options: argparse.Namespace) -> int:
    """Train what is not trained yet, and report.

    Raises:
        UserError: The settings are refused, are the baseline's, or a run of the baseline failed.
    """
    given = tuple(options.overrides)
    config = (options.config_dir, options.config_name)
    other = load_all(given, *config, _gpu_available)
    base = _baseline(given, options.base, config)
    base_cfg = load_all(base, *config, _gpu_available).cfg
    changed = [
        f"{key}: {read_value(base_cfg, key)} and {read_value(other.cfg, key)}"
        for key in all_keys()
        if read_value(base_cfg, key) != read_value(other.cfg, key)
    ]
    if not changed:
        recipe = str(other.cfg.model.fp8_recipe) if other.cfg.model.fp8 else None
        raise RunError(f"the configuration is its own baseline. {_other_base(recipe)}")
    measured = (*given, *_with_health(given, config))
    if read_value(base_cfg, "model.fp8"):
        base = (*base, *_with_health(base, config))
    seeds = options.seeds or [int(other.cfg.model.seed)]
    options_of_run = _config_options(options)
    trees = [{key: read_value(cfg, key) for key in all_keys()} for cfg in (other.cfg, base_cfg)]
    identity = hashlib.sha256(to_json(trees).encode()).hexdigest()
    out = options.out or Path("compare") / identity[:8]
    _claim(out, identity)
    jobs = [
        Job(label, seed, (*options_of_run, *overrides), out / f"{label}-{seed}")
        for seed in seeds
        for label, overrides in zip(LABELS, (base, measured), strict=True)
    ]
    print(f"{len(jobs)} runs in {out}; the same command continues them if it is interrupted")
    print("\n".join(f"differs: {line}" for line in changed), flush=True)
    codes = _run_all(jobs, options.jobs)
    if ExitCode.SAVED_ON_SIGNAL in codes.values():
        print("interrupted; the same command continues", file=sys.stderr)
        return int(ExitCode.SAVED_ON_SIGNAL)
    return _report(jobs, codes, out, options.tolerance / 100, changed)


def _claim(out: Path, identity: str) -> None:
    """Take a directory for the runs of two configurations, whose hash is `identity`.

    It is free as long as no run has begun there, as after a command with a wrong data_prefix.

    Raises:
        RunError: The directory has runs of other configurations, or cannot be written.
    """
    file = out / INPUT_FILE
    if file.exists() and read_json(file).get("configurations") == identity:
        return
    if any(is_run(path) for label in LABELS for path in out.glob(f"{label}-*")):
        known = "" if file.exists() else f" (there is no {INPUT_FILE} that says which)"
        raise RunError(
            f"{out}: has runs of other configurations{known}, which would count as runs of these. "
            "Give another --out, or delete the directory"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_json_atomically(file, {"configurations": identity})
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error.strerror})") from error


def _config_options(options: argparse.Namespace) -> tuple[str, ...]:
    found = []
    if options.config_dir is not None:
        found.append(f"--config-dir={options.config_dir.absolute()}")
    if options.config_name != DEFAULT_CONFIG:
        found.append(f"--config-name={options.config_name}")
    return tuple(found)


def _baseline(
    given: Sequence[str], replaced: Sequence[str], config: tuple[Path | None, str]
) -> tuple[str, ...]:
    """Return the overrides of the baseline: without presets and settings that only FP8 has."""
    changes = {text.partition("=")[0]: text for text in replaced}
    loaded = load_all(given, *config)
    values = {key: read_value(loaded.cfg, key) for key in all_keys()}
    values |= {
        key: yaml.safe_load(text.partition("=")[2])
        for key, text in changes.items()
        if key in values
    }
    # These work without FP8 too, and with them the keys that need states in few bits.
    stored = [] if values["model.fp8"] else [key for key in STORED if key not in changes]
    values |= dict.fromkeys(stored)
    idle = {found.key for found in unused(values)}
    kept = [
        "precision=bf16" if text.startswith("precision=fp8") else text
        for text in given
        if (key := text.partition("=")[0].lstrip("+")) not in changes
        and key not in idle
        and key not in stored
    ]
    # A file may set the same, also what the command line has set again: there it would stay on, or
    # be a mistake without what is left out.
    origins = loaded.origins
    reset = [f"{key}=null" for key in stored if key in origins]
    reset += [
        f"{key}={plain(all_keys()[key].default)}"
        for key in sorted(idle)
        if key in origins and origins[key].is_users
    ]
    return (*kept, *replaced, *reset)


def _other_base(recipe: str | None) -> str:
    """Return the hint where a configuration is its own baseline; None is one without FP8."""
    if recipe is None:
        return "Give model.fp8=True, or another --base"
    other = "tensorwise" if recipe == "delayed" else "delayed"
    return f"Give another --base, such as --base model.fp8_recipe={other}"


def _gpu_available() -> bool:
    """Whether PyTorch finds a GPU; torch is imported only where a setting depends on it."""
    import torch

    return torch.cuda.is_available()


def _with_health(given: Sequence[str], config: tuple[Path | None, str]) -> tuple[str, ...]:
    """Return the setting that measures what each tensor loses, if the run can have it.

    With CUDA graphs logged steps would then not be replayed, and take another time.
    """
    if any(text.startswith("model.fp8_health=") for text in given):
        return ()
    try:
        cfg = load_all((*given, "model.fp8_health=full"), *config).cfg
    except UserError:
        return ()
    return () if read_value(cfg, "model.enable_cuda_graph") else ("model.fp8_health=full",)


# ---- runs


def _run_all(jobs: Sequence[Job], at_once: int) -> dict[Job, int]:
    """Run the jobs that have not finished; return exit codes. No job starts after a signal.

    After Ctrl-C every job that has not finished has the code of an interruption, also one that had
    not begun to train and therefore could not save.
    """
    codes: dict[Job, int] = {}
    stopped: list[bool] = []

    def run(job: Job) -> None:
        if stopped:
            codes[job] = int(ExitCode.SAVED_ON_SIGNAL)
            return
        codes[job] = _run(job, quiet=at_once > 1)
        if codes[job] == ExitCode.SAVED_ON_SIGNAL:
            stopped.append(True)

    # Ctrl-C reaches the runs themselves, which save; this process waits for them.
    before = signal.signal(signal.SIGINT, lambda number, frame: stopped.append(True))
    try:
        with ThreadPoolExecutor(max(1, at_once)) as pool:
            list(pool.map(run, jobs))
    finally:
        signal.signal(signal.SIGINT, before)
    if stopped:
        codes = {job: code and int(ExitCode.SAVED_ON_SIGNAL) for job, code in codes.items()}
    return codes


def _run(job: Job, *, quiet: bool) -> int:
    name = f"{job.label}, seed {job.seed}"
    if job.directory.is_dir() and read_run(job.directory).status == "finished":
        print(f"{name}: finished before, in {job.directory}", flush=True)
        return int(ExitCode.FINISHED)
    print(f"{name}: {job.directory}", flush=True)
    given = {text.partition("=")[0] for text in job.overrides}
    usual = {"exp_manager.checkpoint_callback_params.keep": "1"}
    command = [
        sys.executable,
        str(conf_dir().parent / "pretrain_gpt.py"),
        *job.overrides,
        *(f"{key}={value}" for key, value in usual.items() if key not in given),
        f"model.seed={job.seed}",
        f"exp_manager.explicit_log_dir={quoted(str(job.directory))}",
    ]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    output = subprocess.DEVNULL if quiet else subprocess.PIPE
    with subprocess.Popen(command, stdout=output, env=environment) as process:
        _show(process.stdout or ())
    return code if (code := process.returncode) >= 0 else 128 - code


def _show(lines: Iterable[bytes]) -> None:
    """Print what a run prints, indented, without the rows that say how to continue it alone.

    A run of the comparison that is prolonged by hand would no longer be comparable.
    """
    for line in lines:
        text = line.decode("utf-8", "replace").rstrip()
        if not text.lstrip().startswith(("continue with ", "beware ")):
            print(f"  {text}".rstrip(), flush=True)


# ---- the report


def _report(
    jobs: Sequence[Job],
    codes: dict[Job, int],
    out: Path,
    tolerance: float,
    changed: Sequence[str],
) -> int:
    runs = {(job.label, job.seed): read_run(job.directory) for job in jobs if _left_a_run(job)}
    failed = [job for job in jobs if codes[job] != ExitCode.FINISHED]
    names = _names(runs)
    # A baseline that failed, or a mistake such as missing data, says nothing about the losses.
    for job in failed:
        if job.label == "baseline" or codes[job] == ExitCode.USER_ERROR:
            of = "the baseline's run" if job.label == "baseline" else "the configuration's run"
            raise RunError(
                f"{job.directory}: {of} ended with exit code {codes[job]}. Correct that first; "
                "the same command continues"
            )
    pairs = [
        Pair(seed, base, runs["given", seed])
        for (label, seed), base in runs.items()
        if label == "baseline" and ("given", seed) in runs
    ]
    done = [pair for pair in pairs if pair.other.status == "finished"]
    verdict = judge(done, tolerance, names) if done else None
    word = verdict.word if verdict is not None else "worse"
    sentence = verdict.sentence if verdict is not None else ""
    if failed:
        word = "worse"
        how = ", ".join(f"seed {job.seed} ended with exit code {codes[job]}" for job in failed)
        sentence = f"worse: {names[1]} did not finish ({how}), and {names[0]} did"
    signals = weakest_tensors(pairs[0].other) if pairs else []
    of_base = {s.name: s.snr_db for s in all_signals(pairs[0].base)} if pairs else {}
    costs = _costs(done)
    page = _page(runs, names, verdict, word, sentence, signals, of_base, costs, changed, done)
    result = {
        "verdict": word,
        "sentence": sentence,
        "figures": None if verdict is None else asdict(verdict),
        "differs": list(changed),
        "costs": dict(costs),
        "weakest_tensors": [
            {**asdict(signal), "snr_db_of_baseline": of_base.get(signal.name)} for signal in signals
        ],
        "runs": {f"{label}-{seed}": str(run.path) for (label, seed), run in runs.items()},
    }
    try:
        write_atomically(out / REPORT_FILE, page)
        write_atomically(out / RESULT_FILE, to_json(result, indent=2) + "\n")
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error.strerror})") from error
    print("\nresult")
    for line in (*_lines(verdict), *(f"{what}: {text}" for what, text in costs)):
        print(line)
    print(f"report: {out / REPORT_FILE}")
    print(f"verdict: {sentence}", flush=True)
    return {"worse": WORSE, "undecided": UNDECIDED}.get(word, int(ExitCode.FINISHED))


def _left_a_run(job: Job) -> bool:
    try:
        read_run(job.directory)
    except RunError:
        return False
    return True


def _names(runs: dict[tuple[str, int], RunRecord]) -> tuple[str, str]:
    """Return what the two configurations are called: by precision, if that says enough."""

    def name(run: RunRecord | None, otherwise: str) -> str:
        if run is None:
            return otherwise
        if run.config.get("model.fp8"):
            return f"FP8 {run.config.get('model.fp8_recipe', '')}".strip()
        precision = str(run.config.get("trainer.precision", ""))
        return {"bf16": "BF16", "16": "FP16", "32": "FP32"}.get(precision, otherwise)

    found = {label: run for (label, _), run in runs.items()}
    base, given = name(found.get("baseline"), "baseline"), name(found.get("given"), "given")
    return ("baseline", "given") if base == given else (base, given)


def _costs(pairs: Sequence[Pair]) -> list[tuple[str, str]]:
    """Return what the configuration took in relation to the baseline, in words."""
    found = []
    memory, wall = ratio(pairs, "peak_memory_bytes"), ratio(pairs, "wall_seconds")
    if memory is not None:
        found.append(("peak memory", f"{memory:.2f} of the baseline's"))
    if wall is not None:
        found.append(("time of whole runs", f"{wall:.2f} of the baseline's"))
        if _measures(pairs[0].other) != _measures(pairs[0].base):
            side = "the configuration" if _measures(pairs[0].other) else "the baseline"
            note = f"logged steps of {side} alone also measure FP8 health, which its time includes"
            found.append(("note", note))
    precision = str(pairs[0].other.summary.get("precision", "")) if pairs else ""
    if "emulated" in precision:
        note = "FP8 is emulated on this device, so that its time says nothing about tensor cores"
        found.append(("note", note))
    share = pairs[0].other.figure("fp8_share_of_gemm_flops") if pairs else None
    if share:
        found.append(("share of FP8", f"{100 * share:.1f} % of the GEMM FLOPs without attention"))
    return found


def _measures(run: RunRecord) -> bool:
    return bool(run.config.get("model.fp8")) and run.config.get("model.fp8_health") == "full"


def _lines(verdict: Verdict | None) -> list[str]:
    """Return the figures behind the verdict, as lines."""
    if verdict is None:
        return []
    gaps = ", ".join(f"seed {seed} {100 * gap:+.3f} %" for seed, gap in verdict.gaps.items())
    lines = [f"gap of the final {verdict.measured}: {gaps}"]
    if verdict.spread_between_seeds is not None:
        spread = f"{100 * verdict.spread_between_seeds:.2f} %"
        lines.append(
            f"spread of the baseline between seeds: {spread} (the seed also draws the texts)"
        )
    if verdict.first_difference is None:
        lines.append("the training losses are equal at every logged step")
    else:
        lines.append(f"the training losses differ from step {verdict.first_difference} on")
    if verdict.largest is not None:
        step, gap = verdict.largest
        lines.append(f"the averaged gap is largest at step {step}: {100 * gap:+.2f} %")
    if verdict.parts_at is not None:
        lines.append(f"the curves part at step {verdict.parts_at}")
    else:
        lines.append("the curves do not part: the averaged gap ends within the tolerance")
    return lines


def _page(
    runs: dict[tuple[str, int], RunRecord],
    names: tuple[str, str],
    verdict: Verdict | None,
    word: str,
    sentence: str,
    signals: Sequence[Signal],
    of_base: Mapping[str, float],
    costs: Sequence[tuple[str, str]],
    changed: Sequence[str],
    pairs: Sequence[Pair],
) -> str:
    called = dict(zip(("baseline", "given"), names, strict=True))
    labels = [f"{called[label]}, seed {seed}" for label, seed in runs]
    color = "same" if word == "better" else word
    items = [*_lines(verdict), *(f"{what}: {text}" for what, text in costs)]
    parts = [
        f"<p class='verdict {color}'><span>{escape(sentence)}</span></p>",
        f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>",
        "<h2>What differs</h2><ul>",
        *(f"<li>{escape(line)}</li>" for line in changed),
        "</ul>",
    ]
    if signals:
        column = f"<th>signal to noise of {escape(names[0])}, dB" if of_base else ""
        rows = "".join(
            f"<tr><td>{escape(s.name)}<td class=number data-value={s.snr_db!r}>{s.snr_db:.1f}"
            f"{_cell(of_base.get(s.name)) if of_base else ''}"
            f"<td class=number data-value={s.underflow!r}>{100 * s.underflow:.3f}"
            f"<td class=number data-value={s.overflow!r}>{100 * s.overflow:.3f}"
            for s in signals
        )
        parts.append(
            "<h2>Tensors that lose most signal in FP8</h2><p class=dim>Means over the last quarter "
            "of the first seed's logged steps. The ratio is that of the worst row of a tensor.</p>"
            "<div class=scroll><table class=sortable><thead><tr><th>tensor"
            f"<th>signal to noise, dB{column}<th>underflow, %<th>saturation, %</thead>"
            f"<tbody>{rows}</tbody></table></div>"
        )
    gaps = [(f"seed {pair.seed}", *_in_percent(gaps_of(pair))) for pair in pairs]
    chart = gap_chart(f"training loss of {names[1]} over {names[0]}, %", gaps)
    return runs_page(
        f"{names[1]} against {names[0]}",
        list(runs.values()),
        labels=labels,
        more="".join(parts),
        more_charts=[chart] if gaps else [],
    )


def _cell(snr_db: float | None) -> str:
    """Return a cell of the table, empty where the tensor was not measured."""
    return "<td>" if snr_db is None else f"<td class=number data-value={snr_db!r}>{snr_db:.1f}"


def _in_percent(curve: tuple[list[int], list[float]]) -> tuple[list[int], list[float]]:
    return curve[0], [100 * gap for gap in curve[1]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
