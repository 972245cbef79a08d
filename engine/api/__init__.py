"""What scripts call: DeepSpeed's everyday names, over the engine's parts.

| file | what it knows |
|---|---|
| `entry` | `initialize`: its arguments, and where the config comes from |
| `readings` | what an engine tells of itself |
| `saving` | an engine's checkpoints: saving, loading, whole models |
| `found` | which checkpoint a folder and a tag mean |
| `boundaries` | where a step ends, and how many samples it has |
| `absent` | DeepSpeed's names that are not here, and what to use instead |
| `owners`, `fragments` | one parameter's main weights, gradient, optimizer state |
| `gathered` | `zero.Init`, `zero.GatheredParameters` |
| `activations` | activation checkpointing |
"""
