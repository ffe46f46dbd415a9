"""Geometry of rows against brute force, tasks, and tables that follow what the host holds."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from flashoptim_dist.kernels import layout
from flashoptim_dist.kernels.tables import (
    HASH_STRIDE,
    SEGMENT_COLUMNS,
    DeviceTable,
    GeometryError,
    Rows,
    TaskList,
    fill_segment,
    one_row,
    rows_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st


def elements(part: Rows, strides: tuple[int, int, int, int], offset: int) -> list[int]:
    """Offsets of all elements of a description, in the order of the states, as the kernels compute them."""
    found = []
    for row, column in itertools.product(range(part.rows), range(part.length)):
        inner_row, inner_column = row % part.inner_rows, column % part.inner_columns
        place = offset + row // part.inner_rows * strides[0] + inner_row * strides[1]
        found.append(place + column // part.inner_columns * strides[2] + inner_column * strides[3])
    return found


def brute_force(sizes: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    return [sum(map(int.__mul__, position, strides)) for position in np.ndindex(*sizes)]


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], int, tuple[int, ...], tuple[int, ...]]:
    """Sizes, the number of row dimensions, and strides of two tensors that are permuted or padded."""
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    rows = draw(st.sampled_from([1, max(len(sizes) - 1, 0)]))

    def strides() -> tuple[int, ...]:
        order = draw(st.permutations(range(len(sizes))))
        found, step = [0] * len(sizes), 1
        for dim in order:
            found[dim] = step
            step *= sizes[dim] + draw(st.integers(0, 2))
        return tuple(found)

    return sizes, rows, strides(), strides()


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(tensors())
def test_rows_are_the_elements_of_the_tensor(
    case: tuple[tuple[int, ...], int, tuple[int, ...], tuple[int, ...]],
) -> None:
    sizes, first_column_dim, weight_strides, gradient_strides = case
    index_strides = tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
    try:
        parts = rows_of(sizes, first_column_dim, weight_strides, gradient_strides, index_strides)
    except GeometryError:
        assert len(sizes) - first_column_dim > 2
        return
    weights = [e for part in parts for e in elements(part, part.weight_strides, part.weight_offset)]
    gradients = [e for part in parts for e in elements(part, part.gradient_strides, part.gradient_offset)]
    assert weights == brute_force(sizes, weight_strides)
    assert gradients == brute_force(sizes, gradient_strides)
    first_of_rows = [
        part.index_offset + row // part.inner_rows * part.index_strides[0]
        + row % part.inner_rows * part.index_strides[1]
        for part in parts
        for row in range(part.rows)
    ]  # fmt: skip
    length = math.prod(sizes[first_column_dim:])
    assert first_of_rows == list(range(0, math.prod(sizes), length))
    assert [part.state_offset for part in parts] == list(
        itertools.accumulate((part.rows * part.length for part in parts[:-1]), initial=0)
    )


def test_columns_of_three_levels_are_refused() -> None:
    with pytest.raises(GeometryError, match="more than two levels"):
        rows_of((2, 2, 3, 4), 1, (100, 1, 10, 40), (100, 1, 10, 40), (24, 12, 4, 1))


def test_many_row_dimensions_become_several_segments() -> None:
    parts = rows_of((2, 3, 2, 5), 3, (1000, 100, 20, 1), (1000, 100, 20, 1), (30, 10, 5, 1))
    assert [part.rows for part in parts] == [6, 6]
    assert [part.weight_offset for part in parts] == [0, 1000]
    assert [part.index_offset for part in parts] == [0, 30]


def test_more_than_2_31_elements_keep_their_offsets() -> None:
    """D48: offsets and indices beyond 32 bits."""
    big = (1 << 31) + 64
    (part,) = rows_of((3, 64), 1, (big, 1), (big + 8, 1), (64, 1))
    assert elements(part, part.weight_strides, part.weight_offset)[-1] == 2 * big + 63
    row = np.zeros(SEGMENT_COLUMNS, dtype=np.int64)
    fill_segment(row, one_row(big), scalar_row=3, noise=-5, index_base=big, addresses=range(7))
    assert row[layout.ROW_LENGTH.value] == big
    assert row[layout.GROUPS.value] == big // 32
    word = (-5 + HASH_STRIDE * big) % (1 << 32)
    assert row[layout.NOISE.value] % (1 << 32) == word
    assert -(1 << 31) <= row[layout.NOISE.value] < 1 << 31


def test_tasks_cover_every_block_once(device: torch.device) -> None:
    tasks = TaskList(blocks_per_task=4)
    tasks.add(0, 0, 9)
    tasks.add(1, 3, 3)
    tasks.add(2, 5, 6)
    table = tasks.to(device)
    assert table is not None
    assert table.dtype == torch.int32
    assert table.tolist() == [[0, 0, 4], [0, 4, 4], [0, 8, 1], [2, 5, 1]]
    assert TaskList(4).to(device) is None
    with pytest.raises(ValueError, match="32 bits"):
        TaskList(1 << 20).add(0, (1 << 31) - 5, 1 << 31)


def test_a_table_follows_the_host(device: torch.device) -> None:
    """More uploads than the ring has places, each with other contents."""
    table = DeviceTable(3, 2, device)
    seen = []
    for number in range(10):
        table.host[:] = number * 10 + np.arange(6).reshape(3, 2)
        table.upload()
        seen.append(table.device.clone())
    for number, contents in enumerate(seen):
        assert contents.tolist() == (number * 10 + np.arange(6).reshape(3, 2)).tolist()


@pytest.mark.gpu
def test_a_table_on_another_device_than_the_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    table = DeviceTable(1, 1, torch.device("cuda:1"))
    for number in range(10):
        table.host[:] = number
        table.upload()
    assert table.device.item() == 9
