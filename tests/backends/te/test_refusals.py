"""What the `te` backend refuses before Transformer Engine is loaded, and parts that need none."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import te_cpu
from megafp8.backends import choose
from megafp8.backends.te import names as te_names
from megafp8.backends.te import on_cpu
from megafp8.backends.te.layer import HeadDropout
from megafp8.errors import ConfigError, UserError
from megafp8.models.random import RandomStreams
from megafp8.optim.kernels import fused_adam
from megafp8.parallel.mesh import single_rank
from megafp8.specs import Fp8Recipe, RunSpec
from megafp8.specs.precision import AutoBackend, BackendName, ModuleRule
from megafp8.specs.recipes import HIGH_PRECISION
from te_cpu.errors import MissingKernelError, SizeError, VersionError
from te_cpu.missing import missing
from tests.tiny import gpt_spec, run_spec
from tests.train.runs import Driver

ROOT = Path(__file__).parents[3]
MODEL = gpt_spec(activation="gelu-tanh")
DELAYED = Fp8Recipe(amax_history_len=4)


def spec_of(backend: BackendName, fp8: Fp8Recipe | None, **changes: Any) -> RunSpec:
    spec = run_spec(fp8=fp8, model=dataclasses.replace(MODEL, **changes))
    precision = dataclasses.replace(spec.precision, backend=backend)
    return dataclasses.replace(spec, precision=precision)


IN_NO_FORM = """
import importlib.metadata, importlib.util, sys
sys.modules["te_cpu"] = None
found = importlib.metadata.version
def version(name):
    if name == "te-on-cpu":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)
importlib.metadata.version = version
"""
WITHOUT_FILES = """
import importlib.metadata, sys
sys.modules["te_cpu"] = None
importlib.metadata.version = lambda name: "1.0"
"""


@pytest.mark.parametrize(
    ("before", "why"),
    [
        (IN_NO_FORM, "it is not installed. In a clone: pip install -e ./te_cpu"),
        (WITHOUT_FILES, "it cannot be imported (ModuleNotFoundError: "),
        ("from te_cpu.absent import load", "it cannot be imported (ModuleNotFoundError: No module"),
        ("from te_cpu.wheel import absent", "it cannot be imported (ImportError: cannot import"),
    ],
    ids=["not installed", "files are gone", "a module is gone", "of another version"],
)
def test_a_cpu_needs_te_cpu_and_a_gpu_does_not(
    driver: Driver, before: str, why: str, tmp_path: Path
) -> None:
    """Where the package is missing, all files of the backend but `on_cpu` can be imported. One that
    is there and cannot be imported is not called missing."""
    if before.startswith("from"):
        (tmp_path / "te_cpu").mkdir()
        (tmp_path / "te_cpu/wheel.py").write_text("")
        (tmp_path / "te_cpu/__init__.py").write_text(before)
        before = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})"
    code = f"""{before}
from megafp8.backends.te import backend, names
from megafp8.errors import ConfigError
try:
    names.kernels_on_cpu()
except ConfigError as error:
    print(error)
"""
    done = driver.run_python("-c", code, cwd=ROOT, folder=tmp_path)
    start = "model.fp8_backend=te: needs the package te-on-cpu where there is no GPU, and "
    assert done.stdout.startswith(start + why), done.stdout + done.stderr
    assert "pip install -e ./te_cpu" in done.stdout


def test_errors_of_te_cpu_become_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that a backward pass raises later: a user reads them without a traceback."""

    def load(version: str) -> None:
        raise VersionError("transformer-engine", version, "it is not there", "Fetch it")

    monkeypatch.setattr(te_cpu, "load", load)
    for kind in (MissingKernelError, SizeError):
        monkeypatch.setattr(kind, "raised_as", None)
        assert type(kind("planted")) is kind
    with pytest.raises(
        ConfigError, match=r"=2.20.2: it is not there. Fetch it, or use model.fp8_b"
    ):
        on_cpu.load("2.20.2")
    rotated = "Compute in BF16, or use disable_rht=True"
    for error, kind, setting in (
        (missing("moe_x"), NotImplementedError, "run on an NVIDIA GPU"),
        (missing("mxfp8_x"), NotImplementedError, " (here model.fp8_params)"),
        (SizeError(rotated), ValueError, " (here trainer.precision=bf16, model.fp4_disable_rht="),
    ):
        assert isinstance(error, UserError) and isinstance(error, kind)
        assert setting in str(error) and str(error).endswith(", or use model.fp8_backend=native")
        assert "\n" not in str(error)
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error) and str(copy) == str(error)


def test_rotary_positions_that_begin_again_are_refused() -> None:
    """It has one position for each place of a sequence, and this is told before it is loaded."""
    spec = spec_of("te", DELAYED, position_embedding_type="rope")
    spec = dataclasses.replace(spec, data=dataclasses.replace(spec.data, reset_position_ids=True))
    with pytest.raises(ConfigError, match="begin again at 0"):
        choose.check_backend(spec, torch.device("cpu"))


