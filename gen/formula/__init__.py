"""Formulas that users write for scores and masks, as text or as Python functions."""
