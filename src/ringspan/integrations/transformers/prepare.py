"""Prepare models that need more than ``set_attn_implementation("ringspan")``.

* Models that count the positions of the tokens they get, and take no ``position_ids`` (Bart and its relatives). Their
  position embeddings are computed for the whole sequence, and this rank's rows are taken.
* Models whose layers write attention out (:mod:`ringspan.integrations.transformers.written_out`).
* Models with short causal convolutions (:mod:`ringspan.integrations.transformers.convolutions`).
* RoPE that depends on the largest position (:mod:`ringspan.integrations.transformers.rotary`).
* Encoders with decoders. They raise without tokens of the decoder, which they would make from those of this rank.
* BLT, BigBird-Pegasus, CPM-Ant, Doge, Inkling, ProphetNet, T5, XLM, XLNet and ZAYA, each in a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ringspan.errors import InputError, UnplannedAttention
from ringspan.frontends.context_parallel import ContextParallel
from ringspan.frontends.current_block import current_block
from ringspan.integrations.transformers.attention import NAME
from ringspan.integrations.transformers.blt import blt_model, blt_patch_states
from ringspan.integrations.transformers.convolutions import convolution_over_ranks
from ringspan.integrations.transformers.cpmant import cpmant_attention, cpmant_model
from ringspan.integrations.transformers.doge import doge_biases
from ringspan.integrations.transformers.inkling import inkling_attention, inkling_bias, inkling_convolution, inkling_residual
from ringspan.integrations.transformers.prophetnet import (
    no_local_buckets,
    no_local_masks,
    prophetnet_attention,
    prophetnet_decoder,
    prophetnet_masks,
    prophetnet_positions,
    refuse_encoder,
)
from ringspan.integrations.transformers.refusals import (
    CONVOLVES,
    COUNTS_POSITIONS,
    POSITION_EMBEDDINGS,
    WRITES_OUT,
    PreparedName,
    named_refusals,
    refuse_model,
)
from ringspan.integrations.transformers.rotary import depends_on_length, rotary_of_sequence
from ringspan.integrations.transformers.t5 import biases_of_distances
from ringspan.integrations.transformers.written_out import attention_over_ranks
from ringspan.integrations.transformers.xlm import xlm_attention, xlm_model
from ringspan.integrations.transformers.xlnet import xlnet_attention, xlnet_distances
from ringspan.integrations.transformers.zaya import zaya_projections
from ringspan.plans.data import Side

Methods = tuple[tuple[str, Callable[..., Any]], ...]  # the methods of a class, and what each is replaced by


def _no_blocks_of_tokens(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``BigBirdPegasusEncoder.forward``. In a block, raise if it attends in blocks of tokens."""
    block = current_block()
    if block is not None and self.attention_type == "block_sparse":
        with named_refusals(self, block.refuse):
            raise UnplannedAttention(
                "the encoder of bigbird_pegasus attends in blocks of tokens, which it would make of those of this rank, and "
                "cannot run under context parallelism"
            )
    return original(self, *args, **kwargs)


