"""The model: its specification (`spec`, `registry`), its weights (`weights`, `layout`, `gguf`, `fetch`), the decoder.

`spec`, `registry`, `layout` and `fetch` import no torch, so that reading a model's shape stays fast.
"""
