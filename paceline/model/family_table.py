"""The table of supported families: `paceline models --families` prints it, and the docs contain it."""

from __future__ import annotations

from paceline.model.registry import FAMILIES

HEAD = ("family", "models", "architectures", "GGUF", "MoE", "LoRA", "GPU", "CPU")


def family_rows() -> list[tuple[str, ...]]:
    """One row per family, in the columns of `HEAD`. A test compares GPU with what the kernels accept."""

    def yes(value: bool) -> str:
        return "yes" if value else "no"

    return [
        (
            family.name,
            family.models,
            ", ".join(name for name in (family.architecture, family.multimodal) if name),
            family.gguf,
            yes(family.experts_key is not None),
            yes(family.lora),
            yes(family.gpu),
            "yes",
        )
        for family in FAMILIES
    ]
