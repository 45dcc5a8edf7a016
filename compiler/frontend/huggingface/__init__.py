"""Models of Hugging Face's `transformers`: the settings by which torch exports them, their inputs and their outputs."""
