"""Attention as an operator with a name, for all who look at operators rather than just run them: ``torch.compile``,
``torch.export``, selective checkpointing, counters of operations.

An operator takes tensors and numbers, and a plan is neither. So a rank has a *seat* (what it needs to know to attend), and the
operator is handed the seat's *ticket*, a tensor of one whole number. A tensor, since compiled programs take tensors as inputs:
other documents are another ticket and not another program.

Legend: B batch, H query heads, G key heads, S queries, T keys, D head dim, E value dim.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ringspan.engine.autograd import Run, attend, saved_for_backward, size_and_sign
from ringspan.engine.beside import beside
from ringspan.engine.executor import Call, backward
from ringspan.errors import InputError, KernelError
from ringspan.kernels import Partial, Saved, accumulation_dtype
from ringspan.planner import Plan
from ringspan.torch_private.dispatch_keys import default_dispatch_keys
from ringspan.torch_private.dispatch_modes import dispatch_mode_depth, dispatch_mode_stack
from ringspan.torch_private.dynamo import dynamo_constant
from ringspan.torch_private.function_modes import disable_torch_function

# Checks the tensors of a call (with the peers, the first time) and says which plan, for their heads, and which kernel they get.
Prepare = Callable[[Tensor, Tensor, Tensor, float], tuple[Plan, Call]]


# The seats of one ticket, by when they were taken. It is held by them alone, and goes with the last.
Row: TypeAlias = "WeakValueDictionary[int, Seat]"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Seat:
    """A rank's place at a plan: how its calls are prepared, who moves its bytes, and between which processes.

    Without a ticket it is of this call alone, and no operator.
    """

    prepare: Prepare
    run: Run
    processes: tuple[int, ...]
    ticket: Tensor | None = None
    row: Row | None = None

    def attend(self, q_BHSD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, scale: float) -> Partial:
        """Attention of this rank, differentiable; as an operator where somebody looks."""
        if is_watched():
            ticket = self._printed_ticket() if _is_exporting() else self.ticket
            if ticket is not None:
                return attend_by_ticket(q_BHSD, k_BGTD, v_BGTE, ticket, scale)
        with disable_torch_function():  # a block around this call would see the kernels' own
            plan, call = self.prepare(q_BHSD, k_BGTD, v_BGTE, scale)
            (result,) = attend([plan], [(q_BHSD, k_BGTD, v_BGTE)], call, self.run)
        return result

    @dynamo_constant
    def _printed_ticket(self) -> Tensor | None:
        """The ticket, as a constant of the program: an exported one has no inputs but its function's own."""
        return self.ticket


# A seat lives as long as whoever took it (a ContextParallel), and the latest ones longer: a backward pass may come afterwards.
_rows: WeakValueDictionary[int, Row] = WeakValueDictionary()
_latest: OrderedDict[int, Seat] = OrderedDict()
_clock = count()
MOST = 256


def take_seat(name: str, place: Seat) -> Seat:
    """The seat with a ticket, a number that follows from ``name`` alone, in every process that takes it.

    Of several seats of one name the one that was taken last is found: after ``destroy_process_group`` a new group may well have
    an old one's name.
    """
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
    with torch.inference_mode(False):  # a tensor made in inference mode could not be saved for a backward pass
        ticket = torch.tensor(number, dtype=torch.int64, device="cpu")
    row = _rows.setdefault(number, WeakValueDictionary())
    seat = replace(place, ticket=ticket, row=row)
    row[next(_clock)] = seat
    _latest.pop(number, None)
    _latest[number] = seat
    if len(_latest) > MOST:
        _latest.popitem(last=False)
    return seat


def _seat_of(ticket: Tensor) -> Seat:
    row = _rows.get(int(ticket))
    taken = [] if row is None else list(row)  # a copy: plans are made ahead in other threads
    seat = row.get(max(taken)) if row is not None and taken else None
    if seat is None:
        raise InputError(
            f"no seat has ticket {int(ticket)}: the ContextParallel that this program was compiled or exported with is gone, "
            "or is of another process. Make it again with the same mask, layout, strategy, back end and group, and keep it"
        )
    return seat


def is_watched() -> bool:
    """Whether somebody looks at operators. Nobody does in plain eager code, where the operator would only cost time; nor does
    torch's CommDebugMode, which counts messages, and would find none if they were hidden in an operator."""
    if torch.compiler.is_dynamo_compiling():  # is_compiling() is True while any thread of the process compiles
        return True
    if dispatch_mode_depth() == 0:
        return False
    return any(type(mode).__name__ != "CommDebugMode" for mode in dispatch_mode_stack())


