"""When ranks exchange, and what: one schedule per file, found by its name."""
