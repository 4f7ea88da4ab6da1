"""Checkpoints from and to other layouts, one file a layout."""
