"""SINGA's MNIST example with MPI: mpiexec --hostfile host_file python mnist_dist.py [--data DIR].

Works under torchrun and srun as well, and alone.
"""

from __future__ import annotations

from train import options, train_mnist_cnn

if __name__ == "__main__":
    train_mnist_cnn(options(__doc__).parse_args())
