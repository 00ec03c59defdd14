"""The tokenizer and the chat template. Imports `common` alone."""
