"""The mask functions of transformers, each as a mask over the whole sequence, against what transformers makes of it."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

if find_spec("transformers") is None:
    pytest.skip("needs transformers: pip install 'ringspan[hf]'", allow_module_level=True)

from transformers import masking_utils as hf

import ringspan as rs
from ringspan.integrations.transformers import packed_mask
from ringspan.integrations.transformers.mask_functions import Sequence, mask_of, padding_mask
from ringspan.integrations.transformers.packing import COUNTS_IN_DOCUMENTS, check_positions, packed_ids

N = 13
SAME = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, 0, 0, -1, -1, 2]])
ROWS = torch.cat([SAME, SAME.flip(1)])
NONE_PADDED = torch.zeros(1, dtype=torch.long)

# name -> a mask function, the number of bands of its mask (None: it needs a predicate)
FUNCTIONS: dict[str, tuple[Any, int | None]] = {
    "causal": (hf.causal_mask_function, 1),
    "bidirectional": (hf.bidirectional_mask_function, 1),
    "sliding": (hf.sliding_window_causal_mask_function(4), 1),
    "sliding both sides": (hf.sliding_window_bidirectional_mask_function(4), 1),
    "chunked": (hf.chunked_causal_mask_function(4, NONE_PADDED), 4),
    "blocks": (hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(SAME)), 5),
    "blocks in a window": (
        hf.and_masks(hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(SAME)), hf.sliding_window_overlay(3)),
        6,
    ),
    "blocks by row": (hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(ROWS)), None),
    "a function of the user": (hf.and_masks(hf.causal_mask_function, lambda b, h, q, k: q - k != 2), None),
}


def dense(function: Any, batch: int, **options: Any) -> np.ndarray[Any, Any]:
    made = hf.sdpa_mask(batch, N, N, mask_function=function, allow_is_causal_skip=False, use_vmap=False, **options)
    assert made is not None
    return made[:, 0].numpy()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_its_mask(name: str) -> None:
    function, bands = FUNCTIONS[name]
    mask = mask_of(function, Sequence(N, N))
    for b, wanted in enumerate(dense(function, 2 if name == "blocks by row" else 1)):
        assert (mask.dense(b=b) == wanted).all()
    if name != "a function of the user":
        assert (mask.predicate is None) == (bands is not None)
        assert bands is None or len(mask) <= bands


@pytest.mark.parametrize("padded", [[(0, 3), (0, 3)], [(0, 3), (0, 0)], [(0, 5), (9, 13)]], ids=str)
def test_padding_is_its_mask(padded: list[tuple[int, int]]) -> None:
    keep = torch.ones(2, N, dtype=torch.bool)
    for row, (start, stop) in enumerate(padded):
        keep[row, start:stop] = False
    sequence = Sequence(N, N, keep)
    left = (keep.cumsum(-1) == 0).sum(-1)
    function = hf.chunked_causal_mask_function(4, left)  # the chunks of a row start after its padding
    mask = mask_of(function, sequence) & padding_mask(keep, sequence)
    for b, wanted in enumerate(dense(function, 2, attention_mask=keep)):
        assert (mask.dense(b=b) == wanted).all()
    assert (mask.predicate is None) == (padded[0] == padded[1])


@pytest.mark.parametrize("lengths", [[[13]], [[5, 1, 7]], [[5, 1, 7], [5, 1, 7]], [[5, 8], [13]]], ids=str)
def test_packed_positions_are_their_documents(lengths: list[list[int]]) -> None:
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    mask = packed_mask(positions)
    for b, row in enumerate(lengths):
        assert (mask.dense(b=b) == rs.documents(row).dense()).all()


def test_zigzag_positions_look_like_packed_documents_to_transformers() -> None:
    positions = torch.tensor([[0, 1, 6, 7]])
    found = hf.find_packed_sequence_indices(positions)
    assert found is not None, "transformers no longer finds documents in gaps of position ids: see packing.py"
    function = hf.and_masks(hf.causal_mask_function, hf.packed_sequence_mask_function(found))
    assert packed_ids(function) is found
    assert mask_of(function, Sequence(N, N)) == rs.causal(N)  # the documents are those of the block


DOCUMENTS = [[5, 1, 7], [2, 11]]
PACKED = {
    "chunked": hf.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long)),
    "sliding": hf.sliding_window_causal_mask_function(4),
    "a function of the user": hf.and_masks(hf.causal_mask_function, lambda b, h, q, k: k // 3 == q // 3),
}


@pytest.mark.skipif(not COUNTS_IN_DOCUMENTS, reason="transformers counts tokens in documents since 5.23")
@pytest.mark.parametrize("rows", [[0, 0], [0, 1]], ids=["the same rows", "other rows"])
@pytest.mark.parametrize("name", PACKED)
def test_tokens_of_packed_documents_are_counted_in_their_documents(name: str, rows: list[int]) -> None:
    positions = torch.stack([torch.cat([torch.arange(n) for n in DOCUMENTS[row]]) for row in rows])
    function = hf.packed_sequence_compatibility_function(PACKED[name], positions, hf.find_packed_sequence_indices(positions))
    sequence = Sequence(N, N, gathered=lambda x: x, positions=positions)
    mask = mask_of(function, sequence) & packed_mask(positions)
    for b, wanted in enumerate(dense(function, 2)):
        assert (mask.dense(b=b) == wanted).all()
    # a rank whose tokens do not look packed makes the same mask
    assert (mask_of(PACKED[name], sequence) & packed_mask(positions)).digest == mask.digest
    assert (mask.predicate is None) == (rows == [0, 0])


def test_transformers_looks_for_documents_under_the_conditions_that_we_read() -> None:
    source = inspect.getsource(hf._preprocess_mask_arguments)
    condition = "if position_ids is not None and attention_mask is None and past_key_values is None:"
    assert condition in source, "transformers looks for packed documents in other calls: see positions_of_mask in packing.py"
    names = {"position_ids", "attention_mask", "past_key_values", "inputs_embeds"}
    for function in (hf.create_causal_mask, hf.create_sliding_window_causal_mask, hf.create_chunked_causal_mask):
        code = inspect.unwrap(function).__code__
        assert code.co_name.startswith("create_"), "positions_of_mask in packing.py looks for a frame of this name"
        assert names <= set(code.co_varnames + code.co_cellvars), f"{code.co_name} has other arguments: see packing.py"


def test_every_function_of_transformers_is_known() -> None:
    """If this fails, transformers has a new mask function, or has renamed one: add it to mask_functions.py."""
    from ringspan.integrations.transformers.mask_functions import _KNOWN

    made = {
        *(name for name in vars(hf) if name.endswith(("_mask_function", "_overlay"))),
        *("and_masks", "or_masks", "remap_positions_for_packed_sequence"),  # the last one since transformers 5.23
    }
    # composed of others; never seen by the mask interface; added by the mask interface itself
    composed = {
        *("sliding_window_causal_mask_function", "sliding_window_bidirectional_mask_function", "chunked_causal_mask_function"),
        *("add_offsets_to_mask_function", "padding_mask_function"),
    }
    assert made - composed == {name.partition(".")[0] for name in _KNOWN}


def test_a_function_with_tensors_of_unknown_tokens_is_refused() -> None:
    groups = torch.arange(N)
    with pytest.raises(rs.UnplannedAttention, match="depends on tensors"):
        mask_of(lambda b, h, q, k: groups[q] == groups[k], Sequence(N, N))


def test_blocks_of_one_rank_are_refused() -> None:
    with pytest.raises(rs.UnplannedAttention, match="Pass what marks them"):
        mask_of(hf.blockwise_overlay(SAME[:, :6]), Sequence(N, N))


def by_rows(*lengths: list[int]) -> rs.Mask:
    return packed_mask(torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths]))


# name -> position ids of tokens 7 to 12, the mask of the block, and whether the position ids are theirs
POSITIONS: dict[str, tuple[list[int], rs.Mask, bool]] = {
    "in the sequence": ([7, 8, 9, 10, 11, 12], rs.causal(N), True),
    "in the document": ([2, 3, 4, 5, 0, 1], rs.documents([5, 6, 2]), True),
    "in the sequence, for documents": ([7, 8, 9, 10, 11, 12], rs.documents([5, 6, 2]), True),
    "of this rank's tokens": ([0, 1, 2, 3, 4, 5], rs.causal(N), False),
    "in a document that starts with the rank": ([0, 1, 2, 3, 4, 5], rs.documents([7, 6]), True),
    "of this rank's tokens, in rows with their own documents": ([0, 1, 2, 3, 4, 5], by_rows([7, 6], [5, 8]), False),
    "of this rank's tokens, across a document": ([0, 1, 2, 3, 4, 5], by_rows([7, 6], [7, 3, 3]), False),
    "in a document that starts with the rank in each row": ([0, 1, 2, 3, 4, 5], by_rows([7, 6], [3, 4, 6]), True),
    "in rows with their own documents": ([0, 1, 2, 0, 1, 2], by_rows([7, 3, 3], [3, 4, 3, 3]), True),
    "in the sequence, in rows with their own documents": ([7, 8, 9, 10, 11, 12], by_rows([7, 6], [5, 8]), True),
    "in a document that the mask does not have": ([2, 3, 4, 5, 0, 1], rs.documents([5, 8]), False),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_are_those_of_the_tokens(name: str) -> None:
    given, mask, is_right = POSITIONS[name]
    arguments = torch.tensor([given]), np.arange(7, 13), mask, None
    if is_right:
        check_positions(*arguments)
    else:
        with pytest.raises(rs.UnplannedAttention, match="the position ids of this rank are"):
            check_positions(*arguments)


@pytest.mark.parametrize("tokens", [[16, 17, 18, 0, 1], [3, 4, 0, 1, 2], [5, 6, 7, 8, 9]])
def test_three_kinds_of_positions_that_count_the_tokens_of_a_rank_are_refused(tokens: list[int]) -> None:
    """As M-RoPE has them. The last token of a rank need not be its largest."""
    counted = torch.arange(5).expand(3, 1, 5)
    with pytest.raises(rs.UnplannedAttention, match="position_ids"):
        check_positions(counted, np.array(tokens), None, None)
    check_positions(counted, np.arange(5), None, None)
    check_positions(torch.tensor(tokens).expand(3, 1, 5), np.array(tokens), None, None)
