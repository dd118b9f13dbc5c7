"""The cache of Transformer Engine's Python: what is fetched, checked, mended and refused."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from te_cpu import wheel
from te_cpu.errors import VersionError
from te_cpu.versions import HASHES, NEWEST_TRIED, OLDEST, why_not

VERSION = "2.12.0"
CODE = "transformer_engine/common/__init__.py"


def make_wheel(folder: Path, text: str = "A = 1\n") -> Path:
    """A wheel with one module, and its record; all files are of one time, for one hash."""
    info = f"transformer_engine-{VERSION}.dist-info"
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"transformer_engine-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        record = f"{CODE},sha256={digest},{len(text)}\n{info}/RECORD,,\n"
        for name, content in ((CODE, text), (f"{info}/RECORD", record)):
            archive.writestr(zipfile.ZipInfo(name), content)
    return file


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, a package index with one wheel whose hash is the known one."""
    monkeypatch.setenv("MEGAFP8_TE_SOURCES", str(tmp_path / "cache"))
    served = make_wheel(tmp_path / "index")
    known = {VERSION: hashlib.sha256(served.read_bytes()).hexdigest()}
    monkeypatch.setattr(wheel, "KNOWN_HASHES", known)
    run = subprocess.run

    def download(command: list[str], **options: object) -> object:
        assert command[1:4] == ["-m", "pip", "download"] and command[0] == sys.executable
        where = f"import shutil, sys; shutil.copy({str(served)!r}, sys.argv[1])"
        target = command[command.index("--dest") + 1]
        return run([sys.executable, "-S", "-c", where, target], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", download)
    return tmp_path / "cache"


def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        error = "WARNING: retrying\nERROR: No matching distribution found for transformer-engine"
        return subprocess.CompletedProcess(command, 1, "", error)

    monkeypatch.setattr(subprocess, "run", failing)


def test_it_is_fetched_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not wheel.is_cached(VERSION)
    found = wheel.sources(VERSION)
    assert found.is_known and (found.folder / CODE).read_text() == "A = 1\n"
    assert found.folder == cache / VERSION / "sources" and wheel.is_cached(VERSION)
    no_network(monkeypatch)
    assert wheel.sources(VERSION) == found
    assert not list((cache / VERSION).glob("*ing-*")), "temporary folders are left"


@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_damaged_files_are_unpacked_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """Whoever edits the cache does not run something else under Transformer Engine's name."""
    file = wheel.sources(VERSION).folder / CODE
    no_network(monkeypatch)
    if damage == "gone":
        file.unlink()
    else:
        file.write_text("A = 2\n")
    assert (wheel.sources(VERSION).folder / CODE).read_text() == "A = 1\n"


def test_a_foreign_wheel_is_refused(cache: Path) -> None:
    wheel.sources(VERSION)
    foreign = make_wheel(cache / VERSION, "A = 3\n")
    with pytest.raises(VersionError, match=r"SHA-256.*Delete the file") as error:
        wheel.sources(VERSION)
    assert str(foreign) in error.value.reason


def test_a_wheel_that_arrives_damaged_is_not_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel, "KNOWN_HASHES", {VERSION: "0" * 64})
    with pytest.raises(VersionError, match="SHA-256"):
        wheel.sources(VERSION)
    assert not wheel.is_cached(VERSION)


def test_a_version_without_a_known_hash_says_so(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel, "KNOWN_HASHES", {})
    assert not wheel.sources(VERSION).is_known


