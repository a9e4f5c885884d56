"""Plan handles: what one rank needs to attend under a plan, and the registry in which custom operators find it.

A custom operator takes tensors and numbers, and a plan is neither. So a handle may be registered under an id, and the
operator ``ringspan::attend`` receives the id as an int64 tensor. A tensor is an input of a compiled program, so that a
new mask is a new input and not a recompilation.

Legend: B batch, H query heads, G key heads, S queries, T keys, D head dim, E value dim.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from ringspan.debugging.settings import settings
from ringspan.engine.executor import AttentionConfig
from ringspan.engine.inputs import shape_of
from ringspan.engine.kernel_choice import choose_config, kernel_inputs, with_values
from ringspan.errors import InputError, TransportError
from ringspan.kernels import Inputs, Kernel, ScoreMod, check_backend, kernel_name
from ringspan.masks import Mask
from ringspan.planner import Plan
from ringspan.torch_private.dynamo import dynamo_constant
from ringspan.transports import (
    CallDescription,
    ProcessGroupTransport,
    RankSignature,
    check_agreement,
    digest_as_int64,
    report_refusal,
)
from ringspan.transports.handshake import DTYPES, NO_SCORE_MOD, SHARD_ADVICE, VERSION, Agreements, agreements

log = logging.getLogger("ringspan.engine")

MAX_PREPARED = 256  # calls of one plan

# Why the plan that a rank runs is not the one that the user has made, in the error of ranks that disagree.
KEEPS_NO_ROWS = (
    "as it runs compiled code or a dispatch mode, which keep no rows: run compiled code, or a dispatch mode such as "
    "FlopCounterMode, on all ranks or on none"
)

LENGTHS_LISTED = 8  # of documents, in the error of ranks that disagree on the mask

# Whether rows may be kept, the scale, the back end, whether passes become CUDA graphs, and the shape, dtype and device
# of q, k and v: all that the preparation of a call depends on.
CallKey: TypeAlias = tuple[object, ...]


class PreparedCall(NamedTuple):
    """What is worked out once for all calls with one key."""

    fitted: Plan | None
    """The plan for the heads of these tensors; None if it is the handle's own, which must not hold itself."""
    signature: RankSignature
    inputs: Inputs
    config: AttentionConfig | None = None
    """None until the first call without functions of the user."""
    mods_kernel: Kernel | None = None
    """The kernel of calls with functions. Their tensors are looked up in every call, so such a call has no config
    here."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class PlanHandle:
    """One rank's plan, the group it runs on, the kernel that was asked for, and whether passes become CUDA graphs.

    Without an ``id`` the handle is not in the registry: it serves eager calls only.
    """

    plan: Plan
    group: ProcessGroupTransport
    backend: str = "auto"
    cuda_graphs: bool = False
    id: Tensor | None = None
    _calls: dict[CallKey, PreparedCall] = field(init=False, repr=False)
    _agreed: Agreements = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_backend(self.backend)
        plan, group = self.plan, self.group
        if (plan.world, plan.rank) != (group.world, group.rank):
            raise InputError(
                f"this is the plan of rank {plan.rank} of {plan.world}, but this process is rank {group.rank} of {group.world} "
                "in the group: make it with rs.plan(mask, world=..., rank=...) for this group"
            )
        object.__setattr__(self, "_calls", plan.derived(_prepared_calls))
        object.__setattr__(self, "_agreed", agreements(group))

    def refuse(self, kind: str, error: BaseException, scale: float | None = None) -> None:
        """Tell the other ranks an error of this rank, unless they know it already. ``kind`` is "forward" or
        "backward"."""
        self.group.refuse(CallDescription(kind, self.plan.digest, scale), error)

    @contextmanager
    def reporting(self, kind: str, scale: float) -> Iterator[None]:
        """Tell the other ranks of an error that leaves the block."""
        try:
            yield
        except Exception as error:
            self.refuse(kind, error, scale)
            raise

    @dynamo_constant
    def constant_id(self) -> Any:
        """Return the id as a constant of the program: an exported program has no inputs but those of its function."""
        return self.id

    def prepare(
        self,
        q_BHSD: Tensor,
        k_BGTD: Tensor,
        v_BGTE: Tensor,
        scale: float,
        score_mod: ScoreMod | None = None,
        *,
        keep: bool = True,
    ) -> tuple[Plan, AttentionConfig]:
        """Return the plan for these tensors' heads and the kernel to run, once all ranks have agreed on the call.

        ``keep=False``: the plan without rows that are kept for the backward pass, ``plan.without_keeping()``.

        A rank checks its tensors and functions and selects its kernel before it communicates. If it cannot make the
        call, what its peers do depends on the calls before:

        - The group has agreed on no call of this plan yet. The peers are in the handshake, or about to enter it. The
          rank takes part, so that they raise :class:`~ringspan.errors.PeerFailed`, and raises its own error.
        - The group has agreed on a call of this plan. The peers most likely come with the same shapes as before, skip
          the handshake and exchange rows. A rank that entered the handshake would wait until the time limit. It raises
          at once and writes its error to the store, where waiting peers read it. They raise
          :class:`~ringspan.errors.PeerFailed`.
        """
        # fmt: off
        key = (
            keep, scale, self.backend, self.cuda_graphs, q_BHSD.shape, k_BGTD.shape, v_BGTE.shape, q_BHSD.dtype, k_BGTD.dtype,
            v_BGTE.dtype, q_BHSD.device, k_BGTD.device, v_BGTE.device,
        )
        # fmt: on
        call = self._calls.get(key)
        if call is not None and call.config is not None and score_mod is None:
            plan, signature, config = call.fitted or self.plan, call.signature, call.config
        else:
            try:
                plan, signature, config = self._prepare(key, q_BHSD, k_BGTD, v_BGTE, scale, score_mod, keep)
            except Exception as error:
                if self.plan.digest in self._agreed.values():
                    self.refuse("forward", error, scale)
                else:
                    with suppress(TransportError):  # the peers may not come, and the error of this rank says more
                        report_refusal(self.group, error, q_BHSD.device)
                raise
        if signature not in self._agreed:
            self._agree(plan, signature, q_BHSD.device)
        return plan, config

    def _prepare(
        self, key: CallKey, q: Tensor, k: Tensor, v: Tensor, scale: float, score_mod: ScoreMod | None, keep: bool
    ) -> tuple[Plan, RankSignature, AttentionConfig]:
        """Check the call and select its kernel. Keep what later calls with this key share."""
        call = self._calls.get(key) or self._describe(q, k, v, keep)
        plan, signature = call.fitted or self.plan, call.signature
        config = choose_config(
            plan, q, k.shape[1], call.inputs, scale, self.backend, score_mod, call.mods_kernel, cuda_graphs=self.cuda_graphs
        )
        if key not in self._calls:
            name, where = kernel_name(config.kernel), str(q.device)
            log.info("rank %d: kernel %s for %s on %s of plan %s", plan.rank, name, call.inputs.dtype, where, plan.digest)
        if settings.debug and config.mods is not None:
            config = with_values(config)
        if config.forward_call is not None and config.forward_call.score_mod:
            signature = signature._replace(score_mod=digest_as_int64(config.forward_call.score_mod))
        if key not in self._calls and len(self._calls) >= MAX_PREPARED:
            self._calls.clear()
        self._calls[key] = call._replace(config=config) if config.mods is None else call._replace(mods_kernel=config.kernel)
        return plan, signature, config

    def _describe(self, q: Tensor, k: Tensor, v: Tensor, keep: bool) -> PreparedCall:
        """Fit the plan to the heads of these tensors, and state what the ranks compare and what kernels are asked
        about."""
        shape = shape_of(q, k, v)
        fitted = self.plan.for_heads(shape.heads, shape.kv_heads)
        if not keep:
            fitted = fitted.without_keeping()
        signature = RankSignature(
            version=VERSION,
            fitted_digest=digest_as_int64(fitted.digest),
            batch=shape.batch,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            v_dim=v.shape[-1],
            dtype=DTYPES.index(shape.dtype),
            score_mod=NO_SCORE_MOD,
            queries=q.shape[2],
            keys=k.shape[2],
        )
        return PreparedCall(None if fitted is self.plan else fitted, signature, kernel_inputs(fitted, q, v))

    def _agree(self, plan: Plan, signature: RankSignature, device: torch.device) -> None:
        """Run the handshake. Every rank does so when a call is new to the group."""
        planned = signature._replace(queries=plan.q_rows, keys=plan.kv_rows)
        if signature != planned and planned in self._agreed:  # so the peers skip the handshake
            error = InputError(
                f"rank {plan.rank} has {signature.queries} queries and {signature.keys} keys where the plan says "
                f"{plan.q_rows} and {plan.kv_rows}: {SHARD_ADVICE}"
            )
            self.group.refuse(CallDescription("forward", plan.digest), error)
            raise error
        lengths = zip(plan.q_layout.counts, plan.kv_layout.counts, strict=True)
        as_given = self.plan.for_heads(signature.heads, signature.kv_heads)
        is_same = plan.kv_layout == plan.q_layout
        keys = "that of the queries" if is_same else f"{plan.kv_layout.digest} ({plan.kv_layout.name})"
        parts = {
            "plan": plan.digest,
            "mask": _mask_text(plan.mask),
            "layout": f"{plan.q_layout.digest} ({plan.q_layout.name})",
            "layout of the keys": keys,
            "strategy": plan.strategy + ("" if plan.digest == as_given.digest else f", {KEEPS_NO_ROWS}"),
            "dkv_dtype": plan.program.dkv_dtype,
        }
        check_agreement(self.group, signature, lengths, device, user_plan_digest=self.plan.digest, plan_parts=parts)


def _mask_text(mask: Mask) -> str:
    """Describe a mask for ranks whose masks differ: the names of two packed batches can be equal.

    >>> from ringspan import causal, documents
    >>> _mask_text(documents([300, 47, 184]))
    '0ad16ea7a0c4ab68 (documents(3 over 531 tokens), lengths 300, 47, 184)'
    >>> _mask_text(documents([5] * 20))
    '696d2d2b2869d68f (documents(20 over 100 tokens), lengths 5, 5, 5, 5, 5, 5, 5, 5, ...)'
    >>> _mask_text(causal(531))
    '6c8e74a0b1ec9623 (causal(531))'
    """
    q_len, k_len = mask.lengths
    lengths = np.diff(mask.documents()).tolist() if q_len == k_len else []
    if len(lengths) < 2:
        return f"{mask.digest} ({mask.name})"
    first = ", ".join(map(str, lengths[:LENGTHS_LISTED]))
    return f"{mask.digest} ({mask.name}, lengths {first}{', ...' if len(lengths) > LENGTHS_LISTED else ''})"


def _prepared_calls(plan: Plan) -> dict[CallKey, PreparedCall]:
    """Return the prepared calls of a plan, none yet. They are kept with the plan: handles made for one call share
    them."""
    return {}


class HandleRegistry:
    """Handles by id. May be used from several threads: plans are made ahead in other threads.

    The registry holds handles weakly. The id tensor of a handle owns the handle that the registry finds, so this handle
    lives as long as the ContextParallel, a compiled program or a graph of autograd that has saved the id for its
    backward pass. ::

        ContextParallel ──► handle with an id ──► id tensor ──► handle without an id ──► plan, group
        program, autograd graph ──────────────────────┘                  ▲
        registry ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ┘ weak

    Of several handles of one id the last registered is found: after ``destroy_process_group`` a new group may have the
    name of an old one.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._by_id: dict[int, list[ref[PlanHandle]]] = {}

    def register(self, name: str, handle: PlanHandle) -> PlanHandle:
        """Return the handle with an id, which follows from ``name`` alone in every process."""
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
        with torch.inference_mode(False):  # a tensor made in inference mode could not be saved for a backward pass
            plan_id = torch.tensor(number, dtype=torch.int64, device="cpu")
        plan_id.ringspan_handle = handle  # type: ignore[attr-defined]
        with self._lock:
            self._by_id = {n: alive for n, refs in self._by_id.items() if (alive := [r for r in refs if r() is not None])}
            self._by_id.setdefault(number, []).append(ref(handle))
        return replace(handle, id=plan_id)

    def find(self, plan_id: Tensor) -> PlanHandle:
        """Return the handle that was registered under an id."""
        number = int(plan_id)
        with self._lock:
            for reference in reversed(self._by_id.get(number, [])):
                handle = reference()
                if handle is not None:
                    return handle
        raise InputError(
            f"no plan is registered under id {number}: the ContextParallel that this program was compiled or exported with was "
            "deleted, or belongs to another process. Make it again with the same mask, layout, strategy, back end and group, "
            "and keep it"
        )


def copy_id(plan_id: Tensor) -> Tensor:
    """Return a new tensor of the same id, for an operator's result. It owns the handle if ``plan_id`` does."""
    copy = plan_id.clone()
    copy.ringspan_handle = getattr(plan_id, "ringspan_handle", None)  # type: ignore[attr-defined]
    return copy


registry = HandleRegistry()
