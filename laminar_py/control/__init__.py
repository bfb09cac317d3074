"""Policies of the control plane."""
