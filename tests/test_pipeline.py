import logging
import pathlib
import shutil

import pytest
import torch

from kitty_compile.passes import pipeline
from kitty_compile.passes.normalize import normalize_program
from kitty_compile.passes.pipeline import analyze, pass_uuid
from kitty_compile.passes.records import MaskKind
from kitty_compile.testing import WINDOW, random_ids, tiny_model
from tests.graph_cases import Stack, capture, hidden, past_of
from tests.mask_cases import reading
from tests.test_classify_mask_refusals import alibi
from tests.test_match_attention import eager_mul, sdpa_causal
from tests.test_match_attention_refusals import tiled_heads
from tests.test_match_kv_update import cat

PROMPT = 50
FAMILIES = {
    "llama": ("sdpa", "eager"),
    "qwen3": ("sdpa", "eager"),
    "gemma2": ("eager",),
    "gpt-oss": ("eager",),
    "gpt-neox": ("sdpa", "eager"),
    "mistral-windowed": ("sdpa", "eager"),
}
CASES = [(family, implementation) for family, names in FAMILIES.items() for implementation in names]
SLIDING = {"gemma2": (0, 2), "gpt-oss": (0, 2), "mistral-windowed": (0, 1)}


def reports_of_generation(family, implementation, dynamic, padded=True):
    """A prefill and two decode steps on a stock cache; the second makes sizes symbolic."""
    model = tiny_model(family)
    model.set_attn_implementation(implementation)
    torch._dynamo.reset()
    reports = []

    def record(gm, example_inputs):
        reports.append(analyze(gm, example_inputs)[1])
        return gm.forward

    compiled = torch.compile(model, backend=record, dynamic=dynamic)
    ids, mask = random_ids(2, PROMPT), torch.ones(2, PROMPT, dtype=torch.long)
    mask[0, :7] = 0
    with torch.no_grad():
        inputs = {"attention_mask": mask} if padded else {}
        cache = compiled(input_ids=ids, use_cache=True, **inputs).past_key_values
        for _ in range(2):
            mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
            inputs = {"attention_mask": mask} if padded else {}
            cache = compiled(input_ids=ids[:, :1], past_key_values=cache, **inputs).past_key_values
    return reports


@pytest.mark.parametrize(
    ("family", "implementation", "dynamic"),
    [(*case, None) for case in CASES]
    + [
        pytest.param("gpt-oss", "eager", True, marks=pytest.mark.slow),
        ("mistral-windowed", "sdpa", True),
    ],
)
def test_every_layer_of_a_real_model(family, implementation, dynamic):
    prefill, *decodes = reports_of_generation(family, implementation, dynamic)
    sliding = SLIDING.get(family, ())
    layers = tiny_model(family).config.num_hidden_layers
    for report in (prefill, *decodes):
        assert report.failures == []
        assert [match.layer for match in report.matches] == list(range(layers))
        for match in report.matches:
            mask = report.mask_of(match)
            assert (mask.kind, mask.window) == (("sliding", WINDOW) if match.layer in sliding else ("causal", None))
            assert mask.padding is not None
            assert match.update.kind == "cat"
            assert (match.softcap is not None) == (family == "gemma2")
            assert (match.sinks is not None) == (family == "gpt-oss")
    assert all(match.update.key_past is None and match.num_columns == PROMPT for match in prefill.matches)
    assert all(match.update.key_past is not None and match.num_columns == 1 for match in decodes[0].matches)


def test_a_model_without_a_mask():
    prefill, *decodes = reports_of_generation("mistral-windowed", "sdpa", None, padded=False)
    for report in (prefill, *decodes):
        assert report.failures == []
        assert {(report.mask_of(match).window, report.mask_of(match).padding) for match in report.matches} == {
            (WINDOW, None)
        }


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss", "mistral-windowed"])
def test_an_exported_model(family):
    model = tiny_model(family)
    ids, mask = random_ids(2, PROMPT), torch.ones(2, PROMPT, dtype=torch.long)
    length = torch.export.Dim.DYNAMIC
    with torch.no_grad():
        program = torch.export.export(
            model,
            (),
            {"input_ids": ids, "attention_mask": mask, "use_cache": False},
            dynamic_shapes={"input_ids": {1: length}, "attention_mask": {1: length}, "use_cache": None},
            strict=False,
        )
    _, report = analyze(normalize_program(program))
    assert report.failures == []
    windows = [report.mask_of(match).window for match in report.matches]
    assert windows == [WINDOW if layer in SLIDING.get(family, ()) else None for layer in range(len(windows))]
    assert {match.update.kind for match in report.matches} == {"none"}


# ---- the report


def analyzed(attend, *extra, num_layers=1, columns=7):
    graph = capture("dynamo", Stack(attend, num_layers), hidden(columns=columns), *extra)
    return graph, analyze(graph.gm, graph.inputs)[1]


