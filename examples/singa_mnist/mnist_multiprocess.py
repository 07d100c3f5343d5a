"""SINGA's MNIST example with Python's multiprocessing: python mnist_multiprocess.py 2 [--data DIR]."""

from __future__ import annotations

import multiprocessing
import sys

from train import options, train_mnist_cnn

from stenograd.singa import NcclIdHolder

if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("workers", nargs="?", type=int, help="number of processes")
    parser.add_argument("-w", "--world-size", type=int, default=2, help="the same")
    args = parser.parse_args()
    # Generate a token that the processes meet with
    nccl_id = NcclIdHolder()
    # Define the number of processes to be used in the training
    world_size = args.workers or args.world_size
    # Define and launch the multi-processing; CUDA does not survive a fork
    context = multiprocessing.get_context("spawn")
    process = []
    for local_rank in range(world_size):
        arguments = (args, nccl_id, local_rank, world_size)
        process.append(context.Process(target=train_mnist_cnn, args=arguments))
    for p in process:
        p.start()
    for p in process:
        p.join()
    sys.exit(max(p.exitcode != 0 for p in process))
