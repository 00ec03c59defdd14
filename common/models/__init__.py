"""Identity of models and tokenizers: fingerprints and shard indexes. Loads no weights."""
