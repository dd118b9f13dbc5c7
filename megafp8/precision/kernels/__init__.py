"""Plain C for CPUs, compiled on first use; every kernel has a bit-identical torch path."""
