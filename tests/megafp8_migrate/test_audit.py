"""Test `megafp8 audit` on a stand-in for Megatron whose flags do what this file says."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Self

import pytest

from megafp8.config.errors import SettingError
from megafp8.specs.te_versions import DEFAULT_VERSION
from megafp8_migrate.audit import host, main, request, runs, sources
from megafp8_migrate.audit.reads import Code
from te_cpu import wheel
from tests.limits import HANG_SECONDS
from tests.te_sources import need_sources
from tests.train.runs import Driver

STAND_IN = Path(__file__).parent / "megatron_stand_in"
JOB = "pretrain_gpt.py --num-layers 24 --fp8-format hybrid"
Audit = Callable[..., dict[str, str]]


@pytest.fixture
def audit(capsys: pytest.CaptureFixture) -> Audit:
    """Return each flag's answer and its lines, by the flag."""
    need_sources(DEFAULT_VERSION)

    def run(*argv: str) -> dict[str, str]:
        assert main(list(argv)) == 0, capsys.readouterr().err
        answers, flag = {}, ""
        for line in capsys.readouterr().out.splitlines()[2:]:
            if line.startswith("    "):
                answers[flag] += line
            elif "  " in line:
                flag, _, said = line.partition("  ")
                answers[flag] = said.strip()
        return answers

    return run


class ForkedProcess:
    """Imitate what `Host` uses of `subprocess.Popen`, as a fork of a process with torch.

    A process of its own would import torch for as long as all the runs of a short audit take.
    """

    def __init__(
        self, driver: Driver, folder: Path, command: list[str], *,
        env: dict[str, str], cwd: Path, stderr: IO[bytes], **_: object,
    ) -> None:  # fmt: skip
        assert command[:3] == [sys.executable, "-P", "-m"]
        self._driver, self._code = driver, None
        pipes = {name: str(folder / name) for name in ("stdin", "stdout")}
        for pipe in pipes.values():
            os.mkfifo(pipe)
        pipes["stderr"] = f"/proc/{os.getpid()}/fd/{stderr.fileno()}"
        asked = {"python": command[2:], "cwd": str(cwd), "env": env, **pipes}
        self.pid = driver.ask(asked)
        self.stdin, self.stdout = open(pipes["stdin"], "w"), open(pipes["stdout"])  # noqa: SIM115

    def poll(self, seconds: float = 0.0) -> int | None:
        if self._code is None:
            self._code = self._driver.ask({"wait": self.pid, "seconds": seconds})
        return self._code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()
        assert self.poll(HANG_SECONDS) is not None


