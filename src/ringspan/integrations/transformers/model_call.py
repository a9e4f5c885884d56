"""What a model was called with, read from the frames of its ``forward``.

A mask function and a layer see only what the model passes on to them, and many models keep the documents, the positions
and the labels of a call to themselves. A ``forward`` of a module of the user is none of a model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ringspan.errors import InputError, UnplannedAttention
from ringspan.integrations.transformers.refusals import counts_positions

MAX_FRAMES = 24  # between a mask function or a layer, and the forward of the outermost model


def positions_of_model() -> tuple[bool, Tensor | None]:
    """Return whether a model that makes a mask has a variable ``position_ids``, and its value.

    The value is None if the user passed none. Raises for a model that has none, and counts the tokens that it gets.
    """
    for variables, _ in _forwards():
        if "position_ids" in variables:
            return True, variables["position_ids"]
        model: PreTrainedModel = variables["self"]
        if counts_positions(model):
            raise UnplannedAttention(
                f"{model.config.model_type} counts the positions of its tokens, and takes no position_ids. It is not among the "
                "models that ringspan.integrations.transformers.prepare knows"
            )
    return False, None


def documents_of_call() -> Tensor | None:
    """Return ``cu_seq_lens_q`` of the model that is being called, None if it got none."""
    for variables, others in _forwards():
        found = variables.get("cu_seq_lens_q", others.get("cu_seq_lens_q"))
        if isinstance(found, Tensor):
            return found
    return None


def refuse_labels() -> None:
    """Raise if the model that is being called computes a loss from this rank's labels."""
    for variables, others in _forwards():
        given = {**others, **variables}
        if given.get("labels") is not None and given.get("shift_labels") is None:
            raise InputError(
                "labels= was passed to the model. It would shift them within the tokens of this rank, and return the loss of "
                "these alone: call it without labels, and compute cp.mean(F.cross_entropy(logits.mT, labels, "
                'reduction="none"), labels >= 0), with labels of cp.shard(rs.shift_labels(ids), dim=1)'
            )


def _forwards() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the variables of each ``forward`` of a model that the caller runs in, the innermost first, and its
    ``kwargs``."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        variables = frame.f_locals if frame.f_code.co_name == "forward" else {}
        if isinstance(variables.get("self"), PreTrainedModel):
            others = variables.get("kwargs")
            yield variables, others if isinstance(others, dict) else {}
        frame = frame.f_back
