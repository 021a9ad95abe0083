"""What is no whole file of a saved cache is refused with one line, and what cannot be saved leaves no file."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kitty_compile import KittyCache, saving
from kitty_compile.kernels.layout import LAYOUT_VERSION
from kitty_compile.testing import tiny_model
from tests.cache_driver import SCALE, Tokens, goes_on_alike, make_cache, padded


@pytest.fixture
def path(tmp_path):
    return tmp_path / "prefix.kitty"


def test_a_torn_cache_is_refused(path):
    cache, tokens = make_cache(), Tokens(300)
    tokens.feed(cache, 200)
    cache.begin_call(3)
    cache.attend(*tokens.new(0, 200, 203), 0, scale=SCALE)
    with pytest.raises(ValueError, match="the cache must be whole, but a forward stopped half way"):
        saving.save(cache, path)
    cache.crop(200)
    cache.begin_call(3)
    saving.save(cache, path)
    assert goes_on_alike(cache, saving.load(path), tokens, 290)


def test_a_mask_that_waits_for_its_forward_is_refused(path):
    cache, tokens = make_cache(), Tokens(9)
    cache.set_padding(torch.ones(2, 9))
    with pytest.raises(ValueError, match="set_padding must come after save and load, got a mask of the next forward"):
        saving.save(cache, path)
    cache.store(*tokens.new(0, 0, 9)[1:], 0)
    cache.store(*tokens.new(1, 0, 9)[1:], 1)
    saving.save(cache, path)


def test_the_folder_must_exist(tmp_path):
    with pytest.raises(ValueError, match="path must lie in a folder that exists, got"):
        saving.save(make_cache(), tmp_path / "nowhere" / "cache")


def test_who_reads_the_old_file_is_not_disturbed(path):
    write_example(path)
    before = path.read_bytes()
    with path.open("rb") as file:
        saving.save(make_cache(), path)
        assert file.read() == before
    assert len(path.read_bytes()) < len(before)


def test_a_failed_write_leaves_the_old_file_alone(path, monkeypatch):
    cache, tokens = make_cache(), Tokens(300)
    saving.save(tokens.feed(cache, 200), path)
    before = path.read_bytes()

    def half(tensors, filename, metadata):
        filename.write_bytes(before[:1000])
        raise OSError("No space left on device")

    monkeypatch.setattr(saving, "save_file", half)
    with pytest.raises(OSError, match="No space left"):
        saving.save(tokens.feed(cache, 290), path)
    assert path.read_bytes() == before
    assert sorted(path.parent.iterdir()) == [path]


def write_example(path, *windows):
    cache = make_cache(*(windows or (None, 40)))
    padded(Tokens(330)).feed(cache, 330)
    saving.save(cache, path)
    return cache


def rewrite(path, change):
    """The file again after ``change(header, tensors)``."""
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()[saving.FORMAT])
    tensors = load_file(path)
    change(header, tensors)
    save_file(tensors, path, metadata={saving.FORMAT: json.dumps(header)})


def refusal(path):
    with pytest.raises(ValueError, match="must") as caught:
        saving.load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.3, 0.9, 0.99999])
def test_a_truncated_file_is_refused(path, share):
    write_example(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert f"path must be a whole file of a saved cache, got {path}" in refusal(path)


def test_a_longer_file_is_refused(path):
    write_example(path)
    with path.open("ab") as file:
        file.write(b"\0" * 8)
    assert "path must be a whole file" in refusal(path)


def test_foreign_files_are_refused(path):
    path.write_text("a text, and not a short one either " * 100)
    assert "path must be a whole file of a saved cache" in refusal(path)
    torch.save({"a": torch.zeros(3)}, path)
    assert "path must be a whole file of a saved cache" in refusal(path)
    for metadata in (None, {"format": "pt"}, {saving.FORMAT: "nothing"}, {saving.FORMAT: "[1]"}, {saving.FORMAT: "{}"}):
        save_file({"weight": torch.zeros(3)}, path, metadata=metadata)
        assert f"path must be a file of the format kitty_compile.cache, got {path} of another" in refusal(path)
    with pytest.raises(FileNotFoundError, match="path must be a file that was saved"):
        saving.load(path.parent)


@pytest.mark.parametrize(
    ("name", "ours"), [("format_version", saving.FORMAT_VERSION), ("layout_version", LAYOUT_VERSION)]
)
@pytest.mark.parametrize("found", [0, 99, "1", None])
def test_another_version_is_refused(path, name, ours, found):
    write_example(path)
    # Nothing of such a file is looked at, whatever it may have become.
    rewrite(path, lambda header, _: header.update({name: found, "cache": "unknown"}))
    assert f"{name} must be {ours}, got {found!r} in {path}: save the cache anew" in refusal(path)


HEADERS = {
    "columns": (-1, 331, "330", 10**30),
    "rows": (0, 1, 3, True, 10**20),
    "num_pages": (0, 5, 2**60),
    "max_length": (0, 329, 2.5),
    "high_columns": (-1, None),
    "refill_columns": (1.5,),
    "has_pads": (False, 1),
    "shapes": ([], [None, None], [{}], "no", [None]),
    "plans": ([], [{"kind": "full", "window": None}] * 2, [{"kind": "other"}] * 2, 3),
    "config": ({"page_size": 64}, {"key_bits": 4}, {"sink_length": 3}, {"skip_layers": [7]}, {"unknown": 1}, None),
    "extra": (1,),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_was_changed_is_refused(path, name):
    write_example(path)
    whole = path.read_bytes()
    for value in HEADERS[name]:
        path.write_bytes(whole)
        rewrite(path, lambda header, _, value=value: header["cache"].update({name: value}))
        assert str(path) in refusal(path)


def test_a_shape_that_was_changed_is_refused(path):
    write_example(path)
    whole = path.read_bytes()
    for name, value in (
        ("key_dim", 24),
        ("key_dim", 32),
        ("num_kv_heads", 0),
        ("dtype", "float64"),
        ("dtype", "float16"),
    ):
        path.write_bytes(whole)
        rewrite(path, lambda header, _, change={name: value}: header["cache"]["shapes"][0].update(change))
        assert str(path) in refusal(path)
    path.write_bytes(whole)
    rewrite(path, lambda header, _: header["cache"].pop("shapes"))
    assert str(path) in refusal(path)


TENSORS = {
    "a page less": lambda tensors: tensors.update({"layers.0.key_pages": tensors["layers.0.key_pages"][1:].clone()}),
    "a wider page": lambda tensors: tensors.update({"layers.0.key_pages": torch.zeros(4, 9, dtype=torch.uint8)}),
    "another dtype": lambda tensors: tensors.update({"layers.1.raw_key": tensors["layers.1.raw_key"].half()}),
    "a ring of another size": lambda tensors: tensors.update(
        {"layers.0.raw_key": tensors["layers.0.raw_key"][:, :, 1:].clone()}
    ),
    "one more": lambda tensors: tensors.update({"layers.2.raw_key": torch.zeros(1)}),
    "one less": lambda tensors: tensors.pop("layers.1.real"),
    "no column map": lambda tensors: tensors.pop("real"),
    "no page table": lambda tensors: tensors.pop("page_table"),
    "a page that is not there": lambda tensors: tensors["page_table"].fill_(4),
    "a page below zero": lambda tensors: tensors["page_table"].fill_(-1),
    "pages that nobody has": lambda tensors: tensors["page_table"].fill_(0),
    "longer rows": lambda tensors: tensors["layers.0.lengths"].add_(1),
    "a low high water": lambda tensors: tensors["layers.0.high_water"].zero_(),
    "another position": lambda tensors: tensors["layers.1.position"].add_(1),
    "a pad more": lambda tensors: tensors["real"].zero_(),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_were_changed_are_refused(path, case):
    write_example(path)
    rewrite(path, lambda _, tensors: TENSORS[case](tensors))
    assert f"path must be a file as it was saved, got {path}: " in refusal(path)


def test_an_unchanged_file_that_was_written_anew_is_loaded(path):
    cache = write_example(path)
    rewrite(path, lambda header, tensors: None)
    assert goes_on_alike(cache, saving.load(path), Tokens(400), 390)


def test_the_cache_of_another_model_is_refused(path):
    KittyCache(tiny_model("llama").config).save(path)
    other = tiny_model("gemma3").config
    with pytest.raises(ValueError, match=r"path must hold a cache of the model's \d layers|layer \d in path must be"):
        KittyCache.load(path, other)
    with pytest.raises(TypeError, match="model_config must be a transformers PreTrainedConfig"):
        KittyCache.load(path, "llama")
