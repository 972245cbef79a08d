"""Training states in other systems' files, read as a `StateSource`. Nothing is unpickled.

| file | what it knows |
|---|---|
| `foreign` | which reader a path is for |
| `deepspeed` | DeepSpeed's ZeRO checkpoints: their files, their keys |
| `zero_layout` | where ZeRO's partitions hold which parameter: pure integers |
| `plain_pickle` | files of `torch.save`, read without running anything that is in them |
| `huggingface` | safetensors files, one or several with an index |
| `tensors` | a state that lies in tensors of any cut |
| `naming` | a file's names as those that the model's state has |
"""
