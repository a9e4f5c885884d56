"""Random cases of attention: drawn from a seed, printed as a line, and saved as JSON, so that each can be run again.

A case holds JSON-serialisable values only. Its mask is an expression as a user would write it,
``documents([3, 4]) & window(left=2)``, and its tensors follow from its seed and index.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

import numpy as np

from ringspan.errors import InputError
from ringspan.layouts import LAYOUTS
from ringspan.masks.expressions import parse_mask
from ringspan.strategies import STRATEGIES, Strategy

MAX_LENGTH = 300
MAX_WORLD = 8

Spans: TypeAlias = tuple[tuple[tuple[int, int, int], ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of attention, forward and backward, on ``world`` ranks."""

    seed: int
    index: int
    world: int
    mask: str
    layout: str | Spans
    kv_layout: str | Spans | None
    strategy: str
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    scale: float | None
    dtype: str
    lse: bool  # the loss depends on lse as well as on out

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Case:
        """Read a case from a JSON text from :meth:`to_json`, which may have been edited to make the case smaller."""
        try:
            data = json.loads(text)
            for name in ("layout", "kv_layout"):
                if isinstance(data[name], list):
                    data[name] = tuple(tuple(tuple(span) for span in rank) for rank in data[name])
            return Case(**data)
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            names = ", ".join(f.name for f in fields(Case))
            raise InputError(f"invalid case: {error}. Expected a JSON object with the fields {names}") from None

    def __str__(self) -> str:
        def layout(given: str | Spans | None) -> str:
            return given if isinstance(given, str) else "spans"

        keys = "" if self.kv_layout is None else f" × {layout(self.kv_layout)}"
        scale = "" if self.scale is None else f", scale {self.scale}"
        return (
            f"case {self.index}: {self.mask if len(self.mask) <= 90 else self.mask[:87] + '...'} | {self.strategy} on "
            f"{layout(self.layout)}{keys}, {self.world} ranks | batch {self.batch}, {self.heads}/{self.kv_heads} heads, "
            f"head dim {self.head_dim}/{self.v_dim}, {self.dtype}{scale}{', loss uses lse' if self.lse else ''}"
        )


# -- drawing -----------------------------------------------------------------------------------------------------------


def draw(seed: int, index: int, world: int | None = None) -> Case:
    """Draw case ``index`` of a seed, independent of other cases. The number of ranks is random unless ``world`` is
    given.

    Sequence lengths are log-uniform, so that most cases are fast and edge cases still occur.
    """
    d = _Choices(seed, index)
    drawn_world = d.between(1, MAX_WORLD)
    world = drawn_world if world is None else world
    q_len = d.length()
    k_len = q_len if d.chance(0.75) else d.length()
    mask = _mask(d, q_len, k_len)
    kv_heads = d.between(1, 3)
    head_dim = d.one_of(_DIMS)
    return Case(
        seed=seed,
        index=index,
        world=world,
        mask=mask,
        layout=_layout(d, q_len, world, same_length=q_len == k_len),
        kv_layout=_layout(d, k_len, world, same_length=q_len == k_len) if d.chance(0.15) else None,
        strategy=_strategy(d, world),
        batch=d.between(1, 2),
        heads=kv_heads * d.one_of((1, 1, 2, 3, 4)),
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_dim=head_dim if d.chance(0.5) else d.one_of(_DIMS),
        scale=None if d.chance(0.7) else round(d.uniform(0.05, 1.5), 3),
        dtype=d.one_of(("float64",) * 7 + ("float32", "bfloat16", "float16")),
        lse=d.chance(0.4),
    )


_DIMS = (1, 3, 4, 8, 8, 12, 16, 16, 24, 32)


class _Choices:
    """A random generator that returns plain Python types."""

    def __init__(self, seed: int, index: int) -> None:
        self.rng = np.random.default_rng([seed, index])

    def between(self, low: int, high: int) -> int:
        """Return a random integer of ``low`` to ``high``, both included."""
        return int(self.rng.integers(low, high + 1))

    def uniform(self, low: float, high: float) -> float:
        return float(self.rng.uniform(low, high))

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def one_of(self, choices: Sequence[Any]) -> Any:
        return choices[self.between(0, len(choices) - 1)]

    def length(self) -> int:
        """Return a log-uniform length of 1 to MAX_LENGTH: half of the lengths are under 18, one in six is over 116."""
        return int(np.exp(self.uniform(0.0, np.log(MAX_LENGTH + 1))))

    def parts(self, total: int, count: int) -> list[int]:
        """Split ``total`` into a sum of ``count`` lengths, some of which may be 0."""
        cuts = np.sort(self.rng.integers(0, total + 1, size=count - 1))
        return [int(n) for n in np.diff([0, *cuts.tolist(), total])]


def _mask(d: _Choices, q: int, k: int) -> str:
    text = _expression(d, q, k, depth=d.one_of((0, 0, 0, 1, 1, 1, 2, 2, 3)))
    return f"full({q}, {k}) & ({text})" if parse_mask(text).is_relation else text


def _expression(d: _Choices, q: int, k: int, depth: int) -> str:
    if depth == 0 or d.chance(0.1):
        return str(d.one_of(_LEAVES if q == k else _CROSS_LEAVES)(d, q, k))
    operator = d.one_of(("&", "&", "&", "|", "|", "-", "~"))
    if operator == "~":
        return f"~({_expression(d, q, k, depth - 1)})"
    return f"({_expression(d, q, k, depth - 1)}) {operator} ({_expression(d, q, k, depth - 1)})"