def test_counts_matches_and_failures():
    _, report = analyzed(sdpa_causal, num_layers=2)
    assert report.counts == {"causal": 2}
    assert len(report.matches) == 2
    _, report = analyzed(tiled_heads)
    assert report.counts == {"refused": 1}
    assert report.matches == []


def test_a_refused_mask_is_a_failure_with_its_reason():
    _, report = analyzed(reading(alibi))
    assert report.matches == []
    (failure,) = report.failures
    assert "position bias" in failure.reason
    assert failure.module_path == "layers.0"


def test_layers_that_share_a_mask_are_classified_once(monkeypatch):
    calls = []
    classify = pipeline.classify_mask

    def counted(match, order):
        calls.append(match)
        return classify(match, order)

    monkeypatch.setattr(pipeline, "classify_mask", counted)
    analyzed(eager_mul, num_layers=3)  # each layer makes its own
    assert len(calls) == 3
    calls.clear()
    assert reports_of_generation("llama", "sdpa", None)[0].counts == {"causal": 2}
    assert len(calls) == 3  # prefill and two decode graphs


def test_a_cache_that_no_attention_reads_is_reported():
    def attend(layer, q, k, v, past_k, past_v):
        out = sdpa_causal(layer, q, k, v)
        return out, torch.cat([past_k, k * 2], dim=2)

    _, report = analyzed(attend, *past_of())
    assert any("no attention reads" in failure.reason for failure in report.failures)
    assert report.counts["refused"] == 1


def test_seconds_are_told_for_every_pass():
    _, report = analyzed(sdpa_causal)
    assert set(report.seconds) == {"normalize", "match_attention", "find_unclaimed", "classify_mask"}
    assert all(seconds >= 0 for seconds in report.seconds.values())


def test_analysis_changes_nothing():
    graph = capture("dynamo", Stack(eager_mul), hidden())
    before = str(graph.gm.graph)
    gm, _ = analyze(graph.gm, graph.inputs)
    assert gm is graph.gm
    assert str(gm.graph) == before


def test_mask_of_a_match():
    _, report = analyzed(sdpa_causal)
    assert report.mask_of(report.matches[0]) == MaskKind("causal")


def test_a_scale_that_changes_is_compiled_anew():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scaling, self.fill, self.proj = 0.3, -1e9, torch.nn.Linear(16, 16)

        def forward(self, x):
            q = self.proj(x).view(2, -1, 1, 16).transpose(1, 2)
            scores = (q.sin() @ q.cos().mT) * self.scaling
            hidden = torch.ones(q.shape[2], q.shape[2]).tril() == 0
            return scores.masked_fill(hidden, self.fill).softmax(-1) @ q.tan()

    torch._dynamo.reset()
    scales = []

    def record(gm, example_inputs):
        _, report = analyze(gm, example_inputs)
        assert pipeline.guard_numbers(report) >= 1
        scales.extend(match.scale for match in report.matches)
        return gm.forward

    model = Scaled()
    compiled = torch.compile(model, backend=record, dynamic=True)
    with torch.no_grad():
        for scaling in (0.3, 0.7, 0.7):
            model.scaling = scaling
            compiled(torch.randn(2, 7, 16))
    assert scales == [0.3, 0.7]


# ---- log, dumps, identity


def test_the_log_is_lazy_and_names_reasons(caplog):
    with caplog.at_level(logging.INFO, logger="kitty_compile.passes"):
        analyzed(tiled_heads)
    assert "tiles heads" in caplog.text
    assert all(record.args for record in caplog.records if record.name == "kitty_compile.passes")


def test_dumps_are_written_on_request(tmp_path, monkeypatch):
    analyzed(sdpa_causal)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("KITTY_COMPILE_DUMP", str(tmp_path / "dumps"))
    analyzed(sdpa_causal)
    written = sorted(path.name.partition("_")[2] for path in (tmp_path / "dumps").iterdir())
    assert "before_normalize.py" in written
    assert "after_classify_mask.py" in written
    assert all(path.read_text() for path in (tmp_path / "dumps").iterdir())


def test_uuid_depends_on_the_sources_and_the_configuration(tmp_path, monkeypatch):
    assert pass_uuid() == pass_uuid()
    assert pass_uuid("kitty") != pass_uuid("kivi")
    before = pass_uuid()
    copy = tmp_path / "passes"
    shutil.copytree(pathlib.Path(pipeline.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "normalize.py").write_text("# changed\n")
    monkeypatch.setattr(pipeline, "__file__", str(copy / "pipeline.py"))
    pipeline._source_digest.cache_clear()
    try:
        assert pass_uuid() != before
    finally:
        pipeline._source_digest.cache_clear()


def test_a_graph_may_have_no_attention():
    _, report = analyzed(lambda layer, q, k, v: q)
    assert report.found == []
    assert report.counts == {}


def test_cat_is_matched_by_the_pipeline_too():
    _, report = analyzed(cat, *past_of(), columns=3)
    assert report.counts == {"causal": 1}
