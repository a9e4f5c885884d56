"""CPM-Ant, which has a prompt before the sequence, ProphetNet, which has several streams of queries, and BLT, which has
patches of bytes: on two processes against one, in float64."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ringspan as rs
from ringspan.testing.assertions import assert_close
from ringspan.testing.float64 import Float64
from tests.conftest import Pools
from tests.integrations.small_models import VOCABULARY, small_model

if find_spec("transformers") is None:
    pytest.skip("needs transformers: pip install 'ringspan[hf]'", allow_module_level=True)

N, B = 29, 2
TOLERANCE = 1e-10
# The tokens that are no padding. CPM-Ant has padding on the left, whose ids are 0; the others have an attention mask.
KEPT = {
    "blt": torch.arange(N) < torch.tensor([[24], [N]]),
    "cpmant": torch.arange(N) >= torch.tensor([[5], [0]]),
    "prophetnet": torch.arange(N) < torch.tensor([[22], [N]]),
}


def tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (B, N), generator=torch.Generator().manual_seed(1))


def outputs(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The logits (B, tokens, streams, words) of all streams."""
    found = model(**inputs, use_cache=False)
    if getattr(found, "logits_ngram", None) is None:
        return found.logits.unsqueeze(2)
    return torch.cat([found.logits[:, None], found.logits_ngram], dim=1).transpose(1, 2)


def gradients(model: Any, logits: Tensor, weights: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    (logits * weights).sum().backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def difference(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest value and at least to 1e-4: the gradient of a key's bias is 0."""
    worst = ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-4)).item()
    return worst if worst == worst else float("inf")


def compare(rank: int, name: str, padded: bool) -> dict[str, float]:
    from ringspan.integrations.transformers import prepare

    cp = rs.ContextParallel(None, rs.full(N) if name == "cpmant" else rs.causal(N), layout="zigzag")
    ids, kept = tokens(), KEPT[name] if padded else torch.ones(B, N, dtype=torch.bool)
    whole = {"input_ids": ids * kept}
    if padded and name != "cpmant":  # in one process, ProphetNet makes NaN of a mask of integers in float64
        whole["attention_mask"] = kept.double() if name == "prophetnet" else kept
    if name == "blt":
        whole["position_ids"] = torch.arange(N).expand(B, -1)
    streams = 3 if name == "prophetnet" else 1
    weights = (
        torch.randn(B, N, streams, VOCABULARY, generator=torch.Generator().manual_seed(2)).double() * kept[..., None, None]
    )
    model: Any = small_model(name)
    with Float64():
        wanted = outputs(model, whole)
        wanted_grads = gradients(model, wanted, weights)
        if name == "blt":
            check_patches(model, whole["input_ids"])
        prepare(prepare(model))  # a prepared model stays as it is
        with cp:
            logits = outputs(model, cp.shard(whole, dim=1))
        grads = gradients(model, logits, cp.shard(weights, dim=1))
    cp.sum_gradients(model.parameters())
    assert grads.keys() == wanted_grads.keys()
    mine = cp.shard(kept, dim=1)
    found = {"logits": difference(logits[mine], cp.shard(wanted, dim=1)[mine])}
    return found | {x: difference(grads[x], wanted_grads[x]) for x in grads}


def check_patches(model: Any, ids: Tensor) -> None:
    """Patches of one byte, or the same patches in all rows, would not show errors in the patches."""
    config = model.config
    _, lengths, _ = model.model.patcher(
        ids, patch_size=config.patch_size, threshold=config.patching_threshold, max_patch_length=config.max_patch_length
    )
    assert 1 < lengths.max() < N // 2
    assert not (lengths[0] == lengths[1]).all()


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("padded", [False, True])
def test_logits_and_gradients_are_those_of_one_process(name: str, padded: bool, pools: Pools) -> None:
    for found in pools(2).run(compare, name, padded):
        assert max(found.values()) <= TOLERANCE, found


def hidden_states(rank: int) -> None:
    """The hidden states of all layers, with a checkpoint around the model. The first rank has no tokens of CPM-Ant but
    the prompt."""
    from ringspan.integrations.transformers import prepare

    for name, layout in (("cpmant", rs.Layout([[], [(0, N)]])), ("prophetnet", rs.Layout([[(4, 7)], [(0, 4), (7, N)]]))):
        cp, ids = rs.ContextParallel(None, rs.full(N), layout=layout), tokens()
        model: Any = prepare(small_model(name))
        given = {} if name == "cpmant" else {"attention_mask": torch.ones(B, N)}  # of the whole sequence

        def forward(ids: Tensor, model: Any = model, given: Any = given) -> tuple[Tensor, ...]:
            found = model(ids, output_hidden_states=True, use_cache=False, **given)
            return (*found.hidden_states, found.logits)

        whole = forward(ids, given={})
        wanted = torch.autograd.grad(whole[-1].square().sum(), list(model.parameters()), allow_unused=True)
        with cp:
            mine = checkpoint(forward, cp.shard(ids, dim=1), use_reentrant=False)
        mine[-1].square().sum().backward()
        cp.sum_gradients(model.parameters())
        pairs = [*zip(mine, (cp.shard(x, dim=1) for x in whole), strict=True)]
        pairs += [(p.grad, x) for p, x in zip(model.parameters(), wanted, strict=True) if x is not None]
        for x, expected in pairs:
            assert_close(x, expected, atol=1e-5 * max([1.0, *expected.abs().flatten().tolist()]))  # norms are in float32


def test_hidden_states_are_those_of_one_process(pools: Pools) -> None:
    pools(2).run(hidden_states)


