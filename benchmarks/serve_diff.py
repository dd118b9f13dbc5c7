"""Train a small Llama in three recipes, and compare it with its exports in every form.

The job is that of recipe_gaps.py in the shape of a Llama, for 150 steps (77 thousand tokens, about
a twentieth of the default job's, by 2 layers of width 128). For each recipe and seed the KL
(trained || served) of each form over samples of the validation data is computed as
`megafp8 export --closest-to-training` does, and for one seed the rules of one form as
`megafp8 serve-diff` does. A run that has ended is not made again. The command then writes a result
file and prints its table.

    python benchmarks/serve_diff.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from recipe_gaps import JOB as OF_GAPS
from recipe_gaps import ROOT, write

from megafp8.checkpoint.serving import LLAMA_SHAPE
from megafp8.cli.serve_diff import by_kl

NAME = "serve-diff"
STEPS, SAMPLES, SEEDS = 150, 64, (1, 2, 3)
OTHER = ("trainer.max_steps", "trainer.val_check_interval")
JOB = (
    *(word for word in OF_GAPS if word.partition("=")[0] not in OTHER),
    *(f"{key}={STEPS}" for key in OTHER),
    *LLAMA_SHAPE.split(),
)
FORMS = {"delayed": "fp8", "blockwise": "fp8", "mxfp8": "mxfp8"}
"""The form whose rules are switched one at a time, by the recipe of the run."""
SCALES = {"delayed": "tensor", "blockwise": "block"}


def train(folder: Path, recipe: str, seed: int) -> Path:
    """Return the directory of a run, which is trained unless it has ended."""
    run = folder / f"{recipe}-{seed}"
    if not (run / "summary.json").exists():
        settings = ["model.fp8=True", f"model.fp8_recipe={recipe}", f"model.seed={seed}", *JOB]
        command = [sys.executable, "-m", "megafp8", "pretrain", *settings]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [*command, f"exp_manager.explicit_log_dir={run}"], cwd=ROOT, env=environment, check=True
        )
    return run


def rules_of(run: Path, recipe: str) -> dict[str, Any]:
    """Return what `megafp8 serve-diff --json` says of one form."""
    command = [sys.executable, "-m", "megafp8", "serve-diff", str(run), "--as", FORMS[recipe]]
    command += ["--json", "--validation-samples", str(SAMPLES)]
    command += ["--fp8-scales", SCALES[recipe]] if recipe in SCALES else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return {key: found[key] for key in ("served_as", "served", "cause", "rules", "export_bytes")}


def main() -> None:
    """Train and compare what is missing, write the result and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / NAME, help="where runs are")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    kls: dict[str, dict[str, list[float]]] = {}
    rules = {}
    for recipe in FORMS:
        forms = kls.setdefault(recipe, {})
        for seed in SEEDS:
            run = train(options.runs, recipe, seed)
            for each in by_kl(run, {"validation_samples": SAMPLES}):
                forms.setdefault(each.words.split(", over")[0], []).append(each.kl)
        rules[recipe] = rules_of(options.runs / f"{recipe}-{SEEDS[0]}", recipe)
    figures = {"job": JOB, "samples": SAMPLES, "seeds": SEEDS, "kl": kls, "rules": rules}
    write(NAME, "KL of what is served from what was trained, by form", options.results, figures)
    print("| trained in | served as | KL, mean of seeds | standard deviation |\n|---|---|---|---|")
    for recipe, forms in kls.items():
        for form, found in sorted(forms.items(), key=lambda pair: fmean(pair[1])):
            print(f"| {recipe} | {form} | {fmean(found):.2e} | {stdev(found):.1e} |")


if __name__ == "__main__":
    main()