# Model type -> class of a module -> its methods that are replaced.
SPECIAL: dict[str, dict[str, Methods]] = {
    "bigbird_pegasus": {"BigBirdPegasusEncoder": (("forward", _no_blocks_of_tokens),)},
    "blt": {"BltLocalEncoder": (("patch_reduce", blt_patch_states),), "BltModel": (("forward", blt_model),)},
    "cpmant": {"CpmAntAttention": (("forward", cpmant_attention),), "CpmAntModel": (("forward", cpmant_model),)},
    "doge": {"DogeAttention": (("prepare_dynamic_mask", doge_biases),)},
    "inkling_text": {
        "InklingAttention": (("forward", inkling_attention),),
        "InklingRelativeLogits": (("forward", inkling_bias),),
    },
    "inkling2_text": {
        "Inkling2RelativeLogits": (("forward", inkling_bias),),
        "Inkling2DynamicShortConvolution": (("forward", inkling_convolution),),
        "Inkling2BlockAttentionResidual": (("forward", inkling_residual),),
    },
    "mt5": {"MT5Attention": (("compute_bias", biases_of_distances),)},
    "pop2piano": {"Pop2PianoAttention": (("compute_bias", biases_of_distances),)},
    "prophetnet": {
        "ProphetNetAttention": (("forward", refuse_encoder),),
        "ProphetNetDecoder": (
            ("forward", prophetnet_decoder),
            ("prepare_attention_mask", prophetnet_masks),
            ("prepare_predict_attention_mask", no_local_masks),
            ("compute_buffered_relative_buckets", no_local_buckets),
        ),
        "ProphetNetNgramSelfAttention": (("forward", prophetnet_attention),),
        "ProphetNetPositionalEmbeddings": (("forward", prophetnet_positions),),
    },
    "t5": {"T5Attention": (("compute_bias", biases_of_distances),)},
    "umt5": {"UMT5Attention": (("compute_bias", biases_of_distances),)},
    "xlm": {"MultiHeadAttention": (("forward", xlm_attention),), "XLMModel": (("forward", xlm_model),)},
    "xlnet": {
        "XLNetRelativeAttention": (("rel_attn_core", xlnet_attention),),
        "XLNetModel": (("relative_positional_encoding", xlnet_distances),),
    },
    "zaya": {"ZayaCCAProjection": (("forward", zaya_projections),)},
}
# Model types without AttentionInterface, for which transformers ignores set_attn_implementation.
WITHOUT_INTERFACE = {*WRITES_OUT, "cpmant", "prophetnet", "xlm", "xlnet"}


def prepare(model: nn.Module) -> nn.Module:
    """Let a model use ringspan inside a ``ContextParallel`` block, and return it.

    For most models this is ``model.set_attn_implementation("ringspan")``. In addition it replaces the ``forward`` of
    position embeddings that count tokens or depend on the largest position, of layers that write attention out, add
    biases to scores or have a convolution, and of encoders with decoders, which then raise in a block without the tokens
    of the decoder. Outside a block these compute what they did before. Raises :class:`ringspan.UnplannedAttention` for
    models that are known not to be exact.

    >>> from transformers import GPTJConfig, GPTJForCausalLM
    >>> config = GPTJConfig(vocab_size=8, n_embd=8, n_head=2, n_layer=1, rotary_dim=2, n_positions=8)
    >>> prepare(GPTJForCausalLM(config)).config._attn_implementation
    'ringspan'
    """
    parts: list[Any] = [x for x in model.modules() if hasattr(x, "config") and hasattr(x, "set_attn_implementation")]
    for part in parts:
        refuse_model(part.config)
    for part in parts:
        if part.config.model_type not in WITHOUT_INTERFACE:
            part.set_attn_implementation(NAME)  # only logs a warning if the model has no such setting
    if parts and not any(x.config.model_type in WITHOUT_INTERFACE or x.config._attn_implementation == NAME for x in parts):
        raise UnplannedAttention(
            f"{parts[0].config.model_type} cannot run under context parallelism: its layers compute attention themselves, and "
            "take no other attention function"
        )
    for part in parts:
        for module in part.modules():
            _prepare_module(module, part.config.model_type)
        part.config._attn_implementation = PreparedName(NAME)
    return model


def _prepare_module(module: Any, model_type: str) -> None:
    cls: Any = type(module)
    name = cls.__name__
    methods = SPECIAL.get(model_type, {}).get(name, ())
    if name == WRITES_OUT.get(model_type):
        methods = (("forward", attention_over_ranks),)
    elif not methods and name == CONVOLVES.get(model_type):
        methods = (("forward", convolution_over_ranks),)
    elif model_type in COUNTS_POSITIONS and name.endswith(POSITION_EMBEDDINGS):
        methods = (("forward", _positions_of_shard),)
    elif depends_on_length(module):
        methods = (("forward", rotary_of_sequence),)
    elif not methods and _is_encoder_with_decoder(module):
        methods = (("forward", _with_decoder_tokens),)
    if methods:
        module.__class__ = _subclass(cls, methods)


