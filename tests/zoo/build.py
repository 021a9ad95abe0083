"""``build``: any class of transformers' causal-LM mapping as a tiny random model, or one line why that cannot be.

A configuration class is asked which of the names in ``sizes.TINY`` it knows; what it does not know keeps its default. The
first rung of ``RUNGS`` whose model is small and reads a few tokens is taken.
"""

import dataclasses
import inspect
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.zoo.quirks import QUIRKS, Quirk
from tests.zoo.sizes import (
    LAYER_COUNTS,
    MAX_LENGTH,
    MAX_PARAMETERS,
    MIXED_LAYERS,
    TINY,
    WINDOW,
    WINDOW_NAMES,
)

# What to leave at its default, rung by rung.
RUNGS: tuple[frozenset[str], ...] = (
    frozenset(),
    frozenset({"head_dim"}),
    frozenset({"num_key_value_heads", "head_dim"}),
    frozenset({"is_encoder_decoder"}),
)


@dataclasses.dataclass(frozen=True)
class Built:
    """A tiny model in eval mode."""

    model: PreTrainedModel


@dataclasses.dataclass(frozen=True)
class CannotBuild:
    """Why there is no tiny model of a class."""

    reason: str


def class_names() -> list[str]:
    """The classes of the causal-LM mapping in the mapping's order, each once."""
    return list(dict.fromkeys(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))


def build(class_name: str, seed: int = 0) -> Built | CannotBuild:
    """The tiny model of one class; the same weights for the same seed."""
    cls = getattr(transformers, class_name, None)
    if cls is None:
        return CannotBuild(f"transformers {transformers.__version__} has no such class")
    quirk, reasons = QUIRKS.get(class_name, Quirk()), []
    if quirk.cannot is not None:
        return CannotBuild(quirk.cannot)
    for without in RUNGS:
        try:
            return Built(_model(cls, quirk, without, seed))
        # A configuration can fail in any way; the reason becomes the row.
        except Exception as error:  # noqa: BLE001
            reasons.append(one_line(error))
    return CannotBuild(reasons[0])


def one_line(error: BaseException) -> str:
    """An exception as a table's cell."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 200 else text[:197] + "..."


def tiny_config(
    config_class: type[PreTrainedConfig], overrides: dict[str, Any], without: frozenset[str] = frozenset()
) -> PreTrainedConfig:
    """The tiny configuration of one class, sub-configurations included; ``overrides`` of a sub-configuration are dicts."""
    known = set(inspect.signature(config_class.__init__).parameters)
    values = {name: value for name, value in TINY.items() if name in known - without}
    values |= _layer_values(config_class, known)
    sub_configs = {
        name: tiny_config(sub_class, overrides.get(name, {}), without)
        for name, sub_class in _sub_classes(config_class).items()
    }
    return config_class(**(values | overrides | sub_configs))


def _sub_classes(config_class: type[PreTrainedConfig]) -> dict[str, type[PreTrainedConfig]]:
    """Classes of the sub-configurations; one that is declared as "any" is that of the default."""
    if not config_class.sub_configs:
        return {}
    try:
        default = config_class()
    except (AttributeError, TypeError, ValueError, StrictDataclassError):
        # What the default cannot say is left to a quirk.
        return {}
    classes = {name: type(getattr(default, name, None)) for name in config_class.sub_configs}
    return {name: found for name, found in classes.items() if issubclass(found, PreTrainedConfig)}


def _layer_values(config_class: type[PreTrainedConfig], known: set[str]) -> dict[str, Any]:
    """Kinds of layers that take turns, and windows where the default configuration uses them."""
    try:
        kinds, _ = get_layer_types_and_kwargs(config_class())
    except (AttributeError, TypeError, ValueError, StrictDataclassError):
        return {}
    kinds = [kind for kind in dict.fromkeys(kinds) if kind != "dummy"]
    if not any("sliding" in kind for kind in kinds):
        windows: dict[str, Any] = {}
    elif kinds == ["sliding_attention"] and "layer_types" not in known:
        # With a window in every layer nothing would be quantised.
        return dict.fromkeys(WINDOW_NAMES & known)
    else:
        windows = dict.fromkeys(WINDOW_NAMES & known, WINDOW)
        kinds = kinds if len(kinds) > 1 else [*kinds, "full_attention"]
    if len(kinds) == 1:
        return windows
    counts = dict.fromkeys(LAYER_COUNTS & known, MIXED_LAYERS)
    types = {"layer_types": (kinds * MIXED_LAYERS)[:MIXED_LAYERS]} if "layer_types" in known else {}
    return windows | counts | types


def _model(cls: type[PreTrainedModel], quirk: Quirk, without: frozenset[str], seed: int) -> PreTrainedModel:
    config = tiny_config(cls.config_class, quirk.values, without)
    _check_size(cls, config)
    torch.manual_seed(seed)
    implementation = "eager" if quirk.eager else None
    model = cls._from_config(config, dtype=torch.float32, attn_implementation=implementation)
    widen(model)
    model.generation_config.max_length = MAX_LENGTH
    model.eval()
    _check_forward(model)
    return model


@torch.no_grad()
def _check_forward(model: PreTrainedModel) -> None:
    try:
        logits = model(input_ids=torch.arange(2, 10).view(1, -1)).logits
    # Whatever it is, it is not about building.
    except Exception as error:
        raise RuntimeError(f"the stock model fails with {one_line(error)}") from error
    if not bool(logits.isfinite().all()):
        raise ValueError("the logits must be finite, got some that are not")


def _check_size(cls: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in cls._from_config(config).parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"a tiny model must have at most {MAX_PARAMETERS} parameters, got {count}")


@torch.no_grad()
def widen(model: PreTrainedModel) -> None:
    """Wide weights, so that attention is peaked and what lies in the cache decides the logits."""
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            # Gemma multiplies its embeddings by sqrt(hidden_size); they shall come out with unit variance everywhere.
            is_embedding = "embed" in name and "gemma" not in model.config.model_type
            parameter.normal_(0.0, 1.0 if is_embedding else 1.5 * parameter.shape[-1] ** -0.5)
        elif "sinks" in name:
            parameter.normal_()
