"""Run an ONNX file on onnxruntime, where the packed state stays between calls; transformers is not needed."""

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy
import torch
import torch.utils.dlpack

from kitty_compile.greedy import generate_greedily
from kitty_compile.onnx_manifest import LENGTH, LOGITS, TOKENS, OnnxManifest

try:
    import onnxruntime
except ImportError as error:
    raise ImportError("onnxruntime must be installed to run ONNX: pip install 'kitty-compile[onnx]'") from error

Path = str | os.PathLike[str]
# What onnxruntime calls the types of a state, with their number in ONNX and their bytes.
_TYPES = {
    "tensor(float)": (1, 4),
    "tensor(uint8)": (2, 1),
    "tensor(int16)": (5, 2),
    "tensor(int64)": (7, 8),
    "tensor(float16)": (10, 2),
    "tensor(bfloat16)": (16, 2),
}
_BATCH_DIM = "batch"


class OnnxRunner:
    """A file that ``export_onnx`` wrote, with the state of what it has read.

    Rows of one call have the same number of tokens. A call that fails changes nothing.

    Attributes:
        manifest: what the file says of itself.
        columns: tokens that every row of the state holds. batch: its rows, 0 when it is empty.
    """

    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        """``threads``: of one operator; None leaves it to onnxruntime.

        Raises:
            ValueError: there is no such file, or it is none that ``export_onnx`` of this version wrote.
        """
        self.session = _session(path, threads)
        self.manifest = OnnxManifest.from_metadata(self.session.get_modelmeta().custom_metadata_map)
        self._names = [LOGITS, *(f"present_{name}" for name in self._state_names)]
        self.columns = self.batch = 0
        self._state: dict[str, Any] = {}

    @property
    def max_length(self) -> int:
        return self.manifest.max_length

    @property
    def state_bytes(self) -> int:
        """Bytes of the state as it is now."""
        types = {item.name: _TYPES[item.type][1] for item in self.session.get_inputs()}
        return sum(types[name] * int(numpy.prod(value.shape())) for name, value in self._state.items())

    def state(self) -> dict[str, torch.Tensor]:
        """The state's tensors by name, copied."""
        return {
            name.removeprefix("past_"): torch.utils.dlpack.from_dlpack(value._ortvalue.to_dlpack()).clone()
            for name, value in self._state.items()
            if 0 not in value.shape()
        }

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """The logits of the next columns of every row, after which the state holds their tokens.

        Args:
            input_ids: i64 [b, T]. attention_mask: None or all ones.

        Returns:
            fp32 [b, 1, vocabulary] of the last column, or [b, T, vocabulary], as it was exported.

        Raises:
            TypeError, ValueError: the shapes do not fit, there is padding, or there are no positions left.
        """
        self._check(input_ids, attention_mask)
        rows, columns = input_ids.shape
        state = self._state or self._empty(rows)
        given = onnxruntime.OrtValue.ortvalue_from_numpy(input_ids.contiguous().numpy())
        logits, *present = self.session.run_with_ort_values(self._names, {TOKENS: given, **state})
        self._state = dict(zip(state, present, strict=True))
        self.batch, self.columns = rows, self.columns + columns
        return torch.from_numpy(logits.numpy())

    def generate(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int,
        *,
        attention_mask: torch.Tensor | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
    ) -> torch.Tensor:
        """Greedy generation from an empty state, which is reset first; arguments and result as ``Program.generate``.

        Raises:
            TypeError, ValueError: as a call does, before anything changes.
        """
        _check_padding(attention_mask)
        return generate_greedily(self, input_ids, max_new_tokens, None, eos_token_id, pad_token_id)

    def reset(self) -> None:
        """Forget all tokens."""
        self._state = {}
        self.columns = self.batch = 0

    @property
    def _state_names(self) -> list[str]:
        return [LENGTH.removeprefix("past_"), *self.manifest.states]

    def _empty(self, rows: int) -> dict[str, Any]:
        made = {}
        for item in self.session.get_inputs():
            if item.name == LENGTH:
                made[item.name] = onnxruntime.OrtValue.ortvalue_from_numpy(numpy.zeros(1, dtype=numpy.int64))
            elif item.name != TOKENS:
                sizes = [rows if size == _BATCH_DIM else 0 if isinstance(size, str) else size for size in item.shape]
                kind = _TYPES[item.type][0]
                made[item.name] = onnxruntime.OrtValue.ortvalue_from_shape_and_type(sizes, kind)
        return {f"past_{name}": made[f"past_{name}"] for name in self._state_names}

    def _check(self, ids: object, mask: torch.Tensor | None) -> None:
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.dtype != torch.int64:
            got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise TypeError(f"input_ids must be an int64 tensor [batch, columns], got {got}")
        if ids.numel() == 0:
            raise ValueError(f"input_ids must have at least one row and one column, got {list(ids.shape)}")
        if self.batch and ids.shape[0] != self.batch:
            raise ValueError(
                f"batch must stay {self.batch} while the state holds tokens, got {ids.shape[0]}: call reset()"
            )
        if self.columns + ids.shape[1] > self.max_length:
            raise ValueError(
                f"columns must not exceed the model's {self.max_length} positions, got {self.columns} + {ids.shape[1]}"
            )
        _check_padding(mask)


def load_onnx(path: Path, *, threads: int | None = None) -> OnnxRunner:
    """The runner of a file that ``export_onnx`` wrote, with an empty state; arguments and errors as ``OnnxRunner``."""
    return OnnxRunner(path, threads=threads)


def _session(path: Path, threads: int | None) -> Any:
    if not pathlib.Path(path).is_file():
        raise ValueError(f"path must be an ONNX file that exists, got {path}")
    options = onnxruntime.SessionOptions()
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        return onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
    # onnxruntime's errors have no common class but this.
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise ValueError(f"path must be a whole ONNX file, got {path}: {lines[0]}") from error


def _check_padding(mask: torch.Tensor | None) -> None:
    if mask is not None and not bool(mask.all()):
        raise ValueError("attention_mask must be all ones: rows of an ONNX program have one length, got pads")