def test_without_network_the_command_is_shown(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_network(monkeypatch)
    with pytest.raises(VersionError, match="No matching distribution") as error:
        wheel.sources(VERSION)
    command = f"pip download --no-deps -d {cache / VERSION} transformer-engine=={VERSION}"
    assert command in error.value.hint and "model." not in str(error.value)
    assert "\n" not in str(error.value)
    assert wheel.main([VERSION]) == 2
    assert command in capsys.readouterr().err


def test_a_version_that_the_index_lacks_is_no_matter_of_the_network(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        error = "ERROR: Could not find a version that satisfies x==2.12.7 (from versions: 2.12.0)"
        return subprocess.CompletedProcess(command, 1, "", error)

    monkeypatch.setattr(subprocess, "run", lacking)
    with pytest.raises(VersionError, match=r"has no such version. Use 2\.12\.0, or .* doctor"):
        wheel.sources("2.12.7")


def test_the_path_of_a_wheel_needs_no_network(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    no_network(monkeypatch)
    given = make_wheel(tmp_path / "mine")
    assert wheel.main([str(given)]) == 0
    assert given.is_file() and wheel.sources(str(given)) == wheel.sources(VERSION)
    assert wheel.sources(VERSION).is_known and wheel.version_of(str(given)) == VERSION
    with pytest.raises(VersionError, match=r"SHA-256.* Get it with `pip download"):
        wheel.sources(str(make_wheel(tmp_path / "mine", "A = 4\n")))
    monkeypatch.setattr(wheel, "KNOWN_HASHES", {})
    with pytest.raises(VersionError, match="the cache has another wheel of this version"):
        wheel.sources(str(given))
    assert not list((cache / VERSION).glob("*ing-*")), "temporary folders are left"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"transformer_engine-{VERSION}-py3-none-any.whl", "there is no such file"),
        ("transformer_engine_cu12-2.12.0-py3-none-any.whl", "is not named as the wheel"),
        ("transformer_engine-2.3.0-py3-none-any.whl", "too old"),
        (f"folder/transformer_engine-{VERSION}-py3-none-any.whl", "there is no such file"),
    ],
)
def test_wrong_paths_of_wheels(cache: Path, tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "folder" / f"transformer_engine-{VERSION}-py3-none-any.whl").mkdir(parents=True)
    with pytest.raises(VersionError, match=words) as error:
        wheel.sources(str(tmp_path / name))
    assert "\n" not in str(error.value) and not cache.exists()


def test_the_command_explains_itself_and_refuses_options(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for argument, code in (("--help", 0), ("--version", 2)):
        with pytest.raises(SystemExit, match=f"^{code}$"):
            wheel.main([argument])
        said = capsys.readouterr()
        assert "usage: python -m te_cpu [-h] [VERSION ...]" in said.out + said.err
    assert wheel.main(["train.py", VERSION]) == 2
    assert "`python -m te_cpu run train.py` runs a program" in capsys.readouterr().err
    assert not cache.exists()


def test_what_the_command_downloads_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(cache / VERSION)
    no_network(monkeypatch)
    assert wheel.sources(VERSION).is_known


def test_versions_that_were_tried_and_the_next_ones_are_taken() -> None:
    """The oldest one is among them; a later number of the same kind is only called untried."""
    (major, minor), oldest = NEWEST_TRIED, ".".join(map(str, OLDEST))
    assert f"{oldest}.0" in HASHES
    assert [why_not(version) for version in (*HASHES, f"{major}.{minor + 1}.0")] == [None] * (
        len(HASHES) + 1
    )
    assert "is too new" in (why_not(f"{major + 1}.0.0") or "")
    assert "is too old" in (why_not(f"{OLDEST[0]}.{OLDEST[1] - 1}.0") or "")


@pytest.mark.parametrize(
    ("version", "word"),
    [("newest", "whole"), ("../..", "whole"), ("2.12", "whole"), ("2.3.0", "2.4")],
)
def test_versions_that_cannot_be(cache: Path, version: str, word: str) -> None:
    with pytest.raises(VersionError, match=word):
        wheel.sources(version)
    assert not cache.exists()


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGAFP8_TE_SOURCES", str(tmp_path / "file"))
    with pytest.raises(VersionError, match="MEGAFP8_TE_SOURCES"):
        wheel.sources(VERSION)
