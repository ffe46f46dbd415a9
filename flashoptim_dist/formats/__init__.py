"""What a compressed number is: the definition, in pure torch, on any device. Imports nothing else of this package."""

from flashoptim_dist.formats.groups import (
    from_groups,
    groups_per_row,
    is_quantized_shape,
    row_length,
    rows_are_flattened,
    scale_shape,
    to_groups,
    to_rows,
)
from flashoptim_dist.formats.moments import (
    are_variance_scales,
    decode_moments,
    decode_momentum,
    decode_variance,
    encode_moments,
    encode_momentum,
    encode_variance,
    momentum_unit,
)
from flashoptim_dist.formats.rounding import canonical_name, noise_key, noise_words, parameter_id
from flashoptim_dist.formats.scale_faults import find_fault, read_faults
from flashoptim_dist.formats.spec import (
    FORMAT_NAME,
    FORMAT_VERSION,
    GROUP_SIZE,
    MASTER_WEIGHT_BITS,
    ROUNDINGS,
    FormatSpec,
    Rounding,
)
from flashoptim_dist.formats.weights import correction_bits, correction_dtype, merge, round_stochastically, split

__all__ = [
    "FORMAT_NAME",
    "FORMAT_VERSION",
    "GROUP_SIZE",
    "MASTER_WEIGHT_BITS",
    "ROUNDINGS",
    "FormatSpec",
    "Rounding",
    "are_variance_scales",
    "canonical_name",
    "correction_bits",
    "correction_dtype",
    "decode_moments",
    "decode_momentum",
    "decode_variance",
    "encode_moments",
    "encode_momentum",
    "encode_variance",
    "find_fault",
    "from_groups",
    "groups_per_row",
    "is_quantized_shape",
    "merge",
    "momentum_unit",
    "noise_key",
    "noise_words",
    "parameter_id",
    "read_faults",
    "round_stochastically",
    "row_length",
    "rows_are_flattened",
    "scale_shape",
    "split",
    "to_groups",
    "to_rows",
]
