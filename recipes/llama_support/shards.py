"""Rows of many JSONL files, read one by one: an index of where each row begins stands in for the rows in memory."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import random
import struct
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from numpy.typing import NDArray

from .errors import BadInput
from .rows import Row, numbered_lines, parse_row

if TYPE_CHECKING:
    from hashlib import _Hash

_MAGIC = b"rowidx01"
_HEADER = struct.Struct("<8sQqQQ32s")  # magic, bytes, mtime_ns, rows, smallest digest, SHA-256 of the shard
_ENTRY = np.dtype([("offset", "<u8"), ("digest", "<u8")])
_CACHE_FOLDER = ".row_index"
_OPEN_SHARDS = 128
_CHUNK = 2**20
_BATCH = 2**16
_SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class Shard:
    """One JSONL file and its index.

    Attributes:
        path: the file.
        name: its path from the folder that all shards have in common; shards are in the order of their names.
        size, modified: bytes, and st_mtime_ns, at the time of indexing.
        rows: lines that are not blank.
        smallest_digest: of all rows; 2^64 - 1 where there are none.
        content: SHA-256 of the file.
        index: the index file: a header, then per row 8 bytes of offset and 8 of `Row.digest`.
    """

    path: Path
    name: str
    size: int
    modified: int
    rows: int
    smallest_digest: int
    content: str
    index: Path

    @property
    def description(self) -> tuple[str, int, int, str]:
        """What makes it the same shard elsewhere and later: name, bytes, rows, content."""
        return self.name, self.size, self.rows, self.content

    def entries(self) -> NDArray[np.void]:
        """The index, memory-mapped: fields `offset` and `digest` per row."""
        if self.rows == 0:
            return np.empty(0, dtype=_ENTRY)
        return np.memmap(self.index, dtype=_ENTRY, mode="r", offset=_HEADER.size, shape=(self.rows,))


def is_sharded(data: str) -> bool:
    """Whether `--data` names a folder, a pattern or packed files rather than one plain file."""
    path = Path(data)
    if data == "stdlib" or (path.is_file() and path.suffix != ".gz"):
        return False
    return path.is_dir() or glob.has_magic(data) or path.suffix == ".gz"


def find_shards(data: str) -> list[tuple[Path, str]]:
    """The .jsonl files of a folder (with the folders in it) or of a pattern, each with its name, sorted by name.

    Raises BadInput where there are none, or only some that are packed.
    """
    folder = Path(data)
    if folder.is_dir():
        found = [path for path in folder.rglob("*") if path.suffix in (".jsonl", ".gz") and path.is_file()]
        found = [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
        root = folder
    else:
        found = [Path(name) for name in glob.glob(data, recursive=True) if Path(name).is_file()]
        root = pattern_root(data)
    packed = sorted(path for path in found if path.suffix == ".gz")
    if packed:
        raise BadInput(
            f"{packed[0]} is packed, and rows are read from anywhere in a shard, which a packed one does not allow;"
            " unpack it (gunzip) and give the .jsonl"
        )
    if not found:
        raise BadInput(f"--data {data}: there is no .jsonl file; give a folder or a pattern that has some")
    named = [(path, path.relative_to(root).as_posix()) for path in found]
    return sorted(named, key=lambda pair: pair[1])


def pattern_root(pattern: str) -> Path:
    """The folder before the first part with a wildcard in it."""
    parts = Path(pattern).parts
    plain = next((index for index, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return Path(*parts[:plain])


class ShardedRows:
    """The rows of all shards, by their number in the order of shards and lines. Nothing of them is held.

    An index that is there and fits its shard is used; others are made, which reads the shard once and checks each row.
    The ranks of a start share that work without talking: each takes the shards in an order of its own and leaves out
    those that are done meanwhile.
    """

    def __init__(self, data: str, *, rank: int = 0, say: Callable[[str], None] | None = None) -> None:
        """Find and index the shards of `data`.

        Args:
            data: folder or pattern.
            rank: of the caller; decides the order of work.
            say: told now and then how far the indexing is.

        Raises:
            BadInput: no shards, no rows, or a row that cannot be used, with its file and line.
        """
        named = find_shards(data)
        order = list(range(len(named)))
        random.Random(rank).shuffle(order)
        shards: dict[int, Shard] = {}
        told = time.monotonic()
        for done, number in enumerate(order):
            shards[number] = open_shard(*named[number])
            if say is not None and time.monotonic() - told > _SECONDS_BETWEEN_LINES:
                told = time.monotonic()
                say(f"indexing {data}: {done + 1} of {len(named)} files")
        self.shards = [shards[number] for number in range(len(named))]
        self._ends = np.cumsum([shard.rows for shard in self.shards], dtype=np.int64)
        if len(self) == 0:
            raise BadInput(f"--data {data}: its {len(named)} .jsonl files hold no rows")
        self._opened: OrderedDict[int, tuple[int, NDArray[np.void]]] = OrderedDict()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_opened": OrderedDict()}

    @property
    def smallest_digest(self) -> int:
        """Of all rows."""
        return min(shard.smallest_digest for shard in self.shards)

    def digest(self, number: int) -> int:
        """`Row.digest` of a row, from the index."""
        shard, line = self._find(number)
        return int(self._open(shard)[1]["digest"][line])

    def row(self, number: int) -> Row:
        """Read a row. Raises BadInput where its shard is no longer what was indexed."""
        shard, line = self._find(number)
        file, entries = self._open(shard)
        start = int(entries["offset"][line])
        end = int(entries["offset"][line + 1]) if line + 1 < len(entries) else self.shards[shard].size
        text = os.pread(file, end - start, start).split(b"\n", 1)[0]
        try:
            return parse_row(text, self.shards[shard].name)
        except BadInput as error:
            raise BadInput(f"{self.shards[shard].path} has changed while it was in use ({error})") from error

    def origin(self, number: int) -> str:
        """FILE, line N, for messages: reads the shard up to the row."""
        shard, line = self._find(number)
        path = self.shards[shard].path
        wanted = int(self.shards[shard].entries()["offset"][line])
        with path.open("rb") as file:
            for at, offset, _ in numbered_lines(file):
                if offset == wanted:
                    return f"{path}, line {at}"
        return str(path)

    def count_below(self, threshold: int) -> int:
        """Rows whose digest is below `threshold`."""
        return sum(len(numbers) for numbers in self._below(threshold))

    def smallest(self, threshold: int) -> list[int]:
        """Numbers of the rows whose digest is below `threshold`, the smallest digest first."""
        numbers = np.concatenate([np.empty(0, dtype=np.int64), *self._below(threshold)])
        return sorted(numbers.tolist(), key=lambda number: (self.digest(number), number))

    def _below(self, threshold: int) -> list[NDArray[np.int64]]:
        found = []
        largest = np.uint64(min(threshold, 2**64) - 1) if threshold > 0 else None
        for number, shard in enumerate(self.shards):
            first = int(self._ends[number]) - shard.rows
            if largest is None or shard.smallest_digest > largest:
                continue
            digests = shard.entries()["digest"]
            for start in range(0, shard.rows, _CHUNK):
                below = np.flatnonzero(digests[start : start + _CHUNK] <= largest)
                found.append(below.astype(np.int64) + first + start)
        return found

    def _find(self, number: int) -> tuple[int, int]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        shard = int(np.searchsorted(self._ends, number, side="right"))
        return shard, number - (int(self._ends[shard]) - self.shards[shard].rows)

    def _open(self, shard: int) -> tuple[int, NDArray[np.void]]:
        """A shard's file and its index; of all shards the last used ones are open, since each takes two descriptors."""
        if shard in self._opened:
            self._opened.move_to_end(shard)
            return self._opened[shard]
        if len(self._opened) >= _OPEN_SHARDS:
            os.close(self._opened.popitem(last=False)[1][0])
        described = self.shards[shard]
        file = os.open(described.path, os.O_RDONLY)
        status = os.fstat(file)
        if (status.st_size, status.st_mtime_ns) != (described.size, described.modified):
            os.close(file)
            raise BadInput(f"{described.path} has changed while it was in use; start again")
        self._opened[shard] = file, described.entries()
        return self._opened[shard]

    def close(self) -> None:
        """Close the files; a row read later opens them again."""
        while self._opened:
            os.close(self._opened.popitem()[1][0])


