"""What the probes of a mask have shown, as a function of the distance between query and key."""

import torch

from kitty_compile.passes.nodes import NoMatchError
from kitty_compile.passes.probe_mask import Frame, Seen


class NotCausalError(NoMatchError):
    """The probed columns contradict every causal or sliding mask."""


class Evidence:
    """Keys at most ``farthest_visible`` columns back were seen, keys from ``nearest_hidden`` columns back were not."""

    def __init__(self) -> None:
        self.farthest_visible = -1
        self.nearest_hidden: int | None = None
        self.farthest_probed = 0

    @property
    def window(self) -> int | None:
        return self.nearest_hidden

    def add(self, seen: Seen) -> None:
        """Take in a probe in which every column holds a token.

        Raises:
            NotCausalError: it contradicts an earlier one, or any causal mask.
        """
        everywhere, somewhere = seen.visible.all(dim=(0, 1)), seen.visible.any(dim=(0, 1))
        self._add(everywhere, somewhere, seen, torch.ones_like(everywhere))

    def add_padded(self, seen: Seen, padding: torch.Tensor, frame: Frame) -> None:
        """The same where ``padding`` bool [B, columns] says which columns do.

        Keys without a token must be hidden; what queries without one see does not matter.
        """
        last = padding.shape[1] - 1
        keys, queries = padding[:, frame.keys().clamp(max=last)], padding[:, seen.queries.clamp(max=last)]
        if bool((seen.visible & ~keys[:, None, None] & queries[:, None, :, None]).any()):
            raise NotCausalError("columns without a token are seen")
        counted = keys[:, None, None] & queries[:, None, :, None]
        visible = seen.visible.expand(torch.broadcast_shapes(seen.visible.shape, counted.shape))
        everywhere = (visible | ~counted).all(dim=(0, 1))
        self._add(everywhere, (visible & counted).any(dim=(0, 1)), seen, counted.any(dim=(0, 1)))

    def _add(self, everywhere: torch.Tensor, somewhere: torch.Tensor, seen: Seen, counted: torch.Tensor) -> None:
        distance = seen.distances()
        later = somewhere & (distance < 0)
        if bool(later.any()):
            raise NotCausalError(_describe_later(somewhere, later, seen))
        if bool((counted & (everywhere != somewhere)).any()):
            raise NotCausalError("the mask differs between rows or heads")
        causal = counted & (distance >= 0)
        visible, hidden = causal & somewhere, causal & ~somewhere
        if bool(visible.any()):
            self.farthest_visible = max(self.farthest_visible, int(distance[visible].max()))
        if bool(hidden.any()):
            nearest = int(distance[hidden].min())
            self.nearest_hidden = nearest if self.nearest_hidden is None else min(self.nearest_hidden, nearest)
        if bool(causal.any()):
            self.farthest_probed = max(self.farthest_probed, int(distance[causal].max()))
        if self.nearest_hidden is not None and self.nearest_hidden <= self.farthest_visible:
            raise NotCausalError(
                f"a key {self.nearest_hidden} columns back is hidden where one {self.farthest_visible} back is seen"
            )


def _describe_later(somewhere: torch.Tensor, later: torch.Tensor, seen: Seen) -> str:
    if bool(somewhere.all()):
        return "every column sees all others (bidirectional)"
    ahead = seen.keys[later.any(dim=0)]
    is_prefix = torch.equal(ahead.sort().values, torch.arange(int(ahead.max()) + 1)[-len(ahead) :])
    seen_by_all = bool(somewhere[:, : int(later.any(dim=0).nonzero().max()) + 1].all())
    if is_prefix and seen_by_all:
        return f"the first {int(ahead.max()) + 1} columns are seen by all (a prefix)"
    return "later columns are seen"
