"""What a model was called with, read from the frames of its ``forward``.

A mask function and a layer see only what the model passes on to them, and many models keep the documents, the positions
and the labels of a call to themselves. Only a ``forward`` of a PreTrainedModel is read.
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

# Arguments from which a model computes a loss by itself.
LABELS = ("labels", "start_positions", "end_positions", "next_sentence_label", "sentence_order_label", "mc_labels")
# Endings of the names of classes of models that compute a result of one token, or of the mean over all tokens.
POOLS = (
    *("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction", "DoubleHeadsModel"),
    *("BertForPreTraining", "AlbertForPreTraining", "BigBirdForPreTraining", "ErnieForPreTraining", "TextModelWithProjection"),
    *("SplinterForQuestionAnswering", "XLMForQuestionAnswering", "XLNetForQuestionAnswering"),
)

MAX_FRAMES = 24  # between a mask function or a layer, and the forward of the outermost model


def positions_of_model() -> tuple[bool, Tensor | None]:
    """Return whether a model that makes a mask has a variable ``position_ids``, and its value.

    The value is None if the user passed none. Raises for a model that has none, and counts the tokens that it gets.
    """
    for variables, _, _ in _forwards():
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
    for variables, others, _ in _forwards():
        found = variables.get("cu_seq_lens_q", others.get("cu_seq_lens_q"))
        if isinstance(found, Tensor):
            return found
    return None


def returns_weights() -> bool:
    """Return whether a model that is being called should return its attention weights.

    A model can collect them by hooks on its layers, which are not told.
    """
    return any({**others, **variables}.get("output_attentions") for variables, others, _ in _forwards())


def refuse_results_of_tokens_here() -> None:
    """Raise if the model that is being called computes a loss, or a result of all tokens, from this rank's alone."""
    for variables, others, written_in in _forwards():
        if not written_in.startswith("transformers"):  # a model of the user, who knows what it computes
            continue
        given = {**others, **variables}
        if given.get("shift_labels") is None and (names := [name for name in LABELS if given.get(name) is not None]):
            raise InputError(
                f"{names[0]}= was passed to the model. It would compute the loss of the tokens of this rank alone: call it "
                "without, and compute the loss of its logits. For a causal language model this is "
                'cp.mean(F.cross_entropy(logits.mT, labels, reduction="none"), labels >= 0), with labels of '
                "cp.shard(rs.shift_labels(ids), dim=1), or rs.shift_labels(ids, documents=lengths) for packed documents"
            )
        if written_in.endswith(POOLS):
            raise UnplannedAttention(
                f"{type(variables['self']).__name__} computes one result from all tokens, and would take those of this rank: "
                "call model.base_model, and compute the result from cp.unshard(hidden, dim=1) outside the block"
            )


def _forwards() -> Iterator[tuple[dict[str, Any], dict[str, Any], str]]:
    """Yield the variables of each ``forward`` of a model that the caller runs in, the innermost first, its ``kwargs``,
    and the class that the ``forward`` is written in, with its module: a subclass can have any name."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        variables = frame.f_locals if frame.f_code.co_name == "forward" else {}
        if isinstance(variables.get("self"), PreTrainedModel):
            others = variables.get("kwargs")
            written_in = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname.removesuffix('.forward')}"
            yield variables, others if isinstance(others, dict) else {}, written_in
        frame = frame.f_back
