"""The demo's three training runs: the sequence split over a group of processes, the same in one process without
ringspan, and split into chunks, each rank attending to its own keys only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ringspan as rs
from ringspan.cli.demo.config import ModelConfig
from ringspan.cli.demo.data import Pack
from ringspan.cli.demo.model import build
from ringspan.planner import bytes_moved
from ringspan.planner import plan as make_plan
from ringspan.plans.data import PHASES
from ringspan.testing.workers import send_message

# By how much --sabotage shifts the positions of a rank's tokens.
SHIFT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The inputs of a run. ``sabotage`` is what the last rank does wrong: ``"positions"`` or ``"gradient"``."""

    config: ModelConfig
    packs: tuple[Pack, ...]
    seed: int
    sabotage: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The work of a rank in all steps together. ``area`` counts the (query, key) pairs of one head of one layer."""

    losses: tuple[float, ...]
    tokens: int
    area: int
    sent: int
    received: int
    gather_received: int
    choices: tuple[str, ...]
    digest: str


def train_split(rank: int, training: Training) -> RankReport:
    """Train with ringspan. This is the job of one worker of the pool."""
    model = build(training.config, training.seed)
    optimiser = Adam(model.parameters())
    losses: list[float] = []
    plans: list[rs.Plan] = []
    group = rs.ContextParallel(None, rs.full(1)).group
    before = (group.traffic.sent, group.traffic.received)
    for n, pack in enumerate(training.packs):
        cp = rs.ContextParallel(group, rs.documents(pack.lengths))  # new documents, new mask, new plan
        tokens, labels, weights = cp.shard(*pack.tensors(), dim=1)
        breaks = training.sabotage if rank == cp.world - 1 else None
        with cp:
            logits = model(tokens, positions=cp.positions() + (SHIFT if breaks == "positions" else 0))
        loss = cp.mean(token_losses(logits, labels), weights)
        loss.backward()
        if breaks == "gradient":
            _halve_gradients(model)
        cp.sum_gradients(model.parameters())
        optimiser.step()
        losses.append(loss.item())
        plans.append(cp.plan)
        if rank == 0:
            send_message((n, losses[-1]))
    return RankReport(
        losses=tuple(losses),
        tokens=sum(plan.q_rows for plan in plans),
        area=sum(plan.area for plan in plans),
        sent=group.traffic.sent - before[0],
        received=group.traffic.received - before[1],
        gather_received=sum(_gather_received(plan, training.config) for plan in plans),
        choices=tuple(choice_of(plan) for plan in plans),
        digest=plans[-1].digest,
    )


def choice_of(plan: rs.Plan) -> str:
    """Return strategy and layout of a plan as text, without the arguments of the strategy."""
    return f"{plan.strategy.partition('(')[0]} on {plan.q_layout.name}"


def train_naively(rank: int, training: Training) -> tuple[float, ...]:
    """Train with the tokens cut into chunks, and attention over the keys of this rank only: the mistake that context
    parallelism exists to avoid. All else is right. This is a job of one worker of the pool."""
    model = build(training.config, training.seed, attention="sdpa")
    optimiser = Adam(model.parameters())
    losses: list[float] = []
    for pack in training.packs:
        cp = rs.ContextParallel(None, rs.documents(pack.lengths), layout="contiguous", strategy="ring")
        tokens, labels, weights = cp.shard(*pack.tensors(), dim=1)
        mine = cp.positions()
        with rs.local_attention():  # instead of `with cp:`; strict mode must not report the mistake
            logits = model(tokens, positions=mine, attn_mask=dense_mask(pack)[mine][:, mine])
        loss = cp.mean(token_losses(logits, labels), weights)
        loss.backward()
        cp.sum_gradients(model.parameters())
        optimiser.step()
        losses.append(loss.item())
        if rank == 0:
            send_message((len(losses) - 1, losses[-1]))
    return tuple(losses)


def train_alone(training: Training, on_step: Callable[[int, float], bool]) -> tuple[float, ...]:
    """Train in this process: plain attention through a dense mask. Ends early when ``on_step`` returns
    False."""
    model = build(training.config, training.seed, attention="sdpa")
    optimiser = Adam(model.parameters())
    losses: list[float] = []
    for n, pack in enumerate(training.packs):
        tokens, labels, weights = pack.tensors()
        logits = model(tokens, positions=torch.arange(tokens.shape[1]), attn_mask=dense_mask(pack))
        loss = (token_losses(logits, labels) * weights).sum() / weights.sum()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        if not on_step(n, losses[-1]):
            break
    return tuple(losses)


def dense_mask(pack: Pack) -> Tensor:
    """Return the mask (S, S), True where a query sees a key: same document, not later. Made without ringspan, to test
    it."""
    document = pack.document_of_token()
    return (document[:, None] == document[None, :]).tril()


def token_losses(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits_BSV.transpose(1, 2), labels_BS, reduction="none")


class Adam:
    """Plain Adam. torch.optim imports the compiler, which takes each process some seconds."""

    def __init__(self, parameters: Iterable[Tensor], *, rate: float = 2e-3, betas: tuple[float, float] = (0.9, 0.95)) -> None:
        self.parameters = tuple(parameters)
        self.rate, self.betas = rate, betas
        self.steps = 0
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        """Take one step along the gradients, which are then cleared."""
        self.steps += 1
        first, second = self.betas
        for p, (mean, square) in zip(self.parameters, self.moments, strict=True):
            assert p.grad is not None
            mean.lerp_(p.grad, 1 - first)
            square.lerp_(p.grad.square(), 1 - second)
            scale = (square / (1 - second**self.steps)).sqrt_().add_(1e-8)
            p.addcdiv_(mean, scale, value=-self.rate / (1 - first**self.steps))
            p.grad = None


def _gather_received(plan: rs.Plan, config: ModelConfig) -> int:
    """Return the bytes this rank would have received if every rank were sent all keys."""
    gather = make_plan(plan.mask, world=plan.world, rank=plan.rank, strategy="gather", layout=plan.q_layout)
    shape = rs.Shape(heads=config.heads, kv_heads=config.kv_heads, head_dim=config.head_dim, dtype="float32")
    return config.layers * sum(bytes_moved(gather, shape, phase)[1] for phase in PHASES)


def _halve_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= 0.5
