"""Train configurations and their baseline from the same seeds, and say whose loss is the same.

megafp8 compare model.fp8=True … [--seeds 1 2 3] [--out DIR]
megafp8 compare model.fp8=True model.fp8_recipe=delayed,lab.py:Mine --seeds 1 2 3
megafp8 compare --from runs/first@6000 --steps 200 --each-layer

A setting with several values (KEY=A,B) gives several configurations. Their baseline is the same
with model.fp8=False, and without settings that only FP8 has; it is trained once. All runs of a seed
start from the same weights and read the same data. If the command is interrupted, the same command
continues it. Of configurations with another `model.precision_schedule` it also says how long they
would take by the model of `megafp8 plan`, on an H100 or on hardware=NAME; with hardware=NAME of all
of them. With --each-layer (or --each linear, --each product) a configuration in FP8 is also trained
with one layer at a time in high precision, and a ranking says what the loss gains by it and which
`model.fp8_modules` to set; with --alone also with one layer at a time as the only one in FP8.
With --from RUN@STEP --steps N all runs continue that checkpoint of a run for N steps, which tells
what FP8, or a layer of it, costs there. For an interval, several checkpoints stand for seeds.
The exit code is 0 if every configuration is "same" or "better", 5 if
one is "worse", 6 if one is "undecided" and none is worse, 75 after an interruption.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megafp8.cli.commands import run_old_name
from megafp8.cli.job import command_parser, number_in, reports_errors
from megafp8.cli.plan import hardware_from, is_hardware, make_plan, spec_of
from megafp8.cli.plan_text import UNCERTAINTY, Plan, format_seconds
from megafp8.config.errors import COMMAND_LINE, SettingError, raise_if_any
from megafp8.config.layers import DEFAULT_CONFIG
from megafp8.config.load import Source
from megafp8.config.own_recipes import TRUST
from megafp8.config.precision_changes import SCHEDULE
from megafp8.config.resume import setting_differences, typed
from megafp8.errors import ExitCode, RunError, UserError
from megafp8.files import (
    has_keys,
    read_json_object,
    require_ours,
    run_errors_reported,
    to_json,
    write_atomically,
    write_json_atomically,
)
from megafp8.jobs.comparison import (
    Outcome,
    comparison_page,
    comparison_table,
    forecast,
    outcome,
    worst,
)
from megafp8.jobs.configurations import (
    BASELINE,
    GIVEN,
    Comparison,
    Configuration,
    comparison,
    continued,
)
from megafp8.jobs.job import Job, given_settings, run_left_in
from megafp8.jobs.parts import EACH, Gain, gain_lines, gain_section, gains_of, with_parts
from megafp8.jobs.processes import refuse_in_use, run_all
from megafp8.jobs.starts import FROM, SET_BY_START, find_start, keep, state_of
from megafp8.plan.hardware import Hardware
from megafp8.plan.phases import specs_of_phases
from megafp8.report.record import RunRecord
from megafp8.report.verdict import TOLERANCE, Seed
from megafp8.report.writer import REPORT_FILE, require_page
from megafp8.runs.find import CONFIG_NAME, SUMMARY_NAME, is_run
from megafp8.runs.lock import LOCK_NAME, RunLock

WORSE, UNDECIDED = 5, 6
USUAL_BASE = "model.fp8=False"
SEED = "model.seed"
RESULT_FILE = "compare.json"
INPUT_FILE = "compare-input.json"  # says what configurations the runs beside it have
_WRITTEN = {
    INPUT_FILE: has_keys("configurations"),
    RESULT_FILE: has_keys("verdict", "configurations", "runs"),
    LOCK_NAME: has_keys("host", "pid"),
}
_ANOTHER = "Give another --out"


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Train all runs, write the page and print the verdicts; return the exit code."""
    parser = command_parser("compare", __doc__)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="the configuration; KEY=A,B for several",
    )
    parser.add_argument(
        "--base",
        nargs="+",
        metavar="KEY=VALUE",
        help=f"what the baseline has instead ({USUAL_BASE})",
    )
    parser.add_argument("--seeds", type=int, nargs="+", help="values of model.seed (the usual one)")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=100 * TOLERANCE,
        help="largest gap that counts as same, in %% (%(default)s)",
    )
    parser.add_argument(
        "--each",
        choices=EACH,
        help="also train the configuration with each of these in high precision, one at a time, "
        "and rank them by what the loss gains",
    )
    parser.add_argument(
        "--each-layer", action="store_const", const="layer", dest="each", help="--each layer"
    )
    parser.add_argument(
        "--alone",
        action="store_true",
        help="with --each: also train the configuration with each of these alone in FP8",
    )
    parser.add_argument(
        "--from",
        nargs="+",
        dest="starts",
        metavar="RUN[@STEP]",
        help="continue these checkpoints of runs, with their settings",
    )
    parser.add_argument(
        "--steps",
        type=number_in(int, lambda n: n > 0, "a number of steps above 0"),
        help=f"with {FROM}: how many steps are trained (those that the run has left)",
    )
    parser.add_argument("--out", type=Path, help="the directory (compare/ and a short hash)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (1)")
    parser.add_argument("--config-dir", type=Path, help="a directory of your own YAML files")
    parser.add_argument("--config-name", default=DEFAULT_CONFIG, help="the YAML's name")
    parser.add_argument(
        TRUST,
        action="store_true",
        dest="trusts_recipes",
        help="import the recipes that a YAML file names as code",
    )
    return compare(parser.parse_intermixed_args(list(argv)))


