"""Writes, lists, reads and converts checkpoints. Only the conversions import torch.

| module | contents |
|---|---|
| `format` | layout of a rank's file; names of files and folders |
| `manifest` | the file whose existence makes a checkpoint exist |
| `schema` | the allowed content of JSON documents; validated where they are read |
| `writer` | writes one durable file for each rank, then the manifest |
| `reader` | a checkpoint as a `StateSource` of verified blocks |
| `verify` | compares every byte with the checksums; marks damaged checkpoints |
| `catalogue` | lists a job's checkpoints, finds the newest usable one, removes old ones |
| `store`, `store_local`, `store_remote` | opens a store by its URL; stores on disks, in buckets |
| `errors` | errors of stores, of damaged checkpoints, of a state that does not fit the model |
| `export`, `export_model`, `imports` | write and read files of other systems |
"""
