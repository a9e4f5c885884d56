"""Models of torchtitan on two processes with the overrides of ringspan, against dense attention in one process, in
float64.

torchtitan is not among the dependencies of development: it installs 40 packages. ``make test-titan`` installs the eight
that these tests need in ``build/titan``, and runs them; CI does so.
"""

from __future__ import annotations

import inspect
import pkgutil
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.conftest import Pools

if find_spec("torchtitan") is None or find_spec("spmd_types") is None:
    pytest.skip("needs torchtitan 0.3: make test-titan", allow_module_level=True)

VOCABULARY, DIM, HEADS, N, B = 64, 32, 4, 29, 2
WINDOW = 6
TOLERANCE = 1e-10
MODULE = "ringspan.integrations.torchtitan"


def config(backend: str) -> Any:
    """A tiny Llama 3. ``backend`` is "flex", "varlen", "window" (varlen with a window) or "sdpa"."""
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention, VarlenAttention
    from torchtitan.models.llama3 import Llama3Model, _build_llama3_layers

    init = {"weight": nn.init.normal_, "bias": nn.init.zeros_}
    layers = _build_llama3_layers(
        n_layers=2,
        dim=DIM,
        n_heads=HEADS,
        n_kv_heads=2,
        hidden_dim=48,
        fuse_qkv=False,
        rope=ComplexRoPE.Config(dim=DIM // HEADS, max_seq_len=64, theta=10_000),
        attn_backend="flex" if backend == "flex" else "varlen",
    )
    for layer in layers:
        if backend == "sdpa":
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        if backend == "window":
            layer.attention.inner_attention = VarlenAttention.Config(window_size=(WINDOW, 0))
    return Llama3Model.Config(
        dim=DIM,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=DIM, param_init=init),
        norm=RMSNorm.Config(normalized_shape=DIM, param_init=init),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCABULARY, param_init=init),
        layers=layers,
    )


def build(model_config: Any) -> Any:
    torch.manual_seed(0)
    model = model_config.build()
    with torch.no_grad():
        for x in model.parameters():
            x.normal_(std=0.3)
    for module in model.modules():
        if hasattr(module, "init_states"):
            module.init_states(buffer_device=torch.device("cpu")) if not list(module.parameters()) else None
    return model.double()


class Dense(nn.Module):
    """Inner attention over the whole sequence, of a dense mask (B, N, N)."""

    def __init__(self, seen: Tensor) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, **_: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, self.seen[:, None], scale=scale, enable_gqa=True)
        return out.transpose(1, 2)


def positions(kind: str) -> Tensor:
    rows = {"one document": [[N], [N]], "documents": [[11, 3, 15], [11, 3, 15]], "rows": [[11, 3, 15], [20, 9]]}[kind]
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])


def dense_mask(positions_BN: Tensor, window: int | None) -> Tensor:
    ids = (positions_BN == 0).cumsum(1)
    q, k = torch.arange(N)[:, None], torch.arange(N)[None]
    seen = (ids[:, :, None] == ids[:, None, :]) & (k <= q)
    return seen if window is None else seen & (q - k <= window)


def masks_of_model(backend: str, positions_BN: Tensor) -> dict[str, Any]:
    """What ``Trainer.post_dataloading_process`` adds to the batch."""
    from torch.nn.attention.flex_attention import and_masks, create_block_mask
    from torchtitan.models.common import attention as titan

    if backend == "sdpa":
        return {}
    if backend != "flex":
        return {"attention_masks": titan.create_varlen_metadata_for_document(positions_BN)}
    mods = [titan.get_causal_mask_mod(), titan.get_efficient_causal_mask_mod_for_packed_document(positions_BN)]
    return {"attention_masks": create_block_mask(and_masks(*mods), B, None, N, N, device="cpu", BLOCK_SIZE=16)}


def compare(rank: int, backend: str, kind: str) -> dict[str, float]:
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.distributed import context_parallel
    from torchtitan.models.llama3 import parallelize

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    tokens = torch.randint(VOCABULARY, (B, N), generator=torch.Generator().manual_seed(1))
    weights = torch.randn(B, N, VOCABULARY, generator=torch.Generator().manual_seed(2)).double()
    positions_BN = positions(kind)

    alone = build(config(backend))
    for layer in alone.layers.values():
        layer.attention.inner_attention = Dense(dense_mask(positions_BN, WINDOW if backend == "window" else None))
    wanted = alone(tokens, positions_BN)
    (wanted * weights).sum().backward()

    model_config = config(backend)
    name = "varlen" if backend == "window" else backend
    replaced = apply_overrides(OverrideConfig(imports=[f"{MODULE}.{name}"]), model_config)
    assert len(replaced) == 2
    model = build(model_config)
    inner = [layer.attention.inner_attention for layer in model.layers.values()]
    parallelize.apply_cp_to_forward(inner, mesh)  # as parallelize_llama does
    given = {"positions": positions_BN, **masks_of_model(backend, positions_BN)}
    mine, my_weights, given = context_parallel.prepare_context_parallel_input(tokens, weights, given, mesh, torch.device("cpu"))
    logits = model(mine, given["positions"], given["attention_masks"])
    (logits * my_weights).sum().backward()
    found = {"tokens": 0.0 if mine.shape[1] < N else 1.0}
    found["logits"] = difference(logits, given["attention_masks"].block.shard(wanted, dim=1))
    for (key, x), y in zip(model.named_parameters(), alone.parameters(), strict=True):
        dist.all_reduce(x.grad)
        found[key] = difference(x.grad, y.grad)
    return found


