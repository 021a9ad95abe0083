"""``report``: what a KittyCache does, or would do, with every attention layer of a model."""

import dataclasses
from typing import Literal

import torch
from transformers import PreTrainedModel

from kitty_compile.config import KittyConfig, resolve_config
from kitty_compile.huggingface import support
from kitty_compile.huggingface.cache import KittyCache
from kitty_compile.huggingface.hooks import ATTACHMENT, Attachment
from kitty_compile.huggingface.support import LayerSupport
from kitty_compile.kernels.layout import PageLayout

_COLUMNS = ("layer", "status", "heads", "dim", "boosted", "bytes/token", "raw", "bytes now", "kernel", "reason")


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """One attention layer.

    Attributes:
        status: "quantized" (packed pages), "kept" (raw) or "refused" (the model cannot be applied).
        reason: why the layer is kept or refused.
        key_dim, value_dim: head dimensions.
        num_boosted: key channels per head that get 4 bits instead of 2.
        bytes_per_token: of a sealed page over all KV heads, metadata counted.
        raw_bytes_per_token: of a token kept in the model's dtype.
        nbytes: of the layer in the latest live cache; None without one.
        kernel: what runs it.
    """

    index: int
    status: Literal["quantized", "kept", "refused"]
    reason: str
    key_dim: int
    value_dim: int
    num_kv_heads: int
    num_boosted: int
    bytes_per_token: float
    raw_bytes_per_token: float
    nbytes: int | None
    kernel: Literal["torch", "triton"] | None


@dataclasses.dataclass(frozen=True)
class Report:
    """What ``report`` returns; ``str()`` is a table."""

    model: str
    is_applied: bool
    config: KittyConfig
    layers: tuple[LayerReport, ...]

    @property
    def nbytes(self) -> int | None:
        """Bytes of all layers in the latest live cache; None without one."""
        known = [layer.nbytes for layer in self.layers if layer.nbytes is not None]
        return sum(known) if known else None

    def summary(self) -> str:
        """One line."""
        counts = {
            status: sum(layer.status == status for layer in self.layers) for status in ("quantized", "kept", "refused")
        }
        parts = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        packed = sum(layer.bytes_per_token for layer in self.layers)
        raw = sum(layer.raw_bytes_per_token for layer in self.layers)
        reasons = {layer.reason for layer in self.layers if layer.status != "quantized"}
        why = f" ({'; '.join(sorted(reasons))})" if reasons else ""
        return (
            f"{self.model}: {len(self.layers)} layers, {parts}{why}, {packed:.1f} bytes per token instead of {raw:.1f}"
        )

    def __str__(self) -> str:
        rows = [_COLUMNS, *(_cells(layer) for layer in self.layers)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self.summary(), *lines])


def report(model: PreTrainedModel, config: KittyConfig | str | None = None) -> Report:
    """Account for every attention layer of a model.

    Args:
        model: applied or not; a model that ``apply`` would refuse gets rows that say why.
        config: what a model that is not applied yet would be applied with; None for "kitty".
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    attachment: Attachment | None = vars(model).get(ATTACHMENT)
    resolved = resolve_config(config)
    if attachment is not None:
        if config is not None and resolved != attachment.config:
            raise ValueError(f"config must be None for an applied model or what was applied, got {resolved}")
        resolved = attachment.config
    refusal = None if attachment is not None else support.model_refusal(model)
    cache = attachment.latest_cache() if attachment is not None and attachment.latest_cache is not None else None
    layers = support.layer_support(support.text_config(model.config))
    rows = tuple(_row(layer, resolved, refusal, model, cache) for layer in layers)
    return Report(type(model).__name__, attachment is not None, resolved, rows)


def _row(
    layer: LayerSupport, config: KittyConfig, refusal: str | None, model: PreTrainedModel, cache: KittyCache | None
) -> LayerReport:
    shapes = (layer.key_dim, layer.value_dim, layer.num_kv_heads)
    raw = float(layer.num_kv_heads * (layer.key_dim + layer.value_dim) * model.dtype.itemsize)
    if layer.plan is None or refusal is not None:
        return LayerReport(layer.index, "refused", layer.reason or refusal or "", *shapes, 0, raw, raw, None, None)
    kernel: Literal["torch", "triton"] = "triton" if model.device.type == "cuda" else "torch"
    nbytes = None if cache is None else cache.layers[layer.index].nbytes
    reason = _kept_reason(layer, config)
    if layer.plan.window is not None:
        return LayerReport(layer.index, "kept", reason or "", *shapes, 0, raw, raw, nbytes, kernel)
    layout = _layout(layer, config, model.dtype)
    return LayerReport(
        layer.index,
        "quantized" if reason is None else "kept",
        reason or "",
        *shapes,
        layout.key.num_boosted if config.key_bits == 2 else 0,
        layout.bytes_per_token,
        raw,
        nbytes,
        kernel,
    )


def _kept_reason(layer: LayerSupport, config: KittyConfig) -> str | None:
    if layer.plan is not None and layer.plan.window is not None:
        return f"sliding window of {layer.plan.window} columns, kept in a raw ring"
    if layer.index in config.skip_layers:
        return "in skip_layers, kept in raw pages"
    if config.key_bits == config.value_bits == 16:
        return "16 bits, kept in raw pages"
    return None


def _layout(layer: LayerSupport, config: KittyConfig, dtype: torch.dtype) -> PageLayout:
    return config.parameters(layer.index, layer.key_dim, layer.value_dim, layer.num_kv_heads).page_layout(dtype)


def _cells(layer: LayerReport) -> tuple[str, ...]:
    dim = str(layer.key_dim) if layer.key_dim == layer.value_dim else f"{layer.key_dim}/{layer.value_dim}"
    return (
        str(layer.index),
        layer.status,
        str(layer.num_kv_heads),
        dim,
        str(layer.num_boosted),
        f"{layer.bytes_per_token:.1f}",
        f"{layer.raw_bytes_per_token:.1f}",
        "-" if layer.nbytes is None else str(layer.nbytes),
        layer.kernel or "-",
        layer.reason,
    )
