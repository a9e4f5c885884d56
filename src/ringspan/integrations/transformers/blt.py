"""BLT, which attends between bytes and patches of bytes. A small model computes the boundaries of the patches.

The bytes have the layout of the user's block. Every rank gathers the ids of all bytes and their entropies, and so knows
all patches. The patches get a layout of their own, zigzag, and three more blocks::

    patches -> bytes of each patch        encoder: a patch has K queries, in a block of K · P queries and N keys
    patches -> patches before             global transformer: causal, P patches
    bytes   -> their patch                decoder: N queries and K · P keys

The first states of a patch are the largest of its bytes' states, which are gathered for it.

Legend: B batch, N bytes of the whole sequence, S bytes of this rank, P patches, Q patches of this rank, K =
cross_attn_k, M features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast

from ringspan.errors import UnplannedAttention
from ringspan.frontends.context_parallel import ContextParallel
from ringspan.integrations.transformers.layer_mask import LayerMask, ModelCall
from ringspan.integrations.transformers.mask_functions import Sequence, by_rows, runs
from ringspan.integrations.transformers.model_block import block_of_model, refuse_cache
from ringspan.integrations.transformers.refusals import named_refusals
from ringspan.layouts import Layout, zigzag
from ringspan.masks import Mask, causal, full

# Arguments of the loss, which BltForCausalLM passes to its model as well.
OF_LOSS = ("labels", "shift_labels", "num_items_in_batch", "logits_to_keep")


@dataclass(frozen=True)
class Patches:
    """The patches of a batch. ``ids_BN`` are the patches of bytes; ``decoder_ids_BN`` those that bytes attend to."""

    outer: ContextParallel
    ids_BN: Tensor
    decoder_ids_BN: Tensor
    count: int
    per_patch: int  # K

    @cached_property
    def layout(self) -> Layout:
        return zigzag(causal(self.count), self.outer.world)

    @cached_property
    def mine(self) -> Tensor:
        """The patches of this rank."""
        return torch.as_tensor(self.layout.positions(self.outer.rank), device=self.ids_BN.device)

    @cached_property
    def query_layout(self) -> Layout:
        """The layout of K · P tokens: those of a patch are on its rank."""
        k = self.per_patch
        spans = [[(start * k, stop * k) for start, stop, _ in of_rank] for of_rank in self.layout.spans]
        return Layout(spans, length=self.count * k, name="patches")

    def encoder_mask(self) -> LayerMask:
        """Return the mask of patches and their bytes.

        A patch without bytes sees all bytes. Its queries are 0, so its result is the mean of all values, as in one
        process with eager attention. (SDPA on CPUs computes this mean, too, but another gradient of it.)
        """
        n, k, ids_BN = self.ids_BN.shape[1], self.per_patch, self.ids_BN
        has_bytes_BP = torch.zeros(len(ids_BN), self.count, dtype=torch.bool, device=ids_BN.device).scatter(1, ids_BN, True)
        mask = self._mask(ids_BN, queries_are_patches=True, sees_all_BP=~has_bytes_BP)
        wide = self.outer.with_mask(full(self.count * k, n), layout=self.query_layout, kv_layout=self.outer.plan.q_layout)
        return LayerMask(mask, wide, ("q", "kv"), ModelCall(len(ids_BN), None, None))

    def decoder_mask(self) -> LayerMask:
        """Return the mask of bytes and the patches that they attend to."""
        n, k, ids_BN = self.ids_BN.shape[1], self.per_patch, self.decoder_ids_BN
        mask = self._mask(ids_BN, queries_are_patches=False)
        wide = self.outer.with_mask(full(n, self.count * k), layout=self.outer.plan.q_layout, kv_layout=self.query_layout)
        return LayerMask(mask, wide, ("q", "kv"), ModelCall(len(ids_BN), None, None))

    def global_mask(self) -> LayerMask:
        """Return the causal mask of patches."""
        mask = causal(self.count)
        block = self.outer.with_mask(mask, layout=self.layout)
        return LayerMask(mask, block, ("q", "kv"), ModelCall(len(self.ids_BN), None, None))

    def _mask(self, ids_BN: Tensor, *, queries_are_patches: bool, sees_all_BP: Tensor | None = None) -> Mask:
        """Return the mask of patches and bytes: bands if all rows of the batch have the same patches."""
        n, k = ids_BN.shape[1], self.per_patch
        if sees_all_BP is None:
            sees_all_BP = torch.zeros(len(ids_BN), self.count, dtype=torch.bool, device=ids_BN.device)
        lengths = (self.count * k, n) if queries_are_patches else (n, self.count * k)
        if (ids_BN == ids_BN[:1]).all():
            pairs = [((p * k, p * k + k), (start, stop)) for start, stop, p in runs(ids_BN[0].cpu().numpy())]
            pairs += [((p * k, p * k + k), (0, n)) for p in sees_all_BP[0].nonzero()[:, 0].tolist()]
            rectangles = [(*patch, *rows) if queries_are_patches else (*rows, *patch) for patch, rows in pairs]
            return Mask.from_bands([(*rectangle, -lengths[0], lengths[1]) for rectangle in rectangles], *lengths)

        def sees(b: Any, h: Any, q: Any, key: Any) -> Any:
            patch, byte = (q // k, key) if queries_are_patches else (key // k, q)
            return (ids_BN[b, byte] == patch) | sees_all_BP[b, patch]

        return by_rows("patches", sees, (ids_BN, sees_all_BP), Sequence(*lengths))


def blt_model(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``BltModel.forward``. In a block, over the bytes and the patches of all ranks."""
    block = block_of_model()
    if block is None:
        return original(self, *args, **kwargs)
    with named_refusals(self, block.refuse):
        return _forward(self, block, **_checked(self, block, args, kwargs))


