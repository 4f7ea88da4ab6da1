"""Memories that sit in the feed-forward slot, one file each; the same interface as a mixer."""
