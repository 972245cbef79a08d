"""What a run would need, worked out before it: bytes by class, and which setting fits a GPU.

Nothing here trains, and nothing here allocates a model: parameters are fake, layouts are integers.
"""
