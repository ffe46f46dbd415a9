"""Checkpoints to and from plain optimizers, the official flashoptim's state, and Hugging Face safetensors."""

from flashoptim_dist.convert.api import Converted, convert
from flashoptim_dist.convert.hugging_face import export_hf, import_hf
from flashoptim_dist.convert.inspecting import Inspection, inspect
from flashoptim_dist.convert.verifying import Verification, verify

__all__ = ["Converted", "Inspection", "Verification", "convert", "export_hf", "import_hf", "inspect", "verify"]
