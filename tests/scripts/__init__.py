"""Programs as others write them for DeepSpeed, transformers, accelerate, TRL and PEFT.

The calls are those of public scripts, the code is ours and small: random models made from
configurations, text and images that Python packages ship. None names rayzero. On rank 0 each prints
its losses as the last line: `{"losses": [...]}`.
"""
