"""What keeps replicas equal while they train: gradients, parameters, gossip, checks."""
