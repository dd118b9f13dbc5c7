"""Try the orderings of recipes that `claims.yaml` has from papers and frameworks, at two widths.

A claim is one `megafp8 compare` at each width, with five paired seeds. The command trains the next
claim that has no result yet, or the one that `--claim` names, and writes its result file; the same
command continues what was interrupted. Runs that another claim has trained with the same settings
are taken from it. `--again` trains the first seed's runs of a claim at the first width once more
and compares the tensors they leave. `--table` prints the table of all results that there are.
Results of one table are from one machine.

    python benchmarks/published_orderings.py                      # the next claim, an hour
    python benchmarks/published_orderings.py --claim four-over-six
    python benchmarks/published_orderings.py --claim four-over-six --again
    python benchmarks/published_orderings.py --table

With `--steps` or `--num-seeds` it only tries the command: such a result is not evidence, and
`--results` must name a folder for it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml
from gpu_common import git_commit
from recipe_gaps import ROOT, compare, write

from megafp8.cli.compare import claim_folder
from megafp8.config.load import Source
from megafp8.jobs.configurations import BASELINE, GIVEN, Comparison, comparison
from megafp8.report.record import read_run
from megafp8.report.verdict import how_many
from megafp8.runs.find import CHECKPOINTS_DIR, CONFIG_NAME, ENDED

RESULTS = ROOT / "benchmarks" / "results"
CLAIMS = ROOT / "benchmarks" / "claims.yaml"
HIT, MISS, UNDECIDED = "hit", "miss", "undecided"
QUIET = ("trainer.enable_progress_bar=False", "exp_manager.create_tensorboard_logger=False")
"""Settings that change no number of a run."""


def read_claims(path: Path = CLAIMS) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return what all claims share (seeds, widths, job), and the claims by their names."""
    shared = yaml.safe_load(path.read_text())
    claims = {claim["id"]: claim for claim in shared.pop("claims")}
    return shared, claims


def frozen(shared: dict[str, Any], claim: dict[str, Any]) -> str:
    """Return the SHA-256 of a claim and of its job, which a result states."""
    return hashlib.sha256(json.dumps([shared, claim], sort_keys=True).encode()).hexdigest()


def settings_of(claim: dict[str, Any]) -> list[str]:
    """Return the settings of the claim's configuration, each key once."""
    return each_once([*claim["settings"], *claim["other"]])


def each_once(words: Sequence[str]) -> list[str]:
    """Return settings without those that later ones replace."""
    return list({word.partition("=")[0]: word for word in words}.values())


def job_of(shared: dict[str, Any], width: int) -> list[str]:
    """Return the settings of the job at a width, which both sides have."""
    sizes = [
        f"model.hidden_size={width}",
        f"model.ffn_hidden_size={4 * width}",
        f"model.num_attention_heads={width // 32}",
        f"trainer.max_steps={shared['steps']}",
        f"trainer.val_check_interval={shared['steps']}",
        "model.fp8_health=scales",  # full measurements would take time and change no number
    ]
    return each_once([*sizes, *QUIET, *shared["job"]])


def decide(
    expected: str, size: float, interval: tuple[float, float], *, has_learned: bool = True
) -> str:
    """Return what an interval says of a claim: the rule at the top of `claims.yaml`.

    Args:
        expected: `above`, `below` or `equal`.
        size: The least gap that counts, or the largest of equal losses.
        interval: The 95 % interval of the gap, in the unit of `size`.
        has_learned: Whether the baseline learned enough for equal losses to mean something.
    """
    low, high = interval
    if expected == "below":
        low, high = -high, -low
    if expected == "equal":
        if -size <= low and high <= size:
            return HIT if has_learned else UNDECIDED
        return MISS if low > size or high < -size else UNDECIDED
    if low > 0:
        return HIT
    return MISS if high < size else UNDECIDED


def interval_of(found: dict[str, Any], num_seeds: int) -> tuple[float, float]:
    """Return the 95 % interval of a gap in %, from what `compare` found.

    It is above all numbers where a run did not finish, and unbounded with one seed.
    """
    figures = found["figures"]
    mean = math.nan if figures is None or figures["mean"] is None else figures["mean"]
    if not math.isfinite(mean) or len(figures["gaps"]) < num_seeds:
        return math.inf, math.inf
    half = math.inf if figures["half_width"] is None else figures["half_width"]
    return 100 * (mean - half), 100 * (mean + half)