def compare(options: argparse.Namespace) -> int:
    """Train what is not trained yet, and report.

    Raises:
        UserError: The settings are refused, are the baseline's, or a run of the baseline failed, or
            another process compares in the same directory.
    """
    source = Source(
        config_dir=options.config_dir,
        config_name=options.config_name,
        trusts_recipes=options.trusts_recipes,
    )
    words = [word for word in options.overrides if is_hardware(word)]
    hardware = hardware_from(words)
    given = [word for word in options.overrides if not is_hardware(word)]
    _refuse_idle(options, words)
    pairs, times = _from_checkpoints(options, given, source), dict[str, str]()
    if not pairs:
        base = options.base or [USUAL_BASE]
        _refuse_seed([*given, *base], options.seeds)
        compared = _with_each(comparison(given, base, source), source, options)
        times = predicted_times(compared, source, hardware, is_asked=bool(words))
        seeds = options.seeds or [int(str(compared.others[0].values[SEED]))]
        pairs = [(seed, compared, source) for seed in seeds]
    out = options.out or Path("compare") / pairs[0][1].identity[:8]
    _refuse_foreign(out)
    with run_errors_reported(out, "making the directory"):
        out.mkdir(parents=True, exist_ok=True)
    with RunLock.acquire(out):
        return _train_and_report(pairs, out, options, times)


def _from_checkpoints(
    options: argparse.Namespace, given: Sequence[str], source: Source
) -> list[tuple[Seed, Comparison, Source]]:
    """Return what is compared from each checkpoint that the options name.

    Raises:
        SettingError: A checkpoint has another model, data or optimizer than the first one.
    """
    pairs: list[tuple[Seed, Comparison, Source]] = []
    starts = [find_start(text, options.steps) for text in options.starts or ()]
    for place, start in enumerate(starts):
        if any(start.checkpoint.samefile(other.checkpoint) for other in starts[:place]):
            raise _refusal(FROM, start.name, "names a checkpoint twice", "Leave one out")
        if any(start.name == other.name for other in starts[:place]):
            reason = "is the name of two checkpoints, of runs in different directories"
            raise _refusal(FROM, start.name, reason, "Rename a run's directory, or leave one out")
        for other in setting_differences(starts[0].values, start.values):
            if other.key != SEED:
                reason = f"has {typed(other.key, other.new)}, and the first one {other.old}"
                raise _refusal(FROM, start.name, reason, "Compare them in a command for each")
        own = replace(source, config_dir=start.run, config_name=Path(CONFIG_NAME).stem)
        pairs.append((start.name, _with_each(continued(start, given, own), own, options), own))
    return pairs


def _refuse_idle(options: argparse.Namespace, hardware: Sequence[str]) -> None:
    """Raise if an option or a setting has no effect without an option, or beside one.

    Raises:
        ConfigError: There are some.
    """
    idle: list[SettingError] = []
    if options.alone and options.each is None:
        idle.append(_refusal("--alone", None, "has no effect without --each", "Give --each-layer"))
    seeds = options.seeds or []
    if len(set(seeds)) < len(seeds):
        text = " ".join(map(str, seeds))
        idle.append(_refusal("--seeds", text, "has a seed twice", "Give each seed once"))
    if options.starts is None:
        if options.steps is not None:
            reason, hint = f"has no effect without {FROM}", "Give trainer.max_steps=N"
            idle.append(_refusal("--steps", None, reason, hint))
        raise_if_any(idle)
        return
    of_run = {
        "--seeds": options.seeds, "--base": options.base, "--config-dir": options.config_dir,
        "--config-name": options.config_name != DEFAULT_CONFIG, "hardware": hardware,
    }  # fmt: skip
    of_run |= {key: value for word in options.overrides for key, value in given_settings(word)
               if key in (SEED, *SET_BY_START)}  # fmt: skip
    reason = f"has no effect with {FROM}, whose runs continue as the checkpoint says"
    hint = "Leave it out; --steps says how many steps are trained"
    raise_if_any([*idle, *(_refusal(k, None, reason, hint) for k, v in of_run.items() if v)])


