"""Training: documents packed into rows, transformers' Trainer, and the byte baselines to stand beside."""
