"""A model whose parameters are on the meta device, from a folder's configuration or a function; buffers have values.

The model's own code makes the buffers, so that those in no file (``inv_freq`` of rotary embeddings) are right.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._torch import own_parameters

CONFIG = "config.json"


def build(folder: Path, make: Any, config: Any, dtype: torch.dtype | None, in_files: torch.dtype | None) -> nn.Module:
    """Make the model. ``dtype``: by default that of the configuration, else ``in_files``."""
    if make is not None and not callable(make):
        raise TypeError(f"expected model to be a class of transformers or a function that makes a module, got {make!r}")
    if make is not None and config is None and not _is_of_transformers(make):
        with parameters_on_meta():
            model = make()
        if not isinstance(model, nn.Module):
            raise TypeError(f"expected model() to return a torch.nn.Module, got {model!r}")
        return model if dtype is None else model.to(dtype)
    transformers = _library()
    config = _configuration(folder, config, transformers)
    for name in getattr(config, "sub_configs", ()) if dtype is not None else ():
        if (part := getattr(config, name, None)) is not None:
            part.dtype = dtype
    dtype = dtype or config.dtype or in_files or torch.get_default_dtype()
    config.dtype = dtype
    make = make or _class_of(config, folder, transformers)
    with parameters_on_meta(), _default_dtype(dtype):
        model = make.from_config(config, dtype=dtype) if hasattr(make, "from_config") else make(config)
    _check_dtypes(model, dtype)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model.eval()  # type: ignore[no-any-return]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let each parameter be on the meta device from the moment that a module gets it."""
    register = nn.Module.register_parameter
    known: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # what is tied stays so; by the id of what is held here

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if type(param) is nn.Parameter and not param.is_meta:
            if id(param) not in known:
                made = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
                made.__dict__.update(vars(param))
                known[id(param)] = param, made
            own_parameters(self)[name] = known[id(param)][1]

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _is_of_transformers(make: Any) -> bool:
    return hasattr(make, "from_config") or hasattr(make, "config_class")


def _library() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "spmd.from_pretrained makes the model of a configuration by transformers, which is not installed: run "
            'pip install "spmd[transformers]", or pass a function that makes the module, model=...'
        ) from error
    return transformers


def _configuration(folder: Path, config: Any, transformers: Any) -> Any:
    if config is not None:
        return copy.deepcopy(config)
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(
            f"expected {CONFIG} in {folder}, which says what model it is: pass a configuration, config=..., or a "
            "function that makes the module, model=..."
        )
    try:
        json.loads((folder / CONFIG).read_bytes())
    except ValueError as error:
        raise ValueError(f"expected {folder / CONFIG} to be JSON, but {error}: it may be cut off") from error
    return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _class_of(config: Any, folder: Path, transformers: Any) -> Any:
    """The class that a configuration names."""
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    raise ValueError(
        f"the configuration in {folder} names no class that transformers has ({config.architectures}): pass one, such "
        "as model=AutoModelForCausalLM"
    )


def _check_dtypes(model: Any, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` for a model of which transformers would keep some modules in fp32."""
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ()) if dtype.itemsize == 2 else set()
    if dtype is torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if kept:
        raise ValueError(
            f"transformers keeps {', '.join(sorted(kept))} of {type(model).__name__} in fp32, which is not done here: "
            "pass dtype=torch.float32, and a MixedPrecisionPolicy to the mode"
        )


class LibraryNames:
    """Names in files, as transformers renames them when it reads a model; of any other module, as they are."""

    def __init__(self, model: nn.Module) -> None:
        self._transforms: list[Any] = []
        self._prefix, self._ignored = "", tuple[str, ...]()
        if hasattr(model, "base_model_prefix"):
            from transformers.conversion_mapping import get_model_conversion_mapping

            self._transforms = get_model_conversion_mapping(model)
            self._prefix = f"{model.base_model_prefix}."
            self._ignored = tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())

    def known(self, name: str, wanted: Container[str]) -> str:
        """The one of ``wanted`` names that an older or a shorter name in files stands for; else the name itself."""
        if name in wanted:
            return name
        newer = name
        for each in self._transforms:
            if not getattr(each, "operations", None):
                newer = each.rename_source_key(newer)[0]
        found = (newer, self._prefix + newer, newer.removeprefix(self._prefix))
        return next((each for each in found if each in wanted), name)

    def is_ignored(self, name: str, is_body: bool) -> bool:
        """Whether files have such a tensor, which the model does not: older ones, or those of one with a head."""
        of_head = is_body and not name.startswith(self._prefix)
        return of_head or any(re.search(pattern, name) for pattern in self._ignored)

    def is_body(self, names: Iterable[str], wanted: Container[str]) -> bool:
        """Whether files name the model as the body of another one."""
        return bool(self._prefix) and any(
            name not in wanted and name.removeprefix(self._prefix) in wanted for name in names
        )

    def changes(self, name: str) -> bool:
        """Whether the values of such a tensor in files are changed, not only renamed."""
        transforms = (each for each in self._transforms if getattr(each, "operations", None))
        return any(each.rename_source_key(name)[1] is not None for each in transforms)
