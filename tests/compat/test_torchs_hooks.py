"""The test cases of PyTorch's ``test/distributed/tensor/test_attention.py`` for the hooks of ``_ContextParallel``."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from ringspan.compat import _ContextParallel, style_hooks
from tests.compat.jobs import mesh_of_all, qkv
from tests.compat.test_torchs_cases import DIM, causal_mask
from tests.conftest import Pools

ARGUMENTS = {
    "all_positional": ("query", "key", "value"),
    "all_keyword": (),
    "query_positional_kv_keyword": ("query",),
    "qk_positional_v_keyword": ("query", "key"),
}


def flex_input_fn(rank: int, positional: tuple[str, ...], extra: bool) -> None:
    mesh, tensors = mesh_of_all(), dict(zip(("query", "key", "value"), qkv(16), strict=True))
    gathered = tensors["key"] * 2, tensors["value"] * 3
    expected = {"query": tensors["query"], "key": gathered[0], "value": gathered[1]}
    style = _ContextParallel(seq_dim=DIM, attention_type=_ContextParallel.AttentionType.FLEX)
    args = (*(tensors[name] for name in positional), *((causal_mask, None) if extra else ()))
    kwargs = {name: x for name, x in tensors.items() if name not in positional} | ({"enable_gqa": False} if extra else {})
    with patch.object(style_hooks, "flex_cp_allgather", return_value=gathered) as gather:
        got_args, got_kwargs = style.flex_input_fn(None, args, kwargs, mesh)
    gather.assert_called_once()
    assert len(got_args) == len(args)
    assert set(got_kwargs) == set(kwargs)
    for name, got in [*zip(positional, got_args, strict=False), *got_kwargs.items()]:
        assert torch.equal(got, expected[name]) if name in expected else got is False
    assert got_args[3:] == args[3:]
    # Without the patch: the keys and values of all ranks.
    (query, key, value), _ = style.flex_input_fn(None, tuple(tensors.values()), {}, mesh)
    assert query is tensors["query"]
    assert torch.equal(key, torch.cat([tensors["key"]] * mesh.size(), DIM))
    assert torch.equal(value, torch.cat([tensors["value"]] * mesh.size(), DIM))
    with pytest.raises(ValueError, match="value must be a tensor, not NoneType"):
        style.flex_input_fn(None, (query, key), {}, mesh)


def sdpa_input_fn(rank: int, positional: tuple[str, ...]) -> None:
    mesh, tensors = mesh_of_all(), dict(zip(("query", "key", "value"), qkv(16), strict=True))
    style = _ContextParallel(seq_dim=DIM, attention_type=_ContextParallel.AttentionType.SDPA)
    args = tuple(tensors[name] for name in positional)
    kwargs = {name: x for name, x in tensors.items() if name not in positional}
    got_args, got_kwargs = style.sdpa_input_fn(None, args, kwargs, mesh)
    assert len(got_args) == len(args)
    assert list(got_kwargs) == list(kwargs)
    for got, given in zip((*got_args, *got_kwargs.values()), (*args, *kwargs.values()), strict=True):
        assert isinstance(got, DTensor)
        assert tuple(got.placements) == (Shard(DIM),)
        assert torch.equal(got.to_local(), given)


@pytest.mark.parametrize("world", [2, 4])
class TestContextParallelStyle:
    def test_flex_input_fn_all_positional(self, pools: Pools, world: int) -> None:
        pools(world).run(flex_input_fn, ARGUMENTS["all_positional"], False)

    def test_flex_input_fn_all_keyword(self, pools: Pools, world: int) -> None:
        pools(world).run(flex_input_fn, ARGUMENTS["all_keyword"], False)

    def test_flex_input_fn_query_positional_kv_keyword(self, pools: Pools, world: int) -> None:
        pools(world).run(flex_input_fn, ARGUMENTS["query_positional_kv_keyword"], False)

    def test_flex_input_fn_qk_positional_v_keyword(self, pools: Pools, world: int) -> None:
        pools(world).run(flex_input_fn, ARGUMENTS["qk_positional_v_keyword"], False)

    def test_flex_input_fn_with_extra_args(self, pools: Pools, world: int) -> None:
        pools(world).run(flex_input_fn, ARGUMENTS["all_positional"], True)


@pytest.mark.parametrize("world", [2, 4])
class TestContextParallelStyleSDPA:
    def test_sdpa_input_fn_all_positional(self, pools: Pools, world: int) -> None:
        pools(world).run(sdpa_input_fn, ARGUMENTS["all_positional"])

    def test_sdpa_input_fn_all_keyword(self, pools: Pools, world: int) -> None:
        pools(world).run(sdpa_input_fn, ARGUMENTS["all_keyword"])

    def test_sdpa_input_fn_query_positional_kv_keyword(self, pools: Pools, world: int) -> None:
        pools(world).run(sdpa_input_fn, ARGUMENTS["query_positional_kv_keyword"])
