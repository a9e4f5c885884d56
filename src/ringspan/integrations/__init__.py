"""Adapters to other libraries. Each subpackage needs an optional dependency, and none is imported by ``import ringspan``."""
