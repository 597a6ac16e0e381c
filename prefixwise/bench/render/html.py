"""A report as one HTML file: style and charts inside, no script, nothing to fetch.

The page is `templates/report.html.j2`; every text is escaped. The style is that of the server's page: the two backends
have a blue and an orange that people with any colour vision can distinguish, and different marks.
"""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from prefixwise.bench.render.document import NONE, Chart, Report, cell_of
from prefixwise.web.files import report_style

_TONES = {True: "good", False: "bad", None: "open"}


def report_html(report: Report) -> str:
    """The whole file."""
    return _template().render(
        report=report, has_date=report.date != NONE, tone=_TONES[report.passed], style=Markup(report_style())
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("prefixwise.bench.render"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = cell_of
    environment.filters["svg"] = _svg
    environment.tests["block_type"] = _is_block_type
    return environment.get_template("report.html.j2")


def _svg(chart: Chart) -> Markup:
    return Markup(chart.svg)


def _is_block_type(block: object, name: str) -> bool:
    return type(block).__name__ == name
