"""Reports have the figures of their runs, and name what they cannot read."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megafp8.cli import report
from megafp8.report.curves import Curve, charts, heat_maps, points
from megafp8.report.page import differing_settings, run_page, runs_page
from megafp8.report.record import MOST_STEPS, read_run
from megafp8.report.writer import REPORT_FILE, Reporter
from megafp8.runs.lock import RunLock
from tests.report.made import NAMES, loss_at, make_run

MEBIBYTE = 2**20


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id=data>(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def text_of(page: str) -> str:
    """Return the visible text of a page, without its scripts and styles."""
    page = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]+>", "\n", page))


def test_the_page_of_a_run_has_its_figures(tmp_path: Path) -> None:
    page = run_page(read_run(make_run(tmp_path / "first")))
    text = text_of(page)
    for figure in (
        "finished, step 100 of 100", "2.2345", "9.34", "1.011", "2.2789", "4.32k", "37.5 %",
        "1.0 GiB", "75.0 %", "1:01", "model.fp8", "command line", "a </script> b",
        "once upon", " a <time>", "python pretrain_gpt.py model.fp8=True",
    ):  # fmt: skip
        assert figure in text, figure
    data = data_of(page)
    loss = data["charts"][0]
    assert loss["title"] == "loss, nats per token"
    training, validation = loss["series"]
    assert training["x"] == [1, *range(10, 101, 10)]
    assert training["y"] == [float(f"{loss_at(step):.5g}") for step in training["x"]]
    assert (validation["x"], validation["y"]) == ([100], [2.2345])
    assert "model FLOPs utilization (MFU), %" in [chart["title"] for chart in data["charts"]]
    heat = data["heats"]["health"]
    assert heat["rows"] == ["0.attention.qkv", "0.mlp.fc1", "1.attention.qkv", "1.mlp.fc1"]
    underflow = heat["maps"]["input"]["underflow"]
    assert underflow[3][-1] == pytest.approx(10.0)  # percent
    assert heat["maps"]["weight"]["quant_scale"][0][0] == 6.0  # log2 of 64
    assert "http://" not in re.sub(r"/\*!.*?\*/", "", page) and "src=" not in page
    assert len(page) < MEBIBYTE


def test_a_large_run_stays_below_one_mebibyte(tmp_path: Path) -> None:
    path = make_run(tmp_path / "large")
    tensor = {"amax": 1.23456, "quant_scale": 3.4567, "underflow": 0.0123456, "overflow": 1e-7,
              "snr_db": 31.23456}  # fmt: skip
    names = [
        f"layers.{layer}.{linear}.{role}"
        for layer in range(96)
        for linear in ("attention.qkv", "attention.projection", "mlp.fc1", "mlp.fc2")
        for role in ("input", "weight", "grad_output")
    ]
    tensors = json.dumps(dict.fromkeys(names, tensor))
    with open(path / "health.jsonl", "w") as file:
        for step in range(125):
            file.write(f'{{"step": {step}, "tensors": {tensors}, "num_nonfinite": {{}}}}\n')
    with open(path / "metrics.jsonl", "w") as file:
        for step in range(10_000):
            line = {"step": step, "loss": 3.0 + 1 / (1 + step), "grad_norm": 0.123456, "lr": 1e-3}
            file.write(json.dumps({**line, "tokens_per_second": 1e6 + step}) + "\n")
    run = read_run(path)
    assert len(run.health) == MOST_STEPS and run.health[-1]["step"] == 124
    heat = heat_maps(run)
    assert heat is not None and heat["rows_are"] == "layers"
    assert heat["rows"] == [str(layer) for layer in range(96)]
    assert len(run_page(run)) < MEBIBYTE
    many = [dataclasses.replace(run, metrics=run.metrics[:2000])] * 40
    assert len(runs_page("many", many, labels=[str(i) for i in range(40)])) < MEBIBYTE


def test_points_are_means_of_the_lines_that_they_stand_for() -> None:
    lines = [{"step": step, "loss": float(step)} for step in range(1, 11)]
    assert points(lines, Curve("loss", ""), 5) == ([2, 4, 6, 8, 10], [1.5, 3.5, 5.5, 7.5, 9.5])
    lines[0]["loss"] = float("nan")
    assert points(lines, Curve("loss", ""), 5)[1][0] == 2.0
    lines[1]["loss"] = float("inf")
    assert points(lines, Curve("loss", ""), 5)[1][0] is None
    assert points([], Curve("loss", ""), 5) == ([], [])


def test_several_runs_are_compared(tmp_path: Path) -> None:
    runs = [
        read_run(make_run(tmp_path / "a", model__fp8=False)),
        read_run(make_run(tmp_path / "b", steps=50, trainer__max_steps=50)),
    ]
    assert differing_settings(runs) == {"trainer.max_steps": [100, 50], "model.fp8": [False, True]}
    page = runs_page("two", runs)
    labels = [series["label"] for series in data_of(page)["charts"][0]["series"]]
    assert labels == ["a", "a, validation", "b", "b, validation"]
    assert "trainer.precision: bf16" in text_of(page) and "what all runs have" in text_of(page)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ({"metrics.jsonl": None}, "metrics.jsonl is missing: no step was logged"),
        ({"metrics.jsonl": ""}, "metrics.jsonl is empty: no step was logged"),
        ({"metrics.jsonl": '{"step": 1, "loss": 3.0}\n{"step": 2, "lo'},
         "metrics.jsonl is damaged: 1 of 2 lines cannot be read"),
        ({"metrics.jsonl": "\0\xff" * 50}, "metrics.jsonl is damaged: 1 of 1 lines"),
        ({"summary.json": "{"}, "summary.json cannot be read"),
        ({"summary.json": "[]"}, ""),
        ({"config.yaml": "a: [}"}, "config.yaml cannot be read"),
        ({"config.yaml": None}, "config.yaml cannot be read"),
        ({"run.json": "x"}, "run.json is missing or damaged"),
        ({"health.jsonl": '{"step": 1}\n[]\n'}, "health.jsonl is damaged: 1 of 2 lines"),
        ({"events.jsonl": "nonsense\n"}, "events.jsonl is damaged"),
        ({"samples.jsonl": '{"step": "x", "prompt": null}\n'}, ""),
    ],
)  # fmt: skip
def test_damage_is_named_and_the_rest_is_shown(
    tmp_path: Path, damage: dict[str, str | None], problem: str
) -> None:
    path = make_run(tmp_path / "damaged")
    for name, text in damage.items():
        (path / name).unlink() if text is None else (path / name).write_text(text, "latin-1")
    page = run_page(read_run(path))
    assert problem in text_of(page) and "2.2345" in text_of(page)
    data_of(page)
    both = [read_run(path), read_run(make_run(tmp_path / "good"))]
    text = text_of(runs_page("two", both))
    assert problem in text and "good" in text and "damaged" in text


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    path = make_run(tmp_path / "nan")
    line = {"step": 101, "loss": "NaN", "grad_norm": "Infinity", "lr": 1e-3}
    with open(path / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps({**summary, "val_loss": "NaN"}))
    page = run_page(read_run(path))
    assert data_of(page)["charts"][0]["series"][0]["y"][-1] is None
    assert "NaN" in text_of(page)


def test_how_runs_ended(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    assert read_run(path).status == "finished"
    (path / "run.json").write_text('{"status": "running"}')
    assert read_run(path).status == "stopped"
    events = (path / "events.jsonl").read_text().splitlines()
    (path / "events.jsonl").write_text(events[0] + "\n")
    assert read_run(path).status == "unfinished"  # the process was killed
    failed = {"kind": "failed", "text": "NonFiniteError: step 7: loss nan", "step": 7}
    (path / "events.jsonl").write_text(events[0] + "\n" + json.dumps(failed) + "\n")
    page = text_of(run_page(read_run(path)))
    assert read_run(path).status == "failed"
    assert "NonFiniteError: step 7: loss nan" in page and "last line" in page
    lock = RunLock.acquire(path)
    assert read_run(path).status == "running"
    lock.release()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                     monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "runs" / "b", steps=110)
    assert report.main(["latest"]) == 0  # b was made later
    assert capsys.readouterr().out.strip() == f"runs/b/{REPORT_FILE}"
    assert report.main(["runs"]) == 0
    assert capsys.readouterr().out.strip() == f"runs/{REPORT_FILE}"
    assert "2 runs in runs" in (tmp_path / "runs" / REPORT_FILE).read_text()
    assert report.main(["runs/a", "runs/latest", "nowhere", "-o", "page.html"]) == 0
    assert "nowhere: is no directory" in text_of((tmp_path / "page.html").read_text())
    assert report.main(["nowhere"]) == 2
    (tmp_path / "empty").mkdir()
    assert report.main(["empty"]) == 2
    said = capsys.readouterr().err
    assert "nowhere: is no directory" in said and "empty: has no run" in said
    assert report.main(["runs/a", "-o", "no/where.html"]) == 2


def test_a_report_that_fails_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    path = make_run(tmp_path / "run")
    reporter = Reporter(path, said.append)
    reporter.write("finished")
    assert (path / REPORT_FILE).stat().st_size > 10_000
    monkeypatch.setattr("megafp8.report.writer.run_page", lambda run: 1 / 0)
    reporter.write("finished")
    reporter.write("finished")
    assert len(said) == 1 and "report.html: cannot be written (ZeroDivisionError" in said[0]


def test_a_report_is_skipped_while_it_would_cost_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("megafp8.report.writer.time.monotonic", lambda: now[0])

    def slow(run: object) -> str:
        now[0] += 2.0
        return "page"

    monkeypatch.setattr("megafp8.report.writer.run_page", slow)
    path = make_run(tmp_path / "run")
    reporter = Reporter(path, print)
    written = []
    for pause in (0.0, 150.0, 100.0, 10.0):
        now[0] += pause
        before = now[0]
        reporter.write()
        written.append(now[0] > before)
    assert written == [True, False, True, False]  # 200 s are 100 times the 2 s of a report


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PLANTED = "<!doctype html><body><script>document.body.append('x'); nothing.at.all</script>"


def with_changes(path: Path) -> Path:
    """Write what a run leaves that changed its precision, and once began again before a change."""
    run, changes = make_run(path), [
        {"step": 20, "kind": "precision", "text": "precision after step 20: <fc2> in mxfp8; 20%"},
        {"step": 60, "kind": "precision", "text": "precision after step 60: taken back"},
        {"step": 40, "kind": "start", "text": "continues", "first_step": 40},
        {"step": 70, "kind": "precision", "text": "precision after step 70: all in bf16; 0.0%"},
    ]  # fmt: skip
    with open(run / "events.jsonl", "a") as file:
        file.writelines(json.dumps({"time": "", **change}) + "\n" for change in changes)
    return run


def test_the_phases_of_a_schedule_are_bands_under_the_loss(tmp_path: Path) -> None:
    page = run_page(read_run(with_changes(tmp_path / "run")))
    loss, *others = data_of(page)["charts"]
    assert loss["phases"] == [
        {"begin": 1, "end": 20, "text": "as the run began"},
        {"begin": 21, "end": 70, "text": "<fc2> in mxfp8; 20%"},
        {"begin": 71, "end": 100, "text": "all in bf16; 0.0%"},
    ]
    assert not any("phases" in chart for chart in others)
    assert "<li>steps 21 to 70: &lt;fc2&gt; in mxfp8; 20%</li>" in page
    assert "phases" not in data_of(run_page(read_run(make_run(tmp_path / "plain"))))["charts"][0]


def dom_of(page: str, tmp_path: Path) -> tuple[str, list[str]]:
    """Return a page as a browser shows it, and what its console says."""
    file = tmp_path / "page.html"
    file.write_text(page)
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr",
         "--virtual-time-budget=2000", "--dump-dom", f"file://{file}"],
        capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("kind", ["one", "several", "phases", "planted"])
def test_in_a_browser(tmp_path: Path, kind: str) -> None:
    """The scripts run without an error, and the page then has plots and the known figures."""
    runs = [read_run(make_run(tmp_path / name)) for name in ("first", "second")]
    page = {"one": run_page(runs[0]), "several": runs_page("two", runs), "planted": PLANTED}.get(
        kind, run_page(read_run(with_changes(tmp_path / "changed")))
    )
    dom, said = dom_of(page, tmp_path)
    if kind == "planted":
        assert len(said) == 1 and "nothing is not defined" in said[0], said
        return
    assert not said, said
    num_plots = len(data_of(page)["charts"])
    assert dom.count('class="u-wrap"') == num_plots >= 5
    assert "2.2345" in dom and "4.32k" in dom
    if kind in ("one", "phases"):
        assert '<option value="underflow">underflow, % of the values</option>' in dom
        assert "steps 1 to 100, from left to right" in dom
        assert len(NAMES) == 12
    else:
        assert "second, validation" in dom


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_no_two_runs_look_alike_in_a_legend(tmp_path: Path) -> None:
    """A legend of 24 runs, the most that one has, tells them apart by color and dash."""
    runs = [read_run(make_run(tmp_path / f"r{number}")) for number in range(24)]
    dom = dom_of(runs_page("many", runs), tmp_path)[0]
    first = dom.split('class="u-legend')[1]
    looks = {}
    for marker, label in re.findall(r'u-marker" style="([^"]*)".*?u-label">([^<]*)', first):
        if not label.endswith("validation"):
            looks[label] = marker
    assert len(looks) == 24 and len(set(looks.values())) == 24, looks


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_name_breaks_between_its_settings_on_a_wide_screen(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / name)) for name in ("first", "second")]
    labels = [f"{number}: fp8_margin=0 fp8_amax_history_len={16 + number}" for number in (0, 1)]
    measured = """<script>
        const [cell] = document.querySelectorAll("tbody td"), tops = [];
        for (const node of cell.childNodes) {
          const range = document.createRange();
          range.selectNodeContents(node);
          tops.push([...range.getClientRects()].map((box) => box.top));
        }
        document.body.dataset.lines = new Set(tops.flat()).size;
    </script></body>"""
    page = runs_page("two", runs, labels=labels).replace("</body>", measured)
    dom, said = dom_of(page, tmp_path)
    assert not said and re.findall(r'data-lines="(\d)"', dom) == ["2"]


def test_charts_of_no_lines(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    (path / "metrics.jsonl").write_text("")
    assert charts([read_run(path)], ["run"]) == []


def test_results_come_before_settings(tmp_path: Path) -> None:
    """Jobs that left no run are rows too; of settings the given ones are columns."""
    runs = [
        read_run(make_run(tmp_path / name, model__seed=seed)) for seed, name in enumerate("abc")
    ]
    runs = [dataclasses.replace(run, changed=[{"key": "model.seed"}]) for run in runs]
    for run in runs:
        assert isinstance(run.config, dict)
        run.config["model.derived"] = run.name
    page = runs_page("three", runs, labels=["0: x=1", "1", "2"], notes=[("3: x=4", "refused")])
    head, body = re.search(r"<thead>(.*?)</thead><tbody>(.*?)</tbody>", page).groups()
    heads = re.findall("<th>([^<]*)", head)
    assert heads[:5] == ["run", "validation loss", "training loss", "tokens/s", "status"]
    assert heads[-1] == "seed" and "derived" not in heads
    assert "Other settings that differ: model.derived" in page
    rows = [re.findall("<td[^>]*>(.*?)(?=<td|$)", row) for row in body.split("<tr>")[1:]]
    assert [len(row) for row in rows] == [len(heads)] * 4
    assert rows[0][0] == "0: x=<wbr>1" and rows[3][0] == "3: x=<wbr>4" and rows[3][4] == "no run"


def test_curves_that_lie_on_each_other_get_a_plot_of_differences(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / name) for name in ("base", "other", "apart")]
    for path, change in zip(paths, (0.0, 0.25, 0.5), strict=True):
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        lines = [line | ({"loss": line["loss"] + change} if "loss" in line else {})
                 | ({"val_loss": 2 + change} if "val_loss" in line else {})
                 | {"step": line["step"] + 1000 * (change == 0.5)} for line in lines]  # fmt: skip
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (path / "summary.json").unlink()
    chart = data_of(runs_page("three", [read_run(path) for path in paths]))["charts"][1]
    assert chart["title"] == "training loss minus that of base"
    (series,) = chart["series"]  # no step of the last run is one of the base's
    assert series["label"] == "other" and series["x"] == [1, *range(10, 101, 10)]
    assert series["y"] == pytest.approx([0.25] * 11) and series["color"] == 1


def test_a_report_links_to_its_checkpoints(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    assert "checkpoints:" not in run_page(read_run(path))
    for step in (50, 100):
        (path / "checkpoints" / f"step_{step:08}").mkdir(parents=True)
    links = re.findall("<a href='(checkpoints/.*?)'", run_page(read_run(path)))
    assert links == ["checkpoints/step_00000050/", "checkpoints/step_00000100/"]
    assert all((path / link).is_dir() for link in links)


def test_a_page_with_a_verdict_marks_no_best_run(tmp_path: Path) -> None:
    """Its runs have several seeds, which validate on other texts."""
    runs = [read_run(make_run(tmp_path / name)) for name in "ab"]
    assert "class='number best'" in runs_page("sweep", runs)
    assert "class='number best'" not in runs_page("compare", runs, more="<p>same</p>")


def test_seeds_of_a_configuration_are_one_curve_with_a_range(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / str(seed))) for seed in range(3)]
    for run, more in zip(runs, (0.0, 0.5, 2.0), strict=True):
        for line in run.metrics:
            line["loss"] += more
    labels = ["BF16, seed 1", "FP8, seed 1", "FP8, seed 2"]
    page = runs_page("a comparison", runs, labels=labels, groups=["BF16", "FP8", "FP8"])
    (loss, *_) = (c for c in data_of(page)["charts"] if c["title"].startswith("loss,"))
    base, validated, fp8, of_fp8 = loss["series"]
    assert [each["label"] for each in loss["series"]] == [
        "BF16", "BF16, validation", "FP8", "FP8, validation",
    ]  # fmt: skip
    assert [each["color"] for each in (base, validated, fp8, of_fp8)] == [0, 0, 1, 1]
    assert "low" not in base and base["y"][-1] == pytest.approx(loss_at(100), rel=1e-4)
    ends = [fp8[key][-1] - loss_at(100) for key in ("low", "y", "high")]
    assert ends == pytest.approx([0.5, 1.25, 2.0], rel=1e-3)
    if CHROMIUM is None:
        return
    dom, said = dom_of(page, tmp_path)
    assert not said
    legend = re.search(r"loss, nats per token.*?<table class=\"u-legend.*?</table>", dom, re.DOTALL)
    assert legend is not None
    shown = [row for row in legend[0].split("<tr ")[1:] if "display: none" not in row.split(">")[0]]
    assert [re.findall('u-label">([^<]*)', row) for row in shown] == [["step"], ["BF16"], ["FP8"]]
