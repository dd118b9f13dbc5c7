"""The command that plans a job, as a user calls it."""

from __future__ import annotations

import html
import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.plan_published import pair_ratios
from megafp8.cli import plan
from megafp8.cli.plan import main, make_plan, spec_of
from megafp8.cli.plan_text import UNCERTAINTY
from megafp8.config.layers import conf_dir
from megafp8.config.overrides import preset_names
from megafp8.plan.hardware import H100, Hardware
from megafp8.plan.published import PAIRS, rows
from megafp8.plan.search import Found, search
from megafp8.specs import RunSpec
from megafp8.specs.te_versions import DEFAULT_VERSION
from tests.config.test_presets import PARAMETERS

PUBLISHED = Path(__file__).parents[2] / "docs" / "evidence" / "published.md"
JOB = ["model=gpt3_5b", "model.fp8=True", "trainer.devices=8", "hardware=h200"]


@pytest.fixture(autouse=True, scope="module")
def searched_once() -> Iterator[None]:
    """Search the layouts of a job once: many tests ask for those of the same job."""
    real, known = plan.best_layouts, list[tuple[RunSpec, Hardware, list[Found]]]()

    def once(spec: RunSpec, hardware: Hardware) -> list[Found]:
        for asked, gpu, found in known:
            if (asked, gpu) == (spec, hardware):
                return found
        known.append((spec, hardware, real(spec, hardware)))
        return known[-1][2]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "best_layouts", once)
        yield


