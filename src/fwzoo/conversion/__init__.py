"""From fwzoo's form of a model to others and back: the self-contained Hub folder, the card, other libraries' layouts."""

from .export import bundle_sources, verify_bundle
from .upcycle import freeze_copied, new_modules, upcycle

__all__ = ["bundle_sources", "freeze_copied", "new_modules", "upcycle", "verify_bundle"]