def blt_patch_states(self: Any, original: Callable[..., Any], hidden_BSM: Tensor, count: Any, patch_ids: Tensor) -> Tensor:
    """Run ``BltLocalEncoder.patch_reduce``. In a block, return the states of this rank's patches."""
    if not isinstance(count, Patches):
        return original(self, hidden_BSM, count, patch_ids)
    patches, mine_Q = count, count.mine
    hidden_BNM = patches.outer.unshard(hidden_BSM, dim=1, grad="partial")
    # Bytes of the patches of other ranks go to one more row, which is cut off.
    row_P = torch.full((patches.count,), len(mine_Q), device=mine_Q.device)
    row_P[mine_Q] = torch.arange(len(mine_Q), device=mine_Q.device)
    states: Tensor = original(self, hidden_BNM, len(mine_Q) + 1, row_P[patches.ids_BN])
    return states[:, :-1]


def _forward(
    model: Any,
    block: ContextParallel,
    *,
    input_ids: Tensor,
    patch_lengths: Tensor | None,
    attention_mask: Any,
    position_ids: Any,
) -> Any:
    config = model.config
    ids_BN = block.unshard(input_ids, dim=1)
    embeds_BSM = _embeddings(model, ids_BN, block.positions(device=input_ids.device))
    if patch_lengths is None:
        patch_lengths = _patch_lengths(model, block, input_ids, ids_BN.shape[1])
    n, count = ids_BN.shape[1], patch_lengths.shape[1]
    patches = Patches(
        block,
        model._patch_ids_from_lengths(patch_lengths, n),
        model._patch_ids_from_lengths(patch_lengths[:, 1:], n),
        count,
        config.cross_attn_k,
    )
    if min(patches.layout.counts) == 0:
        raise UnplannedAttention(f"the sequence has {count} patches, fewer than the {block.world} ranks")
    create_mask, of_encoder = _mask_of_bytes(config)
    causal_mask = create_mask(
        config=of_encoder,
        inputs_embeds=embeds_BSM,
        attention_mask=attention_mask,
        past_key_values=None,
        position_ids=position_ids,
    )
    causal_mask.block_of(position_ids, None, None)  # raises unless the positions are those of this rank's bytes
    of_bytes = {"input_ids": input_ids, "attention_mask": causal_mask, "position_ids": position_ids}
    hidden_BSM, states = model.local_encoder(
        **of_bytes,
        inputs_embeds=embeds_BSM,
        encoder_attention_mask=patches.encoder_mask(),
        num_patches=patches,
        patch_ids=patches.ids_BN,
    )
    mine_Q = patches.mine
    global_BQM = model.global_transformer(
        inputs_embeds=states.reshape(len(ids_BN), len(mine_Q), config.cross_attn_k * states.shape[-1]),
        attention_mask=patches.global_mask(),
        position_ids=mine_Q[None],
    )
    out_BSM = model.local_decoder(
        **of_bytes, inputs_embeds=hidden_BSM, patch_embeds=global_BQM, encoder_attention_mask=patches.decoder_mask()
    )
    return BaseModelOutputWithPast(last_hidden_state=out_BSM)


