"""What the benchmarks of whole models compare: the caches that a model decodes with.

strict             16-bit K and V that nothing holds back: cut to the length, the whole step one CUDA graph, attention the
                   faster of cuDNN and flash with ``enable_gqa``
strict-compiled    the same with the rest of the step compiled by inductor, as ``kitty-compiled`` is
dynamic-eager      transformers' DynamicCache as it is shipped
static-compiled    transformers' StaticCache as ``generate(cache_implementation="static")`` runs it
quantized-eager    transformers' QuantizedCache with 2 bits, where quanto or hqq is installed
kitty, kitty-pro, lossless       ``kitty_compile.apply``; decode steps are one CUDA graph
kitty-compiled, ...-compiled     the same after ``model.compile(backend="kitty")``
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import transformers
from common import graph_seconds
from shapes import cache_bytes, clean, filled_kitty, filled_stock, random_columns, reset_peak, wall_seconds
from torch.nn.attention import SDPBackend, sdpa_kernel

import kitty_compile
from kitty_compile import backend
from kitty_compile.huggingface.support import cache_argument

# What a step keeps beside weights and cache: activations, logits and the graph's pool, per row.
STEP_BYTES_PER_ROW = 4_000_000
# Columns left free behind the length that is measured: warm-up and timed steps.
ROOM = 16

# The packages that transformers' QuantizedCache can use.
QUANTIZERS = {"quanto": "optimum.quanto", "hqq": "hqq"}


class UnavailableError(RuntimeError):
    """A system that cannot run here, with the reason."""


# ---- the strict baseline's attention: an operator that inductor leaves alone, with buffers that no graph sees, as kitty's is

STRICT = "strict"
_buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
_library = torch.library.Library("strict", "DEF")
_library.define("attention(Tensor query, Tensor key, Tensor value, int layer, float scale) -> Tensor")


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
    """The last column of the layer's buffers is overwritten; attention reads all of them."""
    for buffer, new in zip(_buffers[layer], (key, value), strict=True):
        buffer[:, :, -1:].copy_(new)
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, *_buffers[layer], scale=scale, enable_gqa=True).contiguous()


for _device in ("CPU", "CUDA"):
    _library.impl("attention", _attention, _device)


@torch.library.register_fake("strict::attention", lib=_library)
def _attention_fake(query: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(query.shape)


def strict_attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> Any:
    """transformers' own function repeats K and V for their group; this one leaves that to the kernel."""
    output = torch.ops.strict.attention(query, key, value, module.layer_idx, float(scaling))
    return output.transpose(1, 2).contiguous(), None


# Without a mask function beside it the model makes no mask.
transformers.AttentionInterface.register(STRICT, strict_attention)


# ---- systems


class System:
    """A model that decodes ``batch`` rows with one kind of cache; used as a context, outside which the model is as it was."""

    preset: str | None = None
    # Is a step's time the same at every length?
    is_flat = False

    def __init__(self, model: Any, batch: int) -> None:
        self.model, self.batch = model, batch
        self.ids = torch.randint(0, model.config.vocab_size, (batch, 1), device=model.device)

    @classmethod
    def row_bytes(cls, model: Any, length: int) -> float:
        """Bytes that a row at ``length`` costs beside the weights."""
        return cache_bytes(model, cls.preset, length) + STEP_BYTES_PER_ROW

    def __enter__(self) -> "System":
        self.model.set_attn_implementation("sdpa")
        return self

    def __exit__(self, *_: object) -> None:
        self.model._compiled_call_impl = None
        torch._dynamo.reset()
        clean()

    def call(self, cache: Any, position: int) -> Any:
        positions = torch.full_like(self.ids, position)
        return self.model(
            input_ids=self.ids, position_ids=positions, use_cache=True, **{cache_argument(self.model): cache}
        )

    def step_seconds(self, length: int) -> float:
        """Seconds of one decode step at ``length`` columns. Peak memory is counted from the full cache on."""
        cache = self.filled(length)
        clean()
        reset_peak()
        return wall_seconds(lambda: self.call(cache, length - 1))

    def filled(self, length: int) -> Any:
        raise NotImplementedError


class Strict(System):
    is_compiled = False

    def __enter__(self) -> System:
        self.model.set_attn_implementation(STRICT)
        self.forward = torch.compile(self.model, dynamic=False) if self.is_compiled else self.model
        return self

    def __exit__(self, *rest: object) -> None:
        _buffers.clear()
        super().__exit__(*rest)

    def step_seconds(self, length: int) -> float:
        _buffers.clear()
        clean()
        _buffers.extend(
            random_columns(self.model, self.batch, length) for _ in range(self.model.config.num_hidden_layers)
        )
        positions = torch.full_like(self.ids, length - 1)
        reset_peak()

        def step() -> None:
            self.forward(input_ids=self.ids, position_ids=positions, use_cache=False)

        if self.model.device.type == "cpu":
            return wall_seconds(step)
        return min(_graphed(step, backend) for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION))


