"""The templates of reports/templates, filled by one jinja2 environment that escapes every value."""

from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup, escape

from sparsebench.results.formatting import amount
from sparsebench.results.statistics.outcome import MEANINGS
from sparsebench.results.tables.frame import MARKS


def render(template: str, **values: Any) -> str:
    """Fill a template."""
    return _environment().get_template(template).render(**values)


def content(name: str) -> str:
    """Return a file of reports/templates as it is."""
    return (files("sparsebench.reports") / "templates" / name).read_text("utf-8")


def code(text: str) -> Markup:
    """Return a text whose parts in backticks are code."""
    marked = Markup("<code>%s</code>")
    parts = text.split("`")
    return Markup("").join(marked % part if i % 2 else escape(part) for i, part in enumerate(parts))


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(content),
        trim_blocks=True,
    )
    environment.filters["amount"] = amount
    environment.filters["code"] = code
    environment.globals["outcomes"] = MEANINGS
    environment.globals["marks"] = MARKS
    environment.globals["inlined"] = lambda name: Markup(content(name))
    return environment
