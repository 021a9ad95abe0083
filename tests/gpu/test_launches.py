"""What decode steps cost the host and the device in launches: three kernels a layer, one recording, no wait."""

import collections

import pytest
import torch
from torch.profiler import ProfilerActivity

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import kitty_compile
from kitty_compile import testing

pytestmark = pytest.mark.gpu

STEP_KERNELS = ("seal_pages_kernel", "attend_step_kernel", "merge_splits_kernel")
OTHER_KERNELS = ("prefill_pages_kernel", "attend_residue_kernel", "append_kernel", "advance_kernel")
PROMPT, STEPS = 250, 320


def launched(run) -> collections.Counter:
    """How often each kernel of this project ran, in graphs too."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    names = (*STEP_KERNELS, *OTHER_KERNELS)
    return collections.Counter(event.name for event in profile.events() if event.name in names)


@torch.no_grad()
@pytest.mark.parametrize("compiles", [False, "auto"])
def test_a_layers_step_is_three_kernels_over_seals(compiles):
    model = testing.tiny_model("llama").to("cuda", torch.bfloat16).eval()
    kitty_compile.apply(model, compile=compiles)
    cache = kitty_compile.KittyCache(model.config, max_length=PROMPT + STEPS + 8)
    name = vars(model)["_kitty_attachment"].cache_argument
    token = torch.full((2, 1), 7, device="cuda")
    mask = torch.ones(2, PROMPT, dtype=torch.long, device="cuda")
    model(token.expand(2, PROMPT), attention_mask=mask, **{name: cache})

    def steps(count: int) -> None:
        nonlocal mask
        for _ in range(count):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            model(token, attention_mask=mask, position_ids=token, **{name: cache})

    def watched() -> None:
        # Two pages a row are completed on the way; a replayed step may not ask the device anything.
        torch.cuda.set_sync_debug_mode("error" if compiles else "default")
        try:
            steps(STEPS)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    steps(4)  # compiles and records
    found = launched(watched)
    layers = model.config.num_hidden_layers
    assert found == dict.fromkeys(STEP_KERNELS, layers * STEPS)
    graph = vars(model)["forward"].graph
    assert (graph.num_captures if graph else 0) == (1 if compiles else 0)
    assert cache.lengths.tolist() == [PROMPT + STEPS + 4] * 2