def open_shard(path: Path, name: str) -> Shard:
    """A shard with an index that fits it, which is made where there is none."""
    status = path.stat()
    for index in _index_places(path):
        with contextlib.suppress(OSError):
            shard = _read_header(path, name, index)
            if shard is not None and (shard.size, shard.modified) == (status.st_size, status.st_mtime_ns):
                return shard
    return _make_index(path, name)


def _index_places(path: Path) -> list[Path]:
    """Where a shard's index may lie: beside the shard, else in the user's cache, else in the temporary folder."""
    absolute = path.resolve()
    key = hashlib.sha256(os.fsencode(absolute)).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashoptim_dist" / "row_index"
    temporary = Path(tempfile.gettempdir()) / f"flashoptim_dist-row_index-{os.getuid()}"
    return [
        absolute.parent / _CACHE_FOLDER / f"{absolute.name}.index",
        *(folder / f"{absolute.stem}-{key}.index" for folder in (cache, temporary)),
    ]


def _read_header(path: Path, name: str, index: Path) -> Shard | None:
    with index.open("rb") as file:
        header = file.read(_HEADER.size)
        length = os.fstat(file.fileno()).st_size
    if len(header) < _HEADER.size:
        return None
    magic, size, modified, rows, smallest, content = _HEADER.unpack(header)
    if magic != _MAGIC or length != _HEADER.size + rows * _ENTRY.itemsize:
        return None
    return Shard(path, name, size, modified, rows, smallest, content.hex(), index)


