"""Stenograd's methods inside Hugging Face Accelerate: `stenograd.accelerate.use`, and its `LocalSGD`."""

try:
    from stenograd.accelerate.attachment import Attachment, use
    from stenograd.accelerate.local_sgd import LocalSGD
except ModuleNotFoundError as missing:
    if missing.name != "accelerate":
        raise
    raise ImportError(
        "stenograd.accelerate needs Accelerate: install it with `pip install stenograd[accelerate]`"
    ) from missing

__all__ = ["Attachment", "LocalSGD", "use"]