def _refusal(key: str, value: object, reason: str, hint: str) -> SettingError:
    return SettingError(key, value, reason, hint, origin=COMMAND_LINE)


def _with_each(compared: Comparison, source: Source, options: argparse.Namespace) -> Comparison:
    if options.each is None:
        return compared
    return with_parts(compared, options.each, source, alone=options.alone)


def _refuse_seed(words: Sequence[str], seeds: Sequence[int] | None) -> None:
    """Raise if settings name a seed where the option has some.

    Raises:
        SettingError: Each run would have two seeds.
    """
    for key, value in (given for word in words for given in given_settings(word)):
        if seeds and key == SEED:
            hint = "Leave one of the two out"
            raise _refusal(SEED, value, "has no effect with --seeds", hint)


def _jobs(pairs: Sequence[tuple[Seed, Comparison, Source]], out: Path) -> list[Job]:
    """Return the runs of all seeds, or from all checkpoints, which are kept in `out`."""
    jobs: list[Job] = []
    for seed, compared, source in pairs:
        state: tuple[str, ...] = ()
        if compared.start is not None:
            home = keep(compared.start, out / "starts")
            source, state = replace(source, config_dir=home), state_of(home, compared.start)
        for c in compared.configurations:
            words = (*source.words(), *c.overrides, *state)
            jobs.append(Job(len(jobs), words, out / f"{c.label}-{seed}", c.label, seed))
    return jobs


def _train_and_report(
    pairs: Sequence[tuple[Seed, Comparison, Source]],
    out: Path,
    options: argparse.Namespace,
    times: Mapping[str, str],
) -> int:
    compared = pairs[0][1]
    claim_folder(out, compared)
    jobs = _jobs(pairs, out)
    for _, of_start, _ in pairs:
        if (start := of_start.start) is not None:
            print(f"from {start.checkpoint}: steps {start.step + 1} to {start.last}")
    if compared.start is not None:
        print(
            "weights, optimizer, data, learning rate, and FP8 scales with their histories continue "
            "from the checkpoint; a tensor that leaves FP8 drops its own"
        )
    print(f"{len(jobs)} runs in {out}; the same command continues them if it is interrupted")
    for other in compared.others:
        of = "" if len(compared.others) == 1 else f" ({other.name})"
        for line in other.changed_from(compared.base):
            print(f"differs{of}: {line}", flush=True)
    tolerance = options.tolerance / 100
    first = jobs[: 2 * len(compared.configurations)]  # those of two seeds
    said: list[str] = []

    def before_each() -> None:
        compared.refuse_changed_files()
        if said or not all((job.directory / SUMMARY_NAME).is_file() for job in first):
            return
        if line := forecast(compared, _left(jobs), tolerance):
            said.append(line)
            print(f"{line}; {len(pairs)} are given", flush=True)

    codes, interrupted = run_all(jobs, options.jobs, before_each)
    if interrupted is not None:
        print("interrupted; the same command continues", file=sys.stderr)
        return interrupted
    _refuse_failures(codes)
    runs = _left(jobs)
    outcomes = [
        outcome(other, compared.base, runs, codes, tolerance, times.get(other.label))
        for other in compared.others
    ]
    gains = gains_of(compared, runs, tolerance) if compared.parts else []
    return _report(outcomes, gains, compared, runs, out)


def _left(jobs: Sequence[Job]) -> dict[Job, RunRecord]:
    """Return what the jobs have left so far."""
    return {job: run for job in jobs if (run := run_left_in(job.directory)) is not None}


def _refuse_foreign(out: Path) -> None:
    """Raise `RunError` if a comparison would overwrite a file that no comparison has written."""
    if is_run(out):
        raise RunError(f"{out}: has a run, whose page a comparison would overwrite. {_ANOTHER}")
    for name, known in _WRITTEN.items():
        if name != LOCK_NAME or not (out / INPUT_FILE).exists():
            require_ours(out / name, "a file of a comparison", known, _ANOTHER)
    require_page(out / REPORT_FILE, _ANOTHER)


def claim_folder(out: Path, compared: Comparison) -> None:
    """Take a directory for the runs of a comparison.

    It is free as long as no run has begun there, as after a command with a wrong data_prefix.

    Raises:
        RunError: The directory has runs of other configurations, or cannot be written.
    """
    file = out / INPUT_FILE
    known = read_json_object(file) if file.exists() else None
    if known is not None and known.get("configurations") == compared.identity:
        return
    before = known.get("labels", ()) if known is not None else ()
    labels = {BASELINE, GIVEN, *(c.label for c in compared.configurations)}
    labels |= {str(label) for label in (before if isinstance(before, list) else ())}
    if any(is_run(path) for label in labels for path in out.glob(f"{label}-*")):
        which = "" if known is not None else f" (there is no {INPUT_FILE} that says which)"
        raise RunError(
            f"{out}: has runs of other configurations{which}. Give another --out, or delete it"
        )
    record = {
        "configurations": compared.identity,
        "labels": [c.label for c in compared.configurations],
    }
    with run_errors_reported(file, "writing the configurations"):
        write_json_atomically(file, record)


