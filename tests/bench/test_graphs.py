"""The order in which streams wait for each other before a capture, with the CUDA calls replaced: it needs no GPU."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from ringspan.bench.graphs import captured


def test_the_warm_up_waits_for_the_current_stream_and_the_current_stream_for_the_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    class Stream:
        def __init__(self, name: str = "side") -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            events.append(f"{self.name} waits for {other.name}")

    class Graph:
        def replay(self) -> None: ...

    @contextmanager
    def within(entered: object):  # type: ignore[no-untyped-def]
        events.append("enter side" if isinstance(entered, Stream) else "capture")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("current"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "graph", within)
    assert captured(lambda: events.append("call")) is not None
    assert events == ["side waits for current", "enter side", "call", "current waits for side", "capture", "call"]
