"""Read and write the files of a model in the form of the library transformers.

Only safetensors and JSON files are read and written; nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fp8_numerics.caches import put
from megafp8.checkpoint.huggingface import (
    ConversionError,
    Mapped,
    is_fused,
    mapping,
    to_config,
    to_theirs,
)
from megafp8.errors import CheckpointError, RunError
from megafp8.files import give_ordinary_mode, os_errors_reported, write_json_atomically
from megafp8.foreign import MIB, Fields, ForeignFileError, member, read_object, shown_value
from megafp8.specs import GPTSpec
from megafp8.specs.parameters import logical_shapes

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
HEAD = "lm_head.weight"
INDEX = "model.safetensors.index.json"
MAX_FILE_BYTES = 5 << 30
MAX_CONFIG_BYTES = 16 * MIB
DTYPES = ("F32", "BF16", "F16")
"""The dtypes, by safetensors' names, that FP32 holds bit for bit and that need no other tensor."""

_READ_BYTES = 16 * MIB
"""Of a tensor that is imported so much, in FP32, is read and converted at a time."""

Encode = Callable[[Mapped, torch.Tensor], Mapping[str, torch.Tensor]]
"""Returns the tensors to write, by name, for one tensor of transformers in FP32."""

_NOT_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # buffers in old files


class Quantization(NamedTuple):
    """Say how weights are quantized: `quantization_config`, and what encodes each tensor."""

    config: Mapping[str, Any]
    encode: Encode


def write_folder(
    folder: Path,
    spec: GPTSpec,
    read: Callable[[str], torch.Tensor],
    *,
    dtype: torch.dtype,
    eod_id: int | None,
    num_tokens: int | None = None,
    family: str | None = None,
    generation: Mapping[str, Any] | None = None,
    token_ids: Mapping[str, Any] | None = None,
    quantized: Quantization | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[Path]:
    """Write a model into a new or empty folder as transformers reads it; return the files' paths.

    The files are the configuration, the configuration of generation, and the weights.

    Args:
        folder: The folder, which is made if it does not exist.
        spec: The model.
        read: Returns one of our tensors by its logical name.
        dtype: The dtype in which the weights are written.
        eod_id: The token that ends a document.
        num_tokens: The tokenizer's vocabulary. Rows beyond it are padding, which the configuration
            of generation suppresses.
        family: The family to write, by default the first one that can express the model.
        generation: A configuration of generation to keep.
        token_ids: The special tokens' numbers of the configuration that the model came with.
        quantized: How weights become quantized tensors; `dtype` is that of the others then.
        max_file_bytes: The largest size of a file of weights, if it holds more than one tensor.

    Raises:
        ConversionError: No family can express the model.
        RunError: The folder is not empty.
        CheckpointError: A file cannot be written; the folder is then empty.
    """
    config = to_config(spec, dtype, eod_id, family) | dict(token_ids or {})
    encode: Encode = lambda entry, tensor: {entry.theirs: tensor.to(dtype)}  # noqa: E731
    if quantized is not None:
        config["quantization_config"], encode = quantized.config, quantized.encode
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder}: exists already and is not empty. Give a new or an empty folder")
    ends = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"), eod_id)
    if token_ids:  # transformers takes them from config.json where nothing else is given
        ends = {key: value for key, value in token_ids.items() if value is not None}
    if generation:  # what the model came with is kept, and no more is said
        ends = {key: value for key, value in ends.items() if key == "eos_token_id"}
    generation_config = {"do_sample": False, **ends, **(generation or {})}
    if num_tokens is not None and num_tokens < spec.vocab_size:
        generation_config["suppress_tokens"] = list(range(num_tokens, spec.vocab_size))
    with os_errors_reported(folder, "exporting a model"):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            files = _write_weights(folder, _encoded(spec, read, encode, dtype), max_file_bytes)
            write_json_atomically(folder / GENERATION_CONFIG, generation_config)
            write_json_atomically(folder / CONFIG, config)
        except BaseException:
            # The folder was empty, so that all files are of this call.
            for path in folder.iterdir():
                path.unlink(missing_ok=True)
            raise
    return [*files, folder / GENERATION_CONFIG, folder / CONFIG]


