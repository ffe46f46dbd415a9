"""Where a rank's part lies and which scales belong to it, against torch's own cutting of an index tensor."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from flashoptim_dist.formats import groups_per_row, row_length, scale_shape
from flashoptim_dist.sharding import ShardingError, ShardLayout, like_parameter, local_tensor, shard_layout
from tests.fake_world import fake_rank, placed, ranks_of_mesh


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]

    def __str__(self) -> str:
        return f"{self.shape} {self.placements} on {self.mesh}"


S, R = Shard, Replicate()


def SS(dim: int, split_factor: int) -> Placement:
    return _StridedShard(dim, split_factor=split_factor)


CASES = [
    *(Case((7, 64), (world,), (S(0),)) for world in (1, 2, 3, 4)),
    *(Case((3, 40), (world,), (S(0),)) for world in (1, 2, 3, 4)),  # fewer rows than ranks, partial groups
    *(Case((1, 96), (world,), (S(0),)) for world in (2, 4)),
    *(Case((4, 24), (world,), (S(0),)) for world in (2, 4)),  # rows below a group: not quantized
    *(Case((5,), (world,), (S(0),)) for world in (1, 2, 4, 8)),
    Case((129,), (4,), (S(0),)),
    Case((2001, 32), (4,), (S(0),)),
    Case((6, 3, 5, 7), (4,), (S(0),)),  # convolutions: rows of 105 and of 27
    Case((6, 3, 3, 3), (4,), (S(0),)),
    Case((4, 64, 2, 2), (2,), (S(1),)),
    Case((4, 96, 1, 1), (3,), (S(1),)),
    Case((8, 64), (2,), (S(1),)),
    Case((8, 96), (3,), (S(1),)),
    Case((5, 80), (2,), (R,)),
    Case((8, 96), (4,), (S(1),)),  # 24 and 50 + 50 cut groups: legal without scales alone
    Case((8, 94), (3,), (S(1),)),  # 32, 32, 30
    Case((8, 63), (2,), (S(1),)),
    Case((8, 100), (2,), (S(1),)),
    Case((7, 64), (2, 2), (R, S(0))),  # HSDP
    Case((7, 64), (2, 3), (S(0), S(0))),
    Case((7, 64), (2, 2), (S(0), R)),
    Case((8, 128), (2, 2), (S(0), S(1))),
    Case((7, 128), (2, 2), (S(0), S(1))),
    Case((8, 64), (2, 2), (SS(0, 2), S(0))),  # FSDP + TP by columns
    Case((8, 64), (2, 4), (SS(0, 4), S(0))),
    Case((10, 64), (2, 2), (SS(0, 2), S(0))),  # uneven strided shards
    Case((9, 40), (2, 2), (SS(0, 2), S(0))),
    Case((3, 64), (2, 2), (SS(0, 2), S(0))),
    Case((11, 64), (4, 2), (SS(0, 2), S(0))),
    Case((8, 128), (2, 2), (SS(1, 2), S(1))),
    Case((17, 64), (2, 2, 2), (R, SS(0, 2), S(0))),
    Case((4, 6, 64), (2,), (S(0),)),  # experts
    Case((4, 6, 64), (4,), (S(1),)),
    Case((3, 5, 40), (4,), (S(1),)),
    Case((5, 6, 40), (4,), (S(0),)),
    Case((4, 6, 64), (2, 2), (S(0), S(1))),
    Case((4, 6, 64), (2,), (S(2),)),
    Case((2, 3, 4, 40), (3,), (S(2),)),
]
CUTS_GROUPS = {Case((8, 96), (4,), (S(1),)), Case((8, 100), (2,), (S(1),))}


def check(layout: ShardLayout, case: Case, index: torch.Tensor, scale_index: torch.Tensor | None) -> None:
    """`index`: the global linear index of each local element, as torch cuts it; `scale_index` of each local scale."""
    assert (layout.global_shape, layout.local_shape) == (case.shape, tuple(index.shape))
    assert layout.numel == index.numel() == layout.rows * layout.length
    rows = index.reshape(layout.rows, layout.length)
    assert torch.equal(layout.row_starts().unsqueeze(1) + torch.arange(layout.length), rows)
    if layout.index_base is not None:
        assert torch.equal(index.reshape(-1), layout.index_base + torch.arange(index.numel()))
    if scale_index is None:
        assert not layout.quantized
        return
    assert layout.quantized
    assert layout.scale_global_shape == scale_shape(case.shape)
    assert layout.scale_local_shape == tuple(scale_index.shape)
    if layout.numel == 0:
        return
    # The group of an element in the global tensor is the one whose scale lies beside it on this rank.
    row, column = rows // row_length(case.shape), rows % row_length(case.shape)
    group = row * groups_per_row(case.shape) + column // 32
    beside = scale_index.reshape(layout.rows, layout.groups_per_row).repeat_interleave(32, dim=1)
    assert torch.equal(group, beside[:, : layout.length])


@pytest.mark.parametrize(
    "case, quantize",
    [
        pytest.param(case, quantize, id=f"{case}{'' if quantize else ' not quantized'}")
        for case in CASES
        for quantize in (True, False)
        if not (quantize and case in CUTS_GROUPS)
    ],
)
def test_layout_is_what_torch_holds(case: Case, quantize: bool) -> None:
    full = torch.arange(torch.Size(case.shape).numel()).reshape(case.shape)
    scales = torch.arange(torch.Size(scale_shape(case.shape)).numel()).reshape(scale_shape(case.shape))
    compressed = quantize and len(case.shape) > 1 and row_length(case.shape) >= 32
    seen = []
    for mesh in ranks_of_mesh(case.mesh):
        parameter = placed(full, mesh, case.placements)
        layout = shard_layout(parameter, "w", quantize=quantize)
        index = parameter.to_local()
        check(layout, case, index, placed(scales, mesh, case.placements).to_local() if compressed else None)
        seen.append(index.reshape(-1))
    copies = [size for size, placement in zip(case.mesh, case.placements) if placement == R]
    times = int(torch.Size(copies).numel())
    assert torch.equal(torch.bincount(torch.cat(seen), minlength=full.numel()), torch.full((full.numel(),), times))


def test_flashoptim_6_one_row_in_four_ranks_of_32() -> None:
    """databricks/flashoptim#6: (8, 128) over 32 ranks; 24 of them hold nothing."""
    case = Case((8, 128), (32,), (S(0),))
    full = torch.arange(1024).reshape(8, 128)
    ranks = (0, 7, 8, 31)
    for rank, mesh in zip(ranks, ranks_of_mesh(case.mesh, ranks)):
        parameter = placed(full, mesh, case.placements)
        layout = shard_layout(parameter, "gate.weight")
        check(layout, case, parameter.to_local(), placed(torch.arange(32).reshape(8, 4), mesh, [S(0)]).to_local())
        assert layout.local_shape == ((1, 128) if rank < 8 else (0, 128))
        state = like_parameter(torch.zeros(layout.scale_local_shape), parameter, layout.scale_global_shape)
        assert isinstance(state, DTensor)
        assert (tuple(state.shape), state.stride()) == ((8, 4), (4, 1))


