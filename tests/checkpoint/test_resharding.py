"""Test that what one sharding wrote is read by any other, bit for bit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megafp8.checkpoint import store
from megafp8.checkpoint.manifest import Placement
from megafp8.errors import CheckpointError

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int64,
]
Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]  # (offset, shape)


def cut(draw: st.DrawFn, offset: tuple[int, ...], shape: tuple[int, ...], depth: int) -> Boxes:
    """Return a random partition of a box that is not a grid: each half is cut at its own place."""
    if depth == 0 or not shape or draw(st.booleans()):
        return [(offset, shape)]
    dim = draw(st.integers(0, len(shape) - 1))
    at = draw(st.integers(0, shape[dim]))
    first = (*shape[:dim], at, *shape[dim + 1 :])
    second = (*shape[:dim], shape[dim] - at, *shape[dim + 1 :])
    moved = (*offset[:dim], offset[dim] + at, *offset[dim + 1 :])
    return cut(draw, offset, first, depth - 1) + cut(draw, moved, second, depth - 1)


@st.composite
def two_partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], Boxes, Boxes]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    zeros = (0,) * len(shape)
    return shape, cut(draw, zeros, shape, 4), cut(draw, zeros, shape, 4)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of random bits, with payloads of NaNs among them."""
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def view_of(tensor: torch.Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    slices = tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))
    return tensor[slices]


@settings(max_examples=150, deadline=None)
@given(two_partitions(), st.sampled_from(DTYPES), st.integers(1, 3), st.integers(0, 2**31))
def test_any_sharding_to_any_other(
    case: tuple[tuple[int, ...], Boxes, Boxes], dtype: torch.dtype, num_ranks: int, seed: int
) -> None:
    shape, saved, loaded = case
    torch.manual_seed(seed)
    original, result = random_bits(shape, dtype), random_bits(shape, dtype)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        staging = store.begin(root, 1)
        shards = []
        for rank in range(num_ranks):
            mine = saved[rank::num_ranks]
            placements = [Placement("x", shape, o, view_of(original, o, s)) for o, s in mine]
            shards.append(store.write_shard(staging, f"r{rank}.safetensors", placements))
        step_dir = store.commit(staging, root, 1, shards, {})
        store.verify(step_dir)
        reader = store.Reader(step_dir)
        into = [Placement("x", shape, o, view_of(result, o, s)) for o, s in loaded]
        reader.load_into(into)
        assert bits(result) == bits(original)
        assert bits(reader.read("x")) == bits(original)


def test_every_kind_of_tensor(
    tmp_path: Path, tensors: dict[str, torch.Tensor], save: Callable[[Path, int], Path]
) -> None:
    reader = store.Reader(save(tmp_path, 0))
    assert reader.step == 0 and reader.meta == {"note": "step 0"}
    assert reader.names() == tuple(sorted(tensors))
    for name, tensor in tensors.items():
        loaded = reader.read(name)
        assert loaded.dtype == tensor.dtype == reader.dtype(name)
        assert loaded.shape == tensor.shape == reader.global_shape(name)
        assert bits(loaded) == bits(tensor), name


def test_loading_goes_into_parameters_in_place(
    tmp_path: Path, save: Callable[[Path, int], Path]
) -> None:
    reader = store.Reader(save(tmp_path, 3))
    fused = torch.nn.Parameter(torch.zeros(2, 20))
    address = fused.data_ptr()
    rows, left = reader.read("weight")[4:6], fused[:, 3:13]
    reader.load_into([Placement("weight", (6, 10), (4, 0), left)])
    assert fused.data_ptr() == address and fused.requires_grad
    assert torch.equal(fused[:, 3:13], rows)
    assert fused[:, :3].abs().sum() == 0 and fused[:, 13:].abs().sum() == 0


def test_whole_tensors_keep_their_names_in_the_file(
    tmp_path: Path, save: Callable[[Path, int], Path]
) -> None:
    from safetensors.torch import load_file

    step_dir = save(tmp_path, 3)
    assert {"rng", "weight@0,0"} < set(load_file(step_dir / "model-rank0.safetensors"))
    assert set(load_file(step_dir / "model-rank1.safetensors")) == {"weight@3,0"}


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("weight", torch.zeros(6, 11), "weight has shape (6, 10) in the checkpoint and (6, 11) in"),
        (
            "weight",
            torch.zeros(6, 10).double(),
            "weight is torch.float32 in the checkpoint and torch.float64 in",
        ),
        ("wait", torch.zeros(6, 10), "lacks 1 tensor: wait"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_copied(
    tmp_path: Path,
    save: Callable[[Path, int], Path],
    place_whole: Callable[[str, torch.Tensor], Placement],
    name: str,
    tensor: torch.Tensor,
    said: str,
) -> None:
    reader = store.Reader(save(tmp_path, 3))
    good = torch.zeros(33, dtype=torch.uint8)
    with pytest.raises(CheckpointError) as caught:
        reader.load_into([place_whole("rng", good), place_whole(name, tensor)])
    assert said in str(caught.value)
    assert good.sum() == 0 and tensor.sum() == 0


def test_missing_names_are_listed(
    tmp_path: Path,
    save: Callable[[Path, int], Path],
    place_whole: Callable[[str, torch.Tensor], Placement],
) -> None:
    reader = store.Reader(save(tmp_path, 3))
    wanted = [place_whole(f"extra{i}", torch.zeros(2)) for i in range(9)]
    with pytest.raises(CheckpointError, match=r"lacks 9 tensors: extra0, .*extra4, …"):
        reader.load_into(wanted)


def test_given_twice_or_not_at_all_is_a_bug_of_the_caller(tmp_path: Path) -> None:
    staging = store.begin(tmp_path, 1)
    top, bottom = torch.zeros(2, 2), torch.ones(2, 2)
    piece = Placement("x", (4, 2), (0, 0), top)
    with pytest.raises(AssertionError, match="given twice"):
        store.write_shard(staging, "a.safetensors", [piece, piece])
    half = store.write_shard(staging, "a.safetensors", [piece])
    again = store.write_shard(staging, "b.safetensors", [piece])
    shifted = Placement("x", (4, 2), (1, 0), bottom)
    askew = store.write_shard(staging, "c.safetensors", [shifted])
    for shards in ([half], [half, again], [half, askew]):
        with pytest.raises(AssertionError, match="exactly once"):
            store.commit(staging, tmp_path, 1, shards, {})
    with pytest.raises(AssertionError):
        Placement("x", (4, 2), (3, 0), bottom)
    assert store.steps(tmp_path) == []
