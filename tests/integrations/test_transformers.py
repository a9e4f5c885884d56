"""Models of transformers on two processes: logits and the gradients of all parameters against one process, in
float64."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor, nn

import ringspan as rs
from ringspan.testing.float64 import Float64
from tests.conftest import Pools
from tests.integrations.small_models import VOCABULARY, small_model

if find_spec("transformers") is None:
    pytest.skip("needs transformers: pip install 'ringspan[hf]'", allow_module_level=True)

N, B = 29, 2  # 15 and 14 tokens on the two ranks, longer than the windows and chunks of the models
LENGTHS = [11, 3, 15]
TOLERANCE = 1e-10
ROUNDING = 1e-14

DECODERS = [
    *("llama", "qwen3", "qwen3_moe", "mistral", "gemma2", "gemma3", "olmo3", "llama4", "gpt_oss", "phi3", "cohere2"),
    *("deepseek_v3", "gemma4", "smollm3"),
]
# all others only have the name set
PREPARED = ["bart", "gptj", "gpt_neo", "bloom", "falcon", "falcon with alibi", "mpt", "openai-gpt", "bert", "lfm2"]
PREPARED += ["doge", "git", "inkling", "xlm", "xlnet", "zaya"]
WITHOUT_POSITIONS = {"bart", "bloom", "mpt", "xlnet"}  # these take no position_ids
LENGTH_DEPENDENT = ["llama with dynamic RoPE", "phi3 with LongRoPE"]
COUNTING_ENCODERS = ["bart with encoder", "m2m_100 with encoder", "mvp with encoder"]
T5_MODELS = ["t5", "mt5", "umt5", "t5 encoder"]  # their scores have biases
SPECIAL = ["llama", "doge", "inkling", "xlm", "xlnet", "zaya"]
IS_NEW = Version(version("transformers")) >= Version("5.23")
if IS_NEW:
    PREPARED += ["inkling2"]
    SPECIAL += ["inkling2"]
ONLY_EAGER = {"gemma2", "gpt_oss", "inkling2", "t5gemma"}  # SDPA has no softcap and no sinks
# These have no other attention:
ONLY_EAGER |= {*T5_MODELS, "bloom", "git", "gpt_neo", "gptj", "mpt", "mvp with encoder", "openai-gpt", "xlm", "xlnet"}
LAYOUTS = ["contiguous", "zigzag"]


def results(model: nn.Module, inputs: dict[str, Any], weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    with Float64():
        logits = model(**inputs, use_cache=False).logits
        (logits * weights).sum().backward()
    return logits.detach(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def difference(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest value; infinite for NaN.

    The gradient of a key's bias is 0, since softmax does not change by a constant: what is left is rounding.
    """
    if max(found.abs().max().item(), wanted.abs().max().item()) < ROUNDING:
        return 0.0
    worst = ((found - wanted).abs().max() / wanted.abs().max()).item()
    return worst if worst == worst else float("inf")


def compare(
    name: str, cp: rs.ContextParallel, whole: dict[str, Any], sharded: dict[str, Any], *, keep: Tensor | None = None
) -> dict[str, float]:
    """How much a model differs between one process with the inputs ``whole`` and this block with ``sharded``.

    ``keep`` (B, N) says which tokens count: all but padding.
    """
    n = cp.plan.q_layout.length
    weights = torch.randn(B, n, VOCABULARY, generator=torch.Generator().manual_seed(2)).double()
    if keep is not None:
        weights = weights * keep[..., None]
    model = small_model(name)
    model.set_attn_implementation("eager" if name in ONLY_EAGER else "sdpa")
    logits, grads = results(model, whole, weights)
    use_ringspan(model, name)
    with cp:
        my_logits, my_grads = results(model, sharded, cp.shard(weights, dim=1))
    cp.sum_gradients(model.parameters())
    logits = cp.shard(logits, dim=1)
    if keep is not None:
        mine = cp.shard(keep, dim=1)
        logits, my_logits = logits[mine], my_logits[mine]
    assert grads.keys() == my_grads.keys()
    return {"logits": difference(my_logits, logits)} | {x: difference(my_grads[x], grads[x]) for x in grads}


def use_ringspan(model: Any, name: str) -> None:
    """As docs/transformers.md says: ``prepare`` for some models, the name of the attention for all others."""
    import ringspan.integrations.transformers as ours

    if name in (*PREPARED, *LENGTH_DEPENDENT, *COUNTING_ENCODERS, *T5_MODELS):
        ours.prepare(model)
    else:
        model.set_attn_implementation("ringspan")


def tokens(n: int = N) -> Tensor:
    return torch.randint(3, VOCABULARY, (B, n), generator=torch.Generator().manual_seed(1))


def positions(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths]).expand(B, -1)


# -- jobs: each runs on every rank, and returns differences ------------------------------------------------------------


def plain(rank: int, name: str, layout: str) -> dict[str, float]:
    cp = rs.ContextParallel(None, rs.causal(N), layout=layout)
    whole = {"input_ids": tokens()}
    return compare(name, cp, whole, {"input_ids": cp.shard(tokens(), dim=1), "position_ids": cp.positions()[None]})


