"""``KittyCache``: the paged cache behind transformers' ``Cache`` interface, on both sides of its renames."""

from collections.abc import Sequence
from typing import Any, NoReturn, Self

import torch
import transformers
from packaging.version import Version
from torch._compile import _disable_dynamo
from transformers import Cache, PreTrainedConfig

from kitty_compile import saving
from kitty_compile.cache import PagedCache
from kitty_compile.config import KittyConfig, resolve_config
from kitty_compile.huggingface.attention import active_call, in_step, refuse_gradients
from kitty_compile.huggingface.support import layer_plans, text_config
from kitty_compile.kernels.serving import register
from kitty_compile.layers import LayerPlan

# Until 5.17 a positive argument of ``crop`` is the length to keep; later versions refuse it.
CROP_TAKES_LENGTH = Version(transformers.__version__) < Version("5.18")


class KittyCache(PagedCache, Cache):  # type: ignore[misc]
    """A transformers cache on 2-bit pages.

    In a model prepared by ``kitty_compile.apply`` attention runs on the pages themselves. In any other model ``update``
    returns keys and values dequantised at their columns: slow, but any attention in plain eager works on them. Such a
    model does not show its attention mask to the cache, so a padded batch needs ``padding=`` or ``set_padding(mask)``.

    Args:
        model_config: the model's configuration.
        config: a ``KittyConfig``, a preset's name, or None for "kitty".
        max_length: columns the cache can ever hold, allocated at once; None to grow as needed.
        padding: attention mask [batch, columns] of the first forward, see ``set_padding``.
    """

    is_compileable = False
    is_croppable = True
    # Read by transformers wherever it asks a Cache about its own ways of growing and offloading.
    offloading = False
    layer_class_to_replicate = None
    is_bounded_by_generate = False
    num_length_reads = 0

    def __init__(
        self,
        model_config: PreTrainedConfig,
        config: KittyConfig | str | None = None,
        *,
        max_length: int | None = None,
        padding: torch.Tensor | None = None,
    ) -> None:
        plans = layer_plans(text_config(model_config))
        PagedCache.__init__(self, plans, resolve_config(config), max_length=max_length)
        self.handle = register(self)
        if padding is not None:
            self.set_padding(padding)

    def save(self, path: saving.Path) -> None:
        """Write all that it holds to a file, which :meth:`load` reads in any process; a file that is there is replaced.

        A length that ``generate`` chose by itself does not bound what is loaded.
        """
        saving.save(self, path, is_bounded=not self.is_bounded_by_generate)

    @classmethod
    def load(
        cls,
        path: saving.Path,
        model_config: PreTrainedConfig | None = None,
        *,
        max_length: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """The cache that :meth:`save` wrote: what follows is bit-identical to what follows in the one that was saved.

        Args:
            model_config: of the model it shall serve; what has other layers is refused here, not in the first forward.
            max_length: columns it can come to hold; None: as it was when it was saved.
            device: where it shall live, whatever device it was saved from.

        Raises:
            ValueError: the file is not whole, of another format or layout version, or of another model.
        """
        cache = saving.load(path, cls._of_plans, max_length=max_length, device=device)
        if model_config is not None:
            _check_plans(cache, layer_plans(text_config(model_config)))
        return cache

    @classmethod
    def _of_plans(cls, plans: Sequence[LayerPlan], config: KittyConfig, *, max_length: int | None) -> Self:
        cache = cls.__new__(cls)
        PagedCache.__init__(cache, plans, config, max_length=max_length)
        cache.handle = register(cache)
        return cache

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy is a cache of its own.
        self.__dict__.update(state)
        self.handle = register(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(layers={len(self)}, columns={self.get_seq_length()}, config={self.config})"

    def __len__(self) -> int:
        return len(self.layers)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a layer's new keys and values; returns what the model shall attend to."""
        if in_step():
            return key_states, value_states
        if torch.compiler.is_compiling() and self._call is None:
            # A model that was not applied. All layers count the same columns: one number for Dynamo to guard on.
            refuse_gradients(key_states, value_states)
            window, columns = self.plans[layer_idx].window, self.layers[0].columns
            num_past = columns if window is None else min(columns, window - 1)
            full: tuple[torch.Tensor, torch.Tensor] = torch.ops.kitty.materialize(
                key_states, value_states, self.handle, layer_idx, num_past
            )
            return full
        return self._take(key_states, value_states, layer_idx)

    @_disable_dynamo
    def _take(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        refuse_gradients(key_states, value_states)
        call = active_call()
        if call is not None and call.cache is self:
            call.stage(layer_idx, key_states, value_states)
            return key_states, value_states
        return self.store(key_states, value_states, layer_idx)

    def attend_alone(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        padding: torch.Tensor | None,
        **arguments: Any,
    ) -> torch.Tensor:
        """``attend`` where nobody begins and ends the call: the first layer and the last one do.

        Args:
            padding: the attention mask of the call, when ``set_padding`` has not given one.
        """
        if self._call is None or layer in self._served:
            self.begin_call(key.shape[2], padding if self._padding is None else self._padding)
        try:
            output = self.attend(query, key, value, layer, **arguments)
        except BaseException:
            self.abort_call()
            raise
        self._padding = None
        if len(self._served) == len(self.layers):
            self._close_call()
        return output

    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        """Drop the newest ``-tokens_to_remove`` columns; 0 drops only what a forward that failed half way has left."""
        # Assisted decoding of 5.17 counts in tensors.
        tokens_to_remove = int(tokens_to_remove)
        if tokens_to_remove > 0 and not CROP_TAKES_LENGTH:
            raise ValueError(f"tokens_to_remove must be 0 or negative, got {tokens_to_remove}")
        length = min(layer.columns for layer in self.layers)
        columns = tokens_to_remove if tokens_to_remove > 0 else length + tokens_to_remove
        super().crop(min(max(columns, 0), length))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self.get_seq_length():
            self.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.get_seq_length():
            self.repeat(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.get_seq_length():
            self.select(indices)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that a layer has seen (pads included)."""
        if not torch.compiler.is_compiling():
            # A recording of a forward that asks would be good for one length alone.
            self.num_length_reads += 1
        return super().get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(columns of K that a mask for ``query_length`` new columns spans, index of the first of them)."""
        return (query_length, 0) if in_step() else super().get_mask_sizes(query_length, layer_idx)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        # Asked for masks alone.
        return 0 if in_step() else self.get_seq_length(layer_idx)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Columns that the cache, or one layer of it, can hold; -1 when it grows."""
        window = None if layer_idx is None else self.plans[layer_idx].window
        if window is not None:
            return window
        return -1 if self.max_length is None else self.max_length

    def activate_past_recording(self) -> None:
        """Nothing to do: the newest ``rollback_window`` columns can always be cropped."""

    def is_recording_past(self, layer_idx: int) -> bool:
        return True

    @property
    def is_initialized(self) -> bool:
        return all(layer.is_initialized for layer in self.layers)

    @property
    def is_sliding(self) -> list[bool]:
        return [layer.is_sliding for layer in self.layers]

    @property
    def is_linear(self) -> list[bool]:
        return [False] * len(self.layers)

    @property
    def is_dummy(self) -> list[bool]:
        return [False] * len(self.layers)

    def early_initialization(
        self,
        batch_size: int,
        num_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Allocate before the first forward."""
        heads = [num_heads] * len(self) if isinstance(num_heads, int) else list(num_heads)
        dims = [head_dim] * len(self) if isinstance(head_dim, int) else list(head_dim)
        for name, entries in (("num_heads", heads), ("head_dim", dims)):
            if len(entries) != len(self):
                raise ValueError(f"{name} must have one entry per layer ({len(self)}), got {len(entries)}")
        self.begin_call(0)
        for layer in range(len(self)):
            empty = torch.zeros(batch_size, heads[layer], 0, dims[layer], dtype=dtype, device=device)
            self._serve(empty, empty, layer)
        self.end_call()

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(f"a KittyCache must hold keys and values of attention layers on one device, got {what}")

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        self._refuse("a call of offload")

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        self._refuse("a call of prefetch")

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> NoReturn:
        self._refuse("a convolution state")

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("a convolution state")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> NoReturn:
        self._refuse("a recurrent state")

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> NoReturn:
        self._refuse("a recurrent state")

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> NoReturn:
        self._refuse("a question about recurrent states")

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> NoReturn:
        self._refuse("the keys of an indexer")


def _check_plans(cache: KittyCache, plans: Sequence[LayerPlan]) -> None:
    if len(plans) != len(cache):
        raise ValueError(f"path must hold a cache of the model's {len(plans)} layers, got one of {len(cache)}")
    for index, (plan, found) in enumerate(zip(plans, cache.plans, strict=True)):
        if plan != found:
            raise ValueError(f"layer {index} in path must be {plan}, as in the model, got {found}")
