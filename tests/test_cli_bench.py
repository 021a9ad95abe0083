"""`kitty-compile bench` on tiny random models: figures that add up, bad input, and a model that is left as it was."""

import pytest
import torch
from transformers import DynamicCache

import kitty_compile
from kitty_compile import benchmarking, loading
from kitty_compile.benchmarking import Settings
from kitty_compile.config import KittyConfig
from kitty_compile.huggingface.hooks import ATTACHMENT
from kitty_compile.testing import random_ids, tiny_config, tiny_model
from tests.test_cli import assert_one_line_error, invoke, invoke_json

LENGTH, LAYERS, KV_HEADS, HEAD_DIM = 300, 2, 2, 16
MEMORY = 1e7
OWN_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4 * LENGTH  # a row in float32


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    return str(folder)


@pytest.fixture
def model():
    return tiny_model("llama")


def settings(*batches, seconds=600.0):
    return Settings(LENGTH, batches, steps=2, seconds=seconds)


def kitty_row_bytes(preset):
    cache = kitty_compile.KittyCache(tiny_config("llama"), preset, max_length=LENGTH)
    cache.early_initialization(1, KV_HEADS, HEAD_DIM, torch.float32, "meta")
    return cache.nbytes


def test_table_and_conclusion(model_folder):
    result = invoke("bench", model_folder, "--length", LENGTH, "--steps", 2, "--memory", MEMORY)
    assert result.exit_code == 0, result.output
    for part in ("batch 1: cache", "own cache had 16 bits", "first token after 292 tokens", "decode step", "tokens/s"):
        assert part in result.stdout
    for part in ("largest batch", "DynamicCache", "float32", torch.__version__, "preset kitty"):
        assert part in result.stdout
    last = result.stdout.strip().splitlines()[-1]
    assert last.startswith(f"At {LENGTH} tokens and batch 1 16-bit keys and values take ")
    assert f"{OWN_BYTES / 2 / kitty_row_bytes('kitty'):.2f} times the memory of the 2-bit cache" in last


@pytest.mark.parametrize("extra", [(), ("--random-weights",)])
def test_json_figures_add_up(model_folder, extra):
    found = invoke_json(
        "bench", model_folder, "--length", LENGTH, "--steps", 3, "--batch", 2, "--batch", 1, "--memory", MEMORY,
        "--preset", "kitty-pro", *extra,
    )  # fmt: skip
    assert [row["batch"] for row in found["rows"]] == [2, 1]
    assert found["prompt_tokens"] + 3 + benchmarking.TURNS * benchmarking.WARM_UP_STEPS == LENGTH
    own, kitty = OWN_BYTES, kitty_row_bytes("kitty-pro")
    for row in found["rows"]:
        batch, size = row["batch"], row["cache_bytes"]
        assert size == {"kitty": batch * kitty, "own": batch * own, "ratio": pytest.approx(own / kitty)}
        assert row["own_cache_bytes_at_16_bits"] == batch * own / 2
        for name in ("first_token_ms", "step_ms"):
            assert row[name]["kitty"] > 0
            assert row[name]["ratio"] == pytest.approx(row[name]["own"] / row[name]["kitty"])
        for name in ("kitty", "own"):
            assert row["tokens_per_second"][name] == pytest.approx(1e3 * batch / row["step_ms"][name])
            assert 1 <= row["prefill_runs"][name] <= benchmarking.PREFILL_RUNS
        assert row["tokens_per_second"]["ratio"] == pytest.approx(row["step_ms"]["ratio"])
        assert row["out_of_memory"] == []
    best = found["best_tokens_per_second"]
    assert best["kitty"] == max(row["tokens_per_second"]["kitty"] for row in found["rows"])
    assert best["ratio"] == pytest.approx(best["kitty"] / best["own"])
    largest = {"kitty": MEMORY // kitty, "own": MEMORY // own}
    assert found["largest_batch"] == {**largest, "ratio": pytest.approx(largest["kitty"] / largest["own"])}
    assert found["not_run"] == []
    assert (found["preset"], found["dtype"], found["kitty_steps"]) == ("kitty-pro", "float32", "eagerly")


def test_without_memory_no_largest_batch_is_told(model):
    found = benchmarking.run(model, KittyConfig(), settings(1)).as_dict()
    assert found["memory_bytes"] is None
    assert found["largest_batch"] is None


def test_the_model_runs_on_both_caches_and_is_left_as_it_was(model, monkeypatch):
    ids = random_ids(1, 40)
    before, logits = dict(vars(model)), model(ids).logits
    seen = set()
    timed = benchmarking._Side._timed

    def spy(side, ids):
        seen.add((type(side.cache), ATTACHMENT in vars(model)))
        return timed(side, ids)

    monkeypatch.setattr(benchmarking._Side, "_timed", spy)
    benchmarking.run(model, KittyConfig(), settings(1))
    assert seen == {(DynamicCache, False), (kitty_compile.KittyCache, True)}
    assert vars(model) == before
    assert model.config._attn_implementation == "sdpa"
    assert not model.get_decoder()._forward_pre_hooks
    assert torch.equal(model(ids).logits, logits)


def test_both_caches_end_at_the_length(model, monkeypatch):
    lengths = []
    cost = benchmarking._Side.cost

    def spy(side):
        lengths.append(side.cache.get_seq_length())
        return cost(side)

    monkeypatch.setattr(benchmarking._Side, "cost", spy)
    for steps in (1, 4):
        benchmarking.run(model, KittyConfig(), Settings(LENGTH, (1,), steps=steps))
    assert lengths == 4 * [LENGTH]


def test_batches_past_the_time_are_told_and_not_run(model_folder):
    arguments = ("--length", LENGTH, "--steps", 1, "--batch", 1, "--batch", 2, "--seconds", 1e-3)
    found = invoke_json("bench", model_folder, *arguments)
    assert [row["batch"] for row in found["rows"]] == [1]
    assert [entry["batch"] for entry in found["not_run"]] == [2]
    assert "--seconds" in found["not_run"][0]["reason"]
    assert "batch 2: not run" in invoke("bench", model_folder, *arguments).stdout


class Memory:
    """Fails like a device on which one row of the model's own cache fits, and ``kitty_rows`` of the 2-bit one."""

    def __init__(self, monkeypatch, kitty_rows, error):
        self.kitty_rows, self.error, self.held = kitty_rows, error, {}
        timed, clear = benchmarking._Side._timed, benchmarking._Side.clear
        monkeypatch.setattr(benchmarking._Side, "_timed", lambda side, ids: self.take(side, ids) or timed(side, ids))
        monkeypatch.setattr(benchmarking._Side, "clear", lambda side: self.held.pop(id(side), None) or clear(side))

    def take(self, side, ids):
        self.held[id(side)] = ids.shape[0] / (1 if side.config is None else self.kitty_rows)
        if sum(self.held.values()) > 1:
            raise self.error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=["cuda", "cpu"],
)
def test_a_batch_out_of_memory_does_not_end_the_run(model, monkeypatch, error):
    Memory(monkeypatch, kitty_rows=2, error=error)
    result = benchmarking.run(model, KittyConfig(), settings(3, 2, 1))
    found = result.as_dict()
    # One row of either cache fits, though not both at once.
    assert [row["out_of_memory"] for row in found["rows"]] == [["kitty", "own"], ["own"], []]
    assert found["rows"][0]["step_ms"] == {"kitty": None, "own": None, "ratio": None}
    assert found["rows"][1]["cache_bytes"] == {"kitty": 2 * kitty_row_bytes("kitty"), "own": None, "ratio": None}
    assert found["best_tokens_per_second"]["own"] == found["rows"][2]["tokens_per_second"]["own"]
    assert found["row_bytes"]["own"] == OWN_BYTES
    assert ATTACHMENT not in vars(model)