# ---- the report


def _refuse_failures(codes: Mapping[Job, int]) -> None:
    """Raise where a failure says nothing about the losses.

    A configuration that diverges where the baseline does not is a result, and is reported as worse.

    Raises:
        RunError: A run of the baseline failed, or a run ended with a mistake such as missing data;
            or another process works in its directory.
    """
    for job, code in codes.items():
        is_base = job.label == BASELINE
        if code == ExitCode.USER_ERROR or (is_base and code != ExitCode.FINISHED):
            refuse_in_use(job)
            whose_run = "the baseline's run" if is_base else "the configuration's run"
            raise RunError(
                f"{job.directory}: {whose_run} ended with exit code {code}. Correct that first; "
                "the same command continues"
            )


def _report(
    outcomes: Sequence[Outcome],
    gains: Sequence[Gain],
    compared: Comparison,
    runs: Mapping[Job, RunRecord],
    out: Path,
) -> int:
    """Write the page and the figures, print the verdicts, and return the exit code."""
    word = worst(outcomes)
    result = {
        "verdict": word,
        "configurations": [o.as_json() for o in outcomes],
        **({"parts": [gain.as_json() for gain in gains]} if gains else {}),
        "runs": {f"{job.label}-{job.seed}": str(run.path) for job, run in runs.items()},
    }
    try:
        ranking = gain_section(gains, compared) if gains else ""
        page = comparison_page(outcomes, compared, runs, ranking)
        write_atomically(out / REPORT_FILE, page)
        write_atomically(out / RESULT_FILE, to_json(result, indent=2) + "\n")
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error.strerror})") from error
    for o in outcomes:
        print("\nresult" if len(outcomes) == 1 else f"\n{o.name}", *o.lines, sep="\n")
    print(f"report: {out / REPORT_FILE}")
    for o in outcomes:
        print(f"verdict: {o.sentence}")
    if len(outcomes) > 1:
        print("\n" + "\n".join(comparison_table(outcomes)))
    if gains:
        print("", *gain_lines(gains, compared), sep="\n")
    sys.stdout.flush()
    return {"worse": WORSE, "undecided": UNDECIDED}.get(word, int(ExitCode.FINISHED))


# ---- the time on GPUs, by the model of `megafp8 plan`


def predicted_times(
    compared: Comparison, source: Source, hardware: Hardware, *, is_asked: bool
) -> dict[str, str]:
    """Return the predicted time of each configuration beside the baseline's, by its label.

    Without `is_asked` it is that of configurations whose schedule of precision is not the
    baseline's, and of no others.
    """
    had = compared.base.values[SCHEDULE]
    asked = [other for other in compared.others if is_asked or other.values[SCHEDULE] != had]
    if not asked:
        return {}
    try:
        base = _planned(compared.base, source, hardware)
        others = {other.label: _planned(other, source, hardware) for other in asked}
    except UserError as error:  # such as what needs a GPU of another kind
        return dict.fromkeys((other.label for other in asked), f"not known: {error}")
    return {label: _beside(base, other) for label, other in others.items()}


def _planned(
    configuration: Configuration, source: Source, hardware: Hardware
) -> tuple[Plan, str | None]:
    """Return the plan of a configuration, and why its time is not predicted, if it is not."""
    spec = spec_of((*source.words(), *configuration.overrides), None).spec
    plans = (make_plan(phase, hardware) for phase in specs_of_phases(spec))
    reasons = (_unpredicted(plan) for plan in plans)
    return make_plan(spec, hardware), next((reason for reason in reasons if reason), None)


def _unpredicted(plan: Plan) -> str | None:
    recipe = plan.spec.precision.fp8
    if recipe is None or recipe.is_unused or plan.unpredicted is None:
        return None
    return ": ".join(plan.unpredicted)


def _beside(base: tuple[Plan, str | None], other: tuple[Plan, str | None]) -> str:
    (of_base, why_base), (of_other, why_other) = base, other
    if why := why_other or why_base:
        return f"none ({why.replace('the figures above', 'the figures of the plan')})"
    old, new = (_seconds(plan) for plan in (of_base, of_other))
    return (
        f"{new / old:.2f} of the baseline's ({format_seconds(new)} and {format_seconds(old)} on "
        f"{of_other.hardware.name}; published ratios are within {UNCERTAINTY:g} times of such)"
    )


def _seconds(plan: Plan) -> float:
    return plan.seconds_of(plan.tokens_of_job)


if __name__ == "__main__":
    run_old_name("compare")
