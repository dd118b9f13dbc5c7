"""A run of a model with experts shows and logs their load; that of a dense model logs no more."""

from __future__ import annotations

import json
import re

import pytest

from megafp8.observe.experts import ExpertLoad, layer_of, loads_of, of_model, scalars, summary_of
from megafp8.report.page import run_page
from megafp8.report.record import read_run
from tests.report.test_report import data_of, text_of
from tests.train.runs import Place

EXPERTS = [
    "model.num_moe_experts=8", "model.moe_layer_freq=[0,1]", "model.bias=False",
    "model.moe_aux_loss_coeff=0.01", "model.moe_z_loss_coeff=0.001", "model.ffn_dropout=0.0",
]  # fmt: skip


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
    summary = json.loads((place.dir() / "summary.json").read_text())
    text = f"rarest history of an input: {updates[-1]:.0f} updates; MFU counts"
    assert text in summary["experts"] and f"experts  {summary['experts']}" in done.output

    page = run_page(read_run(place.dir()))
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

    done = place.run(*short, "exp_manager.name=dense")
    assert done.code == 0, done.output
    dense = {key for row in place.metrics("dense") for key in row}
    assert dense == {key for row in place.metrics() for key in row} - keys - {"aux_loss", "z_loss"}
    assert not re.search("fullest|experts|active", done.output)
    assert "Experts" not in text_of(run_page(read_run(place.dir("dense"))))


@pytest.mark.parametrize("key", ["experts/layer_x/empty", "experts/layer_1234567/empty", "loss"])
def test_other_keys_name_no_layer(key: str) -> None:
    assert layer_of(key) is None
