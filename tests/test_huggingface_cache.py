"""``KittyCache`` as a transformers ``Cache``: on a stock model (materialising form), and its whole interface."""

import copy

import pytest
import torch
from transformers import Cache, DynamicCache, GPTNeoXConfig, LlamaConfig

import kitty_compile
from kitty_compile import KittyConfig
from kitty_compile.huggingface.cache import CROP_TAKES_LENGTH, KittyCache
from kitty_compile.huggingface.support import cache_argument, layer_plans
from kitty_compile.testing import FAMILIES, WINDOW, random_ids, tiny_config, tiny_model

CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def forward(model, cache, ids, **kwargs):
    return model(ids, **{cache_argument(model): cache}, **kwargs).logits


def filled(family="llama", preset="lossless", batch=2, columns=300, fused=False):
    """A model and its cache after one forward."""
    model = tiny_model(family)
    if fused:
        kitty_compile.apply(model, preset)
    cache = KittyCache(model.config, preset)
    forward(model, cache, random_ids(batch, columns))
    return model, cache


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_materialising_lossless_equals_the_stock_cache(family):
    model = tiny_model(family)
    stock, kitty = DynamicCache(config=model.config), KittyCache(model.config, "lossless")
    assert isinstance(kitty, Cache)
    for length in (170, 1, 140, 1, 1):
        ids = random_ids(2, length, seed=length)
        torch.testing.assert_close(forward(model, kitty, ids), forward(model, stock, ids), **CLOSE)
    assert kitty.get_seq_length() == stock.get_seq_length() == 313
    for layer in range(len(kitty)):
        assert kitty.get_mask_sizes(5, layer) == stock.get_mask_sizes(5, layer)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_fused_equals_materialising(family):
    """Teacher-forced in pieces over two page seals: the same pages are read by both."""
    model = tiny_model(family)
    calls = [random_ids(2, length, seed=length) for length in (155, 10, 1, 130, 1, 3, 1)]
    cache = KittyCache(model.config, "kitty")
    expected = [forward(model, cache, ids) for ids in calls]
    kitty_compile.apply(model, "kitty")
    cache = KittyCache(model.config, "kitty")
    for ids, logits in zip(calls, expected, strict=True):
        torch.testing.assert_close(forward(model, cache, ids), logits, **CLOSE)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss"])
@torch.no_grad()
def test_padding_of_the_materialising_form(family):
    model = tiny_model(family)
    ids, mask = random_ids(2, 200), torch.ones(2, 200, dtype=torch.int64)
    mask[1, :60] = 0
    stock, kitty = DynamicCache(config=model.config), KittyCache(model.config, "lossless", padding=mask)
    for piece in (ids, random_ids(2, 1)):
        expected = forward(model, stock, piece, attention_mask=mask)
        actual = forward(model, kitty, piece, attention_mask=mask)
        mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], dim=1)
        torch.testing.assert_close(actual[:, -1], expected[:, -1], **CLOSE)
    assert kitty.lengths.tolist() == [201, 141]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.no_grad()
def test_crop(family, fused):
    model, cache = filled(family, fused=fused)
    assert cache.is_croppable
    cache.activate_past_recording()
    assert cache.is_recording_past(0)
    token = random_ids(2, 1, seed=8)
    forward(model, cache, random_ids(2, 9, seed=2))
    expected = forward(model, copy.deepcopy(cache), token)
    forward(model, cache, random_ids(2, 12, seed=3))
    cache.crop(0)
    assert cache.get_seq_length() == 321
    cache.crop(-12)
    assert cache.get_seq_length() == 309
    torch.testing.assert_close(forward(model, cache, token), expected, **CLOSE)


@torch.no_grad()
def test_positive_crop_is_a_length_until_transformers_5_17_and_an_error_since():
    _, cache = filled()
    if not CROP_TAKES_LENGTH:
        with pytest.raises(ValueError, match="tokens_to_remove must be 0 or negative, got 290"):
            cache.crop(290)
        return
    cache.crop(290)
    assert cache.get_seq_length() == 290
    cache.crop(400)
    assert cache.get_seq_length() == 290


@torch.no_grad()
def test_crop_of_more_than_is_held_empties():
    _, cache = filled()
    cache.crop(torch.tensor(-1000))
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.no_grad()
def test_rows_can_be_reordered_repeated_and_selected(family):
    model, cache = filled(family, fused=True)
    token = random_ids(2, 1)
    alone = forward(model, copy.deepcopy(cache), token)
    moved = copy.deepcopy(cache)
    moved.reorder_cache(torch.tensor([1, 0]))
    torch.testing.assert_close(forward(model, moved, token.flip(0)), alone.flip(0), **CLOSE)
    moved = copy.deepcopy(cache)
    moved.batch_repeat_interleave(2)
    assert moved.batch_size == 4
    torch.testing.assert_close(
        forward(model, moved, token.repeat_interleave(2, 0)), alone.repeat_interleave(2, 0), **CLOSE
    )
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.batch_size == 1
    torch.testing.assert_close(forward(model, cache, token[1:]), alone[1:], **CLOSE)


def test_an_empty_cache_takes_row_operations():
    cache = KittyCache(tiny_config("llama"))
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0]))
    cache.crop(0)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.batch_size == -1


