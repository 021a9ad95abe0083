"""What a recording keeps and for how long, on the CPU: "recording" runs the step there, and "replaying" it does nothing."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kitty_compile
from kitty_compile.huggingface.cache import KittyCache
from kitty_compile.huggingface.decode_graph import DecodeGraph
from kitty_compile.huggingface.support import cache_argument
from kitty_compile.testing import random_ids, tiny_model

PROMPT = 200


class Graph:
    def replay(self):
        pass


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    return kitty_compile.apply(tiny_model("llama"))


def begin(model, cache, token):
    """A step as ``forward`` begins it where a graph can be recorded."""
    arguments = {"input_ids": token, "use_cache": True, cache_argument(model): cache}
    step = vars(model)["forward"]._begin((), arguments, is_traced=True)
    assert step is not None
    return step


def record(model, cache, token):
    """The step's output, by a replay of its recording."""
    forward, step = vars(model)["forward"], begin(model, cache, token)
    output = forward.function(**forward._start_recording(step))
    forward._stop_recording(step, output)
    assert forward._is_recorded(step)
    return forward._replay(step)


def prompted(model):
    return model(random_ids(1, PROMPT))[cache_argument(model)]


@torch.no_grad()
def test_a_replayed_step_returns_its_own_cache(model):
    token = random_ids(1, 1, seed=3)
    expected = kitty_compile.apply(tiny_model("llama"), compile=False)
    expected = expected(token, **{cache_argument(expected): prompted(expected)})
    cache = prompted(model)
    output = record(model, cache, token)
    assert output[cache_argument(model)] is cache
    assert torch.equal(output.logits, expected.logits)
    assert type(output) is type(expected)
    assert cache.lengths.tolist() == [PROMPT + 1]


@torch.no_grad()
def test_a_recording_does_not_keep_its_cache_and_goes_at_the_next_prompt(model):
    cache, graph = prompted(model), vars(model)["forward"].graph
    record(model, cache, random_ids(1, 1))
    prompted(model)
    assert graph.recorded is not None  # its cache lives
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    prompted(model)
    assert graph.recorded is None


@torch.no_grad()
def test_every_generate_records_anew_but_an_assistants_calls_do_not(model):
    graph = vars(model)["forward"].graph
    ids, options = random_ids(1, PROMPT), {"max_new_tokens": 2, "assistant_confidence_threshold": 0.0}
    for is_assistant in (True, False):
        cache = prompted(model)
        record(model, cache, random_ids(1, 1))
        model.generate(ids, is_assistant=is_assistant, **options)
        assert (graph.recorded is not None) == is_assistant


@torch.no_grad()
def test_generate_lets_go_of_its_cache(model):
    model.generate(random_ids(1, PROMPT), max_new_tokens=3, do_sample=False)
    assert vars(model)["_kitty_attachment"].latest_cache() is None


def test_a_copy_of_a_model_records_its_own(model):
    step = vars(model)["forward"]
    step.graph.num_captures = 3
    state = step.__getstate__()
    assert isinstance(state["graph"], DecodeGraph)
    assert state["graph"].num_captures == 0


class Attends(TorchDispatchMode):
    """Counts the operators of this project."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "kitty":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.no_grad()
def test_a_layers_step_is_one_operator_whether_it_seals_or_not(family):
    model = kitty_compile.apply(tiny_model(family))
    cache = KittyCache(model.config, max_length=PROMPT + 140)
    name = cache_argument(model)
    model(random_ids(2, PROMPT), **{name: cache})
    num_paged = sum(not layer.is_sliding for layer in cache.layers)
    sealed = cache.pages_in_use
    for column in range(PROMPT, PROMPT + 140):
        with Attends() as attends:
            model(random_ids(2, 1, seed=column), **{name: cache})
        assert attends.names.count("kitty::attend") == num_paged
        assert set(attends.names) <= {"kitty::attend", "kitty::attend_window"}
    assert cache.pages_in_use > sealed
