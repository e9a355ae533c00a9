"""Keeps one instance alive: starts its processes, restarts what dies, announces incarnations, answers for the whole."""