def overall(words: Sequence[str]) -> str:
    """Return what the widths say together: a hit or a miss only if each says so."""
    return words[0] if len(set(words)) == 1 else UNDECIDED


def folder_of(shared: dict[str, Any], claim: dict[str, Any], width: int, runs: Path) -> Path:
    """Return the folder of a claim's runs at a width."""
    name = f"width-{width}_{shared['steps']}-steps_{len(shared['seeds'])}-seeds"
    return runs / claim["id"] / name


def compared(shared: dict[str, Any], claim: dict[str, Any], width: int) -> Comparison:
    """Return the two configurations of a claim at a width."""
    return comparison([*settings_of(claim), *job_of(shared, width)], claim["base"], Source())


def equal_runs(
    shared: dict[str, Any],
    claims: dict[str, dict[str, Any]],
    claim: dict[str, Any],
    width: int,
    runs: Path,
) -> Iterator[tuple[Path, Path]]:
    """Yield the runs of other claims that have the settings of one of this claim's, and its place.

    Both have the same seed. A claim that has no folder yet has no runs.
    """
    own, folder = compared(shared, claim, width), folder_of(shared, claim, width, runs)
    for other in claims.values():
        place = folder_of(shared, other, width, runs)
        if other == claim or not place.is_dir():
            continue
        both = product(compared(shared, other, width).configurations, own.configurations)
        equal = [(a.label, b.label) for a, b in both if dict(a.values) == dict(b.values)]
        for (theirs, ours), seed in product(equal, shared["seeds"]):
            yield place / f"{theirs}-{seed}", folder / f"{ours}-{seed}"


def take(run: Path, target: Path) -> None:
    """Copy a run without its checkpoints.

    Its settings state its own folder; if any other differed, `compare` would refuse the copy.
    """
    shutil.copytree(run, target, ignore=shutil.ignore_patterns(CHECKPOINTS_DIR))
    config = target / CONFIG_NAME
    config.write_text(config.read_text().replace(str(run), str(target)))
    print(f"{target}: taken from {run}", flush=True)


def take_equal_runs(
    shared: dict[str, Any],
    claims: dict[str, dict[str, Any]],
    claim: dict[str, Any],
    width: int,
    runs: Path,
) -> None:
    """Copy the finished runs of other claims that this one needs and has not got."""
    for run, target in equal_runs(shared, claims, claim, width, runs):
        if target.exists() or not run.exists() or read_run(run).status not in ENDED:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        claim_folder(target.parent, compared(shared, claim, width))
        take(run, target)


def train(
    shared: dict[str, Any], claim: dict[str, Any], width: int, runs: Path, jobs: int
) -> dict[str, Any]:
    """Train all runs of a claim at a width that are missing, and return what came out."""
    seeds = shared["seeds"]
    folder = folder_of(shared, claim, width, runs)
    options = ("--jobs", str(jobs), "--tolerance", str(claim["size"]))
    figures = compare(
        folder, settings_of(claim), claim["base"], job_of(shared, width), seeds, options
    )
    (found,) = figures["configurations"]
    interval = interval_of(found, len(seeds))
    word = decide(
        claim["expected"], claim["size"], interval, has_learned=found["verdict"] == "same"
    )
    summaries = {
        name: json.loads((Path(run) / "summary.json").read_text())
        for name, run in figures["runs"].items()
    }
    ends = {
        key: {name: summary.get(key) for name, summary in summaries.items()}
        for key in ("val_loss", "wall_seconds")
    }
    return {"word": word, **ends, **found}


def tried(
    shared: dict[str, Any],
    claims: dict[str, dict[str, Any]],
    claim: dict[str, Any],
    runs: Path,
    jobs: int,
) -> dict[str, Any]:
    """Return what came out of a claim at each width, with the claim and its jobs."""
    widths = {}
    for width in shared["widths"]:
        take_equal_runs(shared, claims, claim, width, runs)
        widths[str(width)] = train(shared, claim, width, runs, jobs)
    return {
        "frozen": frozen(shared, claim),
        "claim": claim,
        "job": {width: job_of(shared, int(width)) for width in widths},
        "seeds": shared["seeds"],
        "widths": widths,
    }


