"""Decode steps as one CUDA graph: the same tokens as eager steps, one capture per cache, no step that waits for the device."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import transformers

import kitty_compile
from kitty_compile import testing

pytestmark = pytest.mark.gpu

FAMILIES = ("llama", "qwen3", "mistral-windowed", "gemma2", "gpt-neox")


def build(family: str):
    return testing.tiny_model(family).to("cuda", torch.bfloat16).eval()


def prompt(batch: int, length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 60, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, : 7 * row] = 0
    return {"input_ids": ids.cuda(), "attention_mask": mask.cuda()}


def generate(model, inputs, **kwargs):
    options = {"max_new_tokens": 300, "min_new_tokens": 300, "do_sample": False, "pad_token_id": 0} | kwargs
    return model.generate(**inputs, **options)


def graph_of(model):
    return vars(model)["forward"].graph


@pytest.mark.parametrize("family", FAMILIES)
def test_the_graph_generates_what_eager_steps_do(family):
    tokens = {}
    for mode in (False, "auto"):
        model = build(family)
        kitty_compile.apply(model, compile=mode)
        tokens[mode] = generate(model, prompt(3, 60)), generate(model, prompt(2, 200, seed=1))
    assert graph_of(model).refusal is None
    assert graph_of(model).num_captures == 2
    for eager, graphed in zip(tokens[False], tokens["auto"], strict=True):
        assert torch.equal(eager, graphed)


def test_beams_reorder_between_replays():
    tokens = {}
    for mode in (False, "auto"):
        model = build("llama")
        kitty_compile.apply(model, compile=mode)
        tokens[mode] = generate(model, prompt(2, 150), num_beams=3, max_new_tokens=120, min_new_tokens=120)
    assert torch.equal(tokens[False], tokens["auto"])


def test_two_caches_take_turns_and_growth_captures_anew():
    logits = {}
    for mode in (False, "auto"):
        model = build("llama")
        kitty_compile.apply(model, compile=mode)
        caches = [kitty_compile.KittyCache(model.config), kitty_compile.KittyCache(model.config)]
        name = vars(model)["_kitty_attachment"].cache_argument
        rows = []
        with torch.no_grad():
            for index, cache in enumerate(caches):
                rows.append(model(prompt(1, 100 + index)["input_ids"], **{name: cache}).logits[:, -1])
            for step in range(400):
                cache = caches[step // 3 % 2]
                ids = torch.full((1, 1), 3 + step % 50, device="cuda")
                rows.append(model(ids, **{name: cache}).logits[:, -1])
        logits[mode] = torch.cat(rows)
    assert torch.equal(logits[False], logits["auto"])


def test_replays_do_not_wait_for_the_device():
    model = build("llama")
    kitty_compile.apply(model)
    name = vars(model)["_kitty_attachment"].cache_argument
    cache = kitty_compile.KittyCache(model.config, max_length=1024)
    ids = torch.full((2, 1), 7, device="cuda")
    mask = torch.ones(2, 64, dtype=torch.long, device="cuda")
    with torch.no_grad():
        model(ids.expand(2, 64), attention_mask=mask, **{name: cache})
        for step in range(300):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            if step == 3:
                torch.cuda.set_sync_debug_mode("error")
            model(ids, attention_mask=mask, position_ids=ids, **{name: cache})
    torch.cuda.set_sync_debug_mode("default")
    assert graph_of(model).num_captures == 1
    assert cache.lengths.tolist() == [364, 364]


def test_what_changed_between_two_generates_is_seen():
    tokens = {}
    for mode in (False, "auto"):
        model = build("llama")
        kitty_compile.apply(model, compile=mode)
        name = vars(model)["_kitty_attachment"].cache_argument
        inputs = prompt(1, 60)
        first = generate(model, inputs, max_new_tokens=40, min_new_tokens=40, return_dict_in_generate=True)
        hook = model.model.layers[0].register_forward_hook(lambda module, args, output: output * 2)
        held = {"input_ids": first.sequences, name: first[name]}
        changed = [
            generate(model, inputs, max_new_tokens=40, min_new_tokens=40),
            generate(model, held, max_new_tokens=40, min_new_tokens=40),
        ]
        hook.remove()
        tokens[mode] = [first.sequences, *changed, generate(model, inputs, max_new_tokens=40, min_new_tokens=40)]
    assert graph_of(model).num_captures == 4
    for eager, graphed in zip(tokens[False], tokens["auto"], strict=True):
        assert torch.equal(eager, graphed)
    assert not torch.equal(tokens[False][0], tokens[False][1])


def test_memory_goes_with_the_cache():
    model = build("llama")
    kitty_compile.apply(model)
    generate(model, prompt(2, 60), max_new_tokens=20, min_new_tokens=20)
    assert graph_of(model).num_captures == 1
    assert vars(model)["_kitty_attachment"].latest_cache() is None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        generate(model, prompt(2, 60), max_new_tokens=20, min_new_tokens=20)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


def test_a_step_that_cannot_be_captured_runs_eagerly(caplog):
    model = build("llama")
    kitty_compile.apply(model)
    layer = model.model.layers[0].mlp
    original = layer.forward
    layer.forward = lambda hidden: original(hidden) * float(hidden.new_ones(1).item())
    tokens = generate(model, prompt(1, 40), max_new_tokens=20, min_new_tokens=20)
    assert tokens.shape == (1, 60)
    assert graph_of(model).refusal is not None
    assert "without a CUDA graph" in caplog.text
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_the_signature_is_the_models():
    model = build("llama")
    import inspect

    expected = inspect.signature(model.forward)
    kitty_compile.apply(model)
    assert inspect.signature(model.forward) == expected
    assert "forward" not in vars(kitty_compile.remove(model))
    assert isinstance(model, transformers.PreTrainedModel)
