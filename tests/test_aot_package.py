import functools
import json
import subprocess
import sys
import zipfile

import pytest
import torch
from torch.export import Dim

import kitty_compile
from kitty_compile.aot_package import _known_options, aot_compile, load_package
from kitty_compile.kernels import attend_static
from kitty_compile.testing import random_ids, tiny_model
from tests.kernel_cases import make_case, make_layout
from tests.test_attend_static import RAW, Attend

LENGTH = 600
# Compiling takes most of a minute; test_lower_attend.py checks what is compiled.
pytestmark = pytest.mark.slow
# In a process of its own: nothing of this project, no operator that Python implements.
FOREIGN = """
import sys
import torch

inputs, expected = torch.load(sys.argv[2])
package = torch._inductor.aoti_load_package(sys.argv[1])
for call, wanted in zip(inputs, expected, strict=True):
    torch.testing.assert_close(package(*call), wanted, atol=1e-3, rtol=1e-3)
assert not [name for name in sys.modules if name.partition(".")[0] == "kitty_compile"], "this project was imported"
assert not hasattr(torch.ops.kitty, "attend"), "an operator of this project is registered"
print("ran", len(inputs))
"""


@pytest.fixture(scope="module")
def program():
    model = tiny_model("gemma3")
    # One layer of each kind is enough, and compiling takes its time.
    model.model.layers = model.model.layers[1:3]
    model.config.num_hidden_layers, model.config.layer_types = 2, model.config.layer_types[1:3]
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    return kitty_compile.export(model, max_batch=3, max_length=LENGTH)


@pytest.fixture(scope="module")
def path(program, tmp_path_factory):
    target = tmp_path_factory.mktemp("package") / "tiny.pt2"
    program(random_ids(2, 7))
    aot_compile(program, target)
    assert program.columns == 7, "the program must stay as it was"
    assert [file.name for file in target.parent.iterdir()] == ["tiny.pt2"]
    return target


@pytest.fixture(scope="module")
def package(path):
    return load_package(path)


def logits_of(program, ids, sizes, mask=None):
    program.reset()
    parts, start = [], 0
    for size in sizes:
        columns = slice(start, start + size)
        parts.append(program(ids[:, columns], None if mask is None else mask[:, columns]))
        start += size
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize(("rows", "sizes"), [(1, [1] * 5 + [200, 1, 1]), (2, [300, 1, 1, 129]), (3, [161, 30, 2, 1])])
def test_calls_of_any_size_give_the_programs_logits(program, package, rows, sizes):
    ids = random_ids(rows, sum(sizes))
    expected, found = (logits_of(each, ids, sizes) for each in (program, package))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    assert found.std() > 0.1
    assert package.columns == sum(sizes)


def test_padded_rows(program, package):
    ids = random_ids(3, 260)
    mask = torch.ones(3, 260, dtype=torch.bool)
    mask[0, :77], mask[1, :259] = False, False
    sizes = [255, 1, 1, 3]
    expected, found = (logits_of(each, ids, sizes, mask) for each in (program, package))
    shown = mask[:, [254, 255, 256, 259]]
    torch.testing.assert_close(found[shown], expected[shown], atol=1e-3, rtol=1e-3)


def test_generation_across_seals_after_other_calls(program, package):
    ids = random_ids(2, 100)
    expected = program.generate(ids, 320)
    assert torch.equal(package.generate(ids, 320), expected)
    assert len(expected[0, 100:].unique()) > 5
    assert torch.equal(package.generate(ids, 320), expected), "generate starts over"


def test_pages_are_the_programs_bit_for_bit(program, path):
    """A layer's pages depend on what it was fed alone; layer 0 is fed the same from the same tokens."""
    import kitty_compile.passes.lower_attend as lowering

    package = load_package(path)
    names = [name for name in dict(program.module.named_buffers()) if name.endswith("_key_pages")]
    pools = {name: torch.zeros_like(program.module.get_buffer(name)) for name in names}
    managed = {lowering.PREFIX + name: pool for name, pool in pools.items()}
    package.module.package.load_constants(managed, check_full_update=False, user_managed=True)
    ids = random_ids(1, 430)
    for each in (program, package):
        logits_of(each, ids, [400, 29, 1])
    name = names[0]
    used = 3
    same = pools[name][:used] == program.module.get_buffer(name)[:used]
    # Products of matrices differ in their last bits between the two, and now and then a code with them.
    assert same.float().mean() > 0.999
    assert (pools[name][:used] != 0).any(1).all()


def test_a_single_row_and_much_room(tmp_path):
    """Counters of one row have one element, which a compiler could take for the constant that they hold when it sees them.
    A step takes as much memory in a state of twenty times the room: nothing copies the state."""
    ids, sizes, allocated = random_ids(1, 220), [150, 1, 1, 40, 28], []
    for max_length in (400, 8000):
        program = kitty_compile.export(tiny_model("llama"), max_batch=1, max_length=max_length)
        aot_compile(program, tmp_path / f"{max_length}.pt2")
        package = load_package(tmp_path / f"{max_length}.pt2")
        expected, found = (logits_of(each, ids, sizes) for each in (program, package))
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
        with torch.profiler.profile(profile_memory=True) as profiler:
            package(ids[:, :1])
        events = profiler.profiler.kineto_results.events()
        allocated.append(sum(max(event.nbytes(), 0) for event in events if event.name() == "[memory]"))
    assert 0 < allocated[0]
    assert allocated[1] < 1.1 * allocated[0]