@torch.no_grad()
def test_reset_and_deepcopy():
    model, cache = filled(fused=True)
    twin = copy.deepcopy(cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.pages_in_use == 0
    assert twin.get_seq_length() == 300
    ids = random_ids(2, 300)
    torch.testing.assert_close(
        forward(model, cache, ids), forward(model, KittyCache(model.config, "lossless"), ids), **CLOSE
    )


@torch.no_grad()
def test_what_transformers_asks_about():
    model, cache = filled("gemma3")
    assert len(cache) == 4
    assert cache.is_sliding == [True, True, False, False]
    assert cache.is_linear == cache.is_dummy == [False] * 4
    assert not cache.is_compileable
    assert cache.is_initialized
    assert cache.batch_size == 2
    assert cache.get_query_offset() == 300
    assert cache.get_max_length() == -1
    assert cache.get_max_length(0) == WINDOW
    assert KittyCache(model.config, max_length=50).get_max_length(2) == 50
    if hasattr(Cache, "get_max_cache_shape"):
        assert cache.get_max_cache_shape(2) == -1
        assert cache.max_batch_size == 2
    assert repr(cache).startswith("KittyCache(layers=4, columns=300, ")
    assert cache.nbytes >= sum(layer.nbytes for layer in cache.layers)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.no_grad()
def test_early_initialization_allocates_what_the_first_forward_would(family):
    model = tiny_model(family)
    config = model.config
    early, late = (KittyCache(config, max_length=320) for _ in range(2))
    heads, head_dim = config.num_key_value_heads, getattr(config, "head_dim", None) or 16
    assert not early.is_initialized
    early.early_initialization(2, heads, [head_dim] * len(early), torch.float32, "cpu")
    assert early.is_initialized
    assert early.get_seq_length() == 0
    ids = random_ids(2, 300)
    addresses = [layer.state.raw_key.data_ptr() for layer in early.layers if not layer.is_sliding]
    torch.testing.assert_close(forward(model, early, ids), forward(model, late, ids))
    assert early.nbytes == late.nbytes
    assert addresses == [layer.state.raw_key.data_ptr() for layer in early.layers if not layer.is_sliding]
    with pytest.raises(ValueError, match="num_heads must have one entry per layer"):
        early.early_initialization(2, [heads], head_dim, torch.float32, "cpu")


@pytest.mark.parametrize("fused", [False, True])
@torch.no_grad()
def test_max_length_is_an_error_before_anything_changes(fused):
    model = tiny_model("llama")
    if fused:
        kitty_compile.apply(model)
    cache = KittyCache(model.config, max_length=200)
    forward(model, cache, random_ids(1, 199))
    before = cache.nbytes
    with pytest.raises(ValueError, match="max_length"):
        forward(model, cache, random_ids(1, 2))
    assert (cache.get_seq_length(), cache.nbytes, cache.lengths.tolist()) == (199, before, [199])
    forward(model, cache, random_ids(1, 1))
    assert cache.get_seq_length() == 200


@torch.no_grad()
def test_a_torn_forward_is_named_and_crop_0_repairs_it():
    model, cache = filled(fused=True)
    layer = model.get_decoder().layers[1]
    token, original = random_ids(2, 1, seed=5), layer.mlp.forward
    expected = forward(model, copy.deepcopy(cache), token)

    def fail(*args):
        raise RuntimeError("out of luck")

    for module, attribute in ((layer.self_attn.q_proj, "forward"), (layer.mlp, "forward")):
        kept = getattr(module, attribute)
        setattr(module, attribute, fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            forward(model, cache, token)
        setattr(module, attribute, kept)
        if module is not layer.mlp:
            with pytest.raises(ValueError, match="a forward stopped half way"):
                forward(model, cache, token)
            cache.crop(0)
    assert layer.mlp.forward == original
    # The second failure came after all layers had stored: nothing is torn, one column more is held.
    assert cache.get_seq_length() == 301
    cache.crop(-1)
    torch.testing.assert_close(forward(model, cache, token), expected, **CLOSE)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("offload", (0,)),
        ("prefetch", (0,)),
        ("get_conv_state", (0,)),
        ("update_conv_state", (torch.ones(1), 0)),
        ("get_recurrent_state", (0,)),
        ("update_recurrent_state", (torch.ones(1), 0)),
        ("has_previous_state", (0,)),
        ("update_indexer", (torch.ones(1), 0)),
    ],
)
def test_what_it_cannot_hold_is_refused(method, arguments):
    with pytest.raises(ValueError, match="a KittyCache must hold keys and values of attention layers on one device"):
        getattr(KittyCache(tiny_config("llama")), method)(*arguments)


def test_gradients_are_refused():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="must be used without gradients"):
        forward(model, KittyCache(model.config), random_ids(1, 4))


def test_arguments_are_checked():
    with pytest.raises(TypeError, match="model_config must be a transformers PreTrainedConfig, got dict"):
        KittyCache({})
    with pytest.raises(TypeError, match="config must be a KittyConfig"):
        KittyCache(tiny_config("llama"), 3)
    with pytest.raises(ValueError, match="head_dim must be a multiple of 16, got 24"):
        KittyCache(LlamaConfig(hidden_size=96, num_attention_heads=4, num_hidden_layers=1))
    with pytest.raises(ValueError, match="max_length must"):
        KittyCache(tiny_config("llama"), max_length=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_plans_are_those_of_the_stock_cache(family):
    config = tiny_config(family)
    stock = DynamicCache(config=config)
    assert [plan.window for plan in layer_plans(config)] == [
        getattr(layer, "sliding_window", None) for layer in stock.layers
    ]
    assert KittyCache(config).is_sliding == stock.is_sliding


def test_a_configuration_without_kv_heads_is_multi_head():
    cache = KittyCache(
        GPTNeoXConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=3), KittyConfig(skip_layers=(1,))
    )
    assert len(cache) == 3
