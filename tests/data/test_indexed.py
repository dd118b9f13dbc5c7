"""Indexed files: what is written is read, and nothing damaged gets through as anything else."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megafp8.data.indexed import (
    DTYPE_CODES,
    HEADER,
    MAGIC,
    IndexedDataset,
    IndexedWriter,
    bin_path,
    dataset_path,
    idx_path,
    token_dtype,
    write_index,
)
from megafp8.errors import DataError, UserError
from tests.data.helpers import write_dataset

DOCUMENTS = [[5, 6, 7, 0], [0], [], [8, 9, 65000]]


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_what_is_written_is_read(tmp_path: Path, dtype: str) -> None:
    data = write_dataset(tmp_path / "a.b", DOCUMENTS, dtype)
    assert data.dtype == np.dtype(dtype)
    assert (data.num_documents, data.num_sequences, data.num_tokens) == (4, 4, 8)
    assert [data.document(i).tolist() for i in range(4)] == DOCUMENTS
    assert data.document(0).dtype == np.int64
    assert data.tokens_per_document().tolist() == [4, 1, 0, 3]
    assert data.sequence(3, 1, 3).tolist() == [9, 65000]


def test_documents_of_several_sequences(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "d", "int32") as writer:
        writer.add_document([1, 2], [3])
        writer.add_document()
        writer.add_document([4])
    data = IndexedDataset(tmp_path / "d")
    assert [data.document(i).tolist() for i in range(3)] == [[1, 2, 3], [], [4]]
    assert data.tokens_per_document().tolist() == [3, 0, 1]


def test_bytes_are_those_of_the_format(tmp_path: Path) -> None:
    """The layout spelled out by hand, independent of the writer's own constants."""
    write_dataset(tmp_path / "d", [[1, 2], [3]])
    want = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 3)
    want += struct.pack("<2i", 2, 1) + struct.pack("<2q", 0, 4) + struct.pack("<3q", 0, 1, 2)
    assert idx_path(tmp_path / "d").read_bytes() == want
    assert bin_path(tmp_path / "d").read_bytes() == struct.pack("<3H", 1, 2, 3)


def test_an_empty_dataset_can_be_read(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "d", [])
    assert (data.num_documents, data.num_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(65499, "uint16"), (65500, "int32"), (200_000, "int32")]
)
def test_token_dtype(vocab: int, dtype: str) -> None:
    assert token_dtype(vocab) == np.dtype(dtype)


def test_a_token_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="do not fit"), IndexedWriter(tmp_path / "d", "u2") as w:
        w.add_document([70000])
    assert list(tmp_path.iterdir()) == [], "a failed write leaves no file behind"


def _index(
    *,
    magic: bytes = MAGIC,
    version: int = 1,
    code: int = 8,
    counts: tuple[int, int] = (2, 3),
    lengths: tuple[int, ...] = (2, 1),
    offsets: tuple[int, ...] = (0, 4),
    documents: tuple[int, ...] = (0, 1, 2),
    tail: bytes = b"",
) -> bytes:
    return (
        HEADER.pack(magic, version, code, *counts)
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(offsets)}q", *offsets)
        + struct.pack(f"<{len(documents)}q", *documents)
        + tail
    )


DAMAGE = {
    "magic": (_index(magic=b"TNTIDX\x00\x00\x00"), "magic"),
    "version": (_index(version=2), "version"),
    "unknown dtype": (_index(code=9), "dtype code"),
    "dtype 0": (_index(code=0), "dtype code"),
    "float dtype": (_index(code=6), "dtype code"),
    "absurd sequences": (_index(counts=(2**63, 3)), "size"),
    "absurd documents": (_index(counts=(2, 2**64 - 1)), "size"),
    "no document index": (_index(counts=(2, 0)), "document count"),
    "empty": (b"", "header"),
    "short header": (_index()[:33], "header"),
    "truncated": (_index()[:-1], "size"),
    "trailing bytes": (_index(tail=b"\0\0"), "size"),
    "negative length": (_index(lengths=(2, -1)), "sequence lengths"),
    "length beyond the file": (_index(lengths=(2, 2)), "sequence offsets"),
    "greatest length": (_index(lengths=(2, 2**31 - 1)), "sequence offsets"),
    "offset beyond the file": (_index(offsets=(0, 6)), "sequence offsets"),
    "negative offset": (_index(offsets=(-2, 4)), "sequence offsets"),
    "greatest offset": (_index(offsets=(0, 2**63 - 1)), "sequence offsets"),
    "smallest offset": (_index(offsets=(0, -(2**63))), "sequence offsets"),
    "odd offset": (_index(offsets=(0, 3)), "sequence offsets"),
    "overlap": (_index(offsets=(0, 2)), "sequence offsets"),
    "documents start late": (_index(documents=(1, 1, 2)), "document indices"),
    "documents end early": (_index(documents=(0, 1, 1)), "document indices"),
    "documents fall": (_index(documents=(0, 3, 2)), "document indices"),
}


