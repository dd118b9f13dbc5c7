"""The compiled kernels are built once; whatever goes wrong leaves the torch path and a reason."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8_numerics import formats
from fp8_numerics.caches import cache_folder, check_own_file, why_unsafe
from fp8_numerics.cast import decode, quantize
from fp8_numerics.gemm import EMULATED
from fp8_numerics.kernels import compile as compile_kernels
from fp8_numerics.kernels.compile import Library, library
from megafp8.backends.native import kernels_of
from megafp8.specs import Fp8Recipe
from megafp8.train import compile as compile_train
from tests import c_kernels, compiled
from tests.c_kernels import need_kernels
from tests.spec import delayed
from tests.spec import formats as spec

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)")


@pytest.fixture(scope="module")
def cc(tmp_path_factory: pytest.TempPathFactory) -> str:
    """`cc`, which compiles the kernels, its longest work, once with the same flags."""
    if shutil.which("cc") is None:
        return "cc"
    return str(compiled.compiler("cc", tmp_path_factory.mktemp("compiler")))


@pytest.fixture(autouse=True)
def empty_cache(cc: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own; the process forgets the library before and after."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if shutil.which("cc") is not None:
        monkeypatch.setenv("CC", cc)
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
    assert all(word in found.note for word in words), found.note
    said = kernels_of(Fp8Recipe(), EMULATED, torch.device("cpu"), torch.float32)
    assert said.endswith(f"casts in torch ({found.note})"), "a run's header says why"
    assert_casts_follow_specification()


def test_no_compiler_leaves_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
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
    cc: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """-ffast-math folds (y + M) - M to y. (Not when linking: that would flush subnormals here.)

    -O1 suffices for it, and takes a tenth of the time of -O3.
    """
    script = f'case " $* " in *" -c "*) exec {cc} "$@" -O1 -ffast-math;; *) exec cc "$@";; esac'
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
    cc: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> None:
    log = tmp_path / "log"
    use_compiler(monkeypatch, tmp_path, f'echo "$@" >> {log}; exec {cc} "$@"')
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
def test_what_tests_compile_once_is_compiled_again_where_anything_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a test would see the code of other sources, flags or compilers."""
    source, log = tmp_path / "fp8_cpu.c", tmp_path / "log"
    real = tmp_path / "real"
    for name, value in (("SOURCE", source), ("INCLUDED", [])):
        monkeypatch.setattr(compiled, name, value)

    def compile_it(flag: str) -> str:
        made = tmp_path / "made"
        made.unlink(missing_ok=True)
        folder = tmp_path / "folder"
        folder.mkdir(exist_ok=True)
        once = compiled.compiler(str(real), folder, tmp_path / "kept")
        command = [once, flag, "-c", "-o", str(made), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return f"{made.read_text()}{done.stderr}"

    def compilations() -> int:
        return len(log.read_text().splitlines())

    def write(version: str, text: str) -> None:
        source.write_text(text)
        real.write_text(
            f"""#!/bin/sh
            if [ "$1" = --version ]; then echo {version}; exit; fi
            [ "$1" != -fails ] || exit 1
            echo "$@" >> {log}; cat {source} > "$4"; echo "note $1" >&2
            """
        )
        real.chmod(0o755)

    write("1", "one")
    assert compile_it("-O1") == compile_it("-O1") == "onenote -O1\n" and compilations() == 1
    assert compile_it("-O2") == "onenote -O2\n" and compilations() == 2
    write("1", "two")
    assert compile_it("-O1") == "twonote -O1\n" and compilations() == 3
    write("22", "two")
    assert compile_it("-O1") == "twonote -O1\n" and compilations() == 4
    for _ in range(2):
        with pytest.raises(subprocess.CalledProcessError):
            compile_it("-fails")


@needs_compiler
def test_another_compiler_version_is_another_file(
    cc: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> None:
    for version in ("1", "2"):
        script = f'case "$1" in --version) echo {version};; *) exec {cc} "$@";; esac'
        use_compiler(monkeypatch, tmp_path, script)
        library.cache_clear()
        assert library().lib is not None
    assert len(os.listdir(empty_cache)) == 2


@needs_compiler
@pytest.mark.parametrize("what", ["SOURCE", "INCLUDED", "COMPILE_FLAGS", "OPTIONAL_FLAGS", "PROBE"])
def test_a_library_of_other_code_or_flags_is_another_file(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a cache would keep serving what an earlier megafp8 has compiled."""
    other = tmp_path / "other.h"
    other.write_text("int other(void);\n")
    before = compile_kernels._key("cc")
    assert compile_kernels._key("cc") == before
    given = getattr(compile_kernels, what)
    changed = {"SOURCE": other, "PROBE": f"{given} "}.get(what)
    more = other if what == "INCLUDED" else "-O1"
    monkeypatch.setattr(compile_kernels, what, changed or [*given, more])
    assert compile_kernels._key("cc") != before


@needs_compiler
def test_a_library_for_another_processor_is_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compile_kernels._key("cc")
    monkeypatch.setattr(Path, "read_text", lambda *_: "flags : those of another processor\n")
    assert compile_kernels._key("cc") != before


@needs_compiler
def test_gcc_s_code_runs_on_the_threads_that_torch_has_started() -> None:
    version = subprocess.run(["cc", "--version"], capture_output=True, text=True).stdout
    if "Free Software Foundation" not in version or not torch.backends.openmp.is_available():
        pytest.skip("not GCC, or a torch without OpenMP")
    need_kernels()
    assert library().lib.megafp8_has_threads() == 1  # type: ignore[union-attr]


@needs_compiler
@pytest.mark.parametrize(
    "note", ["cc's code rounds differently", "cc failed (line 1)", "no C compiler found (cc)"]
)
def test_tests_of_kernels_that_cannot_be_used_fail(
    note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no compiler at all they are skipped."""
    monkeypatch.setattr(c_kernels, "library", lambda: Library(None, note))
    with pytest.raises(AssertionError, match=re.escape(note)):
        need_kernels()
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(pytest.skip.Exception):
        need_kernels()


@needs_compiler
def test_compiler_without_optional_flags_still_serves(
    cc: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = 'for a in "$@"; do case "$a" in -fopenmp|-mprefer*) exit 1;; esac; done'
    use_compiler(monkeypatch, tmp_path, f'{refuse}; exec {cc} "$@" -O1')  # which is soon done
    assert library().lib is not None, library().note
    assert_casts_follow_specification()


@needs_compiler
def test_the_cache_is_not_writable_by_others_under_any_umask(empty_cache: Path) -> None:
    before = os.umask(0)
    try:
        assert library().lib is not None, library().note
    finally:
        os.umask(before)
    for path in (empty_cache, *empty_cache.iterdir(), empty_cache.parent):
        assert not path.stat().st_mode & 0o022, path


@needs_compiler
def test_a_library_that_others_could_write_is_built_again(empty_cache: Path) -> None:
    assert library().lib is not None
    (built,) = empty_cache.iterdir()
    number = built.stat().st_ino
    built.chmod(0o777)
    empty_cache.chmod(0o777)
    library.cache_clear()
    assert library().lib is not None
    assert built.stat().st_ino != number and not built.stat().st_mode & 0o022
    assert not empty_cache.stat().st_mode & 0o022


@pytest.mark.parametrize("whose", ["another user's", "a link", "below a folder of all"])
@needs_compiler
def test_a_library_of_another_user_is_not_loaded(
    whose: str, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert library().lib is not None
    (built,) = empty_cache.iterdir()
    library.cache_clear()
    if whose == "a link":
        built.rename(tmp_path / "elsewhere.so")
        built.symlink_to(tmp_path / "elsewhere.so")
        assert library().lib is not None and not built.is_symlink()  # a new one is built
        return
    if whose == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        if built.stat().st_uid == 0:  # root's folders are trusted, so they are given away
            os.chown(empty_cache, 54321, -1)
        assert_torch_path(str(empty_cache), "belongs to another user", "not loaded")
    else:
        (tmp_path / "cache").chmod(0o777)
        assert_torch_path(str(tmp_path / "cache"), "anybody may replace")
        (tmp_path / "cache").chmod(0o1777)  # as /tmp: nobody may replace what is others'
        library.cache_clear()
        assert library().lib is not None


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("a link", "is no ordinary file"),
        ("a folder", "is no ordinary file"),
        ("another user's", "belongs to another user"),
        ("writable by all", "can be written by other users"),
    ],
)
def test_a_file_of_code_is_this_users_alone(
    fault: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fault alone is refused, whatever the folder of the file is."""
    path = tmp_path / "code.so"
    path.touch(0o755)
    path.chmod(0o755)
    check_own_file(path)
    if fault == "a link":
        path.rename(tmp_path / "elsewhere.so")
        path.symlink_to(tmp_path / "elsewhere.so")
    elif fault == "a folder":
        path = tmp_path / "folder"
        path.mkdir(0o755)
    elif fault == "writable by all":
        path.chmod(0o777)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        if path.stat().st_uid == 0:  # root's files are trusted
            os.chown(path, 54321, -1)
    with pytest.raises(PermissionError, match=said):
        check_own_file(path)


@needs_compiler
def test_a_library_that_lacks_a_function_leaves_torch(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert library().lib is not None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    (cache_folder() / "kernels").mkdir(parents=True, mode=0o700)
    built = cache_folder() / "kernels" / next(empty_cache.iterdir()).name
    (tmp_path / "other.c").write_text("int other(void) { return 1; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", built, tmp_path / "other.c"], check=True)
    built.chmod(0o755)
    library.cache_clear()
    assert_torch_path("lacks megafp8_quantize", "delete it")


def test_the_folders_of_torch_and_triton_are_this_users(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert why_unsafe(compile_train.CACHES) is None
    for name, folder in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        assert os.environ[name] == str(cache_folder() / folder)
        assert (cache_folder() / folder).stat().st_mode & 0o777 == 0o700
    (tmp_path / "all").mkdir()
    (tmp_path / "all").chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "all" / "x"))
    found = why_unsafe(compile_train.CACHES)
    assert found is not None and "anybody may replace" in found and str(tmp_path / "all") in found


@needs_compiler
def test_a_dry_run_may_be_the_first_to_load_the_library() -> None:
    """Its tensors have no memory unless a device is named; the sample that is cast has some."""
    with torch.device("meta"):
        assert library().lib is not None, library().note