def plain_prepared(rank: int, name: str, layout: str) -> dict[str, float]:
    """Models that need ``prepare``; a copy of a prepared model is prepared."""
    import copy

    from ringspan.integrations.transformers import prepare

    cp = rs.ContextParallel(None, rs.causal(N), layout=layout)
    whole: dict[str, Any] = {"input_ids": tokens()}
    mine = {"input_ids": cp.shard(tokens(), dim=1)}
    if name not in WITHOUT_POSITIONS:
        mine["position_ids"] = cp.positions()[None].expand(B, -1)
    found = compare(name, cp, whole, mine)
    model = prepare(small_model(name))
    copied = copy.deepcopy(model)
    for x in copied.parameters():
        x.data.zero_()
    if name == "inkling2":
        with Float64(), pytest.raises(rs.UnplannedAttention, match="has a softcap or sinks, which SDPA does not support"):
            model(**whole)
    else:
        found["outside a block"] = difference(model(**whole).logits, small_model(name)(**whole).logits)
    with cp, torch.no_grad(), in_float64(name):
        found["a copy has its own weights"] = copied(**mine, use_cache=False).logits.abs().max().item()
    return found


def packed(rank: int, name: str, layout: str) -> dict[str, float]:
    """The documents are in the block's mask."""
    from ringspan.integrations.transformers import packed_mask

    whole = {"input_ids": tokens(), "position_ids": positions(LENGTHS)}
    cp = rs.ContextParallel(None, packed_mask(whole["position_ids"]), layout=layout)
    return compare(name, cp, whole, cp.shard(whole, dim=1))


def packed_by_cu_seq_lens(rank: int, name: str, layout: str) -> dict[str, float]:
    """The documents are in the call, as DataCollatorWithFlattening gives them."""
    whole = {"input_ids": tokens(), "position_ids": positions(LENGTHS)}
    cp = rs.ContextParallel(None, rs.causal(N), layout=layout)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    given = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
    return compare(name, cp, whole, {**cp.shard(whole, dim=1), **given})


def documents_of_the_call(rank: int) -> dict[str, float]:
    """``cu_seq_lens_q`` for a model that does not pass it to its layers. The documents are those of each alone."""
    from ringspan.integrations.transformers import prepare

    cp, ids = rs.ContextParallel(None, rs.causal(N), layout="zigzag"), tokens()
    model = prepare(small_model("bloom"))
    wanted = torch.cat([model(input_ids=x, use_cache=False).logits for x in ids.split(LENGTHS, dim=1)], dim=1)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    with cp, torch.no_grad():
        logits = model(input_ids=cp.shard(ids, dim=1), cu_seq_lens_q=ends, use_cache=False).logits
    return {"logits": difference(logits, cp.shard(wanted, dim=1))}


def packed_and_more(rank: int, name: str) -> dict[str, float]:
    """The same packed documents, with a KV cache and with an attention mask, which in one process would hide them."""
    from ringspan.integrations.transformers import prepare

    cp = rs.ContextParallel(None, rs.documents(LENGTHS), layout="zigzag")
    model = prepare(small_model(name))
    given = cp.shard({"input_ids": tokens(), "position_ids": positions(LENGTHS)}, dim=1)
    with cp, torch.no_grad():
        wanted = model(**given, use_cache=False).logits
        cached = model(**given, use_cache=True).logits
        masked = model(**given, use_cache=False, attention_mask=torch.ones(B, N, dtype=torch.long)).logits
    return {"with a cache": difference(cached, wanted), "with a mask": difference(masked, wanted)}


def packed_by_rows(rank: int, name: str, layout: str) -> dict[str, float]:
    """Every row of the batch has its own documents."""
    from ringspan.integrations.transformers import packed_mask

    rows = torch.cat([positions(LENGTHS)[:1], positions([20, 9])[:1]])
    whole = {"input_ids": tokens(), "position_ids": rows}
    cp = rs.ContextParallel(None, packed_mask(rows), layout=layout)
    return compare(name, cp, whole, cp.shard(whole, dim=1))


def padded(rank: int, name: str, layout: str, side: str, shared: bool) -> dict[str, float]:
    """A batch with padding, marked on every rank for the whole sequence, or (``shared``) for its own tokens."""
    keep = torch.ones(B, N, dtype=torch.bool)
    keep[0, slice(0, 5) if side == "left" else slice(24, N)] = False
    positions = (keep.cumsum(-1) - 1).clamp_min(0)
    whole = {"input_ids": tokens(), "attention_mask": keep.long(), "position_ids": positions}
    cp = rs.ContextParallel(None, rs.causal(N), layout=layout)
    mine = cp.shard(whole, dim=1)
    if shared:
        mine["attention_mask"] = whole["attention_mask"]
    return compare(name, cp, whole, mine, keep=keep)


