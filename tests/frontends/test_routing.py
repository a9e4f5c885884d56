"""``cp.route``, and training on a whole batch of ``rs.pack``, against one process in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ringspan as rs
from ringspan.testing.assertions import assert_close
from tests.conftest import Pools

BATCHES, TOKENS_PER_RANK, VOCABULARY = 10, 32, 11


def document(batch: int, number: int, length: int) -> Tensor:
    """The tokens of a document. Any rank can load it."""
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(1000 * batch + number))


class Model(nn.Module):
    """Embedding with positions, one attention layer, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.where = nn.Embedding(VOCABULARY, 12), nn.Embedding(256, 12)
        self.qkv, self.head = nn.Linear(12, 36), nn.Linear(12, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens) + self.where(positions)
        q, k, v = (part.unflatten(-1, (2, 6)).transpose(0, 1)[None] for part in self.qkv(x).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits: Tensor = self.head(x + out[0].transpose(0, 1).flatten(1))
        return logits


def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def lengths_of(batch: int, world: int) -> list[int]:
    generator = torch.Generator().manual_seed(batch)
    lengths = torch.randint(0, 60, (6,), generator=generator).tolist()
    return [*lengths, world * TOKENS_PER_RANK if batch % 3 == 0 else 1]  # sometimes one as long as a microbatch


def train_packed(rank: int, world: int) -> list[tuple[float, dict[str, Tensor]]]:
    """On a worker: losses and gradients of all batches. Document i was loaded by rank 3·i mod world."""
    results = []
    for batch in range(BATCHES):
        net = model()
        lengths = lengths_of(batch, world)
        loaders = [3 * i % world for i in range(len(lengths))]
        counted = sum(max(n - 1, 0) for n in lengths)
        total = 0.0
        for part in rs.pack(lengths, world, tokens_per_rank=TOKENS_PER_RANK):
            cp = rs.ContextParallel(None, part.mask, layout=part.layout, strategy=part.plan.strategy)
            owners = [loaders[i] for i in part.documents]
            mine = [document(batch, i, lengths[i]) for i in part.documents if loaders[i] == rank]
            empty = torch.empty(0, dtype=torch.int64)
            tokens = cp.route([empty, *mine], documents=part.lengths, owners=owners)
            labels = cp.route([empty, *map(rs.shift_labels, mine)], documents=part.lengths, owners=owners)
            with cp:
                logits = net(tokens, cp.positions(documents=part.lengths))
            losses = F.cross_entropy(logits, labels, reduction="none")
            loss = cp.sum(losses) / counted
            loss.backward()
            total += float(loss.detach())
        cp.sum_gradients(net.parameters())
        results.append((total, {name: p.grad for name, p in net.named_parameters() if p.grad is not None}))
    return results


def train_alone(batch: int, world: int) -> tuple[float, dict[str, Tensor]]:
    """Each document by itself, in this process."""
    net = model()
    lengths = lengths_of(batch, world)
    counted = sum(max(n - 1, 0) for n in lengths)
    total = torch.zeros((), dtype=torch.float64)
    for i, n in enumerate(lengths):
        if n:
            tokens = document(batch, i, n)
            logits = net(tokens, torch.arange(n))
            total = total + F.cross_entropy(logits[:-1], tokens[1:], reduction="sum") / counted
    total.backward()
    return float(total.detach()), {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("world", [4])
def test_training_on_packed_batches_equals_one_process(pools: Pools, world: int) -> None:
    results = pools(world).run(train_packed, world)
    for batch in range(BATCHES):
        loss, gradients = train_alone(batch, world)
        for of_rank in results:
            found, found_gradients = of_rank[batch]
            assert found == pytest.approx(loss, rel=1e-12)
            assert found_gradients.keys() == gradients.keys()
            for name, gradient in gradients.items():
                assert_close(found_gradients[name], gradient, rtol=1e-12, atol=1e-13)


def routed(rank: int, layout: str) -> tuple[Tensor, Tensor]:
    """Documents of which rank 0 has loaded none; the result, and the gradient of what this rank has loaded."""
    lengths, owners = [4, 0, 9, 1, 6], [2, 0, 1, 1, 2]
    cp = rs.ContextParallel(None, rs.documents([4, 9, 1, 6]), layout=layout)
    whole = torch.arange(40.0, dtype=torch.float64).view(20, 2)
    parts = [part for part, owner in zip(whole.split(lengths), owners, strict=True) if owner == rank]
    mine = torch.cat([whole[:0], *parts]).requires_grad_()
    got = cp.route(mine, documents=lengths, owners=owners)
    assert torch.equal(got, cp.shard(whole, dim=0))
    (got * cp.shard(whole, dim=0)).sum().backward()
    assert mine.grad is not None
    return mine.detach(), mine.grad


@pytest.mark.parametrize("layout", ["contiguous", "striped", "balanced"])
def test_route_gives_each_rank_its_tokens_and_returns_gradients(pools: Pools, layout: str) -> None:
    for mine, gradient in pools(3).run(routed, layout):
        assert torch.equal(gradient, mine)


MISTAKES = {
    "too few": (torch.arange(3), [4], [0], "rank 0 owns documents of 4 tokens together, but loaded 3"),
    "nothing": ([], [4], [0], "loaded must be a tensor"),
    "a number": ([torch.tensor(3)], [4], [0], "loaded must be a tensor"),
    "owners": (torch.arange(4), [4], [0, 0], "owners must be one rank for each of the 1 documents"),
    "floats": (torch.arange(4), [4], [0.0], "owners must be one rank for each"),
    "no such rank": (torch.arange(4), [4], [1], "owners must be ranks 0 … 0"),
    "other documents": (torch.arange(3), [3], [0], "documents"),
    "unequal features": (
        [torch.ones(3, 2), torch.ones(1, 3)],
        [3, 1],
        [0, 0],
        r"one shape but for dim 0; got \[\(3, 2\), \(1, 3",
    ),
    "complex": (torch.ones(4, dtype=torch.complex64, requires_grad=True), [4], [0], r"view_as_real\(loaded\)"),
    "sparse": (torch.eye(4).to_sparse(), [4], [0], r"loaded has the layout torch.sparse_coo"),
    "too many parts": ([torch.ones(1), torch.ones(3)], [4], [0], r"number 0 has 1 tokens, but documents\[0\] has 4"),
}


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(("loaded", "documents", "owners", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named(loaded: Any, documents: list[int], owners: list[Any], message: str) -> None:
    cp = rs.ContextParallel(None, rs.documents([4]))
    with pytest.raises(rs.RingspanError, match=message):
        cp.route(loaded, documents=documents, owners=owners)


@pytest.mark.usefixtures("world_of_one")
def test_documents_in_the_order_of_loading_are_refused() -> None:
    """``rs.pack`` orders documents by length, and a loader does not."""
    loaded = [torch.tensor([10, 11, 12]), torch.tensor([20, 21, 22, 23, 24])]
    (part,) = rs.pack([3, 5], 1, tokens_per_rank=8)
    assert part.documents == (1, 0)
    cp = rs.ContextParallel(None, part.mask, layout=part.layout, strategy=part.plan.strategy)
    with pytest.raises(rs.InputError, match=r"number 0 has 3 tokens, but documents\[0\] has 5.*for i in part\.documents"):
        cp.route(loaded, documents=part.lengths, owners=[0, 0])
    ordered = [torch.empty(0, dtype=torch.int64), *(loaded[i] for i in part.documents)]
    for given in (ordered, torch.cat(ordered), [ordered[0], torch.cat(ordered)]):
        assert cp.route(given, documents=part.lengths, owners=[0, 0]).tolist() == [20, 21, 22, 23, 24, 10, 11, 12]
    with pytest.raises(rs.InputError, match=r"cp\.route\(documents=…\) has the documents of the mask .* in another order"):
        cp.route(loaded, documents=[3, 5], owners=[0, 0])


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("documents", [[2, 2, 4], [4, 0, 4], [8]])
def test_parts_of_documents_are_routed_too(documents: list[int]) -> None:
    cp = rs.ContextParallel(None, rs.documents([4, 4]))
    owners = torch.zeros(len(documents), dtype=torch.int64)
    assert cp.route(torch.arange(8), documents=documents, owners=owners).tolist() == list(range(8))  # type: ignore[arg-type]
