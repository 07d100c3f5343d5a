"""Checkpoints: files of all ranks, written and read together."""
