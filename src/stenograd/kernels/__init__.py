"""Hot primitives; `reference` holds each one in plain torch, for any device."""
