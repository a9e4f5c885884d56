"""From what the ranks have found to the rows of the table and a probable cause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import floor, log10
from typing import NamedTuple

from ringspan.frontends.parity.causes import Cause
from ringspan.frontends.parity.comparison import difference
from ringspan.frontends.parity.findings import GroupTensor, RankFindings, StepRun
from ringspan.frontends.parity.result import ParityRow
from ringspan.frontends.parity.trace import Place

CLOSE = 1e-3  # two ratios that differ by less are the same one


class Diagnosis(NamedTuple):
    cause: Cause
    detail: str


class GroupFindings(NamedTuple):
    """What all ranks have found together."""

    ranks: list[RankFindings]
    tensors: list[GroupTensor]
    places: list[Place]
    """all tensors, in the order of one process"""
    parameters: list[str]
    loss: float
    """of one process"""
    tolerance: float

    @property
    def world(self) -> int:
        return len(self.ranks)

    def wrong_tensors(self) -> list[GroupTensor]:
        """Return the floating-point tensors that are sharded along the sequence and differ from those of one process.

        Other tensors may differ without a mistake, such as counts and the positions of a cache.
        """
        return [x for x in self.tensors if x.cut and x.is_float and max(x.errors) > self.tolerance]

    def loss_errors(self) -> list[float]:
        scale = max(abs(self.loss), 1e-12)
        errors = [abs(rank.loss - self.loss) / scale for rank in self.ranks]
        return [error if error == error else float("inf") for error in errors]

    def wrong_parameters(self) -> list[int]:
        """Return the numbers of the parameters whose gradient is wrong on some rank."""
        return [
            n
            for n in range(len(self.parameters))
            if any(x is None or not x.error <= self.tolerance for x in (rank.gradients[n] for rank in self.ranks))
        ]


def rows_of(c: GroupFindings) -> list[ParityRow]:
    """Return the rows for modules, loss and gradients."""
    compared = [x for x in c.tensors if x.cut and x.is_float]
    wrong = c.wrong_tensors()
    rows = [_module_row(c, compared, wrong)]
    errors = c.loss_errors()
    ranks = tuple(rank for rank, error in enumerate(errors) if not error <= c.tolerance)
    first = {"name": "loss", "tensor": "value", "error": max(errors), "ranks": ranks} if ranks else {}
    ratios = _ratio_text([rank.loss / c.loss for rank in c.ranks]) if ranks and c.loss else ""
    rows.append(ParityRow(stage="loss", compared=1, differ=int(bool(ranks)), ratio=ratios, **first))  # type: ignore[arg-type]
    rows.append(_gradient_row(c))
    return rows


def _module_row(c: GroupFindings, compared: Sequence[GroupTensor], wrong: Sequence[GroupTensor]) -> ParityRow:
    if not wrong:
        return ParityRow(stage="modules", compared=len(compared), differ=0)
    first = wrong[0]
    key, label = c.places[first.place]
    return ParityRow(
        stage="modules",
        compared=len(compared),
        differ=len(wrong),
        name=str(key),
        tensor=label,
        error=max(first.errors),
        ranks=tuple(rank for rank, error in enumerate(first.errors) if error > c.tolerance),
    )


def _gradient_row(c: GroupFindings) -> ParityRow:
    wrong = c.wrong_parameters()
    if not wrong:
        return ParityRow(stage="gradients", compared=len(c.parameters), differ=0)
    found = [rank.gradients[wrong[0]] for rank in c.ranks]
    is_multiple = all(x is not None and x.rest <= c.tolerance * max(1.0, abs(x.ratio)) for x in found)
    return ParityRow(
        stage="gradients",
        compared=len(c.parameters),
        differ=len(wrong),
        name=c.parameters[wrong[0]],
        tensor="grad" if all(x is not None for x in found) else "grad (None on a rank, or in one process)",
        error=max((x.error for x in found if x is not None), default=None),
        ratio=_ratio_text([x.ratio for x in found if x is not None]) if is_multiple else "",
        ranks=tuple(rank for rank, x in enumerate(found) if x is None or not x.error <= c.tolerance),
    )


def _ratio_text(ratios: Sequence[float]) -> str:
    texts = [f"×{_digits(ratio)}" for ratio in ratios]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)


def _digits(ratio: float) -> str:
    """Return a ratio with three digits, or as many as show that it is not 1.

    >>> [_digits(x) for x in (2.2, 0.9912, 1.00067, 1 - 3e-7, 1 + 1e-12)]
    ['2.2', '0.991', '1.0007', '0.9999997', '1']
    """
    text = f"{ratio:.3g}"
    if text != "1" or abs(ratio - 1) < 1e-8:
        return text
    return f"{ratio:.{1 - floor(log10(abs(ratio - 1)))}g}"


def compare_without_cp(whole: StepRun, plain: StepRun, tolerance: float) -> tuple[ParityRow, Diagnosis | None]:
    """Compare a step in one process, under the mask of cp, with the step without ringspan."""
    errors: list[tuple[str, str, float]] = []
    for (key, label), expected in plain.trace.tensors.items():
        actual = whole.trace.tensors.get((key, label))
        if key.kind == "module" and actual is not None and expected.is_floating_point() and actual.shape == expected.shape:
            errors.append((str(key), label, difference(actual, expected, None).error))
    errors.append(("loss", "value", abs(whole.loss - plain.loss) / max(abs(plain.loss), 1e-12)))
    wrong = [x for x in errors if not x[2] <= tolerance]
    row = ParityRow(stage="without cp", compared=len(errors), differ=len(wrong))
    if not wrong:
        return row, None
    name, label, error = wrong[0]
    cause: Cause = "other_mask"
    if name == "loss":
        not_compared = _outputs_not_compared(whole, plain)
        if not_compared:
            return replace(row, name=name, tensor=label, error=error), Diagnosis("other_calls", not_compared)
        cause = "other_loss"
    elif _is_before_attention(whole, name, label):
        cause = "other_inputs"
    return replace(row, name=name, tensor=label, error=error), Diagnosis(cause, f"first seen in {name}, {label}")


def _outputs_not_compared(whole: StepRun, plain: StepRun) -> str:
    """Return how many outputs of modules only one of the runs has in this shape, and the first of them; empty if none.

    Inputs do not count: without_cp may give a mask that the step does not need, or an argument by its name.
    """
    shapes = [
        {
            (key, label): tuple(x.shape)
            for (key, label), x in run.trace.tensors.items()
            if key.kind == "module" and label.startswith("output") and x.is_floating_point()
        }
        for run in (whole, plain)
    ]
    of_step, of_other = shapes
    places = list(of_step | of_other)
    unlike = [place for place in places if of_step.get(place) != of_other.get(place)]
    if not unlike:
        return ""
    (key, label), *_ = unlike
    first, second = (f"shape {found[unlike[0]]}" if unlike[0] in found else "missing" for found in shapes)
    return f"{len(unlike)} of {len(places)} outputs not compared; {key}, {label}: {first} in step, {second} in without_cp"


def _is_before_attention(run: StepRun, name: str, label: str) -> bool:
    """Return whether a tensor of a module was recorded before the first attention call."""
    for key, recorded in run.trace.tensors:
        if key.kind != "module":
            return False
        if (str(key), recorded) == (name, label):
            return True
    return False


# -- causes ------------------------------------------------------------------------------------------------------------


def diagnose(c: GroupFindings, mixes_tokens: Callable[[GroupTensor], bool | None]) -> Diagnosis | None:
    """Return the probable cause; None if all is equal. ``mixes_tokens`` answers for a tensor whether it mixes
    tokens."""
    wrong = c.wrong_tensors()
    if wrong:
        return _of_forward(c, wrong[0], mixes_tokens)
    if max(c.loss_errors()) <= c.tolerance and not c.wrong_parameters():
        return None
    return _of_loss(c) or _of_gradients(c)


def _of_forward(c: GroupFindings, first: GroupTensor, mixes_tokens: Callable[[GroupTensor], bool | None]) -> Diagnosis:
    key, label = c.places[first.place]
    where = f"first seen in {key}, {label}, at token {first.token}"
    # The result of an attention call, whose q, k and v are equal: they come before it. Modules have an "output".
    if label == "out":
        return Diagnosis("attention" if key.kind == "attention" else "mask", where)
    for x in c.tensors:
        if c.places[x.place][0] == key and x.cut and not x.is_float and max(x.errors) > 0:
            return Diagnosis("positions" if x.is_positions else "inputs", f"{where}; {c.places[x.place][1]} differs")
    mixes = mixes_tokens(first)
    if mixes is None:
        return Diagnosis("inputs" if label.startswith("input") else "positions", where)
    if not mixes:
        return Diagnosis("positions", where)
    before = max((x.place for x in c.tensors if x.cut and x.is_float and x.place < first.place), default=-1)
    unseen = [n for rank in c.ranks for n in rank.unseen if before <= n <= first.place]
    if unseen:
        return Diagnosis("mask", f"{where}; {c.places[unseen[0]][0]} is not intercepted")
    return Diagnosis("mixing", where)


def _of_loss(c: GroupFindings) -> Diagnosis | None:
    """Judge by the gradients of the loss with respect to the outputs of the model, token by token."""
    outputs = [rank.outputs for rank in c.ranks if rank.outputs is not None]
    turned = sorted(token for x in outputs for token in x.turned)
    if turned:
        more = f" and {len(turned) - 1} more" if len(turned) > 1 else ""
        return Diagnosis("labels", f"the loss of token {turned[0]}{more} has another label, or none")
    if max(c.loss_errors()) <= c.tolerance:
        return None
    if any(_some_are_zero(x.ratios) for x in outputs):
        return Diagnosis("labels", "some tokens that have a label in one process have none on their rank")
    ratios = [ratio for x in outputs for ratio in x.ratios]
    factors = f"output gradients are {_ratio_text(ratios)} of those of one process, " if ratios else ""
    losses = ", ".join(f"{rank.loss:.6g}" for rank in c.ranks)
    total = sum(rank.loss for rank in c.ranks)
    if abs(total - c.loss) <= c.tolerance * max(abs(c.loss), 1e-12) and not c.wrong_parameters():
        return Diagnosis("loss_part", f"{losses} are together the {c.loss:.6g} of one process")
    return Diagnosis("loss_per_rank", f"{factors}the losses of the ranks are {losses} instead of {c.loss:.6g}")


def _some_are_zero(ratios: Sequence[float]) -> bool:
    """Return whether some tokens of a rank have no gradient. ``ratios`` are the smallest and the largest."""
    zeros = [abs(ratio) < 1e-6 for ratio in ratios]
    return any(zeros) and not all(zeros)


def _of_gradients(c: GroupFindings) -> Diagnosis:
    wrong = c.wrong_parameters()
    several = max(rank.calls.get("sum_gradients", 0) for rank in c.ranks) > 1
    uses_unshard = any(rank.calls.get("unshard", 0) for rank in c.ranks)
    found = [[rank.gradients[n] for rank in c.ranks] for n in wrong]
    some = f"{len(wrong)} of {len(c.parameters)} parameters"
    # For each wrong parameter, the ratio on each rank; and whether all wrong gradients, on all ranks, are multiples of
    # the expected ones.
    ratios = [[x.ratio for x in of_ranks if x is not None] for of_ranks in found]
    is_multiple = all(x is not None and x.rest <= c.tolerance * max(1.0, abs(x.ratio)) for of_ranks in found for x in of_ranks)
    if is_multiple and _all_close(ratios, c.world):
        return Diagnosis("summed_per_micro_batch" if several else "summed_again", f"{some} are ×{c.world}")
    if is_multiple and _all_close(ratios, 1 / c.world):
        return Diagnosis("averaged", f"{some} are ×1/{c.world}")
    if several:
        return Diagnosis("summed_per_micro_batch", some)
    if all(abs(sum(of_ranks) - 1) < CLOSE for of_ranks in ratios):
        return Diagnosis("not_summed", f"{some}; the parts of the ranks add up to the gradient of one process")
    return Diagnosis("partial_unshard" if uses_unshard else "unknown", some)


def _all_close(ratios: Sequence[Sequence[float]], expected: float) -> bool:
    return all(abs(ratio - expected) < CLOSE * expected for of_ranks in ratios for ratio in of_ranks)