def test_a_plan_shows_memory_messages_time_and_a_verdict(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(JOB) == 0
    out = capsys.readouterr().out
    assert "layout: 8 x H200 SXM = tensor 1 x context 1 x data 8 x pipeline 1" in out
    assert "vocabulary 50304 (of GPT-2; --vocab-size gives another)" in out
    for row in ("FP32 master weights", "fits: the largest rank needs", "products of linears"):
        assert row in out
    said = "FP8 pays here: 1.38 times BF16's speed is predicted (published pairs of runs are within"
    assert said in out
    assert "No time here has been measured on a GPU." in out


SMALL = ["model=gpt3_125m", "model.fp8=True", "trainer.devices=8"]


def test_a_ratio_within_the_uncertainty_is_undecided(capsys: pytest.CaptureFixture[str]) -> None:
    """Public runs of this size were slower in FP8, where more than BF16's speed is predicted."""
    assert main(SMALL) == 0
    out = capsys.readouterr().out
    assert "\nFP8 pays" not in out
    assert "Whether FP8 pays here is undecided: " in out and "by up to 1.23 times" in out
    for words, verdict in ((SMALL, "undecided"), (JOB, "pays")):
        assert main([*words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["verdict"] == verdict


def test_the_uncertainty_is_the_largest_difference_to_published_pairs() -> None:
    """No pair of runs that is known differs by more, and one does by as much."""
    factors = {name: ours / theirs for name, (ours, theirs) in pair_ratios().items()}
    worst = max(max(factor, 1 / factor) for factor in factors.values())
    assert worst <= UNCERTAINTY < worst + 0.01, factors
    page = PUBLISHED.read_text()
    for name, (ours, theirs) in pair_ratios().items():
        row = f"| {name} | {ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} |"
        assert row in page, row


def test_the_readme_names_the_range_of_predicted_speeds() -> None:
    root = Path(__file__).parents[2]
    rows = [line.split("|")[1:-1] for line in PUBLISHED.read_text().splitlines()]
    speeds = ("TFLOP/s of one GPU", "tokens/s of one GPU", "utilization of the BF16 peak")
    ratios = [float(row[-1]) for row in rows if len(row) == 5 and row[1].strip().startswith(speeds)]
    assert len(ratios) == 14
    said = " ".join((root / "README.md").read_text().split())
    assert f"speeds were {min(ratios):.2f} to {max(ratios):.2f} of published ones" in said


UNPUBLISHED = ("default", "moe_tiny")
PRESETS = [name for name in preset_names("model", [conf_dir()]) if name not in UNPUBLISHED]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_planned_with_its_own_vocabulary(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """All parameters are then as many as published; the presets of GPT-3 have GPT-2's tokens."""
    main([f"model={name}", "--json"])
    assert json.loads(capsys.readouterr().out)["num_params"] == PARAMETERS[name]
    main([f"model={name}"])
    families = {"llama3": "128256 (of Llama 3;", "qwen3": "151936 (of Qwen3;"}
    families |= {"mistral": "32768 (of Mistral 7B v0.3;", "gpt3": "50304 (of GPT-2;"}
    families |= {"mixtral": "32000 (of Mixtral 8x7B;"}
    whose = next(said for family, said in families.items() if name.startswith(family))
    assert f"vocabulary {whose} --vocab-size gives another)" in capsys.readouterr().out


def test_a_model_with_experts_gets_a_plan_without_a_verdict(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its active parameters are those that the preset's test counts by hand."""
    job = ["model=moe_tiny", "model.fp8=True", "model.fp8_recipe=mxfp8", "hardware=b200"]
    assert main(job) == 0
    out = capsys.readouterr().out
    assert "17.1M parameters of which a token visits 14.7M" in out
    assert (
        "experts: 8 of width 128 in 4 of 4 layers, 2 of them for a token; an expert has 256 rows "
        "of a microbatch in the mean; FP8 products have a multiple of 32 rows" in out
    )
    assert "Each rank has all experts" in out and "computes as many" not in out
    assert "not predicted: the times of experts are lower bounds" in out
    assert "That is a lower bound: no GPU has run experts here" in out
    assert main([*job, "model.num_moe_experts=256", "model.micro_batch_size=1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] is found["fp8_over_bf16"] is None
    assert found["experts"]["mean"] == 2 and found["experts"]["multiple"] == 32
    fewer = found["num_params"] - found["num_active_params"]
    assert fewer == 4 * (256 - 2) * 3 * 256 * 128


def test_few_rows_of_experts_and_layouts_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["model=moe_tiny", "model.fp8=True", "trainer.devices=2", "model.num_moe_experts=256"]
    assert main([*job, "model.micro_batch_size=1", "--search"]) == 0
    out = capsys.readouterr().out
    assert "an expert has 2 rows of a microbatch in the mean; FP8 products have a multiple" in out
    assert "note: experts with fewer rows than that compute as many" in out
    assert "layouts that fit" in out and "model.fsdp=True" not in out


def test_a_given_vocabulary_wins_over_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    main(["model=llama3_8b", "--vocab-size", "1000"])
    assert "vocabulary 1024\n" in capsys.readouterr().out
    main(["model=llama3_8b", "model.tokenizer.vocab_size=300"])
    whose = "(of model.tokenizer.vocab_size=300; --vocab-size gives another)"
    assert f"vocabulary 384 {whose}" in capsys.readouterr().out
    main(["model=llama3_8b", "model.data.data_prefix=/data/mine"])
    assert "vocabulary 50304 (of GPT-2;" in capsys.readouterr().out


def test_fp8_lm_gets_no_verdict_on_speed(capsys: pytest.CaptureFixture[str]) -> None:
    """Its passes over states in low precision have no predicted time."""
    assert main([*JOB, "model.optim.fp8_opt_level=O2"]) == 0
    out = capsys.readouterr().out
    assert "pays" not in out and "less memory on the largest rank. Whether it is faster" in out
    assert "are counted as those of FP32 states" in out
    assert "FP32 master" not in out and "FP32 gradients" not in out
    assert "\nmaster weights" in out and "\ngradients" in out
    assert main([*JOB, "model.optim.fp8_opt_level=O2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fp8_over_bf16"] is None


def test_a_rule_in_torch_gets_no_verdict_on_speed(capsys: pytest.CaptureFixture[str]) -> None:
    """The kernels whose times are counted do not exist."""
    recipe = Path(__file__).parents[1] / "own_recipes" / "simulated_int8.py"
    assert main([*JOB, f"model.fp8_recipe={recipe}"]) == 0
    out = capsys.readouterr().out
    assert "pays" not in out and "Int8 (simulated_int8.py): " in out
    assert "faster than BF16 is not predicted: its rule is in torch operations" in out


@pytest.mark.parametrize(
    ("recipe", "hardware", "reason"),
    [
        ("mxfp8", "h200", "its products are emulated on H200 SXM"),
        ("mxfp8", "b200", None),
        ("blockwise", "b200", None),  # by Transformer Engine
        ("nvfp4", "b200", "none of FP4 are known here"),
    ],
)
def test_what_tensor_cores_do_not_run_gets_no_verdict_on_speed(
    capsys: pytest.CaptureFixture[str], recipe: str, hardware: str, reason: str | None
) -> None:
    words = [word for word in JOB if not word.startswith("hardware")]
    assert main([*words, f"model.fp8_recipe={recipe}", f"hardware={hardware}"]) == 0
    out = capsys.readouterr().out
    assert ("is not predicted" in out) == (reason is not None)
    assert reason is None or reason in out


def test_a_job_that_does_not_fit_says_so_in_its_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["model=gpt3_175b", "trainer.devices=8", "hardware=h100"]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "DOES NOT FIT: the largest rank needs" in out


def test_a_job_that_does_not_fit_gets_no_time_and_no_verdict(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.html"
    words = ["model=gpt3_175b", "model.fp8=True", "trainer.devices=8", "--page", str(path)]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "No time is predicted for a job that does not fit." in out
    assert "more memory on the largest rank" in out
    for text in (out, path.read_text().partition("<body>")[2]):
        for word in ("pays", "undecided", "tokens/s", "predicted time", "Predicted time"):
            assert word not in text, word
    assert main([*words[:3], "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] is None


def test_a_search_plans_the_best_layout_where_the_one_asked_for_does_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["model=llama3_8b", "model.fp8=True", "trainer.devices=8", "--search"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith("The layout that was asked for DOES NOT FIT: its largest rank needs")
    assert "\nfits: the largest rank needs" in out and "predicted time of a step" in out


def test_the_same_figures_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, "--json", "--search", "--vocab-size", "50257", "--tokens", "1e9"]) == 0
    plan = json.loads(capsys.readouterr().out)
    parts = plan["step_seconds"]
    total = parts.pop("total")
    assert sum(parts.values()) == pytest.approx(total)
    assert plan["days"] == pytest.approx(1e9 / plan["tokens_per_second"] / 86400)
    assert plan["fp8_over_bf16"] == pytest.approx(plan["bf16_step_seconds"] / total)
    assert plan["ranks"][0]["total"] < plan["usable_bytes"]
    assert len(plan["layouts"]) == 8
    for layout in plan["layouts"]:
        assert main([*JOB, *layout["overrides"]]) == 0, "a listed layout is a job that runs"


def test_a_page_has_a_bar_for_each_rank_and_precision(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    assert main([*JOB, "model.pipeline_model_parallel_size=4", "--page", str(path)]) == 0
    text = path.read_text()
    bars = re.findall(r"<div class=bar>(.+?)<b>(.+?)</b>", text)
    assert [name for name, _ in bars] == [
        "stage rank 0", "stage rank 1", "stage rank 3", "FP8", "BF16",
    ]  # fmt: skip
    for name, total in bars:
        assert f"<th class=number>{name}" in text and f"<td class=number>{total}" in text
    assert "http" not in text, "the page needs no network"


def test_a_page_begins_with_its_verdict_and_names_its_command(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    assert main([*JOB, "--search", "--page", str(path)]) == 0
    body = html.unescape(path.read_text().partition("</h1>")[2])
    assert body.startswith("<div class='verdict same'><div><span>fits: the largest rank needs")
    assert f"<pre>megafp8 plan {' '.join(JOB)} --search --page {path}</pre>" in body
    assert re.search(r"Written by megafp8 \S+ on 20\d\d-\d\d-\d\d \d\d:\d\d UTC", body)
    colors = re.findall(r"swatch style='background:(#\w+)'", body)
    assert len(colors) > 8 and len(set(colors)) == len(colors), "two parts have one color"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hardware=mi300"], "hardware=mi300: is not known"),
        (["hardware.memory_gib=1e400"], "hardware.memory_gib=inf: must be above 0"),
        (["--vocab-size", "99999999999999999999"], "is not a size from 1 to 16777216"),
        (["hardware.memory_gib=much"], "hardware.memory_gib=much: is not a number"),
        (["hardware="], "hardware=: has no value"),
        (["--vocab-size", "0"], "--vocab-size=0: is not a size"),
        (["--tokens", "0"], "--tokens=0: is no number of tokens"),
        (["--tokens=-1e9"], "--tokens=-1e9: is no number of tokens"),
        (["--tokens", "nan"], "--tokens=nan: is no number of tokens"),
        (["--tokens", "T"], "--tokens=T: is no number of tokens. Give 3e11 or 300B"),
        (["--vocab-size", "all"], "argument --vocab-size: invalid int value: 'all'. --help"),
        (
            ["model=gpt3_5b", "--gpus", "64"],
            "unrecognized arguments: --gpus 64. Settings are written without dashes. "
            "Did you mean trainer.devices?",
        ),
        (["trainer.accelerator=cpu"], "trainer.accelerator=cpu: a plan is for GPUs"),
        (["model.te_version=2.16.0"], "model.te_version=2.16.0: chooses the version of"),
        (["model.fp8_backend=te", "model.te_version=2.3.0"], "2.3.0 is too old: it must be 2.4"),
        (["model.hiden_size=3"], "model.hiden_size"),
        (["trainer.devices=3", "model.tensor_model_parallel_size=2"], "is not a multiple of it"),
        (["--page", "/nowhere/plan.html"], "--page=/nowhere/plan.html"),
    ],
)
def test_bad_input_is_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, "there is no usage text"
    assert said in error


def test_a_plan_is_for_a_version_of_transformer_engine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the one that is asked for, or else is installed, or else the default.

    Versions before 2.16 keep copies of all weights that FSDP gathers, 2 bytes an element.
    """

    def planned(*words: str) -> tuple[str, int]:
        job = ["trainer.devices=8", "model.global_batch_size=32", "model.fp8=True"]
        job += ["model.fsdp=True", "model.fp8_backend=te"]
        plan = make_plan(spec_of([*job, *words], None).spec, H100)
        assert main([*job, *words]) == 0
        (note,) = (line for line in capsys.readouterr().out.split("\n") if "planned for" in line)
        return note, plan.ranks[0].step.weight_copies

    note, copies = planned()
    assert f"planned for {DEFAULT_VERSION}" in note and copies > 0
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.20.2")
    note, none = planned()
    assert "planned for 2.20.2" in note and none == 0
    assert planned("model.te_version=2.15.0")[1] == copies


@pytest.mark.parametrize(("text", "tokens"), [("15T", 15e12), ("300b", 3e11), ("1e9", 1e9)])
def test_tokens_may_have_a_suffix(
    text: str, tokens: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*JOB, "--tokens", text, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["days"] == pytest.approx(tokens / plan["tokens_per_second"] / 86400)


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        (["trainer.num_nodes=2", "trainer.devices=8"], []),
        (
            ["trainer.num_nodes=2", "trainer.devices=8", "model.tensor_model_parallel_size=16"],
            ["tensor parallelism of 16 crosses nodes of 8: "],
        ),
        (
            ["trainer.num_nodes=2", "trainer.devices=6", "model.tensor_model_parallel_size=4",
             "model.global_batch_size=192"],
            ["tensor parallelism of 4 crosses nodes of 6: "],
        ),
        (["trainer.devices=64"], ["trainer.devices=64 are taken to be joined by links of 450 GB/s "
                                  "within one node, but a node of H100 SXM has 8: "
                                  "trainer.num_nodes=8 trainer.devices=8 plans"]),
        (["trainer.devices=64", "hardware.memory_gib=94"], ["trainer.devices=64 are taken"]),
        (["trainer.devices=16", "hardware=mine", "hardware.bf16_tflops=1000",
          "hardware.fp8_tflops=2000", "hardware.memory_gib=94", "hardware.memory_gb_s=4000"], []),
    ],
)  # fmt: skip
def test_an_unusual_layout_is_noted(
    words: list[str], notes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["model=gpt3_5b", *words, "--json"])
    found = json.loads(capsys.readouterr().out)["notes"]
    assert len(found) == len(notes)
    main(["model=gpt3_5b", *words])
    text = capsys.readouterr().out
    for note, said in zip(found, notes, strict=True):
        assert note.startswith(said) and f"note: {note}" in text


def test_a_search_that_finds_layouts_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=gpt3_5b", "model.fp8=True", "trainer.devices=2"]
    assert main(words) == 1
    assert main([*words, "--search"]) == 0
    out = capsys.readouterr().out
    assert "DOES NOT FIT" in out and "layouts that fit" in out


LAYOUT = [
    "model.tensor_model_parallel_size=2",
    "model.pipeline_model_parallel_size=2",
    "model.virtual_pipeline_model_parallel_size=2",
    "model.pipeline_schedule=InterleavedZeroBubble",
    "model.activations_checkpoint_granularity=selective",
    "trainer.accelerator=gpu",
]


def with_layout_of(words: list[str], overrides: list[str]) -> list[str]:
    """The words of a command with a layout's settings, which replace those of the same keys."""
    keys = {word.partition("=")[0] for word in overrides}
    return [word for word in words if word.partition("=")[0] not in keys] + overrides


def test_a_search_replaces_the_layout_of_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It finds what it finds without one, and each layout runs with the words of the command."""
    for words in (JOB, [*JOB, *LAYOUT]):
        assert main([*words, "--search", "--json"]) == 0
    plain, with_layout = capsys.readouterr().out.split("\n}\n{")
    plain, with_layout = json.loads(plain + "}"), json.loads("{" + with_layout)
    seconds = [layout["step_seconds"] for layout in plain["layouts"]]
    assert [layout["step_seconds"] for layout in with_layout["layouts"]] == seconds
    for layout in with_layout["layouts"]:
        assert main([*with_layout_of([*JOB, *LAYOUT], layout["overrides"]), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["step_seconds"]["total"] == pytest.approx(layout["step_seconds"])


LARGE = [
    "model=gpt3_175b",
    "model.num_layers=24",
    "model.fp8=True",
    "trainer.num_nodes=64",
    "trainer.devices=8",
    "model.sequence_parallel=True",
    "model.tensor_model_parallel_size=8",
    "model.pipeline_model_parallel_size=8",
    "model.virtual_pipeline_model_parallel_size=3",
    "model.optim.name=distributed_fused_adam",
]


def test_a_search_tries_several_stages_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """No layout is left out that differs from a listed one in the number of stages alone."""
    assert main([*LARGE, "--search", "--json"]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert main([*LARGE, "model.micro_batch_size=2", "--json"]) == 0
    asked = json.loads(capsys.readouterr().out)["step_seconds"]["total"]
    assert layouts[0]["step_seconds"] <= asked
    best = layouts[0]["overrides"]
    virtual = "model.virtual_pipeline_model_parallel_size"
    assert any(word.startswith(virtual) and not word.endswith("null") for word in best)
    assert main([*with_layout_of(LARGE, best), "--json"]) == 0, "a run would take it"
    found = json.loads(capsys.readouterr().out)
    assert found["step_seconds"]["total"] == pytest.approx(layouts[0]["step_seconds"])
    assert max(rank["total"] for rank in found["ranks"]) == layouts[0]["bytes"]
    for stages in (1, 2, 3):
        words = with_layout_of(with_layout_of(LARGE, best), [f"{virtual}={stages}"])
        assert main([*words, "--json"]) in (0, 1)
        other = json.loads(capsys.readouterr().out)
        assert not other["fits"] or other["step_seconds"]["total"] >= layouts[0]["step_seconds"]
    others = [[word for word in layout["overrides"] if virtual not in word] for layout in layouts]
    assert len({tuple(words) for words in others}) == len(layouts), "each is listed once"


def test_slower_published_pairs_stand_beside_the_prediction(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The page about recipes has all of them; the plan has the range and the slowest."""
    page = (Path(__file__).parents[2] / "docs/guide/fp8.md").read_text("utf-8")
    assert "\n".join(rows()) in page
    assert sum(pair.ratio < 1 for pair in PAIRS) >= 6
    said = "published pairs of {} and BF16 on such a GPU: {} times the speed; the slowest: {} "
    for hardware, recipe, span, slowest in (
        ("b200", "mxfp8", "0.75 to 1.28", "mixture of experts"),
        ("b200", "nvfp4", "1.37", "the same job, last layers in BF16"),
        ("h200", "delayed", "0.49 to 1.42", "GPT 1.5B"),
    ):
        assert main([*JOB, f"model.fp8_recipe={recipe}", f"hardware={hardware}"]) == 0
        assert said.format(recipe, span, slowest).strip() in capsys.readouterr().out
    main([*JOB, "model.fp8_recipe=blockwise", "hardware=h100"])
    assert "published pairs of blockwise" not in capsys.readouterr().out


def test_a_search_needs_no_layout_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """8 replicas do not divide a batch of 12 samples."""
    words = ["model=gpt3_5b", "model.fp8=True", "trainer.devices=8", "model.global_batch_size=12"]
    assert main(words) == 2
    assert "Nearest global batch sizes: 8 or 16" in capsys.readouterr().err
    assert main([*words, "--search"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Refused: model.global_batch_size=12")
    assert "layout: 8 x H100 SXM" in out and "8. " in out
    best = next(line for line in out.splitlines() if line.strip().startswith("model.tensor"))
    assert main([*words, *best.split()]) == 0
    capsys.readouterr()
    assert main([*words, "--search", "--layout", "2"]) == 0
    second = capsys.readouterr().out
    assert "settings of layout 2, for the command line" in second and best not in second
    assert main([*words, "--search", "--layout", "9"]) == 2
    assert "--layout=9: there are 8 layouts" in capsys.readouterr().err
    assert main([*words, "model.num_layers=7.5", "--search"]) == 2
    assert "model.num_layers" in capsys.readouterr().err


def test_a_plan_on_a_terminal_has_no_sentence_that_is_wider_than_100_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(JOB) == 0
    piped = capsys.readouterr().out
    assert max(map(len, piped.splitlines())) > 150
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(JOB) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100 and shown.split() == piped.split()
    assert main([*JOB, "--layout", "1"]) == 2
    assert "--layout=1: has no effect without --search" in capsys.readouterr().err


def test_a_search_that_finds_nothing_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model=gpt3_175b", "trainer.devices=2", "--search"]) == 1
    assert "No layout of these ranks fits" in capsys.readouterr().out


def test_the_page_has_the_lines_that_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.html"
    assert main([*JOB, "--tokens", "3e11", "--search", "--page", str(path)]) == 0
    text = html.unescape(path.read_text())
    words = " ".join(re.sub(r"<[^>]+>", " ", text).split())
    for line in capsys.readouterr().out.partition("layouts that fit")[0].splitlines():
        for part in re.split(r" {2,}", line):
            assert part in words, part
    assert "(--tokens)" in text and "the fastest first" in text and text.count("<li>") == 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Figures are those of our own layers"),
        (["model.fp8_backend=native"], "Figures are those of our own layers"),
        (["model.fp8_backend=te"], "Backend te"),
        (["model.fp8_backend=torchao", "model.fp8_recipe=tensorwise"], "Backend torchao"),
    ],
)
def test_the_backend_is_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["model=gpt3_1.3b", "model.fp8=True", *words])
    assert said in capsys.readouterr().out


def test_a_plan_needs_no_torch() -> None:
    program = (
        "import sys; from megafp8.cli.plan import main; main(['model=gpt3_5b']); "
        "raise SystemExit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_takes_fsdp_in_a_pipeline_that_a_search_proposes() -> None:
    """Each of these layouts resolves as a job, with FSDP and the pipeline that was found."""
    words = ["model=llama3_8b", "model.fp8=True", "trainer.num_nodes=2", "trainer.devices=8"]
    words += ["trainer.accelerator=gpu", "model.global_batch_size=64"]
    asked = spec_of(words, 128256)
    found = search(asked.spec, H100)
    chosen = [f for f in found if f.spec.parallel.fsdp is not None and f.spec.parallel.pp > 1]
    schedules = {}
    for layout in chosen:
        schedules.setdefault(layout.spec.parallel.pipeline.schedule, layout)
    assert set(schedules) == {"1F1B", "Interleaved1F1B"}
    for layout in schedules.values():
        spec = spec_of([*words, *layout.overrides()], 128256).spec
        assert spec.parallel == layout.spec.parallel and spec.parallel.fsdp is not None