def _mask_of_bytes(config: Any) -> tuple[Callable[..., Any], Any]:
    """Return the function that makes the mask of bytes, and the config it reads.

    Since transformers 5.23 bytes have a local window. Before, ``local_attention_window_len`` of a config is ignored.
    """
    from transformers.models.blt import modeling_blt

    create_local_mask = getattr(modeling_blt, "create_sliding_window_causal_mask", None)
    if create_local_mask is None or config.local_attention_window_len is None:
        return create_causal_mask, config
    return create_local_mask, config.encoder_config


def _embeddings(model: Any, ids_BN: Tensor, mine_S: Tensor) -> Tensor:
    """Return the embeddings of this rank's bytes, with those of the hashes of the bytes before each."""
    from transformers.models.blt.modeling_blt import compute_hash_embeddings

    # It is given the ids of all bytes, for the hashes, and looks up those of this rank only.
    config, encoder = model.config, SimpleNamespace(embed_tokens=lambda ids: model.local_encoder.embed_tokens(ids[:, mine_S]))
    found: Tensor = compute_hash_embeddings(
        ids_BN,
        encoder,
        lambda ids: model.encoder_hash_tok_embedding(ids[:, mine_S]),
        config.encoder_hash_byte_group_nb_functions,
        config.encoder_hash_byte_group_size,
        config.encoder_hash_byte_group_vocab,
    )
    return found


def _patch_lengths(model: Any, block: ContextParallel, input_ids: Tensor, n: int) -> Tensor:
    """Return the lengths (B, P) of all patches, from the entropies of the patcher."""
    from transformers.models.blt.modeling_blt import process_patch_lengths

    config = model.config
    if config.patching_mode != "entropy" or model.patcher is None:
        lengths = torch.ones(len(input_ids), n + 1, dtype=input_ids.dtype, device=input_ids.device)
    else:
        with torch.no_grad():
            positions_1S = block.positions(device=input_ids.device)[None]
            entropies_BS, lengths, _ = model.patcher(input_ids, position_ids=positions_1S)
        if config.patch_size is None:
            lengths = torch.ones(len(input_ids), n, dtype=lengths.dtype, device=input_ids.device)
        else:
            lengths = model.patcher.patch_lengths_from_entropies(
                entropies=block.unshard(entropies_BS, dim=1),
                sequence_length=n,
                patch_size=config.patch_size,
                threshold=config.patching_threshold,
            )
    found: Tensor = process_patch_lengths(lengths, config.max_patch_length)
    return found


def _checked(model: Any, block: ContextParallel, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call that can be made exact."""
    names = ("input_ids", "patch_lengths", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    given = {name: x for name, x in given.items() if x is not None}
    refuse_cache(given.pop("past_key_values", None))
    for name in ("use_cache", *OF_LOSS):
        given.pop(name, None)
    n, problem = block.plan.q_layout.length, ""
    if block.plan.q_layout != block.plan.kv_layout or block.mask.digest not in (causal(n).digest, full(n).digest):
        problem = f"the patches of blt cannot attend under the block's mask {block.mask.name}: give rs.causal(length)"
    elif "input_ids" not in given or "position_ids" not in given:
        problem = "blt needs input_ids=cp.shard(ids, dim=1) and position_ids=cp.positions()[None] in a block"
    wanted = [x for x in ("output_attentions", "output_hidden_states") if given.pop(x, getattr(model.config, x, False))]
    others = sorted(set(given) - {"input_ids", "patch_lengths", "attention_mask", "position_ids"})
    if wanted or others:
        problem = problem or f"blt cannot take or return {', '.join(wanted + others)} in a block"
    if problem:
        raise UnplannedAttention(problem)
    return {name: given.get(name) for name in ("input_ids", "patch_lengths", "attention_mask", "position_ids")}
