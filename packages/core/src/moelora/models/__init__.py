"""The base model: loading through transformers, the functions plugged into it, LoRA on its modules."""