def digest_of(run: Path) -> str | None:
    """Return the SHA-256 of the tensors that a run has saved last; None if it has none."""
    files = sorted((run / CHECKPOINTS_DIR).glob("step_*/*.safetensors"))
    if not files:
        return None
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def repeat(
    shared: dict[str, Any], claim: dict[str, Any], width: int, runs: Path, jobs: int
) -> dict[str, list[str | None]]:
    """Train the first seed's two runs again; return the digests of both times by run.

    A run that was taken from another claim has no checkpoint here, and is left out.
    """
    seed = shared["seeds"][0]
    names = [f"{configuration}-{seed}" for configuration in (BASELINE, GIVEN)]
    once = {**shared, "seeds": [seed]}
    folders = (
        folder_of(shared, claim, width, runs),
        folder_of(once, claim, width, runs / "again"),
    )
    digests = {name: digest_of(folders[0] / name) for name in names}
    if not any(digests.values()):
        sys.exit(f"{folders[0]} has no checkpoint of seed {seed}: train the claim first")
    train(once, claim, width, runs / "again", jobs)
    again = {name: digest_of(folders[1] / name) for name in names}
    return {name: [first, again[name]] for name, first in digests.items() if first is not None}


def nats(of_width: dict[str, Any]) -> float:
    """Return the mean gap of the losses themselves; NaN where a run has none."""
    losses = of_width["val_loss"]
    bases = {name: loss for name, loss in losses.items() if name.startswith("baseline-")}
    others = [losses.get(name.replace("baseline", "given")) for name in bases]
    pairs = zip(bases.values(), others, strict=True)
    gaps = [math.nan if None in pair else pair[1] - pair[0] for pair in pairs]
    return sum(gaps) / len(gaps) if gaps else math.nan


def gap_cell(of_width: dict[str, Any], interval: tuple[float, float], size: float) -> str:
    """Return the gap of a width with its interval and its word, as a cell of the table.

    An undecided one has the number of seeds whose interval would be as wide as `size`, in %.
    """
    (low, high), word = interval, of_width["word"]
    if not math.isfinite(high - low):
        return f"no number, **{word}**"
    seeds = ""
    if word == UNDECIDED and (high - low) / 2 > size:
        gaps = {int(seed): gap for seed, gap in of_width["figures"]["gaps"].items()}
        seeds = f" ({how_many(gaps, size / 100)} would decide)"
    return (
        f"{(low + high) / 2:+z.2f} % ({low:+.2f} to {high:+.2f}), {nats(of_width):+.4f} nats, "
        f"**{word}**{seeds}"
    )


def trend(first: tuple[float, float], last: tuple[float, float]) -> str:
    """Return how the gap differs between two widths, with the interval of two independent means."""
    change = (sum(last) - sum(first)) / 2
    half = math.hypot(first[1] - first[0], last[1] - last[0]) / 2
    if not math.isfinite(change + half):
        return "–"
    seen = "rises" if change > half else "falls" if change < -half else "none seen"
    return f"{seen} ({change:+.2f} ± {half:.2f})"


