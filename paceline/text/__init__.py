"""Text: tokens from strings and strings from tokens, chat templates, stop strings. Imports no torch."""
