"""Context parallelism of ``accelerate``, and of the ``Trainer`` of transformers, on ringspan.

With ``ParallelismConfig(cp_size=…)``, accelerate splits the batch in ``maybe_context_parallel`` and lets PyTorch
compute attention, for full causal attention only. Here the same hooks shard by a ringspan layout and attend under the
masks of the model::

    from ringspan.integrations.accelerate import ParallelismConfig

    trainer = Trainer(args=TrainingArguments(..., parallelism_config=ParallelismConfig(cp_size=2)), ...)

    accelerator = accelerate.Accelerator(parallelism_config=ParallelismConfig(cp_size=2))   # in a loop of your own

Sliding windows, chunks, softcap, sinks, packed documents, padding and lengths that the ranks do not divide are exact.
The documents of a packed batch are found by its position ids, as transformers does in one process. A loss that is
computed outside the model is refused. With this configuration context parallelism works on CPUs too, where accelerate
refuses its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any

import accelerate
import torch
from accelerate.utils import DistributedType, gather_object, recursively_apply
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ringspan.errors import InputError
from ringspan.frontends.context_parallel import ContextParallel
from ringspan.frontends.current_block import current_block
from ringspan.integrations.trainer import SharedLosses, TrainerStep, check_router_losses, finish_output
from ringspan.integrations.transformers import packed_mask
from ringspan.integrations.transformers import prepare as prepare_model
from ringspan.masks import causal


class ParallelismConfig(accelerate.ParallelismConfig):
    """An ``accelerate.ParallelismConfig`` whose context parallelism is ringspan's, on GPUs and on CPUs.

    The accelerator that gets this configuration uses ringspan; :func:`use_ringspan` need not be called.
    """

    def _validate_accelerator(self, accelerator: accelerate.Accelerator) -> None:
        """Check the sizes against the accelerator that is being made, and let it use ringspan."""
        if accelerator.distributed_type == DistributedType.MULTI_CPU:
            self._check_cpus(accelerator.num_processes)
        else:
            super()._validate_accelerator(accelerator)
        use_ringspan(accelerator)

    def _check_cpus(self, processes: int) -> None:
        """Raise unless all processes are in one context-parallel group.

        accelerate has no FSDP on CPUs. It wraps the model in DDP over all processes.
        """
        if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
            raise InputError(
                "accelerate has no FSDP on CPUs, and would replicate the model without a word: leave the fsdp options out"
            )
        others = {axis: size for axis, size in self._sizes.items() if axis != "cp" and size > 1}
        if others or self.cp_size != processes:
            sizes = ", ".join(f"{axis}_size={size}" for axis, size in {"cp": self.cp_size, **others}.items())
            raise InputError(
                f"on CPUs, accelerate replicates the model on all {processes} processes, so that they form one group: expected "
                f"cp_size={processes} and no other size, got {sizes}"
            )


class Accelerator(accelerate.Accelerator):
    """An ``accelerate.Accelerator`` whose context parallelism is ringspan's."""

    def _prepare_cp(self, *args: Any) -> tuple[Any, ...]:
        return prepare(self, *args)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        return gather_for_metrics(self, input_data, use_gather_object)


def use_ringspan(of: Any) -> None:
    """Let an accelerator that another library has made, or the accelerator of a ``Trainer``, use ringspan.

    Call it before ``accelerator.prepare``, which ``trainer.train`` and ``trainer.evaluate`` call.
    """
    accelerator = getattr(of, "accelerator", of)
    accelerator._prepare_cp = MethodType(prepare, accelerator)
    accelerator.gather_for_metrics = MethodType(gather_for_metrics, accelerator)
    if accelerator is not of:
        gather_by_object = of.args.eval_use_gather_object
        of.gather_function = partial(accelerator.gather_for_metrics, use_gather_object=gather_by_object)


def prepare(accelerator: Any, *prepared: Any) -> tuple[Any, ...]:
    """Set the context that ``maybe_context_parallel`` enters in each step. Called by ``Accelerator.prepare``.

    Trainer calls it for its model and for each data loader. So the models are those that the accelerator has when a
    step begins.
    """
    if accelerator.distributed_type == DistributedType.MULTI_CPU:
        for model in prepared:
            # ``Trainer.evaluate`` marks a model as prepared without wrapping it; DDP would then be left out in training
            if isinstance(model, nn.Module) and not isinstance(model, DistributedDataParallel):
                model.__dict__.pop("_is_accelerate_prepared", None)

    def context(**buffers: Any) -> Any:
        models = [accelerator.unwrap_model(model) for model in accelerator._models]
        return sharded(mesh=accelerator.torch_device_mesh["cp"], models=models, **buffers)

    accelerator._cp_context = context
    return prepared


def gather_for_metrics(accelerator: Any, input_data: Any, use_gather_object: bool = False) -> Any:
    """Gather from all ranks, without the rows that fill up the last batch.

    Outside a step, all ranks of a sequence have its rows, and those of the first of them are kept. Inside a step they
    have different tokens, and all are kept.
    """
    config, mesh = accelerator.parallelism_config, accelerator.torch_device_mesh
    if config is None or config.cp_size == 1:
        return accelerate.Accelerator.gather_for_metrics(accelerator, input_data, use_gather_object)
    if current_block() is not None:
        return gather_object(input_data) if use_gather_object else accelerator.gather(input_data)
    first = mesh.mesh.select(mesh.mesh_dim_names.index("cp"), 0).flatten().tolist()
    state, world = accelerator.gradient_state, accelerator.num_processes
    stop = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
    if use_gather_object or not _are_tensors(input_data):
        gathered = gather_object([input_data])
        return [x for rank in first for x in gathered[rank]][:stop]

    def kept(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (world, -1))[first].flatten(0, 1)[:stop]

    return recursively_apply(kept, accelerator.gather(input_data))


