"""Sliding-window attention over a kept raw ring, in torch on any device.

The ring holds the newest ``ring`` columns (pads included, as the model's own sliding cache does): column c lies in slot
c % ring. Every shape is fixed and the position is a device tensor, so a CUDA graph of a step serves every step.
"""

import torch

from kitty_compile.kernels import attend_torch


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    real: torch.Tensor | None,
    ring_key: torch.Tensor,
    ring_value: torch.Tensor,
    ring_real: torch.Tensor,
    position: torch.Tensor,
    *,
    window: int,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of T new columns over the ring and themselves; column c sees real columns in (c - window, c].

    Args:
        query: [B, Hq, T, Dk]. key, value: [B, Hkv, T, D], the call's own. real: bool [B, T], or None for all.
        ring_key, ring_value: [B, Hkv, ring, D]. ring_real: bool [B, ring]. position: i64 [1], columns before the call.

    Returns:
        [B, Hq, T, Dv] in the query's dtype.
    """
    num_columns, ring = query.shape[2], ring_key.shape[2]
    device = query.device
    slot = torch.arange(ring, device=device)
    ring_column = position - 1 - torch.remainder(position - 1 - slot, ring)
    own_column = position + torch.arange(num_columns, device=device)
    column = torch.cat([ring_column, own_column])
    distance = own_column.unsqueeze(1) - column
    visible = (distance >= 0) & (distance < window) & (column >= 0)
    own_real = torch.ones_like(ring_real[:, :1]).expand(-1, num_columns) if real is None else real
    is_real = torch.cat([ring_real, own_real], dim=1)
    mask = visible & is_real[:, None, None, :]
    # 0 * NaN is not 0: a slot or pad that nobody may see must not hold one.
    hidden = ~(is_real & (column >= 0))[:, None, :, None]
    keys = torch.cat([ring_key, key], dim=2)
    values = torch.cat([ring_value, value], dim=2).masked_fill(hidden, 0.0)
    if softcap == 0 and sinks is None:
        # A pad that sees nothing would be a row of NaN: it may look at itself, nobody looks at it.
        mask = mask | (distance == 0)
        return torch.nn.functional.scaled_dot_product_attention(
            query, keys.masked_fill(hidden, 0.0), values, attn_mask=mask, scale=scale, enable_gqa=True
        )
    return attend_torch.attend_dense(query, keys, values, mask, scale=scale, softcap=softcap, sinks=sinks)


def append(
    key: torch.Tensor,
    value: torch.Tensor,
    real: torch.Tensor | None,
    ring_key: torch.Tensor,
    ring_value: torch.Tensor,
    ring_real: torch.Tensor,
    position: torch.Tensor,
) -> None:
    """Write the call's newest columns into the ring and advance ``position``; arguments as in :func:`attend`."""
    num_columns, ring = key.shape[2], ring_key.shape[2]
    kept = min(num_columns, ring)
    first = num_columns - kept
    slots = torch.remainder(position + first + torch.arange(kept, device=key.device), ring)
    ring_key.index_copy_(2, slots, key[:, :, first:].to(ring_key.dtype))
    ring_value.index_copy_(2, slots, value[:, :, first:].to(ring_value.dtype))
    newest = torch.ones_like(ring_real[:, :1]).expand(-1, kept) if real is None else real[:, first:]
    ring_real.index_copy_(1, slots, newest.contiguous())
    position += num_columns
