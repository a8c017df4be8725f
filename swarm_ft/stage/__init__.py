"""The torch engine of one pipeline stage. Knows transformers and safetensors; no peers, no wire."""
