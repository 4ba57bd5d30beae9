"""Requests, slots and the host loop around the compiled round."""
