"""Run Transformer Engine's own tests over the CPU's kernels, and write a table of the results.

    git archive v2.12 tests/pytorch qa artifacts | tar -x -C FOLDER   # in its clone
    python -m scripts.te_tests FOLDER 2.12.0 --results RESULTS [--keep] [--only NAME …]
    python -m scripts.te_tests --table RESULTS …

Each file of tests runs in a process of its own, which loads Transformer Engine as `pytest -p
te_cpu` does, with the variables that its own CI sets for the file (qa/*/test.sh). Of each file a
sample is drawn by a seed. A test may take `--seconds` of the processor's time. RESULTS is a JSON
file, in which files that were not run this time keep what they had. With `--keep` so do the tests
of the same draw that have passed or were skipped, and the others run: those that had not passed,
and those that the time of their file was not enough for. A test that does not pass has one of the
reasons of REASONS, by what its error says.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import te_cpu
from te_cpu import pytest_plugin, wheel
from te_cpu.errors import MissingKernelError

ROOT = Path(__file__).resolve().parents[1]
ONNX = "test_onnx_export.py"
TABLE = ROOT / "docs/evidence/te_own_tests.md"
PASSED, SKIPPED, ERROR = "passed", "skipped", "another error"
ANYWHERE = "fails anywhere"
REASONS = (
    "value differs",
    "lacks a kernel",
    "needs hardware",
    "needs a package",
    "too slow",
    ANYWHERE,
)
FAILS_ANYWHERE = {
    "test_torch_compile.py::test_autocast_nested_custom": (
        "`qfactory` in the test looks `role` up in a dictionary of names, and `make_quantizers` of "
        "`CustomRecipeState` (quantization.py) gives it a `QuantizerRole`, after a warning that "
        "torch 2.13 does not trace. A later version of the test looks up `role.tensor_type`"
    ),
}
"""Why tests fail on any machine, by file and function."""
PACKAGES = (
    "torch",
    "triton",
    "pytest",
    "nvdlfw_inspect",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "onnxruntime_extensions",
)
"""Packages whose versions the page names."""
ASKED = ("sample", "seed", "seconds", "seconds_of_file")
SAMPLE = 100
"""The tests drawn of each file at most; a file that does not load counts as so many failed."""
LEFT_OUT = {
    "attention/test_attention_with_cp.py": "torch.cuda.device_count()",
    "debug/test_distributed.py": "torch.cuda.device_count() < 2",
    "distributed/test_cast_master_weights_to_fp8.py": "nccl",
    "distributed/test_comm_gemm_overlap.py": "torch.cuda.device_count() < 2",
    "distributed/test_ep.py": "torch.cuda.device_count() < 4",
    "distributed/test_fusible_ops.py": "nccl",
    "distributed/test_fusible_ops_with_userbuffers.py": "torch.cuda.device_count() < 2",
    "distributed/test_newton_schulz.py": "torch.cuda.device_count() < 2",
    "distributed/test_numerics.py": "torch.cuda.device_count() < 2",
    "distributed/test_numerics_exact.py": "torch.cuda.device_count() < 2",
    "distributed/test_sanity.py": "requires more than one GPU",
    "distributed/test_torch_fsdp2.py": "torch.cuda.device_count()",
    "test_cuda_graphs.py": "= make_graphed_callables(",
}
"""The files whose every test needs several GPUs, NCCL or CUDA graphs, and words of a line that says
so."""
IMPORTED_BY_ALL = ("tensorrt",)
"""Packages that a file imports at its top and few of its tests use. Where one is not installed,
those tests alone say so."""
HARDWARE = re.compile(
    r"CUDAGraph|CUDA graph|graph_pool_handle|fused_attn|FusedAttention|[Ff]lash.?[Aa]ttention|"
    r"flash_attn|nccl|NCCL|userbuffers|active drivers|device\.type == .cuda.|device\(type=.cuda.|"
    r"CommOverlap|torchrun|NVSHMEM|cuDNN|more than one GPU|needs Blackwell|elapsed_time|"
    r"memory_(allocated|reserved|before|after|usage|with)|mem_usage|_mem\b",
)
"""What an error says where a test needs a GPU itself, not its arithmetic."""


EXPLAINED = {
    "debug/test_api_features.py::test_statistics_multi_run": (
        "the sum of magnitudes is `torch.norm(x, p=1)` (stats_computation.py), in FP32, and the "
        "test compares that of a tensor with those of its halves. On a CPU sums of 2^21 numbers "
        "are not near enough: by FP64 one was off by 117 of 1,672,719, and its halves by 39"
    ),
    "test_float8_current_scaling_exact.py::test_current_scaling_gemm_versus_reference": (
        "the reference is `torch._scaled_mm` (`qgemm` in "
        "custom_recipes/quantization_current_scaling.py). On a GPU that is cuBLASLt, as "
        "Transformer Engine's own product is; on a CPU it is oneDNN, which adds in another order. "
        "Both are within 2 units of 2^-24 of the sum of magnitudes, by FP64; of results in BF16 "
        "one of 12,288 is rounded the other way"
    ),
    "nvfp4/test_nvfp4_gemm_exact.py::test_nvfp4_row_scaled_gemm_matches_emulated": (
        "the test multiplies each row by itself too, in 16 rows with 15 of zeros, and compares "
        "results in BF16 within 0.0078 of each, however small it is. `general_gemm` "
        "(cpp_extensions/gemm.py) applies the factor of a row after the product, and a CPU adds 16 "
        "rows up in another order than 1,008. By FP64 both are within 0.53 units of 2^-24 of the "
        "sum of magnitudes; those that differ are sums that nearly cancel, 17 of 999,936"
    ),
    **dict.fromkeys(
        (
            "nvfp4/test_nvfp4_module_exact.py::test_nvfp4_linear_versus_reference",
            "nvfp4/test_nvfp4_module_exact.py::test_nvfp4_layernorm_linear_versus_reference",
        ),
        "`qgemm` in custom_recipes/quantization_nvfp4.py divides the product of two amaxes by "
        "6 * 6 * 448 * 448; a GPU multiplies by the reciprocal, in "
        "`compute_nvfp4_per_tensor_scale_kernel` of common/recipe/nvfp4.cu, and so does the kernel "
        "here. Where it divides instead, 4 of 9 such tests pass. The other 5 are all in FP32 "
        "without a rotation and compare within 1e-6: `qgemm` adds up blocks of 16 elements one "
        "after another, and a product here has another order of sums. By FP64 both are within 0.7 "
        "units of 2^-24 of the sum of magnitudes",
    ),
}
"""Why values differ, by file and function of the tests."""
OVER = (PASSED, SKIPPED)
COLUMNS = (PASSED, *REASONS, ERROR, SKIPPED)
TEXT = """\
# Transformer Engine's own tests on a CPU

