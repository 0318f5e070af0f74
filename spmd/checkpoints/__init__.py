"""Checkpoints: state by name, in any layout, written and read by torch.distributed.checkpoint as safetensors."""