def _causal(d: _Choices, q: int, k: int) -> str:
    return f"causal({q})" if q == k else f'causal({q}, {k}, align="{d.one_of(("start", "end"))}")'


def _window(d: _Choices, q: int, k: int) -> str:
    reach = max(q, k) // d.one_of((1, 2, 4, 8))
    sides = [f"{side}={d.between(0, reach)}" for side in d.one_of((["left"], ["right"], ["left", "right"]))]
    return f"window({', '.join(sides)})"


def _document_lengths(d: _Choices, n: int, count: int) -> list[int]:
    """Draw the lengths of documents. Those that begin with 0 and grow would be taken for cumulative lengths."""
    lengths = d.parts(n, count)
    return lengths[::-1] if lengths[0] == 0 else lengths


def _documents(d: _Choices, n: int, _: int) -> str:
    return f"documents({_document_lengths(d, n, d.between(1, 8))}{d.one_of(('', '', ', causal=False'))})"


def _ids(d: _Choices, n: int, _: int) -> str:
    """Draw document ids in runs. An id may occur in several runs."""
    ids = [x for size in d.parts(n, d.between(1, 10)) for x in [d.between(-1, 3)] * size]
    return f"documents(ids={ids}{d.one_of(('', '', ', causal=False'))})"


def _paired_documents(d: _Choices, q: int, k: int) -> str:
    count = d.between(1, 6)
    how = d.one_of(('align="start"', 'align="end"', "causal=False"))
    return f"documents({_document_lengths(d, q, count)}, kv_lengths={d.parts(k, count)}, {how})"


def _prefix(d: _Choices, n: int, _: int) -> str:
    return f"prefix({n}, {d.between(0, n)})"


def _tree(d: _Choices, n: int, _: int) -> str:
    """Draw nodes in depth-first order: each is a root, or follows a node of the path before it."""
    lengths = d.parts(n, d.between(1, 8))
    parents: list[int] = []
    path: list[int] = []
    for node in range(len(lengths)):
        path = path[: d.between(0, len(path))]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return f"tree({lengths}, {parents}{d.one_of(('', '', f', left={d.between(0, n)}'))})"


def _chunked(d: _Choices, n: int, _: int) -> str:
    return f"chunked({n}, {d.between(1, n)}{d.one_of(('', '', ', causal=False'))})"


def _from_bands(d: _Choices, q: int, k: int) -> str:
    """Draw bands as a user may write them: overlapping, empty, with bounds that are not minimal, partly outside."""

    def band() -> tuple[int, ...]:
        q0, q1 = sorted((d.between(-2, q + 2), d.between(-2, q + 2)))
        k0, k1 = sorted((d.between(-2, k + 2), d.between(-2, k + 2)))
        return q0, q1, k0, k1, d.between(-q - 2, k // 2), d.between(-q // 2, k + 2)

    return f"from_bands({[band() for _ in range(d.between(1, 4))]}, {q}, {k})"


def _full(d: _Choices, q: int, k: int) -> str:
    return f"full({q}, {k})"


def _causal_relation(d: _Choices, q: int, k: int) -> str:
    return "causal()"


# A mask that is listed twice is drawn twice as often.
_CROSS_LEAVES = (_full, _causal_relation, _causal, _window, _paired_documents, _paired_documents, _from_bands)
_LEAVES = (*_CROSS_LEAVES, _causal, _documents, _documents, _ids, _prefix, _chunked, _tree)


def _layout(d: _Choices, length: int, world: int, *, same_length: bool) -> str | Spans:
    any_lengths = [name for name in LAYOUTS if name != "per_document"]
    name = str(d.one_of([*any_lengths, "auto", *(["per_document"] if same_length else []), "spans"]))
    return _spans(d, length, world) if name == "spans" else name


def _spans(d: _Choices, length: int, world: int) -> Spans:
    """Return the sequence split at points and by strides, and the pieces assigned to random ranks in random order."""
    pieces = [range(length)]
    for _ in range(d.between(0, 2 * world)):
        piece = pieces.pop(d.between(0, len(pieces) - 1))
        if d.chance(0.8):
            at = d.between(0, len(piece))
            pieces += [piece[:at], piece[at:]]
        else:
            stride = d.between(1, 3)
            pieces += [piece[i::stride] for i in range(stride)]
    ranks: list[list[tuple[int, int, int]]] = [[] for _ in range(world)]
    for i in d.rng.permutation(len(pieces)).tolist():
        if len(pieces[i]):
            ranks[d.between(0, world - 1)].append((pieces[i].start, pieces[i].stop, pieces[i].step))
    return tuple(map(tuple, ranks))


def _strategy(d: _Choices, world: int) -> str:
    """Return a registered strategy with values from its ``example_options``, or auto. The number of heads is left to
    the tensors."""
    name = str(d.one_of([*STRATEGIES, "auto"]))
    kind = STRATEGIES.get(name)
    options = kind.example_options(world) if kind is not None and issubclass(kind, Strategy) else {}
    chosen = [f"{option}={d.one_of(values)!r}" for option, values in options.items()]
    # The defaults in 40 % of the cases, but always a per_node: by its default every case would be a single node.
    return f"{name}({', '.join(chosen)})" if chosen and ("per_node" in options or d.chance(0.6)) else name