@pytest.mark.parametrize("mesh_sizes", [(2, 1), (1, 2)], ids=str)
def test_ao_4912_precision_follows_from_the_global_shape(mesh_sizes: tuple[int, int]) -> None:
    """pytorch/ao#4912, bitsandbytes#2080: (6, 1024) is 8-bit however it is cut."""
    for mesh in ranks_of_mesh(mesh_sizes):
        parameter = placed(torch.zeros(6, 1024), mesh, [S(0), S(1)])
        layout = shard_layout(parameter, "w")
        assert layout.quantized
        assert layout.scale_global_shape == (6, 32)
        # Rows of 16 on each of 64 ranks would look too short to quantize.
    for mesh in ranks_of_mesh((16,), [0, 15]):
        assert shard_layout(placed(torch.zeros(6, 512), mesh, [S(1)]), "w").quantized
        assert not shard_layout(placed(torch.zeros(1600), mesh, [S(0)]), "b").quantized


REFUSED = [
    (Case((8, 100), (2,), (S(1),)), "columns 0 to 50 of rows of 100, which cuts a group of 32"),
    (Case((8, 96), (4,), (S(1),)), "columns 0 to 24 of rows of 96"),
    (Case((8, 64), (4,), (S(1),)), "columns 0 to 16"),
    (Case((8, 64), (2, 2), (S(1), S(1))), "columns 0 to 16"),
    (Case((4, 6, 64), (4,), (S(2),)), "columns 0 to 16"),
    (Case((8, 32), (2,), (S(1),)), "columns 0 to 16"),
    (Case((4, 16, 3, 3), (2,), (S(1),)), "columns 0 to 72 of rows of 144"),
    (Case((4, 5, 8, 8), (4,), (S(1),)), "the 10 scales of a row of 320 would be cut elsewhere"),
    (Case((4, 16, 4, 4), (2,), (S(2),)), "the short last dimensions of a convolution"),
    (Case((4, 16, 4, 4), (1,), (S(3),)), "the short last dimensions of a convolution"),
    (Case((8, 64), (2, 2), (SS(1, 2), S(1))), "columns 0 to 16"),
]


