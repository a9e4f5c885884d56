"""Machines for tests of the cost model."""

from __future__ import annotations

from dataclasses import replace

from ringspan.costs import Hardware, Link, Speed

# For mental arithmetic: a pair of one head of dims 1 + 1 costs 4 FLOPs forward and 10 backward.
SLOW = Hardware(
    name="slow",
    per_node=2,
    within=Link(latency_s=0.5, bytes_per_s=100.0),
    between=Link(latency_s=2.0, bytes_per_s=10.0),
    forward=Speed(full=4.0, causal=2.0, window=1.0),
    backward=Speed(full=10.0, causal=5.0, window=2.5),
    launch_s=0.25,
    tile=0,
    memory=10**9,
    source="a test",
)

# A laptop: computing is slow, and sending disturbs it.
LAPTOP = Hardware(
    name="laptop",
    per_node=4,
    within=Link(latency_s=2e-4, bytes_per_s=1.2e9),
    between=Link(latency_s=2e-4, bytes_per_s=1.2e9),
    forward=Speed(full=8e10, causal=8e10, window=3e10),
    backward=Speed(full=8e10, causal=8e10, window=4e10),
    launch_s=2e-4,
    tile=512,
    memory=8 * 2**30,
    overlap=0.2,
    source="a test",
)

# The same, where copies and rows take a part of the time.
COPYING = replace(LAPTOP, name="copying", copy_bytes_per_s=3.3e9, copy_launch_s=1.7e-5, query_passes=1.3, key_passes=0.7)
