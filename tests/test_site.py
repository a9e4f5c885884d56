"""The documentation site: it is built without a warning, and has every public name, every error and every page."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import ringspan as rs
from ringspan import errors

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_site_{name}", DOCS / "site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    hooks = load("hooks")
    for name in rs.__all__:
        page = (site / "reference" / f"{hooks.page_of(name)}.html").read_text(encoding="utf-8")
        assert f'id="{hooks.anchor(name)}"' in page, f"rs.{name} is not in the reference"


def test_the_reference_has_the_docstrings_as_html(site: Path) -> None:
    page = (site / "reference" / "frontends.html").read_text(encoding="utf-8")
    assert "A sequence split over the ranks of a group, and its attention mask." in page
    assert "cp.unshard" in page or "unshard" in page
    for markup in (":func:", ":class:", ":meth:", ":mod:", "::</p>", "<p>&gt;&gt;&gt;", "<blockquote>"):
        assert markup not in page, markup


def test_every_command_is_in_the_reference(site: Path) -> None:
    page = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    for command in ("demo", "plan", "check", "doctor", "bench", "bench rank", "bench calibrate"):
        assert f">ringspan {command}<" in page


def test_every_error_has_a_section_on_the_page_of_errors() -> None:
    sections = re.findall(r"^## (\w+)$", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    classes = [name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)]
    assert sorted(sections) == sorted(name for name in classes if getattr(errors, name).__module__ == errors.__name__)


def test_the_drawings_are_those_of_the_software() -> None:
    for name, drawn in load("drawings").drawings().items():
        assert (DOCS / "images" / name).read_text(encoding="utf-8") == drawn, f"{name}: run python docs/site/drawings.py"


@pytest.mark.parametrize(
    ("docstring", "markdown"),
    [
        ("Plain text with ``code``.", "Plain text with ``code``."),
        ("See :func:`ringspan.plan` and :meth:`~a.b.C.d`.", "See `ringspan.plan` and `d`."),
        ("Use it::\n\n    x = 1\n\nEnd.", "Use it:\n\n```python\nx = 1\n```\n\nEnd."),
        ("::\n\n    a  | b ─ c", "```text\na  | b ─ c\n```"),
        ("Example:\n\n>>> f(1)\n2\n\nEnd.", "Example:\n\n```pycon\n>>> f(1)\n2\n```\n\nEnd."),
    ],
)
def test_docstrings_become_markdown(docstring: str, markdown: str) -> None:
    pytest.importorskip("griffe", reason="the extra docs is not installed")
    assert load("docstrings").to_markdown(docstring) == markdown
