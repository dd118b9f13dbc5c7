"""Load settings in two versions of this repository, and compare specifications, origins and errors.

    python -m scripts.compare_settings BASE                  # this working tree against a commit
    python -m scripts.compare_settings BASE --count 500      # fewer random lists
    python -m scripts.compare_settings BASE --times 9        # calls and CPU time of the default job

Loaded are every preset, each file of settings of the tests (also the texts inside test modules that
are one), NeMo's whole file with random changes, and random lists of overrides with a fixed seed. A
case is the same if both trees return equal specifications, origins, YAML of `--cfg job` and lines
for the start of the run, or if both refuse it with equal messages. Files are migrated too, and
their reports compared. The exit code is 1 if anything differs but the order of several problems,
which is counted. The YAML is that of each tenth random list, since it takes longest to write.
A list took 47 ms of CPU time in each tree; Ctrl-C reports what was compared until then.

`--times` compares nothing. It counts the Python calls in the repository's files (`sys.setprofile`)
and the CPU time from the command line of the default job to its `RunSpec`: of the first time in
each of N fresh processes of each tree in turn, and of later times in these processes.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SEED = 77
SHOWN = 20  # cases that differ
AGAIN = 15  # times that a job is loaded in a process after the first time
ODD = [
    "null",
    "7",
    "-1",
    "1e-3",
    "abc",
    "[1,2]",
    "{a: 1}",
    "${model.seed}",
    "${nope}",
    "???",
    "1e99",
]
Case = dict[str, Any]  # `words` of a command line; or `text`, to be migrated as the file `source`


def main(argv: list[str]) -> int:
    """Return 0 if all cases are the same and 1 if not."""
    from scripts.compare_trees.tree import commit_of, extract

    parser = argparse.ArgumentParser(
        prog="python -m scripts.compare_settings",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("base", help="a commit")
    parser.add_argument("--count", type=int, default=10_000, help="random lists of overrides")
    parser.add_argument("--times", type=int, default=0, metavar="N", help="measure N processes")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="settings-") as name:
        folder = Path(name)
        trees = [folder / "base", folder / "head"]
        extract(ROOT, commit_of(ROOT, options.base), trees[0])
        extract(ROOT, None, trees[1])
        if options.times:
            return _print_times(trees, options.times)
        work = folder / "work"
        work.mkdir()
        cases = [*_preset_cases(), *_file_cases(work), *_random_cases(work, options.count)]
        (folder / "cases.json").write_text(json.dumps(cases))
        return _compare(trees, cases, folder)


def _worker(tree: Path, folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start a process with one tree's code, in a folder that both trees share."""
    environment = {name: text for name, text in os.environ.items() if name != "MEGAFP8_STARTED_AS"}
    environment |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
    return subprocess.Popen(
        [sys.executable, __file__, *words],
        env=environment | {"PYTHONWARNINGS": "ignore"},
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    )


def _compare(trees: list[Path], cases: list[Case], folder: Path) -> int:
    began = time.monotonic()
    workers = [
        _worker(tree, folder / "work", "--work", str(folder / "cases.json")) for tree in trees
    ]
    num_compared = num_different = num_refused = num_reordered = 0
    streams = [worker.stdout for worker in workers if worker.stdout is not None]
    with contextlib.suppress(KeyboardInterrupt):  # what was compared until then is reported
        for case, left, right in zip_longest(cases, *streams, fillvalue="null"):
            outcomes = [
                json.loads(line.replace(str(tree), "TREE"))
                for tree, line in zip(trees, (left, right), strict=True)
            ]
            num_compared += 1
            num_refused += "error" in (outcomes[1] or {})
            if outcomes[0] == outcomes[1] and outcomes[0] is not None:
                continue
            if None not in outcomes and len({*map(_in_any_order, outcomes)}) == 1:
                num_reordered += 1
                continue
            num_different += 1
            if num_different <= SHOWN:
                print(f"--- {json.dumps(case)[:600]}")
                for name, one, other in _differences(outcomes[0] or {}, outcomes[1] or {}):
                    print(f"  {name}\n    base: {one}\n    head: {other}", flush=True)
    for worker in workers:
        worker.kill()
    print(
        f"{num_compared} of {len(cases)} cases, {num_refused} of them refused: {num_different} "
        f"differ, {num_reordered} others in the order of their problems "
        f"({time.monotonic() - began:.0f} s)"
    )
    return int(num_different > 0)


