"""From fwzoo's form of a model to others: a self-contained Hub folder, a model card."""

from .export import bundle_sources, verify_bundle

__all__ = ["bundle_sources", "verify_bundle"]
