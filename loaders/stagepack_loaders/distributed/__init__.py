"""Stages in processes of their own, which exchange tensors by torch.distributed."""
