"""What the interpreter's and the GPU's kernel tests check alike."""

import torch

from kitty_compile.kernels import triton_backend, update_torch
from kitty_compile.kernels.layout import LayerTensors
from tests.kernel_cases import dense_attention, token_columns


def attend(case, *, scale, softcap=0.0, sinks=None, is_empty=False):
    """Attention alone: of a copy, since a step is taken in as well."""
    return attend_and_update(case.to(case.query.device), scale=scale, softcap=softcap, sinks=sinks, is_empty=is_empty)


def attend_and_update(case, *, scale, softcap=0.0, sinks=None, is_empty=False, seed=-1, layer=0):
    return triton_backend.attend_and_update(
        case.query, case.key, case.value, case.columns, case.counts, case.state, case.layout, case.raw,
        scale=scale, softcap=softcap, sinks=sinks, is_empty=is_empty, seed=seed, layer=layer,
    )  # fmt: skip


def update(case, *, seed=-1, layer=0):
    call = case.key, case.value, case.columns, case.counts
    triton_backend.update(*call, case.state, case.layout, case.raw, seed=seed, layer=layer)


def check_step(case, *, seed=-1, layer=0):
    """``attend_and_update`` leaves every byte of the state as the torch kernels' ``update`` does."""
    apart = case.to("cpu")
    attend_and_update(case, scale=case.layout.key_dim**-0.5, seed=seed, layer=layer)
    call = apart.key, apart.value, apart.columns, apart.counts
    update_torch.update(*call, apart.state, case.layout, case.raw, seed=seed, layer=layer)
    assert_same_state(case.state, apart.state)


def check_attention(case, *, scale=None, softcap=0.0, sinks=None, is_empty=False, factor=2.0):
    """The kernels' error against fp64 stays within ``factor`` times that of an eager run in the model's dtype.

    A rounding step of the output is granted on top: where eager's error is nil, ours may still be that.
    """
    scale = case.layout.key_dim**-0.5 if scale is None else scale
    mine = attend(case, scale=scale, softcap=softcap, sinks=sinks, is_empty=is_empty)
    assert mine.dtype == case.query.dtype
    assert torch.isfinite(mine).all()
    truth = dense_attention(case, scale=scale, softcap=softcap, sinks=sinks)
    eager = dense_attention(case, scale=scale, softcap=softcap, sinks=sinks, dtype=case.query.dtype)
    real = token_columns(case)[:, None, :, None].expand_as(mine)
    error = (mine.double() - truth)[real]
    allowed = (eager.double() - truth)[real]
    if not error.numel():
        return
    step = torch.finfo(case.query.dtype).eps * truth[real].abs().max()
    largest, most = error.abs().max(), factor * allowed.abs().max() + step
    assert largest <= most, f"error {largest:.3g}, eager {allowed.abs().max():.3g}"
    mean, most = error.square().mean().sqrt(), factor * allowed.square().mean().sqrt() + step / 4
    assert mean <= most, f"rms error {mean:.3g}, eager {allowed.square().mean().sqrt():.3g}"


def check_update(case, *, seed=-1, layer=0):
    """Every byte of the state is what the torch kernels on the CPU make it."""
    expected = case.to("cpu")
    call = expected.key, expected.value, expected.columns, expected.counts
    update_torch.update(*call, expected.state, case.layout, case.raw, seed=seed, layer=layer)
    update(case, seed=seed, layer=layer)
    assert_same_state(case.state, expected.state)


def assert_same_state(mine, right):
    for name, left, other in zip(LayerTensors._fields, mine, right, strict=True):
        different = left.cpu().view(torch.uint8) != other.cpu().view(torch.uint8)
        assert not different.any(), f"{name}: {int(different.sum())} bytes of {different.numel()} differ"
