"""Checks of the tensors that a forward hands to the cache, made before anything changes."""

import torch

from kitty_compile.columns import Call
from kitty_compile.kernels.layout import SUPPORTED_DTYPES


def check_key_and_value(key: torch.Tensor, value: torch.Tensor, call: Call) -> None:
    if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
        raise ValueError(
            "key and value must have the shape [batch, KV heads, columns, head_dim] with equal first three sizes, "
            f"got {list(key.shape)} and {list(value.shape)}"
        )
    if key.shape[2] != call.num_columns:
        raise ValueError(f"key must have the call's {call.num_columns} columns, got {key.shape[2]}")
    if key.dtype not in SUPPORTED_DTYPES or value.dtype != key.dtype:
        raise TypeError(f"key and value must be both float16, bfloat16 or float32, got {key.dtype} and {value.dtype}")
    if call.real is not None and call.real.shape[0] != key.shape[0]:
        raise ValueError(f"attention_mask must have {key.shape[0]} rows, got {call.real.shape[0]}")


def check_query(query: torch.Tensor, key: torch.Tensor) -> None:
    """``key`` has passed :func:`check_key_and_value`."""
    batch, heads, columns, head_dim = key.shape
    is_shaped = query.dim() == 4 and (query.shape[0], *query.shape[2:]) == (batch, columns, head_dim)
    if not is_shaped or query.shape[1] % heads:
        raise ValueError(
            f"query must have the shape [{batch}, a multiple of {heads}, {columns}, {head_dim}], got {list(query.shape)}"
        )
