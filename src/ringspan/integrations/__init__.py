"""Adapters to other libraries. Each subpackage needs an optional dependency, and ``import ringspan``
imports none."""
