"""Who may import whom: kitty_compile -> passes -> kernels, read from the sources."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = {
    f"{package}.{path.stem}".removesuffix(".__init__"): path
    for package, folder in {
        "kitty_compile": ROOT / "kitty_compile",
        "kitty_compile.huggingface": ROOT / "kitty_compile/huggingface",
        "kitty_compile.passes": ROOT / "passes",
        "kitty_compile.kernels": ROOT / "kernels",
    }.items()
    for path in sorted(folder.glob("*.py"))
}
MAX_LINES = 400

# Free of triton and of every model library: what runs without them, and all that it imports.
CORE = (
    "kitty_compile",
    "kitty_compile.cache",
    "kitty_compile.kernels.ops",
    "kitty_compile.kernels.reference",
    "kitty_compile.kernels.torch_backend",
    "kitty_compile.program_file",
)
HEAVY = ("triton", "transformers", "typer", "rich")
PRINTS = {"kitty_compile.cli"}


def is_type_checking(node):
    return isinstance(node, ast.If) and getattr(node.test, "id", getattr(node.test, "attr", "")) == "TYPE_CHECKING"


def imports_of(module):
    """(imported module, is it imported when the file is) of every import of a source file; relative ones start with a dot."""
    found = []

    def visit(node, at_import):
        if isinstance(node, ast.Import):
            found.extend((alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            submodules = [f"{name}.{alias.name}" for alias in node.names]
            known = [submodule for submodule in submodules if submodule in SOURCES]
            found.extend((target, at_import) for target in known or [name])
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_type_checking(node)
        for child in ast.iter_child_nodes(node):
            visit(child, at_import and not lazy)

    visit(ast.parse(SOURCES[module].read_text()), at_import=True)
    return found


def layer_of(module):
    for layer in ("kitty_compile.kernels", "kitty_compile.passes", "kitty_compile"):
        if module == layer or module.startswith(layer + "."):
            return layer
    return None


ALLOWED = {
    "kitty_compile.kernels": {"kitty_compile.kernels"},
    "kitty_compile.passes": {"kitty_compile.kernels", "kitty_compile.passes"},
    "kitty_compile": {"kitty_compile.kernels", "kitty_compile.passes", "kitty_compile"},
}


@pytest.mark.parametrize("module", SOURCES)
def test_imports_point_downwards(module):
    layers = {layer_of(name) for name, _ in imports_of(module)} - {None}
    assert layers <= ALLOWED[layer_of(module)]


@pytest.mark.parametrize("module", SOURCES)
def test_imports_are_absolute(module):
    names = [name for name, _ in imports_of(module)]
    assert not [name for name in names if name.startswith(".")]
    # Bare `kernels` is another project's package.
    assert not [name for name in names if name.split(".")[0] in ("kernels", "passes", "tests")]


@pytest.mark.parametrize("module", SOURCES)
def test_third_parties_stay_in_their_layer(module):
    packages = {name.split(".")[0] for name, _ in imports_of(module)}
    # Only kernels are written in triton; only the top layer knows a model library.
    banned = {"triton"} if layer_of(module) != "kitty_compile.kernels" else set(HEAVY) - {"triton"}
    if layer_of(module) == "kitty_compile.passes":
        banned = set(HEAVY)
    assert not packages & banned


@pytest.mark.parametrize("root", CORE)
def test_importing_the_core_imports_nothing_heavy(root):
    reached, queue = set(), [root]
    while queue:
        module = queue.pop()
        if module in reached:
            continue
        reached.add(module)
        names = [name for name, at_import in imports_of(module) if at_import]
        assert not [name for name in names if name.split(".")[0] in HEAVY], module
        queue.extend(name for name in names if name in SOURCES)


@pytest.mark.parametrize("module", sorted(set(SOURCES) - PRINTS))
def test_library_does_not_print(module):
    calls = [node for node in ast.walk(ast.parse(SOURCES[module].read_text())) if isinstance(node, ast.Call)]
    assert not [call.lineno for call in calls if getattr(call.func, "id", "") == "print"]


@pytest.mark.parametrize("module", SOURCES)
def test_files_are_short(module):
    assert len(SOURCES[module].read_text().splitlines()) <= MAX_LINES
