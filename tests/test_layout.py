import dataclasses

import pytest
import torch

from kitty_compile.kernels.layout import (
    FIELD_EXPONENTS,
    FIELD_PREMULTIPLIER,
    PAGE_SIZE,
    PageLayout,
    RawLayout,
    zero_dtype,
)

HEAD_DIMS = (16, 32, 64, 80, 96, 112, 128, 192, 256)


def page_layout(**overrides):
    defaults = {
        "key_dim": 128,
        "value_dim": 128,
        "num_kv_heads": 1,
        "key_bits": 2,
        "value_bits": 2,
        "num_boosted": 16,
        "dtype": torch.float16,
    }
    return PageLayout(**{**defaults, **overrides})


def test_kitty_costs_76_bytes_and_a_half_per_token_and_head():
    assert page_layout().bytes_per_token == 76.5
    assert page_layout(num_kv_heads=8).bytes_per_token == 8 * 76.5
    assert page_layout().raw_bytes_per_token == 512


def test_key_record_of_kitty_by_hand():
    key = page_layout().key
    # 128 channels of 128 2-bit codes; 16 more planes of them; bf16 scales; 16-bit zeros; one i32 per slot.
    assert (key.high_offset, key.scale_offset, key.zero_offset, key.boost_offset, key.nbytes) == (
        4096,
        4096 + 512,
        4096 + 512 + 256,
        4096 + 512 + 512,
        4096 + 512 + 512 + 64,
    )


@pytest.mark.parametrize(("bits", "planes"), [(2, 1), (4, 2)])
def test_value_record_by_hand(bits, planes):
    value = page_layout(value_dim=64, value_bits=bits).value
    assert value.high_offset == 2048
    assert value.scale_offset == 2048 * planes
    assert value.zero_offset == 2048 * planes + 256
    assert value.nbytes == 2048 * planes + 512


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("key_bits", "num_boosted"), [(2, 0), (2, 1), (2, 8), (2, 9), (2, 16), (4, 0), (16, 0)])
@pytest.mark.parametrize("value_bits", [2, 4, 16])
def test_every_part_is_aligned_and_bits_add_up(head_dim, key_bits, num_boosted, value_bits):
    layout = page_layout(
        key_dim=head_dim, value_dim=head_dim, key_bits=key_bits, value_bits=value_bits, num_boosted=num_boosted
    )
    key, value = layout.key, layout.value
    if not key.is_raw:
        offsets = (key.high_offset, key.scale_offset, key.zero_offset, key.boost_offset)
        assert list(offsets) == sorted(offsets)
        assert key.high_offset % 32 == key.scale_offset % 32 == 0
        assert all(offset % 16 == 0 for offset in (*offsets, key.nbytes))
        boost = 32 * key.num_slots if key.has_boost_index else 0
        assert 8 * key.nbytes == PAGE_SIZE * 2 * (head_dim + key.num_slots) + 32 * head_dim + boost
    if not value.is_raw:
        assert value.high_offset % 32 == value.scale_offset % 32 == 0
        assert value.zero_offset % 16 == value.nbytes % 16 == 0
        assert 8 * value.nbytes == PAGE_SIZE * (value_bits * head_dim + 32)
    if key.is_raw:
        assert key.nbytes == PAGE_SIZE * head_dim * 2
    if value.is_raw:
        assert value.nbytes == PAGE_SIZE * head_dim * 2
    assert layout.page_bytes == key.nbytes + value.nbytes


@pytest.mark.parametrize(("num_boosted", "num_slots"), [(0, 0), (1, 8), (7, 8), (8, 8), (9, 16), (16, 16), (63, 64)])
def test_slots_are_boosted_channels_rounded_up_to_eight(num_boosted, num_slots):
    key = page_layout(key_dim=64, num_boosted=num_boosted).key
    assert key.num_slots == num_slots
    assert key.has_boost_index == (num_slots > 0)
    assert not key.all_boosted


def test_kitty_and_kitty_pro_differ_at_head_dim_64():
    assert page_layout(key_dim=64, num_boosted=8).key.nbytes < page_layout(key_dim=64, num_boosted=16).key.nbytes


