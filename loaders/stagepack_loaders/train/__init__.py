"""The stages of a bundle, trained by the schedules of torch.distributed.pipelining."""