def with_images(rank: int, name: str, layout: str) -> dict[str, float]:
    """Images, whose tokens see each other in both directions, at other places in each row. Some lie on both ranks."""
    types = torch.zeros(B, N, dtype=torch.long)
    types[0, 4:10] = 1
    types[0, 12:19] = 1
    types[1, 8:14] = 1
    embeddings = torch.randn(B, N, 32, generator=torch.Generator().manual_seed(5)).double()
    whole = {"inputs_embeds": embeddings, "token_type_ids": types}
    cp = rs.ContextParallel(None, rs.full(N), layout=layout)
    mine = {"inputs_embeds": cp.shard(embeddings, dim=1), "position_ids": cp.positions()[None], "token_type_ids": types}
    return compare(name, cp, whole, mine)


def with_a_prefix(rank: int, layout: str) -> dict[str, float]:
    """PaliGemma, whose model makes the mask for the text model in it. The tokens of the prefix see all of each other."""
    types = torch.arange(N).ge(18).long().expand(B, -1)
    embeddings = torch.randn(B, N, 32, generator=torch.Generator().manual_seed(5)).double()
    cp = rs.ContextParallel(None, rs.full(N), layout=layout)
    mine = {"inputs_embeds": cp.shard(embeddings, dim=1), "position_ids": cp.positions()[None], "token_type_ids": types}
    return compare("paligemma", cp, {"inputs_embeds": embeddings, "token_type_ids": types}, mine)


def counted_after_padding(rank: int) -> dict[str, float]:
    """RoBERTa, whose first position is pad_token_id + 1."""
    cp = rs.ContextParallel(None, rs.causal(N), layout="zigzag")
    mine = {"input_ids": cp.shard(tokens(), dim=1), "position_ids": cp.positions()[None] + 1}
    return compare("roberta", cp, {"input_ids": tokens()}, mine)


def check(found: list[dict[str, float]], tolerance: float = TOLERANCE) -> None:
    wrong = {what: x for differences in found for what, x in differences.items() if not x <= tolerance}
    assert not wrong


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("layout", ["zigzag", pytest.param("contiguous", marks=pytest.mark.slow)])
def test_a_decoder_is_exact(name: str, layout: str, pools: Pools) -> None:
    check(pools(2).run(plain, name, layout))


