"""Probable causes of a difference between several ranks and one process, and what to do about each."""

from __future__ import annotations

from typing import Literal

from ringspan.frontends.handwritten_attention import USE_RINGSPAN

Cause = Literal[
    "ranks_differ",
    "inputs",
    "positions",
    "mask",
    "refused",
    "other_mask",
    "other_inputs",
    "other_loss",
    "other_calls",
    "mixing",
    "attention",
    "labels",
    "loss_per_rank",
    "loss_part",
    "not_summed",
    "summed_again",
    "summed_per_micro_batch",
    "averaged",
    "partial_unshard",
    "unknown",
]

# cause -> (what is wrong, what to do)
CAUSES: dict[Cause, tuple[str, str]] = {
    "ranks_differ": (
        "parameters or inputs differ between ranks",
        "use the same seed on all ranks of a sequence, or broadcast; give every rank the whole batch: the step shards it",
    ),
    "inputs": (
        "the inputs of the model are not this rank's tokens",
        "shard all inputs with cp.shard(..., dim=sequence dim): a layout may give a rank several pieces of the sequence",
    ),
    "positions": (
        "positions are not sharded: a value depends on the place of a token in the shard",
        "give the model cp.positions() (cp.positions(documents=lengths) for packed documents), or shard its tables with "
        "cp.shard; torch.arange(tokens of this rank) and tables cut at [:n] are positions in the shard",
    ),
    "mask": (
        "the mask is dropped: the model was called outside of the block, or its attention was not intercepted, so each rank "
        "attends to its own keys only",
        f"call F.scaled_dot_product_attention, flex_attention or varlen_attn inside `with cp:` ({USE_RINGSPAN})",
    ),
    "refused": (
        "the model cannot run in the block: its attention, or a layer that mixes tokens, was refused",
        "the error is in the note",
    ),
    "other_mask": (
        "the mask of cp is not the one that the model has without ringspan",
        "give ContextParallel the mask of the model (causal or not, window, documents); layers that differ open their own "
        "block, cp.with_mask(...)",
    ),
    "other_inputs": (
        "step and without_cp give the model different inputs: they differ before the first attention call",
        "give both the same tokens, positions and embeddings",
    ),
    "other_loss": (
        "step and without_cp compute different losses of the same outputs",
        "compute the same loss in both: the same labels, and the mean over the same tokens",
    ),
    "other_calls": (
        "the losses of step and without_cp differ, and modules could not be compared: without_cp calls them another number of "
        "times than step, or with tensors of other shapes",
        "to find the first module that differs, call the model in without_cp as in step: as often, with the whole sequences "
        "and the dense mask of the model. Else compare by hand the mask, the positions, the labels, and the tokens "
        "that the mean is over",
    ),
    "mixing": (
        "a layer mixes tokens outside attention, so it needs tokens of other ranks (a convolution, a norm over the sequence)",
        "for a convolution, cp.halo(x, before=width - 1) gives each token those before it; for a shift, cp.roll(x, shift) is "
        "that of the whole sequence; else gather the sequence around the layer: "
        "cp.shard(layer(cp.unshard(x, dim=1, grad='partial')), dim=1)",
    ),
    "attention": (
        "q, k and v of an attention call are equal, but its result is not",
        "compare the mask of the call (block_mask, cu_seq, window_size), which must be that of the whole sequence; if it is "
        "the same, please report this",
    ),
    "labels": (
        "labels were shifted after sharding: the label of a rank's last token is on another rank",
        "call rs.shift_labels on the whole sequence, then cp.shard; do not let the model shift (in transformers, do not pass "
        "labels=)",
    ),
    "loss_per_rank": (
        "the loss is averaged per rank, but ranks have different numbers of labels",
        'compute losses with reduction="none", then cp.mean(losses, labels >= 0)',
    ),
    "loss_part": (
        "the step returns this rank's part of the loss; the gradients are right",
        "return a loss that is the same on all ranks: cp.sum(losses) divided by the number of labels, or cp.mean(losses, "
        "labels >= 0)",
    ),
    "not_summed": (
        "gradients are not summed over ranks: each rank has its part",
        "call cp.sum_gradients(model.parameters()) once, after the last backward pass and before the optimizer",
    ),
    "summed_again": (
        "gradients that are whole on every rank were summed over ranks",
        'sum once. If the loss has grads="averaged", DDP or FSDP is to average, so do not sum. Parameters that are used after '
        "cp.unshard have the whole gradient on every rank: leave them out of cp.sum_gradients, or unshard with "
        "grad='partial' and compute a part of the loss on each rank",
    ),
    "summed_per_micro_batch": (
        "cp.sum_gradients was called several times, so gradients of earlier micro-batches were summed again",
        "call it once, after the backward pass of the last micro-batch",
    ),
    "averaged": (
        "gradients are averaged over ranks (by DDP or FSDP), but the loss is made for a sum",
        'give cp.mean or cp.sum grads="averaged", and do not call cp.sum_gradients',
    ),
    "partial_unshard": (
        "the gradient of cp.unshard is a part on each rank, but was taken for the whole",
        "call cp.unshard(..., grad='partial') if the ranks compute different functions of the whole sequence",
    ),
    "unknown": (
        "none that is known",
        "compare the first difference of the table by hand; clipping or scaling before cp.sum_gradients, a random operation, "
        "an in-place change or a custom backward pass are possible",
    ),
}
