"""The dictionaries in which an ``nn.Module`` keeps its parameters, buffers and submodules, by attribute name.

Unlike ``getattr``, reading them runs no code of the module. Unlike ``named_parameters``, it does not descend into
submodules.
"""

from __future__ import annotations

from operator import attrgetter

MODULE_TABLES = ("_parameters", "_buffers", "_modules")

# module -> the three dictionaries
module_tables = attrgetter(*MODULE_TABLES)