def test_a_program_s_own_spec_meets_all_refusals_at_once() -> None:
    """The checks of settings never saw it."""
    part = dataclasses.replace(DELAYED, modules=(ModuleRule("*.mlp.fc2", HIGH_PRECISION),))
    spec = spec_of("te", part, activation="gelu", transformer_block_type="post_ln")
    with pytest.raises(ConfigError) as caught:
        choose.check_backend(spec, torch.device("cpu"))
    text = str(caught.value)
    assert "3 settings cannot be used" in text
    for word in ("model.openai_gelu=False: ", "are pre-norm", "keeps a part of a layer out of FP8"):
        assert word in text, text


def test_auto_names_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the settings, of the environment and of the machine, in one line."""
    spec = spec_of("native", DELAYED, activation="gelu", transformer_block_type="post_ln")
    precision = dataclasses.replace(spec.precision, auto=AutoBackend())
    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", "1")
    mesh = single_rank(torch.device("cuda"))
    settled = choose.settle(dataclasses.replace(spec, precision=precision), mesh)
    assert settled.precision.auto is not None
    line = settled.precision.auto.text
    assert settled.precision.backend == "native" and line.startswith("not Transformer Engine: ")
    for word in ("tanh form", "pre-norm", "NVTE_UNFUSED_FP8_UPDATE=1", "is not installed"):
        assert word in line, line


@pytest.mark.parametrize(("version", "reason"), [
    ("1.13.0", "is too old: it must be 2.4 or later"), ("2.3.0", "is too old"), ("2.4.0", None),
    ("2.20.2", None), ("2.31.0", None), ("3.0.0", "is too new to be known"),
])  # fmt: skip
def test_versions_that_are_not_known_are_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, reason: str | None
) -> None:
    """2.2 and 2.3 keep the MLP's gradient quantizers elsewhere: scales would be others'."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(te_names, "import_te", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    found = te_names.why_te_cannot(torch.device("cuda"), "DelayedScaling")
    assert (found is None) if reason is None else (f"{version} {reason}" in str(found))
    is_newer = version in ("2.31.0", "3.0.0")
    assert ("newer than 2.20" in te_names.describe_version(version)) is is_newer


def test_a_recipe_that_the_gpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine would end in an error of its own at the first step."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.20.2")
    monkeypatch.setattr(te_names, "import_te", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    cuda = torch.device("cuda")
    assert te_names.why_te_cannot(cuda, "Float8CurrentScaling") is None
    assert te_names.why_te_cannot(cuda, None) is None
    found = te_names.why_te_cannot(cuda, "Float8BlockScaling")
    assert found == (
        "this GPU has compute capability 8.9, and Float8BlockScaling begins at compute capability "
        "9.0"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert te_names.why_te_cannot(cuda, "Float8BlockScaling", power_2_scale=True) is None
    assert te_names.why_te_cannot(cuda, "Float8CurrentScaling", power_2_scale=False) is None
    found = te_names.why_te_cannot(cuda, "Float8BlockScaling", power_2_scale=False)
    assert found is not None and "model.fp8_power_2_scale=True" in found


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    reason = str(te_names.why_te_cannot(torch.device("cuda"), None))
    assert "transformer-engine is not installed" in reason and "--no-build-isolation" in reason


def test_a_package_that_asserts_at_its_import_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformer Engine checks its own versions and parts by asserts."""
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("assert False, 'package version mismatch'\n")
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.12.0")
    reason = str(te_names.why_te_cannot(torch.device("cuda"), None))
    assert "cannot be loaded (AssertionError: package version mismatch)" in reason
    assert fused_adam("transformer_engine", "transformer_engine.pytorch.optimizers") is None


def test_torchao_without_fp8_is_refused() -> None:
    """The configuration refuses it; a program that makes its own specs meets this."""
    with pytest.raises(ConfigError, match="FP8 alone"):
        choose.check_backend(spec_of("torchao", None), torch.device("cpu"))


def test_attention_dropout_differs_by_rank_and_leaves_the_generator() -> None:
    """What Transformer Engine forks around attention's dropout under tensor parallelism, and the
    position that its recomputation gets back."""
    draws = []
    for rank in (0, 1):
        streams = RandomStreams(1234, rank)
        streams.begin_microbatch(3, 5)
        tracker = HeadDropout(streams, "site", torch.device("cpu"))
        with streams.keyed("layers.0.dropout", torch.device("cpu")):
            states = tracker.get_states()
            with tracker.fork():
                inside = torch.rand(4)
            draws.append((inside, torch.rand(4)))
        streams.begin_microbatch(4, 6)
        tracker.set_states(states)
        with tracker.fork():
            assert torch.equal(torch.rand(4), inside)
    assert not torch.equal(draws[0][0], draws[1][0])
    assert torch.equal(draws[0][1], draws[1][1])
