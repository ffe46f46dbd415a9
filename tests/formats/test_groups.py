"""Groups: what shares a scale, from the global shape alone."""

from __future__ import annotations

import pytest
import torch

from flashoptim_dist.formats import (
    from_groups,
    groups_per_row,
    is_quantized_shape,
    row_length,
    rows_are_flattened,
    scale_shape,
    to_groups,
    to_rows,
)

# shape: row length, flattened?, quantized?, shape of the scales
SHAPES = [
    ((), 1, False, False, None),
    ((64,), 64, False, False, None),
    ((1,), 1, False, False, None),
    ((7, 64), 64, False, True, (7, 2)),
    ((4, 24), 24, False, False, None),
    ((2, 40), 40, False, True, (2, 2)),
    ((1601, 1280), 1280, False, True, (1601, 40)),
    ((3, 31), 31, False, False, None),
    ((3, 32), 32, False, True, (3, 1)),
    ((3, 33), 33, False, True, (3, 2)),
    ((64, 1), 1, False, False, None),
    ((8, 3, 3, 3), 27, True, False, None),
    ((8, 16, 3, 3), 144, True, True, (8, 5)),
    ((8, 1, 5, 7), 35, True, True, (8, 2)),
    ((16, 512, 4), 2048, True, True, (16, 64)),
    ((4, 8, 64), 64, False, True, (4, 8, 2)),
    ((2, 3, 4, 40), 40, False, True, (2, 3, 4, 2)),
    ((0, 64), 64, False, True, (0, 2)),
]


@pytest.mark.parametrize("shape, length, flattened, quantized, scales", SHAPES, ids=[str(case[0]) for case in SHAPES])
def test_rule(
    shape: tuple[int, ...], length: int, flattened: bool, quantized: bool, scales: tuple[int, ...] | None
) -> None:
    assert row_length(shape) == length
    assert rows_are_flattened(shape) == flattened
    assert is_quantized_shape(shape) == quantized
    assert groups_per_row(shape) == -(-length // 32)
    if scales is not None:
        assert scale_shape(shape) == scales


@pytest.mark.parametrize("shape", [case[0] for case in SHAPES if case[3] and case[0][0] < 100], ids=str)
def test_groups_hold_consecutive_elements_of_one_row(shape: tuple[int, ...]) -> None:
    count = torch.Size(shape).numel()
    tensor = torch.arange(1, count + 1, dtype=torch.float32).reshape(shape)
    rows = to_rows(tensor)
    assert rows.shape == (count // row_length(shape), row_length(shape))
    groups = to_groups(rows)
    assert groups.shape == (torch.Size(scale_shape(shape)).numel(), 32)
    for number, group in enumerate(groups.tolist()):
        row, start = divmod(number, groups_per_row(shape))
        width = min(32, row_length(shape) - start * 32)
        first = row * row_length(shape) + start * 32 + 1
        assert group == [*range(first, first + width), *[0] * (32 - width)]
    assert torch.equal(from_groups(groups, *rows.shape), rows)


def test_rows_of_a_strided_tensor() -> None:
    tensor = torch.arange(8 * 4 * 3 * 3).reshape(8, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    assert torch.equal(to_rows(tensor), tensor.contiguous().reshape(8, 36))
