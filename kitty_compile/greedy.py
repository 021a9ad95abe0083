"""Greedy generation on anything that is called with the next columns and gives logits."""

from collections.abc import Sequence
from typing import Protocol

import torch


class Stepper(Protocol):
    """A program: what :func:`generate_greedily` needs of it."""

    @property
    def max_length(self) -> int: ...

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor: ...

    def reset(self) -> None: ...


def generate_greedily(
    program: Stepper,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    attention_mask: torch.Tensor | None,
    eos_token_id: int | Sequence[int] | None,
    pad_token_id: int | None,
) -> torch.Tensor:
    """``Program.generate``, which has checked the ids."""
    ends = _ends(eos_token_id)
    _check(program, input_ids, max_new_tokens, attention_mask)
    program.reset()
    ids, mask = input_ids, attention_mask
    ending = torch.tensor(ends, dtype=torch.int64, device=ids.device)
    padding = pad_token_id if pad_token_id is not None else (ends or [0])[0]
    done = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    made = [input_ids]
    for _ in range(max_new_tokens):
        newest = program(ids, mask)[:, -1].argmax(dim=-1)
        newest = torch.where(done, padding, newest)
        made.append(newest.unsqueeze(1))
        if ends:
            done |= torch.isin(newest, ending)
            if bool(done.all()):
                break
        ids, mask = made[-1], None
    return torch.cat(made, dim=1)


def _ends(eos_token_id: int | Sequence[int] | None) -> list[int]:
    if eos_token_id is None:
        return []
    return [eos_token_id] if isinstance(eos_token_id, int) else [int(token) for token in eos_token_id]


def _check(program: Stepper, ids: torch.Tensor, max_new_tokens: int, mask: torch.Tensor | None) -> None:
    if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be a positive int, got {max_new_tokens!r}")
    # The newest token is returned without being read.
    if ids.shape[1] + max_new_tokens - 1 > program.max_length:
        raise ValueError(
            f"prompt and max_new_tokens must fit max_length={program.max_length}, got {ids.shape[1]} + {max_new_tokens}"
        )
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        got = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask must have the shape of input_ids {list(ids.shape)}, got {got}")
    if not bool(mask[:, -1].all()):
        raise ValueError("the last column of attention_mask must be a token in every row (pad on the left), got a pad")
