"""What is installed, and what an import costs."""

import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PASSES_AND_KERNELS = ("passes", "kernels")


def run_python(code, *, cwd=ROOT, path=(ROOT,)):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, *sys.path)))}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("setuptools", minversion="77.0.3")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("kitty_compile", *PASSES_AND_KERNELS, "pyproject.toml", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(source)], check=True)
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_installs_only_kitty_compile(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kitty_compile"}


def test_wheel_holds_every_module_once(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    expected = {f"kitty_compile/{path.name}" for path in (ROOT / "kitty_compile").glob("*.py")}
    expected |= {f"kitty_compile/huggingface/{path.name}" for path in (ROOT / "kitty_compile/huggingface").glob("*.py")}
    for folder in PASSES_AND_KERNELS:
        expected |= {f"kitty_compile/{folder}/{path.name}" for path in (ROOT / folder).glob("*.py")}
    assert len(names) == len(set(names))
    assert {name for name in names if name.endswith(".py")} == expected
    assert "kitty_compile/py.typed" in names


def test_installed_wheel_imports_away_from_the_checkout(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "import kitty_compile.kernels.layout as module; print(module.__file__)"
    (path,) = run_python(code, cwd=tmp_path, path=(tmp_path / "site",))
    assert pathlib.Path(path) == tmp_path / "site/kitty_compile/kernels/layout.py"


def test_entry_point_names_a_function(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert "kitty-compile = kitty_compile.cli:main" in archive.read(name).decode()
    assert run_python("import kitty_compile.cli; print(callable(kitty_compile.cli.main))") == ["True"]


def test_import_brings_neither_triton_nor_transformers():
    code = "import sys, kitty_compile; print(*({'triton', 'transformers', 'typer', 'rich'} & set(sys.modules)), 'end')"
    assert run_python(code) == ["end"]


def test_a_plain_module_needs_no_transformers():
    code = (
        "import sys, torch, kitty_compile\n"
        "from tests.models.nano_gpt import make_gpt\n"
        "cached = kitty_compile.apply(make_gpt(), example_inputs=(torch.zeros(1, 8, dtype=torch.int64),))\n"
        "print(type(cached).__name__, 'transformers' in sys.modules)"
    )
    assert run_python(code) == ["CachedModule", "False"]


def test_explain_is_the_function_even_after_its_module_was_imported():
    code = "import kitty_compile.explaining, kitty_compile; print(callable(kitty_compile.explain))"
    assert run_python(code) == ["True"]


def test_every_public_name_loads():
    code = "import kitty_compile; print(*[name for name in kitty_compile.__all__ if not hasattr(kitty_compile, name)], 'end')"
    assert run_python(code) == ["end"]


def test_unknown_name_is_an_attribute_error():
    import kitty_compile

    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        kitty_compile.nothing_of_the_kind  # noqa: B018
    assert set(kitty_compile.__all__) <= set(dir(kitty_compile))


def test_no_init_file_in_passes_and_kernels():
    for folder in PASSES_AND_KERNELS:
        assert not (ROOT / folder / "__init__.py").exists()
        assert (ROOT / "kitty_compile" / folder).is_symlink()


def test_transformers_run_from_the_checkout_does_not_take_our_kernels_for_its_own():
    code = (
        "import sys, transformers\n"
        "from transformers import LlamaForCausalLM\n"
        "from transformers.utils import is_kernels_available\n"
        "ours = [n for n, m in sys.modules.items() if n.startswith('kernels.') and '/kernels/' in str(m.__file__)]\n"
        "print(is_kernels_available() and '__file__' not in vars(sys.modules['kernels']), *ours)"
    )
    assert run_python(code) == ["False"]


def test_an_installed_kernels_package_wins_over_our_folder(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("NAME = 'theirs'\n")
    assert run_python("import kernels; print(kernels.NAME)", path=(ROOT, tmp_path)) == ["theirs"]
