"""Evaluation: what trained models can do, measured by commands that can be rerun."""
