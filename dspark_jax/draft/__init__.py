"""Draft models: the small stacks that propose blocks of tokens."""
