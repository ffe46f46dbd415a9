"""Checkpoints to and from plain optimizers, the official flashoptim's state, and Hugging Face safetensors."""

from flashoptim_dist.convert.api import Converted, convert

__all__ = ["Converted", "convert"]
