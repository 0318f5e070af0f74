"""spmd: a train step written for one device, compiled for many. ``public.py`` lists the public names."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from .public import *  # noqa: F403 (its names are listed there)


def __getattr__(name: str) -> Any:
    """Import the public names, and torch, at the first look at one: ``spmd --help`` needs neither."""
    if name == "__all__" or not name.startswith("_"):
        public = import_module(".public", __name__)
        globals().update({each: getattr(public, each) for each in public.__all__}, __all__=public.__all__)
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
