"""The torch engine of one pipeline stage. Imports transformers and safetensors, but no network."""
