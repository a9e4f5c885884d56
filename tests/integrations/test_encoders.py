"""Encoders, and encoders with decoders, on two processes against one, in float64."""

from __future__ import annotations

import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ringspan as rs
from ringspan.testing.float64 import Float64
from tests.conftest import Pools
from tests.integrations.small_models import SIZES, small_model

if find_spec("transformers") is None:
    pytest.skip("needs transformers: pip install 'ringspan[hf]'", allow_module_level=True)

from tests.integrations.test_transformers import COUNTING_ENCODERS, LAYOUTS, B, N, check, compare, difference, message, tokens


def encoder_and_decoder(rank: int, name: str, layout: str) -> dict[str, float]:
    """Three kinds of attention in one block: of the encoder, of the decoder, and from the decoder to the encoder."""
    source, target = tokens(37), tokens(N)
    cp = rs.ContextParallel(None, rs.full(N, 37), layout=layout, kv_layout=layout)
    mine = {
        "input_ids": cp.shard(source, dim=1, of="kv"),
        "position_ids": cp.positions("kv")[None],
        "decoder_input_ids": cp.shard(target, dim=1),
        "decoder_position_ids": cp.positions()[None],
    }
    if name != "t5gemma":  # the others take no position ids
        mine = {key: x for key, x in mine.items() if "position_ids" not in key}
    return compare(name, cp, {"input_ids": source, "decoder_input_ids": target}, mine)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["t5gemma", *COUNTING_ENCODERS, "t5", "mt5", "umt5"])
def test_an_encoder_and_a_decoder_are_exact(name: str, layout: str, pools: Pools) -> None:
    check(pools(2).run(encoder_and_decoder, name, layout))


def encoder(rank: int, lengths: list[int]) -> float:
    """The largest difference of the states of T5's encoder, over packed documents against one at a time."""
    from ringspan.integrations.transformers import prepare

    ids = tokens(sum(lengths))[:1]
    model = small_model("t5 encoder")
    with Float64():
        wanted = torch.cat([model(part).last_hidden_state for part in ids.split(lengths, dim=1)], dim=1)
    cp = rs.ContextParallel(None, rs.documents(lengths, causal=False), layout="zigzag")
    prepare(model)
    with cp, Float64():
        found = model(cp.shard(ids, dim=1)).last_hidden_state
    return (found - cp.shard(wanted, dim=1)).abs().max().item()


def test_packed_documents_of_an_encoder_are_exact(pools: Pools) -> None:
    assert all(x <= 1e-12 for x in pools(2).run(encoder, [11, 3, 15]))


def counted_after_padding(rank: int) -> float:
    """The largest difference of the states of CLAP's text encoder, a relative of RoBERTa without a language model."""
    model = small_model("clap")
    model.set_attn_implementation("eager")  # it has no other
    with Float64():
        wanted = model(tokens()).last_hidden_state
    cp = rs.ContextParallel(None, rs.full(N), layout="zigzag")
    model.set_attn_implementation("ringspan")
    with cp, Float64():
        found = model(cp.shard(tokens(), dim=1), position_ids=cp.positions()[None] + 1).last_hidden_state
    return (found - cp.shard(wanted, dim=1)).abs().max().item()


def test_positions_after_that_of_padding_are_exact(pools: Pools) -> None:
    assert all(x <= 1e-12 for x in pools(2).run(counted_after_padding))


def embedded(rank: int) -> float:
    """The largest difference of the states of M2M100's encoder, from embeddings in place of tokens."""
    from ringspan.integrations.transformers import prepare

    model: Any = small_model("m2m_100 with encoder").model.encoder
    states = torch.randn(B, N, 32, generator=torch.Generator().manual_seed(4)).double()
    wanted = model(inputs_embeds=states).last_hidden_state
    cp = rs.ContextParallel(None, rs.full(N), layout="zigzag")
    prepare(model)
    with cp, Float64():
        found = model(inputs_embeds=cp.shard(states, dim=1)).last_hidden_state
    return (found - cp.shard(wanted, dim=1)).abs().max().item()