class StrictCompiled(Strict):
    is_compiled = True


def _graphed(step: Callable[[], object], backend: SDPBackend) -> float:
    """Infinity where the backend does not serve these shapes."""
    try:
        with sdpa_kernel(backend):
            return graph_seconds(step, repeats=8)
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        return float("inf")


class Dynamic(System):
    @classmethod
    def row_bytes(cls, model: Any, length: int) -> float:
        # A layer's K is copied to a longer one before the old one goes.
        return super().row_bytes(model, length) + cache_bytes(model, None, length) / model.config.num_hidden_layers / 2

    def filled(self, length: int) -> Any:
        return filled_stock(self.model, transformers.DynamicCache(config=self.model.config), self.batch, length - ROOM)


class Quantized(System):
    def __init__(self, model: Any, batch: int) -> None:
        super().__init__(model, batch)
        self.backend = next((name for name, package in QUANTIZERS.items() if _is_installed(package)), None)
        if self.backend is None:
            raise UnavailableError("transformers' QuantizedCache needs optimum-quanto or hqq, and neither is installed")

    @classmethod
    def row_bytes(cls, model: Any, length: int) -> float:
        # 2 bits, a scale and a zero of 16 bits each in a group of 64, and two copies of a layer at 16 bits in its step.
        sixteen = cache_bytes(model, None, length)
        return sixteen * (2.5 / 16 + 2 / model.config.num_hidden_layers) + STEP_BYTES_PER_ROW

    def filled(self, length: int) -> Any:
        axis = 0 if self.backend == "quanto" else 1
        cache = transformers.QuantizedCache(self.backend, self.model.config, nbits=2, axis_key=axis, axis_value=axis)
        return filled_stock(self.model, cache, self.batch, length - ROOM)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


class Static(System):
    """Attention reads the whole buffer at every length."""

    is_flat = True

    @classmethod
    def row_bytes(cls, model: Any, length: int) -> float:
        # The mask keeps SDPA from grouping heads: K and V of a layer are repeated for their groups.
        config = model.config
        groups = config.num_attention_heads / config.num_key_value_heads
        return super().row_bytes(model, length) + groups * cache_bytes(model, None, length) / config.num_hidden_layers

    def step_seconds(self, length: int) -> float:
        model, config = self.model, self.model.config
        cache = transformers.StaticCache(config=config, max_cache_len=length)
        cache.early_initialization(
            self.batch, config.num_key_value_heads, config.head_dim, model.dtype, torch.device(model.device)
        )
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
            layer.cumulative_length.fill_(length - ROOM)
        mask = torch.ones(self.batch, length, dtype=torch.int64, device=model.device)
        held = length - ROOM
        reset_peak()

        def step() -> None:
            nonlocal held
            held += 1
            inputs = model.prepare_inputs_for_generation(
                self.ids,
                next_sequence_length=1,
                attention_mask=mask[:, :held],
                position_ids=torch.full_like(self.ids, held - 1),
                use_cache=True,
                **{cache_argument(model): cache},
            )
            model.get_compiled_call(None)(**inputs, return_dict=True)

        return wall_seconds(step)

    def __exit__(self, *rest: object) -> None:
        vars(self.model).pop("_compiled_call", None)
        super().__exit__(*rest)


class Kitty(System):
    preset: str = "kitty"
    is_compiled = False

    def __enter__(self) -> System:
        super().__enter__()
        kitty_compile.apply(self.model, self.preset)
        if self.is_compiled:
            self.model.compile(backend=backend.kitty)
        return self

    def __exit__(self, *rest: object) -> None:
        kitty_compile.remove(self.model)
        super().__exit__(*rest)

    def filled(self, length: int) -> Any:
        graph = vars(self.model)["forward"].graph
        if graph is not None:
            # The last cache's recording, with the memory of its own.
            graph.recorded = None
        clean()
        return filled_kitty(self.model, self.preset, self.batch, length - ROOM, length)

    def step_seconds(self, length: int) -> float:
        seconds = super().step_seconds(length)
        refusal = vars(self.model)["forward"].graph.refusal
        if refusal is not None:
            raise RuntimeError(f"the step must be captured, got {refusal}")
        return seconds


def kitty(preset_name: str, *, compiled: bool = False) -> type[Kitty]:
    return type("Kitty", (Kitty,), {"preset": preset_name, "is_compiled": compiled})


SYSTEMS: dict[str, type[System]] = {
    "strict": Strict,
    "kitty": kitty("kitty"),
    "strict-compiled": StrictCompiled,
    "kitty-compiled": kitty("kitty", compiled=True),
    "dynamic-eager": Dynamic,
    "kitty-pro": kitty("kitty-pro"),
    "lossless": kitty("lossless"),
    "static-compiled": Static,
    "quantized-eager": Quantized,
    "kitty-pro-compiled": kitty("kitty-pro", compiled=True),
}
