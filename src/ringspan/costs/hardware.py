"""A model of a machine: links, kernel speed by the shape of a band, memory."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ringspan.errors import PlanError


class Range(NamedTuple):
    """The numbers that a field may have: as text for errors, their types, and a condition."""

    words: str
    kinds: tuple[type, ...]
    holds: Callable[[Any], bool]


POSITIVE = Range("a number above 0", (int, float), lambda x: x > 0)
NOT_NEGATIVE = Range("a finite number, 0 or more", (int, float), lambda x: 0 <= x < math.inf)
SHARE = Range("a share between 0 and 1", (int, float), lambda x: 0 <= x <= 1)
WHOLE_POSITIVE = Range("an integer of at least 1", (int,), lambda x: x >= 1)
WHOLE_NOT_NEGATIVE = Range("an integer of at least 0", (int,), lambda x: x >= 0)


def _check_numbers(of: object, **ranges: Range) -> None:
    """Raise for invalid numbers. With NaN or negative numbers the automatic choice would not fail but choose
    wrongly."""
    for name, (words, kinds, holds) in ranges.items():
        given: Any = getattr(of, name)
        if isinstance(given, bool) or not isinstance(given, kinds) or not holds(given):  # NaN is in no range
            raise PlanError(f"{type(of).__name__}.{name} must be {words}, not {given!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Latency and bandwidth of a rank's link. It sends and receives at the same time, each at this bandwidth."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        _check_numbers(self, latency_s=NOT_NEGATIVE, bytes_per_s=POSITIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """FLOP/s of the kernel in long bands: rectangles, bands with one diagonal, bands with two."""

    full: float
    causal: float
    window: float

    def __post_init__(self) -> None:
        _check_numbers(self, full=POSITIVE, causal=POSITIVE, window=POSITIVE)

    @property
    def best(self) -> float:
        return max(self.full, self.causal, self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Ranks in nodes of ``per_node``: one link within a node, another between nodes.

    A launch takes ``launch_s``, and then its pairs are computed at the kernel's speed. The kernel computes in tiles of
    ``tile`` tokens, so a diagonal costs half a tile more for every row it crosses. ``overlap`` is the fraction of the
    overlapping time that is really saved: 1 if compute and communication do not slow each other down, 0 if they take
    turns, as on a CPU that does both. Messages that are not contiguous are packed and unpacked, and partial results are
    merged, at ``copy_bytes_per_s``; each of these copies is a launch of its own, which takes ``copy_launch_s``.

    Before and after its backward pass over the pairs, a kernel reads and writes the rows of a band: it computes the
    sums of dout × out, and clears and converts the gradients that it sums in float32. This takes as long as copying the
    queries of the band ``query_passes`` times and, where query heads share key heads, its keys and values
    ``key_passes`` times.
    """

    name: str
    per_node: int
    within: Link
    between: Link
    forward: Speed
    backward: Speed
    launch_s: float
    tile: int
    memory: int
    source: str
    overlap: float = 1.0
    copy_bytes_per_s: float = float("inf")
    copy_launch_s: float = 0.0
    query_passes: float = 0.0
    key_passes: float = 0.0

    def __post_init__(self) -> None:
        for kind, names in ((str, ("name", "source")), (Link, ("within", "between")), (Speed, ("forward", "backward"))):
            for name in names:
                if not isinstance(getattr(self, name), kind):
                    raise PlanError(f"Hardware.{name} must be a {kind.__name__}, not {getattr(self, name)!r}")
        _check_numbers(
            self,
            per_node=WHOLE_POSITIVE,
            launch_s=NOT_NEGATIVE,
            tile=WHOLE_NOT_NEGATIVE,
            memory=WHOLE_POSITIVE,
            overlap=SHARE,
            copy_bytes_per_s=POSITIVE,
            copy_launch_s=NOT_NEGATIVE,
            query_passes=NOT_NEGATIVE,
            key_passes=NOT_NEGATIVE,
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Hardware:
        """Read the output of :meth:`to_json`, which ``ringspan bench calibrate`` writes.

        Files that were written before ``copy_launch_s``, ``query_passes`` and ``key_passes`` were added do not have
        them. They are then 0, as when the file was written: its speeds include these times.
        """
        try:
            given: dict[str, Any] = json.loads(text)
            for name, kind in (("within", Link), ("between", Link), ("forward", Speed), ("backward", Speed)):
                if name not in given:
                    raise PlanError(f"{name} is missing")
                try:
                    given[name] = kind(**given[name])
                except (TypeError, PlanError) as error:
                    raise PlanError(f"{name}: {error}") from None
            return Hardware(**given)
        except (ValueError, TypeError, RecursionError) as error:
            raise PlanError(f"this is not a hardware file as `ringspan bench calibrate` writes it: {error}") from None


def _gpu(name: str, *, tflops: float, nvlink_gb_s: float, memory_gb: float, memory_tb_s: float, source: str) -> Hardware:
    """Return a GPU with the given forward FLOP/s in long rectangles and the given bandwidth of its memory. Other speeds
    are in the proportions measured on an H200."""
    full = tflops * 1e12
    return Hardware(
        name=name,
        per_node=8,
        within=Link(latency_s=5e-6, bytes_per_s=nvlink_gb_s * 1e9 * 0.8),
        between=Link(latency_s=15e-6, bytes_per_s=50e9 * 0.8),  # one 400 Gb/s port for each GPU
        forward=Speed(full=full, causal=full * 0.87, window=full * 0.80),
        backward=Speed(full=full * 0.88, causal=full * 0.80, window=full * 0.72),
        launch_s=30e-6,
        tile=128,
        memory=int(memory_gb * 1e9),
        source=source,
        # Measured on an H200 (benchmarks/overlap.py): 0.92 for copies by 8 multiprocessors at 250 GB/s, 0.86 by 16 at
        # 460.
        overlap=0.9,
        # A copy reads and writes. An H200, whose memory does 4.8 TB/s, was measured (docs/benchmarks.md) to copy 1.32.
        copy_bytes_per_s=memory_tb_s * 1e12 * 1.32 / 4.8,
        # ulysses over 8,192 tokens on 8 ranks (docs/benchmarks.md) was measured to take 0.32 ms longer than its pairs,
        # rows and bytes do by this model with the calibration there, and it makes 80 copies.
        copy_launch_s=4e-6,
        # No passes over rows: the speeds were measured with long bands, and include them.
    )


_DATASHEET = (
    "public datasheets: NVLink and memory as stated, kernels at the share of the peak that an H200 was measured to reach"
)

HARDWARE: dict[str, Hardware] = {
    "a100": replace(
        _gpu("a100", tflops=312 * 0.7, nvlink_gb_s=300, memory_gb=80, memory_tb_s=2.0, source=_DATASHEET),
        between=Link(latency_s=15e-6, bytes_per_s=25e9 * 0.8),  # 200 Gb/s
    ),
    "h100": _gpu("h100", tflops=989 * 0.7, nvlink_gb_s=450, memory_gb=80, memory_tb_s=3.35, source=_DATASHEET),
    "h200": _gpu(
        "h200",
        tflops=989 * 0.7,
        nvlink_gb_s=450,
        memory_gb=141,
        memory_tb_s=4.8,
        source="kernels as measured with FlashAttention-4 (docs/benchmarks.md), links and memory from the datasheet",
    ),
    "b200": _gpu("b200", tflops=2250 * 0.7, nvlink_gb_s=900, memory_gb=180, memory_tb_s=8.0, source=_DATASHEET),
    # One rank for each core. Processors differ: `ringspan bench calibrate` measures yours.
    "cpu": Hardware(
        name="cpu",
        per_node=8,
        within=Link(latency_s=230e-6, bytes_per_s=2e9),
        between=Link(latency_s=230e-6, bytes_per_s=1e9),
        forward=Speed(full=72e9, causal=72e9, window=32e9),
        backward=Speed(full=71e9, causal=71e9, window=45e9),
        launch_s=590e-6,
        tile=512,
        memory=int(12e9),
        source="measured on 2 cores of x86_64: float32, gloo, one thread for each rank (docs/benchmarks.md)",
        overlap=0.39,
        copy_bytes_per_s=4.6e9,
        copy_launch_s=3.5e-6,  # measured on the same processor at a later date. Passes over rows were not measurable
    ),
}


def hardware(name: str | Hardware) -> Hardware:
    """Return a machine by name, with the number of ranks of a node (8 by default), or from a hardware file.

    >>> hardware("h200x4").per_node
    4
    """
    if isinstance(name, Hardware):
        return name
    if not isinstance(name, str):
        raise PlanError(f"hardware is a name as 'h200x8', a file of `ringspan bench calibrate`, or a Hardware; not {name!r}")
    if name.endswith(".json"):
        try:
            return Hardware.from_json(Path(name).read_text(errors="replace"))
        except PlanError as error:
            raise PlanError(f"{error} (in {name})") from None
        except OSError as error:
            raise PlanError(f"cannot read {name}: {error.strerror}. `ringspan bench calibrate` writes such a file") from None
    match = re.fullmatch(r"(\w+?)(?:x(\d+))?", name)
    if not match or match[1] not in HARDWARE or int(match[2] or 8) == 0:
        known = ", ".join(HARDWARE)
        raise PlanError(
            f"no hardware is called {name!r}; there are {known}, each with a number of ranks in a node as in h200x8, "
            "and files that `ringspan bench calibrate` writes"
        )
    machine = HARDWARE[match[1]]
    return replace(machine, per_node=int(match[2])) if match[2] else machine
