import copy
import gc

import pytest
import torch

from kitty_compile.cache import PagedCache
from kitty_compile.config import KittyConfig
from kitty_compile.layers import LayerPlan
from kitty_compile.phantoms import PhantomStore, is_dense_phantom

CONFIG = KittyConfig(sink_length=4, value_window=8, rollback_window=8)


def feed(cache, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    cache.begin_call(columns)
    for layer in range(len(cache.plans)):
        key, value = (torch.randn(2, 2, columns, 16, generator=generator) for _ in range(2))
        cache.store(key, value, layer)


def filled(columns=20):
    cache = PagedCache([LayerPlan(), LayerPlan()], CONFIG)
    feed(cache, columns, seed=0)
    return cache


def make(store, cache):
    return store.make(cache, [(2, 2, cache.columns, 16)] * 4, torch.float32, torch.device("cpu"))


def test_phantoms_have_a_shape_and_no_memory():
    store, cache = PhantomStore(), filled()
    phantoms = make(store, cache)
    assert all(phantom.shape == (2, 2, 20, 16) and phantom.isnan().all() for phantom in phantoms)
    assert len({phantom.untyped_storage().data_ptr() for phantom in phantoms}) == 1
    assert phantoms[0].untyped_storage().nbytes() <= 32
    assert store.resolve(phantoms, 20) is cache


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_dtype_is_nan(dtype):
    phantoms = PhantomStore().make(filled(), [(2, 2, 20, 16)] * 2, dtype, torch.device("cpu"))
    assert all(phantom.dtype == dtype and phantom.isnan().all() for phantom in phantoms)


def test_pages_go_with_the_last_phantom():
    store = PhantomStore()
    phantoms = make(store, filled())
    piece = phantoms[3][:, :, :5]
    del phantoms
    gc.collect()
    assert len(store._entries) == 1
    del piece
    assert len(store._entries) == 0


def test_the_latest_go_on_and_slices_go_back():
    store, cache = PhantomStore(), filled()
    phantoms = make(store, cache)
    assert store.resolve([phantom[:, :, :17] for phantom in phantoms], 17) is cache
    assert cache.columns == 17
    # What was cut off is gone for whoever held it.
    feed(cache, 3, seed=1)
    newer = make(store, cache)
    with pytest.raises(ValueError, match="must be the newest of their cache"):
        store.resolve(phantoms, 20)
    assert store.resolve(newer, 20) is cache


def test_older_phantoms_fork_while_newer_ones_are_held():
    store, cache = PhantomStore(), filled()
    older = make(store, cache)
    feed(cache, 1, seed=1)
    newer = make(store, cache)
    fork = store.resolve(older, 20)
    assert fork is not cache
    assert (fork.columns, cache.columns) == (20, 21)
    assert store.resolve(newer, 21) is cache
    # The fork is theirs from now on.
    assert store.resolve(older, 20) is fork


def test_older_phantoms_go_back_when_newer_ones_are_gone():
    store, cache = PhantomStore(), filled()
    older = make(store, cache)
    feed(cache, 1, seed=1)
    make(store, cache)
    assert store.resolve(older, 20) is cache
    assert cache.columns == 20


def test_deep_copies_fork():
    store, cache = PhantomStore(), filled()
    phantoms = make(store, cache)
    copies = copy.deepcopy(phantoms)
    fork = store.resolve(copies, 20)
    assert fork is not cache
    assert store.resolve(copies, 20) is fork
    assert store.resolve(phantoms, 20) is cache


def test_a_deep_copy_outlives_the_call_that_it_copied():
    store, cache = PhantomStore(), filled()
    phantoms = make(store, cache)
    copies = copy.deepcopy(phantoms)
    feed(cache, 5, seed=1)
    newer = make(store, cache)
    del phantoms
    fork = store.resolve(copies, 20)
    assert (fork.columns, cache.columns) == (20, 25)
    assert store.resolve(newer, 25) is cache


def test_a_copy_of_what_is_gone_is_refused():
    store = PhantomStore()
    phantoms = make(store, filled())
    copies = copy.deepcopy(phantoms)
    del phantoms
    gc.collect()
    with pytest.raises(ValueError, match="while their cache is held"):
        store.resolve(copies, 20)


def test_layers_must_be_those_of_one_call_in_their_order():
    store, cache = PhantomStore(), filled()
    phantoms, others = make(store, cache), make(store, filled())
    for mixture in ([*phantoms[:2], *others[2:]], phantoms[::-1]):
        with pytest.raises(ValueError, match="must be those of one call"):
            store.resolve(mixture, 20)


def test_what_was_gathered_from_phantoms_is_recognised():
    phantoms = make(PhantomStore(), filled())
    assert is_dense_phantom(phantoms[1].index_select(0, torch.tensor([1, 0])))
    assert is_dense_phantom(phantoms[1].clone(memory_format=torch.contiguous_format))
    assert not is_dense_phantom(phantoms[1])
    assert not is_dense_phantom(torch.full((2, 2, 20, 16), float("nan")))
    assert not is_dense_phantom(torch.randn(2, 2, 20, 16))
