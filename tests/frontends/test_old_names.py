"""Every former name of the packages still works, and warns where it is now."""

from __future__ import annotations

import importlib
import warnings

import pytest

import ringspan as rs
import ringspan.plans
from ringspan.frontends.old_names import OLD_NAMES
from ringspan.planner import best_on

CASES = [(package, old, new) for package, names in OLD_NAMES.items() for old, new in names.items()]

# __all__ of the packages before costs, strategies and planner became packages
FORMER = {
    "ringspan.masks": "MAX_LENGTH Band Mask Settler block_mask causal chunked documents full mask_mod prefix window",
    "ringspan.layouts": """LAYOUTS Layout LayoutLike Pieces Span Tiles areas auto balance balanced check_world contiguous cut
        make_layout named_layout per_document round_robin striped zigzag""",
    "ringspan.plans": """HARDWARE STRATEGIES Candidate Choice Cost Exchange Gather Hardware Hierarchical Hybrid Link PassQ Plan
        Program Ring Scene Shape Slot Speed Step Strategy Task Transfer Ulysses best_on bytes_moved cost forget memory_bytes
        named_hardware needed_rows parse_strategy peak_bytes plan plan_rank register_strategy strategy_for_heads verify""",
    "ringspan.kernels": """KERNELS Accumulator Gradients Inputs Kernel MaskMod Mods Part Partial PlacedMods Saved ScoreMod Sum
        check_backend lacking merge mods_of pick reasons wide""",
    "ringspan.transports": """Hello InProcess Post ProcessGroup Traffic Wait Walk as_process_group compare digest_number
        tell_invalid""",
    "ringspan.engine": "DTYPES Call attend attend_by_ticket backward forward is_watched shape_of",
    "ringspan.frontends": """ContextParallel LocalWorld activate alibi alibi_slopes attention available current flex_attention
        local_attention relative_bias restore shift_labels softcap with_sinks""",
}


@pytest.mark.parametrize(("package", "old", "new"), CASES)
def test_an_old_name_is_the_new_one_and_warns(package: str, old: str, new: str) -> None:
    module, _, name = new.rpartition(".")
    with pytest.warns(DeprecationWarning, match=" is now ") as caught:
        found = getattr(importlib.import_module(package), old)
    assert found is getattr(importlib.import_module(module), name)
    assert [str(warning.message) for warning in caught] == [f"{package}.{old} is now {new}"]


@pytest.mark.parametrize("package", FORMER)
def test_all_former_names_of_a_package_exist(package: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        missing = [name for name in FORMER[package].split() if not hasattr(importlib.import_module(package), name)]
    assert missing == []


def test_every_old_name_is_a_former_one() -> None:
    assert [(package, old) for package, old, _ in CASES if old not in FORMER[package].split()] == []


@pytest.mark.parametrize("package", OLD_NAMES)
def test_an_unknown_name_raises(package: str) -> None:
    with pytest.raises(AttributeError, match=rf"module '{package}' has no attribute 'no_such'"):
        getattr(importlib.import_module(package), "no_such")  # noqa: B009


def test_old_functions_fit_the_heads_first() -> None:
    plan = rs.plan(rs.causal(16), world=2, strategy="ulysses")
    shape = rs.Shape(heads=6, kv_heads=2, head_dim=8)
    with pytest.warns(DeprecationWarning, match="memory_bytes is now"):
        assert ringspan.plans.memory_bytes(plan, shape, "forward") > 0


def test_forget_clears_the_caches() -> None:
    plan = rs.plan(rs.causal(16), world=4, strategy="ring", layout="zigzag")
    with pytest.warns(DeprecationWarning, match=r"ringspan\.clear_caches"):
        ringspan.plans.forget()
    assert rs.plan(rs.causal(16), world=4, strategy="ring", layout="zigzag") is not plan


def test_hear_is_the_old_name_of_on_progress() -> None:
    told: list[str] = []
    with pytest.warns(DeprecationWarning, match=r"best_on\(hear=...\) is now best_on\(on_progress=...\)"):
        best_on(rs.causal(64), world=2, hardware="h200x8", hear=lambda share, name: told.append(name))
    assert told
