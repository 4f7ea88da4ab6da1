"""The version of fwzoo: the one place it is written down; the build reads it from here."""

__version__ = "0.1.0"
