"""The engine: executes plans. It moves no bytes itself; a transport drives it."""

from ringspan.engine.autograd import attend_ranks, attend_ranks_with_max_logits
from ringspan.engine.entry import attend, is_traced
from ringspan.engine.executor import AttentionConfig, backward, forward
from ringspan.engine.handles import PlanHandle, copy_id, registry
from ringspan.engine.inputs import DTYPES, shape_of
from ringspan.engine.kernel_choice import check_mask_sizes, check_score_mod_heads, config_for
from ringspan.engine.operator import attend_by_id, before_operator, is_exporting
from ringspan.engine.row_windows import RowWindow, window_plan, windows_of_ranks

__all__ = [
    "DTYPES",
    "AttentionConfig",
    "PlanHandle",
    "RowWindow",
    "attend",
    "attend_by_id",
    "attend_ranks",
    "attend_ranks_with_max_logits",
    "backward",
    "before_operator",
    "check_mask_sizes",
    "check_score_mod_heads",
    "config_for",
    "copy_id",
    "forward",
    "is_exporting",
    "is_traced",
    "registry",
    "shape_of",
    "window_plan",
    "windows_of_ranks",
]
