"""How far two runs of the zoo are apart.

Rounding to 2 bits is a step function, and so is rounding scales and zero points to 16 bits: where a key or value of two
runs differs in its last float32 bit beside such a step, what is on the page jumps, and what follows in that row differs by
more than float32 rounding. So two runs on 2-bit pages are held together row by row: a row whose pages unpack to the same
numbers must agree within ``TOLERANCE``, a row in which at most ``JUMPED`` of the numbers differ within ``JUMP_TOLERANCE``.
Runs on raw pages have no such steps.
"""

from collections.abc import Sequence

import torch

from kitty_compile.layers import PagedLayer
from tests.zoo.forward import Trace, Workload

# Of the standard deviation of the stock model's logits. Different orders of float32 sums come to 1e-6 to 1e-4 of it after
# four wide layers; a wrong column, mask, scale or position comes to more than 1e-1.
TOLERANCE = 1e-3
JUMP_TOLERANCE = 1e-1
# Share of a row's keys and values: one jump makes others in the layers behind it, one scale belongs to 128 numbers.
JUMPED = 1e-1
# A number has jumped when it is off by this part of the standard deviation of its layer's keys or values. Without a jump
# they are off by about 1e-6.
_JUMP = 1e-4


def difference(actual: torch.Tensor, expected: torch.Tensor, spread: float) -> float:
    """The largest one, in ``spread``."""
    return float((actual - expected).abs().max()) / spread


def rows_of(logits: torch.Tensor, workload: Workload) -> tuple[torch.Tensor, ...]:
    """Logits of every real column [tokens, vocabulary], row by row."""
    return logits.split(workload.mask.sum(dim=1).tolist())


def disagreement(
    actual: Trace,
    expected: Trace,
    layers: tuple[Sequence[PagedLayer], Sequence[PagedLayer]],
    workload: Workload,
    spread: float,
) -> str | None:
    """Why two runs on 2-bit pages do not agree; None when they do, by the rule above."""
    pairs = zip(rows_of(actual.logits, workload), rows_of(expected.logits, workload), strict=True)
    errors = [difference(*pair, spread) for pair in pairs]
    if max(errors) <= TOLERANCE:
        return None
    jumped = jumped_share(*layers, workload)
    for row, (error, share) in enumerate(zip(errors, jumped, strict=True)):
        allowed = TOLERANCE if not 0 < share <= JUMPED else JUMP_TOLERANCE
        if not error <= allowed:
            return f"row {row} differs by {error:.1e} where {share:.1e} of what is on its pages differs"
    return None


def jumped_share(actual: Sequence[PagedLayer], expected: Sequence[PagedLayer], workload: Workload) -> list[float]:
    """The share of each row's keys and values that two caches hold differently."""
    real = workload.mask.bool()
    shares = []
    for ours, theirs in zip(actual, expected, strict=True):
        held = zip(ours.materialize(workload.columns, real), theirs.materialize(workload.columns, real), strict=True)
        for one, other in held:
            shares.append(((one - other).abs() > _JUMP * other.std()).float().mean(dim=(1, 2, 3)))
    return torch.stack(shares).amax(dim=0).tolist()
