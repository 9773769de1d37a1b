"""A thousand strings that have broken tokenizers before, made the same way every time."""

from __future__ import annotations

import random

PIECES = [
    "The quick brown fox", " jumps", "don't", "I'LL", "we've", "naïve café",
    "Zürich", "straße", "ﬁne", "Ω≈ç√∫",
    "日本語のテキスト", "中文，标点。", "한국어 문장", "Привет мир", "مرحبا بالعالم", "שלום",
    "हिन्दी", "ไทย", "ქართული",
    "🎉", "👩‍👩‍👧‍👦", "🇫🇷🇩🇪", "👍🏽", "e\u0301", "\u200b", "\u200d", "\ufeff",
    "\u00a0", "\u3000", "\u2028",
    "\t", "\n", "\r\n", "\n\n\n", "  ", "    ", "         ", " \n ", "\t\t\t",
    "\x00", "\x7f", "\x1b[31m",
    "def f(x):\n    return x ** 2\n", "for (int i = 0; i < n; ++i) {",
    "a->b::c", "//", "/* */", "<div class='x'>",
    "{\"key\": [1, 2.5e-3, null]}", "$x_{i}^{2}$",
    "https://example.com/a?b=c&d=%20#e", "user@example.com",
    "0", "7", "42", "1234567890", "3.14159", "1,000,000", "２３", "²³¹", "½",
    "Ⅷ", "٣٤", "①", "0x1F", "v1.2.3",
    "!!!", "...", "…", "—", "“quoted”", "¿qué?", "---", "===", "#", "@", "~",
    "`code`", "\\n", "\\", "'", "''s",
    "AAAAAAAAAA", "aaaaaaaaaaaaaaaaaaaaaaaa", "antidisestablishmentarianism",
    "x" * 90, "\U0010ffff", "\ud7ff", "ÿ",
]  # fmt: skip


def strings(count: int = 1000) -> list[str]:
    rng = random.Random(20)
    found = ["", " ", *PIECES]
    while len(found) < count:
        joiner = rng.choice(["", "", " ", "  ", "\n"])
        found.append(joiner.join(rng.choices(PIECES, k=rng.randint(2, 8))))
    return found