def test_no_index_when_every_channel_is_boosted():
    for layout in (page_layout(num_boosted=128), page_layout(key_bits=4, num_boosted=3)):
        assert layout.key.all_boosted
        assert layout.key.num_boosted == 128
        assert not layout.key.has_boost_index
        assert layout.key.nbytes == layout.key.boost_offset


def test_raw_keys_have_no_slots_whatever_num_boosted_says():
    key = page_layout(key_bits=16, num_boosted=16).key
    assert key.num_slots == 0
    assert not key.all_boosted
    assert not key.has_boost_index


def test_raw_pages_take_the_size_of_the_dtype():
    layout = page_layout(key_bits=16, value_bits=16, dtype=torch.float32, num_kv_heads=3)
    assert layout.key_page_bytes == layout.value_page_bytes == 3 * PAGE_SIZE * 128 * 4
    assert layout.raw_bytes_per_token == layout.bytes_per_token == 3 * 256 * 4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"key_dim": 24}, "key_dim must be a positive multiple of 16, got 24"),
        ({"key_dim": 0, "num_boosted": 0}, "key_dim must be a positive multiple of 16, got 0"),
        ({"value_dim": -16}, "value_dim must be a positive multiple of 16, got -16"),
        ({"key_bits": 3}, r"key_bits must be one of \(2, 4, 16\), got 3"),
        ({"value_bits": 8}, r"value_bits must be one of \(2, 4, 16\), got 8"),
        ({"num_boosted": 129}, "num_boosted must be between 0 and key_dim=128, got 129"),
        ({"num_boosted": -1}, "num_boosted must be between 0 and key_dim=128, got -1"),
    ],
)
def test_layout_refuses(overrides, message):
    with pytest.raises(ValueError, match=message):
        page_layout(**overrides)


def test_layouts_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        page_layout().key_dim = 64


def test_zero_keeps_sixteen_bit_models_exact():
    assert zero_dtype(torch.float16) == torch.float16
    assert zero_dtype(torch.bfloat16) == torch.bfloat16
    assert zero_dtype(torch.float32) == torch.float16


def test_field_exponents_are_those_of_a_masked_half():
    for field, (exponent, premultiplier) in enumerate(zip(FIELD_EXPONENTS, FIELD_PREMULTIPLIER, strict=True)):
        word = torch.tensor([3 << 2 * field], dtype=torch.int32)
        masked = word if field < 5 else word >> 6
        half = masked.to(torch.int16).view(torch.float16)
        assert half.item() == 3 * 4**exponent * 2**-24
        assert half.item() * 4**premultiplier == 3 * 2**-20


@pytest.mark.parametrize(("sink", "window", "rollback"), [(32, 128, 32), (0, 0, 0), (5, 1, 7), (32, 300, 0)])
def test_raw_layout_follows_the_read_rule(sink, window, rollback):
    raw = RawLayout(sink, window, rollback)
    assert raw.key_slots == sink + PAGE_SIZE + rollback
    assert raw.value_slots == sink + window + PAGE_SIZE + rollback
    for length in (0, sink, sink + 127, sink + 128, sink + window + 127, sink + window + 128, sink + window + 1000):
        key_pages = sum(sink + (n + 1) * PAGE_SIZE <= length for n in range(20))
        value_pages = sum(sink + (n + 1) * PAGE_SIZE + window <= length for n in range(20))
        assert raw.pages_for(length) == key_pages
        assert raw.key_pages(torch.tensor([length])).item() == key_pages
        assert raw.value_pages(torch.tensor([length])).item() == value_pages
        assert key_pages - value_pages <= raw.max_mixed_pages


@pytest.mark.parametrize(("sink", "ring"), [(32, 160), (0, 128), (3, 131)])
def test_the_newest_tokens_have_slots_of_their_own(sink, ring):
    raw = RawLayout(sink, 0, ring - PAGE_SIZE)
    length = sink + 3 * ring + 5
    held = torch.cat([torch.arange(sink), torch.arange(length - ring, length)])
    slots = raw.slots(held, ring)
    assert sorted(slots.tolist()) == list(range(sink + ring))
    assert slots[:sink].tolist() == list(range(sink))
