"""Evaluation: what a model's memory can do."""
