"""A study as one HTML file that contains style, script and data, and loads nothing from a network."""

from __future__ import annotations

import html
import json
import re
from importlib.resources import files
from typing import Any

from ringspan.cli.plan.drawings import drawings
from ringspan.cli.plan.study import Study
from ringspan.cli.plan.text import basis


def page(study: Study, results: dict[str, Any]) -> str:
    """Make the page. Names come from users: all text is escaped here, or written by the script as text, never as
    HTML."""
    data = {**results, "basis": basis(results), "drawings": drawings(study)}
    chosen = results["chosen"]
    parts = {
        "TITLE": html.escape(f"{chosen['strategy']} on {chosen['layout']}, {results['world']:,} ranks"),
        "STYLE": _part("page.css"),
        "SCRIPT": _part("page.js") + _part("mask_view.js") + _part("start.js"),
        "DATA": _inside_script(data),
    }
    # In one pass, so that inserted text is not searched for placeholders.
    return re.sub(r"@@(\w+)@@", lambda place: parts[place[1]], _part("page.html"))


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _inside_script(data: dict[str, Any]) -> str:
    """Return JSON without the characters that could end a script element."""
    return json.dumps(data, separators=(",", ":")).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
