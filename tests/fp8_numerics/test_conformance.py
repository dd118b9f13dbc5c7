"""The conformance vectors are what the specifications give, and what other implementations give."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8_numerics.conformance import check
from tests.fp8 import conformance_casts as megafp8_casts
from tests.spec import make_vectors as make

ROOT = Path(__file__).parents[2]
Arrays = dict[str, np.ndarray]


def test_the_files_are_made_by_the_specifications() -> None:
    assert sorted(path.name for path in make.FOLDER.iterdir()) == sorted(make.files())
    for name, content in make.files().items():
        assert (make.FOLDER / name).read_bytes() == content, (
            f"{name}: python -m tests.spec.make_vectors"
        )


def test_our_casts_agree() -> None:
    counts, wrong = check.check(megafp8_casts.run)
    assert wrong == []
    rules = {case["rule"] for case in json.loads((make.FOLDER / "cases.json").read_text())}
    assert {f"{rule}: the same" for rule in rules} == set(counts)


def off_by_one(rule: str, name: str, at: int) -> Callable[[dict[str, Any], Arrays], Arrays | None]:
    """Our casts with one wrong number in every case of a rule."""

    def run(case: dict[str, Any], tensors: Arrays) -> Arrays | None:
        found = megafp8_casts.run(case, tensors)
        if found is not None and case["rule"] == rule and found[name].size:
            flat = found[name].copy().reshape(-1)
            flat[at] = np.nextafter(flat[at], np.float32(9)) if flat.dtype.kind == "f" else 5
            found[name] = flat.reshape(found[name].shape)
        return found

    return run


@pytest.mark.parametrize(
    ("rule", "name", "at"),
    [
        ("delayed", "amax", 0),
        ("tensorwise", "codes", -1),
        ("rowwise", "dequant_scale", -1),
        ("blockwise_weight", "dequant_scale", 0),
        ("mxfp8", "scale_codes", 7),
        ("nvfp4_random", "codes", 100),
        ("nvfp4", "amax", 0),
        ("history", "history", -1),
        ("history", "agreed", 3),
        ("history", "quant_scale", -1),
    ],
)
def test_one_wrong_number_is_found_and_named(rule: str, name: str, at: int) -> None:
    counts, wrong = check.check(off_by_one(rule, name, at))
    assert counts[f"{rule}: different"] > 0 and {f"{rule}: different"} >= {
        what for what in counts if what.endswith("different")
    }
    assert all(f'"rule": "{rule}"' in line and f"}}: {name}: 1 of " in line for line in wrong)


def test_a_missing_array_another_type_and_what_is_left_out_are_said() -> None:
    def run(case: dict[str, Any], tensors: Arrays) -> Arrays | None:
        found = megafp8_casts.run(case, tensors) if case["rule"] == "mxfp8" else None
        if found is not None:
            del found["scale_codes"]
            found["codes"] = found["codes"].astype(np.int64)
        return found

    counts, wrong = check.check(run)
    assert counts["mxfp8: different"] == 10 and counts["history: left out"] == 6
    assert any("scale_codes: missing" in line for line in wrong)
    assert any("codes: int64[32, 256] and not uint8[32, 256]" in line for line in wrong)


def test_torchao_has_the_same_mxfp8() -> None:
    """Version 0.18 multiplies by 1 where a scale's code is 0, so such matrices are left out."""
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    def run(case: dict[str, Any], tensors: Arrays) -> Arrays | None:
        if case["rule"] != "mxfp8" or case["input"] in ("zeros", "subnormal", "inf", "nan"):
            return None
        x, mode = torch.from_numpy(tensors["x"]), ScaleCalculationMode.RCEIL
        scales, codes = to_mx(x, torch.float8_e4m3fn, 32, mode)
        return {
            "codes": codes.view(torch.uint8).numpy(),
            "scale_codes": scales.view(torch.uint8).numpy(),
        }

    counts, wrong = check.check(run)
    assert wrong == [] and counts["mxfp8: the same"] == 6


def test_the_runner_needs_numpy_alone(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def run(case, tensors):\n    return None\n")
    program = (
        "import sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "for name in ('torch', 'megafp8', 'tests', 'safetensors'):\n"
        "    sys.modules[name] = None\n"
        "import check\n"
        "sys.exit(check.main(sys.argv[2:]))\n"
    )
    command = [sys.executable, "-c", program, str(ROOT / "fp8_numerics/conformance")]
    done = subprocess.run([*command, str(mine)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "mxfp8: left out: 10" in done.stdout, done.stderr
    mine.write_text("import numpy as np\ndef run(case, tensors):\n    return {}\n")
    done = subprocess.run([*command, str(mine)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and "codes: missing" in done.stdout, done.stderr
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "usage" in done.stderr


@pytest.mark.parametrize(
    ("text", "said"), [(None, "there is no such file"), ("run = 1\n", "has no function run(case")]
)
def test_a_file_that_is_no_implementation_is_named(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.py"
    if text is not None:
        mine.write_text(text)
    assert check.main([str(mine)]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {mine}: {said}") and len(shown.splitlines()) == 1


def test_the_implementation_of_the_readme_agrees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (ROOT / "fp8_numerics/conformance/README.md").read_text("utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    (tmp_path / "mine.py").write_text(code)
    assert check.main([str(tmp_path / "mine.py")]) == 0
    assert "delayed: the same: 90\n" in capsys.readouterr().out