def _encoded(
    spec: GPTSpec, read: Callable[[str], torch.Tensor], encode: Encode, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors to write, by the names that transformers has for them."""
    for entry in mapping(spec):
        tensor = to_theirs(entry, read)
        _check_range(entry, tensor, dtype)
        yield from encode(entry, tensor).items()


def _check_range(entry: Mapped, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise `ConversionError` if a tensor in FP32 has a value that is not finite in `dtype`."""
    low, high = torch.aminmax(tensor)  # of which a NaN makes both a NaN
    largest = torch.maximum(-low, high)
    if torch.isfinite(largest.to(dtype)):
        return
    name = f"{entry.theirs} ({', '.join(entry.ours)})"
    if not torch.isfinite(largest):
        raise ConversionError(
            f"{name} has NaN or infinite values, which no format of weights should have. Export an "
            "earlier checkpoint"
        )
    kind = str(dtype).removeprefix("torch.")
    raise ConversionError(
        f"{name} has a value of magnitude {float(largest):g}, and {kind} holds at most "
        f"{torch.finfo(dtype).max:g}. Export it with --dtype float32, which is exact"
    )


def _write_weights(
    folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], max_file_bytes: int
) -> list[Path]:
    """Write the weights into as many files as their size needs; return the files' paths.

    The files have the names that transformers looks for; several files have an index.
    """
    written: list[tuple[Path, list[str]]] = []
    waiting: dict[str, torch.Tensor] = {}
    total = size = 0

    def write() -> None:
        nonlocal waiting, size
        path = folder / f"part-{len(written)}.safetensors"
        try:
            save_file(waiting, path, metadata={"format": "pt"})
        except SafetensorError as error:  # the library reports a full disk so
            hint = "Free disk space, or give a folder on another disk"
            raise CheckpointError(path, f"cannot be written ({error})", hint) from error
        give_ordinary_mode(path)  # the library makes files that only their owner can read
        written.append((path, list(waiting)))
        waiting, size = {}, 0

    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if waiting and size + num_bytes > max_file_bytes:
            write()
        waiting[name] = tensor
        size, total = size + num_bytes, total + num_bytes
    write()
    if len(written) == 1:
        return [put(written[0][0], folder / WEIGHTS)]
    count, files = len(written), list[Path]()
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(written, start=1):
        files.append(put(path, folder / f"model-{number:05}-of-{count:05}.safetensors"))
        weight_map |= dict.fromkeys(names, files[-1].name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json_atomically(folder / INDEX, index)
    return [*files, folder / INDEX]


def weight_bytes(folder: Path) -> tuple[int, int]:
    """Return the bytes of the tensors in a folder's files of weights, and those of their headers.

    Raises:
        OSError: A file cannot be read.
    """
    total = headers = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:  # a header follows its size
            headers += 8 + int.from_bytes(file.read(8), "little")
        total += path.stat().st_size
    return total - headers, headers


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of `config.json` in a model's folder.

    Raises:
        CheckpointError: The file is missing or not a JSON object.
    """
    file = folder / CONFIG
    path = _member(folder, CONFIG)
    if path is None:
        raise CheckpointError(file, "is missing", "Give the folder of a downloaded model")
    try:
        return read_object(path, MAX_CONFIG_BYTES)
    except (OSError, ForeignFileError) as error:
        raise CheckpointError(file, f"cannot be read: {error}", "Download it again") from error


def _member(folder: Path, name: str) -> Path | None:
    """Return the path of a file in a model's folder; None if there is no such file.

    Raises:
        CheckpointError: It is a link that leaves the folder, a FIFO or a device.
    """
    try:
        return member(folder, name)
    except ForeignFileError as error:
        hint = "Put the file itself into the folder"
        raise CheckpointError(folder / name, str(error), hint) from error


@dataclass(frozen=True)
class StoredTensor:
    """Name one of our tensors in a model's folder, which `read` reads.

    Attributes:
        name: The tensor's logical name.
        shape: Its shape.
        read: Returns the tensor in FP32, and holds no more of it than that. It raises
            `CheckpointError` if the file cannot be read or has a NaN or an infinity.
    """

    name: str
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def read_tensors(folder: Path, spec: GPTSpec) -> list[StoredTensor]:
    """Return the tensors of a model in the form of transformers, none of which is read yet.

    Names and shapes of all tensors have been checked.

    Raises:
        CheckpointError: A file cannot be read, or the tensors are not those that `spec` has.
    """
    files = _files_by_tensor(folder)
    entries = list(mapping(spec, fused=any(map(is_fused, files))))
    # A model saved without its head (`GPT2Model`) has names without the first word.
    prefix = "" if entries[0].theirs in files else entries[0].theirs.partition(".")[0] + "."
    names = []
    for entry in entries:
        known_as = (name.removeprefix(prefix) for name in (entry.theirs, *entry.also))
        name = next((name for name in known_as if name in files), None)
        if name is None:
            raise CheckpointError(folder, f"lacks {entry.theirs}", "Download the model again")
        names.append(name)
    known, shapes = {*names, HEAD}, logical_shapes(spec)
    if extra := sorted(n for n in files.keys() - known if not n.endswith(_NOT_WEIGHTS)):
        reason = f"has {extra[0]}, which a model of its config.json does not have"
        raise CheckpointError(folder, reason, "Give a model's own config.json and weights")
    by_file: dict[Path, list[tuple[str, Mapped]]] = {}
    for entry, theirs in zip(entries, names, strict=True):
        by_file.setdefault(files[theirs], []).append((theirs, entry))
    for path, members in by_file.items():
        _check_shapes(path, members, shapes)
    if HEAD in files and HEAD not in names:
        _check_tied_head(files[HEAD], files[names[0]], names[0])
    return [
        StoredTensor(
            name,
            shapes[name],
            partial(_read_part, files[theirs], theirs, entry, part, shapes[name]),
        )
        for entry, theirs in zip(entries, names, strict=True)
        for part, name in enumerate(entry.ours)  # one of theirs may join several of ours
    ]


def _check_tied_head(head: Path, word: Path, embedding: str) -> None:
    """Raise if the head in the files of a model that ties it to its embedding is another one.

    Args:
        head: The file with the head.
        word: The file with the embedding.
        embedding: The embedding's name.
    """
    with _opened(head) as one, _opened(word) as other:
        left, right = one.get_slice(HEAD), other.get_slice(embedding)
        (count, width), shape = right.get_shape(), left.get_shape()
        rows = max(1, _READ_BYTES // (width * torch.float32.itemsize))
        parts = (slice(at, at + rows) for at in range(0, count, rows))
        if [count, width] == shape and all(
            torch.equal(left[part].float(), right[part].float()) for part in parts
        ):
            return
    raise CheckpointError(
        head,
        f"{HEAD} is not {embedding}, and config.json has tie_word_embeddings=true",
        "transformers 5 computes with this head, transformers 4 with the embedding. In a copy of "
        "the model, set tie_word_embeddings to false to keep the head, or leave the head out",
    )


def _read_part(
    path: Path, theirs: str, entry: Mapped, part: int, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return the logical tensor `part` of those that a stored tensor joins, some rows at a time."""
    out = torch.empty(shape)
    rows = max(1, _READ_BYTES // (out[0].numel() * out.element_size()))
    expert, place = divmod(part, len(entry.ours) // max(1, entry.stacked))
    with _opened(path) as file:
        stored = file.get_slice(theirs)
        for begin in range(0, shape[0], rows):
            end = min(begin + rows, shape[0])
            of_all = slice(place * shape[0] + begin, place * shape[0] + end)
            if entry.stacked:
                values = stored[expert, of_all]
            else:
                values = stored[:, of_all].t() if entry.transposed else stored[of_all]
            out[begin:end] = values
            is_finite = bool(torch.isfinite(values).all())
            del values  # it is a view of the whole mapped tensor, of which the next one is another
            if not is_finite:
                hint = "Download it again; a model with such weights cannot be trained further"
                raise CheckpointError(path, f"{theirs} has NaN or infinite values", hint)
    return out


def stored_tensors(folder: Path) -> Callable[[str], torch.Tensor]:
    """Return a function from the name of a tensor in a model's folder to the tensor as stored.

    Raises:
        CheckpointError: The folder has no weights, or a file cannot be read. The function raises it
            too.
    """
    files = _files_by_tensor(folder)

    def read(name: str) -> torch.Tensor:
        if name not in files:
            raise CheckpointError(folder, f"lacks {name}", "Export the model again")
        with _opened(files[name]) as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    return read


def _check_shapes(
    path: Path, members: list[tuple[str, Mapped]], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise if a tensor of a file, by its name there, has another dtype or shape than it must."""
    with _opened(path) as file:
        for name, entry in members:
            stored = file.get_slice(name)
            actual, dtype = tuple(stored.get_shape()), str(stored.get_dtype())
            if dtype not in DTYPES:
                reason = f"{name} has the dtype {dtype}; weights are read in {', '.join(DTYPES)}"
                raise CheckpointError(path, reason, "Save the model in one of these dtypes")
            expected = entry.shape(shapes[entry.ours[0]])
            if actual != expected:
                reason = f"{name} has shape {actual}; config.json asks for {expected}"
                raise CheckpointError(path, reason, "Give a model's own config.json and weights")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(path, f"cannot be read ({error})", "Download it again") from error


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    index = _member(folder, INDEX)
    if index is not None:
        return _indexed(folder, index)
    file = _member(folder, WEIGHTS)
    if file is None:
        raise CheckpointError(
            folder / WEIGHTS,
            "is missing",
            "Give a model in safetensors files; pickled weights (.bin, .pt) are never read, since "
            "they can run code",
        )
    with _opened(file) as opened:
        return dict.fromkeys(opened.keys(), file)


def _indexed(folder: Path, index: Path) -> dict[str, Path]:
    """Return the file of each tensor, as the index of several files names it."""
    try:
        names = Fields(read_object(index)).section("weight_map").tree
    except (OSError, ForeignFileError) as error:
        raise CheckpointError(index, f"cannot be read: {error}", "Download it again") from error
    files: dict[object, Path] = {}
    for name, value in names.items():
        if not isinstance(value, str) or Path(value).name != value or "\0" in value:
            file = shown_value(value)
            reason = f"{shown_value(name)} is in {file}, which is not a file name without folders"
            raise CheckpointError(index, reason, "Download it again")
        if value not in files:
            files[value] = _member(folder, value) or folder / value
    return {name: files[value] for name, value in names.items()}
