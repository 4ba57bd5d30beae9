"""What the engine's programs would need on a TPU, from the TPU compiler and without a TPU."""
