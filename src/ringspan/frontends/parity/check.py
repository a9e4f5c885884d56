"""``check_parity``: a model over the ranks of a ContextParallel against the same model in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ringspan.errors import InputError, UnplannedAttention
from ringspan.frontends.context_parallel import ContextParallel
from ringspan.frontends.parity.causes import Cause
from ringspan.frontends.parity.diagnosis import Diagnosis, GroupFindings, compare_without_cp, diagnose, rows_of
from ringspan.frontends.parity.findings import (
    GroupTensor,
    RankFindings,
    StepRun,
    compare_gradients,
    compare_output_gradients,
    compare_tensors,
    gradients_of,
    merge_tensors,
    not_intercepted,
)
from ringspan.frontends.parity.group_data import first_difference, gather
from ringspan.frontends.parity.probe import Probe, mixes_tokens
from ringspan.frontends.parity.result import Parity, ParityRow
from ringspan.frontends.parity.trace import NOT_INTERCEPTED, Recorder, Trace, leaves
from ringspan.frontends.reporting import report_error
from ringspan.frontends.watched_block import NO_ATTENTION
from ringspan.torch_private.pytree import tree_map_only
from ringspan.transports.calls import refuse_calls
from ringspan.transports.single_rank import SingleRank

Step = Callable[[Any, Any, ContextParallel], Tensor]

# dtype -> the largest error, relative to the largest value of the tensor, that rounding may cause
TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def check_parity(
    model: nn.Module,
    batch: Any,
    cp: ContextParallel,
    *,
    step: Step | None = None,
    without_cp: Callable[[Any, Any], Tensor] | None = None,
    dim: int = 1,
    dtype: torch.dtype | None = torch.float64,
    tolerance: float | None = None,
    check: bool = False,
) -> Parity:
    """Compare a training step over the ranks of ``cp`` with the same step in one process.

    Every rank of ``cp`` calls it with the same model and the same batch of *whole* sequences. Your
    ``step(model, batch, cp)`` shards the batch, calls the model in ``with cp:``, and returns the loss::

        def step(model, batch, cp):
            tokens, labels = cp.shard(batch["tokens"], rs.shift_labels(batch["tokens"]), dim=1)
            with cp:
                logits = model(tokens, cp.positions())
            loss = cp.mean(F.cross_entropy(logits.mT, labels, reduction="none"), labels >= 0)
            loss.backward()
            cp.sum_gradients(model.parameters())
            return loss

        print(rs.check_parity(model, batch, cp, step=step))

    It runs twice, with two copies of the model: once with a ``cp`` of one rank and the same mask, and once with yours.
    So it must use the model and the ``cp`` that it is given. Compared are the inputs and outputs of every module, q, k,
    v and out of every attention call, the loss, and the gradient of every parameter. If the step does not call
    ``backward``, ``loss.backward()`` and ``cp.sum_gradients(model.parameters())`` are called after it.

    Without ``step``, the tensors of the batch (a tensor, tuple or dict) are sharded along ``dim`` and passed to the
    model. The loss is that of the result, if it has one (``result.loss``), else the mean square of its first tensor.

    With ``without_cp(model, batch)``, which computes the same loss without ringspan, the step in one process is
    compared with that first. So a mask that is not the model's own is found, too. It may call ``backward``; its
    gradients are not compared.

    The copies compute in ``dtype`` (None: the dtypes of the model), and their dropout modules drop nothing. All runs
    start with the same seed. A model that calls ``F.dropout`` itself must be in evaluation mode: ranks cannot drop what
    one process drops. ``tolerance`` is relative to the largest value of a tensor. A difference is returned, not raised,
    unless ``check=True``.
    """
    copies = [_copy(model, dtype) for _ in range(2)]
    batch = _cast(batch, dtype)
    computed = dtype or next((p.dtype for p in model.parameters()), torch.float32)
    limit = TOLERANCES.get(computed, 1e-4) if tolerance is None else tolerance
    job = _Job(copies[0], copies[1], batch, cp, step or _default_step(dim), without_cp, computed, limit)
    parity = _differing_ranks(job)
    if parity is None:
        parity = _compare(job)
    if check:
        parity.check()
    return parity


class _Job(NamedTuple):
    whole_model: nn.Module
    model: nn.Module
    batch: Any
    cp: ContextParallel
    step: Step
    without_cp: Callable[[Any, Any], Tensor] | None
    dtype: torch.dtype
    tolerance: float

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    @property
    def widen(self) -> bool:
        return self.dtype == torch.float64

    def result(self, rows: list[ParityRow], diagnosis: Diagnosis | None, notes: tuple[str, ...] = ()) -> Parity:
        return Parity(
            ok=diagnosis is None,
            rows=tuple(rows),
            cause=None if diagnosis is None else diagnosis.cause,
            detail="" if diagnosis is None else diagnosis.detail,
            notes=notes,
            world=self.cp.world,
            dtype=str(self.dtype).removeprefix("torch."),
            tolerance=self.tolerance,
        )


def _differing_ranks(job: _Job) -> Parity | None:
    """Return a result if the ranks do not have the same parameters and inputs."""
    tensors = [*job.model.named_parameters(), *job.model.named_buffers(), *leaves(job.batch, "batch")]
    names = first_difference(tensors, job.cp.group, job.device)
    if not names:
        return None
    row = ParityRow(stage="inputs", compared=len(tensors), differ=len(names), name=names[0], tensor="value")
    return job.result([row], Diagnosis("ranks_differ", f"the first of {len(names)} is {names[0]}"))


OTHER_CP = (
    "the step of check_parity uses another ContextParallel than the one that it is given: a global one, or one that it makes "
    "itself. The check also runs the step in one process, with a cp of one rank: use its argument `cp` for everything"
)


def _compare(job: _Job) -> Parity:
    cp, alone = job.cp, single(job.cp)
    _use_block(job.whole_model, alone)
    tokens = cp.mask.lengths
    recorder = Recorder(job.whole_model, tokens, widen=job.widen)
    try:
        with refuse_calls(OTHER_CP) if cp.world > 1 else nullcontext():
            whole = _run(job, job.whole_model, alone, recorder)
    except UnplannedAttention as error:
        return _not_intercepted(job, recorder.trace, error)
    except Exception as error:
        error.add_note(
            f"raised in check_parity, in one process and in {job.dtype} (dtype=None keeps that of the model). The cp of this "
            "run has one rank, which owns all tokens: shard with cp.shard and ask cp.rank and cp.world, not torch.distributed"
        )
        raise
    rows: list[ParityRow] = []
    if job.without_cp is not None:
        row, other_step = compare_without_cp(whole, _run_without_cp(job, job.without_cp), job.tolerance)
        rows.append(row)
        if other_step is not None:
            return job.result(rows, other_step)
    counts = (cp.plan.q_layout.counts[cp.rank], cp.plan.kv_layout.counts[cp.rank])
    recorder = Recorder(job.model, counts, widen=job.widen)
    try:
        mine = _run(job, job.model, cp, recorder)
    except Exception as error:
        error.add_note("raised in the sharded run of check_parity; the same step has run in one process")
        report_error(cp.group, "check_parity", error)
        raise
    tensors, cuts = compare_tensors(mine.trace, whole.trace, cp)
    own = RankFindings(
        tensors,
        compare_output_gradients(mine.trace, whole.trace, cp, job.tolerance),
        compare_gradients(mine.gradients, whole.gradients),
        mine.loss,
        dict(mine.trace.calls),
        not_intercepted(mine.trace, whole.trace),
    )
    ranks = [RankFindings.from_json(data) for data in gather(own, cp.group, job.device)]
    comparison = GroupFindings(
        ranks, merge_tensors(ranks), list(whole.trace.tensors), list(whole.gradients), whole.loss, job.tolerance
    )

    def mixes(x: GroupTensor) -> bool | None:
        return mixes_tokens(
            lambda probe: _run(job, job.whole_model, alone, probe),
            job.whole_model,
            tokens,
            widen=job.widen,
            target=comparison.places[x.place],
            token=x.token,
            cuts=cuts,
        )

    return job.result(rows + rows_of(comparison), diagnose(comparison, mixes))


def _run(job: _Job, model: nn.Module, cp: ContextParallel, recorder: Recorder | Probe) -> StepRun:
    model.zero_grad(set_to_none=True)
    with _seeded(job.device), recorder:
        loss = job.step(model, job.batch, cp)
        _check_loss("step(model, batch, cp)", loss)
        if not recorder.has_calls:
            raise InputError("the step has called no module of the model that it was given: use its argument `model`")
        if loss.requires_grad and all(g is None for g in gradients_of(model).values()):
            loss.backward()
            cp.sum_gradients(model.parameters())
    return StepRun(recorder.trace, loss.item(), gradients_of(model))


def _run_without_cp(job: _Job, without_cp: Callable[[Any, Any], Tensor]) -> StepRun:
    job.whole_model.zero_grad(set_to_none=True)  # else a backward pass would add to the gradients of the step
    recorder = Recorder(job.whole_model, job.cp.mask.lengths, widen=job.widen)
    with _seeded(job.device), recorder:
        loss = without_cp(job.whole_model, job.batch)
        _check_loss("without_cp(model, batch)", loss)
    return StepRun(recorder.trace, loss.item(), {})


def _check_loss(function: str, loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(f"{function} must return the loss, a tensor with one element; got {got}")


@contextmanager
def _seeded(device: torch.device) -> Iterator[None]:
    """Let every run draw the same random numbers, and leave those of the program as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