@pytest.fixture
def forks(
    driver: Driver, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let audits run in forks; the test after this fixture and that of signals do not."""

    def start(command: list[str], **more: Any) -> ForkedProcess:
        return ForkedProcess(driver, tmp_path_factory.mktemp("pipes"), command, **more)

    replaced = SimpleNamespace(**vars(subprocess) | {"Popen": start})
    monkeypatch.setattr(runs, "subprocess", replaced)


def test_flags_with_an_effect_reach_te_and_others_have_none(audit: Audit) -> None:
    """Each effect is seen in one thing alone: the recipe, outputs, messages, or buffers."""
    found = audit(
        "--source", str(STAND_IN),
        "--line", f"{JOB} --fp8-margin 2 --no-fp8-wgrad --first-last-layers-bf16 "
        "--tp-only-amax-red --fp8-multi-head-attention --fp8-recipe delayed "
        "--num-layers-at-start-in-bf16=0 --fp8-param-gather",
    )  # fmt: skip
    assert found["--fp8-margin 2"].startswith("reaches TE: the recipe: margin 2, without it 0")
    assert found["--fp8-format hybrid"].startswith("reaches TE: the recipe: DelayedScaling")
    assert found["--tp-only-amax-red"].startswith("reaches TE: the step")
    assert "message all_reduce" in found["--tp-only-amax-red"]
    assert "buffer module.kept" in found["--fp8-multi-head-attention"]
    assert found["--first-last-layers-bf16"].startswith("reaches TE: the step")
    line = _line("not config.fp8_wgrad")
    assert found["--no-fp8-wgrad"].startswith("no effect: recipe and training step are the same")
    assert f"read at {line}" in found["--no-fp8-wgrad"]
    assert found["--fp8-recipe delayed"].startswith("no effect: their configuration is the same")
    assert "unrecognized" in found["--num-layers-at-start-in-bf16 0"]
    assert found["--num-layers-at-start-in-bf16 0"].startswith("refused")
    assert found["--fp8-param-gather"].startswith("refused: ValueError: FP8 weights are not here")
    assert _line("FP8 weights are not here") in found["--fp8-param-gather"]


def _line(text: str) -> str:
    """Return the place of a text in the stand-in's file of recipes."""
    file = "megatron/core/fp8_utils.py"
    lines = (STAND_IN / file).read_text().splitlines()
    [number] = [number for number, line in enumerate(lines, start=1) if text in line]
    return f"{file}:{number}"


@pytest.mark.usefixtures("forks")
def test_a_flag_behind_a_variable_is_not_called_dead(audit: Audit, tmp_path: Path) -> None:
    """Its effect appears with the variable, which a script exports or --env gives."""
    line = f"{JOB} --fp8-interval 4 --fp8-dot-product-attention --no-fp8-wgrad"
    source = ("--source", str(STAND_IN))
    found = audit(*source, "--line", line)
    assert found["--fp8-interval 4"].startswith("not decided: STAND_IN_HIDDEN")
    assert found["--fp8-dot-product-attention"].startswith("not decided: STAND_IN_DEBUG")
    assert found["--no-fp8-wgrad"].startswith("no effect")
    script = tmp_path / "train.sh"
    script.write_text(f"export STAND_IN_HIDDEN=1\nSTAND_IN_DEBUG=1 python {line}\n")
    found = audit(*source, str(script))
    assert found["--fp8-interval 4"].startswith("reaches TE: the recipe: margin 5, without it 1")
    assert found["--fp8-dot-product-attention"].startswith("reaches TE")
    found = audit(*source, "--line", f"{JOB} --fp8-interval 4", "--env", "STAND_IN_HIDDEN=0")
    assert found["--fp8-interval 4"].startswith("no effect")


def test_a_script_chooses_no_program_that_the_audit_runs(tmp_path: Path) -> None:
    """Its compiler would compile our kernels, and with it a stranger's program would run."""
    (tmp_path / "megatron").mkdir()
    text = "# NCCL\nimport os\nos.getenv('READ_THERE')\nos.environ['CC']\nos.getenv('TMPDIR')\n"
    (tmp_path / "megatron/a.py").write_text(text)
    code = Code([tmp_path], ["megatron"])
    names = ("CC", "CL", "TMPDIR", "CUDA_HOME", "LD_PRELOAD", "READ_THERE", "NVTE_DEBUG", "READ")
    for value, passed in (("1", {"READ_THERE", "NVTE_DEBUG"}), ("/evil", set()), ("a.b", set())):
        exports = "".join(f"export {name}={value}\n" for name in names)
        asked = request.read(f"{exports}python {JOB}\n", "train.sh", [], {}, tmp_path)
        assert set(asked.environment) == set(names)
        assert set(runs.passed_on(asked.environment, code)) == passed


def _with_model(folder: Path, replacement: str, more: str) -> Path:
    """Return a copy of the stand-in whose model computes something else in place of `x * 2`."""
    copy = folder / "source"
    shutil.copytree(STAND_IN, copy)
    file = copy / "megatron/core/models/gpt/__init__.py"
    file.write_text(file.read_text().replace("x * 2", replacement) + "\n\n" + more)
    return copy


UNSTEADY = """\
def seed():
    import os
    return 1 + os.getpid()
"""


@pytest.mark.usefixtures("forks")
def test_what_cannot_be_compared_is_not_decided(audit: Audit, tmp_path: Path) -> None:
    """Neither what depends on the shell, nor what two equal runs do not agree on.

    Flags that the framework's own defaults repeat have no effect whatever steps compute.
    """
    copy = _with_model(tmp_path, "x * torch.rand(()).div(seed()).item()", UNSTEADY)
    found = audit(
        "--source", str(copy),
        "--line", f"{JOB} --first-last-layers-bf16 --no-fp8-wgrad --fp8-margin 0 "
        "--fp8-recipe delayed --fp8-interval $N",
    )  # fmt: skip
    assert found["--no-fp8-wgrad"].startswith("not decided: runs with the same flags differ")
    same = "no effect: their configuration is the same without it"
    assert found["--fp8-margin 0"].startswith(same)
    assert found["--fp8-recipe delayed"].startswith(same)
    assert "depends on $N" in found["--fp8-interval $N"]
    assert "(in a job without --fp8-interval $N)" in found["--fp8-format hybrid"]


SELDOM = """\
def factor():
    \"\"\"Return another number in the fourth process that asks on each rank.\"\"\"
    import os
    name = f"asked{os.environ['RANK']}"
    with open(name, "a") as file:
        file.write(f"{os.getpid()}\\n")
    with open(name) as file:
        processes = list(dict.fromkeys(file))
    return 3 if len(processes) == 4 else 2
"""


@pytest.mark.usefixtures("forks")
def test_a_step_that_differs_now_and_then_is_no_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Three runs with all flags are equal, and the one without a flag differs by chance.

    The report of the runs says on stderr which one begins.
    """
    need_sources(DEFAULT_VERSION)
    copy = _with_model(tmp_path, "x * factor()", SELDOM)
    line = f"{JOB} --first-last-layers-bf16 --no-fp8-wgrad --tp-only-amax-red"
    assert main(["--source", str(copy), "--line", line]) == 0
    done = capsys.readouterr()
    said = {line.partition("  ")[0]: line for line in done.out.splitlines()}
    assert "not decided: runs with the same flags differ" in said["--no-fp8-wgrad"]
    progress = done.err.splitlines()
    assert progress[:2] == [
        "7 runs make a configuration of the settings; at most 7 with training steps follow where "
        "these do not decide, and what differs is repeated",
        "1 of 7: settings with all flags",
    ]
    assert "5 of 7: settings without --first-last-layers-bf16" in progress
    assert "1 of 6: two training steps with all flags" in progress


@pytest.mark.usefixtures("forks")
def test_flags_of_a_job_with_code_are_not_those_of_one_without(
    audit: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code is not called, in no folder; what it may decide about is not decided."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    line = (
        f"{JOB} --fp8-quantizer-factory os.makedirs --no-fp8-wgrad --fp8-margin 2 --fp8-interval 1"
    )
    found = audit("--source", str(STAND_IN), "--line", line)
    code = "--fp8-quantizer-factory os.makedirs"
    assert found[code].startswith("not decided: names code or a file")
    assert found["--no-fp8-wgrad"].startswith(f"not decided: {code} may decide about it")
    assert f"(in a job without {code})" in found["--fp8-margin 2"]
    assert found["--fp8-interval 1"].startswith("no effect")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("forks")
def test_a_flag_that_another_one_needs_is_compared_without_both(
    audit: Audit, tmp_path: Path
) -> None:
    """A job that is refused without it is no answer, and neither is a race of messages."""
    copy = tmp_path / "source"
    shutil.copytree(STAND_IN, copy)
    file = copy / "megatron/training/arguments.py"
    file.write_text(
        file.read_text().replace("bf16 fp8-param", "bf16 overlap-param-gather fp8-param")
        + "    if args.no_fp8_wgrad and not args.fp8_format:\n"
        '        raise ValueError("needs FP8")\n'
    )
    file = copy / "megatron/core/models/gpt/__init__.py"
    races = "(os.getpid() if '--overlap-param-gather' in sys.argv else 2)"
    file.write_text("import os\nimport sys\n" + file.read_text().replace("x * 2", f"x * {races}"))
    line = f"{JOB} --no-fp8-wgrad --fp8-margin 2 --overlap-param-gather"
    found = audit("--source", str(copy), "--line", line)
    assert found["--no-fp8-wgrad"].startswith("no effect")
    said = found["--fp8-format hybrid"]
    assert said.startswith("reaches TE: the recipe: DelayedScaling, without it nothing")
    assert "both without --no-fp8-wgrad, with which it is needed" in said


EVIL = (
    "os.makedirs",
    "runpy.run_path",
    "/tmp/fifo",
    "./file.py",
    "evil:b",
    "~root",
    "evil y.z",
    "-m.n",
)
CODE = {
    "--{f}-quantizer-factory {v}": "pretrain_gpt.py --bf16 --fp8-format hybrid --fp8-recipe custom",
    "--te-precision-config-file {v}": JOB,
    "--te-precision-config-file={v}": JOB,
    "--fp8-recipe {v}": JOB,
    "--fp8-margin {v}": JOB,
    "--fp8-some-hook plain_{v}": JOB,
    "--normalization {v}": JOB,
    "--recompute-method {v}": JOB,
    "--spec {v} b": JOB,
    "--tokenizer-model {v} --trust-remote-code": JOB,
    "--yaml-cfg {v}": JOB,
    "--data-path {v}": JOB,
    "--window-attn-skip-freq {v}": JOB,
}
"""Flags of Megatron's whose values are imported, called, evaluated or opened, and plain ones."""
BRIDGE_CODE = (
    "model: {{num_layers: 2, fp8_recipe: custom, fp8_quantizer_factory: {v}}}\ntrain: {{a: 1}}",
    "mixed_precision: {{bf16: true, fp8: hybrid, fp8_quantizer_factory: {v}}}\ntrain: {{a: 1}}",
    "mixed_precision: {{bf16: true, fp8: hybrid, params_dtype: {v}}}\nddp: {{bucket_path: {v}}}",
    "mixed_precision: {v}\noptimizer: {{fp8_hook: {v}}}\ntrain: {{a: 1}}",
    "mixed_precision: {{_target_: {v}}}\ntrain: {{a: 1}}",
    "mixed_precision: {{_target_: {v}, a: 1, b: 2, fp8: hybrid}}\ntrain: {{a: 1}}",
    "model: {{_target_: {v}, fp8: hybrid, fp8_x: {{_target_: {v}, _args_: [1]}}}}\ntrain: {{a: 1}}",
    "model: {{fp8: hybrid, normalization: {v}, fp8_y: [{v}]}}\ntrain: {{a: 1}}",
)
ACCELERATE_CODE = (
    "mixed_precision: fp8\nfp8_config: {{margin: {v}}}",
    "mixed_precision: fp8\nfp8_config: {{margin: 1, other: {{_target_: {v}}}}}",
    "mixed_precision: fp8\nfp8_config: {{margin: 1, config_file: x, '{v}': 1}}",
    "mixed_precision: fp8\nmain_training_function: {v}\nfp8_config: {{margin: 1}}",
)


@pytest.mark.parametrize("value", EVIL)
def test_no_run_is_given_code_or_a_file_that_a_script_names(value: str) -> None:
    """A word of a flag, a field or a variable reaches no framework if it may name either."""
    jobs = [
        (f"{job} {flag.format(v=value, f=fp)}\n", "a.sh")
        for flag, job in CODE.items()
        for fp in ("fp8", "fp4")
    ]
    quoted = json.dumps(value)
    jobs += [(text.format(v=quoted), "a.yaml") for text in BRIDGE_CODE]
    jobs += [
        (text.format(v=value if "'" in text else quoted), "b.yaml") for text in ACCELERATE_CODE
    ]
    for text, name in jobs:
        asked = request.read(text, name, [], {"NVTE_HOOK": value}, None)
        flags = [flag for flag in asked.flags if not flag.why_not]
        described = json.dumps(runs._described(asked, flags, "dp2", "all"))
        described += json.dumps(runs.passed_on(asked.environment, Code([], [])))
        for word in value.split():
            assert word not in described, text


def test_numbers_and_words_are_plain() -> None:
    words = ["hybrid", "1e-3", "-1", "most_recent", "bf16-with-fp8", "torch.bfloat16"]
    for value in (*words, "(false, false, true)", [True, False], 3, None, words):
        assert request.is_plain(value), value


def _raised(code: str, file: str) -> Exception:
    """Return the error that some code raises, as if it stood in a file."""
    try:
        exec(compile(code, file, "exec"), {})
    except Exception as error:
        return error
    raise AssertionError(code)


OURS = str(Path(wheel.__file__).with_name("gemm.py"))


@pytest.mark.parametrize(
    ("code", "file", "is_ours"),
    [
        ("raise TypeError('must be torch.cuda.HalfTensor. Received torch.cuda.cuda.X')", "a", True),
        ("raise ValueError('tensor is on cpu')", "a", True),
        ("raise ValueError(\"<class 'te_cpu.cuda.Stream'> is no stream\")", "a", True),
        ("assert False, 'transformer_engine_torch.DType has no kX'", "a", True),
        ("raise RuntimeError('needs compute capability 10.0')", "a", True),
        ("int('x')", OURS, True),
        (f"exec(compile('1 / 0', {OURS!r}, 'exec'))", "a", True),
        (f"try: exec(compile('1 / 0', {OURS!r}, 'exec'))\nexcept Exception: raise KeyError('no')",
         "a", True),
        ("raise ValueError('--fp8-margin must be 0 with --cpu-offloading, CUDA_DEVICE_MAX')", "a",
         False),
        ("raise AssertionError('FP8 weights need a recipe')", "a", False),
    ],
)  # fmt: skip
def test_an_error_of_the_cpu_in_place_of_a_gpu_is_no_refusal(
    code: str, file: str, is_ours: bool
) -> None:
    assert host._is_ours(_raised(code, file)) is is_ours


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    """Neither as a wheel nor as a file of the framework."""
    os.mkfifo(tmp_path / "megatron_core-0.19.2-py3-none-any.whl")
    (tmp_path / "megatron").mkdir()
    os.mkfifo(tmp_path / "megatron/a.py")
    with pytest.raises(SettingError, match="FIFO"):
        sources.find("megatron-core", [tmp_path], tmp_path / "unpacked")
    assert Code([tmp_path], ["megatron"]).readings("fp8") == []


def test_a_signal_removes_the_folder_of_the_runs(tmp_path: Path) -> None:
    """It is nobody else's while they run; when the command ends, it and its processes are gone."""
    command = [sys.executable, "-m", "megafp8", "audit", "--source", str(STAND_IN), "--line"]
    with subprocess.Popen(
        [*command, f"{JOB} --fp8-margin 2"], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert process.stderr.readline().startswith("5 runs")
        [folder] = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        process.send_signal(signal.SIGTERM)
        process.stderr.read()  # ends when each process that has it has ended
    assert process.returncode == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_named_with_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["--source", str(tmp_path), "--line", JOB]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "pip download --no-deps --python-version 3.12" in said
    assert "Traceback" not in said
    broken = tmp_path / "megatron_core-0.19.2-py3-none-any.whl"
    broken.write_bytes(b"no wheel")
    assert main(["--source", str(broken), "--line", JOB]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main(["--line", "pretrain_gpt.py --num-layers 2"]) == 2
    assert "no flag about FP8 or FP4" in capsys.readouterr().err
    assert main([]) == 2


@pytest.mark.usefixtures("forks")
def test_code_that_cannot_be_imported_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    need_sources(DEFAULT_VERSION)
    copy = tmp_path / "source"
    shutil.copytree(STAND_IN, copy)
    (copy / "megatron/training/training.py").write_text("import nowhere_at_all\n")
    assert main(["--source", str(copy), "--line", JOB]) != 0
    said = capsys.readouterr().err
    assert said.endswith("Run: pip install nowhere_at_all\n")
    (copy / "megatron/training/training.py").write_text("import megatron.nothing\n")
    assert main(["--source", str(copy), "--line", JOB]) != 0
    said = capsys.readouterr().err
    assert "megatron.nothing" in said and "megatron/training/training.py:1" in said
    assert "pip install" not in said and "Traceback" not in said


ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: fp8
num_processes: 8
fp8_config:
  backend: TE
  margin: 2
  interval: 4
  amax_history_length: 16
  amax_compute_algo: most_recent
"""


@pytest.mark.usefixtures("forks")
def test_accelerates_flags_and_one_that_is_given_an_effect(audit: Audit, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    file = tmp_path / "accelerate.yaml"
    file.write_text(ACCELERATE)
    found = audit(str(file))
    assert found["fp8_config.margin=2"].startswith("reaches TE: the recipe: margin 2, without it 0")
    assert found["fp8_config.interval=4"].startswith("no effect")
    assert "accelerate/utils/dataclasses.py" in found["fp8_config.interval=4"]
    assert "never reads it" in found["fp8_config.amax_history_length=16"]
    assert (
        "has amax_compute_algo max and not most_recent"
        in (found["fp8_config.amax_compute_algo=most_recent"])
    )
    spec = importlib.util.find_spec("accelerate")
    assert spec is not None and spec.origin is not None
    copy = tmp_path / "source"
    shutil.copytree(Path(spec.origin).parent, copy / "accelerate")
    changed = copy / "accelerate/utils/transformer_engine.py"
    text = changed.read_text()
    marked = '    use_mxfp8_block_scaling = kwargs.pop("use_mxfp8_block_scaling", False)\n'
    assert marked in text
    changed.write_text(
        text.replace(marked, marked + '    kwargs["margin"] = kwargs.pop("interval", 1)\n')
    )
    found = audit("--source", str(copy), str(file))
    assert found["fp8_config.interval=4"].startswith("reaches TE: the recipe: margin 4")
    assert found["fp8_config.margin=2"].startswith("no effect")
