"""Helpers of the Llama recipe, imported as `llama_support` because the recipe's own folder leads `sys.path`."""