def test_the_undamaged_index_is_read(tmp_path: Path) -> None:
    _write(tmp_path / "d", _index())
    assert IndexedDataset(tmp_path / "d").document(1).tolist() == [3]


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    index, field = DAMAGE[name]
    _write(tmp_path / "d", index)
    with pytest.raises(DataError) as caught:
        IndexedDataset(tmp_path / "d")
    assert caught.value.field == field
    assert caught.value.file == tmp_path / "d.idx"
    assert caught.value.reason and caught.value.hint


@pytest.mark.parametrize("size", [0, 4, 5])
def test_a_short_bin_is_found(tmp_path: Path, size: int) -> None:
    _write(tmp_path / "d", _index(), bin_bytes=bytes(size))
    with pytest.raises(DataError, match="sequence"):
        IndexedDataset(tmp_path / "d")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_file_is_named(tmp_path: Path, suffix: str) -> None:
    write_dataset(tmp_path / "d", DOCUMENTS)
    (tmp_path / f"d{suffix}").unlink()
    with pytest.raises(DataError, match=rf"d\{suffix}: file: cannot be read"):
        IndexedDataset(tmp_path / "d")


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", DOCUMENTS)
    (tmp_path / "d.bin").unlink()
    (tmp_path / "d.bin").mkdir()
    with pytest.raises(DataError):
        IndexedDataset(tmp_path / "d")


def test_mutated_indices_are_refused_or_read(tmp_path: Path) -> None:
    """4000 seeded mutations: bits, bytes, extreme words, cuts, insertions; never another error.

    Half of them in the header, and nothing is allocated that the files are not large enough for.
    """
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 60000, n).tolist() for n in (3, 0, 7, 1, 12)]
    write_dataset(tmp_path / "d", documents)
    original = idx_path(tmp_path / "d").read_bytes()
    refused = 0
    tracemalloc.start()
    for number in range(4000):
        end = HEADER.size if number % 2 else len(original)
        idx_path(tmp_path / "d").write_bytes(_mutate(original, rng, end))
        try:
            data = IndexedDataset(tmp_path / "d")
        except DataError as error:
            assert error.file in (idx_path(tmp_path / "d"), bin_path(tmp_path / "d"))
            assert error.field and error.reason
            refused += 1
            continue
        tokens = [data.document(i) for i in range(data.num_documents)]
        assert sum(map(len, tokens)) == data.num_tokens == int(data.tokens_per_document().sum())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000, peak
    assert 2000 < refused < 3999, "the mutations should reach both outcomes"


