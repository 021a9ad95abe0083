"""Generated attention graphs: the rewritten graph is held to the model that it was captured from, call by call."""

import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from kitty_compile.config import KittyConfig
from tests.generated_graphs import PACKED, TOTAL, TWISTS, Recipe, pieces, recipes, twisted_recipes
from tests.generated_models import make_model
from tests.generated_runs import Rewritten, materialised, run, tokens, truth_of


def few(examples):
    # The same few in every quick run; the many of the slow ones differ from run to run.
    return settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow], derandomize=examples < 100)


def check(recipe, lengths):
    model = make_model(recipe)
    rewritten = Rewritten(recipe, model)
    # A kept layer without a cache of its own cannot be called piece by piece.
    lengths = (TOTAL,) if any(recipe.windows) else lengths
    output = run(recipe, rewritten, lengths)
    check_reports(recipe, rewritten)
    check_lossless(recipe, model, rewritten, output)
    check_packed(recipe, model, rewritten, lengths)


def check_lossless(recipe, model, rewritten, output):
    """What the model gives for all columns at once, as exactly as the model itself gives it."""
    truth, real = truth_of(recipe, model), tokens(recipe, TOTAL)
    check_error(recipe, float((output - truth.output)[real].abs().max()), truth.error, truth.output)
    for layer in rewritten.layers.values():
        assert layer.lengths.tolist() == real.sum(1).tolist()


def check_packed(recipe, model, rewritten, lengths):
    """What plain attention gives over the K and V of a cache that unpacks its pages."""
    config = KittyConfig()
    rewritten.use(config)
    run(recipe, rewritten, lengths)
    assert len(rewritten.seen) == len(lengths) * recipe.windows.count(None)
    for expected in materialised(recipe, model, rewritten, config):
        error, allowed = expected.errors()
        check_error(recipe, error, allowed, expected.values)


def check_error(recipe, error, allowed, values):
    """``allowed`` is what one run in the model's own precision comes to: another one of as many steps may miss by more."""
    bound = 4 * allowed + 8 * torch.finfo(recipe.dtype).eps * float(values.abs().max())
    assert error <= bound, f"error {error:.3g}, bound {bound:.3g}, own error {allowed:.3g}"


def check_reports(recipe, rewritten):
    for report in rewritten.reports:
        assert not report.failures, [failure.reason for failure in report.failures]
        assert [report.mask_of(match).window for match in report.matches] == list(recipe.windows)
        for match in report.matches:
            check_match(recipe, match, report.mask_of(match))
    assert len(rewritten.kept) == len(rewritten.reports) * (len(recipe.windows) - recipe.windows.count(None))


def check_match(recipe, match, mask):
    assert mask.kind == ("causal" if mask.window is None else "sliding")
    assert (mask.padding is None) == (recipe.padding is None)
    assert match.softcap == (None if recipe.softcap is None else pytest.approx(recipe.softcap))
    assert (match.sinks is None) == (not recipe.sinks)
    assert (match.num_heads, match.num_kv_heads) == (recipe.heads, recipe.kv_heads)
    assert (match.key_dim, match.value_dim) == (recipe.key_dim, recipe.value_dim)
    assert match.update.kind == recipe.cache


@few(12)
@given(recipes(), pieces())
def test_a_rewritten_graph_computes_what_the_model_does(recipe, lengths):
    check(recipe, lengths)


@pytest.mark.slow
@few(400)
@given(recipes(), pieces())
def test_many_rewritten_graphs_compute_what_the_model_does(recipe, lengths):
    check(recipe, lengths)


def check_refused(recipe):
    model = make_model(recipe)
    rewritten = Rewritten(recipe, model)
    lengths = (200, TOTAL - 200) if recipe.twist == "wrong causal flag" else (TOTAL,)
    output = run(recipe, rewritten, lengths)
    reasons = {failure.reason for failure in rewritten.reports[-1].failures}
    assert len(rewritten.reports[-1].failures) >= len(recipe.windows)
    assert all(re.search(TWISTS[recipe.twist], reason) for reason in reasons), reasons
    assert rewritten.reports[-1].rewritten == 0
    if recipe.twist != "dropout":
        expected = run(recipe, make_model(recipe), lengths)
        torch.testing.assert_close(output, expected, rtol=1e-2, atol=1e-2, equal_nan=True)


@few(15)
@given(twisted_recipes())
def test_what_is_not_understood_is_refused_and_left_alone(recipe):
    check_refused(recipe)


@pytest.mark.slow
@few(300)
@given(twisted_recipes())
def test_much_that_is_not_understood_is_refused_and_left_alone(recipe):
    check_refused(recipe)


def test_pages_matter():
    """The comparison sees packed pages: with other pages the outputs are other ones."""
    recipe, lengths = Recipe(), (250, PACKED - 250, 10, TOTAL - PACKED - 10)
    rewritten = Rewritten(recipe, make_model(recipe))
    rewritten.use(KittyConfig())
    expected = run(recipe, rewritten, lengths)
    rewritten.use(KittyConfig())
    first = run(recipe, rewritten, lengths[:2])
    for pages in (rewritten.layers[0].state.key_pages, rewritten.layers[0].state.value_pages):
        pages.zero_()
    rest = run(recipe, rewritten, lengths[2:], start=PACKED)
    assert torch.equal(first, expected[:, :PACKED])
    assert float((rest - expected[:, PACKED:]).abs().max()) > 1e-2
