"""The compiled kernels are built once; whatever goes wrong leaves the torch path and a reason."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megafp8.files import cache_folder
from megafp8.precision import formats
from megafp8.precision.cast import decode, quantize
from megafp8.precision.kernels.compile import Library, library
from tests.spec import delayed
from tests.spec import formats as spec

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own; the process forgets the library before and after."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    library.cache_clear()
    yield cache_folder() / "kernels"
    library.cache_clear()


def use_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """`script` is the only compiler there is."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))


def assert_casts_follow_specification() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 10_000, dtype=np.uint32)
    values = bits.view(np.float32)
    for fmt, model in ((formats.E4M3, spec.E4M3), (formats.E5M2, spec.E5M2)):
        x, amax = torch.from_numpy(values), torch.zeros(())
        result = quantize(x, torch.tensor(0.75), fmt, amax=amax, grid_dtype=torch.float32)
        codes = result.payload.view(torch.uint8).numpy()
        expected = spec.quantize(values, np.float32(0.75), model)
        assert spec.same_codes(codes, expected, model)
        assert amax.item() == delayed.amax_of(values)
        numbers = spec.dequantize(codes, model)
        np.testing.assert_array_equal(result.grid.double().numpy(), numbers)
        for dtype in (torch.float32, torch.bfloat16):
            decoded = decode(result.payload, fmt, dtype).double().numpy()
            np.testing.assert_array_equal(decoded, numbers)


def assert_torch_path(*words: str) -> None:
    found: Library = library()
    assert found.lib is None
    assert "casts run as torch operations" in found.note
    assert all(word in found.note for word in words), found.note
    assert_casts_follow_specification()


def test_no_compiler_leaves_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_torch_path("no C compiler found")


@pytest.mark.parametrize(
    "script",
    [
        "exit 1",
        'case "$1" in --version) echo 1;; *) exit 1;; esac',
        "exit 0",
        'while [ "$1" != -o ]; do shift || exit 0; done; echo garbage > "$2"',
    ],
    ids=["not even a version", "no compilation", "no output", "garbage as output"],
)
def test_failing_compiler_leaves_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    use_compiler(monkeypatch, tmp_path, script)
    assert_torch_path(str(tmp_path / "compiler"), "failed")


@needs_compiler
def test_compiler_that_breaks_the_rounding_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """-ffast-math folds (y + M) - M to y. (Not when linking: that would flush subnormals here.)"""
    script = 'case " $* " in *" -c "*) exec cc "$@" -ffast-math;; *) exec cc "$@";; esac'
    use_compiler(monkeypatch, tmp_path, script)
    assert_torch_path("rounds differently")


def test_cache_that_cannot_be_written_leaves_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert_torch_path("failed")


@needs_compiler
def test_compiled_once_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> None:
    log = tmp_path / "log"
    use_compiler(monkeypatch, tmp_path, f'echo "$@" >> {log}; exec cc "$@"')
    first = library()
    assert first.lib is not None, first.note
    assert_casts_follow_specification()
    built = list(empty_cache.iterdir())
    assert [path.suffix for path in built] == [".so"], "only the library stays"
    stamp = built[0].stat().st_mtime_ns

    log.write_text("")
    library.cache_clear()  # as a new process
    second = library()
    assert second.lib is not None and second.note == first.note
    assert log.read_text().split() == ["--version"], "nothing was compiled again"
    assert built[0].stat().st_mtime_ns == stamp


@needs_compiler
def test_another_compiler_version_is_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> None:
    for version in ("1", "2"):
        script = f'case "$1" in --version) echo {version};; *) exec cc "$@";; esac'
        use_compiler(monkeypatch, tmp_path, script)
        library.cache_clear()
        assert library().lib is not None
    assert len(os.listdir(empty_cache)) == 2


@needs_compiler
def test_compiler_without_optional_flags_still_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = 'for a in "$@"; do case "$a" in -fopenmp|-mprefer*) exit 1;; esac; done; exec cc "$@"'
    use_compiler(monkeypatch, tmp_path, refuse)
    assert library().lib is not None, library().note
    assert_casts_follow_specification()
