"""The model server: bundles behind the Open Inference Protocol, by REST and by gRPC."""
