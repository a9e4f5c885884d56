"""FlexAttention keeps NaN and infinities within their document: no bit of others changes, and no NaN is lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import ringspan as rs
from ringspan.kernels import flex
from ringspan.kernels.interval_containment import Intervals, NonfiniteRows
from ringspan.kernels.kernel import Saved
from tests.kernels.test_containment import documents_of
from tests.kernels.test_flex import N, backward, forward, indexed, inputs

# PyTorch's dense definition of FlexAttention spreads a NaN over all rows.
pytestmark = pytest.mark.usefixtures("dense_flex_attention")

MASKS = {
    "documents": rs.documents([30, 1, 70, 49]),
    "documents that see all of their keys": rs.documents([30, 1, 70, 49], causal=False),
    "documents with a window": rs.documents([30, 1, 70, 49]) & rs.window(left=7),
    "queries that see nothing": rs.documents([30, 1, 70, 49]) - rs.Mask.from_bands([(10, 60, 0, N, -N, N)], N),
    "interleaved documents": rs.documents(ids=(np.arange(N) % 3).tolist()),
}


def results(mask: rs.Mask, given: dict[str, Tensor]) -> dict[str, Tensor]:
    out, lse = forward(mask, given["q"], given["k"], given["v"])
    dlse = given["dlse"].masked_fill(lse == -torch.inf, 0.0)
    dq, dk, dv = backward(flex, mask, Saved(given["q"], given["dout"], out, lse, dlse), given["k"], given["v"])
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["q", "k", "v", "dout", "dlse"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_other_documents_keep_their_bits(mask: rs.Mask, where: str, poison: float) -> None:
    truth = mask.dense()
    of_q, of_k = documents_of(truth)
    q, k, v = inputs(mask)
    given = {"q": q, "k": k, "v": v, "dout": torch.randn(2, 4, N, 24, dtype=q.dtype), "dlse": torch.randn(2, 4, N).double()}
    clean = results(mask, given)
    for token in (0, 30, 64, N - 1):
        poisoned = given | {where: given[where].clone()}
        poisoned[where][1, 1, token] = poison
        found = results(mask, poisoned)
        document = (of_k if where in "kv" else of_q)[token]
        for name, of_row in {"out": of_q, "lse": of_q, "dq": of_q, "dk": of_k, "dv": of_k}.items():
            other = torch.from_numpy(of_row != document)
            assert torch.equal(found[name][:, :, other], clean[name][:, :, other]), f"{name} of another document has changed"
            assert torch.equal(found[name][0], clean[name][0]), f"{name} of another row of the batch has changed"
        if where in "kv":
            sees, heads = torch.from_numpy(truth[:, token]), slice(2, 4)  # two query heads share the key head
            assert found["out"][1, heads][:, sees].isnan().all()
        elif truth[token].any():
            seen = torch.from_numpy(truth[token])
            assert found["dq"][1, 1, token].isnan().all()
            assert found["dk"][1, 0, seen].isnan().all(), "a NaN is lost"


def test_gradients_of_captured_tensors_are_nan() -> None:
    """They are sums over all documents."""
    mask = MASKS["documents"]
    q, k, v = inputs(mask)
    slope = torch.ones(9, dtype=q.dtype, requires_grad=True)
    mods = indexed(lambda score, b, h, i, j: score * slope[h], None, mask)
    (part,) = flex.attend(q, k, v, mask.bands, scale=0.3, mods=mods)
    saved = Saved(q, torch.randn(2, 4, N, 24, dtype=q.dtype), *part.partial)
    (grads,) = flex.attend_backward(saved, k, v, mask.bands, scale=0.3, mods=mods)
    assert grads.dlearned[0].isfinite().all()
    saved.dout_BHSE[0, 0, 100] = torch.nan
    (grads,) = flex.attend_backward(saved, k, v, mask.bands, scale=0.3, mods=mods)
    assert grads.dlearned[0].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_largest_finite_values_are_no_infinities(dtype: torch.dtype) -> None:
    x = torch.full((1, 1, 3, 16), torch.finfo(dtype).max, dtype=dtype)
    x[0, 0, 1, 5], x[0, 0, 2, 5] = torch.inf, torch.nan
    intervals = Intervals(torch.zeros(3, dtype=torch.int64), torch.arange(1, 4))
    found = NonfiniteRows.of_inputs(x, x, x, intervals)
    assert found.queries_BHS.tolist() == found.keys_BGT.tolist() == [[[False, True, True]]]
    assert found.nan_queries.tolist() == [[[False, True, True]]]


def test_intervals() -> None:
    """Against every pair."""
    source = np.random.default_rng(0)
    for _ in range(20):
        queries, keys = source.integers(1, 9, 2)
        both = np.sort(source.integers(0, keys + 1, (2, queries)), axis=0)
        intervals = Intervals(*torch.from_numpy(both))
        sees = (both[0][:, None] <= np.arange(keys)) & (np.arange(keys) < both[1][:, None])
        some_keys, some_queries = source.random(keys) < 0.3, source.random(queries) < 0.3
        see_any = intervals.see_any(torch.from_numpy(some_keys)[None, None])
        seen = intervals.seen_by_any(torch.from_numpy(some_queries)[None, None], int(keys))
        assert see_any[0, 0].tolist() == (sees & some_keys).any(1).tolist()
        assert seen[0, 0].tolist() == (sees & some_queries[:, None]).any(0).tolist()
