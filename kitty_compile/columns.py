"""Columns and tokens: transformers speaks in padded positions, the cache in real tokens."""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Call:
    """The new columns of one forward.

    Attributes:
        num_columns: T.
        start: columns that the cache held when the call began.
        real: bool [B, T], the columns that hold a token; None when all do.
        columns: i32 [B, T], column of the i-th new token of the row; None when ``real`` is.
        counts: i32 [B], new tokens of the row; None when ``real`` is.
    """

    num_columns: int
    start: int
    real: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    counts: torch.Tensor | None = None

    @classmethod
    def of(cls, num_columns: int, start: int, real: torch.Tensor | None) -> "Call":
        if real is None:
            return cls(num_columns, start)
        columns = torch.argsort(~real, dim=1, stable=True).to(torch.int32)
        return cls(num_columns, start, real, columns, real.sum(dim=1, dtype=torch.int32))


class ColumnMap:
    """Which columns of each row hold a token. Nothing is stored until the first pad is seen."""

    def __init__(self) -> None:
        self.real: torch.Tensor | None = None  # bool [B, capacity]

    @property
    def nbytes(self) -> int:
        return 0 if self.real is None else self.real.nbytes

    def own_columns(self, mask: torch.Tensor | None, start: int, num_columns: int) -> torch.Tensor | None:
        """The part of an attention mask [B, T] or [B, start + T] that speaks of the new columns; None when all are real.

        Raises:
            ValueError: the mask has another shape, or takes back what it said of earlier columns.
        """
        if mask is None:
            return None
        if mask.dim() != 2 or mask.shape[1] not in (num_columns, start + num_columns):
            raise ValueError(
                f"attention_mask must have the shape [batch, {start + num_columns}] (earlier columns and the call's own), "
                f"got {list(mask.shape)}"
            )
        mask = mask.to(torch.bool)
        own = mask[:, mask.shape[1] - num_columns :]
        # A single column is the decode step, where asking the device costs more than carrying the mask along.
        if own.device.type != "cpu" and num_columns == 1:
            return own
        if mask.shape[1] > num_columns and not torch.equal(mask[:, :start], self.first(start, mask)):
            raise ValueError("attention_mask must not change for columns that are already cached")
        return None if bool(own.all()) else own

    def first(self, columns: int, like: torch.Tensor) -> torch.Tensor:
        """Bool [B, columns]; ``like`` gives batch and device while nothing is stored."""
        if self.real is None:
            return torch.ones(like.shape[0], columns, dtype=torch.bool, device=like.device)
        return self.real[:, :columns]

    @torch.inference_mode(False)
    def write(self, call: Call) -> None:
        """Record the call's columns."""
        if call.real is None and self.real is None:
            return
        stop = call.start + call.num_columns
        if self.real is None:
            assert call.real is not None
            self.real = self.first(call.start, call.real)
        if self.real.shape[1] < stop:
            room = max(stop, self.real.shape[1] * 5 // 4) - self.real.shape[1]
            self.real = torch.nn.functional.pad(self.real, (0, room), value=True)
        self.real[:, call.start : stop] = True if call.real is None else call.real

    @torch.inference_mode(False)
    def drop_rows(self, rows: torch.Tensor, columns: int, like: torch.Tensor) -> None:
        """Say that the first ``columns`` columns of these rows hold no token."""
        self.real = self.first(columns, like).clone() if self.real is None else self.real
        self.real[rows, :columns] = False

    @torch.inference_mode(False)
    def select(self, index: torch.Tensor) -> None:
        if self.real is not None:
            self.real = self.real.index_select(0, index)