def _in_any_order(outcome: Case) -> str:
    """Return an outcome as a text in which the lines of an error are sorted."""
    lines = sorted(outcome.get("error", "").split("\n"))
    return json.dumps(outcome | {"error": lines}, sort_keys=True)


def _differences(base: Case, head: Case) -> Iterator[tuple[str, str, str]]:
    for name in sorted({*base, *head}):
        one, other = str(base.get(name)), str(head.get(name))
        if one != other:
            at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
            start = max(0, at - 80)
            yield name, one[start : at + 320], other[start : at + 320]


# --- the cases ------------------------------------------------------------------------------------


def _preset_cases() -> Iterator[Case]:
    yield {"words": []}
    for file in sorted((ROOT / "conf").glob("*/*.yaml")):
        yield {"words": [f"{file.parent.name}={file.stem}"]}
        yield {"words": [f"{file.parent.name}={file.stem}", "trainer.devices=8"]}
    yield {"words": ["--config-name=finetune_gpt"]}


def _file_cases(work: Path) -> Iterator[Case]:
    """Yield the files of settings of the tests, and texts of their modules that are such files."""
    files = [*(ROOT / "tests").rglob("*.yaml"), *(ROOT / "examples").rglob("*.yaml")]
    texts = [(file.name, file.read_text()) for file in sorted(files)]
    for module in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if "pretrain_gpt.py --" in node.value:
                    texts.append(("run.sh", node.value))
                elif any(f"{name}:" in node.value for name in ("model", "trainer", "optimizer")):
                    texts.append(("theirs.yaml", node.value))
    for number, (source, text) in enumerate(texts):
        yield {"text": text, "source": source}
        if source.endswith(".yaml"):
            (work / f"file_{number}.yaml").write_text(text)
            for more in ([], ["model.data.data_prefix=mock", "trainer.precision=bf16"]):
                yield {"words": ["--config-dir=.", f"--config-name=file_{number}", *more]}


def _random_cases(work: Path, count: int) -> Iterator[Case]:
    """Yield lists of overrides for the default job, NeMo's file, and files with a part of each."""
    import yaml  # type: ignore[import-untyped,unused-ignore]

    draw, dumper = random.Random(SEED), getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    lines = (ROOT / "tests" / "config" / "nemo_keys.txt").read_text().splitlines()
    pairs = (line.split(" = ", 1) for line in lines if not line.startswith("#"))
    nemos = {key: json.loads(text) for key, text in pairs}
    works = {
        "model.data.data_prefix": "mock",
        "model.tokenizer.vocab_file": None,
        "model.tokenizer.merge_file": None,
    }
    values = _values_by_key(nemos)
    for number in range(count):
        words = _random_words(draw, values)
        kind = draw.choice(["default", "default", "nemo", "part", "ours"])
        if kind != "default":
            given = nemos | works if kind == "nemo" else {}
            for word in _random_words(draw, values):
                key, _, text = word.lstrip("+").partition("=")
                given[key] = text
            if kind == "part":
                given |= {key: nemos[key] for key in draw.sample(sorted(nemos), 12)} | works
            document = yaml.dump(_nested(given), Dumper=dumper, sort_keys=False)
            for text in given.values():  # a value of a word is YAML already
                if isinstance(text, str) and text not in nemos.values():
                    document = document.replace(f": '{text}'", f": {text}", 1)
            if kind != "nemo" and draw.random() < 0.7:
                document = f"defaults: [pretrain_gpt, _self_]\n{document}"
            (work / f"random_{number}.yaml").write_text(document)
            words = ["--config-dir=.", f"--config-name=random_{number}", *words]
            if draw.random() < 0.2:
                yield {"text": document, "source": "theirs.yaml"}
        yield {"words": words, "yaml": number % 10 == 0}