def _make_index(path: Path, name: str) -> Shard:
    """Read and check a shard, and write its index, which gets its name only when it is whole."""
    reasons = []
    for index in _index_places(path):
        try:
            index.parent.mkdir(parents=True, exist_ok=True)
            descriptor, scratch = tempfile.mkstemp(dir=index.parent, prefix=f"{index.name}.")
        except OSError as error:
            reasons.append(f"{index.parent}: {error.strerror or error}")
            continue
        try:
            with os.fdopen(descriptor, "wb") as file:
                _write_index(path, file)
            os.replace(scratch, index)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(scratch)
            raise
        shard = _read_header(path, name, index)
        assert shard is not None
        return shard
    raise BadInput(
        f"the index of {path} cannot be written anywhere ({'; '.join(reasons)}); set XDG_CACHE_HOME to a folder"
        " that can hold 16 bytes for each row"
    )


def _write_index(path: Path, index: BinaryIO) -> None:
    content = hashlib.sha256()
    entries = []
    rows, smallest = 0, 2**64 - 1
    index.write(bytes(_HEADER.size))
    with path.open("rb") as file:
        before = os.fstat(file.fileno())
        for number, offset, line in numbered_lines(_hashed(file, content)):
            digest = parse_row(line, f"{path}, line {number}").digest
            entries.append((offset, digest))
            rows, smallest = rows + 1, min(smallest, digest)
            if len(entries) == _BATCH:
                index.write(np.array(entries, dtype=_ENTRY).tobytes())
                entries.clear()
        after = os.fstat(file.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise BadInput(f"{path} was written to while it was read; start again when it is whole")
    index.write(np.array(entries, dtype=_ENTRY).tobytes())
    index.seek(0)
    index.write(_HEADER.pack(_MAGIC, after.st_size, after.st_mtime_ns, rows, smallest, content.digest()))


def _hashed(file: BinaryIO, digest: _Hash) -> Iterator[bytes]:
    for line in file:
        digest.update(line)
        yield line