class Sealing(torch.nn.Module):
    """A layer that is told by a length how many pages a call can complete."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, query, key, value, real, sealed):
        self.layer.attend = functools.partial(attend_static.attend_and_update, num_sealed=sealed.shape[0])
        return self.layer(query, key, value, real)


def test_native_code_seals_the_operators_bytes(tmp_path):
    """The same tensors to the operator and to native code: every byte of the state is the same."""
    layout = make_layout(torch.float32, key_dim=64, heads=3, num_boosted=8)
    case = make_case(layout, RAW, [0], num_columns=200, group=3, room=1000, kind="channels")
    example = (case.query, case.key, case.value, torch.ones(1, 200, dtype=torch.bool), torch.empty(2))
    columns = Dim("columns", min=1, max=1000)
    shapes = (*({2: columns} for _ in range(3)), {1: columns}, {0: Dim("sealed", min=1, max=8)})
    layer, expected = Attend(case, attend_static.attend_and_update), Attend(case, torch.ops.kitty.attend)
    exported = torch.export.export(Sealing(layer), example, dynamic_shapes=shapes, strict=False)
    path = str(tmp_path / "layer.pt2")
    torch._inductor.aoti_compile_and_package(exported, package_path=path, inductor_configs=_known_options())
    package = torch._inductor.aoti_load_package(path)
    state = {f"layer.{name}": buffer.clone() for name, buffer in expected.named_buffers()}
    package.load_constants(state, check_full_update=False, user_managed=True)
    for size in (300, 1, 1, 130, 260, 1):
        call = make_case(layout, RAW, [0], num_columns=size, group=3, seed=size, kind="channels")
        inputs = (call.query, call.key, call.value, torch.ones(1, size, dtype=torch.bool))
        sealed = torch.empty(-(-size // 128))
        torch.testing.assert_close(package(*inputs, sealed), expected(*inputs), atol=1e-2, rtol=1e-3)
        for name, buffer in expected.named_buffers():
            assert torch.equal(state[f"layer.{name}"].view(torch.uint8), buffer.view(torch.uint8)), name
    assert state["layer.lengths"].tolist() == [693]


def test_packages_have_a_state_of_their_own(path, package):
    other, ids = load_package(path), random_ids(1, 40)
    package.reset()
    package(ids)
    assert torch.equal(other(ids[:, :5]), logits_of(package, ids, [5]))


def test_it_runs_where_this_project_is_not(program, path, tmp_path):
    ids, sizes = random_ids(2, 303), [301, 1, 1]
    calls, expected, start = [], [], 0
    program.reset()
    for size in sizes:
        part = ids[:, start : start + size].contiguous()
        cached, sealed = max(0, start - 32) // 128, -(-size // 128)
        pages = [torch.empty(max(count, 1), dtype=torch.uint8) for count in (cached, sealed)]
        calls.append((part, torch.ones_like(part, dtype=torch.bool), *pages))
        expected.append(program(part))
        start += size
    torch.save((calls, expected), tmp_path / "calls.pt")
    command = [sys.executable, "-c", FOREIGN, str(path), str(tmp_path / "calls.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ran 3\n"


def test_no_operator_of_ours_is_called(package, monkeypatch):
    def refuse(*_):
        raise AssertionError("a kitty operator was called")

    from kitty_compile.kernels import ops

    monkeypatch.setattr(ops, "_backend", refuse)
    with pytest.raises(AssertionError, match="was called"):
        ops._backend("cpu")
    package.generate(random_ids(1, 200), 3)


def test_what_does_not_fit_is_refused_before_anything_changes(package):
    ids = random_ids(2, LENGTH + 1)
    package.reset()
    package(ids[:, :10])
    for wrong in (ids[:, :LENGTH], random_ids(4, 1), ids[:, :0]):
        with pytest.raises(ValueError, match="must"):
            package(wrong)
    assert package.columns == 10
    assert [buffer.max().item() for name, buffer in package.module.named_buffers() if name.endswith("_lengths")] == [10]
    with pytest.raises(ValueError, match="save"):
        package.save("other.pt2")


def test_other_files_are_refused(program, path, tmp_path):
    with pytest.raises(ValueError, match=r"must end in \.pt2"):
        aot_compile(program, tmp_path / "tiny.so")
    whole = path.read_bytes()
    (tmp_path / "short.pt2").write_bytes(whole[: len(whole) // 2])
    with zipfile.ZipFile(tmp_path / "foreign.pt2", "w") as archive:
        archive.writestr("a/b.txt", "no package")
    program.save(tmp_path / "program.pt2")
    for name in ("short", "foreign", "program"):
        with pytest.raises(ValueError, match=r"path must be a .*package that aot_compile wrote"):
            load_package(tmp_path / f"{name}.pt2")
    with pytest.raises(ValueError, match="layout_version of the program must be"):
        load_package(changed(path, tmp_path / "version.pt2", layout_version=99))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA here"):
            load_package(changed(path, tmp_path / "cuda.pt2", device="cuda:0"))


def changed(path, target, **fields):
    """The package with another manifest."""
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w") as archive:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith("wrapper_metadata.json"):
                metadata = json.loads(content)
                metadata["kitty_manifest"] = json.dumps(json.loads(metadata["kitty_manifest"]) | fields)
                content = json.dumps(metadata).encode()
            archive.writestr(name, content)
    return target
