"""Each published claim has two jobs that load and differ in nothing else, and its rule decides."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from fp8_numerics.formats import E4M3, E5M2
from megafp8.config.load import Source
from megafp8.fp8 import Cast, Recipe, Scales
from megafp8.fp8.recipes.nvfp4 import Nvfp4
from megafp8.jobs.configurations import comparison
from megafp8.specs.recipes import load_recipe
from tests.benchmarks.conftest import BENCHMARKS
from tests.report.made import make_run

CLAIMS = yaml.safe_load((BENCHMARKS / "claims.yaml").read_text())["claims"]
RECIPES = "benchmarks/claim_recipes.py"

orderings = pytest.mark.parametrize("benchmark", ["published_orderings"], indirect=True)


@orderings
@pytest.mark.parametrize("claim", CLAIMS, ids=[claim["id"] for claim in CLAIMS])
def test_the_jobs_of_a_claim_load_and_differ_in_nothing_else(
    benchmark: ModuleType, claim: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(BENCHMARKS.parent)
    shared, _ = benchmark.read_claims()
    named = {word.partition("=")[0] for word in claim["other"]}
    if claim["base"] != ["model.fp8=False"]:
        assert {word.partition("=")[0] for word in claim["base"]} >= named
        named |= {word.partition("=")[0] for word in claim["base"]}
    for width in shared["widths"]:
        given = [*benchmark.settings_of(claim), *benchmark.job_of(shared, width)]
        compared = comparison(given, claim["base"], Source())
        (other,) = compared.others
        changed = {line.partition(":")[0] for line in other.changed_from(compared.base)}
        assert changed, "a claim compares a job with itself"
        assert changed <= named | {"model.fp8_health"}
        assert other.values["model.hidden_size"] == width


def test_each_claim_says_where_it_is_stated_and_what_it_expects() -> None:
    assert len({claim["id"] for claim in CLAIMS}) == len(CLAIMS) >= 8
    for claim in CLAIMS:
        assert set(claim["source"]) == {"title", "where", "date", "read"}
        texts = (claim["says"], claim["published"], claim["differs"], *claim["source"].values())
        assert all(isinstance(text, str) and text for text in texts)
        assert claim["expected"] in ("above", "below", "equal")
        assert claim["size"] > 0


@orderings
@pytest.mark.parametrize(
    ("expected", "size", "interval", "word"),
    [
        ("above", 0.1, (0.01, 0.5), "hit"),
        ("above", 0.1, (0.01, 0.05), "hit"),  # a hit is asked for first
        ("above", 0.1, (-0.2, 0.09), "miss"),
        ("above", 0.1, (-0.5, -0.3), "miss"),
        ("above", 0.1, (-0.2, 0.2), "undecided"),
        ("above", 0.1, (math.inf, math.inf), "hit"),
        ("below", 0.1, (-0.5, -0.01), "hit"),
        ("below", 0.1, (-0.09, 0.2), "miss"),
        ("below", 0.1, (0.3, 0.5), "miss"),
        ("below", 0.1, (-0.2, 0.2), "undecided"),
        ("below", 0.1, (math.inf, math.inf), "miss"),
        ("equal", 0.25, (-0.25, 0.25), "hit"),
        ("equal", 0.25, (0.1, 0.2), "hit"),
        ("equal", 0.25, (0.26, 0.4), "miss"),
        ("equal", 0.25, (-0.4, -0.26), "miss"),
        ("equal", 0.25, (-0.3, 0.1), "undecided"),
        ("equal", 0.25, (math.inf, math.inf), "miss"),
        ("above", 0.1, (-math.inf, math.inf), "undecided"),
    ],
)
def test_the_rule_decides_planted_intervals(
    benchmark: ModuleType,
    expected: str,
    size: float,
    interval: tuple[float, float],
    word: str,
) -> None:
    assert benchmark.decide(expected, size, interval) == word


@orderings
def test_equal_losses_of_models_that_learned_nothing_are_undecided(benchmark: ModuleType) -> None:
    assert benchmark.decide("equal", 0.25, (-0.1, 0.1), has_learned=False) == "undecided"
    assert benchmark.decide("equal", 0.25, (0.3, 0.4), has_learned=False) == "miss"
    assert benchmark.decide("above", 0.1, (0.3, 0.4), has_learned=False) == "hit"


@orderings
def test_widths_that_disagree_are_undecided_together(benchmark: ModuleType) -> None:
    assert benchmark.overall(["hit", "hit"]) == "hit"
    assert benchmark.overall(["miss", "miss"]) == "miss"
    assert benchmark.overall(["hit", "undecided"]) == "undecided"
    assert benchmark.overall(["hit", "miss"]) == "undecided"


def figures(mean: float, half: float | None, num_seeds: int) -> dict[str, Any]:
    gaps = {str(seed): mean for seed in range(num_seeds)}
    return {"figures": {"gaps": gaps, "mean": mean, "half_width": half}}


@orderings
def test_an_interval_is_of_all_seeds_or_above_all_numbers(benchmark: ModuleType) -> None:
    low, high = benchmark.interval_of(figures(0.01, 0.002, 5), 5)
    assert (low, high) == pytest.approx((0.8, 1.2))
    above_all = (math.inf, math.inf)
    assert benchmark.interval_of(figures(0.01, 0.002, 4), 5) == above_all
    assert benchmark.interval_of(figures(math.nan, math.nan, 5), 5) == above_all
    assert benchmark.interval_of({"figures": None}, 5) == above_all
    assert benchmark.interval_of(figures(0.01, None, 1), 1) == (-math.inf, math.inf)


def plant(benchmark: ModuleType, folder: Path, name: str, *gaps: tuple[float, float]) -> None:
    """Write a result of a claim with these mean gaps and half widths, in %, at each width."""
    shared, claims = benchmark.read_claims()
    claim, widths = claims[name], {}
    for width, (mean, half) in zip(shared["widths"], gaps, strict=True):
        found = figures(mean / 100, half / 100, 5)
        interval = benchmark.interval_of(found, 5)
        word = benchmark.decide(claim["expected"], claim["size"], interval)
        losses = {"baseline-11": 4.0, "given-11": 4.0 * (1 + mean / 100)}
        widths[str(width)] = {"word": word, "val_loss": losses, **found}
    result = {
        "claim": claim,
        "frozen": benchmark.frozen(shared, claim),
        "widths": widths,
        "seeds": shared["seeds"],
        "cpu": "a CPU",
        "versions": {"torch": "2.13.0"},
    }
    (folder / f"2026-12-01_ordering-{name}.json").write_text(json.dumps(result))


@orderings
def test_the_table_has_gaps_trends_outcomes_and_counts(
    benchmark: ModuleType, tmp_path: Path
) -> None:
    shared, claims = benchmark.read_claims()
    assert benchmark.table([], claims) == ["there are no results yet"]
    plant(benchmark, tmp_path, "four-over-six", (-0.2, 0.1), (0.3, 0.1))
    plant(benchmark, tmp_path, "nvfp4-all-layers", (1.0, 0.1), (math.nan, math.nan))
    plant(benchmark, tmp_path, "mxfp8-beside-bf16", (0.4, 0.1), (0.45, 0.1))
    plant(benchmark, tmp_path, "mxfp8-e5m2-gradients", (0.05, 0.2), (0.01, 0.09))
    found = benchmark.read_results(tmp_path, shared, claims)
    rows = benchmark.table(found, claims)
    equal, gradients, all_layers, better_scale = rows[2:6]
    gaps = "+0.40 % (+0.30 to +0.50), +0.0160 nats, **miss** | +0.45 % (+0.35 to +0.55), "
    assert gaps in equal
    assert equal.endswith("| none seen (+0.05 ± 0.14) | **miss** |")
    assert all_layers.endswith("no number, **hit** | – | **hit** |")
    assert better_scale.endswith("rises (+0.50 ± 0.14) | **undecided** |")
    assert "(-0.15 to +0.25), +0.0020 nats, **undecided** (about 6 seeds would decide)" in gradients
    assert "(-0.08 to +0.10), +0.0004 nats, **undecided** |" in gradients  # as narrow as asked for
    assert f"4 of {len(claims)} claims were tried: 1 hit, 1 miss, 2 undecided." in rows
    assert any("arXiv 2512.02010v3" in row for row in rows)
    assert rows[-1] == "Made on: a CPU, torch 2.13.0."


@orderings
def test_a_claim_that_changed_after_its_runs_ends_the_program(
    benchmark: ModuleType, tmp_path: Path
) -> None:
    plant(benchmark, tmp_path, "four-over-six", (-0.2, 0.1), (0.3, 0.1))
    shared, claims = benchmark.read_claims()
    claims["four-over-six"]["size"] = 0.05
    with pytest.raises(SystemExit, match=r"ordering-four-over-six\.json.*claims are frozen"):
        benchmark.read_results(tmp_path, shared, claims)


@orderings
def test_a_shorter_job_is_no_evidence(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["published_orderings.py", "--steps", "20"])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert "give --results FOLDER too" in capsys.readouterr().err


@orderings
def test_finished_runs_with_the_same_settings_are_taken_from_another_claim(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(BENCHMARKS.parent)
    shared, claims = benchmark.read_claims()
    one, other = claims["mxfp8-beside-bf16"], claims["mxfp8-e5m2-gradients"]
    place = benchmark.folder_of(shared, one, 128, tmp_path)
    for label in ("baseline", "given"):
        for seed, status in ((11, "finished"), (12, "running")):
            run = make_run(place / f"{label}-{seed}")
            (run / "checkpoints/step_00000500").mkdir(parents=True)
            (run / "run.json").write_text(json.dumps({"status": status}))
            (run / "config.yaml").write_text(f"explicit_log_dir: {run}\n")
    benchmark.take_equal_runs(shared, claims, other, 128, tmp_path)
    folder = benchmark.folder_of(shared, other, 128, tmp_path)
    assert {path.name for path in folder.iterdir()} == {"baseline-11", "compare-input.json"}
    copied, of_run = folder / "baseline-11", {path.name for path in (place / "given-11").iterdir()}
    assert {path.name for path in copied.iterdir()} == of_run - {"checkpoints"}
    assert (copied / "config.yaml").read_text() == f"explicit_log_dir: {copied}\n"
    benchmark.take_equal_runs(shared, claims, other, 256, tmp_path)
    assert not benchmark.folder_of(shared, other, 256, tmp_path).exists()


@orderings
@pytest.mark.parametrize("again", [b"tensors", b"others"])
def test_a_repeated_run_is_compared_by_the_tensors_that_it_leaves(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bytes
) -> None:
    shared, claims = benchmark.read_claims()
    claim = claims["four-over-six"]
    place = benchmark.folder_of(shared, claim, 128, tmp_path)

    def save(folder: Path, tensors: bytes) -> None:
        for name in ("baseline-11", "given-11"):
            checkpoint = folder / name / "checkpoints/step_00000500"
            checkpoint.mkdir(parents=True, exist_ok=True)
            (checkpoint / "rank0.safetensors").write_bytes(tensors)
            (checkpoint / "manifest.json").write_text(f"saved in {folder}")

    def train(once: dict[str, Any], claim: dict[str, Any], width: int, runs: Path, _: int) -> None:
        assert once["seeds"] == [11]
        save(benchmark.folder_of(once, claim, width, runs), again)

    monkeypatch.setattr(benchmark, "train", train)
    with pytest.raises(SystemExit, match="has no checkpoint of seed 11"):
        benchmark.repeat(shared, claim, 128, tmp_path, 2)
    save(place, b"tensors")
    digests = benchmark.repeat(shared, claim, 128, tmp_path, 2)
    assert set(digests) == {"baseline-11", "given-11"}
    shutil.rmtree(place / "baseline-11/checkpoints")  # as of a run that was taken
    assert set(benchmark.repeat(shared, claim, 128, tmp_path, 2)) == {"given-11"}
    for first, second in digests.values():
        assert (first == second) is (again == b"tensors")


def draw(shape: tuple[int, ...]) -> torch.Tensor:
    raise AssertionError("weights and inputs are not rounded at random")


def values(recipe: Recipe, x_MK: torch.Tensor) -> torch.Tensor:
    """Return what an input is in the product of the forward pass."""
    made = recipe.cast(
        x_MK, Cast("input", Scales(1, 16, has_outer=True), E4M3, False, "last", None, draw)
    )
    assert made.outer is not None
    return made.payload.float() * made.dequant_scale.repeat_interleave(16, 1) * made.outer


def test_the_better_of_two_scales_keeps_three_quarters_of_the_largest() -> None:
    """The example of arXiv 2512.02010: E2M1 has 1 to 4, and nothing at 4.5."""
    x_MK = torch.tensor([10.0, 20.0, 30.0, 40.0]).repeat(4, 4)
    ours = load_recipe(str(BENCHMARKS / "claim_recipes.py") + ":FourOverSix")
    torch.testing.assert_close(values(ours, x_MK), x_MK)
    assert float((values(Nvfp4(), x_MK) - x_MK).abs().max()) > 3


def test_gradients_in_e5m2_fill_its_range() -> None:
    recipe = load_recipe(str(BENCHMARKS / "claim_recipes.py") + ":Mxfp8WithE5m2Gradients")
    x_MK = torch.randn(8, 64, generator=torch.Generator().manual_seed(6))
    made = recipe.cast(x_MK, Cast("grad_output", Scales(1, 32), E5M2, True, "last", None, draw))
    assert made.payload.dtype == torch.float8_e5m2
    largest = made.payload.float().abs().unflatten(1, (-1, 32)).amax(-1)
    assert bool((largest > E5M2.max / 2 * 0.8).all())
    assert recipe.traits.backward_formats == ("e5m2",)
