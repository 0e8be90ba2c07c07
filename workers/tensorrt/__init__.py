"""TensorRT: plans, device memory and execution below the engine."""
