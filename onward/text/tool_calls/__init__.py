"""Calls of tools in a model's text: one module for each way that models write them, and a registry by name."""
