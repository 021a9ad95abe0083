import dataclasses

import pytest

from kitty_compile.config import KittyConfig, resolve_config

PRESETS = {
    "kitty": (2, 2, 0.125, 32),
    "kitty-pro": (2, 2, 0.25, 32),
    "kivi-k2v2": (2, 2, 0.0, 0),
    "kivi-k4v4": (4, 4, 0.0, 0),
    "kivi-k2v2-sink": (2, 2, 0.0, 32),
    "kivi-k2v4-sink": (2, 4, 0.0, 32),
    "kivi-k4v2-sink": (4, 2, 0.0, 32),
    "lossless": (16, 16, 0.0, 32),
}


def test_presets_are_those_of_the_paper():
    assert set(KittyConfig.presets()) == set(PRESETS)
    for name, (key_bits, value_bits, boost, sink) in PRESETS.items():
        config = KittyConfig.preset(name)
        found = (config.key_bits, config.value_bits, config.boost_fraction, config.sink_length)
        assert found == (key_bits, value_bits, boost, sink), name
        assert (config.value_window, config.rollback_window, config.page_size) == (128, 32, 128)
        assert (config.selection, config.skip_layers) == ("magnitude", ())


def test_overrides_apply_on_top_of_a_preset():
    config = KittyConfig.preset("kitty-pro", sink_length=0, boost_fraction=0.5)
    assert config == KittyConfig(sink_length=0, boost_fraction=0.5)


def test_resolve_takes_a_config_a_name_or_nothing():
    config = KittyConfig(seed=3)
    assert resolve_config(config) is config
    assert resolve_config(None) == KittyConfig.preset("kitty") == KittyConfig()
    assert resolve_config("lossless").key_bits == 16
    with pytest.raises(TypeError, match="config must be a KittyConfig, a preset's name or None, got int"):
        resolve_config(2)


def test_unknown_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"preset must be one of kitty, kitty-pro, .*lossless, got 'kitten'"):
        KittyConfig.preset("kitten")


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        ({"key_bits": 3}, ValueError, r"key_bits must be one of \(2, 4, 16\), got 3"),
        ({"key_bits": 2.0}, ValueError, r"key_bits must be one of \(2, 4, 16\), got 2\.0"),
        ({"value_bits": "2"}, ValueError, r"value_bits must be one of \(2, 4, 16\), got '2'"),
        ({"boost_fraction": 1.01}, ValueError, "boost_fraction must be between 0 and 1, got 1.01"),
        ({"boost_fraction": -0.1}, ValueError, "boost_fraction must be between 0 and 1, got -0.1"),
        ({"boost_fraction": float("nan")}, ValueError, "boost_fraction must be between 0 and 1, got nan"),
        ({"boost_fraction": "0.1"}, TypeError, "boost_fraction must be a number, got '0.1'"),
        ({"boost_fraction": True}, TypeError, "boost_fraction must be a number, got True"),
        ({"sink_length": -1}, ValueError, "sink_length must be at least 0, got -1"),
        ({"value_window": 1.5}, TypeError, "value_window must be an int, got 1.5"),
        ({"rollback_window": True}, TypeError, "rollback_window must be an int, got True"),
        ({"rollback_window": -3}, ValueError, "rollback_window must be at least 0, got -3"),
        ({"page_size": 64}, ValueError, "page_size must be 128, which the word layout fixes, got 64"),
        ({"selection": "best"}, ValueError, 'selection must be "magnitude" or "random", got \'best\''),
        ({"seed": -1}, ValueError, r"seed must be an int from 0 to 2\*\*31 - 1, got -1"),
        ({"seed": 2**31}, ValueError, r"seed must be an int from 0 to 2\*\*31 - 1, got 2147483648"),
        ({"skip_layers": 3}, TypeError, "skip_layers must be a sequence of layer indices, got 3"),
        ({"skip_layers": (0, -1)}, ValueError, r"skip_layers must hold layer indices of at least 0, got \(0, -1\)"),
        ({"skip_layers": "01"}, ValueError, "skip_layers must hold layer indices of at least 0, got '01'"),
    ],
)
def test_config_refuses_in_one_line(overrides, error, message):
    with pytest.raises(error, match=message) as caught:
        KittyConfig(**overrides)
    assert "\n" not in str(caught.value)


def test_config_is_frozen_and_hashable_even_with_a_list_of_layers():
    config = KittyConfig(skip_layers=[2, 0])
    assert config.skip_layers == (2, 0)
    assert hash(config) == hash(KittyConfig(skip_layers=(2, 0)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.key_bits = 4


@pytest.mark.parametrize(
    ("fraction", "head_dim", "count"),
    [
        (0.125, 128, 16),
        (0.25, 128, 32),
        (0.125, 80, 10),
        (0.125, 112, 14),
        (0.1, 16, 2),
        (0.03125, 16, 1),
        (1, 64, 64),
        (0, 64, 0),
    ],
)
def test_num_boosted_rounds_half_up(fraction, head_dim, count):
    assert KittyConfig(boost_fraction=fraction).num_boosted(head_dim) == count
