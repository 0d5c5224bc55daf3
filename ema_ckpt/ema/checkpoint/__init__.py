"""The average as a state dict: global tensors, gathering, replicas."""
