"""A study as one HTML file: style, script and data inside, nothing to fetch, so that it opens anywhere and for ever."""

from __future__ import annotations

import html
import json
import re
from importlib.resources import files
from typing import Any

from ringspan.cli.plan.drawings import drawings
from ringspan.cli.plan.study import Study
from ringspan.cli.plan.text import basis


def page(study: Study, told: dict[str, Any]) -> str:
    """Names come from users, so that all text is either escaped here or written as text, never as HTML, by the script."""
    data = {**told, "basis": basis(told), "drawings": drawings(study)}
    chosen = told["chosen"]
    parts = {
        "TITLE": html.escape(f"{chosen['strategy']} on {chosen['layout']}, {told['world']:,} ranks"),
        "STYLE": _part("page.css"),
        "SCRIPT": _part("page.js"),
        "DATA": _inside_script(data),
    }
    # In one pass, so that nothing is looked for in what was put in.
    return re.sub(r"@@(\w+)@@", lambda place: parts[place[1]], _part("page.html"))


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _inside_script(data: dict[str, Any]) -> str:
    """JSON without the signs by which a script element could be left."""
    return json.dumps(data, separators=(",", ":")).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
