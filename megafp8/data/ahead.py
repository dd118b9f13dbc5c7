"""Build index maps before a job needs them."""

from __future__ import annotations

from megafp8.data.blend import BlendedSamples
from megafp8.data.prepare import PreparedData
from megafp8.data.samples import SampleSource, TrainSamples


def build_index_maps(data: PreparedData, num_samples: int) -> int:
    """Compute every index map of the first `num_samples` samples; return the number of epochs.

    The maps are kept in the index cache, where the job finds them.
    """
    source = data.train
    if isinstance(source, BlendedSamples):
        counts = source.schedule.counts(num_samples)
        pairs = zip(source.sources, counts, strict=True)
        return sum(_build(one, count) for one, count in pairs)
    return _build(source, num_samples)


def _build(source: SampleSource, num_samples: int) -> int:
    assert isinstance(source, TrainSamples), type(source)
    num_epochs = -(-num_samples // source.num_samples_per_epoch)
    for number in range(num_epochs):
        source.epoch(number)
    return num_epochs
