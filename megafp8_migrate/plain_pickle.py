"""Read what a pickle holds as plain data; nothing that it names is imported, called or built.

A pickle is a program of a stack machine. `pickletools` reads its instructions one by one, and the
machine here carries out those that put values together. A name becomes a value only if a table has
it, so that a class of another library becomes a `Record` of its fields; every other name is an
error. `saved_tensors` reads the tensors that a pickle names.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import torch

from megafp8.foreign import MIB, ForeignFileError, shown_value

MAX_PICKLE_BYTES = 512 * MIB
"""Of a checkpoint of 100,000 tensors on 1,000 ranks, the metadata has less."""
_MAX_BITS, _MAX_KEY_BITS, _MAX_ITEMS_OF_KEY = 128, 60, 8
"""Of whole numbers, and of keys: hashes of more could be chosen so that all are alike."""
_ITEMS_OF_A_BYTE = 16
"""What functions are given in all, for each byte of the pickle: a memo makes a copy of 2 bytes."""


@dataclass(eq=False, repr=False)
class Record:
    """Hold an object of a class that is not imported: its name, arguments and state."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __getitem__(self, key: str) -> Any:
        """Return a field of the state; `ForeignFileError` says that there is none."""
        if not isinstance(self.state, dict) or key not in self.state:
            raise ForeignFileError(f"an object {self.name} has no {key}")
        return self.state[key]


class Storage(NamedTuple):
    """Name the bytes of a tensor in an archive, or hold them; without a dtype it is None."""

    key: str
    dtype: torch.dtype | None
    raw: bytes | None = None


class SavedTensor(NamedTuple):
    """Say where in its storage a tensor lies, in numbers of elements."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Float8(NamedTuple):
    """Hold a weight of Transformer Engine's in FP8: its codes, and what they are multiplied by."""

    codes: SavedTensor
    dtype: torch.dtype
    scale: SavedTensor


class _Name(NamedTuple):
    """Stand for a class or a function that the pickle names."""

    text: str


_MARK: Any = object()
"""Stands for the place from which an instruction takes all values of the stack."""
_DTYPES = {
    f"torch {name}": getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64",
        "int32", "int16", "int8", "uint8", "bool",
    )
}  # fmt: skip
_STORAGES = {
    f"torch {name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64, "Float": torch.float32, "Half": torch.float16,
        "BFloat16": torch.bfloat16, "Long": torch.int64, "Int": torch.int32,
        "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool,
    }.items()
}  # fmt: skip
_UNTYPED = ("torch.storage UntypedStorage", "torch UntypedStorage")
_METADATA, _PLANNER = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.planner",
)
_RECORDS = frozenset(
    {
        *(
            f"{_METADATA} {name}"
            for name in (
                "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
                "ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
            )
        ),
        *(
            f"{_PLANNER} {name}"
            for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData",
                         "BytesIOWriteData")
        ),
        "torch.distributed.checkpoint.filesystem _StorageInfo",
        "torch.distributed.checkpoint.filesystem _StoragePrefix",
        "torch.distributed.checkpoint.filesystem StorageMeta",
        "torch.distributed._shard.sharded_tensor.metadata TensorProperties",
        "torch.distributed._shard.sharded_tensor.metadata MEM_FORMAT_ENCODING",
        "argparse Namespace", "types SimpleNamespace", "signal Signals", "_io BytesIO",
        "torch.serialization _get_layout", "torch device",
        "transformer_engine_torch DType", "te_cpu.enums DType",
        *(f"numpy.{core}.multiarray {made}" for core in ("core", "_core")
          for made in ("_reconstruct", "scalar")),
        "numpy ndarray", "numpy dtype", "numpy.dtypes UInt32DType",
    }
)  # fmt: skip
"""Classes whose objects become records."""
_FLOAT8 = "transformer_engine.pytorch.tensor.float8_tensor Float8Tensor"
_CODES = {7: torch.float8_e4m3fn, 8: torch.float8_e5m2}
"""FP8's formats by their numbers in Transformer Engine's enumeration."""
_OPAQUE = ("megatron.", "transformer_engine.common.recipe ")
"""Classes of Megatron's own and recipes are in its arguments; their objects become records too."""
_OLD_STORAGE = "torch.storage _load_from_bytes"


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ForeignFileError(f"it has {shown_value(value)} where a text belongs")
    return value


