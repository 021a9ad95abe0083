"""The CPU backend of ``ops``: the same three functions as ``triton_backend``."""

from kitty_compile.kernels.attend_torch import attend
from kitty_compile.kernels.update_torch import dequantize_pages, update

__all__ = ["attend", "dequantize_pages", "update"]