`python -m scripts.te_tests` has written this page, by hand and not in CI: Transformer Engine's own
tests (`tests/pytorch` at the tag of a version, none of which is in this repository) over the
[kernels on a CPU](../reference/backends.md#on-a-cpu). No test was changed. Each file ran in a
process of its own, in a random order by the seed 1; "run" is how many of its tests ran, and "of"
how many it has. Where a kernel was written or mended, the tests of the sample that had not passed
ran again, and those that had passed did not. Every test that does not pass has a reason, by what
its error says:

- **value differs**: an assertion of the test does not hold. Each is explained below.
- **lacks a kernel**: a function of the compiled extension is not here, and the error names it.
- **needs hardware**: cuDNN, flash attention, CUDA graphs, several GPUs, a Blackwell GPU, a GPU's
  memory or clock that the test reads, or the device "cuda" as the name of a tensor's device.
- **needs a package**: one that is not installed here.
- **too slow**: the test has used up its seconds of the processor.
- **fails anywhere**: Transformer Engine's own Python of the version cannot pass the test, also on a
  GPU.
- **skipped**: the test says itself that it does not apply here. It does not count.

A file that does not load counts as {sample} failed tests. TensorRT is not installed:
`test_onnx_export.py` imports it at its top, and `test_trt_integration` alone uses it. So the runs
had a module of that name of which each use is an error. No GPU has run any of this here.
"""


class TooSlowError(Exception):
    """Report that a test has used up its time."""


class Sampled:
    """Draw a sample of a file's tests, and write what becomes of each to a file of lines."""

    def __init__(self, lines: Path, options: argparse.Namespace) -> None:
        self.lines, self.sample, self.seed = lines, options.sample, options.seed
        self.seconds, self.seconds_of_file = options.seconds, options.seconds_of_file
        self.began = time.process_time()
        self.done = {entry["test"] for entry in read_lines(lines) if "test" in entry}

    def say(self, **entry: Any) -> None:
        with self.lines.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        drawn = random.Random(self.seed).sample(range(len(items)), min(self.sample, len(items)))
        self.say(collected=len(items), drawn=len(drawn))
        items[:] = [items[number] for number in drawn]  # in this order: a file's time may be up
        items[:] = [item for item in items if item.nodeid not in self.done]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.say(begun=item.nodeid)
        signal.signal(signal.SIGPROF, _stop)
        signal.setitimer(signal.ITIMER_PROF, self.seconds)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            if time.process_time() - self.began > self.seconds_of_file:
                item.session.shouldstop = "the file has used up its time"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and call.excinfo is not None:
            error = call.excinfo.value
            line = (
                "" if not len(call.excinfo.traceback) else str(call.excinfo.traceback[-1].statement)
            )
            outcome, what = reason_of(error, line), said(error, call.excinfo)
            self.say(test=item.nodeid, outcome=outcome, error=what, line=line.strip())
        elif report.skipped and call.excinfo is not None:
            self.say(test=item.nodeid, outcome=SKIPPED, error=str(call.excinfo.value)[:300])
        elif report.when == "call":
            self.say(test=item.nodeid, outcome=PASSED)
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            text = str(report.longrepr)
            self.say(unloaded=reason_of_text(text, "error"), error=last_line(text))


def _stop(number: int, frame: object) -> None:
    raise TooSlowError("the test has used up its time")


def chain(error: BaseException | None) -> Iterable[BaseException]:
    """Yield an error and those that it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def reason_of(error: BaseException, line: str = "") -> str:
    """Return one of REASONS by what the error says and the line that raised it, or ERROR."""
    errors = list(chain(error))
    text = "\n".join([*(f"{type(e).__name__}: {e}" for e in errors), line])
    if any(isinstance(e, TooSlowError) for e in errors):
        return "too slow"
    if any(isinstance(e, MissingKernelError) for e in errors):
        return "needs hardware" if HARDWARE.search(text) else "lacks a kernel"
    is_value = isinstance(error, AssertionError | pytest.fail.Exception)
    kind = "value" if is_value else "error"
    return reason_of_text(text, kind)


def reason_of_text(text: str, kind: str) -> str:
    """Return the reason of an error of which only the text is there."""
    if "TooSlowError" in text:
        return "too slow"
    if re.search(r"ModuleNotFoundError|No module named|is not installed", text):
        return "needs a package"
    if HARDWARE.search(text):
        return "needs hardware"
    if "MissingKernelError" in text:
        return "lacks a kernel"
    return "value differs" if kind == "value" else ERROR


def said(error: BaseException, info: pytest.ExceptionInfo[BaseException]) -> str:
    """Return the error's kind, its first lines and the last place of its way."""
    place = info.traceback[-1] if len(info.traceback) else None
    where = "" if place is None else f" [{Path(str(place.path)).name}:{place.lineno + 1}]"
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:400]}{where}"


