"""Models of Hugging Face's `transformers`: the settings with which torch exports them, their inputs and their outputs."""