def given_patches(rank: int) -> None:
    """Patches that the user gives: the same in all rows, which makes bands, in a checkpoint; and one without bytes."""
    from ringspan.integrations.transformers import prepare

    cp, ids = rs.ContextParallel(None, rs.causal(N), layout=rs.Layout([[(4, 7)], [(0, 4), (7, N)]])), tokens()
    weights = torch.randn(B, N, VOCABULARY, generator=torch.Generator().manual_seed(2)).double()
    for lengths, checkpointed in (([1, 1, 3, 8, 5, 11], True), ([1, 1, 3, 8, 0, 5, 11], False)):
        model: Any = small_model("blt")
        model.set_attn_implementation("eager")
        given = {"patch_lengths": torch.tensor([lengths]).expand(B, -1), "use_cache": False}

        def logits(ids: Tensor, positions: Tensor, model: Any = model, given: Any = given) -> Tensor:
            with Float64():
                return model(ids, position_ids=positions, **given).logits

        whole = logits(ids, torch.arange(N)[None])
        wanted = gradients(model, whole, weights)
        prepare(model)
        with cp:
            mine_ids, positions = cp.shard(ids, dim=1), cp.positions()[None]
            run = partial(checkpoint, logits, use_reentrant=False) if checkpointed else logits
            mine = run(mine_ids, positions)
        found = gradients(model, mine, cp.shard(weights, dim=1))
        cp.sum_gradients(model.parameters())
        assert found.keys() == wanted.keys()
        assert_close(mine, cp.shard(whole, dim=1), atol=TOLERANCE)
        for name, x in wanted.items():
            assert_close(found[name], x, atol=TOLERANCE * max(1.0, x.abs().max().item()), what=name)


def test_patches_of_the_user_are_those_of_one_process(pools: Pools) -> None:
    pools(2).run(given_patches)


def message(name: str, cp: rs.ContextParallel, *, training: bool = False, base: bool = False, **inputs: Any) -> str:
    from ringspan.integrations.transformers import prepare

    model: Any = prepare(small_model(name)).train(training)
    try:
        with cp:
            ids = inputs.pop("input_ids", None)
            ids = cp.shard(tokens(), dim=1) if ids is None else ids
            (model.model if base else model)(input_ids=ids, use_cache=False, **inputs)
    except rs.RingspanError as error:
        return str(error)
    return ""


def refused(rank: int) -> dict[str, str]:
    from transformers import DynamicCache

    cp, whole = (rs.ContextParallel(None, mask, layout="zigzag") for mask in (rs.causal(N), rs.full(N)))
    documents = rs.ContextParallel(None, rs.documents([9, 20]), layout="zigzag")
    window = rs.ContextParallel(None, rs.causal(N) & rs.window(left=7), layout="zigzag")
    long = rs.ContextParallel(None, rs.causal(63), layout="zigzag")
    counted = torch.arange(cp.plan.q_layout.counts[rank])[None]
    states = torch.zeros(B, 4, 32).double()
    cache = DynamicCache()
    cache.update(torch.zeros(B, 4, 1, 8).double(), torch.zeros(B, 4, 1, 8).double(), 0)
    return {
        "blt, documents": message("blt", documents, position_ids=documents.positions()[None]),
        "blt, window": message("blt", window, position_ids=window.positions()[None]),
        "blt, positions": message("blt", cp),
        "blt, counted positions": message("blt", cp, base=True, position_ids=counted),
        "blt, patches": message("blt", cp, position_ids=cp.positions()[None], patch_lengths=torch.tensor([[N]] * B)),
        "blt, states": message("blt", cp, position_ids=cp.positions()[None], output_hidden_states=True),
        "cpmant, causal": message("cpmant", cp),
        "cpmant, weights": message("cpmant", whole, output_attentions=True),
        "cpmant, cache": message("cpmant", whole, past_key_values=cache),
        "cpmant, tokens": message("cpmant", whole, input_ids=tokens()),
        "prophetnet, documents": message("prophetnet", documents),
        "prophetnet, dropout": message("prophetnet", cp, training=True),
        "prophetnet, weights": message("prophetnet", cp, output_attentions=True),
        "prophetnet, encoder": message("prophetnet", cp, encoder_hidden_states=states),
        "prophetnet, tokens": message("prophetnet", cp, input_ids=tokens()),
        "prophetnet, cache": message("prophetnet", cp, past_key_values=cache),
        "prophetnet, length": message("prophetnet", long, input_ids=torch.ones(B, long.plan.q_layout.counts[rank]).long()),
    }


REFUSED = {
    "blt, documents": "give rs.causal(length)",
    "blt, window": "give rs.causal(length)",
    "blt, positions": "position_ids=cp.positions()[None]",
    "blt, counted positions": "the position ids of this rank are 0, 1, 2",
    "blt, patches": "the sequence has 1 patches, fewer than the 2 ranks",
    "blt, states": "output_hidden_states",
    "cpmant, causal": "give ContextParallel rs.full(length)",
    "cpmant, weights": "output_attentions=False",
    "cpmant, cache": "continues a KV cache",
    "cpmant, tokens": "cp.shard",
    "prophetnet, documents": "give ContextParallel rs.causal(length)",
    "prophetnet, dropout": "an attention dropout of 0.1",
    "prophetnet, weights": "output_attentions=False",
    "prophetnet, encoder": "prophetnet has an encoder in this call",
    "prophetnet, tokens": "pass cp.shard(input_ids, dim=1)",
    "prophetnet, cache": "continues a KV cache",
    "prophetnet, length": "the sequence has 63 tokens, but max_position_embeddings=64 is enough for 62",
}


def test_what_is_not_exact_is_refused(pools: Pools) -> None:
    found = pools(2).run(refused)
    for case, said in REFUSED.items():
        assert any(said in x[case] for x in found), (case, found[0][case])
        assert all(x[case] for x in found), case
