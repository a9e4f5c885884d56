"""The loopback test of ``ringspan doctor``: what it says of errors and of wrong results."""

from __future__ import annotations

from typing import Any

import pytest

from ringspan.cli import loopback


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("RuntimeError: Unable to find address for: eth7", "GLOO_SOCKET_IFNAME=eth7 names no network interface"),
        ("rank 1 ended with exit code -9", "one of two processes was killed"),
        ("Traceback\nValueError: something else", "two gloo processes could not attend: ValueError: something else"),
        ("rank 1 did not finish in time", "two processes did not exchange a message within 60 s: a firewall may block"),
        ("", "two gloo processes could not attend: without a message"),
    ],
)
def test_errors_are_explained(error: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert loopback.explain(error, timeout=60).startswith(text)


@pytest.mark.parametrize(("errors", "works"), [([1e-7, 1e-7], True), ([1e-7, 0.1], False), ([1e-7, float("nan")], False)])
def test_a_wrong_result_of_one_rank_fails(errors: list[float], works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Workers:
        def __init__(self, *args: Any, **options: Any) -> None: ...

        def __enter__(self) -> Workers:
            return self

        def __exit__(self, *raised: Any) -> None: ...

        def run(self, job: Any, *args: Any) -> list[float]:
            return errors

    monkeypatch.setattr(loopback, "Pool", Workers)
    assert loopback.try_loopback(timeout=60)["works"] is works