def _nested(given: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in given.items():
        node, (*sections, leaf) = tree, path.split(".")
        for section in sections:
            below = node.get(section)
            node[section] = node = below if isinstance(below, dict) else {}
        if not isinstance(node.get(leaf), dict):
            node[leaf] = value
    return tree


def _random_words(draw: random.Random, values: dict[str, list[str]]) -> list[str]:
    """Return one to five settings, of which each has its own key."""
    likely = [key for key in values if key.startswith("model.fp8") or "seq_length" in key]
    keys = [draw.choice(likely if draw.random() < 0.25 else list(values)) for _ in range(5)]
    chosen = list(dict.fromkeys(keys))[: draw.randint(1, 5)]
    share = draw.choice([0.0, 0.0, 0.1, 0.4])
    words = {key: draw.choice(ODD if draw.random() < share else values[key]) for key in chosen}
    if draw.random() < 0.4:
        words.setdefault("model.fp8", "True")
    return [draw.choice(["", "", "", "+", "++"]) + f"{key}={value}" for key, value in words.items()]


def _values_by_key(nemos: dict[str, Any]) -> dict[str, list[str]]:
    """Return values to draw for each key, of which most are right by themselves."""
    from megafp8.config import megatron_names
    from megafp8.config.nemo import nemo_keys, nemo_sections
    from megafp8.config.schema import all_keys, all_sections

    values: dict[str, list[str]] = {}
    for path, key in all_keys().items():
        usual = [_written(key.default), _written(nemos.get(path, key.default))]
        if "True or False" in key.type_text:
            usual += ["True", "False"]
        elif "number" in key.type_text:
            usual += ["1", "2", "4", "8", "0.5", "16"]
        if key.valid is not None:
            listed = key.valid.text.replace(" or ", ", ").split(", ")
            usual += [word for word in listed if word.replace("_", "").isalnum()]
        values[path] = usual
    for path, nemo_key in nemo_keys().items():
        values[path] = [*[_written(nemo_key.nemo), _written(nemo_key.ours)] * 3, "True"]
    for section in sorted(all_sections() | nemo_sections()):
        values[section] = ["null", "{}", "3"]
    for name in megatron_names.NAMES:
        values[name] = ["True", "False", "null", "e2m1", "mxfp8"]
    values["model.fp8"] += ["hybrid", "e4m3", "null", "True", "True", "True"]
    values["model.activation"] += ["gelu", "fast-geglu", "gelu"]
    values["model.data.seq_length"] = ["128", "512", "64", "${model.encoder_seq_length}"]
    values["model.data.data_impl"] = ["mmap", "mock", "mock"]
    values["model.optim.name"] += ["mcore_distributed_optim", "fused_adam"]
    values["model.position_embedding_type"] += ["RoPE", "ALiBi"]
    values["model.normalization"] += ["layernorm1p"]
    values["trainer.val_check_interval"] += ["null", "${training.trainer.max_steps}"]
    values["precision"] = [file.stem for file in sorted((ROOT / "conf/precision").glob("*.yaml"))]
    values["model"] = [file.stem for file in sorted((ROOT / "conf/model").glob("*.yaml"))]
    return values


def _written(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else value or "''"


# --- one tree, in a process of its own ------------------------------------------------------------


def _hasten() -> None:
    """Load settings faster, with equal results: files and secrets are read once, copies pickled."""
    import gc
    import io
    import pickle
    from functools import cache

    from omegaconf import DictConfig, OmegaConf

    from megafp8 import secrets

    read, copied = OmegaConf.load, DictConfig.__deepcopy__

    @cache
    def parsed(text: str) -> bytes:
        return pickle.dumps(read(io.StringIO(text)))

    def load(file: Any) -> Any:
        text = file.read() if hasattr(file, "read") else Path(file).read_text("utf-8")
        return pickle.loads(parsed(text))

    def copy(tree: Any, memo: Any) -> Any:
        whole = tree._get_parent() is None
        return pickle.loads(pickle.dumps(tree)) if whole else copied(tree, memo)

    OmegaConf.load, DictConfig.__deepcopy__ = load, copy  # type: ignore[method-assign]
    secrets.secret_values = cache(secrets.secret_values)  # the environment stays
    gc.set_threshold(200_000)


def _run(words: list[str], *, yaml: bool = True) -> Case:
    """Return what a command line gives in this process's tree, as plain text."""
    from omegaconf import OmegaConf

    from megafp8.cli.job import parse_options, record
    from megafp8.config.load import load_all
    from megafp8.config.resolve import resolve

    options = parse_options(words)
    loaded = load_all(options.overrides, options.config_dir, options.config_name, lambda: False)
    return {
        "inert": loaded.inert_lines(),
        "record": repr(record(loaded)),
        "origins": {
            key: [str(origin), origin.strength, origin.is_users]
            for key, origin in sorted(loaded.origins.items())
        },
        "yaml": OmegaConf.to_yaml(loaded.cfg) if yaml else "",
        "spec": repr(resolve(getattr(loaded, "values", loaded.cfg), lambda: False)),
    }


def _migrate(text: str, source: str) -> Case:
    from megafp8_migrate import migrate

    done = migrate(text, source)
    return {"text": done.text(source), "report": done.report()}


def _work(cases: Path) -> None:
    """Print a line of JSON for each case; an exception that no user can cause is shown as such."""
    from megafp8.errors import UserError

    _hasten()
    for case in json.loads(cases.read_text()):
        try:
            with contextlib.redirect_stdout(sys.stderr):
                outcome = _run(**case) if "words" in case else _migrate(**case)
        except UserError as error:
            outcome = {"error": f"{type(error).__name__}: {error}"}
        except Exception as error:
            outcome = {"error": f"not for users: {type(error).__name__}: {error}"}
        print(json.dumps(outcome), flush=True)


def _measure(tree: Path) -> None:
    """Print the calls and CPU milliseconds of the first time, and of later times."""
    import megafp8.cli.pretrain  # noqa: F401  (imports are not measured)

    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(f"{tree}/megafp8")

    def milliseconds(job: Callable[[], None]) -> float:
        began = time.process_time()
        job()
        return (time.process_time() - began) * 1000

    first = milliseconds(_job)
    later = statistics.median(milliseconds(_job) for _ in range(AGAIN))
    sys.setprofile(count)
    _job()
    sys.setprofile(None)
    print(json.dumps({"first": first, "later": later, "calls": calls}))


def _job() -> None:
    """Do what `pretrain_gpt.py` does from the command line of the default job to its `RunSpec`."""
    from dataclasses import replace

    from megafp8.cli.epochs import with_epochs
    from megafp8.cli.job import app_info, parse_options
    from megafp8.config.load import load_all
    from megafp8.config.resolve import data_spec, observe_spec, resolve

    options = replace(parse_options([]), gpu_available=lambda: False)
    loaded: Any = load_all(
        options.overrides, options.config_dir, options.config_name, options.gpu_available
    )
    info = app_info(loaded, options)
    if hasattr(loaded, "values"):
        data_spec(loaded.values), observe_spec(loaded.values)
        resolve(with_epochs(loaded, info.gives_steps)[0].values, lambda: False)
        return
    data_spec(loaded.cfg), observe_spec(loaded.cfg)
    resolve(with_epochs(loaded.cfg, info.gives_steps)[0], lambda: False)


def _print_times(trees: list[Path], times: int) -> int:
    measured: list[list[dict[str, float]]] = [[], []]
    for _ in range(times):
        for tree, found in zip(trees, measured, strict=True):
            output, _ = _worker(tree, tree, "--measure", str(tree)).communicate()
            found.append(json.loads(output))
    for name in ("calls", "later", "first"):
        base, head = (statistics.median(one[name] for one in found) for found in measured)
        print(f"{name}: base {base:.1f}, head {head:.1f}: {head / base:.1%}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        _work(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["--measure"]:
        _measure(Path(sys.argv[2]))
    else:
        sys.exit(main(sys.argv[1:]))