def _is_encoder_with_decoder(module: Any) -> bool:
    """Return whether a module takes tokens of a decoder. Models like BLIP-2 do, with any language model in them."""
    has_decoder = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
    return bool(has_decoder) and "decoder_input_ids" in signature(type(module).forward).parameters


@cache
def _subclass(cls: Any, methods: Methods) -> Any:
    """Return a class of the same name, in which each of these methods is ``function(self, cls.method, ...)``.

    A module gets another class, and not another attribute, so that its copies work. pickle cannot find this class by its
    name, and makes it again.
    """
    if getattr(cls, "_ringspan_methods", None) == methods:
        return cls
    replaced = {name: _method(getattr(cls, name), function) for name, function in methods}

    def reduced(self: nn.Module, protocol: Any) -> Any:
        return _new_module, (cls, methods), self.__dict__

    return type(cls.__name__, (cls,), {**replaced, "_ringspan_methods": methods, "__reduce_ex__": reduced})


def _new_module(cls: Any, methods: Methods) -> nn.Module:
    prepared = _subclass(cls, methods)
    module: nn.Module = prepared.__new__(prepared)
    return module


def _method(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)  # Trainer reads the names of the arguments of a model
    def method_of_module(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(self, original, *args, **kwargs)

    return method_of_module


def _positions_of_shard(self: nn.Module, original: Callable[..., Any], tokens: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute the position embeddings of the whole sequence, and return those of this rank's tokens."""
    block = current_block()
    if block is None:
        return original(self, tokens, *args, **kwargs)
    if kwargs.get("position_ids") is not None:  # counted by the model, from 0
        counted: Tensor = kwargs["position_ids"]
        mine = block.positions(_side(block, counted.shape[-1]), device=counted.device)
        return original(self, tokens, *args, **{**kwargs, "position_ids": mine.expand(counted.shape)})
    before: tuple[None, ...] = ()
    if tokens is None:  # M2M100 passes its embeddings after the tokens that it has not
        before, tokens, args = (None,), args[0], args[1:]
    shape = list(tokens.shape if isinstance(tokens, Tensor) else tokens)
    dim = 1 if isinstance(tokens, Tensor) and tokens.is_floating_point() else len(shape) - 1
    side = _side(block, shape[dim])
    if isinstance(tokens, Tensor) and not tokens.is_floating_point():  # some modules count the tokens that are no padding
        tokens = block.unshard(tokens, dim=dim, of=side)
    else:
        shape[dim] = (block.plan.q_layout if side == "q" else block.plan.kv_layout).length
        tokens = tokens.new_zeros(()).expand(shape) if isinstance(tokens, Tensor) else torch.Size(shape)
    rows: Tensor = original(self, *before, tokens, *args, **kwargs)
    return block.shard(rows, dim=rows.ndim - 2, of=side)


def _with_decoder_tokens(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the forward of an encoder with a decoder. In a block it raises without the tokens of the decoder."""
    block = current_block()
    given = signature(original).bind(self, *args, **kwargs).arguments
    if block is not None and all(given.get(name) is None for name in ("decoder_input_ids", "decoder_inputs_embeds")):
        error = InputError(
            f"{self.config.model_type} was called without decoder_input_ids, and would make them by shifting tokens within "
            "this rank: shift the whole sequence, and pass decoder_input_ids=cp.shard(shifted, dim=1)"
        )
        block.refuse(error)
        raise error
    return original(self, *args, **kwargs)


def _side(block: ContextParallel, count: int) -> Side:
    """Return which of the two sequences of a block has this number of tokens on this rank."""
    q_count, kv_count = (layout.counts[block.rank] for layout in (block.plan.q_layout, block.plan.kv_layout))
    if q_count == kv_count and block.plan.q_layout != block.plan.kv_layout:
        raise InputError(
            f"rank {block.rank} has {count} tokens of both sequences of this cross-attention, so that the positions of the "
            "encoder and of the decoder cannot be told apart: use a layout with other numbers of tokens"
        )
    return "kv" if count == kv_count != q_count else "q"