def numbers(values: Any) -> tuple[int, ...]:
    """Return a tuple of whole numbers from 0 on, as a size or a stride has them.

    Raises:
        ForeignFileError: The value is none.
    """
    if not isinstance(values, tuple) or not all(type(n) is int and 0 <= n < 2**60 for n in values):
        raise ForeignFileError("the numbers of a size or a place are not whole numbers from 0 on")
    return values


def _tensor(arguments: tuple[Any, ...], dtype: torch.dtype | None = None) -> SavedTensor:
    storage, offset, size, stride = arguments[:4]
    if not isinstance(storage, Storage) or len(size) != len(stride):
        raise ForeignFileError("a tensor has no storage")
    dtype = dtype or storage.dtype
    if dtype is None:
        raise ForeignFileError("a tensor has no dtype")
    numbers((offset,))
    return SavedTensor(storage, dtype, offset, numbers(size), numbers(stride))


def _encoded(arguments: tuple[Any, ...]) -> bytes:
    text, encoding = arguments
    if encoding != "latin1":
        raise ForeignFileError(f"it has bytes in the encoding {shown_value(encoding)}")
    return _text(text).encode("latin1")


def _attribute(arguments: tuple[Any, ...]) -> _Name:
    """Return a class's function that a pickle asks for; one is known, which makes FP8 weights."""
    owner, name = arguments
    if not isinstance(owner, _Name):
        raise ForeignFileError("it asks for an attribute of something that is no class")
    module, _, of = owner.text.partition(" ")
    return _name(module, f"{of}.{_text(name)}")


def _float8(arguments: tuple[Any, ...]) -> Float8:
    codes, kind, scale = arguments[:3]
    number = kind.arguments[:1] or (kind.state,) if isinstance(kind, Record) else ()
    of_codes = _CODES.get(number[0]) if number and type(number[0]) is int else None
    if not isinstance(codes, SavedTensor) or not isinstance(scale, SavedTensor) or not of_codes:
        raise ForeignFileError(
            "a weight in FP8 has another form than Transformer Engine 2 gives it"
        )
    return Float8(codes, of_codes, scale)


def _empty(given: tuple[Any, ...]) -> dict[Any, Any]:
    if given:
        raise ForeignFileError("an ordered mapping has items before it is made")
    return {}


_MAKERS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "torch Size": lambda given: numbers(tuple(given[0])),
    "collections OrderedDict": _empty,  # instructions that follow add its items
    "collections defaultdict": lambda given: {},
    "builtins set": lambda given: set(map(_key, given[0])) if given else set(),
    "builtins slice": lambda given: slice(*given),
    "pathlib PosixPath": lambda given: "/".join(map(_text, given)),
    "pathlib._local PosixPath": lambda given: "/".join(map(_text, given)),
    "_codecs encode": _encoded,
    "torch._utils _rebuild_tensor_v2": _tensor,
    "torch._utils _rebuild_tensor_v3": lambda given: _tensor(given, given[6]),
    "torch._utils _rebuild_parameter": lambda given: given[0],
    "builtins getattr": _attribute,
    f"{_FLOAT8}._make_in_reduce_ex": _float8,
    _FLOAT8.replace("Float8Tensor", "_make_float8_tensor_in_reduce_ex"): _float8,
}
"""What becomes of the functions and classes that values of plain types and tensors are made by."""
_VALUES: dict[str, Any] = _DTYPES | _STORAGES


def _named(module: Any, name: Any) -> Any:
    """Return what stands for a name, in the module that has it."""
    text = f"{_text(module)} {_text(name)}".replace("__builtin__ ", "builtins ")
    return _VALUES[text] if text in _VALUES else _name(*text.split(" ", 1))


def _name(module: str, name: str) -> _Name:
    text = f"{module} {name}"
    known = text in _MAKERS or text in _RECORDS or text in _UNTYPED
    known = known or text in (_FLOAT8, _OLD_STORAGE)
    words = (*module.split("."), name)
    if known or (text.startswith(_OPAQUE) and all(map(str.isidentifier, words))):
        return _Name(text)
    raise ForeignFileError(
        f"it names {shown_value('.'.join(text.split(' ')))}, which is not among the classes that "
        "a checkpoint is read with"
    )


def _made(name: Any, arguments: Any) -> Any:
    is_known = isinstance(name, _Name) and name.text != _OLD_STORAGE
    if not is_known or not isinstance(arguments, tuple):
        raise ForeignFileError(f"it calls {shown_value(name)}, which is not a known class here")
    maker = _MAKERS.get(name.text)
    return Record(name.text, arguments) if maker is None else maker(arguments)


