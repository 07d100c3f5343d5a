"""What test_lightning.py and lightning_training.py agree on; imports neither torch nor Lightning."""

WIDE = 32  # the network has two matrices, 32 x 64 and 64 x 32, and biases of 64 and 32
MATRICES = 2 * WIDE * 64
PARAMETERS = MATRICES + 64 + WIDE
METHODS = ["topk:ratio=0.05", "sign", "powersgd:rank=2", "local:every=4", "diloco:every=10", "gossip"]
SAVED = ["topk:ratio=0.05", "local:every=4", "diloco:every=10"]
