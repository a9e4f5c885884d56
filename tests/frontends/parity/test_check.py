"""check_parity names the cause of each mistake, and finds nothing in models that are right."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import ringspan as rs
from tests.conftest import Pools
from tests.frontends.parity import broken
from tests.frontends.parity.broken import BROKEN, LENGTHS, VOCABULARY, Layer, N, WindowedLayer, intact


def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, N), generator=torch.Generator().manual_seed(3))


def context(layout: str, mask: rs.Mask | None = None) -> rs.ContextParallel:
    return rs.ContextParallel(None, rs.documents(LENGTHS) if mask is None else mask, layout=layout, strategy="ring")


def run_broken(rank: int, name: str) -> tuple[Any, str, str]:
    make, step, _ = BROKEN[name]
    torch.manual_seed(0)
    parity = rs.check_parity(make(), tokens(), context("zigzag"), step=step)
    return parity.cause, str(parity), parity.to_json()


@pytest.mark.parametrize("name", BROKEN)
def test_a_mistake_is_named(name: str, pools: Pools) -> None:
    (cause, text, data), *others = pools(2).run(run_broken, name)
    assert cause == BROKEN[name][2], text
    assert all(other[:2] == (cause, text) for other in others)
    assert "NOT equal to one process" in text
    assert "probable cause: " in text
    assert json.loads(data)["cause"] == cause


def run_shifted_labels(rank: int) -> list[Any]:
    torch.manual_seed(0)
    layouts = ("contiguous", "zigzag", "striped")
    return [rs.check_parity(intact(), tokens(), context(layout), step=broken.labels_of_the_shard).cause for layout in layouts]


def test_labels_that_were_shifted_after_sharding_are_named_on_any_layout(pools: Pools) -> None:
    """Only the last token of a contiguous shard has no label, and the loss is nearly right."""
    assert pools(2).run(run_shifted_labels) == [["labels"] * 3] * 2


def run_intact(rank: int) -> dict[str, tuple[bool, str]]:
    torch.manual_seed(0)
    cp = context("zigzag")
    found = {
        "plain": rs.check_parity(intact(), tokens(), context("contiguous", rs.causal(N)), step=broken.one_document),
        "documents": rs.check_parity(intact(), tokens(), cp, step=broken.right),
        "striped": rs.check_parity(intact(), tokens(), context("striped"), step=broken.right),
        "float32": rs.check_parity(intact(), tokens(), cp, step=broken.right, dtype=None),
        "without backward": rs.check_parity(intact(), tokens(), cp, step=broken.without_backward),
        "a layer with its own mask": rs.check_parity(
            broken.Model(Layer(broken.Attention()), WindowedLayer(cp)), tokens(), cp, step=broken.right
        ),
        "no step": rs.check_parity(intact(), {"tokens": tokens(), "positions": torch.arange(N)}, cp, dim=-1),
    }
    return {name: (bool(parity), str(parity)) for name, parity in found.items()}


def test_right_models_have_no_difference(pools: Pools) -> None:
    for of_rank in pools(2).run(run_intact):
        assert {name: text for name, (ok, text) in of_rank.items() if not ok} == {}
        assert "equal to one process: compared in float64" in of_rank["plain"][1]


def run_unequal(rank: int) -> list[tuple[Any, str]]:
    torch.manual_seed(rank)
    parameters = rs.check_parity(intact(), tokens(), context("zigzag"), step=broken.right)
    torch.manual_seed(0)
    inputs = rs.check_parity(intact(), tokens().roll(rank), context("zigzag"), step=broken.right)
    return [(parity.cause, parity.rows[0].name) for parity in (parameters, inputs)]


def test_parameters_or_inputs_that_differ_between_ranks_are_named(pools: Pools) -> None:
    for of_rank in pools(2).run(run_unequal):
        assert of_rank == [("ranks_differ", "embed.weight"), ("ranks_differ", "batch")]


def without_cp(model: broken.Model, batch: torch.Tensor, length: int = N) -> torch.Tensor:
    """The loss of one document under a causal mask, in plain PyTorch."""
    own = broken.Attention.attend
    broken.Attention.attend = lambda self, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # type: ignore[method-assign]
    try:
        logits = model(batch, torch.arange(length))
    finally:
        broken.Attention.attend = own  # type: ignore[method-assign]
    return F.cross_entropy(logits[:, :-1].mT, batch[:, 1:])


def run_without_cp(rank: int) -> list[tuple[Any, str, str]]:
    torch.manual_seed(0)
    found = []
    for mask in (rs.causal(N), rs.causal(N) & rs.window(left=4)):
        cp = context("zigzag", mask)
        parity = rs.check_parity(intact(), tokens(), cp, step=broken.one_document, without_cp=without_cp)
        found.append((parity.cause, parity.rows[0].stage, parity.rows[0].name))
    return found


def test_another_mask_than_that_of_the_model_is_named(pools: Pools) -> None:
    for of_rank in pools(2).run(run_without_cp):
        assert of_rank == [(None, "without cp", ""), ("other_mask", "without cp", "layers.0.attention.out")]


def run_with_backward(rank: int) -> tuple[Any, bool]:
    """``without_cp`` as it is copied from a training loop: it calls ``backward``. So the step's gradients, which are
    compared afterwards, must not be those of both."""
    torch.manual_seed(0)

    def other(model: broken.Model, batch: torch.Tensor) -> torch.Tensor:
        loss = without_cp(model, batch)
        loss.backward()
        return loss

    parity = rs.check_parity(intact(), tokens(), context("zigzag", rs.causal(N)), step=broken.one_document, without_cp=other)
    return parity.cause, parity.ok


def test_the_function_without_cp_may_call_backward(pools: Pools) -> None:
    assert pools(2).run(run_with_backward) == [(None, True)] * 2


def per_document(model: broken.Model, batch: torch.Tensor) -> torch.Tensor:
    """The loss of documents that the model is given one by one: the mean over documents, not over tokens."""
    means = [without_cp(model, document, len(document[0])) for document in batch.split(LENGTHS, dim=1)]
    return torch.stack(means).mean()


def run_calls_per_document(rank: int) -> tuple[Any, str]:
    torch.manual_seed(0)
    parity = rs.check_parity(intact(), tokens(), context("zigzag"), step=broken.right, without_cp=per_document)
    return parity.cause, " ".join(str(parity).split())


def test_modules_that_cannot_be_compared_are_not_said_to_be_equal(pools: Pools) -> None:
    for cause, text in pools(2).run(run_calls_per_document):
        assert cause == "other_calls"
        assert "without_cp calls them another number of times than step, or with tensors of other shapes" in text
        assert (
            f"embed, output: shape (2, {N}, {broken.WIDTH}) in step, shape (2, {LENGTHS[0]}, {broken.WIDTH}) in without_cp"
            in text
        )
        assert "same outputs" not in text


def run_other_functions(rank: int) -> dict[str, Any]:
    """``without_cp`` that computes something else than the step, and steps that cannot run in one process."""
    torch.manual_seed(0)
    model, cp = intact(), context("zigzag", rs.causal(N))

    def cause(other: Any) -> Any:
        return rs.check_parity(model, tokens(), cp, step=broken.one_document, without_cp=other).cause

    def raised(**given: Any) -> str:
        try:
            rs.check_parity(model, tokens(), cp, **{"step": broken.one_document, **given})
        except Exception as error:
            return " ".join([str(error), *getattr(error, "__notes__", [])])
        return ""

    def by_rank(model: Any, batch: torch.Tensor, cp: rs.ContextParallel) -> torch.Tensor:
        with cp:
            return model(batch.chunk(2, dim=1)[dist.get_rank()], torch.arange(N // 2)).square().mean()

    before = torch.random.get_rng_state()
    return {
        "loss": cause(lambda model, batch: 2 * without_cp(model, batch)),
        "inputs": cause(lambda model, batch: without_cp(model, batch.flip(1))),
        "no loss": raised(without_cp=lambda model, batch: model.embed(batch)),
        "by rank": raised(step=by_rank),
        "random state": torch.equal(before, torch.random.get_rng_state()),
    }


def test_other_losses_and_inputs_are_named_and_errors_say_what_to_do(pools: Pools) -> None:
    for found in pools(2).run(run_other_functions):
        assert found["loss"] == "other_loss"
        assert found["inputs"] == "other_inputs"
        assert (
            "without_cp(model, batch) must return the loss, a tensor with one element; got a tensor of shape"
            in found["no loss"]
        )
        assert "shard with cp.shard and ask cp.rank" in found["by rank"]
        assert found["random state"]


def run_details(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, cp = broken.Model(Layer(broken.Attention(), broken.Convolution())), context("zigzag")
    parity = rs.check_parity(model, tokens(), cp, step=broken.right)
    try:
        rs.check_parity(model, tokens(), cp, step=broken.right, check=True)
        raised = ""
    except rs.ParityError as error:
        raised = str(error)
    return {
        "first": (parity.rows[0].name, parity.rows[0].tensor),
        "raised": raised == str(parity),
        "untouched": next(model.parameters()).dtype == torch.float32 and all(p.grad is None for p in model.parameters()),
        "methods": (rs.ContextParallel.attention.__qualname__, "sum_gradients" in vars(rs.ContextParallel)),
    }


def test_the_first_module_is_named_and_the_model_is_left_as_it_was(pools: Pools) -> None:
    for of_rank in pools(2).run(run_details):
        assert of_rank == {
            "first": ("layers.0.mixer", "output"),
            "raised": True,
            "untouched": True,
            "methods": ("ContextParallel.attention", False),
        }


def run_other_context(rank: int) -> list[str]:
    torch.manual_seed(0)
    cp = context("zigzag")

    def with_a_global_one(model: Any, batch: Any, given: rs.ContextParallel) -> torch.Tensor:
        return broken.right(model, batch, cp)

    def with_its_own(model: Any, batch: Any, given: rs.ContextParallel) -> torch.Tensor:
        return broken.right(model, batch, context("zigzag"))

    errors = []
    for step in (with_a_global_one, with_its_own):
        with pytest.raises(rs.InputError) as error:
            rs.check_parity(intact(), tokens(), cp, step=step)
        errors.append(str(error.value))
    assert rs.check_parity(intact(), tokens(), cp, step=broken.right).ok  # the group is still usable
    return errors


def test_a_step_that_uses_another_context_is_refused(pools: Pools) -> None:
    """Both runs would be those of all ranks, and equal, whatever is wrong."""
    for errors in pools(2).run(run_other_context):
        assert all("uses another ContextParallel than the one that it is given" in text for text in errors)