def _key(value: Any) -> Any:
    """Return a value that may be a key: the hash of tuples within tuples has no limit of depth."""
    plain = str | int | bytes | None | Record | torch.dtype
    flat = value if isinstance(value, tuple) else (value,)
    if len(flat) > _MAX_ITEMS_OF_KEY or not all(
        isinstance(item, plain) and _bits(item) <= _MAX_KEY_BITS for item in flat
    ):
        raise ForeignFileError("a key of a mapping is no plain value")
    return value


def _bits(value: Any) -> int:
    """Return the bits of a whole number; 0 for every other value."""
    return value.bit_length() if isinstance(value, int) else 0


@dataclass
class _Machine:
    """Carry out the instructions of a pickle."""

    persistent: Callable[[Any], Any] | None
    left: int  # what functions may still be given, in items of containers and letters of texts
    has_old_storages: bool = False  # whether it may have storages that are files of their own
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def run(self, content: bytes | BinaryIO) -> Any:
        for opcode, argument, _ in pickletools.genops(content):
            name = opcode.name
            if name == "STOP":
                return self.stack.pop()
            if name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name])
            elif name in _LITERALS:
                if _bits(argument) > _MAX_BITS:
                    raise ForeignFileError(f"it has a number of {_bits(argument)} bits")
                self.stack.append(argument)
            elif name in _TUPLES:
                self.stack.append(self._last(_TUPLES[name]))
            elif (do := getattr(self, f"do_{name.lower()}", None)) is not None:
                do(argument)
            elif name not in _WITHOUT_EFFECT:
                raise ForeignFileError(f"it has the instruction {name}, which is not carried out")
        raise ForeignFileError("it has no end")

    def _marked(self) -> list[Any]:
        """Return and remove the values since the last mark."""
        place = next(n for n in range(len(self.stack) - 1, -1, -1) if self.stack[n] is _MARK)
        values = self.stack[place + 1 :]
        del self.stack[place:]
        return values

    def do_mark(self, _: Any) -> None:
        self.stack.append(_MARK)

    def do_pop(self, _: Any) -> None:
        self.stack.pop()

    def do_pop_mark(self, _: Any) -> None:
        self._marked()

    def do_empty_list(self, _: Any) -> None:
        self.stack.append([])

    def do_empty_dict(self, _: Any) -> None:
        self.stack.append({})

    def do_empty_set(self, _: Any) -> None:
        self.stack.append(set())

    def do_tuple(self, _: Any) -> None:
        self.stack.append(tuple(self._marked()))

    def do_list(self, _: Any) -> None:
        self.stack.append(self._marked())

    def do_dict(self, _: Any) -> None:
        self.stack.append(_pairs(self._marked()))

    def do_frozenset(self, _: Any) -> None:
        self.stack.append(frozenset(map(_key, self._marked())))

    def _last(self, count: int) -> tuple[Any, ...]:
        return tuple(reversed([self.stack.pop() for _ in range(count)]))

    def _top(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise ForeignFileError("an instruction adds to a value of another kind")
        return self.stack[-1]

    def do_append(self, _: Any) -> None:
        value = self.stack.pop()
        self._top(list).append(value)

    def do_appends(self, _: Any) -> None:
        values = self._marked()
        self._top(list).extend(values)

    def do_setitem(self, _: Any) -> None:
        pair = self._last(2)
        self._top(dict).update(_pairs(pair))

    def do_setitems(self, _: Any) -> None:
        pairs = _pairs(self._marked())
        self._top(dict).update(pairs)

    def do_additems(self, _: Any) -> None:
        values = self._marked()
        self._top(set).update(map(_key, values))

    def do_memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def do_put(self, place: Any) -> None:
        self.memo[int(place)] = self.stack[-1]

    do_binput = do_long_binput = do_put

    def do_get(self, place: Any) -> None:
        self.stack.append(self.memo[int(place)])

    do_binget = do_long_binget = do_get

    def _given(self, values: Iterable[Any]) -> None:
        """Count what a function gets: repeated copies of one value could fill the memory."""
        self.left -= sum(len(value) for value in values if isinstance(value, Sized))
        if self.left < 0:
            raise ForeignFileError("it makes far more values than it has bytes")

    def do_global(self, argument: Any) -> None:
        self.stack.append(_named(*str(argument).split(" ", 1)))

    def do_stack_global(self, _: Any) -> None:
        names = self._last(2)
        self._given(names)
        self.stack.append(_named(*names))

    def do_reduce(self, _: Any) -> None:
        name, arguments = self._last(2)
        self._given(arguments if isinstance(arguments, tuple) else ())
        is_old = self.has_old_storages and name == _Name(_OLD_STORAGE)
        self.stack.append(_old_storage(*arguments) if is_old else _made(name, arguments))

    do_newobj = do_reduce

    def do_build(self, _: Any) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Record):
            self.stack[-1].state = state
        elif not isinstance(self.stack[-1], dict):  # attributes of a state_dict say nothing
            raise ForeignFileError("an instruction sets fields of a value that has none")

    def do_binpersid(self, _: Any) -> None:
        if self.persistent is None:
            raise ForeignFileError("it refers to something outside of it")
        self.stack.append(self.persistent(self.stack.pop()))


