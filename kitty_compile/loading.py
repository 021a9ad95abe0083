"""Models for the command line: a folder, a hub id or a .gguf file."""

import importlib.util
import pathlib
import re
import struct
from typing import Any

import huggingface_hub.utils.logging
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class ModelError(ValueError):
    """A model that cannot be loaded, in one line."""


def pick_device(name: str) -> torch.device:
    """The device called ``name``; "auto" is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device must be one that torch can use here, got {name!r}: {_first_line(error)}") from error
    return device


def pick_dtype(name: str, device: torch.device, *, is_gguf: bool) -> Any:
    """The dtype called ``name``; "auto" is the checkpoint's own, and bfloat16 for a .gguf file, whose weights have none."""
    if name == "auto":
        return torch.bfloat16 if is_gguf else "auto"
    if name not in DTYPES:
        raise ModelError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {name!r}")
    if name == "float16" and device.type == "cpu":
        raise ModelError("dtype must be bfloat16 or float32 on the CPU, got 'float16'")
    return DTYPES[name]


def load_model(name: str, *, dtype: str = "auto", device: str = "auto") -> PreTrainedModel:
    """The model in evaluation mode on its device."""
    source = _source_of(name)
    target = pick_device(device)
    arguments = {**source, "dtype": pick_dtype(dtype, target, is_gguf="gguf_file" in source)}
    model = _load(name, AutoModelForCausalLM.from_pretrained, arguments)
    return model.to(target).eval()  # type: ignore[no-any-return]


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer that lies beside the weights."""
    return _load(name, AutoTokenizer.from_pretrained, _source_of(name))  # type: ignore[no-any-return]


def build_random_model(name: str, *, dtype: str | None = None, device: str = "meta") -> PreTrainedModel:
    """A model of this configuration without its weights: with random ones, or on torch's meta device, where it shows shapes and
    costs no memory, with none. ``dtype`` None is the configuration's own."""
    source, target = _source_of(name), pick_device(device)
    picked = "auto" if dtype is None else pick_dtype(dtype, target, is_gguf="gguf_file" in source)
    config = _load(name, AutoConfig.from_pretrained, source)
    arguments = {"config": config, **({} if picked == "auto" else {"dtype": picked})}
    with target:
        model = _load(name, AutoModelForCausalLM.from_config, arguments)
    return model.eval()  # type: ignore[no-any-return]


def packaged_gguf(package: str) -> pathlib.Path:
    """The .gguf file inside an installed package, which is not imported: what it depends on need not be there."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"the package {package.replace('_', '-')} must be installed: run `make demo`")
    return next(pathlib.Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def quiet_transformers() -> None:
    """Only errors: a command's output is its own."""
    huggingface_hub.utils.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _source_of(name: str) -> dict[str, str]:
    """The arguments of ``from_pretrained`` that name the model."""
    path = pathlib.Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"MODEL must be a file that exists, got {name!r}")
        if not all(importlib.util.find_spec(package) for package in ("accelerate", "gguf")):
            raise ModelError("a .gguf file must be read with more packages: pip install 'kitty-compile[demo]'")
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"MODEL must be a folder with a config.json, got {name!r}")
        return {"pretrained_model_name_or_path": str(path)}
    if _HUB_ID.fullmatch(name) and not path.exists():
        return {"pretrained_model_name_or_path": name}
    raise ModelError(f"MODEL must be a model folder, a .gguf file or a hub id, got {name!r}")


def _load(name: str, load: Any, arguments: dict[str, Any]) -> Any:
    try:
        return load(**arguments)
    # What transformers and the file readers under it raise on a model that is absent, broken or of an unknown kind.
    except (ImportError, OSError, ValueError, KeyError, RuntimeError, struct.error) as error:
        raise ModelError(f"{name} cannot be loaded, {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
