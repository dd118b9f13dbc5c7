"""The three forms of data_prefix, the switches, and samples that any history of resumes keeps."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megafp8.data.blend import BlendedSamples
from megafp8.data.index_maps import IndexCache
from megafp8.data.loader import Loader
from megafp8.data.prepare import PreparedData, build_index_maps, prepare
from megafp8.data.samples import TrainSamples
from megafp8.data.tokenize import byte_tokenizer, load_json
from megafp8.errors import DataError
from megafp8.runs.run_data import epochs_of, warnings_of
from megafp8.specs.data import SeparateSplits, TokenizerSpec, Weighted
from tests.data.helpers import data_spec, write_dataset


def quiet(line: str) -> None:
    pass


def make(folder: Path, name: str, first: int, count: int = 30) -> str:
    """A dataset whose tokens are all from `first` to `first + 49`; 256 ends a document."""
    rng = np.random.default_rng(first)
    documents = [
        [*rng.integers(first, first + 50, int(size)).tolist(), 256]
        for size in rng.integers(5, 40, count)
    ]
    write_dataset(folder / name, documents)
    byte_tokenizer().save(folder / f"{name}.tokenizer.json")
    eod = load_json(folder / f"{name}.tokenizer.json").eod_id
    write_dataset(folder / name, [[t if t != 256 else eod for t in d] for d in documents])
    return str(folder / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forms")
    for name, first in (("a", 10), ("b", 100), ("c", 200)):
        make(folder, name, first)
    return folder


def source_of(window: np.ndarray, eod: int) -> str:
    token = int(window[window != eod][0])
    return "abc"[(token >= 100) + (token >= 200)]


def opened(folder: Path, prefix: object, **changes: object) -> PreparedData:
    changes.setdefault("splits", (80.0, 20.0, 0.0))
    return prepare(data_spec(folder / "cache", prefix, **changes), quiet)  # type: ignore[arg-type]


def test_a_weighted_list(folder: Path) -> None:
    blend = tuple(Weighted(w, str(folder / n)) for w, n in (("0.5", "a"), ("1", "b"), ("0.5", "c")))
    data = opened(folder, blend)
    eod = data.tokenizer.eod_id
    names = [source_of(data.train[n], eod) for n in range(400)]
    for n in range(1, 401):
        for name, weight in (("a", 0.25), ("b", 0.5), ("c", 0.25)):
            assert abs(names[:n].count(name) - weight * n) < 1
    single = {name: opened(folder, str(folder / name)) for name in "abc"}
    taken = dict.fromkeys("abc", 0)
    for n, name in enumerate(names[:100]):
        assert np.array_equal(data.train[n], single[name].train[taken[name]])
        taken[name] += 1
    assert data.num_train_tokens == sum(s.num_train_tokens for s in single.values())
    want = np.concatenate([single[name].validation_tokens() for name in "abc"])
    assert np.array_equal(data.validation_tokens(), want)
    windows = [data.validation[n] for n in range(data.validation.num_samples)]
    targets = np.concatenate([w[1:] for w in windows])
    assert np.array_equal(targets[targets >= 0], want), "every validation token once"
    assert data.fingerprint not in {s.fingerprint for s in single.values()}
    assert data.train_token_counts().sum() == data.num_train_tokens


def test_one_dataset_per_split(folder: Path) -> None:
    spec = SeparateSplits(
        train=(Weighted("1", str(folder / "a")), Weighted("2", str(folder / "b"))),
        validation=(Weighted("1", str(folder / "c")),),
    )
    lines: list[str] = []
    data = prepare(data_spec(folder / "cache", spec), lines.append)  # type: ignore[arg-type]
    assert "splits_string is not used" in lines[0]
    eod = data.tokenizer.eod_id
    assert {source_of(data.train[n], eod) for n in range(60)} == {"a", "b"}
    whole = data.validation_parts[0].opened.dataset
    assert data.num_validation_tokens == whole.num_tokens, "all of it, unsplit"
    (folder / "d.bin").unlink(missing_ok=True)
    missing = SeparateSplits(
        train=spec.train, validation=spec.validation, test=(Weighted("1", str(folder / "d")),)
    )
    with pytest.raises(DataError, match=r"d\.idx"):
        opened(folder, missing)


def split(train: list[str], validation: list[str]) -> SeparateSplits:
    weighted = [tuple(Weighted("1", path) for path in paths) for paths in (train, validation)]
    return SeparateSplits(train=weighted[0], validation=weighted[1])


def test_training_documents_that_are_validated_on_are_said(folder: Path, tmp_path: Path) -> None:
    a, b, c = (str(folder / name) for name in "abc")
    copied = str(tmp_path / "copied")
    for end in ("bin", "idx", "tokenizer.json"):
        shutil.copy(f"{a}.{end}", f"{copied}.{end}")
    linked = str(tmp_path / "linked")
    for end in ("bin", "idx", "tokenizer.json"):
        Path(f"{linked}.{end}").symlink_to(f"{b}.{end}")
    for train, validation, want in (
        ([a], [b], []),
        ([a, b], [c], []),
        ([a], [a], [a]),
        ([a, b], [b], [b]),
        ([b], [c, a, b], [b]),
        ([a], [copied], [copied]),
        ([c, b], [c, linked], [c, linked]),
    ):
        data = opened(folder, split(train, validation))
        lines = warnings_of(data_spec(None), data)
        said = [f"data: {', '.join(want)}: the validation loss is of documents that are trained on"]
        assert lines == (said if want else []), (train, validation)
    assert warnings_of(data_spec(None), opened(folder, a)) == []


def test_a_dataset_that_is_twice_in_a_blend_is_said(folder: Path, tmp_path: Path) -> None:
    a, b = (str(folder / name) for name in "ab")
    data = opened(folder, tuple(Weighted("1", path) for path in (a, b, a)))
    (line,) = warnings_of(data_spec(None), data)
    assert f"{a} and {a} have the same tokens: each of their samples comes twice" in line
    data = opened(folder, (Weighted("1", a), Weighted("1", a)))
    assert np.array_equal(data.train[0], data.train[1]), "they do"


def test_epochs_of_each_dataset(folder: Path) -> None:
    a, b, c = (str(folder / name) for name in "abc")
    data = opened(folder, tuple(Weighted(w, p) for w, p in (("0.5", a), ("0.3", b), ("0.2", c))))
    num_samples = 500
    read = dict(data.epochs(num_samples))
    assert isinstance(data.train, BlendedSamples)
    counts = data.train.schedule.counts(num_samples)
    for name, source, count in zip((a, b, c), data.train.sources, counts, strict=True):
        assert read[name] == pytest.approx(count / source.num_samples_per_epoch, abs=0.05)
    assert [name for name, _ in data.epochs(num_samples)] == sorted(read, key=lambda n: -read[n])
    assert epochs_of(data, num_samples) == ", ".join(
        f"{name} {epochs:.3g}" for name, epochs in data.epochs(num_samples)
    )
    single = opened(folder, a)
    assert epochs_of(single, 3 * single.train.num_samples_per_epoch) == f"{a} 3"
    many = opened(folder, tuple(Weighted(str(n), a) for n in range(1, 10)))
    words = epochs_of(many, 4500 * many.train_parts[0].num_tokens)
    assert words is not None and words.count(a) == 6 and "3 others " in words


def test_datasets_of_other_tokenizers_do_not_blend(folder: Path, tmp_path: Path) -> None:
    other = make(tmp_path, "x", 10)
    words = tmp_path / "x.tokenizer.json"
    words.write_text(words.read_text().replace('"!"', '"swapped"'))
    with pytest.raises(DataError, match="same tokenizer"):
        opened(folder, (Weighted("1", str(folder / "a")), Weighted("1", other)))


def test_a_named_tokenizer_must_be_that_of_the_data(folder: Path, tmp_path: Path) -> None:
    words = folder / "a.tokenizer.json"
    same = TokenizerSpec(library="huggingface", vocab_size=0, type=str(words))
    assert opened(folder, str(folder / "a"), tokenizer=same).vocab_size == 257
    other = tmp_path / "tokenizer.json"
    other.write_text(words.read_text().replace('"!"', '"swapped"'))
    wrong = TokenizerSpec(library="huggingface", vocab_size=0, type=str(other))
    with pytest.raises(DataError, match=r"a\.tokenizer\.json: vocabulary"):
        opened(folder, str(folder / "a"), tokenizer=wrong)
    bare = tmp_path / "bare"
    for end in (".bin", ".idx"):
        shutil.copy(folder / f"a{end}", f"{bare}{end}")
    other.unlink()
    with pytest.raises(DataError, match="model.tokenizer"):
        opened(folder, str(bare))
    assert opened(folder, str(bare), tokenizer=same).vocab_size == 257
    (tmp_path / "bare.dataset.json").write_text('{"vocab_size": 258}')
    with pytest.raises(
        DataError, match="vocab_size: the dataset was made with a vocabulary of 258"
    ):
        opened(folder, str(bare), tokenizer=same)


def test_an_empty_corpus_is_named(tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path / "e.tokenizer.json")
    for documents in ([], [[]]):
        write_dataset(tmp_path / "e", documents)
        with pytest.raises(DataError, match=r"e\.idx: sequence count.*not one token"):
            opened(tmp_path, str(tmp_path / "e"))


# ---- the switches


def windows(data: PreparedData, count: int, first: int = 0) -> list[list[int]]:
    return [data.train[n].tolist() for n in range(first, first + count)]


def test_shuffle_documents(folder: Path) -> None:
    data = opened(folder, str(folder / "a"), shuffle_documents=False)
    assert isinstance(data.train, TrainSamples)
    epoch = data.train.num_samples_per_epoch
    stream = np.concatenate(
        [
            data.train_parts[0].opened.dataset.document(d)
            for d in sorted(data.train_parts[0].documents)
        ]
    )
    places = [data.train.locate(n)[1] for n in range(epoch)]
    assert places != sorted(places), "windows are shuffled all the same"
    for n in range(2 * epoch):
        start = data.train.locate(n)[1] * 16
        assert data.train[n][1:].tolist() == stream[start : start + 16].tolist()
    assert windows(data, epoch) != windows(opened(folder, str(folder / "a")), epoch)


def test_dataloader_type(folder: Path) -> None:
    single = opened(folder, str(folder / "a"))
    cyclic = opened(folder, str(folder / "a"), dataloader_type="cyclic")
    epoch = single.train.num_samples_per_epoch
    first = windows(single, epoch)
    assert windows(cyclic, epoch) == first
    second = windows(cyclic, epoch, epoch)
    assert second != first and sorted(second) == sorted(first), "the same samples, shuffled anew"
    assert sorted(windows(single, epoch, epoch)) != sorted(first), "cut anew"


def test_rules_follow_the_switches(folder: Path) -> None:
    assert opened(folder, str(folder / "a")).rules is None
    for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        rules = opened(folder, str(folder / "a"), **{name: True}).rules
        assert rules is not None and getattr(rules, name)


def test_validation_drop_last(folder: Path) -> None:
    data = opened(folder, str(folder / "a"), seq_length=10)
    whole, periodic = data.validation, data.periodic_validation
    assert data.num_validation_tokens % 10, "there is a rest"
    assert periodic.num_samples == data.num_validation_tokens // 10 == whole.num_samples - 1
    kept = opened(folder, str(folder / "a"), seq_length=10, validation_drop_last=False)
    assert kept.periodic_validation.num_samples == whole.num_samples


# ---- ahead of a job


def test_maps_built_ahead_are_all_that_a_run_needs(folder: Path, tmp_path: Path) -> None:
    blend = (Weighted("1", str(folder / "a")), Weighted("3", str(folder / "b")))
    spec = data_spec(folder / "cache", blend, seq_length=8)  # type: ignore[arg-type]
    lines: list[str] = []
    cache = IndexCache(tmp_path / "maps", lines.append, smallest=0)
    data = prepare(spec, quiet, index_cache=cache)
    assert isinstance(data.train, BlendedSamples)
    samples = 5 * data.train.num_samples_per_epoch
    num_epochs = build_index_maps(data, samples)
    assert num_epochs == len([line for line in lines if "epoch" in line]) >= 5
    before = len(lines)
    again = prepare(spec, quiet, index_cache=cache)
    for n in range(samples):
        again.train[n]
    assert len(lines) == before, "nothing was computed"


# ---- stop, resume, resize


@given(st.data())
@settings(max_examples=25)
def test_any_history_of_stops_and_resizes_gives_the_same_samples(
    folder: Path, data: st.DataObject
) -> None:
    """Each life: another data-parallel size, micro batch and number of workers."""
    blend = (Weighted("0.3", str(folder / "a")), Weighted("0.7", str(folder / "b")))
    changes = {
        "dataloader_type": data.draw(st.sampled_from(["single", "cyclic"])),
        "shuffle_documents": data.draw(st.booleans()),
        "seq_length": 16,
    }
    global_batch = 12
    lives = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    straight = opened(folder, blend, **changes).train
    consumed = 0
    for steps in lives:
        dp = data.draw(st.sampled_from([1, 2, 3, 4, 6]))
        micro = data.draw(st.sampled_from([m for m in (1, 2, 3) if global_batch % (m * dp) == 0]))
        workers = data.draw(st.integers(0, 3))
        source = opened(folder, blend, **changes).train  # a new process knows nothing
        loaders = [
            Loader(
                source,
                micro_batch_size=micro,
                num_microbatches=global_batch // (micro * dp),
                dp_rank=rank,
                dp_size=dp,
                consumed_samples=consumed,
                num_workers=workers,
            )
            for rank in range(dp)
        ]
        try:
            for _ in range(steps):
                rows: dict[int, list[int]] = {}
                for rank, loader in enumerate(loaders):
                    for m, batch in enumerate(next(loader)):
                        for b, row in enumerate(batch.tokens_BS):
                            rows[m * micro * dp + rank * micro + b] = row.tolist()
                want = [straight[consumed + n][:-1].tolist() for n in range(global_batch)]
                assert [rows[n] for n in range(global_batch)] == want
                consumed += global_batch
        finally:
            for loader in loaders:
                loader.close()
