"""Runs real coding agents through a task that edits a file, against a server whose model gives fixed answers."""
