"""What an import of Transformer Engine's Python leaves behind where it fails."""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import te_cpu
from scripts.packages import projects
from te_cpu import loading, torch_private
from te_cpu.errors import VersionError
from tests.te_sources import need_sources


def seen() -> dict[str, Any]:
    """What the import changes in a process."""
    tensor: Any = torch.Tensor
    return {
        "environment": dict(os.environ),
        "path": list(sys.path),
        "shards": torch.distributed.fsdp.FullyShardedDataParallel.__init__,
        "modules": {
            name for name in sys.modules if name.startswith(("transformer_engine", "onnx"))
        },
        "cuda": {name: getattr(torch.cuda, name) for name in (*loading.cuda.ANSWERS, "Stream")},
        "range": torch.cuda.nvtx.range,
        "version": type(torch.version),
        "functions": (torch.empty, torch.Tensor.to, torch.Tensor.is_cuda, torch.Tensor.type),
        "default device": torch.utils._device.DeviceContext.__init__,
        "subclasses": tensor._make_wrapper_subclass,
        "script": torch.jit.script,
        "accelerator": torch.accelerator.is_available,
        "files": len(torch.serialization._package_registry),
        "generators": torch.random.fork_rng,
        "autocast": (torch.autocast.__enter__, torch.autocast.__exit__),
        "recomputing": torch.utils.checkpoint.DefaultDeviceType._default_device_type,
        "parallel": torch.nn.parallel.DistributedDataParallel.__init__,
        "meshes": torch.distributed.DeviceMesh.__init__,
        "layers": torch.nn.Module.to,
    }


def test_a_failed_import_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    need_sources(te_cpu.DEFAULT_VERSION)
    changed = []

    def fail(sources: object) -> None:
        changed.append(seen())
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        raise RuntimeError("planted")

    torch_private.load_dynamo()
    before = seen()
    monkeypatch.setattr(loading, "make_extension", fail)
    for _ in range(2):
        with pytest.raises(VersionError, match=r"cannot be loaded here \(RuntimeError: planted\)"):
            te_cpu.load()
        assert seen() == before
        with pytest.raises((AssertionError, RuntimeError)):
            torch.zeros(1, device="cuda")
    assert all(changed[0][name] != value for name, value in before.items())
    assert te_cpu.loaded() is None


def test_a_package_that_is_missing_is_named_before_or_while_it_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What every version needs is asked for before anything is fetched; what one version alone
    needs is named when its import fails, with the line that installs it."""
    monkeypatch.setitem(sys.modules, "pydantic", None)
    assert loading.lacking() == ["pydantic"]
    with monkeypatch.context() as patched:
        patched.setattr(loading.wheel, "sources", lambda version: pytest.fail("it was fetched"))
        with pytest.raises(VersionError, match="needs pydantic, which is not installed. Run `pip"):
            te_cpu.load()
    monkeypatch.setattr(loading, "NEEDED", ())
    sources = te_cpu.Sources("2.12.0", Path("nowhere"), is_known=True)
    monkeypatch.setattr(loading.wheel, "sources", lambda version: sources)
    for name, hint in (("other.part", "Run `pip install other`, or use 2"), (None, "Use 2")):

        def fail(sources: object, name: str | None = name) -> None:
            raise ModuleNotFoundError("No module named", name=name)

        monkeypatch.setattr(loading, "_import", fail)
        with pytest.raises(VersionError, match=r"ModuleNotFoundError") as error:
            te_cpu.load()
        assert error.value.hint.startswith(hint)


def test_another_version_is_refused_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions that differ in their last number alone are two versions."""
    there = te_cpu.Sources("2.14.0", Path("nowhere"), is_known=True)
    monkeypatch.setattr(loading, "loaded", lambda: there)
    with pytest.raises(VersionError, match=r"=2\.14\.1: 2\.14\.0 is loaded in this process"):
        te_cpu.load("2.14.1")


def test_what_te_needs_is_installed_with_the_package() -> None:
    """An import that lacks it names it; what is in the one list and not in the other is not."""
    lines = projects()["te_cpu"]["dependencies"]
    assert set(loading.NEEDED) <= {re.split(r"[^\w-]", line)[0] for line in lines}


def test_no_text_of_the_package_names_a_setting_or_extra_of_megafp8() -> None:
    """A program that uses te_cpu alone has neither; the trainer's backend adds its own."""
    own = re.compile(
        r"\b(?:model|trainer|exp_manager)\.\w+=|\bfp8_(?:params|backend)\b|megafp8\[|\.\["
    )
    texts = [
        (path.name, node.value)
        for path in sorted(Path(te_cpu.__file__).parent.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert len(texts) > 500
    assert [(name, text) for name, text in texts if own.search(text)] == []
