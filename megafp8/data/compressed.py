"""Open a file to read its bytes, decompressed if its ending says so, and never only in part."""

from __future__ import annotations

import bz2
import contextlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from megafp8.errors import DataError

_BLOCK = 1 << 13  # of a compressed file, in bytes; zstandard has no limit for what becomes of it
_MOST = 1 << 20  # bytes that other libraries make of it at once
_LONGEST_WINDOW = 31  # `zstd --long=31`, as large corpora are published


def _zstandard() -> Any:
    """Return what makes a decompressor of Zstandard, by whichever of the two packages is there."""
    try:
        import zstandard
    except ModuleNotFoundError:
        from backports import zstd

        longest = {int(zstd.DecompressionParameter.window_log_max): _LONGEST_WINDOW}
        return lambda: zstd.ZstdDecompressor(options=longest)
    return lambda: zstandard.ZstdDecompressor(max_window_size=1 << _LONGEST_WINDOW).decompressobj()


_LIBRARIES: dict[str, Callable[[], Any]] = {
    ".gz": lambda: lambda: zlib.decompressobj(wbits=31),  # 31: with gzip's header
    ".bz2": lambda: bz2.BZ2Decompressor,
    ".xz": lambda: lzma.LZMADecompressor,
    ".zst": _zstandard,
}
COMPRESSED = tuple(_LIBRARIES)


@contextlib.contextmanager
def opened(name: str) -> Iterator[io.BufferedReader]:
    """Open a path, or a URL that fsspec opens.

    Raises:
        DataError: The package that decompresses it is missing. Reading raises it for a file that
            ends before its last frame does, or that is damaged.
    """
    with contextlib.ExitStack() as stack:
        if "://" in name:
            import fsspec

            file = stack.enter_context(fsspec.open(name, "rb"))
        else:
            file = stack.enter_context(open(name, "rb"))
        ending = "." + name.partition("::")[0].lower().rpartition(".")[2]
        if ending in _LIBRARIES:
            try:
                new = _LIBRARIES[ending]()
            except ModuleNotFoundError as error:
                hint = "pip install zstandard, which the extra `data` of megafp8 installs too"
                raise DataError(name, "file", "needs the zstandard package", hint) from error
            file = _Decompressed(name, file, new)
        buffered = io.BufferedReader(file, _MOST)
        yield stack.enter_context(buffered)


def make_fsspec_strict() -> None:
    """Let fsspec, by which `datasets` streams files, refuse a `.zst` file that ends early, too."""
    from fsspec.compression import register_compression

    def reader(file: IO[bytes], mode: str = "rb", **_: object) -> io.BufferedReader:
        name = str(getattr(file, "path", None) or getattr(file, "name", "a .zst file"))
        return io.BufferedReader(_Decompressed(name, file, _zstandard()), _MOST)

    register_compression("zstd", reader, "zst", force=True)


class _Decompressed(io.RawIOBase):
    """Read what the frames of a compressed file hold, one after another.

    Python's own readers take a damaged second frame for the end of the file, and that of
    `zstandard` any end of it.
    """

    def __init__(self, name: str, file: IO[bytes], new: Callable[[], Any]) -> None:
        self._pieces = _pieces(name, file, new)
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._ready:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._ready = memoryview(piece)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def _pieces(name: str, file: IO[bytes], new: Callable[[], Any]) -> Iterator[bytes]:
    """Yield the content of all frames; between and after them zeros may fill up a block."""
    again = "Copy or download it again"
    data = file.read(_BLOCK)
    while True:
        frame = new()
        has_limit = hasattr(frame, "needs_input")
        while not frame.eof:
            if not data and (not has_limit or frame.needs_input):
                raise DataError(name, "file", "ends in the middle of its compressed content", again)
            try:
                yield frame.decompress(data, _MOST) if has_limit else frame.decompress(data)
            except Exception as error:  # each library has its own
                reason = f"cannot be decompressed ({type(error).__name__}: {error})"
                raise DataError(name, "file", reason, again) from error
            if frame.eof:
                data = frame.unused_data
            else:
                data = b"" if has_limit and not frame.needs_input else file.read(_BLOCK)
        while not (data := data.lstrip(b"\0")):
            if not (data := file.read(_BLOCK)):
                return
