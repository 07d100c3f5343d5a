"""Methods by name: their text, and the compressors that they stand for."""
