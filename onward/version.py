"""This release's number, where every process can read it without importing anything else."""

__version__ = "0.2.0"
