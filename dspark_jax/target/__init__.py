"""Target models: the frozen language models whose distribution is served."""
