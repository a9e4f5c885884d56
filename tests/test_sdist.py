"""The source distribution has every file of the repository, so that ``make test`` runs from it."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def tracked_files() -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {path for path in listed.split("\0") if path and (ROOT / path).exists()}


def archived_files(archive: Path) -> set[str]:
    with tarfile.open(archive) as opened:
        return {member.name.partition("/")[2] for member in opened if member.isfile()}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a clone: a source distribution has no list of files")
def test_the_source_distribution_has_every_tracked_file(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, env={**os.environ, "SOURCE_DATE_EPOCH": "1580601600"}, capture_output=True, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    archived = archived_files(archive)
    missing = sorted(tracked_files() - archived)
    assert missing == [], f"add these to the sdist of pyproject.toml, {len(missing)} files"
