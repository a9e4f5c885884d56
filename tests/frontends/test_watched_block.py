"""``rs.strict()`` and the comparisons of ``RINGSPAN_DEBUG=1`` find mistakes that gave wrong results in silence."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ringspan as rs
from ringspan.debugging.settings import settings
from ringspan.frontends.treatments import treatments
from tests.conftest import Pools

N = 12
QKV = torch.randn(3, 1, 2, N, 8).unbind()


@pytest.fixture
def cp(world_of_one: None) -> rs.ContextParallel:
    return rs.ContextParallel(None, rs.causal(N), expect_attention=False)


@pytest.fixture(autouse=True)
def _strict_is_off_afterwards() -> Iterator[None]:
    before = settings.strict
    yield
    assert settings.strict == before


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As the eager attention of transformers."""
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.3
    scores = scores + torch.zeros(N, N)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = F.dropout(weights, p=0.0, training=True)
    return torch.matmul(weights, v)


ATTENTION_BY_HAND: dict[str, Callable[..., Tensor]] = {
    "eager": eager,
    "operators": lambda q, k, v: (q @ k.mT).softmax(-1) @ v,
    "module": lambda q, k, v: torch.nn.Softmax(-1)(q @ k.mT) @ v,
    "einsum": lambda q, k, v: torch.einsum("bhst,bhtd->bhsd", torch.einsum("bhsd,bhtd->bhst", q, k).softmax(-1), v),
    "bmm": lambda q, k, v: torch.bmm(torch.softmax(torch.bmm(q[0], k[0].mT), 2), v[0]),
    "masked": lambda q, k, v: (q @ k.mT).masked_fill(torch.ones(N, N).triu(1).bool(), -1e9).softmax(-1).mul(1.0) @ v,
}