def last_line(text: str) -> str:
    """Return the last line of a traceback that says an error."""
    lines = [line for line in text.splitlines() if re.match(r"E  ", line)]
    return " ".join((lines or text.splitlines() or [""])[-1].split())[:400]


def read_lines(lines: Path) -> list[dict[str, Any]]:
    """Return the entries of a file of JSON lines; none if there is no file."""
    return [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []


def run_file(
    file: Path, folder: Path, options: argparse.Namespace, work: Path, kept: dict[str, Any]
) -> dict[str, Any]:
    """Run a sample of one file's tests in processes of their own, and return what became of them.

    A test that ends the process is noted, and the others run in another process. Of `kept` those
    that had passed or were skipped do not run again.
    """
    name = str(file.relative_to(folder / "tests/pytorch"))
    lines = work / f"{name.replace('/', '+')}.jsonl"
    over = [{"test": test, **was} for test, was in kept.items() if was["outcome"] in OVER]
    lines.write_text("".join(json.dumps(entry) + "\n" for entry in over))
    began = time.monotonic()
    for _ in range(10):
        child = os.fork()
        if child == 0:
            _run_here(file, folder, options, lines)
        _, status = os.waitpid(child, 0)
        entries = read_lines(lines)
        begun = [entry["begun"] for entry in entries if "begun" in entry]
        ended = {entry["test"] for entry in entries if "test" in entry}
        if os.waitstatus_to_exitcode(status) >= 0 or not begun or begun[-1] in ended:
            break
        with lines.open("a") as out:
            said = f"the process ended with {os.waitstatus_to_exitcode(status)}"
            entry = {"test": begun[-1], "outcome": ERROR, "error": said}
            out.write(json.dumps(entry) + "\n")
    found = summary(read_lines(lines)) | {"minutes": round((time.monotonic() - began) / 60, 1)}
    return found if "unloaded" in found else found | {"tests": kept | found["tests"]}


def summary(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what became of a file: its tests with outcomes, or why it does not load."""
    unloaded = next((entry for entry in entries if "unloaded" in entry), None)
    if unloaded is not None:
        return {"unloaded": unloaded["unloaded"], "error": unloaded["error"], "tests": {}}
    tests: dict[str, Any] = {}
    for entry in entries:  # what its end says comes after what the test says
        if "test" in entry and tests.get(entry["test"], {"outcome": PASSED})["outcome"] == PASSED:
            tests[entry["test"]] = {k: v for k, v in entry.items() if k != "test"}
    collected = next((entry["collected"] for entry in entries if "collected" in entry), 0)
    return {"collected": collected, "tests": tests}


def _run_here(file: Path, folder: Path, options: argparse.Namespace, lines: Path) -> None:
    """Run pytest over one file in this process, which ends with it."""
    log = os.open(lines.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1), os.dup2(log, 2)
    os.chdir(folder)
    own = environment_of(str(file.relative_to(folder / "tests/pytorch")), folder)
    os.environ.update(own)  # some are read where Transformer Engine is imported
    te_cpu.load(options.version)
    os.environ["TRITON_INTERPRET"] = "1"  # a reference of the tests is a kernel in Triton
    os.environ.update(debug_folders(folder))
    for name in IMPORTED_BY_ALL:
        if find_spec(name) is None:
            sys.modules[name] = _refusing(name)
    plugin = Sampled(lines, options)
    words = ["--te-version", options.version, "--tb=short", f"--rootdir={folder}", "-o", "addopts="]
    for name in ("cacheprovider", "timeout", "xdist", "fp8_coverage"):
        words += ["-p", f"no:{name}"]
    if "debug" in file.parts:
        words += [f"--feature_dirs={features()}", f"--configs_dir={file.parent}/test_configs/"]
    code = 1
    try:
        code = int(pytest.main([*words, str(file)], plugins=[pytest_plugin, plugin]))
        if code in (2, 4) and not read_lines(lines):
            plugin.say(unloaded=ERROR, error=f"pytest ended with {code}")
    except BaseException as error:  # noqa: BLE001  # the process ends here
        plugin.say(unloaded=reason_of(error), error=f"{type(error).__name__}: {error}"[:400])
    os._exit(code)


def _refusing(name: str) -> ModuleType:
    """Return a module that can be imported, and of which each use is the error of its import."""
    module = ModuleType(name)

    def refuse(key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    module.__dict__["__getattr__"] = refuse
    return module


def features() -> Path:
    """Return the folder of Transformer Engine's own features for its debugging tool."""
    found = te_cpu.loaded()
    assert found is not None
    return found.folder / "transformer_engine/debug/features"


def environment_of(name: str, folder: Path) -> dict[str, str]:
    """Return the variables that Transformer Engine's own CI sets for a file, where it first runs.

    Without its scripts there are none.
    """
    for script in sorted(folder.glob("qa/*pytorch*/test.sh")):
        for line in script.read_text("utf-8").splitlines():
            words, _, command = line.partition("pytest")
            if f"tests/pytorch/{name} " in f"{command} ":
                found = re.findall(r"(\w+)=(\S+)", words.replace("$TE_PATH", str(folder)))
                return dict(found)
    return {}


def debug_folders(folder: Path) -> dict[str, str]:
    """Return the variables that tell its tests where files are, as its own CI sets them."""
    return {
        "TE_PATH": str(folder),
        "NVTE_TEST_NVINSPECT_FEATURE_DIRS": str(features()),
        "NVTE_TEST_NVINSPECT_CONFIGS_DIR": str(folder / "tests/pytorch/debug/test_configs/"),
    }


def left_out(folder: Path) -> dict[str, str]:
    """Return the files of this version that are left out, each with its line that says why."""
    found = {}
    for name, words in LEFT_OUT.items():
        file = folder / "tests/pytorch" / name
        texts = file.read_text().splitlines() if file.is_file() else []
        line = next(((n, text) for n, text in enumerate(texts, 1) if words in text), None)
        if line is not None:
            found[name] = f"{line[0]}: {line[1].strip()}"
    return found


def run(options: argparse.Namespace) -> None:
    """Run the files that are asked for, and write RESULTS after each of them."""
    results: Path = options.results
    known = json.loads(results.read_text()) if results.exists() else {}
    out = left_out(options.folder)
    wheel.sources(options.version)  # before a process for each file would fetch them
    files = sorted((options.folder / "tests/pytorch").glob("**/test_*.py"))
    work = results.parent / f"{results.stem}.work"
    work.mkdir(parents=True, exist_ok=True)
    names = [str(file.relative_to(options.folder / "tests/pytorch")) for file in files]
    variables = {name: environment_of(name, options.folder) for name in names}
    known.update(version=options.version, left_out=out, all=[n for n in names if n not in out])
    known.setdefault("files", {})
    only = options.only or [""]
    wanted = [name for name in names if name not in out and any(word in name for word in only)]
    wanted.sort(key=lambda name: [not variables[name], *(word not in name for word in only)])
    for name in wanted:
        if not variables[name]:  # and so nor do those that follow have any: load it once for them
            te_cpu.load(options.version)
        file = options.folder / "tests/pytorch" / name
        asked = {key: getattr(options, key) for key in ASKED}
        old = known["files"].get(name, {})
        is_same = all(old.get(key) == asked[key] for key in ("sample", "seed"))
        kept = old.get("tests", {}) if options.keep and is_same else {}
        found = run_file(file, options.folder, options, work, kept) | asked
        found["packages"] = {each: version(each) for each in PACKAGES if find_spec(each)}
        known["files"][name] = found
        results.write_text(json.dumps(known, indent=1))
        print(name, dict(counts(found)), f"{found['minutes']} min", flush=True)


def counts(found: dict[str, Any]) -> Counter[str]:
    """Return how many tests of a file have which outcome."""
    if "unloaded" in found:
        return Counter({found["unloaded"]: SAMPLE})
    return Counter(test["outcome"] for test in found["tests"].values())


def table(results: Sequence[Path]) -> str:
    """Return the page of the results of several versions."""
    return TEXT.format(sample=SAMPLE) + "".join(
        section(json.loads(path.read_text("utf-8"))) for path in results
    )


def section(found: dict[str, Any]) -> str:
    """Return the part of the page of one version."""
    files, total = found["files"], Counter[str]()
    rows = []
    for name, file in sorted(files.items()):
        for test, result in file["tests"].items():
            if result["outcome"] not in OVER and function_of(name, test) in FAILS_ANYWHERE:
                result["outcome"] = ANYWHERE
        own = counts(file)
        total += own
        drawn = SAMPLE if "unloaded" in file else len(file["tests"])
        cells = [f"`{name}`", drawn, file.get("collected", "–"), *(own[c] or "" for c in COLUMNS)]
        rows.append(cells)
    counted = sum(total.values()) - total[SKIPPED]
    cells = ["all", sum(row[1] for row in rows), "", *(total[c] or "" for c in COLUMNS)]
    rows.append([f"**{cell}**" if cell else "" for cell in cells])

    def of(key: str) -> str:
        values = sorted({file[key] for file in files.values()})
        return " to ".join(f"{value:g}" for value in dict.fromkeys((values[0], values[-1])))

    lines = [
        f"\n## {found['version']}\n",
        f"**{total[PASSED]} of {counted} pass ({total[PASSED] / counted:.0%})**"
        f"{without(ONNX, files, total)}. Of a file {of('sample')} tests were drawn, or all where "
        f"it has fewer. A test had {of('seconds')} seconds of the processor, and no other one of "
        f"its file began after {of('seconds_of_file')} seconds{packages(files)}.\n",
        "| file | run | of | " + " | ".join(COLUMNS) + " |",
        "|---|" + "--:|" * (len(COLUMNS) + 2),
        *(f"| {' | '.join(map(str, row))} |" for row in rows),
        "\nWhat did not pass:\n",
        *(f"- {line}" for line in failures(files)),
        "\nLeft out, since every test needs several GPUs, NCCL or CUDA graphs:\n",
        *(
            f"- `{name}`, line {line.replace(': ', ': `', 1)}`"
            for name, line in found["left_out"].items()
        ),
    ]
    if lacking := [name for name in found["all"] if name not in files]:
        lines.append(f"\nNot run yet: {', '.join(f'`{name}`' for name in lacking)}.")
    return "\n".join(lines) + "\n"


def without(name: str, files: dict[str, Any], total: Counter[str]) -> str:
    """Return how many pass without one file, as the end of a sentence, or nothing."""
    if name not in files:
        return ""
    others = total - counts(files[name])
    counted = others.total() - others[SKIPPED]
    return (
        f", and without `{name}` {others[PASSED]} of {counted} ({others[PASSED] / counted:.0%})"
        if counted
        else ""
    )


def packages(files: dict[str, Any]) -> str:
    """Return which packages the runs had that have noted them, as the end of a sentence."""
    versions: dict[str, set[str]] = {}
    for file in files.values():
        for name, number in file.get("packages", {}).items():
            versions.setdefault(name, set()).add(number)
    named = [f"{name} {' or '.join(sorted(own))}" for name, own in versions.items()]
    return f". The newest runs had {', '.join(named)}" if named else ""


def function_of(name: str, test: str) -> str:
    """Return the file and the function of a test."""
    function = re.sub(r"\[.*", "", test.rpartition("::")[2])
    return f"{name}::{function}"


def failures(files: dict[str, Any]) -> list[str]:
    """Return a line for each function and reason: how many tests, and what the error says."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, file in sorted(files.items()):
        if "unloaded" in file:
            found[name, "", file["unloaded"]] = [file["error"]]
        for test, result in file["tests"].items():
            if result["outcome"] not in (PASSED, SKIPPED):
                function = function_of(name, test).rpartition("::")[2]
                found.setdefault((name, function, result["outcome"]), []).append(result["error"])
    lines = []
    for (name, function, outcome), errors in found.items():
        why = {"value differs": EXPLAINED, ANYWHERE: FAILS_ANYWHERE}.get(outcome, {})
        known = why.get(f"{name}::{function}")
        number = f"{len(errors)} " if function else "the file does not load: "
        where = f"`{name}`{f' `{function}`' if function else ''}"
        said_first = textwrap.shorten(errors[0], 200, placeholder=" …")
        lines.append(f"{where}: {number}{outcome}. {known or f'`{said_first}`'}")
    return lines


def main(argv: Sequence[str]) -> int:
    """Run tests, or write the table of results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", help="it has tests/pytorch of the version")
    parser.add_argument("version", nargs="?")
    parser.add_argument("--results", type=Path, default=Path("te_tests.json"))
    parser.add_argument("--sample", type=int, default=SAMPLE)
    parser.add_argument(
        "--keep", action="store_true", help="what passed of the same draw in RESULTS"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="of a test, by the processor")
    parser.add_argument("--seconds-of-file", type=float, default=3600.0, help="then it ends early")
    parser.add_argument(
        "--only", nargs="*", default=[], help="parts of the names of files, in order"
    )
    parser.add_argument("--table", type=Path, nargs="+", metavar="RESULTS", help="write the table")
    options = parser.parse_args(argv)
    if options.table:
        TABLE.write_text(table(options.table), "utf-8")
        return 0
    if options.folder is None or options.version is None:
        parser.error("a folder and a version are needed, or --table")
    options.folder = options.folder.resolve()
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
