"""What the interpreter's and the GPU's kernel tests check alike."""

import torch

from kitty_compile.kernels import triton_backend
from tests.kernel_cases import dense_attention, token_columns


def attend(case, *, scale, softcap=0.0, sinks=None, is_empty=False):
    return triton_backend.attend(
        case.query, case.key, case.value, case.columns, case.counts, case.state, case.layout, case.raw,
        scale=scale, softcap=softcap, sinks=sinks, is_empty=is_empty,
    )  # fmt: skip


def check_attention(case, *, scale=None, softcap=0.0, sinks=None, is_empty=False, factor=2.0):
    """The kernels' error against fp64 stays within ``factor`` times that of an eager run in the model's dtype."""
    scale = case.layout.key_dim**-0.5 if scale is None else scale
    mine = attend(case, scale=scale, softcap=softcap, sinks=sinks, is_empty=is_empty)
    assert mine.dtype == case.query.dtype
    assert torch.isfinite(mine).all()
    truth = dense_attention(case, scale=scale, softcap=softcap, sinks=sinks)
    eager = dense_attention(case, scale=scale, softcap=softcap, sinks=sinks, dtype=case.query.dtype)
    real = token_columns(case)[:, None, :, None].expand_as(mine)
    error = (mine.double() - truth)[real].abs()
    allowed = (eager.double() - truth)[real].abs()
    if error.numel():
        floor = torch.finfo(case.query.dtype).eps * truth[real].abs().max()
        assert error.max() <= factor * allowed.max() + floor, f"error {error.max():.3g}, eager {allowed.max():.3g}"
        mean, mean_allowed = error.square().mean().sqrt(), allowed.square().mean().sqrt()
        assert mean <= factor * mean_allowed + floor / 4, f"rms error {mean:.3g}, eager {mean_allowed:.3g}"
    return error.max().item() if error.numel() else 0.0, allowed.max().item() if error.numel() else 0.0