@pytest.mark.parametrize("name", ["gemma3", "llama4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_documents_are_exact(name: str, layout: str, pools: Pools) -> None:
    check(pools(2).run(packed, name, layout))


@pytest.mark.parametrize("name", ["gemma3", "llama4"])
@pytest.mark.parametrize("job", [packed_by_cu_seq_lens, packed_by_rows])
def test_packed_documents_of_the_call_and_of_rows_are_exact(job: Any, name: str, pools: Pools) -> None:
    check(pools(2).run(job, name, "zigzag"))


def test_documents_of_the_call_are_not_lost_in_the_model(pools: Pools) -> None:
    check(pools(2).run(documents_of_the_call), tolerance=1e-6)  # Bloom computes softmax in float32


@pytest.mark.parametrize("name", ["gemma3", "llama4"])
def test_a_cache_or_a_mask_does_not_change_packed_documents(name: str, pools: Pools) -> None:
    check(pools(2).run(packed_and_more, name))


@pytest.mark.parametrize("name", LENGTH_DEPENDENT)
def test_rope_that_depends_on_the_largest_position_is_exact(name: str, pools: Pools) -> None:
    """The positions of the first rank are below the limits of the models, those of the second are not."""
    check(pools(2).run(plain, name, "contiguous"))


def test_positions_after_that_of_padding_are_exact(pools: Pools) -> None:
    check(pools(2).run(counted_after_padding))


@pytest.mark.parametrize(("side", "shared"), [("left", True), ("right", True), ("left", False)])
@pytest.mark.parametrize("name", ["llama", "llama4", "gpt_oss"])
def test_padding_is_exact(name: str, side: str, shared: bool, pools: Pools) -> None:
    check(pools(2).run(padded, name, "zigzag", side, shared))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_image_blocks_are_exact(layout: str, pools: Pools) -> None:
    check(pools(2).run(with_images, "gemma3 with images", layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mask_that_the_outer_model_has_made_is_exact(layout: str, pools: Pools) -> None:
    check(pools(2).run(with_a_prefix, layout))


@pytest.mark.parametrize("name", PREPARED)
def test_a_prepared_model_is_exact(name: str, pools: Pools) -> None:
    check(pools(2).run(plain_prepared, name, "zigzag"))


def convolutions(rank: int) -> dict[str, Any]:
    """Convolutions of packed documents against those of each document alone; with checkpoints; and with padding."""
    from ringspan.integrations.transformers import prepare

    cp, ids = rs.ContextParallel(None, rs.documents(LENGTHS), layout="zigzag"), tokens()
    model = prepare(small_model("lfm2"))
    each = [model(input_ids=x, use_cache=False).logits for x in ids.split(LENGTHS, dim=1)]
    wanted = cp.shard(torch.cat(each, dim=1), dim=1)
    given = cp.shard({"input_ids": ids, "position_ids": positions(LENGTHS)}, dim=1)
    found, grads = {}, []
    for recompute in (False, True):
        model.zero_grad(set_to_none=True)
        if recompute:
            model.train().gradient_checkpointing_enable()
        with cp:
            logits = model(**given, use_cache=False).logits
        logits.square().sum().backward()
        found[f"documents, recompute={recompute}"] = difference(logits, wanted)
        grads.append([x.grad for x in model.parameters()])
    found["gradients"] = max(difference(a, b) for a, b in zip(*grads, strict=True))
    with cp, pytest.raises(rs.UnplannedAttention, match="the batch has padding"):
        model(**given, attention_mask=torch.arange(N).gt(3).long().expand(B, -1), use_cache=False)
    kernel_of_hub = mock.patch("transformers.models.lfm2.modeling_lfm2.causal_conv1d_fn", lambda x, *_, **__: x)
    with kernel_of_hub, cp, pytest.raises(rs.UnplannedAttention, match=r"without F\.conv1d"):
        model(**given, use_cache=False)
    return found


def test_convolutions_are_exact(pools: Pools) -> None:
    check(pools(2).run(convolutions))


def in_float64(name: str) -> Any:
    """Compute in float64 what Inkling 2 computes in float32: its router multiplies float32 by float64 otherwise."""
    return Float64() if name == "inkling2" else nullcontext()


def special_model(name: str, cp: rs.ContextParallel, ids: Tensor) -> dict[str, float]:
    from ringspan.integrations.transformers import prepare

    alone, model = small_model(name), prepare(small_model(name))
    each = [alone(input_ids=x, use_cache=False).logits for x in ids.split(LENGTHS, dim=1)]
    given = cp.shard({"input_ids": ids, "position_ids": positions(LENGTHS)}, dim=1)
    if name == "xlnet":
        del given["position_ids"]
    with cp:
        if name == "inkling2":  # a checkpoint would run it again without Float64
            logits = model(**given, use_cache=False).logits
        else:
            logits = torch.utils.checkpoint.checkpoint(
                lambda given, model: model(**given, use_cache=False).logits, given, model, use_reentrant=False
            )
    logits.square().sum().backward()
    cp.sum_gradients(model.parameters())
    wanted = torch.cat(each, dim=1)
    grads = torch.autograd.grad(wanted.square().sum(), list(alone.parameters()), allow_unused=True)
    found = {f"{name}: documents": difference(logits, cp.shard(wanted, dim=1))}
    pairs = [(x.grad, y) for x, y in zip(model.parameters(), grads, strict=True) if y is not None and x.grad is not None]
    found[f"{name}: gradients"] = difference(*(torch.cat([x.flatten() for x in xs]) for xs in zip(*pairs, strict=True)))
    return found


def special_models(rank: int) -> dict[str, float]:
    """Packed documents and a checkpoint around the model, with models that have code of their own, and with Llama."""
    cp, ids = rs.ContextParallel(None, rs.documents(LENGTHS), layout="zigzag"), tokens()
    found: dict[str, float] = {}
    for name in SPECIAL:
        with in_float64(name):
            found |= special_model(name, cp, ids)
    return found


def test_special_models_are_exact(pools: Pools) -> None:
    check(pools(2).run(special_models), tolerance=1e-6)  # parts of the models are in float32


# -- what is refused ---------------------------------------------------------------------------------------------------


def message(
    name: str, cp: rs.ContextParallel, training: bool = False, prepared: bool = False, compiled: bool = False, **inputs: Any
) -> str:
    """The error of a forward pass in the block; empty if there is none."""
    from ringspan.integrations.transformers import prepare

    model = small_model(name).train(training)
    if prepared:
        prepare(model)
    else:
        model.set_attn_implementation("ringspan")
    call: Any = torch.compile(model, backend="eager") if compiled else model
    ids = cp.shard(tokens(cp.plan.q_layout.length), dim=1)
    given = {"input_ids": ids, "position_ids": cp.positions()[None].expand(B, -1), **inputs}
    try:
        with cp:
            call(**{key: x for key, x in given.items() if x is not None}, use_cache=False)
    except rs.RingspanError as error:
        return " ".join([str(error), *getattr(error, "__notes__", [])])
    return ""


def refused_when_prepared(rank: int) -> dict[str, str]:
    cp = rs.ContextParallel(None, rs.causal(N), layout="zigzag")
    long = rs.ContextParallel(None, rs.causal(40), layout="zigzag")
    padded = tokens()
    padded[0, 20:] = 0
    image = torch.zeros(B, 3, 28, 28).double()
    of_call = {"cu_seq_lens_q": torch.tensor([0, 20, N]), "position_ids": cp.shard(positions([20, 9]), dim=1)}
    return {
        "bloom, weights": message("bloom", cp, prepared=True, position_ids=None, output_attentions=True),
        "mpt, weights": message("mpt", cp, prepared=True, position_ids=None, output_attentions=True),  # by hooks of the model
        "doge": message("doge", long, prepared=True),
        "doge, not prepared": message("doge", cp),
        "git": message("git", cp, prepared=True, pixel_values=image),
        "inkling": message("inkling", long, prepared=True),
        "xlm": message("xlm", cp, prepared=True, input_ids=cp.shard(padded, dim=1)),
        "xlm, no positions": message("xlm", cp, prepared=True, position_ids=None),
        "xlnet": message("xlnet", cp, prepared=True, token_type_ids=torch.zeros_like(cp.shard(padded, dim=1))),
        "xlnet, dropout": message("xlnet", cp, training=True, prepared=True),
        **{name: message(name.partition(",")[0], cp, prepared=True, **of_call) for name in DOCUMENTS_OF_CALL},
        "xlnet, documents of the call": message(
            "xlnet", cp, prepared=True, position_ids=None, cu_seq_lens_q=of_call["cu_seq_lens_q"]
        ),
        "zaya": message("zaya", cp, prepared=True, attention_mask=(padded != 0).long()),
        "zaya, not prepared": message("zaya", cp),
    }


DOCUMENTS_OF_CALL = ["inkling, documents of the call", "zaya, documents of the call"]
REFUSED_WHEN_PREPARED = {
    **dict.fromkeys(DOCUMENTS_OF_CALL, "would cross it"),
    "xlnet, documents of the call": "XLNet would cross it",
    "bloom, weights": "BloomAttention, layer 0 should return its weights",
    "mpt, weights": "MptAttention, layer 0 should return its weights",
    "doge": "above keep_window_size=32 this layer chooses keys",
    "doge, not prepared": "prepare(model)",
    "git": "call it in `with rs.local_attention():`",
    "inkling": "This is exact up to 32 tokens; the sequence has 40",
    "xlm": "counts the other tokens on this rank only",
    "xlm, no positions": "pass position_ids=cp.positions()[None]",
    "xlnet": "segments (token_type_ids)",
    "xlnet, dropout": "a dropout of 0.1",
    "zaya": "the batch has padding",
    "zaya, not prepared": "zaya has convolutions over its tokens",
}


def test_models_that_are_not_exact_are_refused() -> None:
    import transformers

    from ringspan.integrations.transformers import prepare
    from ringspan.integrations.transformers.refusals import refuse_config

    with pytest.raises(rs.UnplannedAttention, match="recurrent_gemma cannot run under context parallelism: it has recurrent"):
        prepare(small_model("recurrent_gemma"))
    with pytest.raises(rs.UnplannedAttention, match="mamba cannot run under context parallelism: it has recurrent layers"):
        prepare(small_model("mamba"))
    with pytest.raises(rs.UnplannedAttention, match="pegasus_x cannot run under context parallelism: its encoder attends"):
        refuse_config(transformers.PegasusXConfig())
    with pytest.raises(rs.UnplannedAttention, match=r"doge with is_moe=True cannot .* its routers mix the scores"):
        refuse_config(transformers.DogeConfig(is_moe=True))
    with pytest.raises(rs.UnplannedAttention, match=r"esm scales embeddings by the share of mask tokens"):
        refuse_config(transformers.EsmConfig(token_dropout=True))


def test_what_prepared_models_refuse(pools: Pools) -> None:
    found = pools(2).run(refused_when_prepared)
    for case, said in REFUSED_WHEN_PREPARED.items():
        assert any(said in x[case] for x in found), case
        assert all(x[case] for x in found), case


class OtherProducts(nn.Module):
    """A layer without a mask that writes attention out by einsum."""

    def forward(self, hidden_BSF: Tensor) -> Tensor:
        weights = torch.softmax(torch.einsum("bsf,btf->bst", hidden_BSF, hidden_BSF), dim=-1)
        return torch.einsum("bst,btf->bsf", weights, hidden_BSF)


def unknown_products(rank: int) -> str:
    from ringspan.integrations.transformers.written_out import attention_over_ranks

    cp = rs.ContextParallel(None, rs.full(N), layout="zigzag")
    try:
        with cp:
            cp.mark_as_used()
            attention_over_ranks(OtherProducts(), OtherProducts.forward, cp.shard(torch.ones(B, N, 4), dim=1))
    except rs.UnplannedAttention as error:
        return str(error)
    return ""


def test_products_that_are_not_recognised_are_refused(pools: Pools) -> None:
    for error in pools(2).run(unknown_products):
        assert "without a matrix product of queries and keys that ringspan knows" in error


def refused(rank: int) -> dict[str, str]:
    cp = rs.ContextParallel(None, rs.causal(N), layout="zigzag")
    packed = rs.ContextParallel(None, rs.documents([20, 9]), layout="zigzag")
    types = torch.zeros(B, N, dtype=torch.long)
    types[:, 4:10] = 1
    images = {"inputs_embeds": torch.zeros(B, cp.plan.q_layout.counts[rank], 32).double(), "input_ids": None}
    return {
        "fine": message("llama", cp),
        "linear layers": message("qwen3_next", cp),
        "recurrent layers": message("recurrent_gemma", cp),
        "no positions": message("llama", cp, position_ids=None),
        "no positions, in compiled code": message("llama", cp, compiled=True, position_ids=None),
        "no positions of documents": message("llama", packed, position_ids=None),
        "no positions, added to the tokens": message("bert", cp, position_ids=None),
        "positions that begin with 0": message("roberta", cp),
        "no positions after that of padding": message("roberta", cp, position_ids=None),
        "RoPE of another length": message("phi3 with LongRoPE", cp),
        "not prepared": message("bart", cp, position_ids=None),
        "convolutions, not prepared": message("lfm2", cp),
        "documents only in the positions": message("llama", cp, position_ids=cp.shard(positions([20, 9]), dim=1)),
        "a mask tensor": message("llama", cp, attention_mask=torch.ones(B, 1, 15, 15, dtype=torch.bool)),
        "a part of the logits": message("gemma4", cp, logits_to_keep=1),
        "images and a causal block": message("gemma3 with images", cp, token_type_ids=types, **images),
        "labels": message("llama", cp, labels=cp.shard(tokens(), dim=1)),
        "labels that are shifted": message(
            "llama", cp, labels=cp.shard(tokens(), dim=1), shift_labels=cp.shard(tokens(), dim=1)
        ),
        "whole inputs": message("llama", cp, input_ids=tokens(), position_ids=torch.arange(N)[None]),
    }


REFUSALS = {
    "fine": "",
    "linear layers": "qwen3_next has layers that are not softmax attention under a mask (linear_attention: layers 0, 1, 2)",
    "recurrent layers": "recurrent_gemma cannot run under context parallelism: it has recurrent layers",
    "no positions": "pass position_ids=cp.positions()[None]",
    "no positions, in compiled code": "pass position_ids=cp.positions()[None]",
    "no positions of documents": "pass position_ids=cp.positions(documents=lengths)[None]",
    "no positions, added to the tokens": "pass position_ids=cp.positions()[None]",
    "positions that begin with 0": "begin with 1 in this model (cp.positions()[None] + 1)",
    "no positions after that of padding": "pass position_ids=cp.positions()[None] + 1",
    "RoPE of another length": "phi3 has RoPE of the type 'longrope', whose frequencies above 24 tokens depend on the largest",
    "not prepared": "bart counts the positions of its tokens",
    "convolutions, not prepared": "lfm2 has convolutions over its tokens",
    "documents only in the positions": "make ContextParallel with ringspan.integrations.transformers.packed_mask(position_ids)",
    "a mask tensor": "LlamaAttention, layer 0 has a mask of shape (2, 1, 15, 15)",
    "a part of the logits": "Leave logits_to_keep out" if IS_NEW else "",
    "images and a causal block": "this layer lets queries see later keys",
    "labels": "labels= was passed to the model",
    "labels that are shifted": "",
    "whole inputs": "this layer has 29 queries and 29 keys",
}


def test_what_is_not_exact_is_refused(pools: Pools) -> None:
    first, second = pools(2).run(refused)
    for case, said in REFUSALS.items():
        for found in (first[case], second[case]):
            assert said.lower() in found.lower(), case
            assert bool(said) == bool(found), case


def operations_on_a_mask(rank: int) -> dict[str, str]:
    """What code of a model does with a mask tensor, and the error of each. ``hasattr`` must not raise."""
    from ringspan.integrations.transformers import ringspan_mask

    scores = torch.zeros(B, 4, 15, 15)
    cp = rs.ContextParallel(None, rs.causal(30), layout="contiguous")
    with cp:
        mask: Any = ringspan_mask(B, 15, 15)
        cp.mark_as_used()
    times = iter(range(2))

    def backward_elsewhere() -> None:
        """A checkpoint whose function attends by another name when it runs again."""
        q = torch.ones(1, 2, 3, 4, requires_grad=True)

        def attend(x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, mask if next(times) else None).exp()

        torch.utils.checkpoint.checkpoint(attend, q, use_reentrant=False).sum().backward()

    operations: dict[str, Any] = {
        "checkpoint": backward_elsewhere,
        "hasattr": lambda: hasattr(mask, "bool"),
        "bool": lambda: mask.bool(),
        "scores + mask": lambda: scores + mask,
        "mask + scores": lambda: mask + scores,
        "torch.add": lambda: torch.add(scores, mask),
        "scores += mask": lambda: scores.add_(mask),
        "where": lambda: torch.where(mask, scores, 0.0),
        "masked_fill of scores": lambda: scores.masked_fill(mask, -1e9),
    }
    found = {}
    for name, operation in operations.items():
        try:
            found[name] = str(operation())
        except rs.UnplannedAttention as error:
            found[name] = str(error)
    return found


def test_operations_on_a_mask_are_refused(pools: Pools) -> None:
    for found in pools(2).run(operations_on_a_mask):
        assert found.pop("hasattr") == "False"
        assert "the backward pass ran after the context was left" in found.pop("checkpoint")
        assert found.pop("bool").startswith("this model reads 'bool' of its attention mask")
        assert found.pop("where").startswith("this model applies where to its attention mask")
        assert found.pop("masked_fill of scores").startswith("this model applies masked_fill to its attention mask")
        for name, error in found.items():
            assert error.startswith("a layer of this model adds the mask to its scores"), name


def directions(rank: int) -> dict[str, Any]:
    """Gemma whose layers are not causal, and whose mask is, unless its config decides it."""
    import ringspan.integrations.transformers  # noqa: F401

    found: dict[str, Any] = {}
    for is_causal in (None, True, False):
        model: Any = small_model("gemma with two directions")
        if is_causal is not None:
            model.config.is_causal = is_causal
        model.set_attn_implementation("sdpa")
        wanted = model(input_ids=tokens(), use_cache=False).logits
        model.set_attn_implementation("ringspan")
        cp = rs.ContextParallel(None, rs.full(N), layout="zigzag")
        try:
            with cp:
                given = {"input_ids": cp.shard(tokens(), dim=1), "position_ids": cp.positions()[None]}
                found[str(is_causal)] = difference(model(**given, use_cache=False).logits, cp.shard(wanted, dim=1))
        except rs.UnplannedAttention as error:
            found[str(is_causal)] = str(error)
    return found


def test_layers_that_see_more_than_their_mask_are_refused(pools: Pools) -> None:
    for found in pools(2).run(directions):
        assert "gemma has use_bidirectional_attention=True and a causal mask" in found.pop("None")
        check([found])


def attention_without_mask(rank: int) -> dict[str, str]:
    """Calls of the attention function without a mask of the model, and the error of each; empty if there is none."""
    from ringspan.integrations.transformers import ringspan_attention

    ends = torch.tensor([0, 11, N])

    class MllamaTextCrossAttention(nn.Identity):
        """The class of a layer whose keys are image tokens."""

    flagged = nn.Identity()
    flagged.is_cross_attention = True  # type: ignore[assignment]  # as layers of Idefics say

    def message(mask: rs.Mask, layer: nn.Module | None = None, **given: Any) -> str:
        cp = rs.ContextParallel(None, mask, layout="contiguous", kv_layout="contiguous")
        q, k, v = (torch.ones(1, 4, of.counts[rank], 8) for of in (cp.plan.q_layout, cp.plan.kv_layout, cp.plan.kv_layout))
        try:
            with cp:
                ringspan_attention(layer or nn.Identity(), q, k, v, None, **given)
        except rs.UnplannedAttention as error:
            return str(error)
        return ""

    return {
        "keys of an image": message(rs.causal(N), MllamaTextCrossAttention()),
        "keys of another sequence": message(rs.causal(N), flagged),
        "two sequences": message(rs.full(N, 120), flagged, is_causal=False),
        "two sequences of one length": message(rs.full(N), flagged, is_causal=False),
        "window": message(rs.causal(N), sliding_window=5),
        "documents": message(rs.causal(N), cu_seq_lens_q=ends),
        "window of the block": message(rs.causal(N) & rs.window(left=4), sliding_window=5),
        "documents of the block": message(rs.documents([11, 3, 15]), cu_seq_lens_q=ends),
    }


WITHOUT_MASK = {
    "keys of an image": "MllamaTextCrossAttention sees all keys of another sequence",
    "keys of another sequence": "Identity sees all keys of another sequence",
    "two sequences": "",
    "two sequences of one length": "",
    "window": "has a sliding window of 5 tokens, but no mask of the model",
    "documents": "has packed documents (cu_seq_lens_q of 2), but no mask of the model",
    "window of the block": "",
    "documents of the block": "",
}


def test_a_call_without_a_mask_keeps_its_window_and_documents(pools: Pools) -> None:
    for found in pools(2).run(attention_without_mask):
        for case, said in WITHOUT_MASK.items():
            assert said in found[case], case
            assert bool(said) == bool(found[case]), case


def left_to_sdpa(rank: int) -> dict[str, str]:
    """Models that keep the name sdpa, which transformers gives them, and the error of each; empty if there is none."""
    import ringspan.integrations.transformers  # noqa: F401

    def message(name: str, layout: str = "contiguous", local: bool = False, window: int | None = None, **inputs: Any) -> str:
        cp = rs.ContextParallel(None, rs.causal(N), layout=layout)
        model: Any = small_model(name)
        model.set_attn_implementation("sdpa")
        if window is not None:
            model.config.sliding_window = window
        given = {"input_ids": cp.shard(tokens(), dim=1), "position_ids": cp.positions()[None], **inputs}
        try:
            with cp, rs.local_attention() if local else nullcontext():
                model(**{key: x for key, x in given.items() if x is not None}, use_cache=False)
                cp.mark_as_used()
        except rs.RingspanError as error:
            return str(error)
        return ""

    cp = rs.ContextParallel(None, rs.causal(N), layout="contiguous")
    after_padding = torch.arange(-5, N - 5).expand(B, -1)
    return {
        "fine": message("llama"),
        "a window": message("mistral", window=20),
        "linear layers": message("qwen3_next"),
        "recurrent layers": message("recurrent_gemma", position_ids=None),
        "convolutions": message("lfm2"),
        "counts positions": message("bart", position_ids=None),
        "RoPE of another length": message("llama with dynamic RoPE"),
        "no positions": message("llama", layout="zigzag", position_ids=None),  # both ranks would have others
        "padding": message("llama", position_ids=cp.shard(after_padding, dim=1), attention_mask=after_padding.ge(0)),
        "labels": message("llama", labels=cp.shard(tokens(), dim=1)),
        "labels that are shifted": message("llama", labels=cp.shard(tokens(), dim=1), shift_labels=cp.shard(tokens(), dim=1)),
        "in local_attention": message("qwen3_next", local=True, position_ids=None, labels=cp.shard(tokens(), dim=1)),
    }


LEFT_TO_SDPA = {
    "fine": "",
    "a window": "leaves out windows and chunks of 20 tokens",
    **{case: REFUSALS[case] for case in ("linear layers", "recurrent layers", "no positions", "labels")},
    "convolutions": "lfm2 has convolutions over its tokens",
    "padding": "this call has an attn_mask of shape",
    "counts positions": "bart counts the positions of its tokens",
    "RoPE of another length": "llama has RoPE of the type 'dynamic', whose frequencies above 16 tokens depend on the largest",
    "labels that are shifted": "",
    "in local_attention": "",
}


def test_what_a_model_on_sdpa_is_refused_for(pools: Pools) -> None:
    for found in pools(2).run(left_to_sdpa):
        for case, said in LEFT_TO_SDPA.items():
            assert said in found[case], case
            assert bool(said) == bool(found[case]), case


def cross_documents(rank: int) -> str:
    cp = rs.ContextParallel(None, rs.full(N, 37) & rs.window(left=5), layout="zigzag", kv_layout="zigzag")
    mine = {
        "input_ids": cp.shard(tokens(37), dim=1, of="kv"),
        "position_ids": cp.positions("kv")[None],
        "decoder_input_ids": cp.shard(tokens(), dim=1),
        "decoder_position_ids": cp.positions()[None],
    }
    model = small_model("t5gemma")
    model.set_attn_implementation("ringspan")
    try:
        with cp:
            model(**mine, use_cache=False)
    except rs.UnplannedAttention as error:
        return str(error)
    return ""


def test_a_mask_of_cross_attention_is_not_taken_for_that_of_the_encoder(pools: Pools) -> None:
    for error in pools(2).run(cross_documents):
        assert "does not say what the tokens of the encoder or of the decoder see of each other" in error


def test_indexed_layers_are_named() -> None:
    from transformers import DeepseekV32Config

    from ringspan.integrations.transformers.refusals import refuse_config

    with pytest.raises(rs.UnplannedAttention, match=r"deepseek_v32 has layers .* \(indexed_attention: layers 0, 1\)"):
        refuse_config(DeepseekV32Config(num_hidden_layers=2))


def outside_and_unregistered(rank: int) -> dict[str, Any]:
    """Outside a block the name means SDPA. A name that the mask interface does not know gets no mask, in silence."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    import ringspan.integrations.transformers as ours

    masks = []
    AttentionInterface.register(
        "without_mask", lambda module, q, k, v, mask, **_: (masks.append(mask), (q.transpose(1, 2), None))[1]
    )
    model = small_model("mistral")
    model.set_attn_implementation("without_mask")
    model(input_ids=tokens())
    model.set_attn_implementation("sdpa")
    wanted = model(input_ids=tokens()).logits
    model.set_attn_implementation("ringspan")
    return {
        "unregistered masks": masks,
        "registered": ALL_MASK_ATTENTION_FUNCTIONS["ringspan"] is ours.ringspan_mask,
        "outside": difference(model(input_ids=tokens()).logits, wanted),
    }


def test_the_name_is_registered_for_masks_and_means_sdpa_outside_a_block(pools: Pools) -> None:
    for found in pools(2).run(outside_and_unregistered):
        assert found["unregistered masks"] == [None] * 4
        assert found["registered"]
        assert found["outside"] == 0


def recomputed(rank: int) -> dict[str, float]:
    """Gradient checkpointing: the layers run again after the block was left."""
    import ringspan.integrations.transformers  # noqa: F401

    cp = rs.ContextParallel(None, rs.causal(N))
    found = []
    for recompute in (False, True):
        model = small_model("gemma3").train()
        if recompute:
            model.gradient_checkpointing_enable()
        model.set_attn_implementation("ringspan")
        with cp:
            logits = model(input_ids=cp.shard(tokens(), dim=1), position_ids=cp.positions()[None], use_cache=False).logits
        logits.square().sum().backward()
        found.append({name: x.grad for name, x in model.named_parameters() if x.grad is not None})
    return {name: difference(found[1][name], x) for name, x in found[0].items()}


def test_checkpointed_layers_are_exact(pools: Pools) -> None:
    check(pools(2).run(recomputed))
