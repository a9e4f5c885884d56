"""``ringspan.best_on``: all candidates on a machine, with their costs."""

from __future__ import annotations

import warnings

from ringspan.costs.hardware import Hardware
from ringspan.costs.hardware import hardware as named_hardware
from ringspan.layouts import LayoutLike
from ringspan.masks import Mask
from ringspan.planner import auto
from ringspan.planner.choose import Choice, OnProgress
from ringspan.planner.plan_class import check_dkv_dtype
from ringspan.planner.plan_request import check_request
from ringspan.plans.data import DkvDtype
from ringspan.plans.shape import Shape, check_shape
from ringspan.strategies.protocol import Strategy


def best_on(
    mask: Mask,
    *,
    world: int,
    hardware: str | Hardware,
    shape: Shape | None = None,
    strategy: str | Strategy = "auto",
    layout: LayoutLike = "auto",
    kv_layout: LayoutLike | None = None,
    dkv_dtype: DkvDtype = "float32",
    on_progress: OnProgress | None = None,
    hear: OnProgress | None = None,
) -> Choice:
    """Return all candidates on a machine, with their costs, the best first. A layout or strategy other than ``"auto"``
    is fixed.

    The best candidate is the one that :func:`plan` takes for the same arguments. ``on_progress`` is called with the
    fraction of candidates that are decided and the name of the one that is planned next. ``hear`` is its deprecated
    name.
    """
    if hear is not None:
        warnings.warn("best_on(hear=...) is now best_on(on_progress=...)", DeprecationWarning, stacklevel=2)
        on_progress = on_progress or hear
    machine = named_hardware(hardware)
    request = check_request(mask, world, strategy=strategy, layout=layout, kv_layout=kv_layout, machine=machine)
    shape = None if shape is None else check_shape(shape)
    dkv_dtype = check_dkv_dtype(dkv_dtype)
    return auto.best(mask, world, request, machine=machine, shape=shape, dkv_dtype=dkv_dtype, on_progress=on_progress)