def test_another_users_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong permissions, as the operating system tells them: root may read every file."""
    write_dataset(tmp_path / "d", DOCUMENTS)
    if os.geteuid() != 0:
        idx_path(tmp_path / "d").chmod(0)
    else:

        def refuse(*args: object, **kwargs: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(np, "memmap", refuse)
    with pytest.raises(DataError, match=r"d\.idx: file: cannot be read \(Permission denied\)"):
        IndexedDataset(tmp_path / "d")


def test_damage_is_reported_at_once(tmp_path: Path) -> None:
    """A million sequences, the last one damaged."""
    lengths = np.full(1_000_000, 1)
    lengths[-1] = 2
    bin_path(tmp_path / "d").write_bytes(bytes(2_000_000))
    write_index(idx_path(tmp_path / "d"), np.dtype("<u2"), lengths, np.arange(1_000_001))
    started = time.thread_time()
    with pytest.raises(DataError, match="sequence 999999"):
        IndexedDataset(tmp_path / "d")
    assert time.thread_time() - started < 1


def test_an_index_of_another_size_of_tokens_is_refused(tmp_path: Path) -> None:
    for dtype, code in (("uint16", 1), ("uint16", 2), ("int32", 8), ("int32", 1), ("int64", 4)):
        write_dataset(tmp_path / "d", DOCUMENTS, dtype)
        raw = bytearray(idx_path(tmp_path / "d").read_bytes())
        raw[17] = code
        idx_path(tmp_path / "d").write_bytes(raw)
        size = np.dtype(dtype).itemsize
        with pytest.raises(DataError, match=f"dtype code: says .*d.bin take {size} bytes each"):
            IndexedDataset(tmp_path / "d")


@pytest.mark.parametrize("where", ["end", "middle", "start"])
def test_bytes_that_no_sequence_covers_are_said(tmp_path: Path, where: str) -> None:
    data = write_dataset(tmp_path / "d", [[1, 2], [3], [4, 5, 6]])
    assert data.notes == []
    lengths = {"end": (2, 1), "middle": (2, 3), "start": (1, 3)}[where]
    offsets = {"end": (0, 4), "middle": (0, 6), "start": (4, 6)}[where]
    idx_path(tmp_path / "d").write_bytes(_index(lengths=lengths, offsets=offsets))
    (note,) = IndexedDataset(tmp_path / "d").notes
    left = 12 - 2 * sum(lengths)
    assert f"{left} of the 12 bytes of {tmp_path / 'd.bin'} belong to no sequence" in note


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my data").mkdir()
    write_dataset(tmp_path / "a", DOCUMENTS)
    write_dataset(tmp_path / "my data" / "b.c", DOCUMENTS)
    return tmp_path


def test_paths_of_datasets(folder: Path) -> None:
    for name in ("a", "./a", "a/", "a//", "~/a", "my data/b.c", "my data/../a", str(folder / "a")):
        IndexedDataset(dataset_path(name))
    for name, said in (
        *((name, "is a folder.* Give one of those in it: a") for name in (".", "./")),
        *((name, f"is a folder.* Give one of those in it: {folder / 'a'}") for name in ("~", "~/")),
        ("my data", "is a folder, .* Give one of those in it: my data/b.c"),
        ("my data/", "is a folder"),
        *((name, "is a folder, not a dataset's path") for name in ("/", "//", "..", "../", "/dev")),
        *((f"a{end}", "is one of a dataset's two files. Give a,") for end in (".bin", ".idx")),
        ("my data/b.c.idx", "is one of a dataset's two files. Give my data/b.c,"),
        ("gone/..", "is no path of a dataset"),
        ("", "is a folder"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=said):
            dataset_path(name)


PARTS = st.sampled_from([*"./~a é*\n", "bin", ".idx", "..", "my data", "b.c", "x" * 90])


@given(st.lists(PARTS, max_size=9))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_name_of_a_dataset_is_a_traceback(folder: Path, parts: list[str]) -> None:
    name = "".join(parts)
    try:
        IndexedDataset(dataset_path(name))
    except UserError as error:
        assert str(error)
    else:
        assert Path(os.path.normpath(name)).name in ("a", "b.c")


def _mutate(original: bytes, rng: np.random.Generator, end: int) -> bytes:
    raw = bytearray(original)
    for _ in range(int(rng.integers(1, 3))):
        at = int(rng.integers(0, min(end, len(raw))))
        match int(rng.integers(0, 5)):
            case 0:
                raw[at] ^= 1 << int(rng.integers(0, 8))
            case 1:
                raw[at] = int(rng.integers(0, 256))
            case 2:
                word = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
                raw[at : at + 8] = struct.pack("<Q", word[int(rng.integers(0, len(word)))])
            case 3:
                del raw[at : at + int(rng.integers(1, 20))]
            case _:
                raw[at:at] = rng.bytes(int(rng.integers(1, 20)))
        if not raw:
            break
    return bytes(raw)


def _write(prefix: Path, index: bytes, bin_bytes: bytes = struct.pack("<3H", 1, 2, 3)) -> None:
    idx_path(prefix).write_bytes(index)
    bin_path(prefix).write_bytes(bin_bytes)


def test_every_integer_dtype_code_is_read(tmp_path: Path) -> None:
    for dtype in (d for d in DTYPE_CODES.values() if d.kind != "f"):
        assert write_dataset(tmp_path / dtype.name, [[1, 2]], dtype).document(0).tolist() == [1, 2]
