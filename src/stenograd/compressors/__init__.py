"""Every compressor, one module each; `stenograd.catalog.registry` finds them here by itself."""
