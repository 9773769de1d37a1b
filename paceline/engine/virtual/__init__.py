"""The virtual executor: charges a step-time model to a clock."""
