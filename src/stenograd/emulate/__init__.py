"""Emulated hosts with slow links on one machine, to try a training on before it is run on real ones."""
