"""What a cache keeps at which precision: ``KittyConfig`` and its presets."""

import dataclasses
from typing import Any, Literal

from kitty_compile.kernels.layout import BITS, PAGE_SIZE, RawLayout
from kitty_compile.kernels.ops import OpParameters


@dataclasses.dataclass(frozen=True)
class KittyConfig:
    """The Kitty algorithm's parameters (arXiv 2511.18643, section 3.3).

    Attributes:
        key_bits, value_bits: 2, 4 or 16 bits per element of a sealed page; 16 keeps raw pages.
        boost_fraction: alpha, the share of key channels with 4 bits instead of 2 in every page of every head; ignored
            unless ``key_bits`` is 2.
        sink_length: S, the first tokens of a row, raw for ever.
        value_window: R, the newest tokens whose V stays raw behind the newest page.
        rollback_window: W, the newest tokens that ``crop`` can drop without loss.
        page_size: G, tokens per page; the word layout fixes it at 128.
        selection: how boosted channels are chosen, by "magnitude" (the paper's) or "random" (its ablation).
        seed: of the random selection.
        skip_layers: layers whose pages stay raw.
    """

    key_bits: int = 2
    value_bits: int = 2
    boost_fraction: float = 0.125
    sink_length: int = 32
    value_window: int = 128
    rollback_window: int = 32
    page_size: int = PAGE_SIZE
    selection: Literal["magnitude", "random"] = "magnitude"
    seed: int = 0
    skip_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("key_bits", "value_bits"):
            if not _is_int(getattr(self, name)) or getattr(self, name) not in BITS:
                raise ValueError(f"{name} must be one of {BITS}, got {getattr(self, name)!r}")
        if not isinstance(self.boost_fraction, (int, float)) or isinstance(self.boost_fraction, bool):
            raise TypeError(f"boost_fraction must be a number, got {self.boost_fraction!r}")
        if not 0 <= self.boost_fraction <= 1:
            raise ValueError(f"boost_fraction must be between 0 and 1, got {self.boost_fraction!r}")
        for name in ("sink_length", "value_window", "rollback_window"):
            if not _is_int(getattr(self, name)):
                raise TypeError(f"{name} must be an int, got {getattr(self, name)!r}")
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.page_size != PAGE_SIZE:
            raise ValueError(f"page_size must be {PAGE_SIZE}, which the word layout fixes, got {self.page_size!r}")
        if self.selection not in ("magnitude", "random"):
            raise ValueError(f'selection must be "magnitude" or "random", got {self.selection!r}')
        if not _is_int(self.seed) or not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be an int from 0 to 2**31 - 1, got {self.seed!r}")
        self._check_skip_layers()

    def _check_skip_layers(self) -> None:
        try:
            layers = tuple(self.skip_layers)
        except TypeError:
            raise TypeError(f"skip_layers must be a sequence of layer indices, got {self.skip_layers!r}") from None
        if not all(_is_int(layer) and layer >= 0 for layer in layers):
            raise ValueError(f"skip_layers must hold layer indices of at least 0, got {self.skip_layers!r}")
        object.__setattr__(self, "skip_layers", layers)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "KittyConfig":
        """The preset called ``name``, with ``overrides`` applied. ``KittyConfig.presets()`` lists the names."""
        if name not in _PRESETS:
            raise ValueError(f"preset must be one of {', '.join(_PRESETS)}, got {name!r}")
        return cls(**{**_PRESETS[name], **overrides})

    @staticmethod
    def presets() -> tuple[str, ...]:
        return tuple(_PRESETS)

    def num_boosted(self, head_dim: int) -> int:
        """Channels per head with 4 bits: floor(alpha D + .5)."""
        return int(self.boost_fraction * head_dim + 0.5)

    @property
    def raw_layout(self) -> RawLayout:
        return RawLayout(self.sink_length, self.value_window, self.rollback_window)

    def parameters(self, layer: int, key_dim: int, value_dim: int, num_kv_heads: int) -> OpParameters:
        """What the operators are told of a paged layer: its pages, and where its raw tokens lie."""
        key_bits, value_bits = (16, 16) if layer in self.skip_layers else (self.key_bits, self.value_bits)
        return OpParameters(
            key_bits,
            value_bits,
            self.num_boosted(key_dim) if key_bits == 2 else 0,
            self.sink_length,
            self.value_window,
            self.rollback_window,
            self.seed if self.selection == "random" else -1,
            layer,
            key_dim,
            value_dim,
            num_kv_heads,
        )


# KIVI keeps no sink; its starred variants in the paper (tables 2 and 3) do. Both keep 128 recent values raw.
_PRESETS: dict[str, dict[str, Any]] = {
    "kitty": {},
    "kitty-pro": {"boost_fraction": 0.25},
    "kivi-k2v2": {"boost_fraction": 0.0, "sink_length": 0},
    "kivi-k4v4": {"key_bits": 4, "value_bits": 4, "boost_fraction": 0.0, "sink_length": 0},
    "kivi-k2v2-sink": {"boost_fraction": 0.0},
    "kivi-k2v4-sink": {"boost_fraction": 0.0, "value_bits": 4},
    "kivi-k4v2-sink": {"key_bits": 4, "boost_fraction": 0.0},
    "lossless": {"key_bits": 16, "value_bits": 16, "boost_fraction": 0.0},
}


def resolve_config(config: KittyConfig | str | None) -> KittyConfig:
    """A ``KittyConfig``, a preset's name, or None for "kitty"."""
    if config is None:
        return KittyConfig()
    if isinstance(config, str):
        return KittyConfig.preset(config)
    if not isinstance(config, KittyConfig):
        raise TypeError(f"config must be a KittyConfig, a preset's name or None, got {type(config).__name__}")
    return config


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
