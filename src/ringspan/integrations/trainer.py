"""What ``Trainer`` reads from the output of a model, when each rank has a part of the tokens: the loss, and predictions.

* A model without ``num_items_in_batch`` returns the mean over the labels that it gets. Ranks can have different numbers
  of labels, so that the mean of their means is not the mean. :class:`SharedLoss` divides by the number on all ranks.
* A loss that is not computed from ``shift_labels`` would shift this rank's labels: it is refused.
* In an evaluation, all ranks of a sequence get the same loss, and the predictions of the whole sequence, if Trainer
  wants predictions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import PreTrainedModel

from ringspan.errors import InputError
from ringspan.frontends.context_parallel import ContextParallel
from ringspan.frontends.current_block import current_block

MAX_FRAMES = 16  # between a step of Trainer and the context that it enters
IGNORED = -100  # the label of a token that does not count
ROUNDS = Version(transformers.__version__) < Version("5.23")  # the number of labels that Trainer divides by cp_size
OTHER_OUTPUTS = {"loss", "aux_loss", "past_key_values"}  # not predictions


class SharedLoss:
    """The loss function of a model, whose mean is over the labels of all ranks of the current block.

    Losses of the ranks are averaged later, by DDP, FSDP or :func:`finish_output`. So a rank divides its sum by the
    number of labels of all ranks, divided by the number of ranks.
    """

    def __init__(self, loss_function: Callable[..., Tensor]) -> None:
        self.loss_function, self.was_used = loss_function, False

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        block, shift_labels = current_block(), kwargs.get("shift_labels")
        if block is not None and shift_labels is not None:
            self.was_used = True
            if kwargs.get("num_items_in_batch") is None:
                counted = block.sum((shift_labels != kwargs.get("ignore_index", IGNORED)).float())
                kwargs["num_items_in_batch"] = counted / block.world
        return self.loss_function(*args, **kwargs)


_losses: WeakKeyDictionary[nn.Module, SharedLoss] = WeakKeyDictionary()


class SharedLosses:
    """Replaces the loss functions of a model, and restores them.

    The base of a model with a head has no loss and is left alone: transformers warns when its loss is asked for.
    """

    def __init__(self, model: nn.Module) -> None:
        parts = [part for part in model.modules() if isinstance(part, PreTrainedModel) and _has_loss(part, model)]
        self._before = [(part, part.__dict__.get("_loss_function")) for part in parts]
        self._losses = []
        for part, before in self._before:
            # the same object in each step: torch.compile has guards on it
            loss = _losses.get(part)
            if loss is None or (before is not None and loss.loss_function is not before):
                loss = _losses[part] = SharedLoss(part.loss_function)
            loss.was_used = False
            self._losses.append(loss)
            part.loss_function = loss

    def restore(self) -> None:
        for part, before in self._before:
            if before is None:
                del part._loss_function
            else:
                part.loss_function = before

    def check(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Raise if the model has computed a loss in another way. A forward hook."""
        loss = output.get("loss") if isinstance(output, dict) else None
        is_trl = kwargs.get("fused_lm_head", False)  # the forward that TRL gives a model uses shift_labels
        if loss is not None and not is_trl and not any(x.was_used for x in self._losses):
            raise InputError(
                f"{type(model).__name__} does not give shift_labels to its loss function. It would shift the labels of this "
                "rank's tokens, which takes the label of another token. Compute the loss from the logits, outside Trainer"
            )


def _has_loss(part: PreTrainedModel, model: nn.Module) -> bool:
    if part is model or "_loss_function" in part.__dict__ or getattr(part, "loss_type", None) is not None:
        return True
    return part.base_model is not part  # GPT2LMHeadModel has a loss and no loss_type


class TrainerStep:
    """The step of Trainer that enters a context; without a Trainer, nothing is known of it."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.wants_predictions = False
        self.ignored: set[str] = set()
        frame: FrameType | None = sys._getframe(1)
        for _ in range(MAX_FRAMES):
            if frame is None:
                return
            if frame.f_code.co_name in ("prediction_step", "training_step") and hasattr(frame.f_locals.get("self"), "args"):
                self.trainer = frame.f_locals["self"]
                self.wants_predictions = not frame.f_locals.get("prediction_loss_only", True)
                self.ignored = set(frame.f_locals.get("ignore_keys") or ())
                return
            frame = frame.f_back

    def check(self) -> None:
        """Raise if Trainer divides the loss by a number of labels that was rounded, or adds noise for other lengths."""
        trainer = self.trainer
        if getattr(getattr(trainer, "args", None), "neftune_noise_alpha", None) is not None:
            raise InputError(
                "neftune_noise_alpha adds noise to the embeddings whose size depends on the number of tokens, and would count "
                "those of this rank: leave it out"
            )
        if trainer is None or not ROUNDS or getattr(trainer.args, "average_tokens_across_devices", True):
            return
        if getattr(trainer, "model_accepts_loss_kwargs", False):
            raise InputError(
                "average_tokens_across_devices=False divides the number of labels by cp_size, and transformers before 5.23 "
                "rounds it down: leave it on"
            )


def check_router_losses(model: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise if a model adds a loss of its router, which is not a mean over tokens."""
    asked = kwargs.get("output_router_logits")
    if asked or (asked is None and getattr(getattr(model, "config", None), "output_router_logits", False)):
        raise InputError(
            "output_router_logits adds a loss that balances experts, computed from this rank's tokens. It is not linear in "
            "them, so it differs from that of one process: set config.output_router_logits to False"
        )


def finish_output(cp: ContextParallel, step: TrainerStep, model: nn.Module, args: Any, output: Any) -> None:
    """Let all ranks have the same loss in an evaluation, and the predictions of the whole sequence. A forward hook."""
    if torch.is_grad_enabled():
        return
    if not isinstance(output, dict):
        raise InputError(f"{type(model).__name__} returned a {type(output).__name__}: evaluate it with return_dict=True")
    if isinstance(output.get("loss"), Tensor):
        output["loss"] = cp.mean(output["loss"])
    if not step.wants_predictions:
        return
    for name, x in output.items():
        if x is None or name in OTHER_OUTPUTS or name in step.ignored:
            continue
        if name != "logits":
            raise InputError(
                f"the model returns {name} of this rank's tokens, which Trainer would gather as predictions: evaluate with "
                f"ignore_keys=[{name!r}], or set prediction_loss_only=True"
            )
        output[name] = cp.unshard(x, dim=1)
