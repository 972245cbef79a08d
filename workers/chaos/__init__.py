"""Fault injection: the fault language, and the injectors of workers, stores and nodes."""
