"""Saved programs: they run without transformers, hold no state, and what is no whole file of this version is refused."""

import json
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest
import torch

import kitty_compile
from kitty_compile.kernels.layout import LAYOUT_VERSION
from kitty_compile.program import is_counter, is_state
from kitty_compile.program_file import MANIFEST, read_manifest
from kitty_compile.testing import random_ids, tiny_model

LENGTH = 300
ROOT = pathlib.Path(__file__).parents[1]
ALONE = """
import sys, torch, kitty_compile
program = kitty_compile.load(sys.argv[1])
given = torch.load(sys.argv[2])
tokens = program.generate(given["ids"], 200, attention_mask=given["mask"])
heavy = sorted({"transformers", "triton", "typer"} & set(sys.modules))
assert not [name for name in heavy if name != "triton"], heavy
assert torch.equal(tokens, given["tokens"])
program.reset()
print("alone", program.manifest.model)
"""


@pytest.fixture(scope="module")
def program():
    """Of a model with full and sliding layers, and softcap."""
    return kitty_compile.export(tiny_model("gemma2"), max_batch=2, max_length=LENGTH)


@pytest.fixture(scope="module")
def saved(program, tmp_path_factory):
    path = tmp_path_factory.mktemp("programs") / "model.pt2"
    program.generate(random_ids(2, 250), 20)
    program.save(path)
    return path