def test_out_of_memory_is_said_in_the_table(model_folder, monkeypatch):
    Memory(monkeypatch, kitty_rows=2, error=torch.OutOfMemoryError("CUDA out of memory"))
    arguments = ("bench", model_folder, "--length", LENGTH, "--steps", 2, "--memory", MEMORY)
    result = invoke(*arguments, "--batch", 1, "--batch", 2)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("out of memory") == 4  # cache, first token, step, tokens/s
    assert "tokens/s of any batch that ran are" in result.stdout
    alone = invoke(*arguments, "--batch", 3)
    assert alone.exit_code == 0, alone.output
    assert alone.stdout.strip().endswith("no batch ran on both caches: memory ran out")


def test_other_errors_are_not_taken_for_missing_memory(model, monkeypatch):
    Memory(monkeypatch, kitty_rows=2, error=RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="mat1"):
        benchmarking.run(model, KittyConfig(), settings(3))
    assert ATTACHMENT not in vars(model)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--batch", 0), "batch must be positive, got 0"),
        (("--batch", 1, "--batch", -2), "batch must be positive, got -2"),
        (("--steps", 0), "steps must be positive, got 0"),
        (("--seconds", -1), "seconds must be positive"),
        (("--memory", "nan"), "memory must be positive"),
        (("--length", 0), "length must be positive"),
        (("--length", 22), "length must be more than 22 decode steps, got 22"),
        (("--preset", "dog"), "preset must be one of"),
    ],
)
def test_bad_input_is_told_before_the_model_is_loaded(model_folder, arguments, part):
    assert_one_line_error(invoke("bench", model_folder, *arguments), part)


def assert_last_line(result, part):
    assert result.exit_code == 2, result.output
    assert part in result.stderr.strip().splitlines()[-1]
    assert result.stdout == ""


def test_length_must_fit_the_models_positions(model_folder):
    assert_last_line(invoke("bench", model_folder, "--length", 1025), "the model's 1024 positions, got 1025")
    model = loading.load_model(model_folder)
    assert Settings().for_model(model).length == 1024
    model.config.max_position_embeddings = 512
    assert Settings().for_model(model) == Settings(512, (1,))


def test_models_that_gain_nothing_are_refused_with_the_reason(model_folder, tmp_path):
    tiny_model("mistral-windowed").save_pretrained(tmp_path / "windowed")
    assert_last_line(invoke("bench", tmp_path / "windowed"), "sliding window of 40 columns, kept in a raw ring")
    config = tiny_config("llama")
    config.hidden_size, config.head_dim = 32, 8
    config.save_pretrained(tmp_path / "narrow")
    assert_last_line(
        invoke("bench", tmp_path / "narrow", "--random-weights"), "head_dim must be a multiple of 16, got 8"
    )
    assert_last_line(invoke("bench", tmp_path), "config.json")
    assert_last_line(invoke("bench", model_folder, "--dtype", "int8"), "dtype must be one of")