@dynamo_constant
def _is_exporting() -> bool:
    # Asked outside the trace, in which torch 2.11 says yes to every compiler: a compiled program would keep its first ticket.
    return torch.compiler.is_exporting()


def attend_by_ticket(q_BHSD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, ticket: Tensor, scale: float) -> Partial:
    """:func:`ringspan.engine.attend` of the rank that has this ticket, as one operator."""
    size, sign = size_and_sign(scale)
    q_BHSD = q_BHSD if sign == 1 else q_BHSD * sign
    out_SBHE, lse_SBH = torch.ops.ringspan.attend(q_BHSD, k_BGTD, v_BGTE, ticket, size)
    return Partial(out_SBHE.movedim(0, 2), lse_SBH.movedim(0, 2))


# -- the two operators -------------------------------------------------------------------------------------------------
#
# Rows first, and contiguous: what a compiled program is told of an operator's strides must be so, whatever the kernel likes.

# What a compiler captures in a CUDA graph of its own accord, it warms up in memory of that graph; what is made once for a plan
# must not lie there.

TAGS = (torch.Tag.cudagraph_unsafe,)
torch.library.define(
    "ringspan::attend", "(Tensor q, Tensor k, Tensor v, Tensor ticket, float scale) -> (Tensor, Tensor)", tags=TAGS
)
torch.library.define(
    "ringspan::attend_backward",
    "(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor ticket, float scale)"
    " -> (Tensor, Tensor, Tensor)",
    tags=TAGS,
)


@torch.library.impl("ringspan::attend", "CompositeExplicitAutograd")
def _attend(q: Tensor, k: Tensor, v: Tensor, ticket: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    seat = _seat_of(ticket)
    with disable_torch_function(), torch.no_grad():
        plan, call = seat.prepare(q, k, v, scale)
        with _as_outside(call):
            (result,) = attend([plan], [(q, k, v)], call, seat.run)
        return result.out.movedim(2, 0).contiguous(), result.lse.movedim(2, 0).contiguous()


@torch.library.impl("ringspan::attend_backward", "CompositeExplicitAutograd")
def _attend_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ticket: Tensor,
    scale: float,
) -> tuple[Tensor, ...]:
    seat = _seat_of(ticket)
    with disable_torch_function(), torch.no_grad():
        plan, call = seat.prepare(q, k, v, scale)
        q_SBHD, k_TBGD, v_TBGE = (x.movedim(2, 0) for x in (q, k, v))
        saved = Saved(
            q_SBHD,
            torch.zeros_like(out) if dout is None else dout,
            out,
            lse,
            None if dlse is None else dlse.masked_fill(lse == -torch.inf, 0.0),
        )
        with _as_outside(call):
            ((dq, dk, dv, *_),) = seat.run([backward(plan, saved, beside(k_TBGD, v_TBGE), call)])
        return tuple(x.movedim(0, 2).to(q.dtype).contiguous() for x in (dq, dk, dv))


@contextmanager
def _as_outside(call: Call) -> Iterator[None]:
    """Functions of the user are called by ``torch.vmap`` and differentiated by autograd, and whoever looks at operators has
    turned both off for what runs in one."""
    if call.mods is None:
        yield
        return
    with default_dispatch_keys(), torch.inference_mode(torch.is_inference_mode_enabled()):
        yield


@torch.library.register_fake("ringspan::attend")
def _(q: Tensor, k: Tensor, v: Tensor, ticket: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    b, h, s, _ = q.shape
    return q.new_empty((s, b, h, v.shape[-1])), q.new_empty((s, b, h), dtype=accumulation_dtype(q.dtype))


@torch.library.register_fake("ringspan::attend_backward")
def _(dout: Any, dlse: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, ticket, out, lse = saved_for_backward(ctx)
    grads = torch.ops.ringspan.attend_backward(dout, dlse, q, k, v, out, lse, ticket, ctx.scale)
    return *grads, None, None


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise KernelError("the gradient of attention was differentiated again: no kernel here computes second derivatives")


torch.library.register_autograd("ringspan::attend", _differentiate, setup_context=_save)
torch.library.register_autograd("ringspan::attend_backward", _no_second_derivative)
