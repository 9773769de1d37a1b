"""Sampling: from logits to tokens, for all rows of a pass at once."""
