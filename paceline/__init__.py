"""Paceline serves large language models: many prompts in, one machine answering all of them token by token."""

__version__ = "0.1.0"
