"""A mask: which queries see which keys, as a set of disjoint bands closed under ``&``, ``|`` and ``~``."""

from __future__ import annotations

import hashlib
import operator
import warnings
from collections.abc import Iterable, Iterator
from functools import reduce
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ringspan.errors import MaskError
from ringspan.masks import table as tables
from ringspan.masks.band import Band
from ringspan.masks.cuts import cuts_of_diagonals
from ringspan.masks.predicate import Predicate
from ringspan.masks.table import HI, K0, K1, MAX_LENGTH, Q0, Q1, Table


class Mask:
    """Which queries see which keys. Immutable; build one with ``causal``, ``documents``, … and combine with ``& | ~
    -``.

    ``q_len`` and ``k_len`` are None for a *relation*, which holds at any length (``window``) and takes the lengths of
    the mask it is combined with.

    >>> from ringspan import causal, window
    >>> mask = causal(6) & window(left=2)
    >>> mask
    <Mask causal(6) & window(left=2): 6 × 6, area 15, 1 band>
    >>> print(mask.ascii())
    x . . . . .
    x x . . . .
    x x x . . .
    . x x x . .
    . . x x x .
    . . . x x x
    """

    __slots__ = ("__weakref__", "_area", "_digest", "_documents", "k_len", "name", "predicate", "q_len", "table")

    q_len: int | None
    k_len: int | None
    table: Table
    name: str
    predicate: Predicate | None
    """Functions that decide which pairs of the bands are visible; None if all are."""
    _area: int
    _digest: str
    _documents: NDArray[np.int64]

    def __init__(
        self, table: Table, q_len: int | None, k_len: int | None, *, name: str, predicate: Predicate | None = None
    ) -> None:
        """Internal: ``table`` must be tight and disjoint. Use :meth:`from_bands` for bands of your own."""
        tables.check_count(len(table), name)
        table.setflags(write=False)
        fields = {"table": table, "q_len": q_len, "k_len": k_len, "name": name, "predicate": predicate}
        for field, value in fields.items():
            object.__setattr__(self, field, value)

    @property
    def settler(self) -> Predicate | None:
        """Deprecated: the former name of ``predicate``."""
        warnings.warn("Mask.settler is now Mask.predicate", DeprecationWarning, stacklevel=2)
        return self.predicate

    def __setattr__(self, field: str, value: object) -> NoReturn:
        raise AttributeError(f"a mask is immutable; {field!r} cannot be set. Combine masks with & | ~ instead")

    def __delattr__(self, field: str) -> NoReturn:
        raise AttributeError(f"a mask is immutable; {field!r} cannot be deleted")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.table, self.q_len, self.k_len, self.name, self.predicate)

    @classmethod
    def from_bands(cls, bands: Iterable[tuple[int, int, int, int, int, int]], q_len: int, k_len: int | None = None) -> Mask:
        """Return the union of the given ``(q0, q1, k0, k1, lo, hi)``, which may overlap; parts outside the lengths are
        cut away.

        >>> Mask.from_bands([(0, 4, 0, 2, -9, 9), (0, 4, 0, 4, -9, 0)], 4)
        <Mask from_bands(2 bands): 4 × 4, area 11, 2 bands>
        """
        q_len = length("q_len", q_len)
        k_len = q_len if k_len is None else length("k_len", k_len)
        given = [_band(band) for band in bands]
        name = f"from_bands({len(given)} band{'s' * (len(given) != 1)})"
        tables.check_count(len(given), name)
        union = tables.union(_clip(tables.table(*given), q_len, k_len))
        return cls(tables.coalesce(union), q_len, k_len, name=name)

    # -- properties ---------------------------------------------------------------------------------------------------

    @property
    def is_relation(self) -> bool:
        """Whether the mask has no lengths of its own."""
        return self.q_len is None

    @property
    def lengths(self) -> tuple[int, int]:
        """``(q_len, k_len)``. Raises for a relation."""
        if self.q_len is None or self.k_len is None:
            raise MaskError(
                f"{self.name} holds at any length and has none of its own: combine it with a mask that has one, as in "
                f"causal(n) & {self.name}, or full(n) & {self.name} for queries that see later keys, too"
            )
        return self.q_len, self.k_len

    @property
    def area(self) -> int:
        """The number of visible (query, key) pairs. With a predicate, an upper bound."""
        try:
            return self._area
        except AttributeError:
            _ = self.lengths
            object.__setattr__(self, "_area", int(tables.area(self.table).sum()))
            return self.area

    @property
    def digest(self) -> str:
        """Sixteen hex digits that are equal if and only if the tables of bands and the lengths are, on every machine.

        With a predicate, its fingerprint must be equal too: it follows from the results for all pairs, or for a
        BlockMask with many partial blocks from its blocks, its function and a sample.
        """
        try:
            return self._digest
        except AttributeError:
            fingerprint = "" if self.predicate is None else self.predicate.fingerprint
            head = f"{self.q_len},{self.k_len};{fingerprint}".encode()
            body = np.ascontiguousarray(self.table, dtype="<i8").tobytes()
            object.__setattr__(self, "_digest", hashlib.sha256(head + body).hexdigest()[:16])
            return self.digest

    @property
    def bands(self) -> tuple[Band, ...]:
        return tuple(self)

    def __iter__(self) -> Iterator[Band]:
        return (Band(*row) for row in self.table.tolist())

    def __len__(self) -> int:
        """The number of bands."""
        return len(self.table)

    def __bool__(self) -> NoReturn:
        raise MaskError("a mask has no truth value: write a & b, a | b, ~a (not `and`, `or`, `not`), or test mask.area")

    def __eq__(self, other: object) -> bool:
        """The same lengths and the same visible pairs, in whatever bands; with a predicate, the same digest."""
        if not isinstance(other, Mask):
            return NotImplemented
        if self is other or self.digest == other.digest:
            return True
        if (self.q_len, self.k_len) != (other.q_len, other.k_len) or self.predicate or other.predicate:
            return False
        return len((self - other).table) == 0 and len((other - self).table) == 0

    def __hash__(self) -> int:
        return hash((self.q_len, self.k_len, None if self.is_relation else self.area))

    def __repr__(self) -> str:
        name = self.name if len(self.name) <= 60 else self.name[:57] + "..."
        at_most = "" if self.predicate is None else "at most "
        size = "any length" if self.is_relation else f"{self.q_len} × {self.k_len}, area {at_most}{self.area}"
        return f"<Mask {name}: {size}, {len(self)} band{'s' * (len(self) != 1)}>"

    # -- algebra -------------------------------------------------------------------------------------------------------

    def __and__(self, other: Mask) -> Mask:
        """Pairs visible in both."""
        q_len, k_len = _common_lengths(self, other, "&")
        both = tables.intersect(self.table, other.table)
        predicates = [mask.predicate for mask in (self, other) if mask.predicate is not None]
        predicate = reduce(Predicate.both, predicates) if predicates else None
        return Mask(both, q_len, k_len, name=_join(self, "&", other), predicate=predicate)

    def __or__(self, other: Mask) -> Mask:
        """Pairs visible in either."""
        q_len, k_len = _common_lengths(self, other, "|")
        _refuse_predicate("|", self, other)
        a, b = _clip(self.table, q_len, k_len), _clip(other.table, q_len, k_len)
        either = np.concatenate([a, tables.subtract(b, a)])
        return Mask(tables.coalesce(either), q_len, k_len, name=_join(self, "|", other))

    def __sub__(self, other: Mask) -> Mask:
        """Pairs visible in this one and not in the other."""
        q_len, k_len = _common_lengths(self, other, "-")
        _refuse_predicate("-", other)
        left = tables.subtract(_clip(self.table, q_len, k_len), other.table)
        return Mask(tables.coalesce(left), q_len, k_len, name=_join(self, "-", other), predicate=self.predicate)

    def __invert__(self) -> Mask:
        """Pairs that are not visible.

        >>> from ringspan import causal
        >>> print((~causal(3)).ascii())
        . x x
        . . x
        . . .
        """
        _refuse_predicate("~", self)
        whole = _clip(_everything(), self.q_len, self.k_len)
        rest = tables.subtract(whole, self.table)
        return Mask(tables.coalesce(rest), self.q_len, self.k_len, name=f"~{_bracketed(self)}")

    @property
    def transposed(self) -> Mask:
        """The mask with queries and keys exchanged."""
        q0, q1, k0, k1, lo, hi = self.table.T
        turned = np.stack([k0, k1, q0, q1, -hi, -lo], axis=1)
        predicate = None if self.predicate is None else self.predicate.transposed
        return Mask(turned, self.k_len, self.q_len, name=f"{_bracketed(self)}.transposed", predicate=predicate)

    # -- for planning -------------------------------------------------------------------------------------------------

    def work(self, cuts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the area of the rows between each two consecutive cuts.

        >>> from ringspan import causal
        >>> causal(4).work(np.array([0, 2, 4])).tolist()
        [3, 7]
        """
        low, high = cuts[:-1], cuts[1:]
        i, j = tables.overlapping(low, high, self.table[:, Q0], self.table[:, Q1])
        part = self.table[j]
        part[:, Q0] = np.maximum(part[:, Q0], low[i])
        part[:, Q1] = np.minimum(part[:, Q1], high[i])
        part, kept = tables.tighten_indexed(part)
        total = np.zeros(len(low), dtype=np.int64)
        np.add.at(total, i[kept], tables.area(part))
        return total

    def documents(self, *, single: bool = False) -> NDArray[np.int64]:
        """Return the boundaries ``[0, …, n]`` of documents: no query sees a key across one.

        They are derived from the bands, so they are right for every mask with as many queries as keys, however it was
        made. With ``single``, each token that sees only itself, and that no other token sees, is a document of its own.
        Without it, such tokens that are adjacent can be one document: layouts need no cuts between them.

        >>> from ringspan import causal, documents, window
        >>> (documents([2, 3, 1]) & window(left=1)).documents().tolist()
        [0, 2, 5, 6]
        >>> (causal(3) & window(left=0)).documents(single=True).tolist()
        [0, 1, 2, 3]
        """
        try:
            bounds = self._documents
        except AttributeError:
            bounds = self._find_documents()
            bounds.setflags(write=False)
            object.__setattr__(self, "_documents", bounds)
        return np.union1d(bounds, cuts_of_diagonals(self.table)) if single else bounds

    def _find_documents(self) -> NDArray[np.int64]:
        q_len, k_len = self.lengths
        if q_len != k_len:
            raise MaskError(f"documents are those of one sequence; this one has {q_len} queries and {k_len} keys")
        if q_len == 0:
            return np.zeros(1, dtype=np.int64)
        start = np.minimum(self.table[:, Q0], self.table[:, K0])
        stop = np.maximum(self.table[:, Q1], self.table[:, K1])
        order = np.argsort(start, kind="stable")
        start, stop = start[order], stop[order]
        reach = np.maximum.accumulate(stop) if len(stop) else stop
        apart = np.flatnonzero(start[1:] >= reach[:-1])
        opens, closes = start[1:][apart], reach[:-1][apart]
        ends = np.concatenate([[0, q_len], start[:1], reach[-1:], opens, closes])
        ends.sort()
        return ends[np.append(True, ends[1:] != ends[:-1])]

    # -- display ------------------------------------------------------------------------------------------------------

    def dense(self, *, b: int = 0, h: int = 0) -> NDArray[np.bool_]:
        """Return the mask as a (q_len, k_len) boolean array: for tests and pictures, not for planning.

        If the mask depends on the batch or the head, ``b`` and ``h`` select a batch row and a head.
        """
        in_bands = tables.dense(self.table, *self.lengths)
        if self.predicate is None:
            return in_bands
        from ringspan.masks.survey import evaluate

        return in_bands & evaluate(self.predicate, self.lengths, b, h)

    @property
    def is_causal(self) -> bool:
        """Whether no query sees a later key."""
        # Bands are tight: each has a pair on its last diagonal.
        if self.predicate is None or (self.table[:, HI] <= 0).all():
            return bool((self.table[:, HI] <= 0).all())
        from ringspan.masks.survey import any_visible

        q_len, k_len = self.lengths
        later = tables.intersect(self.table, tables.table((0, q_len, 0, k_len, 1, MAX_LENGTH)))
        return not any_visible(self.predicate, later, self.lengths)

    def ascii(self) -> str:
        """Draw a small mask: a row for each query, ``x`` where it sees the key."""
        q_len, k_len = self.lengths
        if q_len > 128 or k_len > 128:
            raise MaskError(f"{q_len} × {k_len} is too large to print (128 × 128 at most)")
        return "\n".join(" ".join("x" if seen else "." for seen in row) for row in self.dense())


def _rebuilt(table: Table, q_len: int | None, k_len: int | None, name: str, predicate: Predicate | None) -> Mask:
    return Mask(table, q_len, k_len, name=name, predicate=predicate)


def length(what: str, value: Any) -> int:
    """Return ``value`` as a length, or raise a :class:`MaskError`."""
    try:
        n = operator.index(value)
    except TypeError:
        raise MaskError(f"{what} must be an integer number of tokens, not {value!r}") from None
    if not 0 <= n <= MAX_LENGTH:
        raise MaskError(f"{what} must be between 0 and {MAX_LENGTH} tokens, not {n}")
    return n


def lengths(what: str, values: Any) -> NDArray[np.int64]:
    """Return a list, array or tensor of lengths as int64, or raise a :class:`MaskError` that names the invalid one."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, list) and set(map(type, values)) == {int} and min(values) >= 0 and sum(values) <= MAX_LENGTH:
        return np.array(values, dtype=np.int64)
    try:
        checked = [length(f"{what}[{i}]", n) for i, n in enumerate(values)]
    except TypeError:
        raise MaskError(f"{what} must be a list of lengths, one per document, not {values!r}") from None
    length(f"the sum of {what}", sum(checked))
    return np.array(checked, dtype=np.int64)


def _band(given: Any) -> Band:
    """Return a band given by a user, as integers. Numbers beyond the longest sequence are clamped, which changes no
    pair."""
    try:
        numbers = [operator.index(x) for x in given]
        return Band(*(min(max(x, -MAX_LENGTH), MAX_LENGTH) for x in numbers))
    except TypeError:
        raise MaskError(f"a band is six integers (q0, q1, k0, k1, lo, hi), not {given!r}") from None


def _refuse_predicate(sign: str, *masks: Mask) -> None:
    """Raise for an operation that a predicate does not support."""
    for mask in masks:
        if mask.predicate is not None:
            raise MaskError(
                f"{mask.name} is defined by a function, and {sign} is not supported for such masks: write a function for the "
                "result, as in rs.mask_mod(lambda b, h, q, k: ~hidden(b, h, q, k), q_len). & works with any mask"
            )


def _everything() -> Table:
    return tables.table((0, MAX_LENGTH, 0, MAX_LENGTH, -MAX_LENGTH, MAX_LENGTH))


def _clip(t: Table, q_len: int | None, k_len: int | None) -> Table:
    if q_len is None or k_len is None:
        return t
    return tables.intersect(t, tables.table((0, q_len, 0, k_len, -MAX_LENGTH, MAX_LENGTH)))


def _common_lengths(a: Mask, b: Mask, sign: str) -> tuple[int | None, int | None]:
    if not isinstance(b, Mask):
        raise MaskError(f"{a.name} {sign} {b!r}: both sides must be masks")
    if a.is_relation:
        return b.q_len, b.k_len
    if not b.is_relation and a.lengths != b.lengths:
        raise MaskError(
            f"{_join(a, sign, b)}: the lengths differ, {a.q_len} × {a.k_len} and {b.q_len} × {b.k_len} (queries × keys). "
            "Make both for the same sequence"
        )
    return a.q_len, a.k_len


def _bracketed(mask: Mask) -> str:
    return f"({mask.name})" if " " in mask.name.split("(")[0] or ") " in mask.name else mask.name


def _join(a: Mask, sign: str, b: Mask) -> str:
    def side(m: Mask) -> str:
        return m.name if sign == "&" and not any(f" {s} " in m.name for s in "|-") else _bracketed(m)

    return f"{side(a)} {sign} {side(b)}"
