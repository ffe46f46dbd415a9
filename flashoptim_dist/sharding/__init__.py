"""DTensor in, DTensor out: local views, the group grid of a shard, global offsets, placements of scales."""

from flashoptim_dist.sharding.layout import ShardingError, ShardLayout, like_parameter, local_tensor, shard_layout

__all__ = ["ShardLayout", "ShardingError", "like_parameter", "local_tensor", "shard_layout"]
