"""Many JSONL files as one list of rows: the index, where it lies, and files that are not as they should be."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import pytest
from llama_support import shards
from llama_support.config import Config
from llama_support.errors import BadInput
from llama_support.rows import Row, read_jsonl
from llama_support.shards import ShardedRows, find_shards, is_sharded
from llama_support.shuffle import Shuffled


def _write(folder: Path, count: int = 40, files: int = 4) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        rows = [{"text": f"row {i}"} for i in range(number, count, files)]
        (folder / f"part-{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _texts(rows: ShardedRows) -> list[str | None]:
    return [rows.row(number).text for number in range(len(rows))]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 64, 65, 1000])
def test_a_shuffled_range_holds_each_number_once(count: int) -> None:
    order = list(Shuffled(count, 7))
    assert sorted(order) == list(range(count))
    if count >= 64:
        assert order != list(range(count))
        assert order != list(Shuffled(count, 8))


def test_a_shuffled_range_looks_random() -> None:
    # Each of 16 x 16 cells of (place, number) gets 1/256 of 65,536: 256, with a standard deviation of about 16.
    cells = [[0] * 16 for _ in range(16)]
    for place, number in enumerate(Shuffled(2**16, 3)):
        cells[place >> 12][number >> 12] += 1
    assert all(160 < count < 352 for row in cells for count in row)
    neighbours = [abs(a - b) for a, b in zip(Shuffled(10_000, 1), [*Shuffled(10_000, 1)][1:])]
    assert 3000 < sum(neighbours) / len(neighbours) < 3700  # a third of the range


def test_any_place_of_a_huge_range_costs_the_same() -> None:
    huge = Shuffled(10**15, 5)
    assert len({huge[place] for place in range(0, 10**15, 10**13)}) == 100


def test_what_is_sharded(tmp_path: Path) -> None:
    _write(tmp_path / "data")
    (tmp_path / "odd[1].jsonl").write_text("{}")
    assert is_sharded(str(tmp_path / "data"))
    assert is_sharded(str(tmp_path / "data" / "*.jsonl"))
    assert not is_sharded(str(tmp_path / "data" / "part-0.jsonl"))
    assert not is_sharded(str(tmp_path / "odd[1].jsonl"))
    assert not is_sharded(str(tmp_path / "none.jsonl"))
    assert not is_sharded("stdlib")


def test_shards_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder = _write(tmp_path / "data")
    (folder / "more" / ".hidden").mkdir(parents=True)
    (folder / "more" / "a.jsonl").write_text('{"text": "deep"}')
    (folder / "more" / ".hidden" / "b.jsonl").write_text("not a row")
    (folder / "notes.txt").write_text("no row")
    names = [name for _, name in find_shards(str(folder))]
    assert names == ["more/a.jsonl", *(f"part-{number}.jsonl" for number in range(4))]
    assert [name for _, name in find_shards(str(folder / "part-[12].jsonl"))] == ["part-1.jsonl", "part-2.jsonl"]
    assert Config(data=str(folder / "part-*.jsonl")).run_folder == Path("runs/debug-data-flash_adamw")


def test_rows_of_folder_and_pattern_are_those_of_the_files(tmp_path: Path) -> None:
    folder = _write(tmp_path / "data")
    expected = [row for path in sorted(folder.glob("*.jsonl")) for row in read_jsonl(path)]
    for data in (folder, folder / "*.jsonl"):
        rows = ShardedRows(str(data))
        assert _texts(rows) == [row.text for row in expected]
        assert [rows.digest(number) for number in range(len(rows))] == [row.digest for row in expected]
        assert rows.origin(13) == expected[13].origin
    with pytest.raises(IndexError):
        rows.row(40)


def test_files_that_other_programs_wrote(tmp_path: Path) -> None:
    contents = {
        "a": b"",
        "b": b'{"text": "no newline at the end"}',
        "c": b'{"text": "CRLF"}\r\n\r\n{"text": "after a blank line"}\r\n',
        "d": b'\xef\xbb\xbf{"text": "after a byte order mark"}\n',
        "e": b"\n  \n",
        "f": b"\xef\xbb\xbf\n",
        "g": '{"text": "line\u2028separator"}\n\n'.encode(),
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.jsonl").write_bytes(content)
    rows = ShardedRows(str(tmp_path))
    texts = ["no newline at the end", "CRLF", "after a blank line", "after a byte order mark", "line\u2028separator"]
    assert _texts(rows) == texts
    assert rows.origin(2) == f"{tmp_path / 'c.jsonl'}, line 3"
    assert [row.text for name in "bcdg" for row in read_jsonl(tmp_path / f"{name}.jsonl")] == texts


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "cut of', "line 2: not JSON"),
        (b'{"prompt": "alone"}', "line 2: has the fields"),
        (b'{"text": "\xff"}', "line 2: not JSON"),
    ],
)
def test_a_bad_row_of_a_shard_names_file_and_line(tmp_path: Path, content: bytes, message: str) -> None:
    folder = _write(tmp_path / "data")
    (folder / "part-7.jsonl").write_bytes(b'{"text": "fine"}\n' + content + b"\n")
    with pytest.raises(BadInput, match=message) as raised:
        ShardedRows(str(folder))
    assert str(folder / "part-7.jsonl") in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not list(folder.glob(".row_index/part-7*"))  # nothing half made is left


def test_no_shards_no_rows_and_packed_shards(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"there is no \.jsonl file"):
        ShardedRows(str(tmp_path))
    with pytest.raises(BadInput, match=r"there is no \.jsonl file"):
        ShardedRows(str(tmp_path / "*.jsonl"))
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(BadInput, match="hold no rows"):
        ShardedRows(str(tmp_path))
    (tmp_path / "b.jsonl.gz").write_bytes(b"packed")
    for data in (tmp_path, tmp_path / "b.jsonl.gz"):
        with pytest.raises(BadInput, match=r"b\.jsonl\.gz is packed.*gunzip"):
            ShardedRows(str(data))


def test_an_index_is_made_once_and_again_where_the_shard_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _write(tmp_path / "data")
    made: list[str] = []
    make = shards._make_index

    def note(path: Path, name: str) -> shards.Shard:
        made.append(name)
        return make(path, name)

    monkeypatch.setattr(shards, "_make_index", note)
    first = ShardedRows(str(folder), rank=1)
    assert sorted(made) == [f"part-{number}.jsonl" for number in range(4)]
    made.clear()
    assert ShardedRows(str(folder)).shards == first.shards
    assert made == []
    with (folder / "part-2.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    assert len(ShardedRows(str(folder))) == 41
    assert made == ["part-2.jsonl"]
    (folder / ".row_index" / "part-1.jsonl.index").write_bytes(b"damaged")
    assert len(ShardedRows(str(folder))) == 41
    assert made == ["part-2.jsonl", "part-1.jsonl"]


def test_an_index_that_cannot_lie_beside_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _write(tmp_path / "data")
    (folder / ".row_index").write_text("in the way, as a folder without write permission would be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert len(_texts(ShardedRows(str(folder)))) == 40
    assert len(list((tmp_path / "cache" / "flashoptim_dist" / "row_index").iterdir())) == 4
    (tmp_path / "blocked").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "blocked"))
    monkeypatch.setattr(shards.tempfile, "gettempdir", lambda: str(tmp_path / "blocked"))
    with pytest.raises(BadInput, match="cannot be written anywhere"):
        ShardedRows(str(folder))


def test_a_shard_that_changes_in_use(tmp_path: Path) -> None:
    folder = _write(tmp_path / "data")
    rows = ShardedRows(str(folder))
    status = (folder / "part-0.jsonl").stat()
    os.utime(folder / "part-0.jsonl", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(BadInput, match=r"part-0\.jsonl has changed while it was in use"):
        rows.row(0)
    assert rows.row(10).text == "row 1"


def test_rows_below_a_digest(tmp_path: Path) -> None:
    rows = ShardedRows(str(_write(tmp_path / "data", count=400)))
    digests = [rows.digest(number) for number in range(400)]
    assert rows.smallest_digest == min(digests)
    threshold = sorted(digests)[50]
    assert rows.count_below(threshold) == 50
    assert rows.smallest(threshold) == sorted(range(400), key=lambda number: digests[number])[:50]
    assert rows.count_below(2**64) == 400
    assert rows.count_below(0) == rows.count_below(min(digests)) == 0


def test_no_more_than_some_files_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_OPEN_SHARDS", 3)
    rows = ShardedRows(str(_write(tmp_path / "data", count=90, files=30)))
    before = len(os.listdir("/proc/self/fd"))
    assert len(set(_texts(rows))) == 90
    assert len(os.listdir("/proc/self/fd")) <= before + 6
    rows.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert isinstance(rows.row(5), Row)
