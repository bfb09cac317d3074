"""Environments: they answer the turns of a model, in processes of their own."""