def _not_intercepted(job: _Job, trace: Trace, error: UnplannedAttention) -> Parity:
    """Return the result if a block has seen no attention, or has refused it, in one process already."""
    unseen = [key for key, _ in trace.tensors if key.kind in NOT_INTERCEPTED]
    name = str(unseen[0]) if unseen else "with cp:"
    row = ParityRow(stage="modules", compared=0, differ=1, name=name, tensor="out")
    cause: Cause = "mask" if str(error) == NO_ATTENTION else "refused"
    return job.result([row], Diagnosis(cause, f"first seen in {name}"), (str(error),))


def single(cp: ContextParallel) -> ContextParallel:
    """Return a ContextParallel of this rank alone, with the same mask: it owns all tokens and sends nothing."""
    return ContextParallel(
        SingleRank(cp.group), cp.mask, backend=cp.backend, expect_attention=cp.expects_attention, layout="contiguous"
    )


def _use_block(model: nn.Module, alone: ContextParallel) -> None:
    """Replace the blocks that modules of the model hold (layers with another mask) by those of one rank."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, ContextParallel):
                setattr(module, name, alone.with_mask(value.mask))


def _copy(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    try:
        made = copy.deepcopy(model)
    except Exception as error:
        raise InputError(
            f"check_parity runs copies of the model, and this {type(model).__name__} cannot be copied "
            f"({type(error).__name__}: {error}): give it the module before it is wrapped"
        ) from error
    for module in made.modules():
        if isinstance(module, DROPOUTS):
            module.p = 0.0
    return made if dtype is None else made.to(dtype)


def _cast(batch: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return batch
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, batch)


def _default_step(dim: int) -> Step:
    def step(model: Any, batch: Any, cp: ContextParallel) -> Tensor:
        mine = cp.shard(batch, dim=dim)
        with cp:
            if isinstance(mine, Mapping):
                result = model(**mine)
            else:
                result = model(*mine) if isinstance(mine, list | tuple) else model(mine)
        loss = getattr(result, "loss", None)
        if isinstance(loss, Tensor):
            return loss
        _, first = next(leaves(result, "output"), ("", None))
        if first is None:
            raise InputError(f"the model has returned no tensor but {type(result).__name__}: give check_parity a step")
        return cp.mean(first.square())

    return step
