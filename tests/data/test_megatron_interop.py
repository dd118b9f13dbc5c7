"""Files and rules against Megatron's own package, in a process of its own: it imports much."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megafp8.data.indexed import IndexedDataset, IndexedWriter, bin_path, idx_path

DOCUMENTS = {
    "uint16": [[[5, 6, 7, 0]], [[1], [2, 3]], [[65499, 0]]],
    "int32": [[[5, 6, 70000, 0]], [[1], [2, 3], [4]], [[65499, 0]]],
}

SPLITS = ["900,50,50", "99,1", "99,1,0", "100,0,0", "100", "1.0,0.0", " 99 , 1 "]

PROGRAM = """
import json, sys, warnings
warnings.simplefilter("ignore")
import numpy, torch
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

folder, documents = sys.argv[1], json.loads(sys.argv[2])
for name, docs in documents.items():
    builder = IndexedDatasetBuilder(f"{folder}/theirs-{name}.bin", dtype=getattr(numpy, name))
    for doc in docs:
        builder.add_document(torch.tensor(sum(doc, [])), [len(sequence) for sequence in doc])
    builder.finalize(f"{folder}/theirs-{name}.idx")
    ours = IndexedDataset(f"{folder}/ours-{name}")
    assert ours.document_indices.tolist() == numpy.cumsum([0] + [len(d) for d in docs]).tolist()
    assert [ours[i].tolist() for i in range(len(ours))] == sum(docs, [])

# Rules of documents inside a sample.
tokens = torch.tensor(json.loads(sys.argv[3]))
rows = []
for row in tokens:
    mask, loss, position = _get_ltor_masks_and_position_ids(row, 3, True, True, True, True)
    rows.append([mask[0].int().tolist(), loss.int().tolist(), position.tolist()])

# Where samples start, in documents shuffled by hand.
lengths, order = (numpy.array(x, numpy.int32) for x in json.loads(sys.argv[4]))
index = helpers.build_sample_idx(lengths, order, 7, 1, int(lengths.sum()), True, True)

# The sizes of splits.
splits = [parse_and_normalize_split(text) for text in json.loads(sys.argv[5])]
print(json.dumps([rows, index.tolist(), splits]))
"""


@pytest.fixture(scope="module")
def samples() -> tuple[list[list[int]], list[list[int]]]:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 6, (20, 24)).tolist()
    lengths = rng.integers(1, 20, 80)
    return rows, [lengths.tolist(), rng.permutation(80).tolist()]


@pytest.fixture(scope="module")
def theirs(  # type: ignore[no-untyped-def]
    samples, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list, list]:
    pytest.importorskip("megatron.core", reason="needs the megatron-core package")
    folder = tmp_path_factory.mktemp("megatron")
    for name, documents in DOCUMENTS.items():
        with IndexedWriter(folder / f"ours-{name}", name) as writer:
            for document in documents:
                writer.add_document(*document)
    rows, order = samples
    arguments = [str(folder), *(json.dumps(x) for x in (DOCUMENTS, rows, order, SPLITS))]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder, *json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_are_the_same_bytes_and_each_reads_the_others(theirs, name: str) -> None:  # type: ignore[no-untyped-def]
    folder = theirs[0]
    mine, other = folder / f"ours-{name}", folder / f"theirs-{name}"
    assert bin_path(mine).read_bytes() == bin_path(other).read_bytes()
    assert idx_path(mine).read_bytes() == idx_path(other).read_bytes()
    data = IndexedDataset(other)
    want = [sum(document, []) for document in DOCUMENTS[name]]
    assert [data.document(number).tolist() for number in range(data.num_documents)] == want


def test_positions_masks_and_losses_are_megatrons(theirs, samples) -> None:  # type: ignore[no-untyped-def]
    from megafp8.data.loader import DocumentRules, microbatch
    from megafp8.specs.data import IGNORE
    from tests.documents import ids_of

    rules = DocumentRules(
        eod_id=3, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True
    )
    batch = microbatch([np.array([*row, 1]) for row in samples[0]], rules)
    causal = np.tril(np.ones((24, 24), bool))
    for number, (mask, loss, position) in enumerate(theirs[1]):
        documents = ids_of(batch)[number]
        same = documents[:, None] == documents[None, :]
        # Theirs is True where attention is not allowed.
        assert np.array_equal(same & causal, ~np.array(mask, bool))
        assert batch.position_ids_BS[number].tolist() == position
        assert (batch.targets_BS[number] != IGNORE).astype(int).tolist() == loss


def test_windows_start_where_megatrons_do_but_for_our_leading_end(  # type: ignore[no-untyped-def]
    theirs, samples
) -> None:
    """Window w of theirs begins at token w * 7; of ours at that of a stream with an end before."""
    from megafp8.data.index_maps import sample_index

    lengths, order = (np.array(x, np.int32) for x in samples[1])
    windows = int(lengths.sum()) // 7
    first, offset = sample_index(lengths, order, 7, windows)
    for window, (place, start) in enumerate(theirs[2][: windows - 1]):
        before = int(lengths[order[:place]].sum()) + start  # tokens of the stream before it
        mine = int(lengths[order[: first[window + 1]]].sum()) + int(offset[window + 1])
        assert before == window * 7 and mine == (window + 1) * 7 - 1


def test_sizes_of_splits_are_megatrons(theirs) -> None:  # type: ignore[no-untyped-def]
    from megafp8.config.values import parse_splits

    for text, want in zip(SPLITS, theirs[3], strict=True):
        sizes = parse_splits(text)
        assert sizes is not None and [size / sum(sizes) for size in sizes] == pytest.approx(want)
