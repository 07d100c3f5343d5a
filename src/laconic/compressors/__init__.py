"""Every compressor, one module each; `laconic.registry` finds them here by itself."""