def _are_tensors(tree: Any) -> bool:
    try:
        recursively_apply(lambda x: x, tree, error_on_other_type=True)
    except TypeError:
        return False
    return True


@contextmanager
def sharded(
    *,
    mesh: DeviceMesh,
    models: Sequence[Any],
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
) -> Iterator[ContextParallel]:
    """Replace the contents of the buffers by this rank's tokens, and attend over all ranks, while the context is open.

    The arguments after ``models`` are those of ``maybe_context_parallel``. Buffers are restored on exit, except those
    in ``no_restore_buffers`` while gradients are recorded.
    """
    given, dims = list(buffers or ()), list(buffer_seq_dims or ())
    if not given or len(given) != len(dims):
        raise InputError(f"context parallelism needs buffers and a sequence dim for each; got {len(given)} and {len(dims)}")
    positions = _positions(given, dims)
    cp = ContextParallel(mesh, causal(given[0].shape[dims[0]]) if positions is None else packed_mask(positions))
    kept = {id(x) for x in no_restore_buffers or ()}
    shards = [cp.shard(x.detach(), dim=dim) for x, dim in zip(given, dims, strict=True)]
    whole = [x.detach() for x in given]  # with the memory of the buffers, which get other memory now
    step = TrainerStep()
    step.check()
    try:
        for buffer, shard in zip(given, shards, strict=True):
            _replace(buffer, shard)
        with ExitStack() as entered:
            for model in models:
                check = partial(_check_call, positions=positions, buffers=list(zip(given, whole, strict=True)))
                entered.enter_context(_using_ringspan(model, cp, step, check))
            entered.enter_context(cp)
            yield cp
    finally:
        for buffer, original in zip(given, whole, strict=True):
            if id(buffer) not in kept or not torch.is_grad_enabled():  # metrics can read the inputs of an evaluation
                _replace(buffer, original)


@contextmanager
def _using_ringspan(model: Any, cp: ContextParallel, step: TrainerStep, check: Any) -> Iterator[None]:
    """Let a model attend by ringspan, and check what goes in and comes out of it, while the context is open."""
    before, losses = model.config._attn_implementation, SharedLosses(model)
    hooks = [
        model.register_forward_pre_hook(check, with_kwargs=True),
        model.register_forward_hook(losses.check, with_kwargs=True),
        model.register_forward_hook(partial(finish_output, cp, step)),
    ]
    try:
        prepare_model(model)
        yield
    finally:
        model.set_attn_implementation(before)
        losses.restore()
        for hook in hooks:
            hook.remove()


def _replace(buffer: Any, contents: Tensor) -> None:
    """Let a tensor have other contents, of another shape."""
    buffer.set_(contents)


# Types of models that count positions by the attention mask, so that padding on the left shifts them.
COUNTS_BY_MASK = ("opt",)


def _model_type(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", ""))


def _check_call(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    positions: Tensor | None,
    buffers: Sequence[tuple[Tensor, Tensor]],
) -> None:
    """Raise before the model is called if its loss or its documents would not be those of one process.

    ``positions`` are those of the whole sequence. ``buffers`` are the tensors that have this rank's tokens now, each
    with its contents before.
    """
    if kwargs.get("shift_labels") is not None and kwargs.get("labels") is None:
        raise InputError(
            "the loss is computed outside the model (label_smoothing_factor, compute_loss_func), from the labels of this "
            "rank's tokens only: shifting them takes the label of another token. Leave the loss to the model"
        )
    check_router_losses(model, kwargs)
    attention_mask = kwargs.get("attention_mask")
    if positions is None or attention_mask is None:
        return
    begins = positions[:, 1:] == 0
    for buffer, whole in buffers:
        if buffer is attention_mask:
            if _model_type(model) in COUNTS_BY_MASK and bool((whole[:, 0] == 0).any()):
                raise InputError(
                    f"{_model_type(model)} counts the positions of tokens that are no padding, if it gets no position_ids, and "
                    "Trainer gives it those that count padding, too: pad on the right"
                )
            begins = begins & (whole[:, 1:] != 0) & (whole[:, :-1] != 0)  # padding may have any position
    if bool(begins.any()):
        raise InputError(
            "the position ids have several documents, and there is an attention_mask: in one process transformers ignores the "
            "documents then. Leave the attention_mask out of packed batches"
        )


def _positions(buffers: Sequence[Tensor], dims: Sequence[int]) -> Tensor | None:
    """Return the position ids among the buffers, if they have any."""
    for x, dim in reversed(list(zip(buffers, dims, strict=True))):  # Trainer gives the position ids last
        if x.ndim == 2 and dim in (1, -1) and x.shape[1] and _are_positions(x):
            return x.detach()  # keeps the contents when the buffer gets others
    return None


def _are_positions(x: Tensor) -> bool:
    """Return whether every row counts 0, 1, 2, … and starts again at 0 only.

    Tensors of zeros and ones do not count: they can be token types or a padding mask.
    """
    if x.is_floating_point() or x.dtype.itemsize < 4 or bool((x[:, 0] != 0).any()) or int(x.max()) < min(2, x.shape[1] - 1):
        return False
    step = x[:, 1:] - x[:, :-1]
    return bool(((step == 1) | (x[:, 1:] == 0)).all())
