"""Any causal language model on a 2-bit paged KV cache.

The names below are loaded on first use, so that importing this package costs neither triton nor transformers.
"""

import importlib
from typing import TYPE_CHECKING

from kitty_compile.config import KittyConfig

if TYPE_CHECKING:
    from kitty_compile.api import apply, remove
    from kitty_compile.explaining import explain
    from kitty_compile.exporting import export
    from kitty_compile.huggingface.cache import KittyCache
    from kitty_compile.onnx_export import export_onnx
    from kitty_compile.onnx_runner import load_onnx
    from kitty_compile.program_file import load
    from kitty_compile.reporting import report

__version__ = "0.1.0"
__all__ = [
    "KittyCache",
    "KittyConfig",
    "__version__",
    "apply",
    "explain",
    "export",
    "export_onnx",
    "load",
    "load_onnx",
    "remove",
    "report",
]

_HOMES = {
    "KittyCache": "kitty_compile.huggingface.cache",
    "apply": "kitty_compile.api",
    "explain": "kitty_compile.explaining",
    "export": "kitty_compile.exporting",
    "export_onnx": "kitty_compile.onnx_export",
    "load": "kitty_compile.program_file",
    "load_onnx": "kitty_compile.onnx_runner",
    "remove": "kitty_compile.api",
    "report": "kitty_compile.reporting",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
