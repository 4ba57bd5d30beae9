"""Measuring a draft: the same prompts plainly and drafted, figures, and a picture."""