@pytest.mark.parametrize("case, words", REFUSED, ids=[str(case) for case, _ in REFUSED])
def test_cuts_through_groups_are_refused_on_every_rank(case: Case, words: str) -> None:
    """By name, with shape, placements and the way out, on every rank alike: no rank may go on alone."""
    for mesh in ranks_of_mesh(case.mesh):
        parameter = placed(torch.zeros(case.shape), mesh, case.placements)
        with pytest.raises(ShardingError) as caught:
            shard_layout(parameter, "layers.3.wo.weight")
        text = str(caught.value)
        for part in ("'layers.3.wo.weight'", str(case.shape), str(case.placements), str(case.mesh), "quantize=False"):
            assert part in text
        assert words in text
        # The way out that the message names.
        layout = shard_layout(parameter, "layers.3.wo.weight", quantize=False)
        assert not layout.quantized
        assert layout.local_shape == tuple(parameter.to_local().shape)


def test_elements_that_are_no_block_are_refused() -> None:
    """A strided shard without the shard it was applied after: rows 0, 1 and 4, 5 on one rank."""
    for mesh in ranks_of_mesh((2,)):
        parameter = placed(torch.zeros(8, 64), mesh, [SS(0, 2)])
        with pytest.raises(ShardingError, match=r"'w' \(8, 64\).*not one block of the global tensor"):
            shard_layout(parameter, "w")


def test_a_partial_placement_is_refused() -> None:
    for mesh in ranks_of_mesh((2,)):
        parameter = DTensor.from_local(torch.zeros(8, 64), mesh, [Partial()], run_check=False)
        with pytest.raises(ShardingError, match=r"'w' \(8, 64\) has a Partial placement.*redistribute"):
            shard_layout(parameter, "w")


def test_a_local_tensor_of_another_shape_is_refused() -> None:
    for mesh in ranks_of_mesh((2,)):
        parameter = DTensor.from_local(
            torch.zeros(3, 64), mesh, [S(0)], run_check=False, shape=torch.Size((8, 64)), stride=(64, 1)
        )
        with pytest.raises(ShardingError, match=r"'w'.*holds \(3, 64\) where the placements say \(4, 64\)"):
            shard_layout(parameter, "w")


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    with fake_rank(2, 3):
        parameter = placed(torch.zeros(8, 64), DeviceMesh("cpu", [0, 1]), [S(0)])
        layout = shard_layout(parameter, "w")
    assert (layout.numel, layout.rows, layout.row_starts().tolist()) == (0, 0, [])
    assert layout.quantized
    assert layout.local_shape == tuple(local_tensor(parameter).shape)


@pytest.mark.parametrize("shape", [(), (5,), (3, 40), (2, 3, 64), (4, 3, 5, 7), (0, 64)], ids=str)
def test_layout_of_a_plain_tensor(shape: tuple[int, ...]) -> None:
    index = torch.arange(torch.Size(shape).numel()).reshape(shape)
    case = Case(shape, (1,), ())
    compressed = len(shape) > 1 and row_length(shape) >= 32
    scales = torch.arange(torch.Size(scale_shape(shape)).numel()).reshape(scale_shape(shape)) if compressed else None
    layout = shard_layout(index, "w")
    check(layout, case, index, scales)
    assert layout.index_base == 0
    assert not dist.is_initialized()
    state = torch.zeros(shape)
    assert like_parameter(state, index, shape) is state


def test_indices_beyond_2_to_31() -> None:
    """Row starts are int64, also where the tensor itself would need 2**31 elements and more."""
    layout = ShardLayout(
        name="w",
        global_shape=(1 << 20, 1 << 13),
        local_shape=(2, 1 << 12),
        offset=((1 << 20) - 2, 1 << 12),
        quantized=True,
        flattened=False,
        scale_global_shape=(1 << 20, 1 << 8),
        scale_local_shape=(2, 1 << 7),
    )
    assert layout.row_starts().tolist() == [(r << 13) + (1 << 12) for r in ((1 << 20) - 2, (1 << 20) - 1)]
    assert layout.index_base is None
