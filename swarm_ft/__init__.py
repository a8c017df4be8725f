"""swarm-ft: fine-tune a Hugging Face transformer across volunteers' machines."""

__version__ = "0.1.0"