_CONSTANTS: dict[str, Any] = {
    "NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (),
}  # fmt: skip
_LITERALS = frozenset(
    """
    INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING
    UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8
    """.split()
)
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_WITHOUT_EFFECT = ("PROTO", "FRAME")


def _pairs(values: Iterable[Any]) -> dict[Any, Any]:
    items = list(values)
    return {_key(key): value for key, value in zip(items[::2], items[1::2], strict=True)}


def read_pickle(
    content: bytes,
    persistent: Callable[[Any], Any] | None = None,
    *,
    has_old_storages: bool = False,
) -> Any:
    """Return what a pickle holds: texts, numbers, containers, dtypes, records and saved tensors.

    Args:
        content: The pickle.
        persistent: Returns what stands for the identity of an object outside of the pickle.
        has_old_storages: Whether the bytes of tensors may be in it, as where a tensor is pickled
            without torch.save.

    Raises:
        ForeignFileError: It is no pickle, or names something that the tables here do not have.
    """
    try:
        return _Machine(persistent, _ITEMS_OF_A_BYTE * len(content), has_old_storages).run(content)
    except ForeignFileError:
        raise
    except (ValueError, ArithmeticError, TypeError, LookupError, StopIteration) as error:
        said = " ".join(str(error).split())[:100]
        raise ForeignFileError(f"it is not a whole pickle ({said})") from error


def fields_of(value: Any) -> Mapping[str, Any]:
    """Return the fields of a record, or an empty mapping for one without fields.

    Raises:
        ForeignFileError: The value is no record of named fields.
    """
    state = (value.state or {}) if isinstance(value, Record) else None
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise ForeignFileError("an object has no named fields")
    return state


def storage_of(identity: Any) -> Storage:
    """Return the storage that a pickle of `torch.save` refers to."""
    if not isinstance(identity, tuple) or len(identity) != 5 or identity[0] != "storage":
        raise ForeignFileError("it refers to something that is no storage of a tensor")
    kind, key = identity[1:3]
    if not isinstance(kind, torch.dtype) and kind not in map(_Name, _UNTYPED):
        raise ForeignFileError("it has a storage of an unknown dtype")
    return Storage(_text(key), kind if isinstance(kind, torch.dtype) else None)


def _old_storage(content: bytes) -> Storage:
    """Return a storage from the form that torch.save had before torch 1.6: five pickles and bytes.

    None of the five may have such a storage in it.
    """
    stream = io.BytesIO(content)

    def persistent(identity: Any) -> Storage:
        return storage_of(identity[:5] if isinstance(identity, tuple) else None)

    magic, _, system, storage, keys = (
        _Machine(persistent, _ITEMS_OF_A_BYTE * len(content)).run(stream) for _ in range(5)
    )
    count, raw = int.from_bytes(stream.read(8), "little"), stream.read()
    is_whole = (
        magic == _MAGIC
        and system["little_endian"] is True
        and isinstance(storage, Storage)
        and keys == [storage.key]
        and storage.dtype is not None
        and len(raw) == count * storage.dtype.itemsize
    )
    if not is_whole:
        raise ForeignFileError("a tensor's bytes have another form than torch gives them")
    return Storage(storage.key, storage.dtype, raw)


_MAGIC = 0x1950A86A20F9469CFC6C
"""The number with which torch.save began its files (`MAGIC_NUMBER` of torch.serialization)."""
