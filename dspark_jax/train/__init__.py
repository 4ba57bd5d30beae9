"""Training of drafts against a frozen target."""