def one_head_after_the_other(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = zip(q[0], k[0], v[0], strict=True)
    return torch.stack([torch.mm(torch.softmax(torch.mm(q, k.T), -1), v) for q, k, v in heads])


def by_exp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ v


ATTENTION_BY_HAND |= {
    "mm": one_head_after_the_other,
    "exp": by_exp,
    "log_softmax": lambda q, k, v: (q @ k.mT).log_softmax(-1).exp() @ v,
    "sigmoid": lambda q, k, v: torch.sigmoid(q @ k.mT) @ v,
    "special": lambda q, k, v: torch.special.softmax(q @ k.mT, -1) @ v,
    "view": lambda q, k, v: torch.bmm((q @ k.mT).softmax(-1).view(-1, N, N), v.view(-1, N, 8)),
    "index": lambda q, k, v: torch.stack([torch.mm((q @ k.mT).softmax(-1)[0, h], v[0, h]) for h in range(2)]),
    "transposed": lambda q, k, v: v.mT @ (q @ k.mT).softmax(-1).mT,
    "linear": lambda q, k, v: F.linear((q @ k.mT).softmax(-1)[0, 0], v[0, 0].mT),
    "tensordot": lambda q, k, v: torch.tensordot((q @ k.mT).softmax(-1), v[0, 0], dims=1),
    "operators of aten": lambda q, k, v: torch.ops.aten.bmm(torch.ops.aten._softmax(torch.bmm(q[0], k[0].mT), -1, False), v[0]),
}


@pytest.mark.parametrize("attend", ATTENTION_BY_HAND.values(), ids=ATTENTION_BY_HAND)
def test_attention_by_hand_is_found_beside_intercepted_calls(cp: rs.ContextParallel, attend: Callable[..., Tensor]) -> None:
    with cp:  # without strict it is not noticed
        F.scaled_dot_product_attention(*QKV)
        attend(*QKV)
    with rs.strict(), cp:
        F.scaled_dot_product_attention(*QKV)
        message = r'attention written as matmul and softmax.*set_attn_implementation\("ringspan"\)'
        with pytest.raises(rs.UnplannedAttention, match=message):
            attend(*QKV)
    with rs.strict(), cp, rs.local_attention():
        attend(*QKV)


def test_special_softmax_is_found_without_strict(cp: rs.ContextParallel) -> None:
    watching = rs.ContextParallel(None, rs.causal(N))
    with watching:
        F.scaled_dot_product_attention(*QKV)
    with pytest.raises(rs.UnplannedAttention, match=r'no attention was intercepted.*\("ringspan"\)'), watching:
        ATTENTION_BY_HAND["special"](*QKV)


# -- TorchScript ------------------------------------------------------------------------------------------------------


class Sdpa(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class ByHand(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.dim() > 3:  # a nested block in the graph
            weights = torch.softmax(torch.matmul(q, k.transpose(-1, -2)), -1)
            return torch.matmul(weights, v)
        return q


class Around(torch.nn.Module):
    """A module of TorchScript inside one of Python."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self.inner(q, k, v)
        return out


def saved_and_loaded(module: Any) -> Any:
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file)


SCRIPTS: dict[str, Callable[[], Any]] = {
    "trace": lambda: torch.jit.trace(Sdpa(), QKV),
    "trace of a function": lambda: torch.jit.trace(eager, QKV),
    "script": lambda: torch.jit.script(ByHand()),
    "script of a function": lambda: torch.jit.script(scripted_attention),
    "inside a module": lambda: Around(torch.jit.script(Sdpa())),
    "script inside a script": lambda: torch.jit.trace(Around(torch.jit.trace(Sdpa(), QKV)), QKV),
    "loaded": lambda: saved_and_loaded(torch.jit.trace(Sdpa(), QKV)),
    "frozen": lambda: torch.jit.freeze(torch.jit.script(Sdpa()).eval()),
}


def scripted_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.bmm(torch.softmax(torch.bmm(q[0], k[0].transpose(1, 2)), -1), v[0])


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
@pytest.mark.parametrize("make", SCRIPTS.values(), ids=SCRIPTS)
def test_attention_in_torchscript_is_refused_beside_intercepted_calls(cp: rs.ContextParallel, make: Callable[[], Any]) -> None:
    scripted = make()
    expected = scripted(*QKV)
    with cp:
        F.scaled_dot_product_attention(*QKV)
        for _ in range(2):  # the second time, what was found is cached
            with pytest.raises(rs.UnplannedAttention, match=r"TorchScript .* only the keys of this rank"):
                scripted(*QKV)
        with rs.local_attention():
            assert torch.equal(scripted(*QKV), expected)
    assert torch.equal(scripted(*QKV), expected)


class Router(torch.nn.Module):
    """A mixture of experts: its weights are matrices of parameters, as many experts as tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = torch.nn.Parameter(torch.randn(N, 8)), torch.nn.Parameter(torch.randn(N, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(torch.matmul(x, self.gate.t()), -1)
        results = torch.einsum("bhsd,ned->bhsne", [x, self.experts])
        return torch.matmul(weights.unsqueeze(-2), results).squeeze(-2)


@pytest.mark.filterwarnings("ignore")
def test_torchscript_without_attention_is_allowed(cp: rs.ContextParallel) -> None:
    scripted = [
        torch.jit.trace(torch.nn.Linear(8, 3), QKV[0]),
        torch.jit.trace(lambda x: (x @ x.mT).softmax(-1), QKV[0]),
        torch.jit.script(Router()),
        torch.jit.trace(Router(), QKV[0]),
        torch.jit.freeze(torch.jit.script(Router().eval())),
    ]
    with cp:
        for function in scripted:
            function(QKV[0])
    compiled = torch.compile(lambda x: scripted[0](x), backend="eager")
    with cp:
        assert torch.equal(compiled(QKV[0]), scripted[0](QKV[0]))


X = torch.randn(2, 6, N)
MIXING: dict[str, tuple[str, Callable[[], Any]]] = {
    "conv1d": (r"conv1d over the 12 tokens.*cp\.halo", lambda: F.conv1d(X, torch.randn(6, 6, 3), padding=1)),
    "Conv1d": (r"conv1d over the 12 tokens", lambda: torch.nn.Conv1d(6, 6, 4)(X)),
    "BatchNorm1d": (r"batch_norm .* mean and variance of this rank's 12 tokens", lambda: torch.nn.BatchNorm1d(6)(X)),
    "InstanceNorm1d": (r"instance_norm", lambda: torch.nn.InstanceNorm1d(6)(X)),
    "GroupNorm": (r"group_norm", lambda: torch.nn.GroupNorm(2, 6)(X)),
    "LayerNorm": (r"layer_norm over a dim of 12", lambda: torch.nn.LayerNorm(N)(X)),
    "LSTM": (r"lstm along a dim of 12", lambda: torch.nn.LSTM(6, 6, batch_first=True)(X.mT)),
    "GRU": (r"gru along a dim of 12", lambda: torch.nn.GRU(6, 6)(X.permute(2, 0, 1))),
    "cumsum": (r"cumsum along a dim of 12", lambda: X.cumsum(-1)),
    "roll": (r"roll along a dim of 12.*cp\.roll", lambda: X.roll(1, 2)),
    "roll by keyword": (r"roll along a dim of 12", lambda: torch.roll(X, shifts=(1,), dims=(2,))),
    "pad": (r"pad along a dim of 12.*cp\.roll", lambda: F.pad(X.mT, (0, 0, 1, 0))[:, :-1]),
    "pad by keyword": (r"pad along a dim of 12", lambda: F.pad(X, pad=[2, 0])),
    "ZeroPad2d": (r"pad along a dim of 12", lambda: torch.nn.ZeroPad2d((0, 0, -1, 1))(X.mT)),
    "mean": (r"mean along a dim of 12.*cp\.mean", lambda: X.mean(dim=-1, keepdim=True)),
    "pool": (r"avg_pool1d along a dim of 12", lambda: torch.nn.AvgPool1d(3)(X)),
    "max pool": (r"max_pool1d along a dim of 12", lambda: torch.nn.MaxPool1d(3)(X)),
    "cross_entropy": (
        r"model\(labels=\.\.\.\) shifts labels inside each shard",
        lambda: F.cross_entropy(torch.randn(N, 7), torch.randint(7, (N,))),
    ),
}


@pytest.mark.parametrize(("message", "call"), MIXING.values(), ids=MIXING)
def test_layers_that_mix_tokens_are_found(cp: rs.ContextParallel, message: str, call: Callable[[], Any]) -> None:
    with cp:
        call()
    with rs.strict(), cp, pytest.raises(rs.InputError, match=message):
        call()


def test_what_treats_every_token_alone_is_allowed(cp: rs.ContextParallel) -> None:
    x = torch.randn(2, N, 6)
    with rs.strict(), cp:
        torch.nn.LayerNorm(6)(x)
        torch.nn.RMSNorm(6)(x)
        x.mean(-1, keepdim=True) + x.roll(1, -1) + x.cumsum(2) + x.mean()
        torch.ones(2, N, dtype=torch.int64).cumsum(-1)  # transformers numbers documents like this
        F.conv1d(X, torch.randn(6, 6, 1))
        F.pad(F.pad(x, (1, 1)), (0, 0, 0, 4))  # features, and tokens at the end
        F.pad(x.long(), (0, 0, 1, 0))
        F.cross_entropy(torch.randn(1, 7, N), torch.randint(7, (1, N)), reduction="none")
        (x @ torch.randn(6, 5)).softmax(-1) @ torch.randn(5, 6)  # a router of a mixture of experts
        gate = torch.nn.Parameter(torch.randn(6, N))  # as many features as tokens
        torch.sigmoid(x @ gate) @ torch.randn(N, 6)
        F.scaled_dot_product_attention(*QKV)


def test_strict_costs_nothing_when_it_is_off(cp: rs.ContextParallel) -> None:
    with cp:
        torch.relu(X)
    assert treatments[torch.relu] is None
    with rs.strict(), cp:
        torch.relu(X)
        assert treatments[torch.relu] == "watched"
    with cp:
        torch.relu(X)
    assert treatments[torch.relu] is None


def test_strict_can_be_turned_on_and_off(cp: rs.ContextParallel) -> None:
    rs.strict()
    try:
        with cp, pytest.raises(rs.UnplannedAttention):
            eager(*QKV)
    finally:
        rs.strict(False)
    with cp:
        eager(*QKV)


def test_compiled_functions_run_in_strict_mode(cp: rs.ContextParallel) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x).relu(), backend="eager", fullgraph=True)
    with cp:
        expected = F.scaled_dot_product_attention(QKV[0], QKV[0], QKV[0]).relu()
    with rs.strict(), cp:
        assert torch.allclose(compiled(QKV[0]), expected)


# -- several ranks ----------------------------------------------------------------------------------------------------


def debugging(call: Callable[[], Any]) -> str:
    settings.debug = True
    try:
        call()
    except rs.RingspanError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        settings.debug = False
    return "no error"


def shard_and_attend(rank: int, seed: int) -> str:
    torch.manual_seed(seed)
    cp = rs.ContextParallel(None, rs.causal(N))
    tokens = torch.randint(100, (1, N))

    def step() -> None:
        cp.shard(tokens, torch.randn(1, N) + rank, dim=1)  # floating-point numbers are not compared
        with cp:
            F.scaled_dot_product_attention(*cp.shard(*torch.ones(3, 1, 1, N, 4), dim=2))

    return debugging(step)


def shard_other_tokens(rank: int) -> str:
    return shard_and_attend(rank, seed=rank)


def shard_the_same_tokens(rank: int) -> str:
    return shard_and_attend(rank, seed=3)


def sum_gradients(rank: int, same: bool) -> str:
    torch.manual_seed(0 if same else rank)
    layer = torch.nn.Linear(3, 3)
    layer(torch.ones(3)).sum().backward()
    cp = rs.ContextParallel(None, rs.causal(N), expect_attention=False)
    return debugging(lambda: cp.sum_gradients(layer.parameters()))


def unshard_with_another_cp(rank: int, debug: bool) -> str:
    cps = [rs.ContextParallel(None, rs.causal(N), layout=x, strategy="ring") for x in ("zigzag", "contiguous")]
    mine = cps[0].shard(torch.arange(N), dim=0)
    if debug:  # through a model, which makes new tensors; and another cp on each rank
        return debugging(lambda: cps[rank].unshard(mine + 0, dim=0))
    try:
        cps[1].unshard(mine, dim=0)
    except rs.InputError as error:
        return str(error)
    return "no error"


class Attend(torch.autograd.Function):
    """A function of a user, with the name of that of ringspan."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def unshard_what_a_model_computed(rank: int, case: str) -> str:
    zigzag, contiguous = (
        rs.ContextParallel(None, rs.causal(N), layout=x, strategy="ring", expect_attention=False)
        for x in ("zigzag", "contiguous")
    )
    unused = rs.ContextParallel(None, rs.causal(N), layout=[[(1, N // 2), (0, 1)], [(N // 2, N)]], strategy="ring")
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 24)
    x = zigzag.shard(torch.randn(1, N, 8), dim=1)

    def model() -> Tensor:
        q, k, v = layer(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).relu()

    def step() -> Tensor:
        with torch.set_grad_enabled(case != "no_grad"), zigzag:
            out = model()
        if case == "no_grad":
            return contiguous.unshard(out, dim=1)
        if case == "no_grad, after the block":  # nothing was sharded by this layout: RINGSPAN_DEBUG=1 knows
            return unused.unshard(out.detach() * 2, dim=1)
        if case == "no_grad, layout of another cp":
            return zigzag.with_mask(rs.full(N, N)).unshard(out.detach() * 2, dim=1)
        if case == "through unshard":  # a tensor that was gathered and sharded again has the layout of the second cp
            whole = zigzag.unshard(out, dim=1)
            return contiguous.unshard(contiguous.shard(whole, dim=1) * 2, dim=1)
        if case == "through mean":  # a number has no tokens
            return contiguous.unshard(contiguous.shard(torch.randn(1, N, 8), dim=1) * zigzag.mean(out), dim=1)
        if case == "another Attend":
            return contiguous.unshard(Attend.apply(contiguous.shard(torch.randn(1, N, 8).requires_grad_(), dim=1)), dim=1)
        if case == "same layout":
            return zigzag.with_mask(rs.full(N, N)).unshard(out * 2, dim=1)
        return contiguous.unshard(out * 2, dim=1)

    if not case.startswith("no_grad"):
        try:
            step()
        except rs.InputError as error:
            return str(error)
        return "no error"
    with rs.strict():
        return debugging(step)


CASES = {
    "grad": "computed from attention on another layout",
    "no_grad": "sharded by a ContextParallel with another layout",
    "no_grad, after the block": "nothing was sharded by this layout",
    **dict.fromkeys(["no_grad, layout of another cp", "through unshard", "through mean"], "no error"),
    **dict.fromkeys(["another Attend", "same layout"], "no error"),
}


@pytest.mark.parametrize("case", CASES)
def test_unshard_of_a_model_result_with_another_layout_is_refused(pools: Pools, case: str) -> None:
    for printed in pools(2).run(unshard_what_a_model_computed, case):
        assert CASES[case] in printed


def embed_tokens_of_another_layout(rank: int, case: str) -> str:
    zigzag, contiguous = (
        rs.ContextParallel(None, rs.causal(N), layout=x, strategy="ring", expect_attention=False)
        for x in ("zigzag", "contiguous")
    )
    embed, tokens = torch.nn.Embedding(9, 4), torch.randint(9, (1, N))
    try:
        if case == "embedding":
            with contiguous:
                embed(zigzag.shard(tokens, dim=1))
        elif case == "strict":
            with rs.strict(), contiguous:
                zigzag.shard(embed(tokens), dim=1).relu()
        elif case == "the innermost block has it":
            with contiguous, zigzag:
                embed(zigzag.shard(tokens, dim=1))
        elif case == "another length":
            other = rs.ContextParallel(None, rs.causal(N + 4), expect_attention=False)
            with contiguous:
                embed(other.shard(torch.randint(9, (1, N + 4)), dim=1))
        else:
            with contiguous.with_mask(rs.full(N)), rs.local_attention():
                embed(contiguous.shard(tokens, dim=1))
    except rs.InputError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("case", ["embedding", "strict", "the innermost block has it", "another length", "with_mask"])
def test_tokens_that_were_sharded_by_another_layout_are_refused(pools: Pools, case: str) -> None:
    for printed in pools(2).run(embed_tokens_of_another_layout, case):
        if case in ("embedding", "strict"):
            assert "another layout than that of the block" in printed
        else:
            assert printed == "no error"


def shift_labels_of_a_shard(rank: int) -> list[str]:
    cp = rs.ContextParallel(None, rs.causal(N))
    said = []
    for tokens in (torch.arange(N), cp.shard(torch.arange(N), dim=0)):
        try:
            rs.shift_labels(tokens)
            said.append("no error")
        except rs.InputError as error:
            said.append(str(error))
    return said


def test_labels_are_shifted_before_sharding(pools: Pools) -> None:
    for whole, shard in pools(2).run(shift_labels_of_a_shard):
        assert whole == "no error"
        assert "these tokens are sharded" in shard


def test_other_tokens_on_another_rank_are_found(pools: Pools) -> None:
    for printed in pools(2).run(shard_other_tokens):
        assert "PeerMismatch" in printed
        assert "the tokens or labels that were sharded differ between ranks 0 and 1" in printed
    assert pools(2).run(shard_the_same_tokens) == ["no error"] * 2


def test_other_parameters_on_another_rank_are_found(pools: Pools) -> None:
    for printed in pools(2).run(sum_gradients, False):
        assert "PeerMismatch" in printed
        assert "parameters differ between ranks 0 and 1" in printed
    assert pools(2).run(sum_gradients, True) == ["no error"] * 2


def test_unshard_with_another_layout_is_refused(pools: Pools) -> None:
    for printed in pools(2).run(unshard_with_another_cp, False):
        assert "sharded by a ContextParallel with another layout" in printed
    for printed in pools(2).run(unshard_with_another_cp, True):
        assert "call unshard with different layouts" in printed
