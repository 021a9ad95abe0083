"""A cache that was saved on a CUDA device goes on there bit for bit, and its pages are the same on any device."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import kitty_compile
from kitty_compile import KittyCache, testing
from kitty_compile.huggingface.support import cache_argument

pytestmark = pytest.mark.gpu


@torch.no_grad()
def test_a_prefix_is_forked_on_the_device(tmp_path):
    model = kitty_compile.apply(testing.tiny_model("llama").to("cuda", torch.bfloat16))
    prefix, path = testing.random_ids(1, 300).cuda(), tmp_path / "prefix.kitty"
    cache = KittyCache(model.config, max_length=400)
    model(prefix, **{cache_argument(model): cache})
    cache.save(path)
    on_cpu = KittyCache.load(path)
    on_cpu.save(path.with_suffix(".cpu"))
    assert path.read_bytes() == path.with_suffix(".cpu").read_bytes()
    ids = torch.cat([prefix.expand(3, -1), testing.random_ids(3, 4, seed=1).cuda()], dim=1)
    results = []
    for each in (cache, KittyCache.load(path, model.config, device="cuda")):
        each.repeat(3)
        results.append(model.generate(ids, **{cache_argument(model): each}, max_new_tokens=40, do_sample=False))
    assert torch.equal(*results)
