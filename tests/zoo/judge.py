"""``judge``: one class of the zoo on kitty pages, held against the stock model.

Three questions, all on the same tokens:

1. On ``lossless`` pages, are the logits those of the stock model on its stock cache?
2. On ``kitty`` pages, does the fused form give what the stock model's own attention makes of the unpacked pages?
3. Do the logits hang on the pages at all? Zeroed pages must move them.
"""

import copy
import dataclasses
import time

import torch
from transformers import PreTrainedModel

from kitty_compile.huggingface import support
from kitty_compile.huggingface.cache import KittyCache
from kitty_compile.layers import PagedLayer
from tests.zoo.build import CannotBuild, build, one_line
from tests.zoo.compare import TOLERANCE, difference, disagreement, rows_of
from tests.zoo.forward import Trace, Workload, finish, run, sees_pads
from tests.zoo.paths import PATHS, Path

# What zeroed pages must do, in tolerances.
CONTROL = 100
# Columns that run a second time, on zeroed pages.
TAIL = 4
FULL = Workload.of(prompt=190, decode=300)


@dataclasses.dataclass
class Row:
    """One class on one path.

    Attributes:
        status: "rewritten", "kept" (no layer is quantised, by name), "refused", "cannot build", "insensitive" or "WRONG".
        quantised, kept, layers: how many layers.
        reason: why, when it is not "rewritten".
        lossless, fused, control: largest differences of the three questions, of the logits' standard deviation.
    """

    name: str
    path: str
    status: str
    quantised: int = 0
    kept: int = 0
    layers: int = 0
    reason: str = ""
    lossless: float | None = None
    fused: float | None = None
    control: float | None = None
    seconds: float = 0.0


def judge(class_name: str, path: str = "apply", workload: Workload = FULL) -> Row:
    """The row of one class."""
    start = time.monotonic()
    row = _judge(class_name, path, workload)
    row.seconds = round(time.monotonic() - start, 1)
    return row


def _judge(class_name: str, path: str, workload: Workload) -> Row:
    built = build(class_name)
    if isinstance(built, CannotBuild):
        return Row(class_name, path, "cannot build", reason=built.reason)
    row = Row(class_name, path, "WRONG")
    if PATHS[path].kept_layers is None:
        _count_layers(row, built.model)
    else:
        row.layers = int(getattr(support.text_config(built.model.config), "num_hidden_layers", 0) or 0)
    try:
        PATHS[path].prepare(copy.deepcopy(built.model), "kitty")
    except (TypeError, ValueError) as error:
        row.status, row.quantised, row.kept = "refused", 0, 0
        row.reason = _refusal(error, class_name)
        return row
    try:
        if sees_pads(built.model):
            workload = workload.without_padding()
            row.reason = "judged without padding, which the stock model attends to"
        stock = run(built.model, workload)
    # The stock model can fail in any way; the reason becomes the row.
    except Exception as error:  # noqa: BLE001
        row.status, row.reason = "cannot build", f"the stock model fails: {one_line(error)}"
        return row
    try:
        _compare(row, built.model, PATHS[path], workload, stock)
    # An applied model that fails is wrong, in whatever way it fails.
    except Exception as error:  # noqa: BLE001
        row.status, row.reason = "WRONG", one_line(error)
    return row


def _compare(row: Row, model: PreTrainedModel, path: Path, workload: Workload, stock: Trace) -> None:
    spread = float(stock.logits.std())
    lossless = run(path.prepare(copy.deepcopy(model), "lossless"), workload)
    row.lossless = difference(lossless.logits, stock.logits, spread)
    served = path.prepare(copy.deepcopy(model), "kitty")
    fused = run(served, workload, tail=TAIL)
    layers = list(path.paged_layers(fused.cache))
    if path.kept_layers is None:
        wrong = _wrong_layers(row, model, layers)
    else:
        row.quantised, row.kept = len(layers), path.kept_layers(fused.cache)
        if row.quantised + row.kept < row.layers:
            row.reason = "; ".join(filter(None, (row.reason, path.reasons())))
        wrong = _unsealed(layers)
    if not row.lossless <= TOLERANCE:
        wrong = f"lossless differs by {row.lossless:.1e}"
    if wrong is None and layers and _has_oracle(model, row):
        dense = run(model, workload, KittyCache(model.config, "kitty"))
        row.fused = difference(fused.logits, dense.logits, spread)
        dense_layers = [layer for layer in dense.cache.layers if isinstance(layer, PagedLayer)]
        wrong = disagreement(fused, dense, (layers, dense_layers), workload, spread)
    if wrong is not None:
        row.reason = wrong
    elif not layers:
        row.status = "kept"
    else:
        row.control = _control(served, path, workload, fused, spread)
        row.status = "rewritten" if row.control > CONTROL * TOLERANCE else "insensitive"


def _wrong_layers(row: Row, model: PreTrainedModel, layers: list[PagedLayer]) -> str | None:
    """Every layer without a window must be on pages, in the shape that is reported, and have packed ones."""
    if len(layers) != row.quantised:
        return f"{row.quantised} layers should be on pages, {len(layers)} are"
    reported = support.layer_support(support.text_config(model.config))
    for layer in layers:
        found, told = layer.geometry[:3], reported[layer.index]
        if found != (told.num_kv_heads, told.key_dim, told.value_dim):
            return f"layer {layer.index} has (KV heads, key size, value size) {found}, reported is {told}"
    return _unsealed(layers)


def _has_oracle(model: PreTrainedModel, row: Row) -> bool:
    """Can a KittyCache serve the whole model in its materialising form? Not with recurrent layers beside attention."""
    support_of = support.layer_support(support.text_config(model.config))
    return row.quantised == sum(layer.plan is not None and layer.plan.window is None for layer in support_of) and all(
        layer.plan is not None for layer in support_of
    )


def _unsealed(layers: list[PagedLayer]) -> str | None:
    sealed = [int(layer.config.raw_layout.value_pages(layer.lengths.long()).max()) for layer in layers]
    return None if all(sealed) else f"sealed value pages per layer are {sealed}"


def _control(served: PreTrainedModel, path: Path, workload: Workload, fused: Trace, spread: float) -> float:
    for layer in path.paged_layers(fused.earlier):
        layer.state.key_pages.zero_()
        layer.state.value_pages.zero_()
    blind = finish(served, workload, fused.earlier, TAIL)
    # The last columns of every row are real.
    seeing = torch.cat([row[-TAIL:] for row in rows_of(fused.logits, workload)])
    return difference(blind, seeing, spread)


def _count_layers(row: Row, model: PreTrainedModel) -> None:
    layers = support.layer_support(support.text_config(model.config))
    windows = [layer.plan.window for layer in layers if layer.plan is not None]
    row.layers, row.quantised = len(layers), windows.count(None)
    row.kept = len(windows) - row.quantised
    if not row.quantised:
        row.reason = f"every layer has a window ({max(windows, default=0)} columns), which is kept in a raw ring"


def _refusal(error: Exception, class_name: str) -> str:
    reason = str(error).split(", got ", 1)[-1].removeprefix(f"{class_name}: ")
    return " ".join(reason.split())
