"""Configurations: the common one, and one file a family."""

from .base import FwzooConfig

__all__ = ["FwzooConfig"]
