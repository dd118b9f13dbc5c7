"""Index maps: against a walk over every token, and kept in files that survive everything."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megafp8.data import index_maps
from megafp8.data.index_maps import IndexCache, sample_index
from megafp8.data.samples import SampleOrder, TrainSamples
from tests.data.helpers import EOD, numbered_documents, write_dataset


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=60),
    st.integers(1, 12),
    st.randoms(use_true_random=False),
    st.sampled_from([1, 3, 16384]),
)
def test_each_window_starts_where_a_walk_over_the_tokens_says(lengths, seq, random, block) -> None:  # type: ignore[no-untyped-def]
    order = list(range(len(lengths)))
    random.shuffle(order)
    places = [(p, t) for p, sequence in enumerate(order) for t in range(lengths[sequence])]
    windows = len(places) // seq
    saved, index_maps._BLOCK = index_maps._BLOCK, block
    try:
        first, offset = sample_index(np.array(lengths, np.int32), np.array(order), seq, windows)
    finally:
        index_maps._BLOCK = saved
    want = [places[max(w * seq - 1, 0)] for w in range(windows)]
    assert list(zip(first.tolist(), offset.tolist(), strict=True)) == want


class Lines(list[str]):
    def __call__(self, line: str) -> None:
        self.append(line)


def _counted(calls: list[int], value: int = 7):  # type: ignore[no-untyped-def]
    def build() -> dict[str, np.ndarray]:
        calls.append(value)
        return {"a": np.arange(value), "b": np.array([value], np.int32)}

    return build


def test_an_entry_is_built_once_and_mapped(tmp_path: Path) -> None:
    calls: list[int] = []
    for _ in range(3):  # another process would find the same
        cache = IndexCache(tmp_path, Lines(), smallest=0)
        arrays = cache.get("maps", {"seed": 1}, 8, _counted(calls))
        assert arrays["a"].tolist() == list(range(7)) and arrays["b"].dtype == np.int32
        assert not arrays["a"].flags.writeable, "mapped from its file"
    assert calls == [7]
    cache.get("maps", {"seed": 2}, 8, _counted(calls))
    cache.get("others", {"seed": 1}, 8, _counted(calls))
    assert calls == [7, 7, 7], "whatever it depends on names it"


def test_small_entries_and_no_folder_are_not_kept(tmp_path: Path) -> None:
    calls: list[int] = []
    IndexCache(tmp_path, Lines(), smallest=100).get("maps", {}, 99, _counted(calls))
    IndexCache(None, Lines(), smallest=0).get("maps", {}, 99, _counted(calls))
    assert calls == [7, 7] and not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "json", "pickle"])
def test_a_damaged_entry_is_built_again(tmp_path: Path, damage: str) -> None:
    calls: list[int] = []
    IndexCache(tmp_path, Lines(), 0).get("maps", {}, 8, _counted(calls))
    (entry,) = (path for path in tmp_path.iterdir() if path.is_dir())
    file = entry / "a.npy"
    if damage == "flip":
        raw = bytearray(file.read_bytes())
        raw[-3] ^= 1
        file.write_bytes(raw)
    elif damage == "cut":
        os.truncate(file, 20)
    elif damage == "delete":
        file.unlink()
    elif damage == "json":
        (entry / "index.json").write_text("[]")
    else:
        np.save(file, np.array([{}], object), allow_pickle=True)
    lines = Lines()
    arrays = IndexCache(tmp_path, lines, 0).get("maps", {}, 8, _counted(calls))
    assert calls == [7, 7] and "is damaged" in lines[0]
    assert arrays["a"].tolist() == list(range(7))


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    calls: list[int] = []
    lines = Lines()
    IndexCache(tmp_path / "file" / "x", lines, 0).get("maps", {}, 8, _counted(calls))
    assert calls == [7] and "model.data.index_mapping_dir" in lines[0]


PROGRAM = """
import sys, time
from pathlib import Path
import numpy as np
from megafp8.data.index_maps import IndexCache
def build():
    with open(sys.argv[2], "a") as file:
        file.write("built\\n")
    time.sleep(0.5)
    return {"a": np.arange(1000)}
print(IndexCache(Path(sys.argv[1]), lambda line: None, 0).get("maps", {}, 1, build)["a"].sum())
"""


def test_of_several_processes_one_builds(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", PROGRAM, str(tmp_path / "cache"), str(tmp_path / "log")]
    running = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [process.communicate()[0] for process in running]
    assert outputs == ["499500\n"] * 4
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_killed_builder_blocks_no_other(tmp_path: Path) -> None:
    program = PROGRAM.replace("sleep(0.5)", "sleep(60)")
    argv = [sys.executable, "-c", program, str(tmp_path / "cache"), str(tmp_path / "log")]
    process = subprocess.Popen(argv)
    while not (tmp_path / "log").exists():
        time.sleep(0.02)
    process.kill()
    process.wait()
    calls: list[int] = []
    IndexCache(tmp_path / "cache", Lines(), 0).get("maps", {}, 1, _counted(calls))
    assert calls == [7]


def test_without_locks_and_with_a_faster_host_the_result_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts on one file system that has no locks: both build, the first rename stands."""

    def no_locks(file: object, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    calls: list[int] = []

    def slow() -> dict[str, np.ndarray]:
        IndexCache(tmp_path, Lines(), 0).get("maps", {}, 1, _counted(calls))  # the other host
        return _counted(calls)()

    arrays = IndexCache(tmp_path, Lines(), 0).get("maps", {}, 1, slow)
    assert calls == [7, 7] and arrays["a"].tolist() == list(range(7))
    assert not list(tmp_path.glob("*.tmp-*")), "the slower one's is thrown away"


def test_cached_and_computed_maps_give_the_same_samples(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "d", numbered_documents(50))

    def stream(cache: IndexCache | None) -> list[list[int]]:
        train = TrainSamples(
            data,
            np.arange(50),
            seq_length=8,
            order=SampleOrder(seed=3),
            eod_id=EOD,
            vocab_size=60000,
            cache=cache,
            fingerprint="f",
        )
        return [train[n].tolist() for n in range(3 * train.num_samples_per_epoch)]

    lines = Lines()
    computed = stream(None)
    assert stream(IndexCache(tmp_path / "c", lines, 0)) == computed
    assert len(lines) == 3, "one map for each epoch"
    again = Lines()
    assert stream(IndexCache(tmp_path / "c", again, 0)) == computed and again == []
    keys = [json.loads(p.read_text())["key"] for p in (tmp_path / "c").glob("*/index.json")]
    assert sorted(key["epoch"] for key in keys) == [0, 1, 2]
