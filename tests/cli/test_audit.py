"""Test `megafp8 audit` on a stand-in for Megatron whose flags do what this file says."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megafp8.cli.audit import main, request, runs
from megafp8.cli.audit.reads import Code
from megafp8.specs.te_versions import DEFAULT_VERSION
from tests.te_cpu.sources import need_sources

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
    line = "megatron/core/fp8_utils.py:22"
    assert "not config.fp8_wgrad" in (STAND_IN / line.split(":")[0]).read_text().splitlines()[21]
    assert found["--no-fp8-wgrad"].startswith("no effect: recipe and training step are the same")
    assert f"read at {line}" in found["--no-fp8-wgrad"]
    assert found["--fp8-recipe delayed"].startswith(
        "no effect: their configuration has the same value"
    )
    assert "unrecognized" in found["--num-layers-at-start-in-bf16 0"]
    assert found["--num-layers-at-start-in-bf16 0"].startswith("refused")
    assert found["--fp8-param-gather"].startswith("refused: ValueError: FP8 weights are not here")
    assert "megatron/core/fp8_utils.py:20" in found["--fp8-param-gather"]


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
    script = tmp_path / "train.sh"
    names = ("CC", "CL", "TMPDIR", "CUDA_HOME", "LD_PRELOAD", "READ_THERE", "NVTE_DEBUG", "READ")
    script.write_text("".join(f"export {name}=/evil\n" for name in names) + f"python {JOB}\n")
    asked = request.read(script.read_text(), "train.sh", [], {}, tmp_path)
    assert set(asked.environment) == set(names)
    assert set(runs.passed_on(asked.environment, code)) == {"READ_THERE", "NVTE_DEBUG"}


def test_what_cannot_be_compared_is_not_decided(audit: Audit, tmp_path: Path) -> None:
    """Neither what depends on the shell, nor what two equal runs do not agree on."""
    copy = tmp_path / "source"
    shutil.copytree(STAND_IN, copy)
    file = copy / "megatron/core/models/gpt/__init__.py"
    file.write_text(file.read_text().replace("x * 2", "x * torch.rand(()).div(seed()).item()")
                    + "\n\ndef seed():\n    import os\n    return 1 + os.getpid()\n")  # fmt: skip
    found = audit(
        "--source", str(copy),
        "--line", f"{JOB} --first-last-layers-bf16 --no-fp8-wgrad --fp8-margin $MARGIN",
    )  # fmt: skip
    assert found["--no-fp8-wgrad"].startswith("not decided: two runs with the same flags differ")
    assert "depends on $MARGIN" in found["--fp8-margin $MARGIN"]


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


def test_code_that_cannot_be_imported_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    need_sources(DEFAULT_VERSION)
    copy = tmp_path / "source"
    shutil.copytree(STAND_IN, copy)
    (copy / "megatron/training/training.py").write_text("import nowhere_at_all\n")
    assert main(["--source", str(copy), "--line", JOB]) != 0
    said = capsys.readouterr().err
    assert "nowhere_at_all" in said and "megatron/training/training.py:1" in said
    assert "Traceback" not in said


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
