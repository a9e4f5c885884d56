"""Models and layers that cannot be made exact, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ringspan.errors import RingspanError, UnplannedAttention

# Kinds of layers, as in ``config.layer_types``, that are softmax attention under a mask.
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}

# Model types that count the positions of the tokens that they get, and take no position_ids.
COUNTS_POSITIONS = {
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "mvp", "pegasus", "plbart"),
    *("musicgen_decoder", "musicgen_melody_decoder", "roformer", "trocr", "whisper"),
}

# Model types whose positions begin with pad_token_id + 1: that of padding is pad_token_id.
COUNTS_AFTER_PADDING = {
    *("altclip_text_model", "bridgetower_text_model", "camembert", "clap_text_model", "data2vec-text", "esm", "ibert"),
    *("kosmos_2_text_model", "kosmos_2_5_text_model", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet"),
    *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
}

# Model types whose layers write attention out -> the class of these layers.
WRITES_OUT = {
    "big_bird": "BigBirdSelfAttention",
    "bloom": "BloomAttention",
    "codegen": "CodeGenAttention",
    "falcon": "FalconAttention",
    "git": "GitSelfAttention",
    "gpt_neo": "GPTNeoSelfAttention",
    "gpt_neox_japanese": "GPTNeoXJapaneseAttention",
    "gptj": "GPTJAttention",
    "megatron-bert": "MegatronBertSelfAttention",
    "mpt": "MptAttention",
    "mvp": "MvpAttention",
    "openai-gpt": "Attention",
    "rembert": "RemBertSelfAttention",
    "roformer": "RoFormerSelfAttention",
    "trocr": "TrOCRAttention",
    "xglm": "XGLMAttention",
}

# Model types with causal convolutions -> the class of these, or of the module around them.
CONVOLVES = {
    "inkling_text": "InklingShortConvolution",
    "inkling2_text": "Inkling2ShortConvolution",
    "lfm2": "Lfm2ShortConv",
    "lfm2_moe": "Lfm2MoeShortConv",
    "lfm3": "Lfm3ShortConv",
    "zaya": "ZayaCCAProjection",
}

# Those of them whose convolutions do not get ``cu_seq_lens_q``, and know the documents of the block's mask only.
CONVOLVES_WITHOUT_CALL = {"inkling_text", "inkling2_text", "zaya"}

# Model types whose scores have a bias for each distance.
HAS_BIASES = {"mt5", "pop2piano", "t5", "umt5"}

# Kinds of layers of the models with convolutions.
CONVOLUTION_LAYERS = {"conv", "hybrid", "hybrid_sliding"}

# Encoders of speech with convolutions: for positions, or in their layers.
SPEECH = (
    *("data2vec-audio", "hubert", "sew", "sew-d", "unispeech", "unispeech-sat"),
    *("wav2vec2", "wav2vec2-bert", "wav2vec2-conformer", "wavlm"),
)

# Model types with recurrent layers that ``config.layer_types`` does not name, or without any attention.
RECURRENT = ("falcon_mamba", "mamba", "mamba2", "recurrent_gemma", "rwkv", "xlstm")

# Model types that cannot be made exact, and are not recognised by their layers -> why.
REFUSED_MODELS: dict[str, str] = {
    "longt5": "its encoder attends in blocks of tokens, which it would make of those of this rank",
    "mobilebert": "it joins the embeddings of neighbouring tokens, and takes those of this rank for neighbours",
    "nllb-moe": "its routers drop tokens that exceed a capacity, and would count those of this rank",
    "pegasus_x": "its encoder attends in blocks of tokens, which it would make of those of this rank",
    "reformer": "it has hashed attention",
    "sam3_lite_text_text_model": "it has convolutions over its tokens, which would mix only those of this rank",
    "fnet": "it mixes tokens by a Fourier transform, and would mix only those of this rank",
    **dict.fromkeys(RECURRENT, "it has recurrent layers, which would mix only the tokens of this rank"),
    **dict.fromkeys(SPEECH, "it has convolutions over its tokens, which would mix only those of this rank"),
    **dict.fromkeys(("seamless_m4t", "seamless_m4t_v2", "speech_to_text", "speecht5"), "it counts the positions of its tokens"),
    **dict.fromkeys(("t5gemma2", "t5gemma2_decoder"), "its decoder attends to both sequences at once"),
    "switch_transformers": "its routers drop tokens that exceed a capacity, and would count those of this rank",
}

# Endings of the names of position embedding classes.
POSITION_EMBEDDINGS = ("PositionalEmbedding", "PositionEmbedding")


class PreparedName(str):
    """The name of the attention of a model that was given to ``prepare``. Copies of the config keep it."""

    __slots__ = ()


def is_prepared(config: Any) -> bool:
    """Return whether the model of a config, or the model it is a copy of, was given to ``prepare``."""
    return isinstance(config._attn_implementation, PreparedName)


def first_position(config: Any) -> int:
    """Return the position id of the first token of a sequence."""
    has_rope = getattr(config, "position_embedding_type", "absolute") == "rotary"  # as ESM-2 has, which then counts from 0
    is_after_padding = getattr(config, "model_type", "") in COUNTS_AFTER_PADDING and not has_rope
    return int(config.pad_token_id) + 1 if is_after_padding else 0


def counts_positions(model: nn.Module) -> bool:
    """Return whether a model has embeddings of positions, by the names of classes, that ``prepare`` has not replaced."""
    classes = {type(module) for module in model.modules()}
    return any(cls.__name__.endswith(POSITION_EMBEDDINGS) and not hasattr(cls, "_ringspan_methods") for cls in classes)


def refuse_config(config: Any) -> None:
    """Raise if a model of this config has layers that are not softmax attention under a mask."""
    others: dict[str, list[int]] = {}
    model_type = getattr(config, "model_type", "")
    refuse_model(config)
    known = ATTENTION_LAYERS | (CONVOLUTION_LAYERS if model_type in CONVOLVES else set())
    for n, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in known:
            others.setdefault(kind, []).append(n)
    if others:
        layers = "; ".join(f"{kind}: layers {', '.join(map(str, at))}" for kind, at in others.items())
        raise UnplannedAttention(
            f"{model_type} has layers that are not softmax attention under a mask ({layers}). They would mix only the tokens "
            "of this rank: this model cannot run under context parallelism"
        )
    if getattr(config, "token_dropout", False):
        raise UnplannedAttention(
            f"{model_type} scales embeddings by the share of mask tokens (token_dropout), and counts those of this rank: make "
            "the model with token_dropout=False"
        )
    how = _why_prepare(model_type)
    if how and not is_prepared(config):
        raise UnplannedAttention(
            f"{model_type} {how}, and would see the tokens of this rank only: call "
            "ringspan.integrations.transformers.prepare(model) first"
        )


def refuse_model(config: Any) -> None:
    """Raise if a model of this config is known not to be exact."""
    model_type = getattr(config, "model_type", "")
    if model_type == "big_bird" and config.attention_type == "block_sparse":
        raise UnplannedAttention(
            "big_bird attends in blocks of tokens, which it would make of those of this rank: set "
            'config.attention_type to "original_full"'
        )
    if model_type == "doge" and config.is_moe:
        raise UnplannedAttention(
            "doge with is_moe=True cannot run under context parallelism: its routers mix the scores of all tokens of a batch, "
            "and would mix those of this rank"
        )
    if model_type in REFUSED_MODELS:
        raise UnplannedAttention(f"{model_type} cannot run under context parallelism: {REFUSED_MODELS[model_type]}")


def _why_prepare(model_type: str) -> str:
    """Return why a model must be given to ``prepare``; empty if it need not."""
    if model_type in COUNTS_POSITIONS:
        return "counts the positions of its tokens"
    if model_type in WRITES_OUT:
        return "writes attention out in its layers"
    if model_type in CONVOLVES:
        return "has convolutions over its tokens"
    if model_type in HAS_BIASES:
        return "adds biases to its scores, which depend on positions"
    return {"blt": "attends between bytes and patches", "doge": "computes with its attention mask"}.get(model_type, "")


# Tensors that an attention layer can pass to the attention function without changing what it computes there.
HARMLESS = {
    *("labels", "shift_labels", "num_items_in_batch", "logits_to_keep"),
    *("position_ids", "position_embeddings", "cache_position", "s_aux", "sinks"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    "seq_idx",  # the documents again, for convolutions
}


def refuse_layer(module: nn.Module, tokens: int, dropout: float, kwargs: dict[str, Any]) -> None:
    """Raise for a call of attention that cannot be made exact, in a sequence of a number of tokens."""
    if dropout:
        raise UnplannedAttention(
            f"{layer_name(module)} has an attention dropout of {dropout}, but the ranks cannot drop the same pairs as one "
            "process. Set it to 0 in the config: attention_dropout in most models, dropout_rate in T5"
        )
    if kwargs.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        raise UnplannedAttention(f"{layer_name(module)} should return its weights, which no rank has: output_attentions=False")
    if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
        _refuse_temperature(module, tokens)
    unknown = [name for name, x in kwargs.items() if isinstance(x, Tensor) and name not in HARMLESS]
    if unknown:
        raise UnplannedAttention(
            f"{layer_name(module)} passes {', '.join(unknown)} to attention. This is not known to be the same for one process "
            "and for ranks, so this layer cannot run under context parallelism"
        )


def _refuse_temperature(module: nn.Module, tokens: int) -> None:
    """Raise if a layer scales queries by their position, which it counts in the tokens of this rank (Llama 4).

    Up to ``floor_scale`` tokens the scale is 1.
    """
    limit = int(getattr(module, "floor_scale", 0))
    if tokens >= limit:
        raise UnplannedAttention(
            f"{layer_name(module)} scales queries by their position (attn_temperature_tuning), and counts positions in the "
            f"tokens of this rank. This is exact below {limit} tokens; the sequence has {tokens}"
        )


def is_cross_attention(module: nn.Module) -> bool:
    """Return whether the keys of a layer come from another sequence than its queries, by its class or by what it says
    of itself."""
    return "CrossAttention" in type(module).__name__ or getattr(module, "is_cross_attention", False) is True


@contextmanager
def named_refusals(module: nn.Module, refuse: Callable[[Exception], None]) -> Iterator[None]:
    """Add the name of a layer to an error of ringspan in it, and tell the other ranks by ``refuse(error)``."""
    try:
        yield
    except RingspanError as error:
        error.add_note(f"in {layer_name(module)}")
        refuse(error)
        raise


def layer_name(module: nn.Module) -> str:
    """Return the class of a layer and its number."""
    number = getattr(module, "layer_idx", None)
    return type(module).__name__ if number is None else f"{type(module).__name__}, layer {number}"