def difference(found: Tensor, wanted: Tensor) -> float:
    worst = ((found - wanted).abs().max() / wanted.abs().max()).item()
    return worst if worst == worst else float("inf")


CASES = [("flex", "documents"), ("flex", "rows"), ("varlen", "documents"), ("varlen", "rows"), ("window", "rows")]


@pytest.mark.parametrize(("backend", "kind"), [*CASES, ("sdpa", "one document")])
def test_a_model_is_exact(backend: str, kind: str, pools: Pools) -> None:
    for found in pools(2).run(compare, backend, kind):
        wrong = {what: x for what, x in found.items() if not x <= TOLERANCE}
        assert not wrong


# What the integration relies on: function -> its parameters.
SIGNATURES = {
    "distributed.context_parallel.prepare_context_parallel_input": (
        "inputs labels extra_kwargs cp_mesh device load_balancer_type ptrr_mask_key"
    ),
    "distributed.context_parallel.apply_cp_to_forward": "attention_modules cp_mesh",
    "models.common.attention.FlexAttention.forward": (
        "self q_BLNH k_BLNH v_BLNH attention_masks score_mod scale enable_gqa out_transform kwargs"
    ),
    "models.common.attention.VarlenAttention.forward": "self q_BLNH k_BLNH v_BLNH attention_masks scale out_transform kwargs",
    "models.common.attention.ScaledDotProductAttention.forward": (
        "self q_BLNH k_BLNH v_BLNH attention_masks scale enable_gqa is_causal kwargs"
    ),
    "config.override.override": "target fqns description exact",
    "config.override.derive": "source target_cls deltas",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_torchtitan_has_the_functions_that_the_overrides_rely_on(name: str) -> None:
    found = pkgutil.resolve_name(f"torchtitan.{name}")
    parameters = list(inspect.signature(found).parameters)
    assert parameters == SIGNATURES[name].split(), (
        f"torchtitan.{name} has other parameters than in torchtitan 0.3.0: see whether ringspan.integrations.torchtitan "
        "still does what it did, and change this table"
    )


def sharding_and_refusals(rank: int) -> dict[str, Any]:
    """What the overrides do to a config with torchtitan's sharding, and what raises."""
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.decoder_sharding import set_gqa_inner_attention_local_map
    from torchtitan.models.llama3 import parallelize

    import ringspan as rs

    found: dict[str, Any] = {}
    model_config = config("flex")
    for layer in model_config.layers:
        set_gqa_inner_attention_local_map(layer.attention.inner_attention)
    apply_overrides(OverrideConfig(imports=[f"{MODULE}.flex"]), model_config)
    sharding = model_config.layers[0].attention.inner_attention.sharding_config
    found["gathers"] = sharding.in_dst_shardings != sharding.in_src_shardings
    found["gradients"] = tuple(sharding.local_map.in_grad_placements) == tuple(sharding.in_src_shardings.values())
    model = build(model_config)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    inner = [layer.attention.inner_attention for layer in model.layers.values()]
    parallelize.apply_cp_to_forward(inner, mesh)
    other = build(config("varlen")).layers["0"].attention.inner_attention
    calls = {
        "no mask of the plan": lambda: inner[0](*torch.randn(3, 1, 4, 2, 8), attention_masks=None),
        "another attention": lambda: parallelize.apply_cp_to_forward([other], mesh),
    }
    for case, call in calls.items():
        try:
            call()
        except rs.UnplannedAttention as error:
            found[case] = str(error)
    return found


def test_keys_are_not_gathered_and_what_is_not_sharded_raises(pools: Pools) -> None:
    for found in pools(2).run(sharding_and_refusals):
        assert not found["gathers"]
        assert found["gradients"]
        assert "its batch was not sharded" in found["no mask of the plan"]
        assert "no override of ringspan replaces: VarlenAttention" in found["another attention"]
