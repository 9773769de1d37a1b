"""The room that does: it carries plans out."""
