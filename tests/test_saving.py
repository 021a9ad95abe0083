"""Caches as files: what is loaded goes on bit for bit as what was saved."""

import copy
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import kitty_compile
from kitty_compile import KittyCache, KittyConfig, saving
from kitty_compile.cache import PagedCache
from kitty_compile.huggingface.support import cache_argument
from kitty_compile.testing import random_ids, tiny_model
from tests.cache_driver import (
    Tokens,
    equal,
    goes_on_alike,
    kept_bytes,
    kept_tensors,
    make_cache,
    padded,
    poison_what_nobody_may_read,
    read,
    same,
    snapshot,
)
from tests.cache_model import plans_of

TOTAL = 900
# K pages complete at 160, 288 and 416 tokens, V pages are packed 128 tokens later.
LENGTHS = (1, 31, 160, 290, 425)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "prefix.kitty"


def saved_and_loaded(cache, path, **options):
    saving.save(cache, path)
    return saving.load(path, **options)


@pytest.mark.parametrize("preset", KittyConfig.presets())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_preset_and_dtype(path, preset, dtype):
    cache, tokens = PagedCache(plans_of(None, 40), KittyConfig.preset(preset)), Tokens(480, dtype=dtype)
    tokens.feed(cache, 300)
    loaded = saved_and_loaded(cache, path)
    assert (loaded.config, loaded.plans, loaded.max_length) == (cache.config, cache.plans, None)
    assert loaded.lengths.tolist() == [300, 300]
    assert loaded.pages_in_use == cache.pages_in_use == 4
    assert goes_on_alike(cache, loaded, tokens, 301, 320, 470)


def act(cache, action, argument):
    """One change between forwards; its error where it has one."""
    try:
        getattr(cache, action)(argument)
    except ValueError as error:
        return str(error)
    return None


def rows_of(tokens, action, argument):
    batch = len(tokens.real)
    index = {"reorder": argument, "select": argument, "repeat": torch.arange(batch).repeat_interleave(2)}
    return tokens.rows(index[action]) if action in index else tokens


@st.composite
def action_of(draw, batch):
    """(name, argument) of what can happen between forwards."""
    rows = st.integers(0, batch - 1)
    name = draw(st.sampled_from(["crop", "reorder", "repeat", "select", "free"][: None if batch < 4 else 2]))
    if name == "crop":
        return name, draw(st.integers(0, 40) | st.sampled_from([150, 1000]))
    if name == "repeat":
        return name, 2
    chosen = draw(st.lists(rows, min_size=1, max_size=4 if name == "reorder" else batch, unique=name == "free"))
    return name, chosen if name == "free" else torch.tensor(chosen)


