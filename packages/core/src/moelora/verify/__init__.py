"""A sample of the input scored twice: by the engine, and by transformers with PEFT or with merged weights."""