def test_positions_of_embeddings_are_counted_over_the_whole_sequence(pools: Pools) -> None:
    assert all(x <= 1e-12 for x in pools(2).run(embedded))


def counted_from_zero(rank: int) -> dict[str, float]:
    """ESM-2, a relative of RoBERTa whose positions count from 0, since it has RoPE."""
    import ringspan.integrations.transformers  # noqa: F401

    cp = rs.ContextParallel(None, rs.full(N), layout="zigzag")
    mine = {"input_ids": cp.shard(tokens(), dim=1), "position_ids": cp.positions()[None]}
    model: Any = small_model("esm with RoPE")
    with Float64():
        wanted = model(input_ids=tokens()).logits
        model.set_attn_implementation("ringspan")
        with cp:
            found = model(**mine).logits
    return {"logits": difference(found, cp.shard(wanted, dim=1))}


def test_positions_of_rope_count_from_zero(pools: Pools) -> None:
    check(pools(2).run(counted_from_zero))


class OfUser(nn.Module):
    """A module of a user, whose forward has variables that a model has, too."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = small_model(name)

    def forward(self, cp: rs.ContextParallel, labels: Tensor, position_ids: Tensor | None = None) -> Tensor:
        ids = cp.shard(tokens(), dim=1)
        given = {"position_ids": cp.positions()[None]} if hasattr(self.model.model, "rotary_emb") else {}
        logits = self.model(input_ids=ids, use_cache=False, **given).logits
        return cp.mean(F.cross_entropy(logits.mT, labels, reduction="none"))


def in_module_of_user(rank: int, name: str) -> float:
    from ringspan.integrations.transformers import prepare

    cp = rs.ContextParallel(None, rs.causal(N), layout="zigzag")
    module = OfUser(name)
    wanted = F.cross_entropy(module.model(tokens()).logits.mT, tokens())
    prepare(module.model)
    with cp, Float64():
        found = module(cp, labels=cp.shard(tokens(), dim=1))
    return abs(found.item() - wanted.item())


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_variables_of_a_module_of_the_user_are_not_those_of_the_model(name: str, pools: Pools) -> None:
    assert all(x <= 1e-6 for x in pools(2).run(in_module_of_user, name))


def with_checkpoints(rank: int, reentrant: bool) -> dict[str, float]:
    """The first layer of T5 makes the biases of all layers, which pass through the checkpoints between them."""
    from ringspan.integrations.transformers import prepare

    cp = rs.ContextParallel(None, rs.full(N, 37), layout="zigzag", kv_layout="zigzag")
    inputs = {"input_ids": cp.shard(tokens(37), dim=1, of="kv"), "decoder_input_ids": cp.shard(tokens(), dim=1)}
    found = []
    for recompute in (False, True):
        model = prepare(small_model("t5").train())
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        with cp:
            model(**inputs, use_cache=False).logits.square().sum().backward()
        found.append({name: x.grad for name, x in model.named_parameters() if x.grad is not None})
    return {name: difference(found[1][name], x) for name, x in found[0].items()}


@pytest.mark.parametrize("reentrant", [True, False])
def test_biases_are_learned_through_checkpoints(reentrant: bool, pools: Pools) -> None:
    check(pools(2).run(with_checkpoints, reentrant))


def cross_attention(rank: int) -> float:
    """The largest difference of the logits of Pop2Piano, whose decoder attends to states without a mask."""
    from ringspan.integrations.transformers import prepare

    model = small_model("pop2piano")
    states = torch.randn(B, 37, 32, generator=torch.Generator().manual_seed(4)).double()
    with Float64():
        wanted = model(inputs_embeds=states, decoder_input_ids=tokens(), use_cache=False).logits
    cp = rs.ContextParallel(None, rs.full(N, 37), layout="zigzag", kv_layout="zigzag")
    prepare(model)
    with cp, Float64():
        mine = {"inputs_embeds": cp.shard(states, dim=1, of="kv"), "decoder_input_ids": cp.shard(tokens(), dim=1)}
        found = model(**mine, use_cache=False).logits
    return (found - cp.shard(wanted, dim=1)).abs().max().item()


def test_cross_attention_without_a_mask_of_the_model_is_exact(pools: Pools) -> None:
    assert all(x <= 1e-12 for x in pools(2).run(cross_attention))


@pytest.mark.parametrize("name", ["t5", "bart with encoder"])
def test_a_prepared_model_is_the_same_outside_a_block(name: str) -> None:
    from ringspan.integrations.transformers import prepare

    given = {"input_ids": tokens(37), "decoder_input_ids": tokens()}
    model: Any = small_model(name)
    model.set_attn_implementation("eager")
    with Float64():
        wanted = model(**given).logits
        assert difference(prepare(model)(**given).logits, wanted) < 1e-12


BLIP = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
OPT = {"ffn_dim": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 1}
LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    "opt": {"model_type": "opt", "vocab_size": 64, "hidden_size": 32, "word_embed_proj_dim": 32, **OPT},
    "t5": {"model_type": "t5", "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4},
}


def without_decoder_tokens(rank: int, name: str) -> str:
    """The error of BLIP-2, whose forward takes tokens of a decoder whether its language model has an encoder or not."""
    from transformers import Blip2Config, Blip2ForConditionalGeneration

    from ringspan.integrations.transformers import prepare

    config = Blip2Config(
        vision_config={**BLIP, "image_size": 28, "patch_size": 14},
        qformer_config={**BLIP, "encoder_hidden_size": 16, "vocab_size": 32},
        text_config=LANGUAGE_MODELS[name],
        num_query_tokens=4,
    )
    model: Any = prepare(Blip2ForConditionalGeneration(config).eval())
    cp = rs.ContextParallel(None, rs.causal(N))
    try:
        with cp, torch.no_grad():
            model(pixel_values=torch.zeros(1, 3, 28, 28), input_ids=cp.shard(tokens()[:1], dim=1))
    except rs.RingspanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_only_models_with_an_encoder_need_tokens_of_a_decoder(name: str, pools: Pools) -> None:
    for error in pools(2).run(without_decoder_tokens, name):
        assert ("was called without decoder_input_ids" in error) == (name == "t5")
        assert ("call it in `with rs.local_attention():`" in error) == (name == "opt")  # the vision tower


def test_a_prepared_model_can_be_pickled() -> None:
    from ringspan.integrations.transformers import prepare

    model: Any = prepare(small_model("t5"))
    again: Any = pickle.loads(pickle.dumps(model))
    assert type(again) is type(model)
    assert type(again.encoder.block[0].layer[0].SelfAttention).__name__ == "T5Attention"
    given = {"input_ids": tokens(), "decoder_input_ids": tokens()}
    assert torch.equal(again(**given).logits, model(**given).logits)


def refused(rank: int) -> dict[str, str]:
    """The errors of calls and of ``prepare``."""
    cp, full = rs.ContextParallel(None, rs.causal(N), layout="zigzag"), rs.ContextParallel(None, rs.full(N), layout="zigzag")
    labels = cp.shard(tokens(), dim=1)
    both = rs.ContextParallel(None, rs.full(N, 120), layout="zigzag", kv_layout="zigzag")
    of_pegasus = {"input_ids": both.shard(tokens(120), dim=1, of="kv"), "decoder_input_ids": both.shard(tokens(), dim=1)}

    def error(name: str, *args: Any, **kwargs: Any) -> str:
        try:
            return message(name, *args, **kwargs)
        except rs.RingspanError as error:  # of prepare
            return str(error)

    return {
        "bart": error("bart with encoder", cp, prepared=True, position_ids=None),
        "bigbird_pegasus": error("bigbird_pegasus with encoder", both, prepared=True, position_ids=None, **of_pegasus),
        "clap": error("clap", full),
        "deberta": error("deberta", full, prepared=True),
        "labels": error("llama", cp, labels=labels),
        "mpnet": error("mpnet", full, prepared=True),
        "of all tokens": error("llama for classification", cp),
        "of all tokens, in pretraining": error("bert for pretraining", full),
        "of all tokens, projected": error("clip with projection", cp),
        "positions of answers": error("llama for answers", cp, start_positions=labels[:, 0], end_positions=labels[:, 0]),
        "t5": error("t5", full, position_ids=None),
        "wav2vec2": error("wav2vec2", full, prepared=True),
    }


REFUSED = {
    "bart": "bart was called without decoder_input_ids",
    "bigbird_pegasus": "attends in blocks of tokens",
    "clap": "begin with 1 in this model",
    "deberta": "its layers compute attention themselves",
    "labels": "labels= was passed to the model",
    "mpnet": "its layers compute attention themselves",
    "of all tokens": "LlamaForSequenceClassification computes one result from all tokens",
    "of all tokens, in pretraining": "BertForPreTraining computes one result from all tokens",
    "of all tokens, projected": "CLIPTextModelWithProjection computes one result from all tokens",
    "positions of answers": "start_positions= was passed to the model",
    "t5": "t5 adds biases to its scores",
    "wav2vec2": "has convolutions over its tokens",
}


def test_what_encoders_and_heads_refuse(pools: Pools) -> None:
    for found in pools(2).run(refused):
        assert {name: text for name, text in REFUSED.items() if text not in found[name]} == {}


def heads_of_the_user(rank: int) -> dict[str, str]:
    """The errors of a subclass of a head, and of a head that is written by the user; empty if there is none."""
    from transformers import LlamaConfig, LlamaForSequenceClassification, LlamaModel

    class Reward(LlamaForSequenceClassification):
        """Has the forward of its parent."""

    class MeanForSequenceClassification(LlamaModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return cp.unshard(super().forward(*args, **kwargs).last_hidden_state, dim=1).mean(1)

    cp = rs.ContextParallel(None, rs.causal(N), layout="zigzag")
    given = {"input_ids": cp.shard(tokens(), dim=1), "position_ids": cp.positions()[None]}
    found = {}
    for cls in (Reward, MeanForSequenceClassification):
        model = cls(LlamaConfig(**SIZES))
        model.set_attn_implementation("ringspan")
        try:
            with cp, torch.no_grad():
                model(**given, use_cache=False)
            found[cls.__name__] = ""
        except rs.RingspanError as error:
            found[cls.__name__] = str(error)
    return found


def test_heads_are_told_by_their_forward_and_not_by_their_name(pools: Pools) -> None:
    for found in pools(2).run(heads_of_the_user):
        assert "Reward computes one result from all tokens" in found["Reward"]
        assert found["MeanForSequenceClassification"] == ""


def test_every_model_that_counts_from_padding_is_known() -> None:
    """If this fails, transformers has a new model whose first position is pad_token_id + 1: see COUNTS_AFTER_PADDING."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

    from ringspan.integrations.transformers.refusals import COUNTS_AFTER_PADDING, COUNTS_POSITIONS, REFUSED_MODELS

    types: dict[str, set[str]] = {}
    for model_type in CONFIG_MAPPING_NAMES:
        types.setdefault(model_type_to_module_name(model_type), set()).add(model_type)
    known = COUNTS_AFTER_PADDING | COUNTS_POSITIONS | REFUSED_MODELS.keys()
    counts = "create_position_ids_from_input_ids"
    files = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    folders = {file.parent.name for file in files if counts in file.read_text()}
    assert "roberta" in folders
    unknown = {folder for folder in folders if not types.get(folder, set()) & known}
    assert unknown == {"evolla", "pp_doclayout_v2"}  # they count the letters of a protein, and the parts of a page
