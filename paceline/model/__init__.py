"""The model: what it is (`spec`, `registry`), its weights (`weights`, `gguf`, `fetch`) and the decoder.

`spec`, `registry` and `fetch` import no torch, so that asking for a model's shape stays quick.
"""