def test_a_process_without_transformers_generates_the_same(program, saved, tmp_path):
    ids, mask = random_ids(2, 20), torch.ones(2, 20, dtype=torch.int64)
    mask[0, :6] = 0
    tokens = program.generate(ids, 200, attention_mask=mask)
    torch.save({"ids": ids, "mask": mask, "tokens": tokens}, tmp_path / "given.pt")
    arguments = [sys.executable, "-c", ALONE, str(saved), str(tmp_path / "given.pt")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "alone Gemma2ForCausalLM"


def test_two_loaded_programs_keep_states_of_their_own(program, saved):
    one, other = kitty_compile.load(saved), kitty_compile.load(saved)
    ids = random_ids(1, 190)
    program.reset()
    expected = [program(part) for part in (ids, ids[:, :1])]
    first = one(ids)
    assert other.columns == 0
    assert torch.equal(other(ids), first)
    assert torch.equal(one(ids[:, :1]), expected[1])
    assert torch.equal(first, expected[0])


def test_a_file_has_no_state_in_it(program, saved):
    """It was saved after a generation, which another call of the same program goes on with."""
    assert program.columns > 0
    with torch.no_grad():
        before = {name: buffer.clone() for name, buffer in program.module.named_buffers()}
    program.save(saved)
    assert all(torch.equal(buffer, before[name]) for name, buffer in program.module.named_buffers())
    loaded = kitty_compile.load(saved)
    for name, buffer in loaded.module.named_buffers():
        assert not is_state(name) or not buffer.any(), name
    manifest = loaded.manifest
    assert manifest == program.manifest
    state = sum(buffer.nbytes for name, buffer in loaded.module.named_buffers() if name.startswith("kitty_"))
    assert manifest.state_bytes == state
    raw = manifest.weight_bytes
    assert raw < saved.stat().st_size < raw + 1_500_000


@pytest.mark.slow
def test_a_long_state_costs_a_file_nothing(tmp_path):
    model = tiny_model("llama")
    sizes = {}
    for length in (64, 65536):
        program = kitty_compile.export(model, max_length=length)
        program.save(tmp_path / "model.pt2")
        sizes[length] = (program.manifest.state_bytes, (tmp_path / "model.pt2").stat().st_size)
    assert sizes[65536][0] > sizes[64][0] + 1_000_000
    assert abs(sizes[65536][1] - sizes[64][1]) < 50_000


def test_other_readers_cannot_use_the_shapes_for_a_state(saved):
    module = torch.export.load(saved).module()
    with pytest.raises(ValueError, match=r"read saved programs with kitty_compile.load"), torch.no_grad():
        module(random_ids(1, 9), torch.ones(1, 9, dtype=torch.bool))


def test_decompositions_keep_the_mutation(program):
    decomposed = program.exported.run_decompositions()
    mutated = set(decomposed.graph_signature.buffers_to_mutate.values())
    assert mutated == {name for name, _ in program.module.named_buffers() if is_state(name)}
    program.reset()
    ids = random_ids(2, 200)
    expected = [program(part) for part in (ids, ids[:, :1], ids[:, 1:2])]
    program.reset()
    module = decomposed.module()
    with torch.no_grad():
        for part, wanted in zip((ids, ids[:, :1], ids[:, 1:2]), expected, strict=True):
            actual = module(part, torch.ones_like(part, dtype=torch.bool))
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


def test_counters_are_what_a_reset_clears(program):
    counters = {name for name, _ in program.module.named_buffers() if is_counter(name)}
    layers = {"kitty_0_position", "kitty_2_position"} | {
        f"kitty_{layer}_{name}" for layer in (1, 3) for name in ("lengths", "high_water")
    }
    assert counters == {"kitty_tokens"} | layers


def rewritten(source, target, change):
    """A copy of a program's file whose manifest has been changed."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith(MANIFEST):
                content = json.dumps(change(json.loads(content))).encode()
            new.writestr(name, content)
    return target


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout_version": LAYOUT_VERSION + 1}, f"layout_version of the program must be {LAYOUT_VERSION}, got"),
        ({"format_version": 0}, "format_version of the program must be 1, got 0: export it again"),
        ({"format": "else"}, "the manifest must be that of an exported program, got something else"),
        ({"surplus": 1}, "the manifest must have the fields"),
        ({"device": "cuda:0"}, "got one for cuda:0 and no CUDA here"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is not there")
def test_another_version_or_device_is_refused_in_one_line(saved, tmp_path, changes, message):
    path = rewritten(saved, tmp_path / "other.pt2", lambda manifest: manifest | changes)
    with pytest.raises(ValueError, match=message) as found:
        kitty_compile.load(path)
    assert len(str(found.value).splitlines()) == 1


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_truncated_file_is_refused(saved, tmp_path, share):
    path = tmp_path / "cut.pt2"
    content = saved.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    # Archives within the archive may look like whole ones.
    with pytest.raises(ValueError, match=r"path must be a (whole )?file that Program.save wrote") as found:
        kitty_compile.load(path)
    assert len(str(found.value).splitlines()) == 1


def test_a_damaged_file_is_refused(saved, tmp_path):
    content = bytearray(saved.read_bytes())
    with zipfile.ZipFile(saved) as archive:
        graph = next(info for info in archive.infolist() if info.filename.endswith("models/model.json"))
    start = graph.header_offset + 200
    content[start : start + 64] = b"\0" * 64
    path = tmp_path / "damaged.pt2"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"path must be a whole file that Program.save wrote"):
        kitty_compile.load(path)


def test_a_foreign_file_is_refused(tmp_path):
    path = tmp_path / "foreign.pt2"
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(2, 2),)), path)
    with pytest.raises(ValueError, match="which has no manifest"):
        kitty_compile.load(path)
    path.write_text("no archive")
    with pytest.raises(ValueError, match="path must be a whole file"):
        kitty_compile.load(path)
    with pytest.raises(FileNotFoundError):
        kitty_compile.load(tmp_path / "absent.pt2")


def test_a_save_that_fails_leaves_what_was_there(program, saved, tmp_path, monkeypatch):
    path = tmp_path / "model.pt2"
    path.write_text("older")

    def fail(*_, **__):
        raise OSError("no room")

    monkeypatch.setattr(torch.export, "save", fail)
    with pytest.raises(OSError, match="no room"):
        program.save(path)
    assert path.read_text() == "older"
    assert os.listdir(tmp_path) == ["model.pt2"]


def test_the_manifest_is_read_without_the_weights(saved):
    manifest = read_manifest(saved)
    assert (manifest.model, manifest.max_batch, manifest.max_length) == ("Gemma2ForCausalLM", 2, LENGTH)
    assert manifest.versions.keys() == {"kitty_compile", "torch", "transformers"}
    assert manifest.config == kitty_compile.KittyConfig().__dict__ | {"skip_layers": []}
