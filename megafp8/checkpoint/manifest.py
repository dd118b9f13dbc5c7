"""Write and read a checkpoint's manifest: its scalars, its files, their hashes and their pieces.

The manifest is `manifest.json`; `manifest.sha256` holds its hash, in the form that `sha256sum -c`
reads. The scalars are under `meta`. A `Placement` says which piece of a logical (unsharded) tensor
a local tensor is; checkpoints know nothing else about parallelism.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from megafp8.checkpoint.shardfile import DTYPES
from megafp8.checkpoint.step_directories import MANIFEST_NAME
from megafp8.errors import CheckpointError, UnreadableError
from megafp8.files import why_unreadable, write_durably
from megafp8.foreign import Fields, ForeignFileError, parse_json, read_bytes
from megafp8.specs.geometry import Box, Sizes, why_not_a_partition

FORMAT_VERSION = 1
MANIFEST_HASH_NAME = "manifest.sha256"
USE_ANOTHER = "Use an older checkpoint, or replace this one by an undamaged copy"
COUNTS = ("consumed_samples", "num_updates", "num_skipped")
SKIPPED_IN_A_ROW = "num_skipped_in_a_row"  # checkpoints of earlier versions have no such count
KEYS_OF_STATE = ("config", "data_fingerprint", *COUNTS)
"""The keys of `meta` that every state of training has."""
_SECTIONS_OF_META = (
    "config",
    "last_in_effect",
    "metrics",
    "versions",
    "scaling_layout",
    "loss_scale",
    "precision_steps",
)
_MOST = 2**53
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Placement:
    """Name the rectangle of a logical tensor that a local tensor holds.

    `tensor` may be a view of a part of a parameter, with any strides. Saving reads `tensor`, and
    loading copies into it in place. Replicas hold the same bytes, and only replica 0 is written.
    """

    name: str  # logical name, for example "layers.3.attention.query.weight"
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]  # of this piece in the logical tensor, in elements
    tensor: torch.Tensor
    replica: int = 0

    def __post_init__(self) -> None:
        shape, offset, whole = self.tensor.shape, self.offset, self.global_shape
        fits = len(shape) == len(offset) == len(whole) and all(
            0 <= start <= end - size for start, size, end in zip(offset, shape, whole, strict=True)
        )
        assert fits, f"{self.name}: piece {tuple(shape)} at {offset} of {whole}"


@dataclass(frozen=True)
class PieceEntry:
    """Describe a rectangle of the logical tensor `name`, which a file stores under `key`."""

    name: str
    key: str
    dtype: str  # as safetensors spells it, for example "BF16"
    global_shape: Sizes
    offset: Sizes  # elements
    shape: Sizes

    @property
    def box(self) -> Box:
        """Return the rectangle that the piece covers in its logical tensor."""
        return Box(self.offset, self.shape)


@dataclass(frozen=True)
class ShardEntry:
    """Describe one file of a checkpoint; the entry is plain data, which ranks can exchange."""

    file_name: str
    size: int  # bytes
    sha256: str  # hash of the bytes that were meant to be written
    pieces: tuple[PieceEntry, ...]


@dataclass(frozen=True)
class Manifest:
    """Describe a whole checkpoint: its step, the caller's JSON `meta`, and its files."""

    step: int
    meta: dict[str, Any]
    shards: tuple[ShardEntry, ...]


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest and then its hash, both fsynced.

    Raises:
        OSError: A file cannot be written.
    """
    content = _encode(manifest)
    write_durably(directory / MANIFEST_NAME, content)
    write_durably(directory / MANIFEST_HASH_NAME, _hash_line(content))


def read_manifest(directory: Path) -> Manifest:
    """Return a checkpoint's manifest, after every check that needs no other file.

    Raises:
        CheckpointError: The manifest is missing, does not match its hash, or its pieces do not
            cover each tensor exactly once.
        UnreadableError: The manifest has another format, or cannot be read.
    """
    path = directory / MANIFEST_NAME
    content = _read_regular_file(path)
    guard = _read_regular_file(directory / MANIFEST_HASH_NAME)
    if guard != _hash_line(content):
        actual = hashlib.sha256(content).hexdigest()
        expected = guard[:64].decode("ascii", "replace")
        _refuse(path, f"sha256 is {actual}, {MANIFEST_HASH_NAME} says {expected!r}")
    try:
        tree = parse_json(content)
    except ForeignFileError as error:
        _refuse(path, str(error))
    version = tree.get("format_version") if isinstance(tree, dict) else None
    if version != FORMAT_VERSION:
        hint = "Use the version of megafp8 that wrote it"
        kind = UnreadableError if type(version) is int else CheckpointError
        raise kind(path, f"format_version is {version!r}, not {FORMAT_VERSION}", hint)
    try:
        manifest = _decode(tree)
        _check_meta(manifest.meta)
    except (KeyError, TypeError, ValueError) as error:
        _refuse(path, f"a field is missing or has a wrong type ({error!r})")
    if wrong := why_incomplete(manifest.shards):
        _refuse(path, wrong)
    return manifest


def check_state(
    meta: Mapping[str, Any], path: Path, required: tuple[str, ...] = KEYS_OF_STATE
) -> None:
    """Check that `meta` of a checkpoint has a state of training: the keys that are `required`.

    Raises:
        CheckpointError: It has none, as what `megafp8 import` writes, or only a part of one.
    """
    missing = [key for key in required if meta.get(key) is None]
    if not missing:
        return
    reason = "has weights, but no state of training"
    if len(missing) < len(required) - 1:  # weights alone are saved with their configuration
        reason = f"lacks {missing[0]} in its manifest's meta"
    hint = "Use restore_from_path, which reads the weights only"
    raise CheckpointError(path, reason, hint)


def why_incomplete(shards: Sequence[ShardEntry]) -> str | None:
    """Return None if the files together hold each logical tensor exactly once, or what is wrong."""
    if clash := _first_repeated([shard.file_name for shard in shards]):
        return f"file name {clash} occurs twice"
    for shard in shards:
        if clash := _first_repeated([piece.key for piece in shard.pieces]):
            return f"{shard.file_name}: key {clash} occurs twice"
    for name, pieces in pieces_by_name(shards).items():
        if len({(piece.dtype, piece.global_shape) for _, piece in pieces}) > 1:
            return f"{name}: its pieces disagree about dtype or shape"
        boxes = [piece.box for _, piece in pieces]
        if wrong := why_not_a_partition(boxes, pieces[0][1].global_shape):
            return f"{name}: {wrong}"
    return None


def pieces_by_name(shards: Sequence[ShardEntry]) -> Mapping[str, list[tuple[str, PieceEntry]]]:
    """Return the pieces of each logical tensor: {name: [(file name, piece), …]}."""
    by_name: dict[str, list[tuple[str, PieceEntry]]] = {}
    for shard in shards:
        for piece in shard.pieces:
            by_name.setdefault(piece.name, []).append((shard.file_name, piece))
    return by_name


def is_plain_file_name(name: str) -> bool:
    """Whether a manifest may list a file of this name.

    The name must be one path component of letters, digits, `_`, `.` and `-`, so that a manifest
    never leads out of its directory, and must not be that of the manifest itself.
    """
    return bool(_PLAIN_NAME.fullmatch(name)) and name not in (MANIFEST_NAME, MANIFEST_HASH_NAME)


def _hash_line(content: bytes) -> bytes:
    return f"{hashlib.sha256(content).hexdigest()}  {MANIFEST_NAME}\n".encode()


def _read_regular_file(path: Path) -> bytes:
    try:
        if path.is_symlink():
            _refuse(path, "is a symbolic link")
        return read_bytes(path)
    except FileNotFoundError:
        _refuse(path, "is missing")
    except (OSError, ForeignFileError) as error:
        if (unreadable := why_unreadable(path, error)) is not None:
            raise unreadable from error
        _refuse(path, f"cannot be read ({error})")


def _encode(manifest: Manifest) -> bytes:
    """Return the manifest as JSON with a line for each file and piece, which diff can compare."""
    lines = ["{", f'"format_version": {FORMAT_VERSION},', f'"step": {manifest.step},']
    lines += [f'"meta": {json.dumps(manifest.meta, indent=1, allow_nan=False)},', '"files": [']
    files = []
    for shard in manifest.shards:
        pieces = ",\n".join(json.dumps(vars(piece)) for piece in shard.pieces)
        fields = {"file_name": shard.file_name, "size": shard.size, "sha256": shard.sha256}
        files.append(f'{json.dumps(fields)[:-1]}, "pieces": [\n{pieces}]}}')
    return "\n".join([*lines, ",\n".join(files), "]", "}", ""]).encode()


def _decode(tree: dict[str, Any]) -> Manifest:
    for field, kind in (("files", list), ("meta", dict)):
        if not isinstance(tree[field], kind):
            raise TypeError(field)
    shards = tuple(_decode_shard(entry) for entry in tree["files"])
    return Manifest(_natural(tree["step"], "step"), tree["meta"], shards)


def _decode_shard(entry: dict[str, Any]) -> ShardEntry:
    file_name = entry["file_name"]
    if not isinstance(file_name, str) or not is_plain_file_name(file_name):
        raise ValueError(f"file_name {file_name!r} is not a plain name")
    if not isinstance(entry["sha256"], str) or not _SHA256.fullmatch(entry["sha256"]):
        raise ValueError("sha256")
    pieces = tuple(_decode_piece(piece) for piece in entry["pieces"])
    return ShardEntry(file_name, _natural(entry["size"], "size"), entry["sha256"], pieces)


def _decode_piece(entry: dict[str, Any]) -> PieceEntry:
    """Return a piece from its entry in a manifest, of which nothing has been checked.

    Raises:
        KeyError, TypeError, ValueError: A field is missing, or has another type or value.
    """
    for field in ("name", "key", "dtype"):
        if not isinstance(entry[field], str):
            raise TypeError(field)
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"dtype {entry['dtype']!r} is unknown")
    sizes = (tuple(_natural(n, f) for n in entry[f]) for f in ("global_shape", "offset", "shape"))
    global_shape, offset, shape = sizes
    if not len(global_shape) == len(offset) == len(shape):
        raise ValueError(f"{entry['name']}: offset and shape differ in length")
    return PieceEntry(entry["name"], entry["key"], entry["dtype"], global_shape, offset, shape)


def _natural(value: object, field: str) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{field}: {value!r}")
    return value


def _check_meta(meta: Mapping[str, Any]) -> None:
    """Check the type and the range of each known key of `meta`.

    A right hash says that a manifest is as it was written, and not that this program wrote it. Keys
    may be missing, as in weights without a state of training, or in checkpoints of earlier
    versions.

    Raises:
        ForeignFileError: A value is not what the key holds.
    """
    fields = Fields(meta)
    for key in (*COUNTS, SKIPPED_IN_A_ROW):
        fields.whole(key, 0, _MOST, None)
    fields.text("data_fingerprint", None)
    fields.whole("eod_id", 0, _MOST, None)
    sections = {key: fields.section(key) for key in _SECTIONS_OF_META}
    for name in ("model", "trainer", "exp_manager"):
        sections["config"].section(name)
    for name in sections["metrics"].tree:
        sections["metrics"].number(name, None)
    for name in sections["scaling_layout"].tree:
        sections["scaling_layout"].whole(name, 1, _MOST)
    for name in sections["precision_steps"].tree:
        sections["precision_steps"].whole(name, 0, _MOST)
    if sections["loss_scale"].tree:
        sections["loss_scale"].number("scale", above=0)
        sections["loss_scale"].whole("num_finite", 0, _MOST)
        sections["loss_scale"].whole("num_overflows", 0, _MOST)


def _first_repeated(names: Sequence[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _refuse(path: Path, reason: str) -> NoReturn:
    raise CheckpointError(path, reason, USE_ANOTHER)