@given(data=st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_happens_before_and_after(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("saving") / "cache"
    cache = make_cache(
        *data.draw(st.sampled_from([(None, None), (None, 5), (60, None), (40, 70)])),
        max_length=data.draw(st.sampled_from([None, TOTAL])),
        key_bits=data.draw(st.sampled_from([2, 2, 4, 16])),
        value_bits=data.draw(st.sampled_from([2, 4, 16])),
        sink_length=data.draw(st.sampled_from([0, 3, 32])),
        value_window=data.draw(st.sampled_from([0, 20, 128])),
        rollback_window=data.draw(st.sampled_from([0, 8, 32])),
        selection=data.draw(st.sampled_from(["magnitude", "random"])),
        skip_layers=data.draw(st.sampled_from([(), (1,)])),
    )
    tokens = Tokens(
        TOTAL,
        batch=data.draw(st.integers(1, 3)),
        heads=data.draw(st.integers(1, 2)),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )
    if data.draw(st.booleans()):
        padded(tokens, data.draw(st.integers(0, 9)))
    pair = [cache]
    tokens.feed(cache, data.draw(st.sampled_from(LENGTHS)))
    saved_at = data.draw(st.integers(0, 4))
    for step in range(5):
        if step == saved_at:
            pair = [cache, saved_and_loaded(cache, path)]
            saving.save(pair[1], path.with_suffix(".again"))
            assert path.read_bytes() == path.with_suffix(".again").read_bytes()
        name, argument = data.draw(action_of(len(tokens.real)))
        argument = max(cache.get_seq_length() - argument, 0) if name == "crop" else argument
        assert len({act(each, name, argument) for each in pair}) == 1
        tokens = rows_of(tokens, name, argument)
        start = cache.get_seq_length()
        stop = min(start + data.draw(st.sampled_from([1, 7, 40, 131])), TOTAL - 1)
        outputs = [tokens.attend(each, start, stop) for each in pair]
        assert equal(outputs[0], outputs[-1])
        assert equal(read(pair[0], tokens), read(pair[-1], tokens))
        assert pair[0].lengths.tolist() == pair[-1].lengths.tolist()
        assert pair[0].pages_in_use == pair[-1].pages_in_use


def test_crop_reaches_as_far_back_as_before(path):
    """The counters of earlier crops come along: what was 20 columns longer can go back by 12 more without loss."""
    cache, tokens = make_cache(None, 40), Tokens(400)
    tokens.feed(cache, 300)
    cache.crop(280)
    loaded = saved_and_loaded(cache, path)
    with pytest.raises(
        ValueError, match="columns must go back by at most rollback_window=32 from the 300 that were held"
    ):
        loaded.crop(267)
    loaded.crop(268)
    cache.crop(268)
    assert goes_on_alike(cache, loaded, tokens, 390)


def test_a_deep_crop_refills_alike(path):
    cache, tokens = make_cache(), padded(Tokens(700))
    tokens.feed(cache, 600)
    loaded = saved_and_loaded(cache, path)
    for each in (cache, loaded):
        each.crop(430)
    assert goes_on_alike(cache, loaded, tokens, 431, 690)


def test_a_bound_stays_and_can_be_set(path):
    cache, tokens = make_cache(max_length=500), Tokens(900)
    tokens.feed(cache, 300)
    loaded = saved_and_loaded(cache, path)
    assert loaded.nbytes == cache.nbytes
    tokens.feed(loaded, 500)
    with pytest.raises(ValueError, match="columns must not exceed max_length=500"):
        loaded.begin_call(1)
    longer = saving.load(path, max_length=800)
    pool = longer.layers[0].state.key_pages.data_ptr()
    assert equal(tokens.attend(cache, 300, 500), tokens.attend(longer, 300, 500))
    tokens.feed(longer, 800)
    assert longer.layers[0].state.key_pages.data_ptr() == pool
    for bound in (299, 0, 400.0):
        with pytest.raises(ValueError, match=f"max_length must be an int from 300 to 2147483647, got {bound}"):
            saving.load(path, max_length=bound)


def test_only_pages_in_use_are_written(path):
    cache, tokens = make_cache(max_length=4000), Tokens(420)
    tokens.feed(cache, 420)
    cache.repeat(2)
    cache.select(torch.tensor([0, 1]))
    saving.save(cache, path)
    layout = cache.layers[0].page_layout
    tensors = load_file(path)
    # Both rows are the first one by now, and share its pages.
    assert tensors["page_table"].tolist() == [[0, 1, 2]] * 2
    assert tensors["layers.0.key_pages"].shape == (3, layout.key_page_bytes)
    assert tensors["layers.1.value_pages"].shape == (3, layout.value_page_bytes)
    assert path.stat().st_size < cache.nbytes / 3
    loaded = saving.load(path)
    assert kept_bytes(loaded) == loaded.nbytes < cache.nbytes


def test_memory_that_nobody_wrote_stays_out_of_the_file(path):
    """The newest page of K has no V beside it yet, and what lies there is another's."""
    files, tokens = [], Tokens(330)
    for byte in (0x00, 0xAB):
        cache = tokens.feed(make_cache(max_length=500), 1)
        for layer in cache.layers:
            layer.state.key_pages.fill_(byte)
            layer.state.value_pages.fill_(byte)
        saving.save(tokens.feed(cache, 330), path)
        files.append(path.read_bytes())
    assert files[0] == files[1]


def test_what_nobody_may_read_does_not_matter(path):
    cache, tokens = make_cache(None, None), padded(Tokens(600))
    tokens.feed(cache, 450)
    loaded = saved_and_loaded(cache, path)
    poison_what_nobody_may_read(loaded)
    assert goes_on_alike(cache, loaded, tokens, 451, 460, 590)


def test_a_cache_without_tokens(path):
    loaded = saved_and_loaded(make_cache(None, 40, max_length=700, key_bits=4), path)
    assert (loaded.batch_size, loaded.nbytes, loaded.max_length, loaded.config.key_bits) == (-1, 0, 700, 4)
    fresh, tokens = make_cache(None, 40, max_length=700, key_bits=4), Tokens(500)
    assert goes_on_alike(fresh, loaded, tokens, 200, 400)
    fresh.reset()
    loaded = saved_and_loaded(fresh, path)
    assert (loaded.batch_size, loaded.lengths.tolist()) == (2, [0, 0])
    assert goes_on_alike(fresh, loaded, tokens, 300, 400)


def test_freed_rows_and_pads(path):
    cache, tokens = make_cache(None, 40), padded(Tokens(600, batch=3))
    # The column map has room for more by now.
    tokens.feed(cache, 280, 300)
    cache.free([1])
    loaded = saved_and_loaded(cache, path)
    assert loaded.lengths.tolist() == cache.lengths.tolist()
    assert loaded.lengths[1] == 0
    assert goes_on_alike(cache, loaded, tokens, 500, 501)


def test_saving_changes_nothing_and_loading_is_independent_of_the_file(path):
    cache, tokens = make_cache(None, 40), padded(Tokens(400))
    tokens.feed(cache, 300)
    before = snapshot(cache)
    loaded = saved_and_loaded(cache, path)
    assert same(before, snapshot(cache))
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert goes_on_alike(cache, loaded, tokens, 390)


def test_what_inference_mode_loaded_goes_on_outside_of_it(path):
    cache, tokens = make_cache(None, 40), padded(Tokens(600))
    with torch.inference_mode():
        tokens.feed(cache, 300)
        loaded = saved_and_loaded(cache, path)
    assert not any(tensor.is_inference() for tensor in kept_tensors(loaded))
    assert goes_on_alike(cache, loaded, tokens, 500)
    loaded.crop(480)


# ---- another process, and whole models


def test_another_process_without_transformers_goes_on(path):
    cache, tokens = make_cache(None, 40), padded(Tokens(460))
    tokens.feed(cache, 300)
    saving.save(cache, path)
    cache.repeat(3)
    tokens = tokens.rows(torch.tensor([0, 0, 0, 1, 1, 1]))
    new = {f"{name}{layer}": side[layer] for name, side in vars(tokens).items() if name != "real" for layer in (0, 1)}
    save_file({name: side[:, :, 300:].contiguous() for name, side in new.items()}, path.with_suffix(".new"))
    save_file({"real": tokens.real[:, 300:].contiguous()}, path.with_suffix(".real"))
    code = (
        "import sys\n"
        "sys.modules['transformers'] = None\n"
        "from safetensors.torch import load_file, save_file\n"
        "from kitty_compile import saving\n"
        "path = sys.argv[1]\n"
        "new, real = load_file(path + '.new'), load_file(path + '.real')['real']\n"
        "cache = saving.load(path + '.kitty')\n"
        "cache.repeat(3)\n"
        "cache.begin_call(160, real)\n"
        "sides = [[new[f'{name}{layer}'] for name in ('query', 'key', 'value')] for layer in (0, 1)]\n"
        "outputs = {str(layer): cache.attend(*sides[layer], layer, scale=0.25) for layer in (0, 1)}\n"
        "cache.end_call()\n"
        "save_file(outputs, path + '.out')\n"
    )
    stem = str(path.with_suffix(""))
    done = subprocess.run([sys.executable, "-c", code, stem], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outputs = load_file(stem + ".out")
    assert equal(tokens.attend(cache, 300, 460), [outputs["0"], outputs["1"]])


def generate(model, ids, cache):
    return model.generate(ids, **{cache_argument(model): cache}, max_new_tokens=20, do_sample=False)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.no_grad()
def test_a_prefix_of_a_model_is_forked_and_goes_on_with_the_same_tokens(path, family):
    model = kitty_compile.apply(tiny_model(family))
    prefix, turns = random_ids(1, 280), random_ids(3, 5, seed=2)
    cache = KittyCache(model.config)
    model(prefix, **{cache_argument(model): cache})
    cache.save(path)
    ids = torch.cat([prefix.expand(3, -1), turns], dim=1)
    results = []
    for each in (cache, KittyCache.load(path, model.config), KittyCache.load(path, max_length=400)):
        assert type(each) is KittyCache
        each.repeat(3)
        results.append(generate(model, ids, each))
    assert results[0].shape == (3, 305)
    assert len(results[0][:, 285:].unique(dim=0)) > 1
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@torch.no_grad()
def test_a_model_that_was_not_applied_goes_on(path):
    model = tiny_model("llama")
    cache = KittyCache(model.config, "kitty-pro")
    model(random_ids(2, 300), **{cache_argument(model): cache})
    cache.save(path)
    loaded = KittyCache.load(path)
    assert loaded.config == cache.config
    ids = random_ids(2, 30, seed=3)
    logits = [model(ids, **{cache_argument(model): each}).logits for each in (cache, loaded)]
    assert torch.equal(*logits)


@torch.no_grad()
def test_a_length_that_generate_chose_does_not_bound_what_is_loaded(path):
    model = kitty_compile.apply(tiny_model("llama"))
    ids = random_ids(1, 200)
    result = model.generate(ids, max_new_tokens=10, do_sample=False, return_dict_in_generate=True)
    cache = getattr(result, cache_argument(model), None) or result.past_key_values
    assert cache.max_length is not None
    cache.save(path)
    loaded = KittyCache.load(path)
    assert loaded.max_length is None
    assert torch.equal(generate(model, result.sequences, loaded), generate(model, result.sequences, copy.copy(cache)))
