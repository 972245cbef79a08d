"""Checkpoints: writing, listing, reading, converting. Without torch, except for the conversions.

| module | contents |
|---|---|
| `format` | layout of a rank's file; names of files and folders |
| `manifest` | the file whose existence makes a checkpoint exist |
| `schema` | what the documents may hold; validated where they are read |
| `writer` | writes one durable file for each rank, then the manifest |
| `reader` | a checkpoint as a `StateSource` of verified blocks; compares every byte |
| `catalogue` | lists a job's checkpoints, finds the newest usable one, removes old ones |
| `store`, `store_local`, `store_remote` | stores: by URL, on disks, in buckets |
| `errors` | store errors, damage, a state that does not fit the model |
| `export`, `export_model`, `imports` | files of other systems |
"""
