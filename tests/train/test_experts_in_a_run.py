"""A run of a model with experts shows and logs their load; that of a dense model logs no more."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megafp8.observe.experts import (
    EXPERTS_FILE,
    ExpertLoad,
    layer_of,
    loads_of,
    of_model,
    scalars,
    summary_of,
)
from megafp8.report.page import run_page
from megafp8.report.record import read_run
from tests.report.made import make_run
from tests.report.test_report import data_of, text_of
from tests.train.runs import Place

EXPERTS = [
    "model.num_moe_experts=8", "model.moe_layer_freq=[0,1]", "model.bias=False",
    "model.moe_aux_loss_coeff=0.01", "model.moe_z_loss_coeff=0.001", "model.ffn_dropout=0.0",
]  # fmt: skip
TOKENS = 128  # of a step


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_loads_are_of_layers_with_experts() -> None:
    loads = loads_of([[0, 0, 0, 0], [6, 0, 1, 1], [2, 2, 2, 2]])
    assert loads == {1: ExpertLoad(3.0, 0.25), 2: ExpertLoad(1.0, 0.0)}
    assert of_model(loads) == ExpertLoad(3.0, 0.125)
    assert scalars(loads) == {
        "experts/load_max": 3.0, "experts/empty": 0.125,
        "experts/layer_1/load_max": 3.0, "experts/layer_1/empty": 0.25,
        "experts/layer_2/load_max": 1.0, "experts/layer_2/empty": 0.0,
    }  # fmt: skip
    assert [layer_of(key) for key in ("experts/layer_12/empty", "experts/empty")] == [12, None]
    assert (scalars({}), of_model({}), summary_of(None, 3)) == ({}, None, None)
    assert ExpertLoad(3.0, 0.125).text() == "fullest expert 3.00 x the mean, 12.5 % empty"


def test_a_run_shows_its_experts(place: Place) -> None:
    short = ["trainer.max_steps=4", "trainer.val_check_interval=4"]
    done = place.run(*short, *EXPERTS)
    assert done.code == 0, done.output
    (header,) = re.findall("^peak for MFU: .*", done.output, re.M)
    assert header.endswith("; FLOPs are those of the active parameters")
    steps = [row for row in place.metrics() if "loss" in row]
    lines = [line for line in done.output.splitlines() if re.match(r"step +\d+/4 \| loss", line)]
    for row, line in zip(steps, lines, strict=True):
        assert f"| aux_loss {row['aux_loss']:.3f} | z_loss {row['z_loss']:.3f} |" in line
        load = ExpertLoad(row["experts/load_max"], row["experts/empty"])
        assert f"| {load.text()} |" in line
        assert row["experts/layer_1/load_max"] == load.largest
        assert 1 <= load.largest <= 4  # a token visits 2 of 8
    keys = {key for row in steps for key in row if key.startswith("experts/")}
    assert keys == {"experts/load_max", "experts/empty", "experts/least_updates",
                    "experts/layer_1/load_max", "experts/layer_1/empty"}  # fmt: skip
    updates = [row["experts/least_updates"] for row in steps]
    assert updates == sorted(updates) and 0 < updates[-1] <= 8  # two microbatches a step
    lines = read_lines(place.dir() / EXPERTS_FILE)
    assert [line["step"] for line in lines] == [row["step"] for row in steps]
    for row, line in zip(steps, lines, strict=True):
        assert set(line["tokens"]) == {"1"}  # layer 0 is dense
        tokens = line["tokens"]["1"]
        assert max(tokens) / 2 / TOKENS * 8 == row["experts/layer_1/load_max"]
        assert (len(tokens), sum(tokens)) == (8, 2 * TOKENS)  # a token visits 2 of 8
    summary = json.loads((place.dir() / "summary.json").read_text())
    text = f"rarest history of an input: {updates[-1]:.0f} updates; MFU counts"
    assert text in summary["experts"] and f"experts  {summary['experts']}" in done.output

    page = run_page(read_run(place.dir()))
    loads = data_of(page)["heats"]["experts"]
    assert loads["rows"] == [f"expert {number}" for number in range(8)]
    expected = [line["tokens"]["1"][5] * 4 / TOKENS for line in lines]
    assert loads["maps"]["layer 1"]["load"][5] == pytest.approx(expected, abs=5e-4)
    assert loads["steps"] == [1, 2, 3, 4] and "map-experts" in page
    titles = [chart["title"] for chart in data_of(page)["charts"]]
    assert [title for title in titles if "expert" in title or "router" in title] == [
        "balance of the router (aux_loss, 1 is even)",
        "router z-loss, without its coefficient",
        "tokens of the fullest expert over the mean",
        "experts without a token in a step, %",
        "updates of the rarest history of an expert's input",
    ]
    for words in ("Experts: load of each layer", "fullest expert", "FLOPs of active parameters"):
        assert words in text_of(page), words
    assert f"<td class=number>1<td class=number>{steps[-1]['experts/load_max']:.2f}" in page

    with open(place.dir() / EXPERTS_FILE, "a") as file:  # step 5, which is trained again
        file.write(json.dumps({"step": 5, "tokens": {"1": [0] * 8}}) + "\n")
    longer = ["trainer.max_steps=6", "trainer.val_check_interval=6"]
    back = "trainer.nonfinite_policy=rollback"
    done = place.run(*EXPERTS, *longer, back, fault=["nan_gradient", "final_norm.weight", [6], 1])
    assert done.code == 0 and "going back to step 4" in done.output, done.output
    after = read_lines(place.dir() / EXPERTS_FILE)
    assert after[:4] == lines and [line["step"] for line in after[4:]] == [5, 6]
    assert all(sum(line["tokens"]["1"]) == 2 * TOKENS for line in after)

    done = place.run(*short, "exp_manager.name=dense")
    assert done.code == 0, done.output
    dense = {key for row in place.metrics("dense") for key in row}
    assert dense == {key for row in place.metrics() for key in row} - keys - {"aux_loss", "z_loss"}
    assert not re.search("fullest|experts|active", done.output)
    dense_page = run_page(read_run(place.dir("dense")))
    assert "Experts" not in text_of(dense_page) and "experts" not in data_of(dense_page)["heats"]
    assert not (place.dir("dense") / EXPERTS_FILE).exists()


@pytest.mark.parametrize(
    "tokens",
    [
        {"1": [1, 2, 3]}, {"1": [1, -2, 3, 4]}, {"1": [1.5, 1, 1, 1]}, {"1": "many"},
        {"1": [0, 0, 0, 0]}, {"1": [True, 1, 1, 1]}, {"one": [1, 1, 1, 1]}, {}, {"1": [[1]] * 4},
        {"1": []}, {"2": []}, {"2": [1, 2]},
    ],
)  # fmt: skip
def test_the_map_leaves_out_counts_that_are_none(tmp_path: Path, tokens: object) -> None:
    good = {"step": 1, "tokens": {"1": [4, 0, 2, 2]}}
    with open(make_run(tmp_path / "run") / EXPERTS_FILE, "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in (good, {"step": 2, "tokens": tokens}))
    maps = data_of(run_page(read_run(tmp_path / "run")))["heats"]["experts"]["maps"]
    assert maps == {"layer 1": {"load": [[2.0, None], [0.0, None], [1.0, None], [1.0, None]]}}


@pytest.mark.parametrize("key", ["experts/layer_x/empty", "experts/layer_1234567/empty", "loss"])
def test_other_keys_name_no_layer(key: str) -> None:
    assert layer_of(key) is None
