"""Write the page: data, style and script in one HTML file."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files as resources

from .contents import contents

# In the order in which they use each other.
_SCRIPTS = (
    *("data", "format", "timeline", "memory", "rows", "graph", "details", "collectives", "mesh", "watched"),
    "page",
)


def render(files: Mapping[str, str]) -> str:
    """The page of a dumped program, as HTML. Raises ``ValueError`` for files that no dump has written."""
    from jinja2 import Environment, StrictUndefined  # here, since most ranks never draw a page
    from markupsafe import Markup

    here = resources(__package__)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((here / "page.html").read_text(encoding="utf-8"))
    scripts = [(here / "script" / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS]
    data = contents(files)
    return template.render(
        name=data["report"]["name"],
        style=Markup((here / "page.css").read_text(encoding="utf-8")),  # ours, not foreign text
        script=Markup("\n".join(scripts)),
        data=data,
    )