def table(results: Sequence[dict[str, Any]], claims: dict[str, dict[str, Any]]) -> list[str]:
    """Return the results as rows of Markdown, how many claims come out, and how each differs."""
    if not results:
        return ["there are no results yet"]
    widths = list(results[0]["widths"])
    gaps = " | ".join(f"gap at width {width}" for width in widths)
    rows = [f"| claim | published | expected | {gaps} | trend | outcome |"]
    rows.append("|---" * (len(widths) + 5) + "|")
    outcomes = []
    for result in results:
        claim, found = result["claim"], [result["widths"][width] for width in widths]
        intervals = [interval_of(each, len(result["seeds"])) for each in found]
        outcomes.append(overall([each["word"] for each in found]))
        cells = [claim["says"], claim["published"], f"{claim['expected']}, {claim['size']} %"]
        pairs = zip(found, intervals, strict=True)
        cells += [gap_cell(each, interval, claim["size"]) for each, interval in pairs]
        cells.append(trend(intervals[0], intervals[-1]))
        cells.append(f"**{outcomes[-1]}**")
        rows.append(f"| {' | '.join(cells)} |")
    counts = ", ".join(f"{outcomes.count(word)} {word}" for word in (HIT, MISS, UNDECIDED))
    rows += ["", f"{len(results)} of {len(claims)} claims were tried: {counts}.", ""]
    rows += ["| claim | source | what differs here |", "|---|---|---|"]
    for claim in (result["claim"] for result in results):
        source = f"{claim['source']['title']}: {claim['source']['where']}"
        rows.append(f"| {claim['id']} | {source} | {claim['differs']} |")
    machines = sorted({f"{each['cpu']}, torch {each['versions']['torch']}" for each in results})
    return [*rows, "", f"Made on: {'; '.join(machines)}."]


def read_results(
    folder: Path, shared: dict[str, Any], claims: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the newest result of each claim, in their order.

    A result of a claim or a job that was changed afterwards ends the program.
    """
    newest: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*_ordering-*.json")):
        result = json.loads(path.read_text())
        name = result["claim"]["id"]
        if name not in claims or result["frozen"] != frozen(shared, claims[name]):
            sys.exit(f"{path}: the claim or the job was changed after its runs; claims are frozen")
        newest[name] = result
    return [newest[name] for name in claims if name in newest]


def main() -> None:
    """Train a claim and write its result, or print the table."""
    shared, claims = read_claims()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--claim", choices=claims, help="which one (the next without a result)")
    parser.add_argument("--again", action="store_true", help="train two runs of --claim once more")
    parser.add_argument("--table", action="store_true", help="print the table, and train nothing")
    parser.add_argument("--steps", type=int, help="only try the command, with so many steps")
    parser.add_argument("--num-seeds", type=int, help="only try the command, with so many seeds")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time (2)")
    parser.add_argument("--runs", type=Path, default=Path("runs/published-orderings"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    is_trial = args.steps is not None or args.num_seeds is not None
    if is_trial:
        shared["steps"] = args.steps or shared["steps"]
        shared["seeds"] = shared["seeds"][: args.num_seeds]
        shared["job"] = [*shared["job"], "trainer.limit_val_batches=2"]
    if args.again and args.claim is None:
        parser.error("--again needs the claim, by --claim")
    if is_trial and args.results == RESULTS:
        parser.error("--steps and --num-seeds only try the command: give --results FOLDER too")
    args.results.mkdir(parents=True, exist_ok=True)
    results = read_results(args.results, shared, claims)
    if args.table:
        print("\n".join(table(results, claims)))
        return
    done = {result["claim"]["id"] for result in results}
    name = args.claim or next((name for name in claims if name not in done), None)
    if name is None:
        print("every claim has a result; --table prints them")
        return
    claim, runs = claims[name], args.runs.resolve()
    print(f"{name}: {claim['says']}", flush=True)
    about = {
        "is_trial": is_trial,
        "commit": git_commit(),
        "threads": shared["threads"],
        "runs_at_a_time": args.jobs,
        "torch_cpu": torch.backends.cpu.get_cpu_capability(),
    }
    command = f"python benchmarks/published_orderings.py --claim {name}"
    if args.again:
        width = shared["widths"][0]
        digests = repeat(shared, claim, width, runs, args.jobs)
        found = {"command": f"{command} --again", **about, "job": job_of(shared, width)}
        write(f"repeated-{name}", "SHA-256 of tensors", args.results, {**found, "runs": digests})
        for run, both in digests.items():
            print(f"{run}: {'the same' if len(set(both)) == 1 else 'other'} bytes")
        return
    result = {"command": command, **about, **tried(shared, claims, claim, runs, args.jobs)}
    write(f"ordering-{name}", claim["says"], args.results, result)
    found = read_results(args.results, shared, claims)
    print("\n".join(table([each for each in found if each["claim"]["id"] == name], claims)))


if __name__ == "__main__":
    main()
