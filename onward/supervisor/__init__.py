"""Keeps an instance alive: starts its processes, restarts dead ones, announces incarnations and reports on the whole."""
