"""Checkpoints that all ranks write and read together."""
